"""The loop that takes one handler's messages from a source, with its own dispatcher and lease book."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

from aiodelay.engine.observer import Observer
from aiodelay.ports import Feed, LocalFeed
from aiodelay.ports.clock import Clock

from .dispatcher import Dispatcher
from .heartbeat import Heartbeat
from .lease_book import LeaseBook
from .subscription import HandlerSubscription
from .turns import Turns

__all__ = ["SourceLoop"]


class SourceLoop:
    """Takes a handler's messages from a source's feed, and settles them. It opens and closes the feed.

    Args:
        feed: The source's feed, not open yet.
        subscription: The handler that gets the messages. The store's dispatcher serves it too.
        clock: Measures intervals.
        now_ms: The store's time.
        lease_ms: How long a claim lasts.
        may_claim: A function that returns whether messages may be claimed now.
        max_lapses: A function that returns the most lapses of a message that may be claimed now.
        on_change: Called when settlements are sent, and after a claim has ended or was renewed.
        turns: Whose turn it is to claim: the store's or the source's.
        give_back: Gives back all messages of this process whose runs have not begun.
        observer: Receives the end of each claim.
    """

    def __init__(
        self,
        feed: AbstractAsyncContextManager[Feed],
        subscription: HandlerSubscription,
        *,
        clock: Clock,
        now_ms: Callable[[], int],
        lease_ms: int,
        may_claim: Callable[[], bool],
        max_lapses: Callable[[], int],
        on_change: Callable[[], None],
        turns: Turns,
        give_back: Callable[[], None],
        observer: Observer | None,
    ) -> None:
        self._observer, self._give_back = observer, give_back
        self.turns: Turns = turns
        self._opening, self._subscription = feed, subscription
        self._clock, self._now_ms, self._lease_ms = clock, now_ms, lease_ms
        self._may_claim, self._max_lapses, self._on_change = may_claim, max_lapses, on_change
        self._feed: Feed | None = None
        self.book: LeaseBook | None = None
        self._shall_drain, self._shall_end = asyncio.Event(), asyncio.Event()
        self._drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Take messages until `drain` is called. Then settle the remaining claims until `stop` is called."""
        async with self._opening as feed, asyncio.TaskGroup() as tasks:
            self._feed = feed
            heartbeat = Heartbeat(feed, interval_s=self._lease_ms / 3000)
            self.book = LeaseBook(
                feed,
                self._clock,
                self._now_ms,
                self._lease_ms,
                self._on_change,
                observer=self._observer,
                heartbeat=heartbeat,
            )
            lane = self._subscription.lane
            dispatcher = Dispatcher(
                feed,
                self.book,
                {lane: self._subscription},
                self._lease_ms,
                may_claim=self._may_claim,
                max_lapses=self._max_lapses,
                turns={lane: self.turns},
                give_back=self._give_back,
            )
            if isinstance(feed, LocalFeed):
                self._subscription.take_directly(partial(dispatcher.refill, feed))
            tasks.create_task(self.book.run(), name=f"aiodelay lease book of {self._subscription.lane}")
            claiming = tasks.create_task(dispatcher.run(), name=f"aiodelay source of {self._subscription.lane}")
            try:
                await self._shall_drain.wait()
                dispatcher.drain()
                await asyncio.wait([claiming])
                self._has_drained()
                await self._shall_end.wait()
                self.book.close()
            finally:
                heartbeat.stop()

    def wake(self) -> None:
        """Try to claim again: demand may have grown."""
        if self._feed is not None:
            self._feed.wake()

    def drain(self) -> asyncio.Future[None]:
        """Make no further claim. The future is done once the claim under way has returned."""
        self._shall_drain.set()
        if self._feed is None:  # the source may be away and never open, so there is no claim to wait for
            self._has_drained()
        return self._drained

    def _has_drained(self) -> None:
        if not self._drained.done():
            self._drained.set_result(None)

    def stop(self) -> None:
        """Let `run` return once the last settlements have been sent."""
        self._shall_end.set()
