"""`record`: write what one scheduler does into a history."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from contextvars import ContextVar
from typing import Literal, NamedTuple

from aiodelay.core.transitions import base_id, delivery_id
from aiodelay.core.values import (
    DeadKey,
    Delivery,
    Done,
    Lane,
    Outcome,
    Put,
    Record,
    SendOutcome,
    Sent,
    Settlement,
    Stored,
)
from aiodelay.engine.observer import ObservedClaim
from aiodelay.ports import DeadLetters, Feed, LocalFeed, Sink, Transferring, Work
from aiodelay.ports.carrier import Carrier
from aiodelay.scheduler import Context, Scheduler

from . import events as h
from .recorded import RecordedCommands, RecordedFeed, RecordedLocalFeed, RecordedTransfer, RecordedWork, scheduling

__all__ = ["count_resources", "record"]


def record(scheduler: Scheduler, history: h.History) -> None:
    """Record every command and every delivery of a scheduler from its next opening on.

    The scheduler keeps its store, sinks and handlers. It sends no telemetry while it is recorded. Record a scheduler
    only once, and close the history after the scheduler.

    Args:
        scheduler: A scheduler that is not open.
        history: The history of this scheduler alone.

    Raises:
        ClosedError: The scheduler is already open.
    """
    recorder = _Recorder(history)
    scheduler.observed_by(recorder)
    scheduler.middleware("handle")(recorder.around)


def count_resources(phase: Literal["baseline", "end"]) -> h.Resources:
    """Count what might leak: the tasks of the running loop, and the threads and open files of this process.

    Args:
        phase: `baseline` before a scheduler is opened, `end` after it has closed.
    """
    tasks, threads, files = len(asyncio.all_tasks()), threading.active_count(), len(os.listdir("/dev/fd"))
    return h.Resources(phase=phase, tasks=tasks, threads=threads, files=files)


class _Run(NamedTuple):
    """An attempt at delivering a message. The token of its claim tells it from other runs of the same attempt."""

    delivery_id: str
    attempt: int
    token: int


_RUNS: ContextVar[Sequence[_Run]] = ContextVar("aiodelay_recorded_runs")
"""The runs under way in a handler's context: one run for each message."""


class _RecordedRuns:
    """The observer's object for an attempt, and for a run of a handler of batches."""

    def __init__(self, runs: Sequence[_Run]) -> None:
        self.runs = runs

    def enter(self, variables: contextvars.Context) -> None:
        variables.run(_RUNS.set, self.runs)

    def failed(self, error: BaseException) -> None: ...

    def end(self, error: BaseException | None) -> None: ...


class _Recorder:
    """The observer of a recorded scheduler.

    A run begins with `begin`. The end of a handler's run is noted by the middleware `around`. A message that a program
    took from `Scheduler.messages` has no handler: its run ends when it is settled.
    """

    def __init__(self, history: h.History) -> None:
        self._history = history
        self._open: set[_Run] = set()
        self._lanes_of_sources: set[Lane] = set()

    # --- commands -----------------------------------------------------------------------------------------

    def commands(self, commands: Carrier) -> Carrier:
        return RecordedCommands(commands, self._history)

    async def redrive(self, letters: DeadLetters, keys: Sequence[DeadKey]) -> Sequence[Outcome]:
        calls = [self._history.next_call() for _ in keys]
        for call, key in zip(calls, keys, strict=True):
            self._history.write(h.Invoked(call=call, op="redrive", id=key.id, revision=key.revision))
        outcomes = await letters.redrive(keys)
        for call, outcome in zip(calls, outcomes, strict=True):
            self._history.write(_redriven(call, outcome))
        return outcomes

    async def purge(self, letters: DeadLetters, keys: Sequence[DeadKey]) -> int:
        calls = [self._history.next_call() for _ in keys]
        for call, key in zip(calls, keys, strict=True):
            self._history.write(h.Invoked(call=call, op="purge", id=key.id, revision=key.revision))
        purged = await letters.purge(keys)
        if purged in (0, len(set(keys))):  # otherwise, the store does not say which letters it has deleted
            answer = "purged" if purged else "not_found"
            for call in calls:
                self._history.write(h.Returned(call=call, outcome="ok", answer=answer))
        return purged

    @contextmanager
    def taken_in(self, topic: str, partition: int, puts: Sequence[Put]) -> Iterator[Sequence[Put]]:
        for put in puts:  # the intake does not tell their outcomes
            self._history.write(scheduling(self._history.next_call(), put))
        yield puts

    # --- claims -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def work(self, opening: AbstractAsyncContextManager[Work]) -> AsyncIterator[Work]:
        async with opening as work:
            self._history.write(h.Process(what="opened"))
            yield RecordedWork(work, self._history)

    @asynccontextmanager
    async def feed(self, opening: AbstractAsyncContextManager[Feed], lane: Lane) -> AsyncIterator[Feed]:
        self._lanes_of_sources.add(lane)
        async with opening as feed:
            if isinstance(feed, LocalFeed):
                yield RecordedLocalFeed(feed, self._history)
            else:
                yield RecordedFeed(feed, self._history, is_source=True)

    def transfer(self, moves: Transferring, lane: Lane) -> Transferring:
        return RecordedTransfer(moves, self._history, lane)

    # --- runs ---------------------------------------------------------------------------------------------

    def begin(self, held: ObservedClaim, lateness_ms: int) -> None:
        record = held.claim.record
        run = _Run(delivery_id(record), record.attempt + 1, held.claim.token)
        held.attempt = _RecordedRuns((run,))
        self._open.add(run)
        self._history.write(self._started(record, run))

    def begin_batch(self, held: Sequence[ObservedClaim]) -> _RecordedRuns:
        return _RecordedRuns([run for each in held for run in _runs_of(each)])

    async def around(self, context: Context, call_next: Callable[[Context], Awaitable[object]]) -> object:
        """Note the end of a handler's run: a middleware. Only a run that returns None has delivered its message."""
        result: object = _NOTHING
        cancelled = False
        runs = _RUNS.get()
        try:
            result = await call_next(context)
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            results = result if isinstance(result, list) and len(result) == len(runs) else [result] * len(runs)
            for run, one in zip(runs, results, strict=True):
                self._ended(run, "cancelled" if cancelled else "ok" if one is None else "failed")
        return result

    async def send(
        self, sink: Sink, held: Sequence[ObservedClaim], deliveries: Sequence[Delivery]
    ) -> Sequence[SendOutcome]:
        for each in held:
            self.begin(each, 0)
        outcomes: Sequence[SendOutcome] = ()
        try:
            outcomes = await sink.send(deliveries)
        finally:
            for i, each in enumerate(held):
                is_sent = i < len(outcomes) and isinstance(outcomes[i], Sent)
                for run in _runs_of(each):
                    self._ended(run, "ok" if is_sent else "failed")
        return outcomes

    def settled(self, held: ObservedClaim, settlement: Settlement) -> Settlement:
        is_done = isinstance(settlement, Done) and settlement.outcome == "delivered"
        for run in self._open.intersection(_runs_of(held)):
            self._ended(run, "ok" if is_done else "failed")
        return settlement

    def left(self, held: ObservedClaim) -> None:
        self._open.difference_update(_runs_of(held))

    def _started(self, record: Record, run: _Run) -> h.RunStarted:
        envelope = record.envelope
        return h.RunStarted(
            id=base_id(envelope.id),
            delivery_id=run.delivery_id,
            attempt=run.attempt,
            lane="" if envelope.lane in self._lanes_of_sources else envelope.lane,
            digest=h.digest_of(envelope.payload, envelope.key, envelope.headers),
            token=run.token,
        )

    def _ended(self, run: _Run, result: Literal["ok", "failed", "cancelled"]) -> None:
        self._open.discard(run)
        self._history.write(
            h.RunEnded(delivery_id=run.delivery_id, attempt=run.attempt, token=run.token, result=result)
        )

    # --- the opening --------------------------------------------------------------------------------------

    def apart(self, *, silent: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def watch(self, loads: Callable[[], Iterable[tuple[Lane, int, int]]]) -> None: ...

    def forget(self) -> None:
        self._history.write(h.Process(what="closed"))


_NOTHING = object()


def _runs_of(held: ObservedClaim) -> Sequence[_Run]:
    """Return the run of a claim, or nothing if it has not begun."""
    return held.attempt.runs if isinstance(held.attempt, _RecordedRuns) else ()


def _redriven(call: int, outcome: Outcome) -> h.Returned:
    if isinstance(outcome, Stored):
        return h.Returned(
            call=call, outcome="ok", answer=outcome.answer, revision=outcome.revision, due_ms=outcome.due_ms
        )
    return h.Returned(call=call, outcome="ok", answer=getattr(outcome, "reason", "unknown"))
