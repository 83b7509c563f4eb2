"""`Bench` and `Stage`: the base class of the suites for stores, and the store, worker and clock of one test."""

from __future__ import annotations

import asyncio
import functools
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from itertools import count
from typing import Any, ClassVar, Concatenate, Literal, NoReturn, ParamSpec, Self, TypeVar

import pytest

from aiodelay.backends.registry import open_store
from aiodelay.core.transitions import token_counter, token_for
from aiodelay.core.values import (
    LEASE_MS,
    MAX_LAPSES,
    NO_HEADERS,
    NO_TRACE,
    After,
    Again,
    At,
    Claim,
    Claimed,
    Command,
    Conflict,
    Dead,
    DeadLetter,
    DeadReason,
    Demand,
    Done,
    Envelope,
    Lane,
    Late,
    Outcome,
    Put,
    Query,
    Record,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    Snapshot,
    Stored,
    Tidied,
)
from aiodelay.ports import Limits, Store, Work
from aiodelay.testing.clock import VirtualClock

__all__ = [
    "ALL",
    "HOUR_MS",
    "LANE",
    "LANES",
    "OTHER",
    "THIRD",
    "Abilities",
    "Bench",
    "Claims",
    "Commands",
    "FormerNames",
    "Inspection",
    "OpenStore",
    "Stage",
    "WakeUps",
    "again",
    "dead",
    "done",
    "ending",
    "ids_of",
    "staged",
]

LANE, OTHER, THIRD = LANES = ("orders", "mails", "bills")
"""The lanes that the suite's worker serves. Most rules use only `LANE`."""
ALL = 500
HOUR_MS = 3_600_000

P = ParamSpec("P")
B = TypeVar("B", bound="Bench")


class Bench(ABC):
    """The base class of the suites for stores. It makes the stores, and declares the promises that traits do not cover.

    The *safety poll* of a store finds due messages even if a wake-up is lost; see `StoreTraits.safety_poll_ms`.

    Attributes:
        order_per_group: True if claims return the messages of a lane by due time, then in scheduling order (S9).
        leases_survive: True if a claim outlives the process that made it, until its lease ends. False if the claim ends
            with the process.
        counted_journal: True if the journal keeps the number of entries that `make_store` is given, and numbers them
            one by one. False if it keeps entries by age, and their numbers only grow.
        wakes_other_processes: True if a put in one process ends `wait` in another process before the safety poll. Then
            the suite also calls `reopen` on an open store, and uses both objects.
    """

    order_per_group: ClassVar[bool] = True
    leases_survive: ClassVar[bool] = True
    counted_journal: ClassVar[bool] = True
    wakes_other_processes: ClassVar[bool] = False

    @abstractmethod
    def make_store(self, clock: VirtualClock, *, journal: int = 0) -> Store:
        """Return a new, empty store that is not open and shares its data with no other store.

        Args:
            clock: The clock of the store.
            journal: The most journal entries to keep; 0 = keep none.
        """

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """Return an event loop for one test; by default asyncio's own loop."""
        return asyncio.new_event_loop()

    def reopen(self, store: Store, clock: VirtualClock) -> Store:
        """Raise `NotImplementedError`. Suites of `durable` stores must override this.

        The override returns a new store object on the data of a closed store.
        """
        raise NotImplementedError(f"{store.name} is durable: override reopen()")


def staged(test: Callable[Concatenate[B, Stage, P], Coroutine[Any, Any, None]]) -> Callable[Concatenate[B, P], None]:
    """Run an async test on a new loop and a new stage, with any plugin for async tests or none."""

    @functools.wraps(test)
    def run(self: B, /, *args: P.args, **kwargs: P.kwargs) -> None:
        async def play() -> None:
            async with Stage(self) as stage:
                await test(self, stage, *args, **kwargs)

        with asyncio.Runner(loop_factory=self.new_loop) as runner:
            runner.run(play())

    shown = [each for name, each in inspect.signature(test).parameters.items() if name != "stage"]
    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]  # what pytest fills in
    return run


class OpenStore:
    """An open store with its clock and its first worker."""

    store: Store
    work: Work

    def __init__(self, bench: Bench, *, journal: int = 0) -> None:
        self.bench = bench
        self.clock: VirtualClock = VirtualClock()
        self.store = open_store(bench.make_store(self.clock, journal=journal), namespace="default", clock=None)
        self._ops, self._requests = count(1), count(1)
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._opened.enter_async_context(self.store)
        self.work = await self.another_worker("first")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._opened.aclose()

    async def another_worker(self, name: str, lanes: Collection[Lane] = LANES) -> Work:
        """Open one more worker. The end of the stage closes it."""
        return await self._opened.enter_async_context(self.store.work(name, lanes))

    async def reopen(self) -> None:
        """Close the store and its workers, then open the same data with a new store object."""
        if not self.store.traits.durable:
            self._skip("is not durable")
        await self._opened.aclose()
        self.store = self.bench.reopen(self.store, self.clock)
        await self.__aenter__()

    async def enter_again(self) -> None:
        """Close the store and its workers, then open the same store object again."""
        await self._opened.aclose()
        await self.__aenter__()

    def _skip(self, reason: str) -> NoReturn:
        pytest.skip(f"{self.store.name} {reason}")

    @property
    def now(self) -> int:
        """The time of the clock, in epoch ms."""
        return self.clock.now_ms()

    def move(self, ms: int) -> None:
        """Let `ms` milliseconds pass."""
        self.clock.move(ms)

    def step_back(self, ms: int) -> None:
        """Set the wall clock back by `ms` milliseconds."""
        self.clock.step(-timedelta(milliseconds=ms))


class Abilities(OpenStore):
    """What the store of a stage must be able to do for a test."""

    def needs_conflict(self, mode: str) -> None:
        """Skip the test if the traits of the store do not name this conflict mode."""
        if mode not in self.store.traits.conflicts:
            self._skip(f"has no Conflict.{mode}")

    def needs_verdict(self) -> None:
        """Skip the test if the store's answer to a cancel is not final."""
        if self.store.traits.cancel != "verdict":
            self._skip("records cancels and carries them out later")

    def needs_order(self) -> None:
        """Skip the test if the store does not promise S9."""
        if not self.bench.order_per_group:
            self._skip("does not promise an order")

    def needs_positions(self, *, verdict: bool = False) -> None:
        """Skip the test if the store keeps no positions of intakes.

        With `verdict`, also skip the test if the store only records a command that comes with a position, and judges it
        later.
        """
        if self.store.traits.positions == "none":
            self._skip("keeps no positions of intakes")
        if verdict and self.store.traits.positions == "recorded":
            self._skip("records commands that come with a position, without a verdict")

    def needs_limits(self) -> Limits:
        """Return the store, or skip the test if the store has no limits."""
        if not isinstance(self.store, Limits):
            self._skip("has no limits")
        return self.store

    def needs_counted_journal(self) -> None:
        """Skip the test if the store keeps its journal by age."""
        if not self.bench.counted_journal:
            self._skip("keeps its journal by age")

    def needs_wake_ups(self) -> None:
        """Skip the test if a put does not end the `wait` of another process."""
        if not self.bench.wakes_other_processes:
            self._skip("does not wake other processes")

    def versioned(self, version: int) -> Conflict:
        """Return `Conflict.newer(version)`. Skip the test if the store does not support it."""
        self.needs_conflict("newer")
        return Conflict.newer(version)


class FormerNames(OpenStore):
    """Deprecated names of the store, from the time when some of its methods were optional."""

    @property
    def look(self) -> Store:
        """The store, by a deprecated name."""
        return self._by_former_name("look")

    @property
    def crew(self) -> Store:
        """The store, by a deprecated name."""
        return self._by_former_name("crew")

    @property
    def holds(self) -> Store:
        """The store, by a deprecated name."""
        return self._by_former_name("holds")

    @property
    def graves(self) -> Store:
        """The store, by a deprecated name."""
        return self._by_former_name("graves")

    @property
    def diary(self) -> Store:
        """The store, by a deprecated name."""
        return self._by_former_name("diary")

    def _by_former_name(self, name: str) -> Store:
        warnings.warn(f"stage.{name} is deprecated; use stage.store", DeprecationWarning, stacklevel=3)
        return self.store


class Commands(OpenStore):
    """Commands, and how to send them."""

    def op(self) -> bytes:
        """Return an op that no command of this test has used."""
        return next(self._ops).to_bytes(8, "big")

    def put(
        self,
        message_id: str = "m",
        due: At | After = After(0),  # noqa: B008 - frozen
        *,
        conflict: Conflict = Conflict.replace(),  # noqa: B008 - frozen
        late: Late = Late.deliver(),  # noqa: B008 - frozen
        lane: Lane = LANE,
        address: str = "",
        type_: str = "",
        encoding: Literal["", "json", "msgpack", "null"] = "",
        payload: bytes = b"payload",
        key: bytes | None = None,
        headers: Mapping[str, bytes] = NO_HEADERS,
        trace: Mapping[str, str] = NO_TRACE,
        rule: Mapping[str, str | int] | None = None,
    ) -> Put:
        """Return a put with a new op. `Conflict.newer` also sets the version of the envelope."""
        envelope = Envelope(
            message_id, lane, address, type_, encoding, payload, key, headers, trace, conflict.version, rule
        )
        return Put(self.op(), envelope, due, conflict, late)

    async def do(self, command: Command) -> Outcome:
        """Apply one command and return its outcome."""
        (outcome,) = await self.store.apply([command])
        return outcome

    async def stored(self, *puts: Put) -> Stored:
        """Apply puts, which the store must store. Return the last outcome."""
        outcome: Outcome | None = None
        for outcome in await self.store.apply(puts):
            assert isinstance(outcome, Stored), outcome
        assert isinstance(outcome, Stored)
        return outcome


class Claims(OpenStore):
    """Claims, and what becomes of them."""

    async def claimed(
        self, demand: Mapping[Lane, Demand] | None = None, *, work: Work | None = None, request: str = ""
    ) -> Claimed:
        """Claim messages: by default, all due messages of all lanes."""
        return await (work or self.work).claim(
            demand if demand is not None else {lane: Demand(ALL) for lane in LANES},
            request=request or f"request {next(self._requests)}",
            lease_ms=LEASE_MS,
        )

    async def claim(self, limit: int = ALL, lane: Lane = LANE, *, work: Work | None = None) -> list[Claim]:
        """Claim due messages of one lane."""
        return list((await self.claimed({lane: Demand(limit)}, work=work)).claims)

    async def claim_one(self, lane: Lane = LANE, *, work: Work | None = None) -> Claim:
        """Claim the only due message of a lane. Fail if the claim returns another number of messages."""
        claims = await self.claim(lane=lane, work=work)
        assert len(claims) == 1, f"the claim returned {len(claims)} messages; one is due"
        return claims[0]

    async def ids(self, lane: Lane = LANE) -> list[str]:
        """Claim all due messages of a lane. Return their ids in the order of the claims."""
        return [claim.record.id for claim in await self.claim(lane=lane)]

    async def settle(self, settlement: Settlement, *, work: Work | None = None) -> SettleOutcome:
        """Send one settlement and return its outcome."""
        (outcome,) = await (work or self.work).settle([settlement])
        return outcome

    async def end(self, settlement: Settlement) -> None:
        """Send one settlement, which the store must accept."""
        assert await self.settle(settlement) is SettleOutcome.SETTLED

    async def renew(
        self, claim: Claim, lease_ms: int = LEASE_MS, *, ends_trial: bool = False
    ) -> tuple[Claim, RenewOutcome]:
        """Renew a lease from now on. Return the claim with its new token, and the outcome."""
        to = token_for(self.now + lease_ms, token_counter(claim.token))
        renewal = Renewal(claim.record.id, claim.record.revision, claim.token, to, ends_trial)
        (outcome,) = await self.work.renew([renewal])
        return Claim(claim.record, to), outcome

    async def tidy(self, lanes: Collection[Lane] = LANES, *, limit: int = 1000) -> Tidied:
        """Run one step of housekeeping."""
        return await self.work.tidy(lanes, limit=limit)

    async def lapse(self) -> None:
        """Let every claim lapse: move the clock to the end of all leases and tidy."""
        self.move(LEASE_MS)
        await self.tidy()

    async def die(self, *, max_lapses: int = MAX_LAPSES) -> list[Claim]:
        """Claim all due messages in a worker that ends at once, and let its claims lapse.

        Args:
            max_lapses: The worker claims only messages with at most this number of lapses.
        """
        demand = {lane: Demand(ALL, max_lapses=max_lapses) for lane in LANES}
        async with self.store.work("short-lived", LANES) as gone:
            claimed = await self.claimed(demand, work=gone)
        await self.lapse()
        return list(claimed.claims)


class WakeUps(Claims):
    """What ends the `wait` of a worker."""

    @property
    def soon_s(self) -> float:
        """Real seconds within which a wake-up must arrive: at most half the interval of the safety poll."""
        return min(self.store.traits.safety_poll_ms / 1000 / 2, 5.0)

    async def wakes(self, action: Callable[[], Awaitable[object]], *, work: Work | None = None) -> None:
        """Check that `action` ends a running `wait`, well before the safety poll would end it."""
        waiting = work or self.work
        async with asyncio.timeout(self.soon_s), asyncio.TaskGroup() as tasks:
            for _ in range(3):  # a late wake-up from the opening of the store may end the first wait
                waiting.clear()
                await self.claimed({lane: Demand(0) for lane in LANES}, work=waiting)
                waiter = tasks.create_task(waiting.wait(until_ms=None))
                for _ in range(10):
                    await asyncio.sleep(0)
                if not waiter.done():
                    break
            assert not waiter.done(), "wait() returned although nothing had happened"
            await action()


class Inspection(OpenStore):
    """What the store holds."""

    async def get(self, message_id: str = "m") -> Snapshot | None:
        """Return a message, or None."""
        return await self.store.get(message_id)

    async def record(self, message_id: str = "m") -> Record:
        """Return the record of a message that must exist."""
        snapshot = await self.get(message_id)
        assert snapshot is not None, f"{message_id} is gone"
        return snapshot.record

    async def dead(self) -> list[DeadLetter]:
        """Return all dead letters."""
        return list(await self.store.dead_letters(limit=1000))

    async def messages(self) -> list[Snapshot]:
        """Return all messages that have not ended."""
        return list(await self.store.search(Query(limit=1000)))

    async def picture(self) -> object:
        """Return all messages and dead letters, to compare the store at two moments."""
        return await self.messages(), await self.dead()


class Stage(Abilities, FormerNames, Commands, WakeUps, Inspection):
    """An open store with one worker, on a clock that the test moves.

    Args:
        bench: The suite that makes the store.
        journal: The most journal entries to keep.

    Raises:
        ConfigurationError: The store lacks methods of `aiodelay.ports.Store`. The text names them.
    """

    async def with_journal(self, journal: int) -> Stage:
        """Open another empty store that keeps a journal. The end of this stage closes it."""
        return await self._opened.enter_async_context(Stage(self.bench, journal=journal))


def done(
    claim: Claim, then: int | None = None, outcome: Literal["delivered", "dropped", "skipped"] = "delivered"
) -> Done:
    """Return the settlement that ends the message."""
    return Done(claim.record.id, claim.record.revision, claim.token, then, outcome)


def again(claim: Claim, due_ms: int, attempt: int = 1, error: str | None = None, then: int | None = None) -> Again:
    """Return the settlement that schedules another attempt at `due_ms`."""
    return Again(claim.record.id, claim.record.revision, claim.token, due_ms, attempt, error, then)


def dead(
    claim: Claim,
    reason: DeadReason = "attempts_exhausted",
    attempt: int = 1,
    error: str | None = None,
    then: int | None = None,
) -> Dead:
    """Return the settlement that makes the message a dead letter."""
    return Dead(claim.record.id, claim.record.revision, claim.token, reason, attempt, error, then)


def ending(kind: str, claim: Claim, *, due_ms: int, then: int | None = None) -> Settlement:
    """Return the settlement that `kind` names: `done`, `again`, or any other word for `dead`."""
    if kind == "done":
        return done(claim, then)
    return again(claim, due_ms, then=then) if kind == "again" else dead(claim, then=then)


def ids_of(claims: Sequence[Claim]) -> list[str]:
    """Return the message ids of claims."""
    return [claim.record.id for claim in claims]
