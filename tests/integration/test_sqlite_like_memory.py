"""SQLite answers as the memory store does, call by call, in random histories. Memory is the reference."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from msgspec.structs import replace

from aiodelay.core.transitions import token_counter, token_for
from aiodelay.core.values import (
    After,
    Again,
    At,
    Cancel,
    Claim,
    Command,
    Conflict,
    Dead,
    DeadKey,
    Demand,
    Done,
    Envelope,
    Fire,
    LaneLimits,
    Late,
    Limit,
    Put,
    Query,
    Renewal,
    RenewOutcome,
    Reschedule,
    Settlement,
    SourcePosition,
)
from aiodelay.memory import MemoryStore
from aiodelay.ports import Work
from aiodelay.sqlite import SqliteStore
from aiodelay.testing.clock import VirtualClock
from tests.support.disks import IN_MEMORY

LANES, IDS, ADDRESSES = ("a", "b", "c"), ("v", "w", "x", "y", "z"), ("", "p", "q")
STEPS = 120
LIMITS = (
    LaneLimits(each=Limit("key", 1)),
    LaneLimits(each=Limit("key", 2, "3/s")),
    LaneLimits(whole=Limit(concurrency=2), each=Limit("key", rate="1/100ms")),
    LaneLimits(whole=Limit(rate="5/s")),
    LaneLimits(),
)

Pair: TypeAlias = tuple[Claim, Claim]
"""One claim, as each of the two stores gave it: only the tokens differ."""


@dataclass
class Walk:
    """Does the same to both stores and compares what they say."""

    random: random.Random
    clock: VirtualClock
    memory: MemoryStore
    sqlite: SqliteStore
    works: Sequence[tuple[Work, Work]] = ()
    held: list[Pair] = field(default_factory=list)
    sent: list[Command] = field(default_factory=list)
    log: list[object] = field(default_factory=list)
    steps: int = 0
    has_limits: bool = False

    def same(self, ours: object, theirs: object) -> None:
        assert theirs == ours, "\n".join(map(repr, self.log[-12:]))

    async def step(self) -> None:
        self.steps += 1
        self.clock.move(self.has_limits)  # of two keys whose messages came in the same ms, either one may be first
        names = ["command", "claim", "settle", "renew", "wait", "tidy", "hold", "release", "redrive", "purge", "search"]
        (name,) = self.random.choices(names, [30, 20, 20, 5, 12, 4, 2, 3, 3, 1, 3])
        if self.has_limits and name in ("hold", "release"):
            name = "limit"
        self.log.append((self.clock.now_ms(), name))
        await getattr(self, name)()
        await self.compare()

    async def compare(self) -> None:
        for look in ("search", "dead_letters", "counts", "load"):
            arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
                "search": ((Query(limit=1000),), {}),
                "dead_letters": ((), {"limit": 1000}),
                "load": ((), {"bucket_ms": 500, "buckets": 10}),
            }
            args, options = arguments.get(look, ((), {}))
            self.same(
                await getattr(self.memory, look)(*args, **options), await getattr(self.sqlite, look)(*args, **options)
            )
        for lane in LANES:
            self.same(await self.memory.limited_keys(lane), await self.sqlite.limited_keys(lane))

    # --- commands -----------------------------------------------------------------------------------------

    async def command(self) -> None:
        commands = [self.new_command() for _ in range(1 if self.has_limits else self.random.choice([1, 1, 2, 5]))]
        self.sent += commands
        if self.random.random() < 0.2:
            commands.append(self.random.choice(self.sent[-20:]))
        source = (
            SourcePosition("s", self.random.randrange(3), self.random.randrange(3))
            if self.random.random() < 0.05
            else None
        )
        self.log += commands
        self.same(await self.memory.apply(commands, source=source), await self.sqlite.apply(commands, source=source))

    def new_command(self) -> Command:
        op, message_id, due = (
            len(self.sent).to_bytes(4, "big") + self.random.randbytes(4),
            self.choose(*IDS),
            self.due(),
        )
        match self.random.randrange(20):
            case 0 | 1 | 2:
                return Cancel(op, message_id)
            case 3 | 4 | 5:
                return Reschedule(op, message_id, due)
            case 6 | 7:
                return Fire(op, message_id)
        conflict = self.choose(
            Conflict.replace(), Conflict.keep(), Conflict.error(), Conflict.newer(self.random.randrange(6))
        )
        late = self.choose(Late.deliver(), Late.deliver(), Late.drop("500ms"), Late.dead_letter("1s"))
        envelope = Envelope(
            message_id,
            self.choose(*LANES),
            self.choose(*ADDRESSES),
            payload=bytes(self.choose(3, 3, 2000, 400_000)),
            key=self.choose(None, b"k"),
            headers=self.choose({}, {"h": b"\xff\x00"}),
            trace=self.choose({}, {"t": "1"}),
            version=conflict.version,
            rule=self.choose(None, None, None, {"e": self.choose(1000, 2000)}),
        )
        return Put(op, envelope, due, conflict, late)

    def due(self) -> At | After:
        due: At | After = self.choose(
            After(0), After(self.random.randrange(3000)), At(self.clock.now_ms() + self.random.randrange(-2000, 4000))
        )
        return due

    def choose(self, *values: Any) -> Any:  # noqa: ANN401 - one of them
        return self.random.choice(values)

    # --- claims -------------------------------------------------------------------------------------------

    async def claim(self) -> None:
        lanes = self.random.sample(LANES, self.random.randrange(1, 4))
        demand = {lane: Demand(self.random.randrange(1, 6), max_bytes=self.choose(1 << 20, 2500)) for lane in lanes}
        if len(lanes) == 3:
            demand[lanes[0]] = Demand(self.random.randrange(5), aliases=(lanes[1],))
            del demand[lanes[1]]
        lease_ms, (ours, theirs) = self.choose(100, 1000, 15_000, 60_000), self.choose(*self.works)
        for _ in range(self.choose(1, 1, 1, 2)):
            mine = await ours.claim(demand, request=f"{self.steps}", lease_ms=lease_ms)
            other = await theirs.claim(demand, request=f"{self.steps}", lease_ms=lease_ms)
            self.same([claim.record for claim in mine.claims], [claim.record for claim in other.claims])
            if not self.has_limits:  # the ticket of a key may be too early, in both stores
                self.same((mine.now_ms, mine.next_due_ms), (other.now_ms, other.next_due_ms))
        self.held += zip(mine.claims, other.claims, strict=True)

    async def settle(self) -> None:
        ours, theirs = self.choose(*self.works)
        settlements = [self.settlement() for _ in range(min(len(self.held), self.random.randrange(1, 5)))]
        self.log += [mine for mine, _ in settlements]
        self.same(
            await ours.settle([mine for mine, _ in settlements]),
            await theirs.settle([other for _, other in settlements]),
        )

    def settlement(self) -> tuple[Settlement, Settlement]:
        """Settle something held, mostly for good; what is settled twice must be fenced alike."""
        at = self.random.randrange(len(self.held))
        pair = self.held.pop(at) if self.random.random() < 0.9 and len(self.held) > 1 else self.held[at]
        record = pair[0].record
        then = self.choose(None, record.due_ms + 1000, self.clock.now_ms() + 500) if record.envelope.rule else None
        kind, due_ms = self.random.random(), self.clock.now_ms() + self.choose(0, 100, 1000, -50)

        def of(claim: Claim) -> Settlement:
            if kind < 0.5:
                return Done(record.id, record.revision, claim.token, then)
            if kind < 0.8:
                return Again(record.id, record.revision, claim.token, due_ms, record.attempt + 1, "again é", then)
            return Dead(record.id, record.revision, claim.token, "rejected", record.attempt + 1, "dead", then)

        return of(pair[0]), of(pair[1])

    async def renew(self) -> None:
        if not self.held:
            return
        at, lease_ms = self.random.randrange(len(self.held)), self.choose(100, 15_000, 60_000, 70_000)
        renewed: list[Claim] = []
        outcomes: list[RenewOutcome] = []
        for work, claim in zip(self.choose(*self.works), self.held[at], strict=True):
            to = token_for(self.clock.now_ms() + lease_ms, token_counter(claim.token))
            outcomes += await work.renew([Renewal(claim.record.id, claim.record.revision, claim.token, to)])
            renewed.append(Claim(claim.record, to))
        self.same(*outcomes)
        if outcomes[0] in (RenewOutcome.RENEWED, RenewOutcome.CANCELLED):
            self.held[at] = renewed[0], renewed[1]

    # --- the rest -----------------------------------------------------------------------------------------

    async def wait(self) -> None:
        self.clock.move(self.choose(1, 10, 100, 1000, 5000, 31_000))

    async def tidy(self) -> None:
        ours, theirs = self.choose(*self.works)
        mine, other = await ours.tidy(LANES, limit=100), await theirs.tidy(LANES, limit=100)
        self.same((mine.lapsed, mine.expired), (other.lapsed, other.expired))
        self.same(*[sorted(each.lanes, key=lambda state: state.lane) for each in (mine, other)])

    async def hold(self) -> None:
        lane, address = self.choose(*LANES), self.choose(None, *ADDRESSES)
        self.same(await self.memory.pause(lane, address), await self.sqlite.pause(lane, address))
        self.same(await self.memory.paused(), await self.sqlite.paused())

    async def release(self) -> None:
        lane, address = self.choose(*LANES), self.choose(None, *ADDRESSES)
        self.same(await self.memory.resume(lane, address), await self.sqlite.resume(lane, address))

    async def limit(self) -> None:
        lane, limits, is_declared = self.choose(*LANES), self.choose(*LIMITS), self.choose(True, False)
        self.log.append((lane, limits))
        for store in (self.memory, self.sqlite):
            await store.set_limits(lane, limits, is_declared=is_declared)
        self.same(await self.memory.limits(), await self.sqlite.limits())

    async def redrive(self) -> None:
        keys = await self.some_dead()
        self.same(await self.memory.redrive(keys), await self.sqlite.redrive(keys))

    async def purge(self) -> None:
        keys = await self.some_dead()
        self.same(await self.memory.purge(keys), await self.sqlite.purge(keys))

    async def some_dead(self) -> list[DeadKey]:
        letters = await self.memory.dead_letters(limit=1000)
        return [*[self.random.choice(letters).key for _ in letters[:2]], DeadKey("absent", 1)]

    async def search(self) -> None:
        now, lanes = self.clock.now_ms(), tuple(self.random.sample(LANES, self.random.randrange(3)))
        query = Query(lanes, self.choose(None, now - 500), self.choose(None, now + 500), None, self.choose(1, 2, 100))
        while True:
            page = await self.memory.search(query)
            self.same(page, await self.sqlite.search(query))
            if not page:
                return
            after = page[-1].next_attempt_ms, page[-1].record.id
            query = Query(query.lanes, query.from_ms, query.to_ms, after, query.limit)


async def walk(seed: int, folder: str, *, has_limits: bool = False) -> None:
    clock = VirtualClock()
    memory = MemoryStore(clock=clock, journal=10_000)
    sqlite = SqliteStore(Path(folder) / "delay.db", clock=clock, journal=10_000)
    async with AsyncExitStack() as stack:
        for store in (memory, sqlite):
            await stack.enter_async_context(store)
        works = [
            (
                await stack.enter_async_context(memory.work(name, LANES)),
                await stack.enter_async_context(sqlite.work(name, LANES)),
            )
            for name in ("one", "two")
        ]
        random_walk = Walk(random.Random(seed), clock, memory, sqlite, works, has_limits=has_limits)
        if has_limits:
            await random_walk.limit()
        for _ in range(STEPS):
            await random_walk.step()
        for message_id in IDS:  # of one message the order is fixed; of several in one step it is not
            journals = [await store.journal(message_id=message_id, limit=10_000) for store in (memory, sqlite)]
            random_walk.same(*[[replace(entry, number=0) for entry in journal] for journal in journals])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.asyncio
async def test_a_random_walk_is_the_same_in_both(seed: int) -> None:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        await walk(seed, folder)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.asyncio
async def test_a_random_walk_with_limits_is_the_same_in_both(seed: int) -> None:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        await walk(seed, folder, has_limits=True)


@pytest.mark.storm
@pytest.mark.asyncio
async def test_many_random_walks_are_the_same_in_both() -> None:
    for seed in range(8, 2_000):
        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
            await walk(seed, folder)
