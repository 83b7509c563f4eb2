"""`ShardSet`: the common part of the sharded store's classes. It opens the stores of all shards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from msgspec.structs import replace

from aiodelay.backends.redis.connection.options import Options
from aiodelay.backends.redis.connection.topology import Address
from aiodelay.backends.redis.records.shards import ONE_SHARD, ShardLayout, shard_of
from aiodelay.backends.redis.store.store import RedisStore
from aiodelay.errors import StoreMismatchError
from aiodelay.ports import StoreTraits
from aiodelay.ports.clock import Clock

from .calls import all_of, by_shard
from .following import Follower, Generation
from .intakes import ShardedIntakes
from .opening import chosen_layout

__all__ = ["ShardSet"]

log: logging.Logger = logging.getLogger("aiodelay.redis")

T = TypeVar("T")
R = TypeVar("R")
LEAST_CONNECTIONS = 2
MOST_FULL_SHARDS = 8
"""The most shards whose calls the commands of waiting callers fill. A process encodes all commands of a call in one go,
so more commands would delay everything else on its event loop."""


class ShardSet:
    """The stores of all shards of a namespace. A namespace of one shard has the store that it always had.

    Args:
        options: The options of the URL.
        namespace: The namespace of the messages.
        clock: The clock of the store. With None, the shards use their servers' TIME.
    """

    def __init__(self, options: Options, namespace: str, clock: Clock | None) -> None:
        self._options, self._namespace, self._clock = options, namespace, clock
        self.follower: Follower = Follower(options, namespace, self._opened)
        """The stores of the shards. It follows a move to another number of shards."""
        self._intakes = ShardedIntakes(lambda: self.shards)

    @property
    def name(self) -> str:
        """The name of the store in error messages: its URL without secrets."""
        return self._options.name

    @property
    def traits(self) -> StoreTraits:
        """The abilities and limits of this store."""
        traits = RedisStore.traits
        full = min(self._count, MOST_FULL_SHARDS)
        return replace(traits, commands_at_once=full * traits.commands_at_once) if full > 1 else traits

    @property
    def _count(self) -> int:
        """The number of shards; before the store opens, the number in the URL."""
        return len(self.shards) if self.follower.is_open else self._options.shards

    def now_ms(self) -> int:
        """Return the store's time in epoch ms: the time of the server of the first shard."""
        return self._first.now_ms()

    def _ahead_ms(self, shard: int) -> int:
        """Return how far the clock of a shard's server is ahead of the clock of the first shard's server."""
        return self.shards[shard].now_ms() - self.now_ms() if self._options.is_cluster else 0

    @property
    def _first(self) -> RedisStore:
        """The store of shard 0, which also holds the topics and logs of the namespace."""
        return self.shards[0]

    @property
    def shards(self) -> Sequence[RedisStore]:
        """The open store of each shard, in order.

        Raises:
            ClosedError: This store is not open.
        """
        return self.follower.present.shards

    # --- opening ------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        if self.follower.is_open:
            return
        await self.follower.open()
        if self._options.shards not in (0, len(self.shards)):
            log.warning(
                "%s: namespace %r has %d shards; the number in the URL counts only for a new namespace",
                *(self.name, self._namespace, len(self.shards)),
            )

    async def _opened(self) -> Generation:
        """Open the stores of the present layout. The layout may change meanwhile."""
        several = self._options.shards > 1
        layout = await chosen_layout(self._options, self._namespace) if several else ONE_SHARD
        while True:
            try:
                return await self._entered(layout)
            except StoreMismatchError as refusal:
                try:
                    found = await chosen_layout(self._options, self._namespace)
                except StoreMismatchError:
                    raise refusal from None
                if found == layout:
                    raise
                layout = found

    async def _entered(self, layout: ShardLayout) -> Generation:
        shards = [self._store(layout, shard) for shard in range(layout.shards)]
        servers: set[Address | None] = set()
        async with AsyncExitStack() as stack:
            for each in shards:
                each.checked_servers = servers
                await stack.enter_async_context(each)
            if layout.shards > 1 and self._options.is_cluster:
                await self._watch(stack, shards)
            return Generation(layout, shards, stack.pop_all())

    async def _watch(self, stack: AsyncExitStack, shards: Sequence[RedisStore]) -> None:
        """Notice the shards whose nodes are away, until the stack closes."""
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        for shard, each in enumerate(shards):
            task = tasks.create_task(each.watch(), name=f"aiodelay redis shard {shard}")
            stack.callback(task.cancel)

    def _store(self, layout: ShardLayout, shard: int) -> RedisStore:
        options = self._options
        if layout.shards > 1:
            own = max(LEAST_CONNECTIONS, options.connections // layout.shards)
            options = replace(options, connections=own)
        return RedisStore(options, namespace=layout.keys(self._namespace, shard), clock=self._clock)

    async def _close(self) -> None:
        await self.follower.aclose()

    # --- calls --------------------------------------------------------------------------------------------

    def _shard_of(self, message_id: str) -> RedisStore:
        """Return the store of the shard that stores a message."""
        shards = self.shards
        return shards[0] if len(shards) == 1 else shards[shard_of(message_id, len(shards))]

    async def _of_all(self, call: Callable[[RedisStore], Coroutine[Any, Any, R]]) -> list[R]:
        """Make a call to each shard, at the same time. Return the results in the order of the shards."""
        return await all_of([call(each) for each in self.shards])

    async def _by_shard(
        self,
        items: Sequence[T],
        id_of: Callable[[T], str],
        call: Callable[[RedisStore, Sequence[T]], Awaitable[Sequence[R]]],
    ) -> Sequence[R]:
        """Divide a batch by the shards of its ids. Return the results in the order of the batch."""
        shards = self.shards
        if len(shards) == 1:
            return await call(shards[0], items)
        return await by_shard(items, len(shards), id_of, lambda shard, part: call(shards[shard], part))
