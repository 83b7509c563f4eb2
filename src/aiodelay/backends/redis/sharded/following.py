"""`Follower`: keeps the stores of a namespace's shards open, and follows a move to another number of shards.

While `aiodelay reshard` moves the messages, every script is refused. A refused call waits for the new layout, for as
long as the call may take. The first of these calls then opens the stores of the new shards, and all go on with them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from aiodelay.backends.redis.connection.options import Options
from aiodelay.backends.redis.records.shards import MOVED, ShardLayout
from aiodelay.backends.redis.store.store import RedisStore
from aiodelay.errors import ClosedError, StoreDamagedError, StoreError, StoreUnavailableError

from .opening import found_layout

__all__ = ["Follower", "Follows", "Generation", "following"]

log: logging.Logger = logging.getLogger("aiodelay.redis")

P = ParamSpec("P")
R = TypeVar("R")
LOOK_S = 0.2
"""The time between two looks for the new layout, in seconds."""


class Generation:
    """The open stores of the shards under one layout. `async with` keeps them open.

    Args:
        layout: The layout.
        shards: The open store of each shard, in order.
        stack: Closes the stores.

    Attributes:
        over: Set when other stores have taken the place of these.
    """

    def __init__(self, layout: ShardLayout, shards: Sequence[RedisStore], stack: AsyncExitStack) -> None:
        self.layout: ShardLayout = layout
        self.shards: Sequence[RedisStore] = shards
        self.over: asyncio.Event = asyncio.Event()
        self._stack, self._users = stack, 0
        self._on_over: list[Callable[[], object]] = []

    @property
    def is_stale(self) -> bool:
        """Whether a shard has refused a call, because the namespace has another layout."""
        return self.over.is_set() or any(each.is_stale for each in self.shards)

    async def __aenter__(self) -> Self:
        """Keep the stores open inside a block. The answer to a call may arrive after the move."""
        self._users += 1
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._users -= 1
        if self.over.is_set():
            await self._close_unused()

    def when_over(self, wake: Callable[[], object]) -> None:
        """Call a function when other stores have taken the place of these."""
        self._on_over.append(wake)

    async def retire(self) -> None:
        """Note that other stores have taken the place of these. Close them once nobody uses them."""
        self.over.set()
        for wake in self._on_over:
            wake()
        await self._close_unused()

    async def _close_unused(self) -> None:
        if not self._users:
            await self.aclose()

    async def aclose(self) -> None:
        """Close the stores. A second call does nothing."""
        stack, self._stack = self._stack, AsyncExitStack()
        await stack.aclose()


class Follower:
    """Has the stores of the present layout.

    Args:
        options: The options of the URL.
        namespace: The namespace.
        opened: Opens the stores of the present layout.
    """

    def __init__(self, options: Options, namespace: str, opened: Callable[[], Awaitable[Generation]]) -> None:
        self._options, self._namespace, self._opened = options, namespace, opened
        self._present: Generation | None = None
        self._former: list[Generation] = []
        self._turn = asyncio.Lock()
        self.wait_s: float = options.timeout_ms / 1000
        """The longest wait of a call for the end of a move, in seconds."""

    @property
    def is_open(self) -> bool:
        """Whether the stores are open."""
        return self._present is not None

    @property
    def present(self) -> Generation:
        """The stores of the present layout.

        Raises:
            ClosedError: The store is not open.
        """
        if self._present is None:
            raise ClosedError("store", "not open")
        return self._present

    async def open(self) -> None:
        """Open the stores."""
        self._turn = asyncio.Lock()
        self._present = await self._opened()

    async def aclose(self) -> None:
        """Close all stores."""
        present, self._present = self._present, None
        former, self._former = self._former, []
        for each in (*former, *([] if present is None else [present])):
            await each.aclose()

    async def follow(self, call: Callable[[Generation], Awaitable[R]], *, is_checked: bool = True) -> R:
        """Make a call. If the namespace has moved, make it again on the new shards.

        Args:
            call: The call. A repetition must be safe.
            is_checked: Whether scripts make the call, which compare the layout. If plain commands do, the layout is
                compared after the call.

        Raises:
            StoreUnavailableError: The messages are still being moved after `wait_s`.
        """
        until_s = asyncio.get_running_loop().time() + self.wait_s
        while True:
            former = self.present
            try:
                async with former:
                    result = await call(former)
                    if is_checked or await self._is_current(former):
                        return result
            except StoreDamagedError:
                if await self._is_current(former):
                    raise
            except StoreError:
                if not former.is_stale:
                    raise
            await self.take_over(former, until_s)

    async def _is_current(self, generation: Generation) -> bool:
        async with generation:
            first = generation.shards[0]
            schema = await first.command("HGET", first.keys.key("meta"), "schema")
        return schema in (None, generation.layout.schema.encode())

    async def take_over(self, former: Generation, until_s: float) -> None:
        """Wait until the messages are moved, and open the stores of the new shards. Only one caller does so.

        Args:
            former: The stores that have refused a call.
            until_s: The end of the wait, in the time of the event loop.

        Raises:
            StoreUnavailableError: The messages are still being moved then, or a server does not answer.
        """
        try:
            async with asyncio.timeout_at(until_s) as limit, self._turn:
                if self._present is not former:
                    return
                if former not in self._former:
                    self._former.append(former)
                    log.warning("%s: namespace %r %s; waiting for its end", self._options.name, self._namespace, MOVED)
                await self._wait_for_layout()
                limit.reschedule(None)
                await self._replace(former)
        except TimeoutError:
            reason = f"namespace {self._namespace!r} {MOVED}; if it was stopped, run it again"
            raise StoreUnavailableError(self._options.name, reason) from None

    async def _wait_for_layout(self) -> None:
        while True:
            try:
                await found_layout(self._options, self._namespace)
            except StoreUnavailableError:
                await asyncio.sleep(LOOK_S)
            else:
                return

    async def _replace(self, former: Generation) -> None:
        following = await self._opened()
        if self._present is not former:  # The store was closed meanwhile.
            await following.aclose()
            return
        self._present = following
        self._former.remove(former)
        shards = f"{len(following.shards)} shards" if len(following.shards) > 1 else "1 shard"
        log.warning("%s: namespace %r has %s now; going on", self._options.name, self._namespace, shards)
        await former.retire()


class Follows(Protocol):
    """An object whose methods make calls to the shards of a `Follower`."""

    @property
    def follower(self) -> Follower:
        """The shards."""
        ...


S = TypeVar("S", bound=Follows)
Method = Callable[Concatenate[S, P], Coroutine[Any, Any, R]]


def following(*, is_checked: bool = True) -> Callable[[Method[S, P, R]], Method[S, P, R]]:
    """Return a decorator for methods of a `ShardSet`: if the namespace has moved, the method runs again."""

    def decorated(method: Method[S, P, R]) -> Method[S, P, R]:
        @wraps(method)
        async def followed(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return await self.follower.follow(lambda _: method(self, *args, **kwargs), is_checked=is_checked)

        return followed

    return decorated
