"""The SQLite writer: callers when a transaction fails, and a transaction when its callers are cancelled."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import pytest

from aiodelay.backends.sqlite import SqliteStore, connection
from aiodelay.backends.sqlite.connection import Database
from aiodelay.core.values import After, Claimed, Demand, Done, Envelope, Outcome, Put, Refused, Stored, Unknown
from aiodelay.errors import ClosedError, StoreUnavailableError
from aiodelay.ports import Work
from aiodelay.ports.clock import SystemClock

pytestmark = pytest.mark.asyncio


class Gate:
    """Keeps the writer's thread waiting, inside a transaction, while it is closed."""

    def __init__(self) -> None:
        self._open, self._reached = threading.Event(), threading.Event()
        self._open.set()

    def close(self) -> None:
        self._open.clear()
        self._reached.clear()

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self._reached.set()
        assert self._open.wait(30)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, 30)


class GatedClock(SystemClock):
    """The machine's clock, behind a gate when it is read in the writer's thread."""

    __slots__ = ("gate",)

    def __init__(self) -> None:
        self.gate = Gate()

    def now_ms(self) -> int:
        if "writer" in threading.current_thread().name:
            self.gate.pass_through()
        return super().now_ms()


def put(number: int) -> Put:
    return Put(number.to_bytes(8, "big"), Envelope(f"m{number}", "lane"), After(0))


async def claim(work: Work, request: str = "1") -> Claimed:
    return await work.claim({"lane": Demand(9)}, request=request, lease_ms=15_000)


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[tuple[SqliteStore, Work, Gate]]:
    clock = GatedClock()
    async with SqliteStore(path / "delay.db", clock=clock) as store, store.work("w", ["lane"]) as work:
        yield store, work, clock.gate


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path / "delay.db")) as connection_:
        return connection_.execute(query).fetchall()


# --- batches ----------------------------------------------------------------------------------------------


async def test_calls_that_gather_share_a_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits: list[Database] = []
    commit = Database.commit

    def counted(self: Database) -> None:
        commits.append(self)
        commit(self)

    monkeypatch.setattr(Database, "commit", counted)
    async with opened(tmp_path) as (store, work, gate):
        commits.clear()
        gate.close()
        first = asyncio.ensure_future(store.apply([put(0)]))
        await gate.reached()
        others = [asyncio.ensure_future(store.apply([put(i)])) for i in range(1, 50)]
        claimed = asyncio.ensure_future(claim(work))
        await asyncio.sleep(0)
        gate.open()
        outcomes = await asyncio.gather(first, *others)
        assert all(isinstance(outcome, Stored) for (outcome,) in outcomes)
        assert len((await claimed).claims) == 9
        assert len(commits) == 2


async def test_a_call_that_fails_harms_none_of_its_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as (store, _, gate):
        gate.close()
        first = asyncio.ensure_future(store.apply([put(0)]))
        await gate.reached()
        before = asyncio.ensure_future(store.apply([put(1)]))
        bad = asyncio.ensure_future(store._handle.write(lambda tables: tables.execute("SELECT * FROM nowhere")))
        worse = asyncio.ensure_future(store._handle.write(lambda tables: 1 // 0))
        after = asyncio.ensure_future(store.apply([put(2)]))
        await asyncio.sleep(0)
        gate.open()
        for call in (first, before, after):
            assert isinstance((await call)[0], Stored)
        with pytest.raises(StoreUnavailableError, match="no such table") as caught:
            await bad
        assert isinstance(caught.value.__cause__, sqlite3.Error)
        with pytest.raises(ZeroDivisionError):
            await worse
        assert rows(tmp_path, "SELECT count(*) FROM queue") == [(3,)]


# --- callers that leave -----------------------------------------------------------------------------------


async def test_a_call_cancelled_before_it_started_is_withdrawn(tmp_path: Path) -> None:
    async with opened(tmp_path) as (store, _, gate):
        gate.close()
        running = asyncio.ensure_future(store.apply([put(1)]))
        await gate.reached()
        waiting = asyncio.ensure_future(store.apply([put(2)]))
        await asyncio.sleep(0)
        waiting.cancel()
        gate.open()
        await running
        assert [await store.get(f"m{i}") is not None for i in (1, 2)] == [True, False]


async def test_a_call_cancelled_while_it_runs_is_carried_out(tmp_path: Path) -> None:
    async with opened(tmp_path) as (store, _, gate):
        gate.close()
        running = asyncio.ensure_future(store.apply([put(1)]))
        await gate.reached()
        running.cancel()
        gate.open()
        assert isinstance((await store.apply([put(1)]))[0], Stored)
        assert rows(tmp_path, "SELECT count(*) FROM messages") == [(1,)]


async def test_a_claim_cancelled_while_it_runs_is_found_by_repeating_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as (store, work, gate):
        await store.apply([put(1)])
        gate.close()
        running = asyncio.ensure_future(claim(work, "lost"))
        await gate.reached()
        running.cancel()
        await asyncio.sleep(0)
        repeated = asyncio.ensure_future(claim(work, "lost"))
        await asyncio.sleep(0)
        gate.open()
        assert [each.record.id for each in (await repeated).claims] == ["m1"]
        assert (await claim(work, "next")).claims == []
        assert len((await claim(work, "next")).claims) == 0


async def test_closing_waits_for_what_runs_and_what_waits(tmp_path: Path) -> None:
    clock = GatedClock()
    store = await SqliteStore(tmp_path / "delay.db", clock=clock).__aenter__()
    clock.gate.close()
    calls = [asyncio.ensure_future(store.apply([put(i)])) for i in range(3)]
    await clock.gate.reached()
    closing_ = asyncio.ensure_future(store.__aexit__())
    await asyncio.sleep(0)
    with pytest.raises(ClosedError):
        await store.apply([put(9)])
    assert not closing_.done()
    clock.gate.open()
    await closing_
    assert all(isinstance(outcome, Stored) for (outcome,) in await asyncio.gather(*calls))
    assert rows(tmp_path, "SELECT count(*) FROM queue") == [(3,)]


async def test_closing_that_is_cancelled_leaves_the_thread_to_end_by_itself(tmp_path: Path) -> None:
    clock = GatedClock()
    store = await SqliteStore(tmp_path / "delay.db", clock=clock).__aenter__()
    clock.gate.close()
    call = asyncio.ensure_future(store.apply([put(1)]))
    await clock.gate.reached()
    waiting = asyncio.ensure_future(store.apply([put(2)]))
    closing_ = asyncio.ensure_future(store.__aexit__())
    await asyncio.sleep(0)
    closing_.cancel()
    await asyncio.wait([closing_])
    (thread,) = [each for each in threading.enumerate() if "sqlite-writer" in each.name]
    clock.gate.open()
    await asyncio.to_thread(thread.join, 30)
    assert not thread.is_alive()
    assert isinstance((await call)[0], Stored)
    with pytest.raises(ClosedError):
        await waiting


# --- failing commits --------------------------------------------------------------------------------------


def failing(code: int, name: str) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("broken on purpose")
    error.sqlite_errorcode, error.sqlite_errorname = code, name
    return error


@contextmanager
def commits_fail(error: sqlite3.OperationalError, *, after: bool) -> Iterator[None]:
    """Let every commit raise, after it was done or instead of it."""
    commit: Callable[[Database], None] = Database.commit

    def fail(self: Database) -> None:
        if after:
            commit(self)
        raise error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Database, "commit", fail)
        yield


IN_DOUBT = failing(sqlite3.SQLITE_IOERR_FSYNC, "SQLITE_IOERR_FSYNC")
FULL = failing(sqlite3.SQLITE_FULL, "SQLITE_FULL")


@pytest.mark.parametrize("committed", [True, False])
async def test_a_commit_in_doubt_is_unknown_and_safe_to_repeat(tmp_path: Path, committed: bool) -> None:
    async with opened(tmp_path) as (store, _, _gate):
        with commits_fail(IN_DOUBT, after=committed):
            (outcome,) = await store.apply([put(1)])
        assert outcome == Unknown("disk I/O error (SQLITE_IOERR_FSYNC)")
        assert (await store.get("m1") is not None) is committed
        (again,) = await store.apply([put(1)])
        assert isinstance(again, Stored)
        assert again.answer == "stored"
        assert rows(tmp_path, "SELECT count(*) FROM queue") == [(1,)]


@pytest.mark.parametrize("committed", [True, False])
async def test_a_claim_in_doubt_is_found_by_repeating_it(tmp_path: Path, committed: bool) -> None:
    async with opened(tmp_path) as (store, work, _):
        await store.apply([put(1)])
        with commits_fail(IN_DOUBT, after=committed), pytest.raises(StoreUnavailableError, match="disk I/O error"):
            await claim(work, "a")
        claimed = await claim(work, "a")
        assert [each.record.id for each in claimed.claims] == ["m1"]
        assert [each.record.id for each in (await claim(work, "a")).claims] == ["m1"]
        record, token = claimed.claims[0].record, claimed.claims[0].token
        with commits_fail(IN_DOUBT, after=committed), pytest.raises(StoreUnavailableError):
            await work.settle([Done(record.id, record.revision, token)])
        (outcome,) = await work.settle([Done(record.id, record.revision, token)])
        assert outcome.value == ("gone" if committed else "settled")


async def test_a_commit_for_which_there_is_no_room_is_refused_as_full(tmp_path: Path) -> None:
    async with opened(tmp_path) as (store, work, _):
        with commits_fail(FULL, after=False):
            (outcome,) = await store.apply([put(1)])
            with pytest.raises(StoreUnavailableError, match="no space is left"):
                await claim(work)
        assert outcome == Refused("full", "no space is left on the disk")
        assert await store.get("m1") is None
        assert isinstance((await store.apply([put(1)]))[0], Stored)


async def test_a_lock_held_by_another_process_is_unavailable_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BUSY_S", 0.05)
    async with opened(tmp_path) as (store, work, _):
        with closing(sqlite3.connect(tmp_path / "delay.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            outcomes: list[Outcome] = list(await store.apply([put(1), put(2)]))
            with pytest.raises(StoreUnavailableError, match="locked"):
                await claim(work)
            other.execute("ROLLBACK")
        assert [outcome.reason for outcome in outcomes if isinstance(outcome, Refused)] == ["unavailable"] * 2
        assert isinstance((await store.apply([put(1)]))[0], Stored)


async def test_a_store_whose_file_was_removed_makes_no_new_one_to_read_from(tmp_path: Path) -> None:
    async with opened(tmp_path) as (store, _, _gate):
        await store.apply([put(1)])
        for name in ("delay.db", "delay.db-wal", "delay.db-shm"):
            os.unlink(tmp_path / name)
        with pytest.raises(StoreUnavailableError, match="cannot be opened"):
            await store.get("m1")
        assert os.listdir(tmp_path) == ["delay.db-workers"]


async def test_the_clock_is_read_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time read before could be so old that the live leases of others look too long."""
    order: list[str] = []
    begin = Database.begin

    def locking(self: Database, *, is_durable: bool) -> None:
        order.append("lock")
        begin(self, is_durable=is_durable)

    class NotingClock(SystemClock):
        __slots__ = ()

        def now_ms(self) -> int:
            order.append("time")
            return super().now_ms()

    async with SqliteStore(tmp_path / "delay.db", clock=NotingClock()) as store:
        monkeypatch.setattr(Database, "begin", locking)
        order.clear()
        await store.apply([put(1)])
    assert order == ["lock", "time"]
