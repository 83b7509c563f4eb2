"""`ShardSet`: the common part of the sharded store's classes. It opens the stores of all shards."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from msgspec.structs import replace

from aiodelay.backends.redis.connection.options import Options
from aiodelay.backends.redis.records.shards import ONE_SHARD, ShardLayout, shard_of
from aiodelay.backends.redis.store.store import RedisStore
from aiodelay.errors import ClosedError, StoreMismatchError
from aiodelay.ports import StoreTraits
from aiodelay.ports.clock import Clock

from .calls import all_of, by_shard
from .intakes import ShardedIntakes
from .opening import chosen_layout

__all__ = ["ShardSet"]

log: logging.Logger = logging.getLogger("aiodelay.redis")

T = TypeVar("T")
R = TypeVar("R")
LEAST_CONNECTIONS = 2


class ShardSet:
    """The stores of all shards of a namespace. A namespace of one shard has the store that it always had.

    Args:
        options: The options of the URL.
        namespace: The namespace of the messages.
        clock: The clock of the store. With None, the shards use their servers' TIME.
    """

    def __init__(self, options: Options, namespace: str, clock: Clock | None) -> None:
        self._options, self._namespace, self._clock = options, namespace, clock
        self._shards: list[RedisStore] = []
        self._intakes = ShardedIntakes(lambda: self.shards)
        self._stack = AsyncExitStack()

    @property
    def name(self) -> str:
        """The name of the store in error messages: its URL without secrets."""
        return self._options.name

    @property
    def traits(self) -> StoreTraits:
        """The abilities and limits of this store."""
        return RedisStore.traits

    @property
    def _count(self) -> int:
        """The number of shards; before the store opens, the number in the URL."""
        return len(self._shards) or self._options.shards

    def now_ms(self) -> int:
        """Return the store's time in epoch ms: the time of the server of the first shard."""
        return self._first.now_ms()

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
        if not self._shards:
            raise ClosedError("store", "not open")
        return self._shards

    # --- opening ------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        if self._shards:
            return
        async with AsyncExitStack() as stack:
            shards = await self._entered(stack)
            self._stack = stack.pop_all()
        self._shards = shards

    async def _entered(self, stack: AsyncExitStack) -> list[RedisStore]:
        if self._options.shards <= 1:
            try:
                return [await stack.enter_async_context(self._store(ONE_SHARD, 0))]
            except StoreMismatchError as refusal:
                try:
                    layout = await chosen_layout(self._options, self._namespace)
                except StoreMismatchError:
                    raise refusal from None
                if layout == ONE_SHARD:
                    raise
        else:
            layout = await chosen_layout(self._options, self._namespace)
        if self._options.shards not in (0, layout.shards):
            log.warning(
                "%s: namespace %r has %d shards; the number in the URL counts only for a new namespace",
                *(self.name, self._namespace, layout.shards),
            )
        shards = [self._store(layout, shard) for shard in range(layout.shards)]
        for each in shards:
            await stack.enter_async_context(each)
        return shards

    def _store(self, layout: ShardLayout, shard: int) -> RedisStore:
        options = self._options
        if layout.shards > 1:
            own = max(LEAST_CONNECTIONS, options.connections // layout.shards)
            options = replace(options, connections=own)
        return RedisStore(options, namespace=layout.keys(self._namespace, shard), clock=self._clock)

    async def _close(self) -> None:
        self._shards = []
        stack, self._stack = self._stack, AsyncExitStack()
        await stack.aclose()

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
