"""`FaultyStore`: a store with injected faults, for tests of programs and of aiodelay itself.

A fault strikes at a named step. It strikes a fixed number of calls, or random calls chosen from a seed.
"""

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
)
from aiodelay.errors import ConfigurationError, StoreUnavailableError, shortened
from aiodelay.ports import Store, Work

from .forwarding import ForwardingStore, ForwardingWork

__all__ = ["Fault", "FaultyStore", "InjectedBugError", "Injection", "Step"]

Step: TypeAlias = Literal["open", "apply", "claim", "settle", "renew", "tidy"]
"""A step of a store at which a fault can strike. `schedule`, `cancel`, `reschedule` and `fire` all call `apply`."""

Fault: TypeAlias = Literal[
    "unavailable", "request_lost", "reply_lost", "hang", "delay", "late_reply", "repeat", "crash"
]
"""The kind of a fault:

- `unavailable`: the store refuses the call and does nothing. The caller knows that nothing was done.
- `request_lost`: the store does nothing, but the caller cannot know this.
- `reply_lost`: the store carries out the call, but the caller cannot know this.
- `hang`: the call waits until `heal()`; then the store carries it out.
- `delay`: the store carries out the call, and answers it, after a while.
- `late_reply`: the store carries out the call at once, and answers it after a while.
- `repeat`: the store carries out the call twice, as if the network had repeated the request. The caller gets the
  second answer.
- `crash`: the call raises `InjectedBugError`. No store may raise this error, so the fault plays a bug in the store.
"""

T = TypeVar("T")


class InjectedBugError(RuntimeError):
    """The error that the fault `crash` raises."""


class Injection:
    """One active fault, as `FaultyStore.inject` returns it.

    Attributes:
        fault: The kind of the fault.
        steps: The steps at which the fault strikes.
        left: The number of strikes left; None = until `heal()`.
        hits: The number of calls that the fault has struck.
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
        """Return whether the fault strikes this call. If so, count the hit."""
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
    """The active faults of one store. Each call of a step goes through `call`.

    Args:
        store: The store whose name the errors show.
        seed: The seed of the faults with a probability.
    """

    def __init__(self, store: Store, seed: int) -> None:
        self._store, self._chance = store, random.Random(seed)
        self._injections: list[Injection] = []
        self._hanging: dict[asyncio.Future[None], None] = {}  # in the order of the calls
        self.calls: Counter[Step] = Counter()

    def add(self, injection: Injection) -> None:
        self._injections.append(injection)

    def heal(self) -> None:
        self._injections.clear()
        for waiter in self._hanging:
            if not waiter.done():
                waiter.set_result(None)

    async def call(self, step: Step, call: Callable[[], Awaitable[T]], fail: Callable[[Fault], T] | None = None) -> T:
        """Make a call, with the first fault that strikes it.

        Args:
            step: The step that the call belongs to.
            call: Calls the real store.
            fail: Makes the answer of a failed call; None = a failed call raises `StoreUnavailableError`.
        """
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
        self._hanging[waiter] = None
        try:
            await waiter
        finally:
            del self._hanging[waiter]

    def _raise(self, fault: Fault) -> NoReturn:
        raise StoreUnavailableError(self._store.name, f"injected {fault}")


class FaultyStore(ForwardingStore):
    """A store that forwards every call to another store and fails as `inject` says.

    Faults strike only at the steps named in `Step`. The other methods of the store (inspection, pauses, dead letters,
    the journal) always work.

    Args:
        store: The store that does the work.
        seed: The seed of the faults with a probability. The same seed gives the same faults.

    Attributes:
        calls: The number of calls of each step.
        applied: The number of commands in each call of `apply`, also in the failed calls.
    """

    def __init__(self, store: Store, *, seed: int = 0) -> None:
        super().__init__(store)
        self._switches = _Switches(store, seed)
        self.calls: Counter[Step] = self._switches.calls
        self.applied: list[int] = []

    # --- faults -------------------------------------------------------------------------------------------

    def inject(
        self,
        fault: Fault,
        *steps: Step,
        times: int | None = 1,
        after: int = 0,
        probability: float = 1.0,
        lasting: Duration = "1s",
    ) -> Injection:
        """Add a fault, which is active from now on.

        Several faults may be active. If two faults name the same step, the fault that was injected first strikes.

        Args:
            fault: The kind of the fault.
            steps: The steps at which the fault strikes; without steps, it strikes at every step.
            times: The number of calls to strike; None = until `heal()`.
            after: The number of calls of these steps that the fault lets pass first.
            probability: The probability that a call is struck, 0 to 1.
            lasting: The duration of a `delay` or a `late_reply`.

        Returns:
            The injection. Its attribute `hits` counts the calls that the fault has struck.

        Raises:
            ConfigurationError: The fault or a step does not exist. No fault was added.
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
        """Remove all faults. Calls that hang continue."""
        self._switches.heal()

    # --- Store --------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Connect."""
        await self._switches.call("open", self._store.__aenter__)
        return self

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        """Carry out commands, or fail in a way that the port `Store` allows."""
        self.applied.append(len(commands))

        def fail(fault: Fault) -> Sequence[Outcome]:
            text = f"injected {fault}"
            return [Refused("unavailable", text) if fault == "unavailable" else Unknown(text)] * len(commands)

        return await self._switches.call("apply", lambda: self._store.apply(commands, source=source), fail)

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        """Open the dispatching role, with the same faults."""
        async with self._store.work(worker, lanes) as work:
            yield _FaultyWork(work, self._switches)


class _FaultyWork(ForwardingWork):
    """A worker's view of the store, with the faults of the store."""

    def __init__(self, work: Work, switches: _Switches) -> None:
        super().__init__(work)
        self._switches = switches

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        work = self._work
        return await self._switches.call("claim", lambda: work.claim(demand, request=request, lease_ms=lease_ms))

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        return await self._switches.call("settle", lambda: self._work.settle(settlements))

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        return await self._switches.call("renew", lambda: self._work.renew(renewals))

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        return await self._switches.call("tidy", lambda: self._work.tidy(lanes, limit=limit))
