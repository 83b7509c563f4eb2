"""`ObservedStore`: a forwarding store that records its calls and can kill its process at a named failure point.

The order matters. A call is written to the history before its failure point `before`. Its failure point `after` comes
when the store has carried out the call and nobody else knows it yet.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal, NoReturn, Self, TypeAlias

from msgspec import Struct

from aiodelay.core.values import (
    Again,
    Claimed,
    Command,
    Dead,
    Demand,
    Lane,
    Outcome,
    PutBack,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    SourcePosition,
    Stored,
    Tidied,
    WorkStatus,
)
from aiodelay.ports import Feed, Pulse, Pulsing, Source, Store, Work
from aiodelay.ports.pulse import Step
from aiodelay.testing import history as h
from aiodelay.testing.forwarding import ForwardingStore

__all__ = ["FailurePoint", "FailurePoints", "Kill", "ObservedSource", "ObservedStore", "kill_oneself"]

When: TypeAlias = Literal["before", "after"]


class FailurePoint(Struct, frozen=True):
    """The point at which a process ends: before or after the n-th call of a name.

    Names: `apply`, `claim` (only claims that return messages), `settle`, `renew`, `tidy`, `handler`, `send`. During the
    first five, the thread of SQLite's writer has the points `<name> begin`, `<name> commit` and `<name> statement`.
    `<name> statement` counts the SQL statements inside the transaction.
    """

    name: str
    when: When = "before"
    n: int = 1

    def __str__(self) -> str:
        return f"{self.when} {self.name} {self.n}"


Kill: TypeAlias = Callable[[], None]


def kill_oneself(history: h.History) -> NoReturn:
    """End this process as `kill -9` does: nothing is flushed, closed or reported."""
    history.write(h.Process(what="killed"))
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # the signal may reach another thread first
        time.sleep(1)


class FailurePoints:
    """Counts the points that the process reaches, and ends it at the failure point. Thread-safe.

    Args:
        point: The failure point; None = do not end the process.
        kill: Ends the process.
    """

    def __init__(self, point: FailurePoint | None, kill: Kill) -> None:
        self._point, self._kill = point, kill
        self.during: list[str] = []
        self._counts: Counter[tuple[str, When]] = Counter()
        self._lock = threading.Lock()

    def passes(self, name: str, when: When) -> None:
        """Count a point that is reached now."""
        with self._lock:
            self._counts[name, when] += 1
            count = self._counts[name, when]
        if self._point == FailurePoint(name, when, count):
            self._kill()

    def passes_inside(self, name: str, when: When) -> None:
        """Count a point inside each call that is under way."""
        for call in self.during.copy():
            self.passes(f"{call} {name}", when)

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Count the points before and after a call. `after` counts only if the call returned."""
        self.passes(name, "before")
        self.during.append(name)
        try:
            yield
        finally:
            self.during.remove(name)
        self.passes(name, "after")


class ObservedStore(ForwardingStore):
    """A forwarding store that records its calls.

    Args:
        store: The real store.
        history: The history to which calls are written.
        points: The failure points of the process.
    """

    def __init__(self, store: Store, history: h.History, points: FailurePoints) -> None:
        super().__init__(store)
        self._history, self._points = history, points

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        with self._points.around("apply"):
            return await super().apply(commands, source=source)

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        async with super().work(worker, lanes) as work:
            yield _ObservedWork(work, self._history, self._points)

    async def put_back(self, messages: Sequence[PutBack]) -> Sequence[Stored]:
        batch = [(each.record.envelope.id, each.record.revision) for each in messages]
        self._history.write(h.PuttingBack(batch=batch))
        with self._points.around("put_back"):
            return await super().put_back(messages)


class ObservedSource:
    """A forwarding source. It records the messages that are taken from it like claims of a store.

    Args:
        source: The real source.
        history: The history to which calls are written.
        points: The failure points of the process.
    """

    def __init__(self, source: Source, history: h.History, points: FailurePoints) -> None:
        self._source, self._history, self._points = source, history, points

    @property
    def name(self) -> str:
        return self._source.name

    def check(self, address: str) -> None:
        self._source.check(address)

    async def __aenter__(self) -> Self:
        await self._source.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._source.__aexit__(*exc_info)

    @asynccontextmanager
    async def feed(self, *arguments: Any) -> AsyncIterator[Feed]:  # noqa: ANN401 - passed on
        async with self._source.feed(*arguments) as feed:
            yield _ObservedFeed(feed, self._history, self._points)


class _ObservedFeed:
    def __init__(self, work: Feed, history: h.History, points: FailurePoints) -> None:
        self._work, self._history, self._points = work, history, points

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        call = self._history.next_call()
        asked = h.Claiming(call=call)
        self._points.during.append("claim")
        try:
            claimed = await self._work.claim(demand, request=request, lease_ms=lease_ms)
        finally:
            self._points.during.remove("claim")
        if claimed.claims:
            self._points.passes("claim", "after")
            self._history.write(asked)
            notes = [_claim_note(claim.record, claim.token) for claim in claimed.claims]
            self._history.write(h.Claimed(call=call, now_ms=claimed.now_ms, claims=notes))
        return claimed

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        call = self._history.next_call()
        self._history.write(_settling(call, settlements))
        with self._points.around("settle"):
            outcomes = await self._work.settle(settlements)
        self._history.write(h.Settled(call=call, outcomes=list(outcomes)))
        return outcomes

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        call = self._history.next_call()
        self._history.write(_renewing(call, renewals))
        with self._points.around("renew"):
            outcomes = await self._work.renew(renewals)
        self._history.write(h.Renewed(call=call, outcomes=list(outcomes)))
        return outcomes

    def beat(self, ids: Collection[str]) -> None:
        self._work.beat(ids)

    async def wait(self, *, until_ms: int | None) -> None:
        await self._work.wait(until_ms=until_ms)

    def wake(self) -> None:
        self._work.wake()

    def clear(self) -> None:
        self._work.clear()


class _ObservedPulse:
    """Records the calls that the thread of the pulse makes for a blocked event loop."""

    def __init__(self, pulse: Pulse, history: h.History) -> None:
        self._pulse, self._history = pulse, history

    @property
    def is_calling(self) -> bool:
        return self._pulse.is_calling

    def may_begin(self) -> bool:
        return self._pulse.may_begin()

    def step(self, tokens: Collection[int]) -> Step:
        return self._pulse.step(tokens)

    def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        call = self._history.next_call()
        self._history.write(_renewing(call, renewals))
        outcomes = self._pulse.renew(renewals)
        self._history.write(h.Renewed(call=call, outcomes=list(outcomes)))
        return outcomes

    def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        call = self._history.next_call()
        self._history.write(_settling(call, settlements))
        outcomes = self._pulse.settle(settlements)
        self._history.write(h.Settled(call=call, outcomes=list(outcomes)))
        return outcomes

    def wait(self, ms: int) -> None:
        self._pulse.wait(ms)

    def wake(self) -> None:
        self._pulse.wake()

    def restart(self) -> None:
        self._pulse.restart()

    def leave(self) -> None:
        self._pulse.leave()


class _ObservedWork(_ObservedFeed):
    _work: Work

    def __init__(self, work: Work, history: h.History, points: FailurePoints) -> None:
        super().__init__(work, history, points)
        pulse = work.pulse if isinstance(work, Pulsing) else None
        self.pulse: Pulse | None = None if pulse is None else _ObservedPulse(pulse, history)

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        with self._points.around("tidy"):
            return await self._work.tidy(lanes, limit=limit)

    def status(self) -> WorkStatus:
        return self._work.status()


def _settling(call: int, settlements: Sequence[Settlement]) -> h.Settling:
    return h.Settling(call=call, batch=[_settling_note(each) for each in settlements])


def _renewing(call: int, renewals: Sequence[Renewal]) -> h.Renewing:
    return h.Renewing(call=call, batch=[(each.id, each.token, each.to) for each in renewals])


def _claim_note(record: Any, token: int) -> h.ClaimNote:  # noqa: ANN401 - a Record
    lane = record.envelope.lane
    return h.ClaimNote(
        record.id, record.revision, record.due_ms, lane, record.attempt, token, record.alone, record.lapses
    )


def _settling_note(settlement: Settlement) -> h.SettlingNote:
    kind = "again" if isinstance(settlement, Again) else "dead" if isinstance(settlement, Dead) else settlement.outcome
    return h.SettlingNote(settlement.id, settlement.revision, settlement.token, kind)
