"""`FaultyStore`: a store that fails when told to, at a named step; deterministic, or at random from a seed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Literal, NoReturn, Self, TypeAlias, TypeVar, get_args

from aiodelay.core.durations import Duration, parse_duration
from aiodelay.core.values import (
    Claimed,
    Command,
    Demand,
    Lane,
    Outcome,
    Refused,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    SourcePosition,
    Tidied,
    Unknown,
    WorkStatus,
)
from aiodelay.errors import ConfigurationError, StoreUnavailableError, shortened
from aiodelay.ports import Store, Work

from .forwarding import ForwardingStore

__all__ = ["Fault", "FaultyStore", "InjectedBugError", "Injection", "Step"]

Step: TypeAlias = Literal["open", "apply", "claim", "settle", "renew", "tidy"]
"""Where a fault can strike; `apply` is what `schedule`, `cancel`, `reschedule` and `fire` come to."""

Fault: TypeAlias = Literal[
    "unavailable", "request_lost", "reply_lost", "hang", "delay", "late_reply", "repeat", "crash"
]
"""What goes wrong:

- `unavailable`: refused, surely not done.
- `request_lost`: not done, but the caller cannot know.
- `reply_lost`: done, but the caller cannot know.
- `hang`: no answer until `heal()`; then it is done.
- `delay`: done, and answered, only after a while.
- `late_reply`: done at once, answered after a while.
- `repeat`: done twice, as a network may repeat a request; the second answer is given.
- `crash`: raises `InjectedBugError`, which no store may: a bug in it.
"""

T = TypeVar("T")


class InjectedBugError(RuntimeError):
    """What the fault `crash` raises."""


class Injection:
    """One fault at work.

    Attributes:
        fault: What goes wrong.
        steps: Where.
        left: How often it still strikes; None = until `heal()`.
        hits: How often it has struck.
    """

    fault: Fault
    steps: frozenset[Step]
    left: int | None
    hits: int
    seconds: float

    def __init__(
        self,
        fault: Fault,
        steps: frozenset[Step],
        *,
        left: int | None,
        after: int,
        probability: float,
        seconds: float,
    ) -> None:
        self.fault, self.steps, self.left, self.hits = fault, steps, left, 0
        self._after, self._probability, self.seconds = after, probability, seconds

    def __repr__(self) -> str:
        left = "" if self.left is None else f", {self.left} left"
        return f"<{self.fault} at {' '.join(sorted(self.steps))}: {self.hits} hits{left}>"

    def strikes(self, step: Step, chance: random.Random) -> bool:
        """Say whether it strikes this call, and count it."""
        if step not in self.steps or self.left == 0:
            return False
        if self._after > 0:
            self._after -= 1
            return False
        if self._probability < 1 and chance.random() >= self._probability:
            return False
        self.left = None if self.left is None else self.left - 1
        self.hits += 1
        return True


class _Switches:
    """The injections of one store, which strike its calls.

    Args:
        store: Is named in errors.
        seed: For faults with a probability.
    """

    def __init__(self, store: Store, seed: int) -> None:
        self._store, self._chance = store, random.Random(seed)
        self._injections: list[Injection] = []
        self._hanging: set[asyncio.Future[None]] = set()
        self.calls: Counter[Step] = Counter()

    def add(self, injection: Injection) -> None:
        self._injections.append(injection)

    def heal(self) -> None:
        self._injections.clear()
        for waiter in self._hanging:
            if not waiter.done():
                waiter.set_result(None)

    async def call(self, step: Step, call: Callable[[], Awaitable[T]], fail: Callable[[Fault], T] | None = None) -> T:
        """Make a call as the injection says that strikes it; a call that fails raises, unless `fail` answers for it."""
        fail = fail or self._raise
        self.calls[step] += 1
        struck = next((each for each in self._injections if each.strikes(step, self._chance)), None)
        if struck is None:
            return await call()
        match struck.fault:
            case "unavailable" | "request_lost":
                return fail(struck.fault)
            case "reply_lost":
                await call()
                return fail(struck.fault)
            case "crash":
                raise InjectedBugError(f"injected at {step}")
            case "hang":
                await self._until_healed()
            case "late_reply":
                answer = await call()
                await asyncio.sleep(struck.seconds)
                return answer
            case "delay":
                await asyncio.sleep(struck.seconds)
            case "repeat":
                await call()
        return await call()

    async def _until_healed(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hanging.add(waiter)
        try:
            await waiter
        finally:
            self._hanging.discard(waiter)

    def _raise(self, fault: Fault) -> NoReturn:
        raise StoreUnavailableError(self._store.name, f"injected {fault}")


class FaultyStore(ForwardingStore):
    """Stands before a store, passes everything on, and fails as told by `inject`.

    Faults strike at the steps alone. All else that a store does (inspect, hold, dead letters, journal) works as ever.

    Args:
        store: The store that does the work.
        seed: For faults with a probability: the same seed gives the same faults.

    Attributes:
        calls: How often each step was called.
        applied: How many commands each call of `apply` brought, the failed ones included.
    """

    def __init__(self, store: Store, *, seed: int = 0) -> None:
        super().__init__(store)
        self._switches = _Switches(store, seed)
        self.calls: Counter[Step] = self._switches.calls
        self.applied: list[int] = []

    # --- switches -----------------------------------------------------------------------------------------

    def inject(
        self,
        fault: Fault,
        *steps: Step,
        times: int | None = 1,
        after: int = 0,
        probability: float = 1.0,
        lasting: Duration = "1s",
    ) -> Injection:
        """Have something go wrong from now on.

        Several may be at work; of those that name a step, the one injected first strikes.

        Args:
            fault: What goes wrong.
            steps: Where; none named = at all of them.
            times: How often it strikes; None = until `heal()`.
            after: How many calls of these steps go well first.
            probability: With which each call is struck, 0 to 1.
            lasting: For `delay` and `late_reply`: how long.

        Returns:
            The injection; its `hits` counts.

        Raises:
            ConfigurationError: No such fault or step.
        """
        for word, allowed in [(fault, get_args(Fault)), *((step, get_args(Step)) for step in steps)]:
            if word not in allowed:
                raise ConfigurationError("fault or step", shortened(word), ", ".join(allowed))
        seconds = parse_duration(lasting, field="lasting") / 1000
        where: frozenset[Step] = frozenset(steps or get_args(Step))
        injection = Injection(fault, where, left=times, after=after, probability=probability, seconds=seconds)
        self._switches.add(injection)
        return injection

    def heal(self) -> None:
        """End all faults; what hangs goes on."""
        self._switches.heal()

    # --- Store --------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Connect."""
        await self._switches.call("open", self._store.__aenter__)
        return self

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        """Carry out commands, or fail in the way a store may."""
        self.applied.append(len(commands))

        def fail(fault: Fault) -> Sequence[Outcome]:
            text = f"injected {fault}"
            return [Refused("unavailable", text) if fault == "unavailable" else Unknown(text)] * len(commands)

        return await self._switches.call("apply", lambda: self._store.apply(commands, source=source), fail)

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        """Open the dispatching role, with faults."""
        async with self._store.work(worker, lanes) as work:
            yield _FaultyWork(work, self._switches)


class _FaultyWork:
    """A worker's side of the store, with the same switches."""

    def __init__(self, work: Work, switches: _Switches) -> None:
        self._work, self._switches = work, switches

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        work = self._work
        return await self._switches.call("claim", lambda: work.claim(demand, request=request, lease_ms=lease_ms))

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        return await self._switches.call("settle", lambda: self._work.settle(settlements))

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        return await self._switches.call("renew", lambda: self._work.renew(renewals))

    async def wait(self, *, until_ms: int | None) -> None:
        await self._work.wait(until_ms=until_ms)

    def wake(self) -> None:
        self._work.wake()

    def clear(self) -> None:
        self._work.clear()

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        return await self._switches.call("tidy", lambda: self._work.tidy(lanes, limit=limit))

    def beat(self, ids: Collection[str]) -> None:
        self._work.beat(ids)

    def status(self) -> WorkStatus:
        return self._work.status()
