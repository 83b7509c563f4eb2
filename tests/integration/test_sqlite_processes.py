"""Several processes on one file: which process gets a message, and how fast they notice each other."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from aiodelay.core.ids import new_id
from aiodelay.core.values import After, Demand, Done, Envelope, Put
from aiodelay.ports import Work
from aiodelay.sqlite import SqliteStore

pytestmark = pytest.mark.asyncio

PRODUCE = """
import asyncio, sys
from aiodelay.core.values import After, Envelope, Put
from aiodelay.sqlite import SqliteStore

async def main():
    async with SqliteStore(sys.argv[1]) as store:
        number = 0
        while True:
            numbers = range(number, number + 7)
            await store.apply([Put(n.to_bytes(8, "big"), Envelope(f"m{n}", "lane"), After(0)) for n in numbers])
            for n in numbers:
                print(f"m{n}", flush=True)
            number += 7

asyncio.run(main())
"""
CONSUME = """
import asyncio, sys
from aiodelay.core.values import Demand, Done
from aiodelay.sqlite import SqliteStore

async def main():
    async with SqliteStore(sys.argv[1]) as store, store.work("child", ["lane"]) as work:
        for request in range(1_000_000):
            claimed = await work.claim({"lane": Demand(7)}, request=str(request), lease_ms=15_000)
            done = [Done(claim.record.id, claim.record.revision, claim.token) for claim in claimed.claims]
            await work.settle(done)
            for settlement in done:
                print(settlement.id, flush=True)

asyncio.run(main())
"""


def put(number: int, message_id: str = "", delay_ms: int = 0) -> Put:
    return Put(number.to_bytes(8, "big"), Envelope(message_id or f"m{number}", "lane"), After(delay_ms))


def killed_after(program: str, path: Path, lines: int) -> list[str]:
    """Run a program, kill it when it has said so many lines, and return all that it said."""
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline().strip() for _ in range(lines)]
        process.kill()
        return said + [line.strip() for line in process.stdout if line.endswith("\n")]


@pytest.mark.parametrize("lines", [1, 50, 333])
async def test_s2_what_was_acknowledged_survives_kill_9(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "delay.db"
    stored = await asyncio.to_thread(killed_after, PRODUCE, path, lines)
    assert len(stored) >= lines
    async with SqliteStore(path) as store:
        for message_id in stored:
            assert await store.get(message_id) is not None
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        (messages,), (queued,) = (
            connection.execute(f"SELECT count(*) FROM {t}").fetchone() for t in ("messages", "queue")
        )
        assert messages == queued >= len(stored)


@pytest.mark.parametrize("lines", [1, 100])
async def test_s6_what_was_settled_stays_so_after_kill_9(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "delay.db"
    async with SqliteStore(path) as store:
        await store.apply([put(i) for i in range(1, 2_001)])
    settled = await asyncio.to_thread(killed_after, CONSUME, path, lines)
    async with SqliteStore(path) as store:
        for message_id in settled:
            assert await store.get(message_id) is None
        (counts,) = (await store.counts()).values()
        assert counts.in_flight <= 7
        assert counts.overdue + counts.in_flight <= 2_000 - len(settled)


async def test_s7_two_stores_on_one_file_never_claim_the_same_message(tmp_path: Path) -> None:
    path = tmp_path / "delay.db"
    async with (
        SqliteStore(path) as one,
        SqliteStore(path) as two,
        one.work("one", ["lane"]) as work_one,
        two.work("two", ["lane"]) as work_two,
    ):

        async def drain(work: Work) -> list[str]:
            taken: list[str] = []
            while claims := (await work.claim({"lane": Demand(10)}, request=new_id(), lease_ms=15_000)).claims:
                await work.settle([Done(claim.record.id, claim.record.revision, claim.token) for claim in claims])
                taken += [claim.record.id for claim in claims]
            return taken

        shares = [0]
        while len(shares) <= 5 and shares[-1] < 200:  # in a round, the thread of a store may stand still
            numbers = range(len(shares) * 1_000, len(shares) * 1_000 + 1_000)
            await one.apply([put(number) for number in numbers])
            taken = await asyncio.gather(drain(work_one), drain(work_two))
            assert sorted(taken[0] + taken[1]) == [f"m{number}" for number in numbers]
            shares.append(min(map(len, taken)))
    assert shares[-1] >= 200, "the lock changes hands"


async def test_l2_what_another_connection_writes_ends_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SqliteStore, "traits", replace(SqliteStore.traits, safety_poll_ms=3_600_000))
    path = tmp_path / "delay.db"
    async with SqliteStore(path) as one, SqliteStore(path) as two, two.work("two", ["lane"]) as work:
        await one.apply([put(1, delay_ms=3_600_000)])
        for number in (2, 3):
            await settled_down(work)
            async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
                tasks.create_task(work.wait(until_ms=None))
                await one.apply([put(number)])


async def test_what_this_store_writes_itself_is_no_news_from_others(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "delay.db") as store, store.work("w", ["lane"]) as work:
        await store.apply([put(1)])
        await settled_down(work)
        await store.pause("other")  # wakes nobody: it gives no lane anything
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await work.wait(until_ms=None)


async def settled_down(work: Work) -> None:
    """Return when nothing has ended a wait for a while: the watcher has seen all that was written so far."""
    while True:
        work.clear()
        try:
            async with asyncio.timeout(0.2):
                await work.wait(until_ms=None)
        except TimeoutError:
            return
