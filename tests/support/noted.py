"""`NotedStore`: a memory store with faults that records each call of its dispatching role: time, arguments, answer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from aiodelay.core.values import (
    Claimed,
    Command,
    Demand,
    Lane,
    Outcome,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    SourcePosition,
    Tidied,
)
from aiodelay.memory import MemoryStore
from aiodelay.ports import PartialAnswerError, Work
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.faults import FaultyStore
from aiodelay.testing.forwarding import ForwardingWork

__all__ = ["Call", "NotedStore"]

T = TypeVar("T")
Name: TypeAlias = Literal["claim", "settle", "renew", "tidy", "apply", "wait"]


@dataclass(slots=True)
class Call:
    """One call. `asked` is its argument: the demand, the settlements, and so on. Times are ms since the clock began.

    While the call has no answer, `answered_ms` is None. If the call raised, `answer` is None.
    """

    name: Name
    asked_ms: int
    asked: Any
    request: str = ""
    answered_ms: int | None = None
    answer: Any = None


class NotedStore(FaultyStore):
    """A memory store with faults that records the calls of its dispatching role.

    Attributes:
        memory: The real store, without faults. Calls to it are not recorded.
        calls_made: The calls, in the order in which they began.
        errors: For each name, the errors that the next calls raise, in turn, without calling the store.
        cuts: For each name, the number of answers that lack their last outcome.
        breaks_at: The id of a message. The settlement of this message raises.
        away: The ids of the messages in a part of the store that does not answer. It carries renewals out, but no
            settlements.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self.memory = MemoryStore(clock=clock, journal=100_000)
        super().__init__(self.memory)
        self.clock = clock
        self.calls_made: list[Call] = []
        self.errors: defaultdict[Name, list[BaseException]] = defaultdict(list)
        self.cuts: Counter[Name] = Counter()
        self.breaks_at = ""
        self.away: set[str] = set()

    def made(self, name: Name, since_ms: int = 0) -> list[Call]:
        """Return the calls of one name since a time."""
        return [call for call in self.calls_made if call.name == name and call.asked_ms >= since_ms]

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        """Open the dispatching role, with faults and records of its calls."""
        async with super().work(worker, lanes) as work:
            yield _NotedWork(self, work)

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        """Carry out commands, and record the call."""
        return await self.note("apply", list(commands), lambda: super(NotedStore, self).apply(commands, source=source))

    async def note(self, name: Name, asked: object, ask: Callable[[], Awaitable[T]], request: str = "") -> T:
        """Make a call, and record it with its answer."""
        call = Call(name, self.clock.monotonic_ms(), asked, request)
        self.calls_made.append(call)
        try:
            if self.errors[name]:
                raise self.errors[name].pop(0)
            answer = await ask()
        finally:
            call.answered_ms = self.clock.monotonic_ms()
        call.answer = answer
        return answer

    def cut(self, name: Name, outcomes: Sequence[T]) -> Sequence[T]:
        """Return the outcomes, without the last one if `cuts` says so."""
        if not self.cuts[name]:
            return outcomes
        self.cuts[name] -= 1
        return outcomes[:-1]

    def answered(self, ids: Sequence[str], outcomes: Sequence[object]) -> None:
        """Raise PartialAnswerError if some of the ids are away."""
        if self.away & set(ids):
            given = [None if each in self.away else outcome for each, outcome in zip(ids, outcomes, strict=True)]
            raise PartialAnswerError("memory", "a part of it is away", given)


class _NotedWork(ForwardingWork):
    def __init__(self, store: NotedStore, work: Work) -> None:
        super().__init__(work)
        self._store = store

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        work = self._work
        return await self._store.note(
            "claim", dict(demand), lambda: work.claim(demand, request=request, lease_ms=lease_ms), request
        )

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        if any(settlement.id == self._store.breaks_at for settlement in settlements):
            self._store.errors["settle"].append(KeyError(self._store.breaks_at))
        sent = [each for each in settlements if each.id not in self._store.away]
        outcomes = await self._store.note("settle", list(settlements), lambda: self._work.settle(sent))
        if len(sent) < len(settlements):
            known = dict(zip((each.id for each in sent), outcomes, strict=True))
            self._store.answered([each.id for each in settlements], [known.get(each.id) for each in settlements])
        return self._store.cut("settle", outcomes)

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        outcomes = await self._store.note("renew", list(renewals), lambda: self._work.renew(renewals))
        self._store.answered([each.id for each in renewals], outcomes)
        return self._store.cut("renew", outcomes)

    async def wait(self, *, until_ms: int | None) -> None:
        await self._store.note("wait", until_ms, lambda: self._work.wait(until_ms=until_ms))

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        return await self._store.note("tidy", list(lanes), lambda: self._work.tidy(lanes, limit=limit))
