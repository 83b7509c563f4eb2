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
    Claimed,
    Command,
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
)
from aiodelay.ports import Feed, Pulse, Pulsing, Source, Store, Work
from aiodelay.testing import history as h
from aiodelay.testing.forwarding import ForwardingFeed, ForwardingStore, ForwardingWork
from aiodelay.testing.history.recorded import RecordedFeed, RecordedWork

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
            yield RecordedWork(_FailingWork(work, self._points), self._history)

    async def put_back(self, messages: Sequence[PutBack]) -> Sequence[Stored]:
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
            yield RecordedFeed(_FailingFeed(feed, self._points), self._history, is_source=True)


class _FailingFeed(ForwardingFeed):
    """A feed with failure points."""

    def __init__(self, work: Feed, points: FailurePoints) -> None:
        super().__init__(work)
        self._points = points

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        self._points.during.append("claim")
        try:
            claimed = await self._work.claim(demand, request=request, lease_ms=lease_ms)
        finally:
            self._points.during.remove("claim")
        if claimed.claims:
            self._points.passes("claim", "after")
        return claimed

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        with self._points.around("settle"):
            return await self._work.settle(settlements)

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        with self._points.around("renew"):
            return await self._work.renew(renewals)


class _FailingWork(_FailingFeed, ForwardingWork):
    """The dispatching side of a store, with failure points."""

    _work: Work

    @property
    def pulse(self) -> Pulse | None:
        return self._work.pulse if isinstance(self._work, Pulsing) else None

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        with self._points.around("tidy"):
            return await self._work.tidy(lanes, limit=limit)
