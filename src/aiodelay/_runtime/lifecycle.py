"""What is open while a scheduler is: the store, the sinks, the loops; and the order in which they stop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from uuid import uuid4

import anyio
from msgspec import Struct

from aiodelay.clock import Clock
from aiodelay.context import Context
from aiodelay.errors import WrongLoopError
from aiodelay.model import LEASE_MS, Lane, Promise, Query, Record
from aiodelay.ports import Inspectable, Sink, Store, Transfer, Work
from aiodelay.retry import Retry
from aiodelay.wakeup import WakeUp

from .dispatcher import Dispatcher, Subscriber, Subscription
from .group_commit import GroupCommit
from .housekeeping import Alarm, Housekeeping, LoopLag
from .leases import LeaseBook
from .sink_subscription import SinkSubscription
from .subscription import HandlerSpec, HandlerSubscription
from .transfer import TransferSubscription

__all__ = ["Running", "RuntimeOptions"]

log = logging.getLogger("aiodelay")

LAG_LIMIT_S = 1.0
CLOSE_S = 10.0
"""Longest wait, each, for the last settlements, the last commands, and for connections to close."""
PENDING_POLL_S = 0.5
"""How often to look whether messages are pending that other processes may deliver."""


class RuntimeOptions(Struct, frozen=True):
    """What a scheduler passes on to what runs inside it."""

    clock: Clock
    store_timeout_ms: int
    drain_ms: int
    alarm_ms: int
    retry: Retry
    on_alarm: Callable[[Alarm], object] | None
    lease_ms: int = LEASE_MS


class Running:
    """One opening of a scheduler, from `open` to `close`.

    Args:
        store: Not yet connected.
        sinks: Not yet connected.
        options: The scheduler's.
        context: Makes a handler's context.
    """

    def __init__(
        self, store: Store, sinks: Sequence[Sink], options: RuntimeOptions, context: Callable[[Record, int], Context]
    ) -> None:
        self._store, self._sinks, self._options, self._context = store, sinks, options, context
        self._loop, self._pid = asyncio.get_running_loop(), os.getpid()
        self._stack = AsyncExitStack()
        self._tasks = asyncio.TaskGroup()
        self.commit = GroupCommit(store, options.clock, options.store_timeout_ms)
        self.subscriptions: dict[Lane, Subscription] = {}
        self._transfers: list[TransferSubscription] = []
        self._leaving: list[Subscriber] = []
        self._watchers: set[WakeUp] = set()
        self._dispatching: _Dispatching | None = None
        self.is_closing = False

    async def open(self, *, dispatch: bool, lanes: Sequence[Lane]) -> None:
        """Connect, and start what runs in the background.

        Args:
            dispatch: Also claim and deliver.
            lanes: What is served at first.
        """
        try:
            await self._stack.enter_async_context(self._store)
            if dispatch:
                for sink in self._sinks:
                    await self._stack.enter_async_context(sink)
                worker = f"{socket.gethostname()}-{self._pid}-{uuid4().hex[:8]}"
                work = await self._stack.enter_async_context(self._store.work(worker, lanes))
            await self._tasks.__aenter__()
        except BaseException:
            await self._stack.aclose()
            raise
        self._commit_task = self._tasks.create_task(self.commit.run(), name="aiodelay group commit")
        if dispatch:
            self._dispatching = _Dispatching(self, work, self._options, self._tasks)

    def check_usable(self) -> None:
        """Refuse use from another loop, thread or process.

        Raises:
            WrongLoopError: Says which.
        """
        if os.getpid() != self._pid:
            raise WrongLoopError("scheduler", "process (this one was forked)")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is not self._loop:
            raise WrongLoopError("scheduler", "event loop or thread")

    # --- subscriptions ------------------------------------------------------------------------------------

    def add_handler(self, spec: HandlerSpec) -> None:
        """Start serving a handler."""
        if self._dispatching is not None:
            self.subscriptions[spec.name] = HandlerSubscription(
                spec=spec,
                book=self._dispatching.book,
                tasks=self._tasks,
                context=self._context,
                now_ms=self._store.now_ms,
                on_free=self._dispatching.freed,
            )
            self._dispatching.freed()

    def add_sink(self, sink: Sink) -> None:
        """Start serving a sink that was opened: the store moves its messages there by itself, if it can."""
        if self._dispatching is None:
            return
        store = self._store
        if isinstance(store, Transfer) and store.reaches(sink).promise is Promise.EXACTLY_ONCE:
            moves = self._stack.enter_context(store.transferring(sink))
            transfer = TransferSubscription(sink=sink, moves=moves, now_ms=store.now_ms, on_change=self.changed)
            self._transfers.append(transfer)
            self.spawn(transfer.run(), f"aiodelay transfer {sink.name}")
            return
        self.subscriptions[sink.name] = SinkSubscription(
            sink=sink,
            retry=self._options.retry,
            book=self._dispatching.book,
            tasks=self._tasks,
            now_ms=store.now_ms,
            on_free=self._dispatching.freed,
        )

    def spawn(self, coroutine: Coroutine[None, None, None], name: str) -> None:
        """Run something beside the loops, owned by this opening."""
        self._tasks.create_task(coroutine, name=name)

    def set_concurrency(self, lane: Lane, concurrency: int) -> None:
        """Change a handler's concurrency."""
        subscription = self.subscriptions.get(lane)
        if isinstance(subscription, HandlerSubscription):
            subscription.set_concurrency(concurrency)

    async def remove(self, lane: Lane) -> None:
        """Stop serving a lane; return when what was in flight has settled, at the latest after the drain time."""
        subscription = self.subscriptions.pop(lane, None)
        if subscription is not None:
            self._leaving = [each for each in self._leaving if each.in_flight] + [subscription]
            await self._end([subscription])

    async def _end(self, subscriptions: Sequence[Subscriber]) -> None:
        for subscription in subscriptions:
            subscription.drain()
        if not await self._wait_until_settled(subscriptions, self._options.drain_ms / 1000):
            for subscription in subscriptions:
                subscription.stop()
            await self._wait_until_settled(subscriptions, CLOSE_S)

    async def _wait_until_settled(self, subscriptions: Sequence[Subscriber], timeout_s: float) -> bool:
        ends = self._loop.time() + timeout_s
        with self.watch() as changed:
            while any(subscription.in_flight for subscription in subscriptions):
                changed.clear()
                left = ends - self._loop.time()
                if left <= 0:
                    return False
                await changed.wait(left)
        return True

    def lanes(self) -> list[Lane]:
        """Return the lanes served now, former names included."""
        claimed = [
            lane
            for subscription in self.subscriptions.values()
            for lane in (subscription.lane, *subscription.demand().aliases)
        ]
        return claimed + [transfer.lane for transfer in self._transfers]

    @property
    def in_flight(self) -> int:
        """Delivered to this process's subscribers, not yet settled."""
        return sum(subscription.in_flight for subscription in self._all())

    def _all(self) -> list[Subscriber]:
        """Return what is served, and what is not served any more but may have something in flight."""
        return [*self.subscriptions.values(), *self._transfers, *self._leaving]

    @contextmanager
    def watch(self) -> Iterator[WakeUp]:
        """Give a wake-up that is set whenever something was settled or freed."""
        watcher = WakeUp()
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    def changed(self) -> None:
        """Something was settled or freed."""
        for watcher in self._watchers:
            watcher.set()

    @property
    def overdue_age_ms(self) -> int:
        """Age of the oldest overdue message at the last step of housekeeping."""
        return 0 if self._dispatching is None else self._dispatching.housekeeping.overdue_age_ms

    # --- idle ---------------------------------------------------------------------------------------------

    async def wait_until_idle(self) -> None:
        """Return when the served lanes hold nothing but recurring messages, and nothing is in flight."""
        with self.watch() as changed:
            while True:
                changed.clear()
                if not self.in_flight and not await self._has_pending():
                    return
                await changed.wait(PENDING_POLL_S)

    async def _has_pending(self) -> bool:
        if not isinstance(self._store, Inspectable):
            return False
        query = Query(lanes=tuple(self.lanes()), limit=100)
        while query.lanes and (page := await self._store.search(query)):
            if any(snapshot.record.envelope.rule is None for snapshot in page):
                return True
            query = Query(lanes=query.lanes, limit=100, after=(page[-1].next_attempt_ms, page[-1].record.id))
        return False

    # --- the end ------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop claiming, let deliveries end, settle, then disconnect; each step is shielded and bounded.

        Cancelled meanwhile, it waits no longer for deliveries to end: they are cancelled and given back.
        """
        self.is_closing = True
        try:
            with anyio.CancelScope(shield=True):
                await self._stop_whatever_comes()
        finally:
            with anyio.CancelScope(shield=True):
                try:
                    await self._end_tasks()
                finally:
                    with anyio.move_on_after(CLOSE_S) as closing:
                        await self._stack.aclose()
                    if closing.cancelled_caught:
                        log.error("closing the store and sinks took longer than %.0f s and was given up", CLOSE_S)

    async def _stop_whatever_comes(self) -> None:
        """Stop in order, in a task of its own: anyio's shield does not keep off `Task.cancel()`."""
        cancelled: asyncio.CancelledError | None = None
        async with asyncio.TaskGroup() as tasks:
            stopping = tasks.create_task(self._stop_in_order(), name="aiodelay close")
            while not stopping.done():
                try:
                    await asyncio.wait([stopping])
                except asyncio.CancelledError as error:
                    cancelled = error
                    for subscription in self._all():
                        subscription.stop()
        if cancelled is not None:
            raise cancelled

    async def _stop_in_order(self) -> None:
        if self._dispatching is not None:
            await self._dispatching.stop_claiming()
            await self._end(self._all())
            await self._dispatching.stop()
        self.commit.close()
        await _ended_within(self._commit_task, CLOSE_S)

    async def _end_tasks(self) -> None:
        """Cancel what is left of our tasks. What ended the scheduler's block goes its own way, not into a group."""
        try:
            await self._tasks.__aexit__(_TheEnd, _TheEnd(), None)
        except* _TheEnd:
            pass


class _TheEnd(Exception):  # noqa: N818 - a signal to our task group alone
    """Ends a task group that has nothing left to wait for."""


class _Dispatching:
    """The loops of a process that claims."""

    def __init__(self, running: Running, work: Work, options: RuntimeOptions, tasks: asyncio.TaskGroup) -> None:
        self._running, self._work = running, work
        self._lag = LoopLag(LAG_LIMIT_S, lambda: len(self.book) > 0, work.wake)
        self.book = LeaseBook(work, options.clock, options.lease_ms, self.freed)
        self._dispatcher = Dispatcher(work, self.book, running.subscriptions, options.lease_ms, self._lag.may_claim)
        self.housekeeping = Housekeeping(work, options.clock, running.lanes, options.alarm_ms, options.on_alarm)
        self._book_task = tasks.create_task(self.book.run(), name="aiodelay lease book")
        self._dispatch_task = tasks.create_task(self._dispatcher.run(), name="aiodelay dispatcher")
        self._housekeeping_task = tasks.create_task(self.housekeeping.run(), name="aiodelay housekeeping")

    def freed(self) -> None:
        """Demand may have grown, or something was settled: look again."""
        self._work.wake()
        self._running.changed()

    async def stop_claiming(self) -> None:
        """Let the claim in flight come back, and make no other."""
        self._dispatcher.drain()
        await _ended_within(self._dispatch_task, CLOSE_S)

    async def stop(self) -> None:
        """Send the last settlements, then end renewals and housekeeping."""
        self.book.close()
        await _ended_within(self._book_task, CLOSE_S)
        self.housekeeping.stop()
        self._lag.stop()
        await _ended_within(self._housekeeping_task, CLOSE_S)


async def _ended_within(task: asyncio.Task[None], timeout_s: float) -> None:
    """Wait for a task of ours to end; cancel it when it takes too long."""
    await asyncio.wait([task], timeout=timeout_s)
    if not task.done():
        log.error("%s did not end within %.0f s and was cancelled", task.get_name(), timeout_s)
        task.cancel()
        await asyncio.wait([task])
