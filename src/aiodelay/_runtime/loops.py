"""The loops of a process that claims: started together, and stopped in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from msgspec import Struct

from aiodelay.clock import Clock
from aiodelay.context import Context
from aiodelay.middleware import Middleware
from aiodelay.model import LEASE_MS, Lane, WorkStatus
from aiodelay.ports import Feed, Work
from aiodelay.retry import Retry

from .dispatcher import Dispatcher, Subscriber, Subscription
from .housekeeping import Alarm, Housekeeping, LoopLag
from .leases import LeaseBook
from .observer import Observer
from .source_loop import SourceLoop
from .subscription import HandlerSubscription

__all__ = ["CLOSE_S", "Loops", "RuntimeOptions", "ended_within"]

log = logging.getLogger("aiodelay")

LAG_LIMIT_S = 1.0
CLOSE_S = 10.0
"""Longest wait, each, for what was cancelled, the last settlements, the last commands, and connections to close."""


class RuntimeOptions(Struct, frozen=True):
    """What a scheduler passes on to what runs inside it."""

    clock: Clock
    store_timeout_ms: int
    open_timeout_ms: int
    drain_ms: int
    alarm_ms: int
    retry: Retry
    on_alarm: Callable[[Alarm], object] | None
    middleware: Sequence[Middleware[Context, object]] = ()
    lease_ms: int = LEASE_MS
    observer: Observer | None = None


class Loops:
    """Claims for subscriptions, settles for them, and keeps house.

    Args:
        work: The store's dispatching side.
        subscriptions: By lane; handlers come and go.
        lanes: Gives the lanes that are served now, former names included.
        options: The scheduler's.
        tasks: Owns the loops.
        on_change: Called whenever something was settled or freed, and when nothing will be any more.
    """

    def __init__(
        self,
        *,
        work: Work,
        subscriptions: Mapping[Lane, Subscription],
        lanes: Callable[[], Collection[Lane]],
        options: RuntimeOptions,
        tasks: asyncio.TaskGroup,
        on_change: Callable[[], None],
    ) -> None:
        self._work, self._options, self._tasks, self._on_change = work, options, tasks, on_change
        self._sources: dict[Subscriber, tuple[SourceLoop, asyncio.Task[None]]] = {}
        self._lag = LoopLag(LAG_LIMIT_S, lambda: any(map(len, self._books())), self.freed)
        self.book = LeaseBook(work, options.clock, options.lease_ms, self.freed, options.observer)
        self._dispatcher = Dispatcher(work, self.book, subscriptions, options.lease_ms, self._may_claim)
        self.housekeeping = Housekeeping(work, options.clock, lanes, options.alarm_ms, options.on_alarm)
        self._book_task = tasks.create_task(self.book.run(), name="aiodelay lease book")
        self._book_task.add_done_callback(lambda _: on_change())
        self._dispatch_task = tasks.create_task(self._dispatcher.run(), name="aiodelay dispatcher")
        self._housekeeping_task = tasks.create_task(self.housekeeping.run(), name="aiodelay housekeeping")

    @property
    def settles(self) -> bool:
        """Whether what ends is still settled."""
        return not self._book_task.done()

    def status(self) -> WorkStatus:
        """Say whether claims are served."""
        return self._work.status() if self.settles else WorkStatus("ended", why="a failure has ended its loops")

    def _books(self) -> Iterator[LeaseBook]:
        yield self.book
        for loop, _ in self._sources.values():
            if loop.book is not None:
                yield loop.book

    def _may_claim(self) -> bool:
        """Say whether fresh work may be claimed: not while the event loop lags, or while a suspect is on its own."""
        return self._lag.may_claim() and all(book.alone is None for book in self._books())

    def freed(self) -> None:
        """Demand may have grown, or something was settled: look again."""
        self._work.wake()
        for loop, _ in self._sources.values():
            loop.wake()
        self._on_change()

    # --- sources ------------------------------------------------------------------------------------------

    def add_source(self, subscription: HandlerSubscription, feed: AbstractAsyncContextManager[Feed]) -> None:
        """Take a handler's messages from a source too."""
        options = self._options
        if options.observer is not None:
            feed = options.observer.feed(feed, subscription.lane)
        loop = SourceLoop(
            feed,
            subscription,
            clock=options.clock,
            lease_ms=options.lease_ms,
            may_claim=self._may_claim,
            on_change=self.freed,
            observer=options.observer,
        )
        task = self._tasks.create_task(loop.run(), name=f"aiodelay source of {subscription.lane}")
        self._sources[subscription] = loop, task

    async def drain_source(self, subscription: Subscriber) -> None:
        """Let the claim in flight from a subscription's source come back, if it has one, and make no other."""
        if subscription in self._sources:
            await self._sources[subscription][0].stop_claiming(CLOSE_S)

    async def end_source(self, subscription: Subscriber) -> None:
        """Send the last settlements to a subscription's source, if it has one."""
        if subscription in self._sources:
            loop, task = self._sources[subscription]
            loop.stop()
            await ended_within(task, CLOSE_S)
            self._sources.pop(subscription, None)  # not before: whoever closes meanwhile waits for it too

    # --- the end ------------------------------------------------------------------------------------------

    async def stop_claiming(self) -> None:
        """Let the claims in flight come back, and make no other."""
        self._dispatcher.drain()
        await ended_within(self._dispatch_task, CLOSE_S)
        for subscription in list(self._sources):
            await self.drain_source(subscription)

    async def stop(self) -> None:
        """Send the last settlements, then end renewals and housekeeping."""
        for subscription in list(self._sources):
            await self.end_source(subscription)
        self.book.close()
        await ended_within(self._book_task, CLOSE_S)
        self.housekeeping.stop()
        self._lag.stop()
        await ended_within(self._housekeeping_task, CLOSE_S)


async def ended_within(task: asyncio.Task[None], timeout_s: float) -> None:
    """Wait for a task of ours to end; cancel it when it takes too long."""
    await asyncio.wait([task], timeout=timeout_s)
    if not task.done():
        log.error("%s did not end within %.0f s and was cancelled", task.get_name(), timeout_s)
        task.cancel()
        await asyncio.wait([task])
