"""SQLite rows: the data kept of ended messages, and the handling of unreadable rows."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from aiodelay.backends.sqlite import SqliteStore, upkeep
from aiodelay.backends.sqlite.connection import Database
from aiodelay.backends.sqlite.reading import Reader
from aiodelay.core.transitions import occurrence_id
from aiodelay.core.values import (
    RETRY_WINDOW_MS,
    After,
    Again,
    Cancel,
    Claim,
    Conflict,
    Dead,
    DeadKey,
    Demand,
    Done,
    Envelope,
    Fire,
    Put,
    Query,
    Refused,
    SettleOutcome,
    SourcePosition,
    Stored,
    Unknown,
)
from aiodelay.ports import Work
from aiodelay.testing.clock import VirtualClock

LANE = {"lane": Demand(500)}
SCAN = re.compile(r"SCAN (TABLE )?(m|messages|q|queue)\b")


def put(
    number: int, payload: bytes = b"payload", message_id: str = "", lane: str = "lane", *, after_ms: int = 0
) -> Put:
    return Put(number.to_bytes(8, "big"), Envelope(message_id or f"m{number}", lane, payload=payload), After(after_ms))


def done(claim: Claim) -> Done:
    return Done(claim.record.id, claim.record.revision, claim.token)


class File:
    """An open store on a clock moved by hand, and its file seen from outside."""

    def __init__(self, path: Path, clock: VirtualClock, store: SqliteStore, work: Work) -> None:
        self.path, self.clock, self.store, self.work = path, clock, store, work
        self._requests = 0

    def rows(self, query: str) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(self.path)) as connection:
            return connection.execute(query).fetchall()

    def write(self, statement: str) -> None:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            connection.execute(statement)

    async def claim(self) -> list[Claim]:
        self._requests += 1
        return list((await self.work.claim(LANE, request=f"{self._requests}", lease_ms=15_000)).claims)

    async def tidy(self) -> None:
        await self.work.tidy(["lane"], limit=500)


@asynccontextmanager
async def opened(path: Path, *, journal: int = 0) -> AsyncIterator[File]:
    clock = VirtualClock()
    async with SqliteStore(path / "delay.db", clock=clock, journal=journal) as store, store.work("w", ["lane"]) as work:
        yield File(path / "delay.db", clock, store, work)


# --- what is kept -----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_nothing_is_left_of_what_has_ended_once_its_op_is_forgotten(tmp_path: Path) -> None:
    async with opened(tmp_path) as file:
        await file.store.apply([put(i) for i in range(1, 301)])
        await file.store.apply([Cancel(b"cancel..", "m1"), Fire(b"fire....", "m2"), put(900, message_id="m3")])
        assert set(await file.work.settle([done(claim) for claim in await file.claim()])) == {SettleOutcome.SETTLED}
        assert file.rows("SELECT count(*) FROM messages")[0] == (300,)
        file.clock.move(RETRY_WINDOW_MS)
        await file.tidy()
        for table in ("messages", "queue", "parked", "leases", "ended", "ops"):
            assert file.rows(f"SELECT count(*) FROM {table}") == [(0,)], table


@pytest.mark.asyncio
async def test_settling_purges_what_ended_before(tmp_path: Path) -> None:
    async with opened(tmp_path) as file:
        for i in range(1, 20):
            await file.store.apply([put(i)])
            await file.work.settle([done(claim) for claim in await file.claim()])
            file.clock.move(RETRY_WINDOW_MS // 4)
        assert file.rows("SELECT count(*) <= 5 FROM messages") == [(1,)]


@pytest.mark.asyncio
async def test_settling_purges_what_ended_before_also_behind_a_message_that_was_scheduled_early(tmp_path: Path) -> None:
    async with opened(tmp_path) as file:
        await file.store.apply([put(i, after_ms=(101 - i) * RETRY_WINDOW_MS // 10) for i in range(1, 101)])
        for i in range(101, 200):  # each time, one ends that was scheduled before all others
            file.clock.move(RETRY_WINDOW_MS // 10)
            await file.store.apply([put(i)])
            assert len(await file.work.settle([done(claim) for claim in await file.claim()])) in (1, 2)
        assert file.rows("SELECT count(*) <= 30 FROM ended") == [(1,)], (
            "the 20 of one window, and some not looked at yet"
        )


@pytest.mark.asyncio
async def test_commands_purge_what_was_remembered_of_those_before(tmp_path: Path) -> None:
    async with opened(tmp_path) as file:
        for i in range(1, 100):
            await file.store.apply([put(i, after_ms=1_000_000), Cancel(f"cancel{i:02}".encode(), f"m{i}")])
            file.clock.move(RETRY_WINDOW_MS // 10)
        for table in ("messages", "ended", "ops"):
            assert file.rows(f"SELECT count(*) <= 15 FROM {table}") == [(1,)], table


@pytest.mark.asyncio
async def test_a_large_payload_goes_as_soon_as_its_message_has_ended(tmp_path: Path) -> None:
    async with opened(tmp_path) as file:
        await file.store.apply([put(1, bytes(100_000)), put(2, bytes(100_000)), put(3, bytes(1_000))])
        await file.store.apply([Cancel(b"cancel..", "m2")])
        await file.work.settle([done(claim) for claim in await file.claim()])
        assert file.rows("SELECT id, length(payload) FROM messages ORDER BY id") == [("m1", 0), ("m2", 0), ("m3", 1000)]


@pytest.mark.asyncio
async def test_the_op_of_a_refused_put_is_remembered_though_its_message_is_gone(tmp_path: Path) -> None:
    async with opened(tmp_path) as file:
        await file.store.apply([put(1, message_id="m")])
        file.clock.move(RETRY_WINDOW_MS)
        kept = Put(b"kept....", Envelope("m", "lane"), After(0), Conflict.keep())
        answer = await file.store.apply([kept])
        await file.work.settle([done(claim) for claim in await file.claim()])
        assert await file.store.apply([kept]) == answer
        assert await file.store.get("m") is None


@pytest.mark.asyncio
async def test_a_number_that_came_to_another_message_in_the_same_transaction_does_not_end_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as file:
        newer = Put(b"newer 1.", Envelope("m", "lane", version=1), After(0), Conflict.newer(1))
        await file.store.apply([newer])
        await file.work.settle([done(claim) for claim in await file.claim()])
        file.clock.move(RETRY_WINDOW_MS)
        again = Put(b"newer 2.", Envelope("m", "lane", version=2), After(0), Conflict.newer(2))
        await asyncio.gather(
            file.store.pause("busy", None),  # The other calls gather meanwhile, and share a transaction.
            file.store.apply([Cancel(b"cancel..", "m")]),  # It finds the row of `m`, which is over, and purges it.
            file.store.apply([put(2)]),
            file.store.apply([again]),
        )
        assert [claim.record.id for claim in await file.claim()] == ["m2", "m"]


@pytest.mark.asyncio
async def test_a_number_that_came_to_another_message_does_not_settle_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as file, file.store.work("other", ["lane"]) as other:
        await file.store.apply([put(1)])
        (stale,) = await file.claim()
        file.clock.move(20_000)
        ended = await other.claim(LANE, request="a", lease_ms=15_000)
        await other.settle([done(ended.claims[0])])
        file.clock.move(RETRY_WINDOW_MS)
        await other.tidy([], limit=500)
        await file.store.apply([put(2)])  # in an empty table: with the number that `stale` had
        (claimed,) = (await other.claim(LANE, request="b", lease_ms=15_000)).claims
        assert file.rows("SELECT n FROM leases") == [(1,)]
        assert await file.work.settle([done(stale)]) == [SettleOutcome.GONE]
        assert await other.settle([done(claimed)]) == [SettleOutcome.SETTLED]


@pytest.mark.asyncio
async def test_a_claim_settled_twice_in_one_call_is_settled_by_the_first(tmp_path: Path) -> None:
    async with opened(tmp_path) as file:
        await file.store.apply([put(1)])
        (claim,) = await file.claim()
        again = Again(claim.record.id, claim.record.revision, claim.token, file.clock.now_ms(), 1)
        assert await file.work.settle([again, done(claim)]) == [SettleOutcome.SETTLED, SettleOutcome.GONE]
        assert await file.store.get("m1") is not None


@pytest.mark.asyncio
async def test_a_series_that_lapses_in_the_same_step_in_which_its_retry_is_given_up_lists_it_no_more(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as file:
        await file.store.apply([Put(b"series..", Envelope("s", "lane", rule={"e": 1_000}), After(0))])
        (first,) = await file.claim()
        key, now = (first.record.id, first.record.revision, first.token), file.clock.now_ms()
        await file.work.settle([Again(*key, now, 1, "error", now + 10 * 60_000)])
        for i in range(5):  # The retry is tried alone three times; the third time, the series is claimed beside it.
            async with file.store.work(f"w{i}", ["lane"]) as work:
                claims = list((await work.claim(LANE, request="retry", lease_ms=1_000)).claims)
                if i == 4:
                    await file.store.apply([Fire(b"fire....", "s")])
                    claims += (await work.claim(LANE, request="series", lease_ms=1_000)).claims
            file.clock.move(100_000)
            await file.tidy()
        assert [claim.record.id for claim in claims] == [occurrence_id("s", first.record.due_ms), "s"]
        assert [letter.reason for letter in await file.store.dead_letters()] == ["killed_worker"]
        (series,) = await file.claim()
        assert (series.record.id, series.record.live) == ("s", ())


# --- what is held -----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_what_a_held_address_parks_is_seen_counted_and_comes_back(tmp_path: Path) -> None:
    async with opened(tmp_path) as file:
        await file.store.pause("lane", "there")
        there = [Put(i.to_bytes(8, "big"), Envelope(f"t{i}", "lane", "there"), After(i * 1000)) for i in range(4)]
        await file.store.apply([*there, put(9)])
        assert [claim.record.id for claim in await file.claim()] == ["m9"]
        assert file.rows("SELECT count(*) FROM parked") == [(4,)]  # also those ahead: they stood at the head
        await file.store.apply([put(10)])
        counts = (await file.store.counts())["lane"]
        assert (counts.held, counts.overdue, counts.scheduled, counts.in_flight) == (4, 1, 0, 1)
        load = await file.store.load(bucket_ms=2000, buckets=2)
        assert [bucket.messages for bucket in load] == [3, 2]
        assert len(await file.store.search(Query())) == 6
        await file.store.resume("lane", "there")
        counts = (await file.store.counts())["lane"]
        assert (counts.held, counts.overdue, counts.scheduled, counts.in_flight) == (0, 2, 3, 1)


@pytest.mark.asyncio
async def test_l1_what_was_parked_when_its_release_was_cut_short_is_returned_by_tidying(tmp_path: Path) -> None:
    async with opened(tmp_path) as file:
        await file.store.pause("lane", "there")
        await file.store.apply([Put(b"12345678", Envelope("m", "lane", "there"), After(0))])
        assert await file.claim() == []
        file.write("DELETE FROM holds")
        assert await file.claim() == []
        await file.tidy()
        assert [claim.record.id for claim in await file.claim()] == ["m"]


@pytest.mark.asyncio
async def test_a_release_of_very_many_is_done_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "UNPARKED_AT_ONCE", 10)
    async with opened(tmp_path) as file:
        await file.store.pause("lane", "there")
        puts = [Put(i.to_bytes(8, "big"), Envelope(f"m{i}", "lane", "there"), After(0)) for i in range(35)]
        await file.store.apply(puts)
        assert await file.claim() == []
        assert await file.store.resume("lane", "there")
        assert [claim.record.id for claim in await file.claim()] == [f"m{i}" for i in range(35)]


# --- what cannot be read ----------------------------------------------------------------------------------

UNREADABLE = {
    "headers": "headers = '{\"a\": 5}'",
    "encoding": "encoding = 'yaml'",
    "late": "late = 7",
    "payload": "payload = 'text'",
    "due_ms": "due_ms = 'soon'",
    "address": "address = CAST(x'ff' AS TEXT)",
    "live": "live = 'x'",
}


@pytest.mark.parametrize("column", UNREADABLE)
@pytest.mark.asyncio
async def test_l5_a_row_that_cannot_be_read_becomes_a_dead_letter(tmp_path: Path, column: str) -> None:
    async with opened(tmp_path, journal=100) as file:
        await file.store.apply([put(i) for i in range(1, 6)])
        file.write(f"UPDATE messages SET {UNREADABLE[column]} WHERE id = 'm3'")
        assert (await file.store.get("m3")) is not None  # it can be looked at, as far as it goes
        assert [claim.record.id for claim in await file.claim()] == ["m1", "m2", "m4", "m5"]
        (letter,) = await file.store.dead_letters()
        assert (letter.record.id, letter.reason) == ("m3", "undecodable")
        assert letter.record.last_error == f"cannot be read: column {column} of table messages"
        if column != "payload":
            assert letter.record.envelope.payload == b"payload"
        assert await file.store.get("m3") is None
        assert "dead" in [entry.event for entry in await file.store.journal(message_id="m3")]


@pytest.mark.asyncio
async def test_headers_that_cannot_be_read_are_kept_as_they_were(tmp_path: Path) -> None:
    async with opened(tmp_path) as file:
        await file.store.apply([put(1)])
        file.write("UPDATE messages SET headers = 'a=b; c'")
        assert await file.claim() == []
        (letter,) = await file.store.dead_letters()
        assert letter.record.envelope.headers == {"aiodelay-unreadable": b"a=b; c"}
        assert isinstance((await file.store.redrive([letter.key]))[0], Stored)
        (claim,) = await file.claim()
        assert claim.record.envelope.headers == {"aiodelay-unreadable": b"a=b; c"}


@pytest.mark.asyncio
async def test_a_dead_letter_that_cannot_be_read_is_not_redriven(tmp_path: Path) -> None:
    async with opened(tmp_path) as file:
        await file.store.apply([put(1)])
        (claim,) = await file.claim()
        await file.work.settle([Dead(claim.record.id, claim.record.revision, claim.token, "rejected", 1)])
        file.write("UPDATE dead SET record = x'ff'")
        key = DeadKey(claim.record.id, claim.record.revision)
        (outcome,) = await file.store.redrive([key])
        assert isinstance(outcome, Refused)
        assert outcome.reason == "undecodable"
        assert await file.store.purge([key]) == 1


@pytest.mark.asyncio
async def test_a_row_that_cannot_be_read_can_be_replaced_or_cancelled(tmp_path: Path) -> None:
    async with opened(tmp_path) as file:
        await file.store.apply([put(1), put(2)])
        file.write("UPDATE messages SET headers = 'x', address = CAST(x'ff' AS TEXT)")
        outcomes = await file.store.apply([put(9, message_id="m1"), Cancel(b"cancel..", "m2")])
        assert [outcome.answer for outcome in outcomes if isinstance(outcome, Stored)] == ["replaced", "cancelled"]
        assert [claim.record.id for claim in await file.claim()] == ["m1"]


# --- what cannot be written -------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [put(7, lane="lane\ud800"), put(7, message_id="\udfff"), put(7, message_id="m7")])
@pytest.mark.asyncio
async def test_a_value_that_cannot_be_stored_refuses_its_own_command_only(tmp_path: Path, bad: Put) -> None:
    if bad.id == "m7":
        bad = Put(bad.op, Envelope("m7", "lane", version=1 << 64), After(0))
    async with opened(tmp_path) as file:
        outcomes = await file.store.apply([put(1), bad, put(2), Cancel(b"cancel..", "m1")])
        assert [type(outcome) for outcome in outcomes] == [Stored, Refused, Stored, Stored]
        assert "cannot be stored" in outcomes[1].detail  # type: ignore[union-attr]
        assert not isinstance(outcomes[1], Unknown)
        assert [claim.record.id for claim in await file.claim()] == ["m2"]


@pytest.mark.asyncio
async def test_with_a_source_one_value_that_cannot_be_stored_refuses_all(tmp_path: Path) -> None:
    async with opened(tmp_path) as file:
        bad = put(7, message_id="\udfff")
        outcomes = await file.store.apply([put(1), bad], source=SourcePosition("topic", 0, 5))
        assert [type(outcome) for outcome in outcomes] == [Refused, Refused]
        assert (await file.store.position("topic"), await file.store.get("m1")) == (None, None)
        assert [type(each) for each in await file.store.apply([put(1)], source=SourcePosition("topic", 0, 5))] == [
            Stored
        ]
        assert await file.store.position("topic") == 5


@pytest.mark.asyncio
async def test_an_error_text_that_is_no_utf8_is_kept_escaped(tmp_path: Path) -> None:
    async with opened(tmp_path) as file:
        await file.store.apply([put(1)])
        (claim,) = await file.claim()
        again = Again(claim.record.id, claim.record.revision, claim.token, file.clock.now_ms(), 1, "no \udc80 é")
        assert await file.work.settle([again]) == [SettleOutcome.SETTLED]
        (claim,) = await file.claim()
        assert claim.record.last_error == "no \\udc80 é"


# --- how rows are found -----------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("lane", [None, "lane"])
async def test_dead_letters_of_a_message_are_looked_up_in_the_index_of_ids(tmp_path: Path, lane: str | None) -> None:
    statements: list[str] = []
    async with opened(tmp_path) as file:
        with closing(sqlite3.connect(file.path)) as connection:
            connection.set_trace_callback(statements.append)
            Reader(connection, "default").dead_letters(lane, "m1", None, 10)
            (query,) = [statement for statement in statements if "FROM dead" in statement]
            steps = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}")]
        assert steps[0] == "SEARCH dead USING INDEX dead_key (ns=? AND id=?)"


@pytest.mark.asyncio
async def test_no_statement_of_the_writer_reads_a_whole_table_of_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BF6: the cost of a claim or a put must not grow with the number of messages."""
    statements: set[str] = set()
    begin = Database.begin

    def traced(self: Database, *, is_durable: bool) -> None:
        self.connection.set_trace_callback(statements.add)
        begin(self, is_durable=is_durable)

    monkeypatch.setattr(Database, "begin", traced)
    async with opened(tmp_path) as file:
        await file.store.pause("lane", "held")
        await file.store.apply([put(i) for i in range(1, 100)])
        await file.store.apply([put(1, b"again"), Cancel(b"cancel..", "m2"), Fire(b"fire....", "m3")])
        claims = await file.claim()
        await file.work.settle([done(claim) for claim in claims[:50]])
        file.clock.move(20_000)
        await file.tidy()
        assert any("INSERT INTO leases" in statement for statement in statements)
        with closing(sqlite3.connect(file.path)) as connection:
            for statement in statements:
                if statement.startswith(("SELECT", "INSERT", "UPDATE", "DELETE")):
                    steps = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}")]
                    assert not [step for step in steps if SCAN.match(step)], statement
