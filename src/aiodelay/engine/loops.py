"""`Loops`: the loops of a process that claims. They start together, and stop in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext
from typing import Any

from msgspec import Struct

from aiodelay.core.retry import Retry
from aiodelay.core.values import LEASE_MS, Alarm, DeadLetter, Lane, WorkStatus
from aiodelay.handlers.middleware import Middleware
from aiodelay.ports import Feed, Pulsing, Work
from aiodelay.ports.clock import Clock

from .delivery.dispatcher import Dispatcher, Subscriber, Subscription
from .delivery.heartbeat import Heartbeat
from .delivery.lease_book import Held, LeaseBook, always
from .delivery.pulse_thread import PulseThread
from .delivery.source_loop import SourceLoop
from .delivery.subscription import HandlerSubscription
from .delivery.turns import Turns
from .housekeeping import Housekeeping, LoopLag
from .observer import Observer

__all__ = ["Loops", "RuntimeOptions", "ended_by"]

log: logging.Logger = logging.getLogger("aiodelay")

LAG_LIMIT_S = 1.0
STUCK_AFTER_MS = 300_000
"""If the event loop is blocked for longer, this process no longer renews its leases."""
REFUSED_AGAIN_S = 0.05
"""The wait for the calls under way, in seconds, before this process takes a new incarnation."""


class RuntimeOptions(Struct, frozen=True):
    """The settings of a scheduler that its loops, subscriptions and command sender read."""

    clock: Clock
    store_timeout_ms: int
    open_timeout_ms: int
    drain_ms: int
    alarm_ms: int
    retry: Retry
    on_alarm: Callable[[Alarm], object] | None
    middleware: Sequence[Middleware[Any, object]] = ()
    lease_ms: int = LEASE_MS
    stuck_after_ms: int = STUCK_AFTER_MS
    observer: Observer | None = None
    claims_ahead: bool = True
    dead_letter_hooks: Sequence[Callable[[DeadLetter], Awaitable[object]]] = ()

    def apart(self, *, silent: bool = False) -> AbstractContextManager[None]:
        """Return a context manager in whose block new tasks do not join the caller's trace (see `Observer.apart`)."""
        return nullcontext() if self.observer is None else self.observer.apart(silent=silent)


class Loops:
    """Claims messages for the subscriptions, settles the claims, and does the housekeeping.

    Args:
        work: The store's dispatching side.
        now_ms: The store's time.
        subscriptions: The subscriptions by lane. Subscriptions come and go while the loops run.
        lanes: A function that returns the lanes that are served now, former names included.
        options: The scheduler's options.
        tasks: The task group that owns the loops.
        on_change: Called after a claim has ended, after demand may have grown, and when the lease book has ended.
    """

    def __init__(
        self,
        *,
        work: Work,
        now_ms: Callable[[], int],
        subscriptions: Mapping[Lane, Subscription],
        lanes: Callable[[], Collection[Lane]],
        options: RuntimeOptions,
        tasks: asyncio.TaskGroup,
        on_change: Callable[[], None],
    ) -> None:
        self._work, self._now_ms, self._options, self._tasks, self._on_change = work, now_ms, options, tasks, on_change
        self._subscriptions = subscriptions
        self._sources: dict[Subscriber, tuple[SourceLoop, asyncio.Task[None]]] = {}
        self._pauses = 0
        self._lag = LoopLag(LAG_LIMIT_S, lambda: any(map(len, self._books())), self.resumed)
        self._heartbeat = Heartbeat(work, interval_s=options.lease_ms / 3000)
        self._pulse = work.pulse if isinstance(work, Pulsing) else None
        self.book: LeaseBook = LeaseBook(
            work,
            options.clock,
            now_ms,
            options.lease_ms,
            self.freed,
            observer=options.observer,
            heartbeat=self._heartbeat,
            may_begin=self._pulse.may_begin if self._pulse is not None else always,
            is_of_store=True,
        )
        self._turns: dict[Lane, Turns] = {}
        self._pulse_thread = self._start_pulse()
        self._dispatcher = Dispatcher(
            work,
            self.book,
            subscriptions,
            options.lease_ms,
            may_claim=self._may_claim,
            max_lapses=self._max_lapses,
            turns=self._turns,
            give_back=self._give_back,
        )
        self.housekeeping: Housekeeping = Housekeeping(work, options.clock, lanes, options.alarm_ms, options.on_alarm)
        self._book_task = tasks.create_task(self.book.run(), name="aiodelay lease book")
        self._book_task.add_done_callback(lambda _: on_change())
        self._dispatch_task = tasks.create_task(self._dispatcher.run(), name="aiodelay dispatcher")
        self._housekeeping_task = tasks.create_task(self.housekeeping.run(), name="aiodelay housekeeping")

    @property
    def settles(self) -> bool:
        """Whether settlements are still sent."""
        return not self._book_task.done()

    def status(self) -> WorkStatus:
        """Return whether claims are served."""
        return self._work.status() if self.settles else WorkStatus("ended", why="a failure has ended the loops")

    def _books(self) -> Iterator[LeaseBook]:
        yield self.book
        for loop, _ in self._sources.values():
            if loop.book is not None:
                yield loop.book

    def _may_claim(self) -> bool:
        """Return whether to claim now. False inside `no_claims`, while the event loop lags, and as a trial begins."""
        may_claim = not self._pauses and self._lag.may_claim() and self.book.may_begin()
        return may_claim and not any(book.is_trying for book in self._books())

    def _give_back(self) -> None:
        """Give back all messages whose runs have not begun."""
        for subscription in self._subscriptions.values():
            subscription.give_back()

    def _max_lapses(self) -> int:
        """Return the most lapses that a message may have, if it is claimed beside the messages in all books."""
        return min(book.max_lapses for book in self._books())

    @contextmanager
    def no_claims(self) -> Iterator[None]:
        """Make no further claim inside a block."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            self.resumed()

    def freed(self) -> None:
        """Claim again if there may be more to claim: demand may have grown, or a claim has ended."""
        self._dispatcher.freed()
        self._wake_sources()

    def resumed(self) -> None:
        """Claim again: something that prevented claims has ended."""
        self._work.wake()
        self._wake_sources()

    def _wake_sources(self) -> None:
        for loop, _ in self._sources.values():
            loop.wake()
        self._on_change()

    # --- the pulse ----------------------------------------------------------------------------------------

    def _start_pulse(self) -> PulseThread | None:
        if self._pulse is None:
            return None
        return PulseThread(
            self._pulse,
            self.book,
            take_unbegun=self._take_unbegun,
            stuck_after_ms=self._options.stuck_after_ms,
            observer=self._options.observer,
            on_refused=self._refused,
            on_resumed=self._resumed,
        )

    def _take_unbegun(self) -> list[Held]:
        """Take messages of the store from their handlers, if their runs have not begun. A thread may call this."""
        subscriptions = list(self._subscriptions.values())
        return [held for each in subscriptions for held in each.take_unbegun(self.book)]

    def _resumed(self) -> None:
        """Record the claims of a time without a pulse under the present incarnation, and claim again."""
        self.book.renew_all()
        self.resumed()

    def _refused(self) -> None:
        """Take a new incarnation after others may have declared this process dead.

        Give back all messages whose runs have not begun, and ask the store which claims this process still has. First
        wait for the calls under way: a claim may return messages that others have got meanwhile.
        """
        assert self._pulse is not None
        if self._pulse.is_calling:
            asyncio.get_running_loop().call_later(REFUSED_AGAIN_S, self._refused)
            return
        self._give_back()
        self.book.renew_all()
        self._pulse.restart()
        self.resumed()

    # --- sources ------------------------------------------------------------------------------------------

    def add_source(self, subscription: HandlerSubscription, feed: AbstractAsyncContextManager[Feed]) -> None:
        """Start to take messages for a handler from a source too, beside the messages from the store."""
        options = self._options
        if options.observer is not None:
            feed = options.observer.feed(feed, subscription.lane)
        turns = self._turns[subscription.lane] = Turns(self.resumed)
        loop = SourceLoop(
            feed,
            subscription,
            clock=options.clock,
            now_ms=self._now_ms,
            lease_ms=options.lease_ms,
            may_claim=self._may_claim,
            max_lapses=self._max_lapses,
            on_change=self.freed,
            turns=turns,
            give_back=self._give_back,
            observer=options.observer,
        )
        task = self._tasks.create_task(loop.run(), name=f"aiodelay source of {subscription.lane}")
        self._sources[subscription] = loop, task

    async def drain_source(self, subscription: Subscriber, by_s: float) -> None:
        """Make no further claim from a subscription's source, if it has one, and wait for the claim under way."""
        if subscription in self._sources:
            loop, _ = self._sources[subscription]
            await _done_by(by_s, [loop.drain()])

    async def end_source(self, subscription: Subscriber, by_s: float) -> None:
        """Send the last settlements to a subscription's source, if it has one."""
        if subscription in self._sources:
            loop, task = self._sources[subscription]
            loop.stop()
            await ended_by(by_s, [task])
            if self._turns.get(subscription.lane) is loop.turns:  # else another handler has this lane already
                del self._turns[subscription.lane]
            self._sources.pop(subscription, None)  # after the wait: a close that begins meanwhile must also wait

    # --- stop in order ------------------------------------------------------------------------------------

    async def stop_claiming(self, by_s: float) -> None:
        """Make no further claim, and wait for the claims under way until `by_s` in the time of the event loop."""
        self._dispatcher.drain()
        drained = [loop.drain() for loop, _ in self._sources.values()]
        await _done_by(by_s, [self._dispatch_task, *drained])

    async def stop(self, by_s: float) -> None:
        """Send the last settlements and end renewals, until `by_s` in the time of the event loop."""
        await _done_by(by_s, [self._dispatch_task])  # a claim that returns now is released through the book
        for loop, _ in self._sources.values():
            loop.stop()
        self.book.close()
        sources = [task for _, task in self._sources.values()]
        await ended_by(by_s, [self._dispatch_task, *sources, self._book_task])
        self._heartbeat.stop()
        if self._pulse_thread is not None:
            await _done_by(by_s, [self._pulse_thread.stop()])

    async def stop_housekeeping(self, by_s: float) -> None:
        """End housekeeping after the step under way, or at `by_s` in the time of the event loop."""
        self._lag.stop()
        self.housekeeping.stop()
        await ended_by(by_s, [self._housekeeping_task])


async def ended_by(by_s: float, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for tasks until a time of the event loop. Then cancel the tasks that have not ended."""
    await _done_by(by_s, tasks)
    late = [task for task in tasks if not task.done()]
    if late:
        names = ", ".join(task.get_name() for task in late)
        log.error("closing cancels tasks that did not end in time: %s", names)
        for task in late:
            task.cancel()
        await asyncio.wait(late)


async def _done_by(by_s: float, waited: Iterable[asyncio.Future[None]]) -> None:
    """Wait for futures until a time of the event loop."""
    left_s = by_s - asyncio.get_running_loop().time()
    await asyncio.wait(waited, timeout=max(left_s, 0))
