"""The SQL in the docs works as described, on a file that a scheduler has open."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from contextlib import closing
from datetime import timedelta
from importlib.resources import files
from pathlib import Path

import pytest
from msgspec import structs

from aiodelay.core.durations import from_epoch_ms
from aiodelay.core.values import (
    Again,
    At,
    Cancel,
    Conflict,
    Demand,
    Done,
    Envelope,
    Fire,
    Outcome,
    Put,
    Query,
    Refused,
    Renewal,
    RenewOutcome,
    SettleOutcome,
    Stored,
)
from aiodelay.sqlite import SqliteStore
from aiodelay.testing.clock import VirtualClock
from tests.support.waiting import PATIENCE_S

PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8").partition("\n## SQLite\n")[2]
(SQL,) = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
STATEMENTS = [statement for statement in SQL.split(";\n") if statement.strip()]
DELETE = STATEMENTS[-1]


def execute(path: Path, *statements: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return [row for statement in statements for row in connection.execute(statement)]


def put(values: str, columns: str = "id, lane, due_ms, payload") -> str:
    return f"INSERT INTO schedule ({columns}) VALUES ({values})"


def test_the_tables_of_the_page_are_those_of_the_schema() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(files("aiodelay.backends.sqlite").joinpath("schema.sql").read_text())
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        columns = {row[1] for row in connection.execute("PRAGMA table_info (schedule)")}
    columns_part, tables_part = PAGE.split("\n### Tables\n")
    named = re.findall(r"^\| (`.*?`) \|", columns_part, re.MULTILINE)
    assert {name for cell in named for name in re.findall(r"`(\w+)`", cell)} == columns
    named = re.findall(r"^\| (`.*?`) \|", tables_part, re.MULTILINE)
    assert {name for cell in named for name in re.findall(r"`(\w+)`", cell)} == tables


@pytest.mark.asyncio
async def test_what_the_page_schedules_is_claimed_and_what_it_cancels_is_not(tmp_path: Path) -> None:
    path = tmp_path / "delay.db"
    shop = SqliteStore(path, namespace="shop")
    async with SqliteStore(path) as store, shop, shop.work("w", ["stdout"]) as work:
        listed = execute(path, *STATEMENTS[:-1])
        assert [row[0::3] for row in listed if len(row) == 4] == [("invoice-7", "pending")]
        stored = await store.get("invoice-7")
        assert stored is not None
        assert (stored.record.envelope.lane, stored.record.envelope.encoding) == ("payment.check", "json")
        assert stored.record.envelope.payload == b'{"id": 7}'
        ahead_ms = stored.record.due_ms - stored.record.revision
        assert 3_598_000 < ahead_ms <= 3_600_000
        (video,) = (await work.claim({"stdout": Demand(9)}, request="1", lease_ms=15_000)).claims
        assert (video.record.id, video.record.envelope.address) == ("vid1-online", "online-videos")
        assert video.record.envelope.payload == b"\x00\x01\xff"
        assert await work.settle([Done(video.record.id, video.record.revision, video.token)]) == [SettleOutcome.SETTLED]
        execute(path, DELETE)
        assert await store.get("invoice-7") is None


@pytest.mark.asyncio
async def test_a_waiting_scheduler_is_woken_by_plain_sql(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SqliteStore, "traits", structs.replace(SqliteStore.traits, safety_poll_ms=3_600_000))
    path = tmp_path / "delay.db"
    async with SqliteStore(path) as store, store.work("w", ["lane"]) as work:
        work.clear()
        execute(path, put("'m', 'lane', 0, 'payload'"))
        async with asyncio.timeout(PATIENCE_S):
            await work.wait(until_ms=None)
        assert [each.record.id for each in (await work.claim({"lane": Demand(1)}, request="1", lease_ms=1)).claims] == [
            "m"
        ]


@pytest.mark.asyncio
async def test_an_insert_replaces_and_fences_a_delete_cancels_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "delay.db"
    async with SqliteStore(path) as store, store.work("w", ["lane"]) as work:
        execute(path, put("'m', 'lane', 0, 'one'"))
        (first,) = (await work.claim({"lane": Demand(1)}, request="1", lease_ms=15_000)).claims
        execute(path, put("'m', 'lane', 0, 'two'"))
        done = Done("m", first.record.revision, first.token)
        assert await work.settle([done]) == [SettleOutcome.SUPERSEDED]
        (second,) = (await work.claim({"lane": Demand(1)}, request="2", lease_ms=15_000)).claims
        assert second.record.envelope.payload == b"two"
        assert second.record.revision > first.record.revision
        execute(path, "DELETE FROM schedule WHERE id = 'm'")
        snapshot = await store.get("m")
        assert snapshot is not None
        assert snapshot.record.no_retry
        assert execute(path, "SELECT state FROM schedule") == [("in_flight",)]
        execute(
            path, put("'m', 'lane', 0, 'three'"), "DELETE FROM schedule WHERE id = 'm'", put("'m', 'lane', 0, 'four'")
        )
        (last,) = (await work.claim({"lane": Demand(9)}, request="3", lease_ms=15_000)).claims
        assert last.record.envelope.payload == b"four"
        for table, count in (("messages", 1), ("leases", 1), ("queue", 0), ("ended", 0)):
            assert execute(path, f"SELECT count(*) FROM {table}") == [(count,)]


@pytest.mark.parametrize("how", ["replaced", "cancelled"])
@pytest.mark.asyncio
async def test_s5_plain_sql_ends_the_retries_of_a_series_as_a_command_does(tmp_path: Path, how: str) -> None:
    path = tmp_path / "delay.db"
    async with SqliteStore(path) as store, store.work("w", ["lane"]) as work:
        series = Envelope("s", "lane", payload=b"old", rule={"e": 1_000})
        await store.apply([Put(b"12345678", series, At(0)), Put(b"12345679", Envelope("s~1-2", "lane"), At(1 << 47))])
        for due_ms, lives_on in ((0, 0), (1_000, 0), (2_000, 1 << 47)):
            (claim,) = (await work.claim({"lane": Demand(1)}, request=f"{due_ms}", lease_ms=15_000)).claims
            key = claim.record.id, claim.record.revision, claim.token
            await work.settle([Again(*key, max(lives_on, 3_000), 1, "error", due_ms + 1_000)])
        taken = (await work.claim({"lane": Demand(9)}, request="all", lease_ms=15_000)).claims
        retries = [each for each in taken if each.record.id != "s"]
        assert [each.record.id for each in retries] == ["s~0000000000", "s~0000001000"]
        is_replaced = how == "replaced"
        replacement, cancel = put("'s', 'lane', 9000000000000, 'new'"), "DELETE FROM schedule WHERE id = 's'"
        execute(path, replacement if is_replaced else cancel)
        left = {"s", "s~1-2", *(each.record.id for each in retries if not is_replaced)}
        assert {each.record.id for each in await store.search(Query())} == left
        renewals = [Renewal(e.record.id, e.record.revision, e.token, e.token + 4096) for e in retries]
        expected = RenewOutcome.SUPERSEDED if is_replaced else RenewOutcome.CANCELLED
        assert set(await work.renew(renewals)) == {expected}
        for table in ("queue", "leases"):
            assert execute(path, f"SELECT count(*) FROM {table} WHERE n NOT IN (SELECT n FROM messages)") == [(0,)]
        (outcome,) = await store.apply([Cancel(b"abcdefgh", "s")])
        assert isinstance(outcome, Stored)
        assert outcome.answer == "in_flight"


@pytest.mark.asyncio
async def test_plain_sql_that_cancels_a_retry_takes_it_out_of_its_series(tmp_path: Path) -> None:
    path = tmp_path / "delay.db"
    async with SqliteStore(path) as store, store.work("w", ["lane"]) as work:
        series = Envelope("s", "lane", payload=b"old", rule={"e": 1_000})
        await store.apply([Put(b"12345678", series, At(0)), Put(b"12345679", Envelope("s~1-2", "lane"), At(1 << 47))])
        for due_ms in (0, 1_000):
            (claim,) = (await work.claim({"lane": Demand(1)}, request=f"{due_ms}", lease_ms=15_000)).claims
            key = claim.record.id, claim.record.revision, claim.token
            await work.settle([Again(*key, 1 << 47, 1, "error", due_ms + 1_000)])
        for left in ((1_000,), ()):
            execute(path, f"DELETE FROM schedule WHERE id = 's~{0 if left else 1_000:010}'")
            snapshot = await store.get("s")
            assert snapshot is not None
            assert snapshot.record.live == left
        assert execute(path, "SELECT id FROM messages ORDER BY id") == [("s",), ("s~1-2",)]
        assert execute(path, "SELECT n FROM ended") == []
        execute(path, put("'s', 'lane', 9000000000000, 'new'"))
        assert execute(path, "SELECT id FROM schedule ORDER BY id") == [("s",), ("s~1-2",)]


@pytest.mark.asyncio
async def test_plain_sql_forgets_no_newer_version(tmp_path: Path) -> None:
    path = tmp_path / "delay.db"
    newer = Put(b"12345678", Envelope("m", "lane", version=5), At(0), Conflict.newer(5))
    async with SqliteStore(path) as store, store.work("w", ["lane"]) as work:
        await store.apply([newer])
        (claim,) = (await work.claim({"lane": Demand(1)}, request="1", lease_ms=15_000)).claims
        await work.settle([Done("m", claim.record.revision, claim.token)])
        for version in (3, 4):  # the second one replaces the first one
            execute(path, put(f"'m', 'lane', 1, 'x', {version}", "id, lane, due_ms, payload, version"))
        execute(path, "DELETE FROM schedule WHERE id = 'm'")
        (outcome,) = await store.apply([structs.replace(newer, op=b"12345679")])
        assert isinstance(outcome, Refused)
        assert outcome.reason == "outdated"


@pytest.mark.asyncio
async def test_commands_and_plain_sql_see_each_other(tmp_path: Path) -> None:
    path, clock = tmp_path / "delay.db", VirtualClock()
    clock.step(from_epoch_ms(0) - clock.now() + timedelta(days=40_000))  # after what julianday() says
    async with SqliteStore(path, clock=clock) as store, store.work("w", ["lane"]) as work:
        execute(path, put("'a', 'lane', 9000000000000, 'x', 5", "id, lane, due_ms, payload, version"))
        outcomes: list[Outcome] = list(await store.apply([Fire(b"fire....", "a")]))
        assert [each.answer for each in outcomes if isinstance(each, Stored)] == ["fired"]
        await store.pause("lane", "there")
        execute(path, put("'b', 'lane', 'there', 1, 'x', 2, 2", "id, lane, address, due_ms, payload, late, expires_ms"))
        claims = (await work.claim({"lane": Demand(9)}, request="1", lease_ms=1_000)).claims
        assert [each.record.id for each in claims] == ["a"]
        assert execute(path, "SELECT count(*) FROM parked") == [(1,)]
        execute(path, "DELETE FROM schedule WHERE id = 'b'")
        assert execute(path, "SELECT count(*) FROM parked") == [(0,)]
        assert [type(each).__name__ for each in await store.apply([Cancel(b"cancel..", "b")])] == ["Refused"]


@pytest.mark.parametrize(
    ("columns", "values", "says"),
    [
        ("id, lane, due_ms, payload", "NULL, 'lane', 1, ''", "id must be text"),
        ("id, lane, due_ms, payload", "'', 'lane', 1, ''", "id must be text"),
        ("id, lane, due_ms, payload", "'m~1234567890', 'lane', 1, ''", "id must not end in ~ and ten or more digits"),
        ("id, lane, due_ms, payload, version", "'m', 'lane', 1, '', -1", "version must be an integer, 0 or more"),
        ("id, lane, due_ms, payload, version", "'m', 'lane', 1, '', 'x'", "version must be an integer, 0 or more"),
        ("id, lane, due_ms, payload", "'m', '', 1, ''", "lane must be text"),
        ("id, lane, due_ms, payload", "'m', 'lane', 'soon', ''", "due_ms must be an integer"),
        ("id, lane, due_ms, payload", "'m', 'lane', 1.5, ''", "due_ms must be an integer"),
        ("id, lane, payload", "'m', 'lane', ''", "due_ms must be an integer"),
        ("id, lane, due_ms", "'m', 'lane', 1", "payload must be a blob or text"),
        ("id, lane, due_ms, payload, encoding", "'m', 'lane', 1, '', 'yaml'", "encoding must be json"),
        ("id, lane, due_ms, payload, headers", "'m', 'lane', 1, '', '{'", "headers must be a JSON object"),
        ("id, lane, due_ms, payload, late", "'m', 'lane', 1, '', 3", "late must be 0, 1 or 2"),
        ("id, lane, due_ms, payload, late", "'m', 'lane', 1, '', 1", "expires_ms must be an integer"),
        ("id, lane, due_ms, payload, expires_ms", "'m', 'lane', 1, '', 'x'", "expires_ms must be an integer"),
    ],
)
@pytest.mark.asyncio
async def test_wrong_values_are_refused_by_name(tmp_path: Path, columns: str, values: str, says: str) -> None:
    path = tmp_path / "delay.db"
    async with SqliteStore(path):
        with pytest.raises(sqlite3.IntegrityError, match=says):
            execute(path, put(values, columns))
        assert execute(path, "SELECT count(*) FROM messages") == [(0,)]


@pytest.mark.asyncio
@pytest.mark.parametrize("clause", ["REPLACE", "IGNORE", "ABORT", "FAIL", "ROLLBACK"])
async def test_a_clause_of_the_statement_loses_no_message(tmp_path: Path, clause: str) -> None:
    """In a trigger, the clause of the outer statement wins over the clauses of the trigger's own statements."""
    path, due_ms = tmp_path / "delay.db", 9_000_000_000_000
    async with SqliteStore(path) as store:
        await store.apply([Put(b"12345678", Envelope("before", "lane", payload=b"p", version=3), At(due_ms))])
        insert = put("?, 'lane', ?, ?").replace("INSERT", f"INSERT OR {clause}")
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            for message_id, payload in (("new", b"1"), ("new", b"2"), ("before", b"3")):
                connection.execute(insert, (message_id, due_ms, payload))
        found = await store.search(Query(limit=10))
        assert sorted((each.record.id, each.record.envelope.payload) for each in found) == [
            ("before", b"3"),
            ("new", b"2"),
        ]
