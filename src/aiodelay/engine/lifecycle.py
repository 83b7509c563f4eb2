"""What is open while a scheduler is: the store, the sinks, the loops; and the order in which they stop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager, nullcontext
from typing import Any, TypeVar
from uuid import uuid4

import anyio
from msgspec import structs

from aiodelay.core.completion import run_to_completion
from aiodelay.core.durations import format_duration
from aiodelay.core.values import Claim, Lane, Promise, Query, Snapshot, WorkStatus
from aiodelay.core.wakeup import WakeUp
from aiodelay.errors import ClosedError, StoreDamagedError, StoreUnavailableError, WrongLoopError
from aiodelay.handlers.context import RunContext
from aiodelay.handlers.received import HeldMessage
from aiodelay.handlers.spec import HandlerSpec
from aiodelay.ports import Identified, Sink, Source, Store, Transfer, Work, reactive

from .data_watch import DataWatch
from .delivery.dead_letter_hooks import DeadLetterHooks
from .delivery.dispatcher import Subscriber, Subscription
from .delivery.publication import Publication
from .delivery.runners import Runners
from .delivery.sink_subscription import SinkSubscription
from .delivery.subscription import HandlerSubscription
from .delivery.transfer import TransferSubscription
from .loops import Loops, RuntimeOptions, ended_by
from .observer import Observer
from .patience import Patience
from .sending.group_commit import GroupCommit

__all__ = ["Running"]

log: logging.Logger = logging.getLogger("aiodelay")

R = TypeVar("R", bound=HeldMessage[Any, Any])

CANCELLATIONS = 4
"""How often a run is cancelled that does not end in time, all together within `CANCEL_S`."""
CANCEL_S = 10.0
"""Longest wait for runs that were cancelled."""
CLOSE_S = 5.0
"""Longest wait, in all, for the last claims, settlements and commands, and then for connections to close."""
DISCONNECT_S = 2.0
"""How much of `CLOSE_S` is kept for connections."""
PENDING_POLL_S, LONGEST_PENDING_POLL_S = 0.5, 2.0
"""How often to look whether messages are pending that other processes may deliver: soon, and while none is due."""
TELL_WAIT_S, MOST_COUNTED = 1.0, 1000
"""When `run_until_idle` logs a long wait, and up to how many messages it counts then."""


class Running:
    """One opening of a scheduler, from `open` to `close`.

    Args:
        store: Not yet connected.
        sinks: Not yet connected.
        sources: Not yet connected.
        options: The scheduler's.
        context: Makes a handler's context.
    """

    def __init__(
        self,
        store: Store,
        sinks: Sequence[Sink],
        sources: Sequence[Source],
        options: RuntimeOptions,
        context: Callable[[Claim, int, int], RunContext[Any]],
    ) -> None:
        self._store, self._sinks, self._options, self._context = store, sinks, options, context
        self._sources = {source.name: source for source in sources}
        self._loop, self._pid = asyncio.get_running_loop(), os.getpid()
        self._worker = f"{socket.gethostname()}-{self._pid}-{uuid4().hex[:8]}"
        self.patience: Patience = Patience(options.open_timeout_ms)
        self._stack = AsyncExitStack()
        self._tasks = asyncio.TaskGroup()
        self.commit: GroupCommit = GroupCommit(store, options.clock, options.store_timeout_ms)
        self.subscriptions: dict[Lane, Subscription] = {}
        self._transfers: list[TransferSubscription] = []
        self._leaving: list[Subscriber] = []
        self._watchers: set[WakeUp] = set()
        self._loops: Loops | None = None
        self._data_watch: DataWatch | None = None
        self._hooks: DeadLetterHooks | None = None
        self.is_closing: bool = False
        self._closed_by_s = 0.0

    async def open(self, *, dispatch: bool, lanes: Sequence[Lane]) -> None:
        """Connect, and start what runs in the background.

        While the store, a sink or a source does not answer, it tries again for `open_timeout`.

        Args:
            dispatch: Also claim and deliver.
            lanes: What is served at first.
        """
        what = f"opening {self._store.name}"
        with self._apart(silent=True):
            work = await self.patience.answered(what, lambda: self._connect(lanes, dispatch=dispatch))
        await self._tasks.__aenter__()
        with self._apart():
            self._start(work)

    def _apart(self, *, silent: bool = False) -> AbstractContextManager[None]:
        observer = self._options.observer
        return nullcontext() if observer is None else observer.apart(silent=silent)

    async def _connect(self, lanes: Sequence[Lane], *, dispatch: bool) -> Work | None:
        """Open everything, or nothing: the next attempt enters the store, the sinks and the sources again."""
        try:
            return await self._enter_all(lanes, dispatch=dispatch)
        except BaseException:
            await self._stack.aclose()
            raise

    async def _enter_all(self, lanes: Sequence[Lane], *, dispatch: bool) -> Work | None:
        await self._stack.enter_async_context(self._store)
        if not dispatch:
            return None
        for sink in self._sinks:
            if not self._moves_into(sink):  # otherwise nothing is sent to it
                await self._stack.enter_async_context(sink)
        for source in self._sources.values():
            await self._stack.enter_async_context(source)
        opening, observer = self._store.work(self._worker, lanes), self._options.observer
        if observer is not None:
            opening = observer.work(opening)
            observer.watch(self._load)
            self._stack.callback(observer.forget)
        return await self._stack.enter_async_context(opening)

    def _start(self, work: Work | None) -> None:
        self._commit_task = self._tasks.create_task(self.commit.run(), name="aiodelay group commit")
        if isinstance(self._store, Identified):
            self._data_watch = DataWatch(self._store, self._options.clock, self._options.on_alarm)
            self._watch_task = self._tasks.create_task(self._data_watch.run(), name="aiodelay data watch")
        if work is not None:
            self._start_hooks()
            self._loops = Loops(
                work=work,
                now_ms=self._store.now_ms,
                subscriptions=self.subscriptions,
                lanes=self.lanes,
                options=self._options_of_loops(),
                tasks=self._tasks,
                on_change=self.changed,
            )

    def _options_of_loops(self) -> RuntimeOptions:
        """Return the options with a lease that the store allows."""
        lease_ms = min(self._options.lease_ms, self._store.traits.longest_lease_ms)
        return structs.replace(self._options, lease_ms=lease_ms)

    def _start_hooks(self) -> None:
        if self._options.dead_letter_hooks:
            self._hooks = DeadLetterHooks(self._options.dead_letter_hooks, self._store.now_ms, self.changed)
            self._hooks_task = self._tasks.create_task(self._hooks.run(), name="aiodelay on_dead_letter")

    def _load(self) -> list[tuple[Lane, int, int]]:
        """Return what is in flight and requested, by lane; from any thread."""
        return [(each.lane, each.in_flight, each.demand().messages) for each in list(self.subscriptions.values())]

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
        """Start serving a handler: from the store, and from its source if it has one."""
        if self._loops is None:
            return
        subscription = HandlerSubscription(
            spec=spec,
            runners=Runners(self._tasks),
            context=self._context,
            now_ms=self._store.now_ms,
            on_free=self._loops.freed,
            middleware=self._options.middleware,
            observer=self._options.observer,
            hooks=self._hooks,
        )
        self._serve(subscription)

    def publish(
        self,
        spec: HandlerSpec,
        subscriber: reactive.Subscriber[R],
        received: Callable[[Any, Any, Callable[[], bool]], R],
        on_over: Callable[[], None],
    ) -> None:
        """Start giving a lane's messages to a subscriber: from the store, and from its source if it has one.

        Args:
            spec: As of a handler that is never called.
            subscriber: Whom to signal.
            received: Makes the message that the subscriber gets, of the event, its context, and whether it is outdated.
            on_over: Called once, when the subscription is over.
        """
        assert self._loops is not None
        loops = self._loops
        publication = Publication(
            spec=spec,
            runners=Runners(self._tasks),
            context=self._context,
            now_ms=self._store.now_ms,
            on_free=loops.freed,
            observer=self._options.observer,
            hooks=self._hooks,
            subscriber=subscriber,
            received=received,
            failure=lambda: None if loops.settles else ClosedError("scheduler", "ended by a failure"),
            on_over=on_over,
            leave=self._leave,
        )
        self._serve(publication)
        publication.subscribe()

    @property
    def observer(self) -> Observer | None:
        """Who is told what it does."""
        return self._options.observer

    @property
    def dispatches(self) -> bool:
        """Whether it claims and delivers."""
        return self._loops is not None

    def _serve(self, subscription: HandlerSubscription) -> None:
        assert self._loops is not None
        self.subscriptions[subscription.lane] = subscription
        name, address = subscription.spec.source or ("", "")
        if name in self._sources:
            consumer = f"{self._worker}-{uuid4().hex[:8]}"
            feed = self._sources[name].feed(address, consumer, self._store.put_back, self._store.now_ms)
            with self._apart():
                self._loops.add_source(subscription, feed)
        self._loops.freed()

    def add_sink(self, sink: Sink) -> None:
        """Start serving a sink: the store moves its messages there by itself, if it can; otherwise it was opened."""
        if self._loops is None:
            return
        store, runners = self._store, Runners(self._tasks)
        if isinstance(store, Transfer) and self._moves_into(sink):
            moves = self._stack.enter_context(store.transferring(sink))
            if self._options.observer is not None:
                moves = self._options.observer.transfer(moves, sink.name)
            transfer = TransferSubscription(
                sink=sink, moves=moves, runners=runners, now_ms=store.now_ms, on_change=self.changed
            )
            self._transfers.append(transfer)
            with self._apart():
                transfer.start()
            return
        self.subscriptions[sink.name] = SinkSubscription(
            sink=sink,
            retry=self._options.retry,
            runners=runners,
            now_ms=store.now_ms,
            on_free=self._loops.freed,
            observer=self._options.observer,
            hooks=self._hooks,
        )

    def _moves_into(self, sink: Sink) -> bool:
        return isinstance(self._store, Transfer) and self._store.reaches(sink).promise is Promise.EXACTLY_ONCE

    def spawn(self, coroutine: Coroutine[None, None, None], name: str) -> None:
        """Run something beside the loops, owned by this opening."""
        self._tasks.create_task(coroutine, name=name)

    def set_concurrency(self, lane: Lane, concurrency: int) -> None:
        """Change a handler's concurrency."""
        subscription = self.subscriptions.get(lane)
        if isinstance(subscription, HandlerSubscription):
            subscription.set_concurrency(concurrency)

    async def remove(self, lane: Lane) -> None:
        """Stop serving a lane; return when what was in flight has settled, was stopped, or was left behind."""
        subscription = self.subscriptions.pop(lane, None)
        if subscription is not None:
            self._leaving.append(subscription)
            await self._see_off(subscription)

    def _leave(self, subscription: Subscription) -> None:
        """Begin to stop serving a lane, as `remove` does."""
        if self._loops is not None and self._loops.settles:
            del self.subscriptions[subscription.lane]
            self._leaving.append(subscription)
            self.spawn(self._see_off(subscription), f"aiodelay leave {subscription.lane}")

    async def _see_off(self, subscription: Subscription) -> None:
        assert self._loops is not None
        drained_by_s = self._drained_by_s()
        await self._loops.drain_source(subscription, drained_by_s)
        await self._end([subscription], drained_by_s)
        settled_by_s = self._loop.time() + CLOSE_S
        await self._settled_by([subscription], settled_by_s)
        await self._loops.end_source(subscription, settled_by_s)
        self._leaving.remove(subscription)

    def _drained_by_s(self) -> float:
        return self._loop.time() + self._options.drain_ms / 1000

    async def _end(self, subscriptions: Sequence[Subscriber], drained_by_s: float) -> None:
        for subscription in subscriptions:
            subscription.drain()
        if not await self._settled_by(subscriptions, drained_by_s):
            await self._stop(subscriptions)
        for subscription in subscriptions:
            subscription.close()

    async def _stop(self, subscriptions: Sequence[Subscriber]) -> None:
        """Cancel what runs, more than once: code that swallows one cancellation may not swallow the next."""
        for _ in range(CANCELLATIONS):
            for subscription in subscriptions:
                subscription.stop()
            tasks = [task for subscription in subscriptions for task in subscription.runners.tasks]
            if not tasks or not (await asyncio.wait(tasks, timeout=CANCEL_S / CANCELLATIONS))[1]:
                return

    async def _settled_by(self, subscriptions: Sequence[Subscriber], by_s: float) -> bool:
        with self.watch() as changed:
            while any(subscription.in_flight for subscription in subscriptions):
                changed.clear()
                left = by_s - self._loop.time()
                if left <= 0 or self._loops is None or not self._loops.settles:
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
        """Delivered to this process's subscribers, not yet settled; and dead letters that hooks are not told yet."""
        untold = 0 if self._hooks is None else self._hooks.waiting
        return sum(subscription.in_flight for subscription in self._all()) + untold

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

    def supersede(self, message_id: str, revision: int) -> None:
        """Begin no version of a message here any more that is older than a revision."""
        if self._loops is not None:
            self._loops.book.supersede(message_id, revision)

    def status(self) -> WorkStatus:
        """Say whether claims are served; a process that only schedules is ready once it is open."""
        status = WorkStatus("ready") if self._loops is None else self._loops.status()
        vanished = "" if self._data_watch is None else self._data_watch.vanished
        return structs.replace(status, why=vanished) if vanished and not status.why else status

    @property
    def overdue_age_ms(self) -> int:
        """Age of the oldest overdue message at the last step of housekeeping."""
        return 0 if self._loops is None else self._loops.housekeeping.overdue_age_ms

    # --- idle ---------------------------------------------------------------------------------------------

    async def wait_until_idle(self) -> None:
        """Return when the served lanes hold nothing but recurring messages, and nothing is in flight.

        While the store does not answer, it goes on asking, as the loops do.

        Raises:
            ClosedError: The scheduler is being closed.
            StoreDamagedError: Another program has overwritten the store's data.
        """
        tells_from_s, has_told = self._loop.time() + TELL_WAIT_S, False
        with self.watch() as changed:
            while True:
                changed.clear()
                if self.is_closing:
                    raise ClosedError("scheduler", "closed")
                pause_s = PENDING_POLL_S
                if not self.in_flight:
                    try:
                        pending = await self._pending(most=1)
                        if not pending:
                            return
                        if self._loop.time() >= tells_from_s:
                            has_told = has_told or await self._tell_wait(pending[0])
                            pause_s = self._pause_s(pending[0])
                    except StoreDamagedError:
                        raise
                    except StoreUnavailableError as error:
                        log.debug("run_until_idle() asks again: %s", error)
                await changed.wait(pause_s)

    def _pause_s(self, first: Snapshot) -> float:
        """Return how long to wait before the store is asked again; another process may end the message meanwhile."""
        left_s = (first.next_attempt_ms - self._store.now_ms()) / 1000
        return min(max(left_s, PENDING_POLL_S), LONGEST_PENDING_POLL_S)

    async def _pending(self, *, most: int) -> Sequence[Snapshot]:
        """Return messages of the served lanes, the next one first, and no recurring ones."""
        found: list[Snapshot] = []
        query = Query(lanes=tuple(self.lanes()), limit=100)
        while query.lanes and len(found) < most:
            page = await self._store.search(query)
            if not page:
                break
            found += [snapshot for snapshot in page if snapshot.record.envelope.rule is None]
            query = Query(lanes=query.lanes, limit=100, after=(page[-1].next_attempt_ms, page[-1].record.id))
        return found[:most]

    async def _tell_wait(self, first: Snapshot) -> bool:
        """Log a wait that is longer than `drain`; return whether it was logged."""
        left_ms = first.next_attempt_ms - self._store.now_ms()
        if left_ms <= self._options.drain_ms:
            return False
        n = len(await self._pending(most=MOST_COUNTED))
        told = f"{n} or more messages" if n == MOST_COUNTED else f"{n} message{'s' if n > 1 else ''}"
        due = format_duration(left_ms // 1000 * 1000)
        log.warning("run_until_idle() is waiting for %s, the next due in %s", told, due)
        return True

    # --- the end ------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop claiming, let deliveries end, settle, then disconnect; each step is shielded and bounded.

        It takes at most `drain`, `CANCEL_S` where runs go on although they were cancelled, and `CLOSE_S`; longer only
        where a store ends its clients although closing it was cancelled. Cancelled meanwhile, it waits no longer for
        deliveries to end: they are cancelled and given back.
        """
        self.is_closing = True
        try:
            with anyio.CancelScope(shield=True):
                await run_to_completion(self._stop_in_order(), name="aiodelay close", on_cancel=self._hurry)
        finally:
            with anyio.CancelScope(shield=True):
                try:
                    await self._end_tasks()
                finally:
                    await self._disconnect()

    async def _disconnect(self) -> None:
        left_s = min(max(self._closed_by_s - self._loop.time(), DISCONNECT_S), CLOSE_S)
        with anyio.move_on_after(left_s) as closing:
            await self._stack.aclose()
        if closing.cancelled_caught:
            log.error("closing the store and sinks took longer than %.0f s and was given up", left_s)

    def _hurry(self) -> None:
        for subscription in self._all():
            subscription.stop()

    async def _stop_in_order(self) -> None:
        drained_by_s = self._drained_by_s()
        if self._loops is not None:
            await self._loops.stop_claiming(drained_by_s)
            await self._end(self._all(), drained_by_s)
        self._closed_by_s = max(drained_by_s, self._loop.time()) + CLOSE_S
        answered_by_s = self._closed_by_s - DISCONNECT_S
        if self._loops is not None:
            await self._settled_by(self._all(), answered_by_s)
            await self._loops.stop(answered_by_s)
        if self._hooks is not None:
            self._hooks.close()
            await ended_by(answered_by_s, [self._hooks_task])
        if self._data_watch is not None:  # closing waits for no answer to its question
            self._watch_task.cancel()
            await asyncio.wait([self._watch_task])
        self.commit.close()
        await ended_by(answered_by_s, [self._commit_task])
        if self._loops is not None:
            await self._loops.stop_housekeeping(min(answered_by_s, self._loop.time() + CLOSE_S - DISCONNECT_S))
        if self.in_flight:
            log.error("%d messages were not settled: they are delivered again when their leases end", self.in_flight)

    async def _end_tasks(self) -> None:
        """Cancel what is left of our tasks. What ended the scheduler's block goes its own way, not into a group."""
        try:
            await self._tasks.__aexit__(_TheEnd, _TheEnd(), None)
        except* _TheEnd:
            pass


class _TheEnd(Exception):  # noqa: N818 - a signal to our task group alone
    """Ends a task group that has nothing left to wait for."""
