"""The SQLite file: URLs that name one, files that are refused, and the files left after closing."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from importlib.resources import files
from pathlib import Path

import pytest

from aiodelay.backends.sqlite.connection import APPLICATION_ID, LATER_COLUMNS, SCHEMA_VERSION, Database
from aiodelay.core.table_scan import Scan
from aiodelay.core.values import FIELDS, After, Again, Cancel, Demand, Envelope, Put, Stored
from aiodelay.errors import (
    ClosedError,
    ConfigurationError,
    StoreMismatchError,
    StoreUnavailableError,
    UnsupportedByStoreError,
    WrongLoopError,
)
from aiodelay.sqlite import SqliteStore, open_store


def put(message_id: str = "m", op: bytes = b"12345678", payload: bytes = b"payload") -> Put:
    return Put(op, Envelope(message_id, "lane", payload=payload), After(0))


# --- names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///delay.db", "{cwd}/delay.db"),
        ("sqlite:///data/delay.db", "{cwd}/data/delay.db"),
        ("sqlite:////var/lib/delay.db", "/var/lib/delay.db"),
        ("sqlite:////tmp/with%20space%3F%23.db?journal=7", "/tmp/with space?#.db"),
    ],
)
def test_a_url_names_a_relative_or_an_absolute_file(url: str, path: str) -> None:
    store = open_store(url, namespace="default", clock=None)
    assert os.fspath(store.path) == path.format(cwd=Path.cwd())
    assert store.name == url


@pytest.mark.parametrize(
    "url",
    ["sqlite:", "sqlite://", "sqlite:///", "sqlite:////", "sqlite://delay.db", "sqlite:///a#b", "sqlite:///:memory:"],
)
def test_other_urls_are_refused_with_the_allowed_forms(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"sqlite:///relative/file\.db, sqlite:////absolute/file\.db"):
        open_store(url, namespace="default", clock=None)


@pytest.mark.parametrize("option", ["journal=-1", "journal=many", "wal=off"])
def test_unknown_options_are_refused(option: str) -> None:
    with pytest.raises(ConfigurationError, match=option.split("=", maxsplit=1)[0]):
        open_store(f"sqlite:///delay.db?{option}", namespace="default", clock=None)


@pytest.mark.asyncio
async def test_a_name_with_special_characters_is_a_file_of_that_name(tmp_path: Path) -> None:
    path = tmp_path / "a b%20?c#d.db"
    async with SqliteStore(path) as store:
        await store.apply([put()])
        assert await store.get("m") is not None
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.asyncio
async def test_a_new_file_is_for_its_owner_alone_and_an_old_one_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "delay.db"
    for mode in (0o600, 0o664):
        async with SqliteStore(path) as store:
            await store.apply([put()])
            modes = {name: os.stat(tmp_path / name).st_mode & 0o777 for name in os.listdir(tmp_path)}
            assert modes == dict.fromkeys(("delay.db", "delay.db-shm", "delay.db-wal"), mode)
        os.chmod(path, 0o664)


@pytest.mark.asyncio
async def test_a_file_of_an_older_version_gets_the_triggers_of_this_one_and_no_other_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "delay.db"
    async with SqliteStore(path):
        pass
    with closing(sqlite3.connect(path)) as connection:
        made = connection.execute("SELECT name, sql FROM sqlite_master").fetchall()
        connection.executescript(
            "DROP TRIGGER schedule_delete; DROP VIEW retries;"
            "CREATE TRIGGER schedule_delete INSTEAD OF DELETE ON schedule BEGIN SELECT 1; END;"
        )
    for _ in range(2):
        async with SqliteStore(path):
            pass
        with closing(sqlite3.connect(path)) as connection:
            assert set(connection.execute("SELECT name, sql FROM sqlite_master")) == set(made)
            changes = connection.execute("PRAGMA schema_version").fetchone()
    async with SqliteStore(path):
        pass
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA schema_version").fetchone() == changes


@pytest.mark.parametrize("is_by_sql", [False, True])
@pytest.mark.asyncio
async def test_s5_a_file_of_an_older_version_learns_to_tell_of_a_replaced_message_in_flight(
    tmp_path: Path, *, is_by_sql: bool
) -> None:
    path = tmp_path / "delay.db"
    async with SqliteStore(path):
        pass
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "DROP TRIGGER schedule_insert; DROP TABLE superseded; DROP TABLE clock_steps; DROP TABLE trials"
        )
    async with SqliteStore(path) as store, store.work("worker", ["lane"]) as work:
        await store.apply([put()])
        assert (await work.claim({"lane": Demand(1)}, request="1", lease_ms=15_000)).claims
        if is_by_sql:
            with closing(sqlite3.connect(path)) as connection, connection:
                row = "INSERT INTO schedule (id, lane, due_ms, payload) VALUES ('m', 'lane', 9000000000000, 'new')"
                connection.execute(row)
        else:
            await store.apply([put(op=b"87654321")])
        (outcome,) = await store.apply([Cancel(b"abcdefgh", "m")])
        assert isinstance(outcome, Stored)
        assert outcome.answer == "in_flight"


@pytest.mark.asyncio
async def test_a_file_of_an_older_version_gets_the_index_of_recurring_messages(tmp_path: Path) -> None:
    path = tmp_path / "delay.db"
    async with SqliteStore(path) as store:
        series = Envelope("m", "lane", payload=b"payload", rule={"e": 60_000})
        await store.apply([Put(b"12345678", series, After(0))])
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("DROP INDEX messages_series")
    async with SqliteStore(path) as store:
        assert [each.record.id for each in await store.series()] == ["m"]


@pytest.mark.asyncio
async def test_a_file_of_an_older_version_gets_the_columns_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "delay.db"
    async with SqliteStore(path) as store:
        await store.apply([put()])
    with closing(sqlite3.connect(path)) as connection:
        drops = [f"ALTER TABLE messages DROP COLUMN {name}" for name in LATER_COLUMNS]
        drops.append("ALTER TABLE leases DROP COLUMN holder")
        users = ["DROP TRIGGER schedule_insert", "DROP TRIGGER schedule_delete", "DROP INDEX messages_appended"]
        connection.executescript(";".join([*users, *drops]))
    scan = Scan(table="messages", columns=("id", "last_error"))
    store = SqliteStore(path)
    rows = [row for part in store.scan_parts(scan) for batch in store.scan_part(scan, part) for row in batch["id"]]
    assert rows == ["m"], "a reader leaves the file as it is"
    async with SqliteStore(path) as store, store.work("worker", ["lane"]) as work:
        for attempt, error in enumerate(["first", "second"], start=1):
            (claim,) = (await work.claim({"lane": Demand(1)}, request=error, lease_ms=15_000)).claims
            key = claim.record.id, claim.record.revision, claim.token
            await work.settle([Again(*key, claim.record.due_ms, attempt, error)])
        snapshot = await store.get("m")
        assert snapshot is not None
        assert snapshot.record.earlier_errors == ("first",)
        with closing(sqlite3.connect(path)) as connection, connection:
            row = "INSERT INTO schedule (id, lane, due_ms, payload) VALUES ('m', 'lane', 9000000000000, 'new')"
            connection.execute(row)
        snapshot = await store.get("m")
        assert snapshot is not None
        assert (snapshot.record.envelope.payload, snapshot.record.earlier_errors) == (b"new", ())


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "absent" / "delay.db")
    with pytest.raises(StoreUnavailableError, match=r"there is no directory .*absent"):
        await store.__aenter__()
    (tmp_path / "absent").mkdir()
    async with store:
        assert isinstance((await store.apply([put()]))[0], Stored)


def another_programs(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE accounts (n INTEGER)")


def with_a_newer_schema(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")


def no_database(path: Path) -> None:
    path.write_text("Dear diary, " * 1000)


@pytest.mark.parametrize("make", [another_programs, with_a_newer_schema, no_database])
@pytest.mark.asyncio
async def test_a_file_that_is_not_ours_is_refused_and_not_touched(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "delay.db"
    make(path)
    before = path.read_bytes()
    with pytest.raises(StoreMismatchError, match=r"delay\.db"):
        await SqliteStore(path).__aenter__()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["delay.db"]


@pytest.mark.asyncio
async def test_a_damaged_page_is_found_at_the_latest_by_whoever_needs_it(tmp_path: Path) -> None:
    path = tmp_path / "delay.db"
    async with SqliteStore(path) as store:
        await store.apply([put(f"m{i}", i.to_bytes(8, "big"), bytes(2_000)) for i in range(1, 500)])
    with path.open("r+b") as file:
        size = path.stat().st_size
        for page in range(size // 2 // 4096, size // 4096):
            file.seek(page * 4096)
            file.write(b"\xff" * 4096)
    try:
        async with SqliteStore(path) as store:
            with pytest.raises(StoreUnavailableError, match="damaged"):
                await asyncio.gather(*[store.get(f"m{i}") for i in range(1, 500)])
    except StoreMismatchError as error:
        assert "delay.db" in str(error)  # noqa: PT017 - one of the two, by where the pages of this build lie


@pytest.mark.asyncio
async def test_a_file_that_cannot_be_written_at_the_opening_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the simulation."""

    def fail(database: Database) -> None:
        database.connection.execute("PRAGMA max_page_count = 1")
        database.connection.execute("CREATE TABLE more (column)")

    monkeypatch.setattr(Database, "commit", fail)
    store = SqliteStore(tmp_path / "delay.db")
    with pytest.raises(StoreUnavailableError, match="no space is left on the disk"):
        await store.__aenter__()
    monkeypatch.undo()
    async with store:
        assert isinstance((await store.apply([put()]))[0], Stored)


@pytest.mark.asyncio
async def test_a_sqlite_library_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    with pytest.raises(ConfigurationError, match=r"3\.35\.0 or newer"):
        await SqliteStore(tmp_path / "delay.db").__aenter__()


@pytest.mark.asyncio
async def test_opening_that_is_cancelled_leaves_nothing_open(tmp_path: Path) -> None:
    opening = asyncio.ensure_future(SqliteStore(tmp_path / "delay.db").__aenter__())
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    for thread in [each for each in threading.enumerate() if "sqlite" in each.name]:
        await asyncio.to_thread(thread.join, 30)
    assert set(os.listdir(tmp_path)) <= {"delay.db"}  # closed: no WAL is left


# --- what it holds ----------------------------------------------------------------------------------------


def test_the_columns_are_those_of_the_record(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "delay.db")) as connection:
        connection.executescript(files("aiodelay.backends.sqlite").joinpath("schema.sql").read_text())
        columns = {row[1] for row in connection.execute("PRAGMA table_info (messages)")}
    fields = {field.column.name for field in FIELDS if field.column is not None}
    assert fields <= columns
    assert columns - fields == {"n", "ns", "id", "place_ms"}


@pytest.mark.asyncio
async def test_namespaces_share_a_file_and_nothing_else(tmp_path: Path) -> None:
    ours, theirs = (SqliteStore(tmp_path / "delay.db", namespace=name) for name in ("ours", "theirs"))
    async with ours, theirs, ours.work("w", ["lane"]) as our_work, theirs.work("w", ["lane"]) as their_work:
        await ours.apply([put(payload=b"ours")])
        assert await theirs.get("m") is None
        await theirs.apply([put(payload=b"theirs")])
        for work, payload in ((our_work, b"ours"), (their_work, b"theirs")):
            claimed = await work.claim({"lane": Demand(9)}, request="1", lease_ms=1000)
            assert [claim.record.envelope.payload for claim in claimed.claims] == [payload]
        assert list(await ours.counts()) == ["lane"]
        assert await ours.resume("lane") is False
        await theirs.pause("lane")
        assert list(await ours.paused()) == []


# --- opening and closing ----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_closed_store_says_so_and_may_be_opened_again(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "delay.db")
    for call in (store.apply([put()]), store.get("m"), store.pause("lane")):
        with pytest.raises(ClosedError):
            await call
    async with store:
        await store.apply([put()])
        with pytest.raises(ConfigurationError, match="open already"):
            await store.__aenter__()
    await store.__aexit__()  # again: nothing happens
    with pytest.raises(ClosedError):
        await store.get("m")
    async with store:
        assert await store.get("m") is not None


def test_another_loop_is_refused(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "delay.db")
    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(store.__aenter__())
        with pytest.raises(WrongLoopError, match="event loop"):
            second.run(store.get("m"))
        with pytest.raises(WrongLoopError, match="event loop"):
            second.run(store.__aexit__())
        first.run(store.__aexit__())


@pytest.mark.asyncio
async def test_another_process_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with SqliteStore(tmp_path / "delay.db") as store:
        with monkeypatch.context() as patched:
            patched.setattr("os.getpid", lambda: -1)
            with pytest.raises(WrongLoopError, match="forked"):
                await store.apply([put()])
        assert isinstance((await store.apply([put()]))[0], Stored)


@pytest.mark.asyncio
async def test_closing_leaves_no_thread_no_descriptor_and_no_wal(tmp_path: Path) -> None:
    def open_files() -> set[str]:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return {os.readlink(link) for link in links if link.is_symlink()}

    for _ in range(3):
        async with SqliteStore(tmp_path / "delay.db") as store, store.work("w", ["lane"]):
            await store.apply([put()])
            await store.counts()
            assert {each.name.split("_")[0] for each in threading.enumerate() if "sqlite" in each.name} == {
                "aiodelay-sqlite-writer",
                "aiodelay-sqlite-reader",
                "aiodelay-sqlite-watcher",
            }
        assert not [each.name for each in threading.enumerate() if "sqlite" in each.name]
        assert not [name for name in open_files() if str(tmp_path) in name]
        assert os.listdir(tmp_path) == ["delay.db"]


@pytest.mark.asyncio
async def test_without_a_journal_asking_for_it_says_how_to_get_one(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "delay.db") as store:
        with pytest.raises(UnsupportedByStoreError, match="journal=1000"):
            await store.journal()


@pytest.mark.asyncio
async def test_the_journal_keeps_as_many_entries_as_asked_for(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "delay.db", journal=3) as store:
        await store.apply([put(f"m{i}", i.to_bytes(8, "big")) for i in range(5)])
        assert [(entry.number, entry.id) for entry in await store.journal()] == [(3, "m2"), (4, "m3"), (5, "m4")]
    async with SqliteStore(tmp_path / "delay.db", journal=3) as store:
        await store.apply([put("next", b"next....")])
        assert [entry.number for entry in await store.journal()] == [4, 5, 6]
