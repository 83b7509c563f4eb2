"""`Running`: one opening of a scheduler. It connects the store, sinks and sources, and starts and ends the loops."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

import anyio
from msgspec import structs

from aiodelay.core.completion import run_to_completion
from aiodelay.core.retry import Retry
from aiodelay.core.values import Claim, Lane, WorkStatus
from aiodelay.errors import WrongLoopError
from aiodelay.handlers.context import RunContext
from aiodelay.handlers.spec import HandlerSpec
from aiodelay.ports import Identified, Sink, Source, Store, Work

from .data_watch import DataWatch
from .declared_limits import declare_limits
from .delivery.dead_letter_hooks import DeadLetterHooks
from .idle import IdleWait
from .loops import Loops, RuntimeOptions, ended_by
from .observer import Observer
from .patience import Patience
from .sending.group_commit import GroupCommit
from .subscriptions import CLOSE_S, Subscriptions, sends_to

__all__ = ["Running"]

log: logging.Logger = logging.getLogger("aiodelay")

DISCONNECT_S = 2.0
"""The part of `CLOSE_S` that is kept for closing connections."""


class Running:
    """One opening of a scheduler, from `open` to `close`.

    Args:
        store: A store that is not connected yet.
        sinks: Sinks that are not connected yet.
        sources: Sources that are not connected yet.
        options: The scheduler's options.
        context: Makes a handler's context.
    """

    def __init__(
        self,
        store: Store,
        sinks: Sequence[Sink],
        sources: Sequence[Source],
        options: RuntimeOptions,
        context: Callable[[Claim, int, Retry], RunContext[Any]],
    ) -> None:
        self._store, self._sinks, self._sources, self._options = store, sinks, sources, options
        self._loop, self._pid = asyncio.get_running_loop(), os.getpid()
        self._worker = f"{socket.gethostname()}-{self._pid}-{uuid4().hex[:8]}"
        self.patience: Patience = Patience(options.open_timeout_ms)
        self._stack = AsyncExitStack()
        self._tasks = asyncio.TaskGroup()
        self.commit: GroupCommit = GroupCommit(store, options.clock, options.store_timeout_ms)
        self.subscriptions: Subscriptions = Subscriptions(
            store,
            {source.name: source for source in sources},
            options,
            context,
            worker=self._worker,
            tasks=self._tasks,
            stack=self._stack,
        )
        self._loops: Loops | None = None
        self._data_watch: DataWatch | None = None
        self._hooks: DeadLetterHooks | None = None
        self.is_closing: bool = False
        self._closed_by_s = 0.0

    # --- open ---------------------------------------------------------------------------------------------

    async def open(self, *, dispatch: bool, lanes: Sequence[Lane], specs: Sequence[HandlerSpec]) -> None:
        """Connect, and start the background tasks.

        While the store, a sink or a source does not answer, `open` tries again for `open_timeout`.

        Args:
            dispatch: Whether to claim and deliver messages too.
            lanes: The lanes that are served at first.
            specs: The handlers that are served at first. Their limits are stored before the first claim.
        """
        what = f"opening {self._store.name}"
        with self._options.apart(silent=True):
            work = await self.patience.answered(what, lambda: self._connect(lanes, specs, dispatch=dispatch))
        await self._tasks.__aenter__()
        with self._options.apart():
            try:
                self._start(work)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await self._end_tasks()
                    await self._disconnect()
                raise

    async def _connect(self, lanes: Sequence[Lane], specs: Sequence[HandlerSpec], *, dispatch: bool) -> Work | None:
        """Open all or nothing: if the attempt fails, the next attempt opens the store, sinks and sources again."""
        try:
            return await self._enter_all(lanes, specs, dispatch=dispatch)
        except BaseException:
            await self._stack.aclose()
            raise

    async def _enter_all(self, lanes: Sequence[Lane], specs: Sequence[HandlerSpec], *, dispatch: bool) -> Work | None:
        await self._stack.enter_async_context(self._store)
        if not dispatch:
            return None
        await declare_limits(self._store, specs)
        for sink in self._sinks:
            if sends_to(self._store, sink):  # a store that transfers needs no open sink
                await self._stack.enter_async_context(sink)
        for source in self._sources:
            await self._stack.enter_async_context(source)
        opening, observer = self._store.work(self._worker, lanes), self._options.observer
        if observer is not None:
            opening = observer.work(opening)
            observer.watch(self.subscriptions.load)
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
                subscriptions=self.subscriptions.by_lane,
                lanes=self.subscriptions.lanes,
                options=self._options_of_loops(),
                tasks=self._tasks,
                on_change=self.subscriptions.changed,
            )
            self.subscriptions.begin(self._loops, self._hooks)

    def _options_of_loops(self) -> RuntimeOptions:
        """Return the options with a lease that the store allows."""
        lease_ms = min(self._options.lease_ms, self._store.traits.longest_lease_ms)
        return structs.replace(self._options, lease_ms=lease_ms)

    def _start_hooks(self) -> None:
        if self._options.dead_letter_hooks:
            hooks, on_change = self._options.dead_letter_hooks, self.subscriptions.changed
            self._hooks = DeadLetterHooks(hooks, self._store.now_ms, on_change)
            self._hooks_task = self._tasks.create_task(self._hooks.run(), name="aiodelay on_dead_letter")

    # --- while it is open ---------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Refuse use from another event loop, thread or process.

        Raises:
            WrongLoopError: The caller is on another event loop, thread or process. The error says which of these.
        """
        if os.getpid() != self._pid:
            raise WrongLoopError("scheduler", "process (this process was forked)")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is not self._loop:
            raise WrongLoopError("scheduler", "event loop or thread")

    @property
    def observer(self) -> Observer | None:
        """The observer of this opening; None if there is no telemetry."""
        return self._options.observer

    @property
    def dispatches(self) -> bool:
        """Whether this opening claims and delivers messages."""
        return self._loops is not None

    def spawn(self, coroutine: Coroutine[None, None, None], name: str) -> None:
        """Run a coroutine in a task that this opening owns."""
        self._tasks.create_task(coroutine, name=name)

    def supersede(self, message_id: str, revision: int) -> None:
        """Begin no further run of a message in a version that is older than `revision`."""
        if self._loops is not None:
            self._loops.book.supersede(message_id, revision)

    def status(self) -> WorkStatus:
        """Return whether claims are served. A process that only schedules is ready once it is open."""
        status = WorkStatus("ready") if self._loops is None else self._loops.status()
        vanished = "" if self._data_watch is None else self._data_watch.vanished
        return structs.replace(status, why=vanished) if vanished and not status.why else status

    @property
    def overdue_age_ms(self) -> int:
        """The age of the oldest overdue message at the last step of housekeeping; 0 = no message is overdue."""
        return 0 if self._loops is None else self._loops.housekeeping.overdue_age_ms

    async def wait_until_idle(self) -> None:
        """Return when the served lanes hold only recurring messages, and no message is in flight.

        Raises:
            ClosedError: The scheduler is being closed.
            StoreDamagedError: Another program has overwritten the store's data.
        """
        await IdleWait(self._store, self.subscriptions, self._options.drain_ms, lambda: self.is_closing).wait()

    # --- close --------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop claiming, let deliveries end, settle, then disconnect. Each step is shielded and bounded.

        Closing takes at most `drain`, plus `CANCEL_S` if runs go on although they were cancelled, plus `CLOSE_S`. Then
        `close` gives up disconnecting. It takes longer only if a store still closes its clients after that.

        If the caller is cancelled meanwhile, `close` stops waiting for deliveries: it cancels them and gives their
        messages back.
        """
        self.is_closing = True
        try:
            with anyio.CancelScope(shield=True):
                stopping = self._stop_in_order()
                await run_to_completion(stopping, name="aiodelay close", on_cancel=self.subscriptions.stop)
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

    async def _stop_in_order(self) -> None:
        drained_by_s = self.subscriptions.drained_by_s()
        if self._loops is not None:
            await self._loops.stop_claiming(drained_by_s)
            await self.subscriptions.end(drained_by_s)
        self._closed_by_s = max(drained_by_s, self._loop.time()) + CLOSE_S
        answered_by_s = self._closed_by_s - DISCONNECT_S
        if self._loops is not None:
            await self.subscriptions.settled_by(answered_by_s)
            await self._loops.stop(answered_by_s)
        if self._hooks is not None:
            self._hooks.close()
            await ended_by(answered_by_s, [self._hooks_task])
        if self._data_watch is not None:
            self._watch_task.cancel()  # the watch may wait for the store's answer, and nobody needs the answer now
            await asyncio.wait([self._watch_task])
        self.commit.close()
        await ended_by(answered_by_s, [self._commit_task])
        if self._loops is not None:
            await self._loops.stop_housekeeping(min(answered_by_s, self._loop.time() + CLOSE_S - DISCONNECT_S))
        in_flight = self.subscriptions.in_flight
        if in_flight:
            log.error("%d messages were not settled: they are delivered again when their leases end", in_flight)

    async def _end_tasks(self) -> None:
        """Cancel the remaining tasks. An exception of the `async with` block is raised unchanged, not in a group."""
        try:
            await self._tasks.__aexit__(_TheEnd, _TheEnd(), None)
        except* _TheEnd:
            pass


class _TheEnd(Exception):  # noqa: N818 - a signal to our task group alone
    """An exception that makes a task group cancel its tasks and end."""
