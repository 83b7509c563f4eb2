"""Random walks over everything a store can do, compared with a plain model of a store."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from aiodelay.core.conflicts import FOR_ONE_RUN
from aiodelay.core.transitions import token_counter, token_for
from aiodelay.core.values import (
    MAX_LAPSES,
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
    Lane,
    Late,
    Put,
    Query,
    Refused,
    Renewal,
    Reschedule,
    Settlement,
    Snapshot,
    SourcePosition,
)
from aiodelay.memory import MemoryStore
from aiodelay.ports import Store, Work
from aiodelay.sqlite import open_store
from aiodelay.testing.clock import VirtualClock
from tests.stateful.plain_store import PlainStore
from tests.support.disks import IN_MEMORY

T = TypeVar("T")

LANES = ("x", "y")
LEASE_MS = 15_000
MINUTE_MS = 60_000

dues = st.sampled_from([0, -1, 1, 500, -MINUTE_MS]) | st.builds(
    After, st.sampled_from([0, 1, 10, 1000, 20_000, 5 * MINUTE_MS])
)


@dataclass(frozen=True)
class Wish:
    """What a put is made of; `due` as a number is relative to now, a revision to the one that stands."""

    id: str
    lane: Lane
    address: str
    due: After | int
    conflict: Conflict
    late: Late
    rule: Mapping[str, str | int] | None
    payload: bytes
    position: tuple[int, int] | None


wishes = st.builds(
    Wish,
    id=st.sampled_from(["a", "b", "c", "s"]),
    lane=st.sampled_from(LANES),
    address=st.sampled_from(["", "p"]),
    due=dues,
    conflict=st.sampled_from([Conflict.replace(), Conflict.replace(), Conflict.keep(), Conflict.error()])
    | st.builds(Conflict.newer, st.integers(0, 3))
    | st.builds(Conflict.if_revision, st.integers(0, 1))
    | st.sampled_from(
        [
            Conflict.earlier(),
            Conflict.later(),
            Conflict.debounce("1s"),
            Conflict.debounce("1s", "1500ms"),
            Conflict.debounce("10s", "1m"),
            Conflict.throttle("1s"),
            Conflict.throttle("1m"),
            Conflict.throttle("1m", last=True),
            Conflict.append(),
            Conflict.append(),
            Conflict.append(2),
        ]
    ),
    late=st.sampled_from([Late.deliver(), Late.deliver(), Late.drop("5s"), Late.dead_letter("5s")]),
    rule=st.sampled_from([None, {"e": MINUTE_MS}, None, {"e": 1000}]),
    payload=st.sampled_from([b"", b"1", b"2\xff"]),
    position=st.sampled_from([None, None, None, None, (0, 1), (1, 2), (2, 1)]),
)
series = wishes.map(
    lambda wish: replace(wish, id="s", due=0, conflict=Conflict.replace(), late=Late.deliver(), rule={"e": MINUTE_MS})
)
items = st.builds(
    lambda wish, due, conflict: replace(
        wish, id="a", lane="x", address="", due=due, conflict=conflict, late=Late.deliver(), rule=None
    ),
    wishes,
    st.sampled_from([0, 0, 500]),
    st.sampled_from([Conflict.append(), Conflict.append(2)]),
)
calls = st.builds(
    lambda wish, conflict: replace(wish, id="a", due=0, conflict=conflict, rule=None, position=None),
    wishes,
    st.sampled_from(
        [Conflict.throttle("1m", last=True), Conflict.throttle("1m", last=True), Conflict.debounce("10s", "1m")]
    ),
)
changes = st.sampled_from(["cancel", "cancel the same", "cancel another", "reschedule", "fire"])
picks = st.integers(0, 1000)
limits = st.sampled_from([4, 0, 1, 2, 9])
Ending: TypeAlias = tuple[str, int, int | None, str | None]
endings: st.SearchStrategy[Ending] = st.tuples(
    st.sampled_from(["done", "again", "again", "dead"]),
    st.sampled_from([0, -5000, 1000, 20_000]),
    st.sampled_from([None, MINUTE_MS, 1000, 0]),
    st.sampled_from([None, "first", "second"]),
)


class StoreMachine(RuleBasedStateMachine):
    """Plays a store; subclasses say which."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = VirtualClock()
        self.model = PlainStore()
        self.claims: list[Claim] = []
        self.settled: list[Settlement] = []
        self.last: tuple[Mapping[Lane, Demand], str, list[tuple[str, int]]] | None = None
        self.numbers = count(1)
        self.opened = AsyncExitStack()
        self.store: Any = self.make_store()
        self.works: list[Work] = []
        self.do(self._open())

    def make_store(self) -> Store:
        raise NotImplementedError

    def reopen_store(self) -> Store:
        raise NotImplementedError

    def teardown(self) -> None:
        self.do(self.opened.aclose())
        self.runner.close()

    def do(self, doing: Awaitable[T]) -> T:
        async def done() -> T:
            return await doing

        return self.runner.run(done())

    async def _open(self) -> None:
        await self.opened.enter_async_context(self.store)
        self.works = [await self.opened.enter_async_context(self.store.work(name, LANES)) for name in ("one", "two")]
        self.model.seen = dict.fromkeys(range(2), self.now)

    @property
    def now(self) -> int:
        return self.clock.now_ms()

    def op(self) -> bytes:
        return next(self.numbers).to_bytes(8, "big")

    def look(self, message_id: str) -> Snapshot | None:
        found: Snapshot | None = self.do(self.store.get(message_id))
        return found

    def due(self, due: After | int) -> At | After:
        return due if isinstance(due, After) else At(self.now + due)

    # --- commands -----------------------------------------------------------------------------------------

    def send(self, command: Command, source: SourcePosition | None = None) -> None:
        (outcome,) = self.do(self.store.apply([command], source=source))
        if source is not None and self.model.position not in (None, source.first):
            assert outcome == Refused("passed")
            return
        self.model.command(command, outcome, self.now)
        self.model.position = source.position if source is not None else self.model.position

    @initialize(wishes=st.lists(wishes, min_size=2, max_size=5))
    def begin(self, wishes: list[Wish]) -> None:
        for wish in wishes:
            self.put(wish)

    @rule(wish=wishes)
    def put(self, wish: Wish) -> None:
        conflict, late, rule = wish.conflict, wish.late, wish.rule
        if conflict.revision is not None:
            conflict = Conflict.if_revision(self.revision(wish.id) + conflict.revision)
        due = self.due(wish.due) if conflict.quiet_ms is None else After(conflict.quiet_ms)
        rule = None if conflict.mode in FOR_ONE_RUN else rule
        envelope = Envelope(wish.id, wish.lane, wish.address, payload=wish.payload, version=conflict.version, rule=rule)
        source = None if wish.position is None else SourcePosition("source", *wish.position)
        self.send(Put(self.op(), envelope, due, conflict, late), source)

    @rule(wish=items)
    def append(self, wish: Wish) -> None:
        self.put(wish)

    @rule(
        wish=calls,
        between=st.lists(
            st.sampled_from([1000, 1000, 5000, 30_000, -MINUTE_MS // 2, -60 * MINUTE_MS])
            | st.sampled_from(["cancel", "fire", "deliver"]),
            max_size=6,
        ),
    )
    def burst(self, wish: Wish, between: list[int | str]) -> None:
        """Call again and again under one id, with a change, a delivery or a time between two calls."""
        self.put(wish)
        for step in between:
            if isinstance(step, int):
                self.pass_time(step)
            elif step == "deliver":
                self.deliver([("done", 0, None, None)])
            else:
                self.change_one("a", step, 0)
            self.put(wish)

    @rule(pick=picks, kind=changes, due=dues)
    def change(self, pick: int, kind: str, due: After | int) -> None:
        known = [*self.model.messages, "a"]
        self.change_one(known[pick % len(known)], kind, due)

    def change_one(self, message_id: str, kind: str, due: After | int) -> None:
        commands: dict[str, Command] = {
            "cancel": Cancel(self.op(), message_id),
            "cancel the same": Cancel(self.op(), message_id, (self.revision(message_id), None)),
            "cancel another": Cancel(self.op(), message_id, (self.revision(message_id) + 1, None)),
            "reschedule": Reschedule(self.op(), message_id, self.due(due)),
            "fire": Fire(self.op(), message_id),
        }
        self.send(commands[kind])

    def revision(self, message_id: str) -> int:
        """Return the revision that stands under an id; where none does, one that no message has."""
        standing = self.model.messages.get(message_id)
        return standing.revision if standing is not None else 0

    @rule(what=st.sampled_from(["command", "claim", "settlement"]), pick=picks)
    def repeat(self, what: str, pick: int) -> None:
        if what == "command" and self.model.sent:
            _, command, first = [*self.model.sent.values()][pick % len(self.model.sent)]
            assert self.do(self.store.apply([command])) == [first]
        elif what == "claim" and self.last is not None:
            demand, request, claims = self.last
            claimed = self.do(self.works[0].claim(demand, request=request, lease_ms=LEASE_MS))
            given = [(claim.record.id, claim.token) for claim in claimed.claims]
            assert given == self.model.still_leased(claims)
        elif what == "settlement" and self.settled:
            self.settle_with(self.settled[pick % len(self.settled)])

    # --- claims -------------------------------------------------------------------------------------------

    @rule(
        limits=st.tuples(limits, limits),
        who=st.integers(0, 1),
        max_lapses=st.sampled_from([MAX_LAPSES, MAX_LAPSES, 0, 1]),
    )
    def claim(self, limits: tuple[int, int], who: int, max_lapses: int = MAX_LAPSES) -> None:
        demand = {lane: Demand(limit, max_lapses=max_lapses) for lane, limit in zip(LANES, limits, strict=True)}
        request = f"request {next(self.numbers)}"
        claimed = self.do(self.works[who].claim(demand, request=request, lease_ms=LEASE_MS))
        wanted = {lane: each for lane, each in demand.items() if each.messages}
        self.model.claim(wanted, claimed, self.now, who, self.look)
        self.claims += claimed.claims
        if who == 0:
            self.last = (demand, request, [(claim.record.id, claim.token) for claim in claimed.claims])

    def held(self) -> list[Claim]:
        messages = self.model.messages
        return [c for c in self.claims if c.record.id in messages and messages[c.record.id].token == c.token]

    def pick_claim(self, pick: int) -> Claim | None:
        """Pick a claim: one that is held, or now and then any."""
        claims = self.held() if pick % 5 else self.claims
        return claims[pick % len(claims)] if claims else None

    @rule(pick=picks, ending=endings)
    def settle(self, pick: int, ending: Ending) -> None:
        claim = self.pick_claim(pick)
        if claim is not None:
            self.end(claim, ending)

    @rule(endings=st.lists(endings, min_size=1, max_size=4))
    def deliver(self, endings: list[Ending]) -> None:
        """Claim and settle, as a dispatcher does all day."""
        self.claim((4, 4), 0)
        for claim, ending in zip(self.held(), endings, strict=False):
            self.end(claim, ending)

    @rule(wish=series, changes=st.lists(wishes.map(lambda wish: replace(wish, id="s")) | changes, max_size=4))
    def replace_what_is_retried(self, wish: Wish, changes: list[Wish | str]) -> None:
        """Put a series, let it fail once, claim the retry, and change the series while the retry is in flight."""
        self.put(wish)
        self.claim((9, 9), 0)
        for claim in self.held():
            if claim.record.id == wish.id:
                self.end(claim, ("again", 0, MINUTE_MS, None))
        self.claim((9, 9), 0)
        for each in changes:
            if isinstance(each, Wish):
                self.put(each)
            else:
                self.change_one("s", each, 0)

    def end(self, claim: Claim, ending: Ending) -> None:
        kind, due, then, error = ending
        record, now = claim.record, self.now
        key = (record.id, record.revision, claim.token)
        then_due_ms = None if then is None else record.due_ms + then
        settlements: dict[str, Settlement] = {
            "done": Done(*key, then_due_ms),
            "again": Again(*key, now + due, record.attempt + (error is not None), error, then_due_ms),
            "dead": Dead(*key, "rejected", record.attempt + 1, error, then_due_ms),
        }
        self.settle_with(settlements[kind])
        self.settled.append(settlements[kind])

    def settle_with(self, settlement: Settlement) -> None:
        (outcome,) = self.do(self.works[1].settle([settlement]))
        self.model.settle(settlement, outcome, self.now)

    @rule(
        pick=picks,
        lease_ms=st.sampled_from([LEASE_MS, LEASE_MS, 60_000, 60_001]),
        repeats=st.booleans(),
        ends_trial=st.booleans(),
    )
    def renew(self, pick: int, lease_ms: int, repeats: bool, ends_trial: bool) -> None:
        claim = self.pick_claim(pick)
        if claim is None:
            return
        to = token_for(self.now + lease_ms, token_counter(claim.token))
        renewal = Renewal(claim.record.id, claim.record.revision, claim.token, to, ends_trial)
        for _ in range(1 + repeats):
            (outcome,) = self.do(self.works[0].renew([renewal]))
            self.model.renew(renewal, outcome, self.now, self.now + lease_ms)
        message = self.model.messages.get(claim.record.id)
        if message is not None and message.token == to:
            self.claims.append(Claim(claim.record, to))

    # --- time ---------------------------------------------------------------------------------------------

    @rule(ms=st.sampled_from([1, 500, 5000, LEASE_MS, 31_000, 10 * MINUTE_MS, 24 * 60 * MINUTE_MS, -60 * MINUTE_MS]))
    def pass_time(self, ms: int) -> None:
        if ms < 0:
            self.clock.step(timedelta(milliseconds=ms))
        else:
            self.clock.move(ms)
            self.model.time_passed(self.now)

    @rule(times=st.integers(1, 4))
    def die(self, times: int) -> None:
        """Claim and settle nothing, as a process that ends."""
        for _ in range(times):
            self.claim((9, 9), 0)
            self.pass_time(LEASE_MS)
        self.tidy()

    def tidy(self) -> None:
        self.model.seen[0] = self.now
        self.do(self.works[0].tidy(LANES, limit=1000))
        self.model.tidied(self.now, self.look)

    # --- operators ----------------------------------------------------------------------------------------

    @rule(what=st.sampled_from(["hold", "release", "redrive", "purge", "tidy", "reopen"]), pick=picks)
    def operate(self, what: str, pick: int) -> None:
        held, dead = sorted(self.model.held, key=str), sorted(self.model.dead)
        if what == "hold":
            self.hold((LANES[pick % 2], (None, "", "p")[pick % 3]))
        elif what == "release" and held:
            self.release(held[pick % len(held)])
        elif what == "redrive" and dead:
            self.redrive(dead[pick % len(dead)])
        elif what == "purge" and dead:
            key = dead[pick % len(dead)]
            assert self.do(self.store.purge([key, DeadKey("nobody", 1)])) == 1
            del self.model.dead[key]
        elif what == "tidy":
            self.tidy()
        elif what == "reopen" and self.store.traits.durable:
            self.reopen()

    def hold(self, place: tuple[Lane, str | None]) -> None:
        assert self.do(self.store.pause(*place)) is (place not in self.model.held)
        self.model.held.add(place)

    def release(self, place: tuple[Lane, str | None]) -> None:
        assert self.do(self.store.resume(*place))
        assert not self.do(self.store.resume(*place))
        self.model.held.remove(place)

    def redrive(self, key: DeadKey) -> None:
        for _ in range(2):
            (outcome,) = self.do(self.store.redrive([key]))
            self.model.redrive(key, outcome, self.now)

    def reopen(self) -> None:
        self.do(self.opened.aclose())
        self.store = self.reopen_store()
        self.do(self._open())
        self.last = None

    @invariant()
    def what_can_be_seen_is_right(self) -> None:
        snapshots = self.do(self.store.search(Query(limit=1000)))
        letters = self.do(self.store.dead_letters(limit=1000))
        self.model.check(snapshots, letters, self.now)
        assert set(self.do(self.store.paused())) == self.model.held
        assert self.do(self.store.position("source")) == self.model.position


class MemoryMachine(StoreMachine):
    def make_store(self) -> Store:
        self.model.outlives_processes = False
        return MemoryStore(clock=self.clock)


class SqliteMachine(StoreMachine):
    def make_store(self) -> Store:
        self.folder = tempfile.TemporaryDirectory(prefix="aiodelay-", dir=IN_MEMORY)
        return self.reopen_store()

    def reopen_store(self) -> Store:
        store: Store = open_store(f"sqlite:///{Path(self.folder.name) / 'store.db'}", namespace="", clock=self.clock)
        return store

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()


WALKS = settings(stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MACHINES = [pytest.param(MemoryMachine, 60, id="memory"), pytest.param(SqliteMachine, 20, id="sqlite")]


@pytest.mark.parametrize(("machine", "walks"), MACHINES)
def test_walks(machine: type[StoreMachine], walks: int) -> None:
    run_state_machine_as_test(machine, settings=settings(WALKS, max_examples=walks))


@pytest.mark.storm
@pytest.mark.parametrize(("machine", "walks"), MACHINES)
def test_long_walks(machine: type[StoreMachine], walks: int) -> None:
    long = settings(WALKS, max_examples=100 * walks, stateful_step_count=100, derandomize=False)
    run_state_machine_as_test(machine, settings=long)
