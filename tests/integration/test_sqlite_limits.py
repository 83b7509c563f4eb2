"""C1, C2 on SQLite: counts that other programs, damage and steps leave right, and the work of a claim."""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from aiodelay.backends.sqlite import claims, limits
from aiodelay.backends.sqlite.connection import Database
from aiodelay.backends.sqlite.tables import Tables
from aiodelay.backends.sqlite.work import SqliteWork
from aiodelay.backends.sqlite.writer import Writer
from aiodelay.core.ids import new_id, new_op
from aiodelay.core.values import (
    NO_LIMITS,
    After,
    At,
    Cancel,
    Claim,
    Conflict,
    Demand,
    Done,
    Envelope,
    LaneLimits,
    Limit,
    Put,
)
from aiodelay.sqlite import SqliteStore
from aiodelay.testing.clock import VirtualClock
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

LANE = "work"
ONE, TWO = (LaneLimits(each=Limit("key", concurrency)) for concurrency in (1, 2))


class Stage:
    """A store on a file, and one worker."""

    def __init__(self, store: SqliteStore, work: SqliteWork, clock: VirtualClock) -> None:
        self.store, self.work, self.clock = store, work, clock

    async def put(self, *names: str, conflict: Conflict = Conflict.replace()) -> None:  # noqa: B008 - frozen
        """Store messages that are due now. The first letter of a name is the key."""
        puts = [Put(new_op(), Envelope(name, LANE, key=name[:1].encode()), After(0), conflict) for name in names]
        await self.store.apply(puts)

    async def claim(self, messages: int = 500) -> Sequence[Claim]:
        return (await self.work.claim({LANE: Demand(messages)}, request=new_id(), lease_ms=15_000)).claims

    async def ids(self, messages: int = 500) -> list[str]:
        return sorted(claim.record.id for claim in await self.claim(messages))

    async def settle(self, claim: Claim) -> None:
        await self.work.settle([Done(claim.record.id, claim.record.revision, claim.token)])

    async def tidy(self) -> None:
        await self.work.tidy([LANE], limit=500)

    async def wakes(self, change: Awaitable[object]) -> None:
        """Check that a change wakes the worker. The writes of other processes wake nobody."""
        self.work.clear()
        await change
        await until(lambda: self.work.wakeup.is_set, "the worker is awake")

    async def trace(self, told: Callable[[str], object]) -> None:
        """Have each statement of the store told."""
        await self.store._handle.write(lambda tables: tables._connection.set_trace_callback(told))

    def execute(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:  # noqa: ANN401 - of any column
        """Do as another program does."""
        with closing(sqlite3.connect(self.store.path, isolation_level=None)) as connection:
            return connection.execute(statement, values).fetchall()

    def insert(self, name: str) -> None:
        insert = "INSERT INTO schedule (id, lane, key, due_ms, payload) VALUES (?, ?, ?, ?, 'x')"
        self.execute(insert, name, LANE, name[:1], self.clock.now_ms())

    def running(self) -> dict[Any, int]:
        return dict(self.execute("SELECT key, running FROM limited_keys"))


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Stage]:
    clock = VirtualClock()
    async with SqliteStore(folder / "delay.db", clock=clock) as store, store.work("one", [LANE]) as work:
        assert isinstance(work, SqliteWork)
        yield Stage(store, work, clock)


@pytest_asyncio.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(Writer, "look_around", lambda _: None)
    async with opened(tmp_path) as found:
        yield found


# --- other programs and other versions --------------------------------------------------------------------


async def test_c1_messages_of_another_program_count(stage: Stage) -> None:
    await stage.store.set_limits(LANE, ONE, is_declared=False)
    for name in ("a1", "a2", "a3"):
        stage.insert(name)
    [claim] = await stage.claim()
    stage.execute("DELETE FROM schedule WHERE id = 'a2'")
    assert await stage.ids() == []
    await stage.settle(claim)
    assert await stage.ids() == ["a3"]


async def test_c1_a_message_that_another_program_replaces_in_flight_counts(stage: Stage) -> None:
    await stage.store.set_limits(LANE, ONE, is_declared=False)
    await stage.put("a1")
    [claim] = await stage.claim()
    stage.insert("a1")
    assert (await stage.ids(), stage.running()) == ([], {b"a": 1})
    await stage.settle(claim)
    assert (await stage.ids(), stage.running()) == (["a1"], {b"a": 1})


async def test_c1_an_older_version_that_holds_claims_gives_their_room_back(stage: Stage) -> None:
    """It ends a claim with these statements, whether it knows limits or not."""
    await stage.put("a1", "a2")
    assert await stage.ids(1) == ["a1"]
    await stage.store.set_limits(LANE, ONE, is_declared=False)
    assert await stage.ids() == []
    [(n, ns)] = stage.execute("DELETE FROM leases RETURNING n, ns")
    stage.execute("INSERT INTO ended (ns, n, until_ms) VALUES (?, ?, ?)", ns, n, stage.clock.now_ms())
    assert await stage.ids() == ["a2"]


async def test_v1_the_first_limit_switches_the_feature_on(stage: Stage) -> None:
    await stage.store.set_limits(LANE, NO_LIMITS, is_declared=True)
    assert not await stage.store.features()
    await stage.store.set_limits(LANE, ONE, is_declared=True)
    assert list(await stage.store.features()) == ["limits"]


async def test_a_file_without_limits_has_no_triggers_for_them(stage: Stage) -> None:
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'trigger' AND name LIKE 'limited%'"
    assert stage.execute(query) == [(0,)]
    await stage.store.set_limits(LANE, ONE, is_declared=True)
    assert stage.execute(query) == [(5,)]


async def test_a_file_of_another_version_gets_the_triggers_of_this_one(tmp_path: Path) -> None:
    query = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger' ORDER BY name"
    async with opened(tmp_path) as stage:
        await stage.store.set_limits(LANE, ONE, is_declared=False)
        triggers = stage.execute(query)
        stage.execute("DROP TRIGGER limited_leave")
        stage.execute("DROP TRIGGER limited_end")
        stage.execute("CREATE TRIGGER limited_end AFTER DELETE ON leases BEGIN SELECT 1; END")
    async with opened(tmp_path) as stage:
        assert stage.execute(query) == triggers


# --- turns ------------------------------------------------------------------------------------------------


async def test_c2_keys_take_turns_within_a_millisecond(stage: Stage) -> None:
    await stage.store.set_limits(LANE, LaneLimits(each=Limit("key", 9)), is_declared=False)
    await stage.put(*[f"{key}{i}" for key in "abc" for i in range(3)])
    stage.clock.move(1)
    assert [name[0] for _ in range(9) for name in await stage.ids(1)] == [*"abcabcabc"]


@pytest.mark.parametrize(("messages", "in_turn"), [(12, 1), (199, 1), (200, 4), (500, 4)])
async def test_c2_a_large_claim_takes_a_few_messages_of_a_key_in_its_turn(
    stage: Stage, messages: int, in_turn: int
) -> None:
    await stage.store.set_limits(LANE, LaneLimits(each=Limit("key", 5)), is_declared=False)
    await stage.put(*[f"{key}{i}" for key in "ab" for i in range(9)])
    claims_ = await stage.claim(messages)
    assert [claim.record.id[0] for claim in claims_] == [*"ab"] * 5 if in_turn == 1 else [*"aaaabbbbab"]
    assert stage.running() == {b"a": 5, b"b": 5}
    await stage.work.settle([Done(claim.record.id, claim.record.revision, claim.token) for claim in claims_])
    assert stage.running() == {b"a": 0, b"b": 0}
    assert await stage.ids(messages) == [f"{key}{i}" for key in "ab" for i in range(5, 9)]


async def test_c2_a_key_keeps_its_order_if_its_numbers_are_in_another_order(stage: Stage) -> None:
    await stage.store.set_limits(LANE, LaneLimits(each=Limit("key", 5)), is_declared=False)
    now = stage.clock.now_ms()
    puts = [Put(new_op(), Envelope(f"a{i}", LANE, key=b"a"), At(now + i)) for i in (3, 1, 2)]
    await stage.store.apply(puts)
    stage.clock.move(5)
    assert [claim.record.id for claim in await stage.claim()] == ["a1", "a2", "a3"]


async def test_a_message_that_a_claim_steps_over_stays_in_the_queue_of_its_key(stage: Stage) -> None:
    await stage.store.set_limits(LANE, LaneLimits(each=Limit("key", 5)), is_declared=False)
    await stage.put("a1")
    await stage.claim()
    stage.clock.move(16_000)  # the lease of a1 lapses
    await stage.put("a2")
    demand = {LANE: Demand(500, max_lapses=0)}
    claimed = await stage.work.claim(demand, request=new_id(), lease_ms=15_000)
    assert [claim.record.id for claim in claimed.claims] == ["a2"]
    assert await stage.ids() == ["a1"]


async def test_c2_a_key_that_was_served_comes_behind_a_key_that_came_before_it(stage: Stage) -> None:
    await stage.store.set_limits(LANE, ONE, is_declared=False)
    await stage.put("a1")
    await stage.settle((await stage.claim())[0])
    stage.clock.move(1)
    await stage.put("b1", "a2")
    assert await stage.ids(1) == ["b1"]


async def test_c2_a_key_whose_first_message_has_left_has_the_turn_of_its_next_one(stage: Stage) -> None:
    await stage.store.set_limits(LANE, ONE, is_declared=False)
    for names in ("a1", "b1", "a2"):
        await stage.put(names)
        stage.clock.move(1)
    await stage.store.apply([Cancel(new_op(), "a1")])
    assert await stage.ids(1) == ["b1"]
    assert await stage.ids(1) == ["a2"]


async def test_a_key_whose_messages_have_left_asks_for_no_further_claims(stage: Stage) -> None:
    await stage.store.set_limits(LANE, ONE, is_declared=False)
    await stage.put("a1")
    await stage.store.apply([Cancel(new_op(), "a1")])
    claimed = await stage.work.claim({LANE: Demand(1)}, request=new_id(), lease_ms=15_000)
    assert (claimed.claims, claimed.next_due_ms) == ([], None)


async def test_c1_a_new_limit_by_key_keeps_what_the_rate_of_the_lane_has_counted(stage: Stage) -> None:
    whole = Limit(rate="3/min")
    await stage.store.set_limits(LANE, LaneLimits(whole), is_declared=False)
    await stage.put("a1", "a2", "b1", "b2")
    assert await stage.ids(2) == ["a1", "a2"]
    await stage.store.set_limits(LANE, LaneLimits(whole, Limit("key", 5)), is_declared=False)
    assert await stage.ids() == ["b1"]


# --- wake-ups ---------------------------------------------------------------------------------------------


async def test_new_limits_wake_workers(stage: Stage) -> None:
    for limits_ in (ONE, TWO, NO_LIMITS):
        await stage.wakes(stage.store.set_limits(LANE, limits_, is_declared=False))


async def test_c1_a_replaced_message_that_lapses_wakes_workers(stage: Stage) -> None:
    await stage.store.set_limits(LANE, ONE, is_declared=False)
    await stage.put("a1")
    await stage.claim()
    await stage.put("a1")
    stage.clock.move(20_000)
    await stage.wakes(stage.tidy())
    assert await stage.ids() == ["a1"]


async def test_c1_a_corrected_count_wakes_workers(stage: Stage) -> None:
    await stage.store.set_limits(LANE, ONE, is_declared=False)
    await stage.put("a1")
    stage.execute("UPDATE limited_keys SET running = 1")
    await stage.wakes(stage.tidy())
    assert await stage.ids() == ["a1"]


# --- housekeeping -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["running = 7", "running = 0"])
async def test_c1_housekeeping_corrects_counts(stage: Stage, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    await stage.store.set_limits(LANE, LaneLimits(Limit(concurrency=9), Limit("key", 2)), is_declared=False)
    await stage.put("a1", "a2", "b1", "c1")
    claims_ = await stage.claim()
    await stage.settle(next(claim for claim in claims_ if claim.record.id == "c1"))
    counts = stage.running()
    stage.execute(f"UPDATE limited_keys SET {damage}")
    stage.execute("DELETE FROM limited_keys WHERE key = x'62'")
    with caplog.at_level(logging.WARNING):
        await stage.tidy()
    assert stage.running() == {key: count for key, count in counts.items() if key != b"c"}
    assert "counts of messages in flight" in caplog.text
    caplog.clear()
    await stage.tidy()
    assert not caplog.text


async def test_housekeeping_checks_many_keys_in_steps(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHECKED_AT_ONCE", 2)
    await stage.store.set_limits(LANE, TWO, is_declared=False)
    await stage.put(*"abcde")
    stage.execute("UPDATE limited_keys SET running = 1")
    for wrong in (3, 1, 0, 0):
        await stage.tidy()
        assert sum(stage.running().values()) == wrong


async def test_unused_keys_are_forgotten_when_their_rate_counts_nothing(stage: Stage) -> None:
    await stage.store.set_limits(LANE, LaneLimits(each=Limit("key", rate="1/min")), is_declared=False)
    await stage.put("a1", "b1", "b2")
    for claim in await stage.claim():
        await stage.settle(claim)
    await stage.tidy()
    assert set(stage.running()) == {b"a", b"b"}
    stage.clock.move(60_000)
    await stage.tidy()
    assert set(stage.running()) == {b"b"}, "b2 waits"


async def test_limits_that_have_ended_leave_nothing_behind(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHECKED_AT_ONCE", 2)
    await stage.store.set_limits(LANE, TWO, is_declared=False)
    await stage.put("a1", "b1", "c1")
    await stage.store.set_limits(LANE, NO_LIMITS, is_declared=False)
    for _ in range(2):
        await stage.tidy()
    assert stage.execute("SELECT * FROM limited") == stage.execute("SELECT * FROM limited_keys") == []
    assert await stage.ids() == ["a1", "b1", "c1"]


# --- messages that were there before, and the clock -------------------------------------------------------


async def test_c1_the_messages_of_a_lane_come_under_its_limits_in_steps(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FILLED_AT_ONCE", 2)
    await stage.put(*[f"{key}{i}" for i in range(3) for key in "ab"])
    steps: list[int] = []
    fill = limits.fill

    def noted(tables: Tables, limited: limits.LimitedLane) -> limits.LimitedLane:
        filled = fill(tables, limited)
        steps.append(tables.execute("SELECT count(*) FROM limited").fetchone()[0])
        return filled

    monkeypatch.setattr("aiodelay.backends.sqlite.limit_control.fill", noted)
    await stage.store.set_limits(LANE, TWO, is_declared=False)
    assert steps == [2, 4, 6, 6]
    assert await stage.ids() == ["a0", "a1", "b0", "b1"]


async def test_c1_claims_go_on_where_the_process_that_set_limits_has_ended(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FILLED_AT_ONCE", 2)
    monkeypatch.setattr("aiodelay.backends.sqlite.limit_control._is_filled", lambda tables, lane: True)
    await stage.put(*"abcde")
    await stage.store.set_limits(LANE, ONE, is_declared=False)
    claimed = await stage.work.claim({LANE: Demand(5)}, request=new_id(), lease_ms=15_000)
    assert (len(claimed.claims), claimed.next_due_ms) == (2, stage.clock.now_ms()), "claim again at once"
    assert [await stage.ids() for _ in range(3)] == [["c", "d"], ["e"], []]


async def test_c2_a_clock_that_steps_back_holds_up_no_key(stage: Stage) -> None:
    await stage.store.set_limits(LANE, LaneLimits(each=Limit("key", 5, "100/min")), is_declared=False)
    await stage.put("a1", "a2", "b1")
    stage.clock.move(1)
    assert await stage.ids(2) == ["a1", "b1"]
    stage.clock.step(-timedelta(hours=1))
    await stage.put("b2")
    assert await stage.ids() == ["b2"]


# --- the work of a claim and of a put ---------------------------------------------------------------------


def filled(folder: Path, keys: int) -> Tables:
    """Make a file with a message for each key, and two messages in flight of one key that has reached its limit."""
    database = Database(str(folder / f"{keys}.db"))
    database.begin(is_durable=False)
    tables = Tables(database.connection, "default", 0)
    tables.open()
    tables.begin(1_000_000, careful=False)
    limits.set_limits(tables, LANE, TWO, is_declared=False)
    limits.fill(tables, limits.read_limits(tables)[tables.known_lane(LANE)])
    tables.execute(
        """
        WITH RECURSIVE counted(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM counted WHERE i < ?)
        INSERT INTO messages (ns, id, lane, key, revision, due_ms, op, place_ms, payload)
        SELECT ?, 'm' || i, ?, CAST('k' || i AS BLOB), 1, i, x'00', i, x'00' FROM counted
        """,
        (keys, tables.ns, tables.known_lane(LANE)),
    )
    tables.execute("INSERT INTO queue (lane, place_ms, n) SELECT lane, place_ms, n FROM messages")
    return tables


def instructions(tables: Tables) -> list[int]:
    """Return the numbers of instructions that SQLite executes for a put, and for a claim of five messages."""
    found: list[int] = []
    for run in (_put, _claim):
        count = 0

        def counted() -> None:
            nonlocal count
            count += 1

        tables._connection.set_progress_handler(counted, 1)
        run(tables)
        tables._connection.set_progress_handler(None, 1)
        found.append(count)
    return found


def _put(tables: Tables) -> None:
    tables.rules.apply(Put(new_op(), Envelope("new", LANE, key=b"new"), After(0)), tables.now)


def _claim(tables: Tables) -> None:
    tables.check_features()
    claimed, _ = claims.claim(tables, {LANE: Demand(5)}, worker="one", holder=1, lease_ms=15_000, turn=1, number=1)
    assert len(claimed.claims) == 5


async def test_c2_a_put_and_a_claim_do_not_depend_on_the_number_of_keys(tmp_path: Path) -> None:
    few, many = (instructions(filled(tmp_path, keys)) for keys in (10, 100_000))
    assert few == many


async def test_a_namespace_without_limits_reads_none(stage: Stage) -> None:
    """Also if another namespace of the file has limits."""
    async with SqliteStore(stage.store.path, namespace="other") as other:
        await other.set_limits(LANE, ONE, is_declared=False)
    said: list[str] = []
    await stage.trace(said.append)
    await stage.put("a1")
    [claim] = await stage.claim()
    await stage.settle(claim)
    await stage.tidy()
    assert said
    assert not [each for each in said if re.search("limit(s|ed)", each) and not each.startswith("-- ")], "no trigger"
