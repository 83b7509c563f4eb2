"""A store on a clock moved by hand, and short words for what the rules do with it."""

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
from aiodelay.ports import Store, Work
from aiodelay.testing.clock import VirtualClock

__all__ = [
    "ALL",
    "HOUR_MS",
    "LANE",
    "LANES",
    "OTHER",
    "THIRD",
    "Bench",
    "Stage",
    "again",
    "dead",
    "done",
    "ending",
    "ids_of",
    "staged",
]

LANE, OTHER, THIRD = LANES = ("orders", "mails", "bills")
"""The lanes that the suite's worker serves; most rules use the first alone."""
ALL = 500
HOUR_MS = 3_600_000

P = ParamSpec("P")
B = TypeVar("B", bound="Bench")


class Bench(ABC):
    """Makes a suite's stores, and tells the promises that the traits of the stores leave out.

    Attributes:
        order_per_group: The store gives out the messages of a lane by due time, then scheduling order (S9).
        leases_survive: A claim outlives the process that made it, until its lease ends. Otherwise it ends with it.
        counted_journal: The journal keeps as many entries as it was told, and numbers them one by one. Otherwise it
            keeps entries by their age, and their numbers grow.
        wakes_other_processes: A put in one process ends `wait` in another before the safety poll. The suite then calls
            `reopen` on an open store too, and uses both.
    """

    order_per_group: ClassVar[bool] = True
    leases_survive: ClassVar[bool] = True
    counted_journal: ClassVar[bool] = True
    wakes_other_processes: ClassVar[bool] = False

    @abstractmethod
    def make_store(self, clock: VirtualClock, *, journal: int = 0) -> Store:
        """Return a new, empty store that shares its data with no other; not opened yet.

        Args:
            clock: The store's clock.
            journal: Most entries of the journal to keep; 0 = keep none.
        """

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """Return an event loop for one test; asyncio's own unless overridden."""
        return asyncio.new_event_loop()

    def reopen(self, store: Store, clock: VirtualClock) -> Store:
        """Return a new object on the data of a store that was closed; stores that say `durable` must override this."""
        raise NotImplementedError(f"{store.name} is durable: override reopen()")


def staged(test: Callable[Concatenate[B, Stage, P], Coroutine[Any, Any, None]]) -> Callable[Concatenate[B, P], None]:
    """Run an async test on a loop and a stage of its own, whatever plugin for async tests there is, or none."""

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


class Stage:
    """An open store with one worker, on a clock moved by hand.

    Args:
        bench: Makes the store.
        journal: Most entries of the journal to keep.

    Raises:
        ConfigurationError: The store lacks methods of `aiodelay.ports.Store`; names them.
    """

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
        """Open one more dispatching role; it is closed with the stage."""
        return await self._opened.enter_async_context(self.store.work(name, lanes))

    async def with_journal(self, journal: int) -> Stage:
        """Open one more store, empty, that keeps a journal; it is closed with this stage."""
        return await self._opened.enter_async_context(Stage(self.bench, journal=journal))

    async def reopen(self) -> None:
        """Close everything, then open the same data again."""
        if not self.store.traits.durable:
            self._skip("is not durable")
        await self._opened.aclose()
        self.store = self.bench.reopen(self.store, self.clock)
        await self.__aenter__()

    async def enter_again(self) -> None:
        """Leave the store, with all its workers, and enter the same object once more."""
        await self._opened.aclose()
        await self.__aenter__()

    # --- what the store can do ----------------------------------------------------------------------------

    def _skip(self, reason: str) -> NoReturn:
        pytest.skip(f"{self.store.name} {reason}")

    def needs_conflict(self, mode: str) -> None:
        """Skip the test if the store's traits do not name this conflict mode."""
        if mode not in self.store.traits.conflicts:
            self._skip(f"has no Conflict.{mode}")

    def needs_verdict(self) -> None:
        """Skip the test if the store's cancel is not final."""
        if self.store.traits.cancel != "verdict":
            self._skip("records cancels and carries them out later")

    def needs_order(self) -> None:
        """Skip the test if the store does not promise S9."""
        if not self.bench.order_per_group:
            self._skip("does not promise an order")

    def needs_positions(self, *, verdict: bool = False) -> None:
        """Skip the test if the store keeps no positions of intakes, or, if asked, has no verdicts with them."""
        if self.store.traits.positions == "none":
            self._skip("keeps no positions of intakes")
        if verdict and self.store.traits.positions == "recorded":
            self._skip("records what comes with a position, without a verdict")

    def needs_counted_journal(self) -> None:
        """Skip the test if the store's journal is kept by age."""
        if not self.bench.counted_journal:
            self._skip("keeps its journal by age")

    def needs_wake_ups(self) -> None:
        """Skip the test if a put ends no `wait` of another process."""
        if not self.bench.wakes_other_processes:
            self._skip("does not wake other processes")

    # Former names, from when these were abilities that a store could lack.

    @property
    def look(self) -> Store:
        """The store, by a former name."""
        return self._by_former_name("look")

    @property
    def crew(self) -> Store:
        """The store, by a former name."""
        return self._by_former_name("crew")

    @property
    def holds(self) -> Store:
        """The store, by a former name."""
        return self._by_former_name("holds")

    @property
    def graves(self) -> Store:
        """The store, by a former name."""
        return self._by_former_name("graves")

    @property
    def diary(self) -> Store:
        """The store, by a former name."""
        return self._by_former_name("diary")

    def _by_former_name(self, name: str) -> Store:
        warnings.warn(f"stage.{name} is stage.store", DeprecationWarning, stacklevel=3)
        return self.store

    def versioned(self, version: int) -> Conflict:
        """Return `Conflict.newer`; skips the test if the store has it not."""
        self.needs_conflict("newer")
        return Conflict.newer(version)

    # --- time ---------------------------------------------------------------------------------------------

    @property
    def now(self) -> int:
        """The clock's time, epoch ms."""
        return self.clock.now_ms()

    def move(self, ms: int) -> None:
        """Let time pass."""
        self.clock.move(ms)

    def step_back(self, ms: int) -> None:
        """Set the wall clock back."""
        self.clock.step(-timedelta(milliseconds=ms))

    # --- commands -----------------------------------------------------------------------------------------

    def op(self) -> bytes:
        """Return an op that no command has had."""
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
        """Make a put with an op of its own; `Conflict.newer` puts its version into the envelope too."""
        envelope = Envelope(
            message_id, lane, address, type_, encoding, payload, key, headers, trace, conflict.version, rule
        )
        return Put(self.op(), envelope, due, conflict, late)

    async def do(self, command: Command) -> Outcome:
        """Send one command."""
        (outcome,) = await self.store.apply([command])
        return outcome

    async def stored(self, *puts: Put) -> Stored:
        """Send puts; all must be stored. Returns the last outcome."""
        outcome: Outcome | None = None
        for outcome in await self.store.apply(puts):
            assert isinstance(outcome, Stored), outcome
        assert isinstance(outcome, Stored)
        return outcome

    # --- claims -------------------------------------------------------------------------------------------

    async def claimed(
        self, demand: Mapping[Lane, Demand] | None = None, *, work: Work | None = None, request: str = ""
    ) -> Claimed:
        """Claim, by default all that is due in all lanes."""
        return await (work or self.work).claim(
            demand if demand is not None else {lane: Demand(ALL) for lane in LANES},
            request=request or f"request {next(self._requests)}",
            lease_ms=LEASE_MS,
        )

    async def claim(self, limit: int = ALL, lane: Lane = LANE, *, work: Work | None = None) -> list[Claim]:
        """Claim from one lane."""
        return list((await self.claimed({lane: Demand(limit)}, work=work)).claims)

    async def claim_one(self, lane: Lane = LANE, *, work: Work | None = None) -> Claim:
        """Claim from one lane, where exactly one message must be due."""
        claims = await self.claim(lane=lane, work=work)
        assert len(claims) == 1, f"{len(claims)} messages were given where one is due"
        return claims[0]

    async def ids(self, lane: Lane = LANE) -> list[str]:
        """Claim all that is due in a lane, and return the ids in the order given."""
        return [claim.record.id for claim in await self.claim(lane=lane)]

    async def settle(self, settlement: Settlement, *, work: Work | None = None) -> SettleOutcome:
        """Send one settlement."""
        (outcome,) = await (work or self.work).settle([settlement])
        return outcome

    async def end(self, settlement: Settlement) -> None:
        """Send one settlement, which must be accepted."""
        assert await self.settle(settlement) is SettleOutcome.SETTLED

    async def renew(
        self, claim: Claim, lease_ms: int = LEASE_MS, *, ends_trial: bool = False
    ) -> tuple[Claim, RenewOutcome]:
        """Renew a lease from now on; returns the claim with its new token too."""
        to = token_for(self.now + lease_ms, token_counter(claim.token))
        renewal = Renewal(claim.record.id, claim.record.revision, claim.token, to, ends_trial)
        (outcome,) = await self.work.renew([renewal])
        return Claim(claim.record, to), outcome

    async def tidy(self, lanes: Collection[Lane] = LANES, *, limit: int = 1000) -> Tidied:
        """Do a step of housekeeping."""
        return await self.work.tidy(lanes, limit=limit)

    async def lapse(self) -> None:
        """Let every lease end unsettled."""
        self.move(LEASE_MS)
        await self.tidy()

    async def die(self, *, max_lapses: int = MAX_LAPSES) -> list[Claim]:
        """Claim all that is due, with no more lapses, in a process that ends at once, and let its leases end."""
        demand = {lane: Demand(ALL, max_lapses=max_lapses) for lane in LANES}
        async with self.store.work("short-lived", LANES) as gone:
            claimed = await self.claimed(demand, work=gone)
        await self.lapse()
        return list(claimed.claims)

    # --- looking ------------------------------------------------------------------------------------------

    async def get(self, message_id: str = "m") -> Snapshot | None:
        """Look at a message."""
        return await self.store.get(message_id)

    async def record(self, message_id: str = "m") -> Record:
        """Look at the record of a message that must be there."""
        snapshot = await self.get(message_id)
        assert snapshot is not None, f"{message_id} is gone"
        return snapshot.record

    async def dead(self) -> list[DeadLetter]:
        """List all dead letters."""
        return list(await self.store.dead_letters(limit=1000))

    async def messages(self) -> list[Snapshot]:
        """List all messages that are pending or in flight."""
        return list(await self.store.search(Query(limit=1000)))

    async def picture(self) -> object:
        """Return all that can be seen of the store's messages, to compare it with another moment."""
        return await self.messages(), await self.dead()

    @property
    def soon_s(self) -> float:
        """Real seconds within which a wake-up must arrive: well before the safety poll would do its work."""
        return min(self.store.traits.safety_poll_ms / 1000 / 2, 5.0)

    async def wakes(self, action: Callable[[], Awaitable[object]], *, work: Work | None = None) -> None:
        """Check that a `wait` under way ends by what `action` does, well before the safety poll would end it."""
        waiting = work or self.work
        async with asyncio.timeout(self.soon_s), asyncio.TaskGroup() as tasks:
            for _ in range(3):  # something of the opening may still end the first
                waiting.clear()
                await self.claimed({lane: Demand(0) for lane in LANES}, work=waiting)
                waiter = tasks.create_task(waiting.wait(until_ms=None))
                for _ in range(10):
                    await asyncio.sleep(0)
                if not waiter.done():
                    break
            assert not waiter.done(), "wait() did not wait although nothing had happened"
            await action()


def done(
    claim: Claim, then: int | None = None, outcome: Literal["delivered", "dropped", "skipped"] = "delivered"
) -> Done:
    """Settle: over."""
    return Done(claim.record.id, claim.record.revision, claim.token, then, outcome)


def again(claim: Claim, due_ms: int, attempt: int = 1, error: str | None = None, then: int | None = None) -> Again:
    """Settle: deliver again at `due_ms`."""
    return Again(claim.record.id, claim.record.revision, claim.token, due_ms, attempt, error, then)


def dead(
    claim: Claim,
    reason: DeadReason = "attempts_exhausted",
    attempt: int = 1,
    error: str | None = None,
    then: int | None = None,
) -> Dead:
    """Settle: give up."""
    return Dead(claim.record.id, claim.record.revision, claim.token, reason, attempt, error, then)


def ending(kind: str, claim: Claim, *, due_ms: int, then: int | None = None) -> Settlement:
    """Settle in one of the three ways, named by `kind`."""
    if kind == "done":
        return done(claim, then)
    return again(claim, due_ms, then=then) if kind == "again" else dead(claim, then=then)


def ids_of(claims: Sequence[Claim]) -> list[str]:
    """Return the ids of claims."""
    return [claim.record.id for claim in claims]
