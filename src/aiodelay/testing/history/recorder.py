"""`record`: write what one scheduler does into a history."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from typing import Literal, Protocol

from aiodelay.core.transitions import base_id, delivery_id
from aiodelay.core.values import (
    Claim,
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
from aiodelay.ports import DeadLetters, Feed, LocalFeed, Sink, Transferring, Work
from aiodelay.ports.carrier import Carrier
from aiodelay.scheduler import Context, Scheduler

from . import events as h
from .recorded import RecordedCommands, RecordedFeed, RecordedLocalFeed, RecordedTransfer, RecordedWork

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


class _Held(Protocol):
    """A claim of this process. The engine's `Held` implements it."""

    claim: Claim


class _Recorder:
    """The observer of a recorded scheduler.

    A run begins with `begin`. The end of a handler's run is noted by the middleware `around`. A message that a program
    took from `Scheduler.messages` has no handler: its run ends when it is settled.
    """

    def __init__(self, history: h.History) -> None:
        self._history = history
        self._runs: set[tuple[str, int]] = set()
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

    def taken_in(self, topic: str, partition: int, puts: Sequence[Put]) -> AbstractContextManager[Sequence[Put]]:
        return nullcontext(puts)

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
                yield RecordedFeed(feed, self._history, puts_back=True)

    def transfer(self, moves: Transferring, lane: Lane) -> Transferring:
        return RecordedTransfer(moves, self._history, lane)

    # --- runs ---------------------------------------------------------------------------------------------

    def begin(self, held: _Held, lateness_ms: int) -> None:
        record = held.claim.record
        self._runs.add(_run_of(record))
        self._history.write(self._started(record))

    def begin_batch(self, held: Sequence[_Held]) -> _UnobservedBatch:
        return _UnobservedBatch()

    async def around(self, context: Context, call_next: Callable[[Context], Awaitable[object]]) -> object:
        """Note the end of a handler's run: a middleware. Only a run that returns None has delivered its message."""
        result: object = _NOTHING
        cancelled = False
        try:
            result = await call_next(context)
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            messages = context.messages
            results = result if isinstance(result, list) and len(result) == len(messages) else [result] * len(messages)
            for each, one in zip(messages, results, strict=True):
                self._ended(
                    (each.delivery_id, each.attempt), "cancelled" if cancelled else "ok" if one is None else "failed"
                )
        return result

    async def send(self, sink: Sink, held: Sequence[_Held], deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        for each in held:
            self.begin(each, 0)
        outcomes: Sequence[SendOutcome] = ()
        try:
            outcomes = await sink.send(deliveries)
        finally:
            for i, each in enumerate(held):
                is_sent = i < len(outcomes) and isinstance(outcomes[i], Sent)
                self._ended(_run_of(each.claim.record), "ok" if is_sent else "failed")
        return outcomes

    def settled(self, held: _Held, settlement: Settlement) -> Settlement:
        run = _run_of(held.claim.record)
        if run in self._runs:
            is_done = isinstance(settlement, Done) and settlement.outcome == "delivered"
            self._ended(run, "ok" if is_done else "failed")
        return settlement

    def left(self, held: _Held) -> None:
        self._runs.discard(_run_of(held.claim.record))

    def _started(self, record: Record) -> h.RunStarted:
        envelope = record.envelope
        return h.RunStarted(
            id=base_id(envelope.id),
            delivery_id=delivery_id(record),
            attempt=record.attempt + 1,
            lane="" if envelope.lane in self._lanes_of_sources else envelope.lane,
            digest=h.digest_of(envelope.payload, envelope.key, envelope.headers),
        )

    def _ended(self, run: tuple[str, int], result: Literal["ok", "failed", "cancelled"]) -> None:
        self._runs.discard(run)
        self._history.write(h.RunEnded(delivery_id=run[0], attempt=run[1], result=result))

    # --- the opening --------------------------------------------------------------------------------------

    def apart(self, *, silent: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def watch(self, loads: Callable[[], Iterable[tuple[Lane, int, int]]]) -> None: ...

    def forget(self) -> None:
        self._history.write(h.Process(what="closed"))


_NOTHING = object()


class _UnobservedBatch:
    def enter(self, variables: object) -> None: ...

    def end(self, error: BaseException | None) -> None: ...


def _run_of(record: Record) -> tuple[str, int]:
    return delivery_id(record), record.attempt + 1


def _redriven(call: int, outcome: Outcome) -> h.Returned:
    if isinstance(outcome, Stored):
        return h.Returned(
            call=call, outcome="ok", answer=outcome.answer, revision=outcome.revision, due_ms=outcome.due_ms
        )
    return h.Returned(call=call, outcome="ok", answer=getattr(outcome, "reason", "unknown"))
