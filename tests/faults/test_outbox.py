"""The outbox of examples/outbox.py: its relay is killed at each step, runs twice, and meets impossible rows."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from aiodelay import CancelOutcome, Scheduler
from examples.outbox import Outbox, Table, move_rows, relay, schedule
from tests.faults.programs.outbox_relay import STEPS
from tests.support.judging import url_of
from tests.support.processes import Crew
from tests.support.servers import redis_programs, redis_servers, serving, start
from tests.support.waiting import until

HOUR = timedelta(hours=1)
NOW = timedelta()
DATABASES = ["sqlite", *filter(None, [os.environ.get("AIODELAY_TEST_POSTGRES")])]


@pytest.fixture(params=["sqlite", "redis"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "redis":
        with serving(redis_servers()[0]) as url:
            yield url
    else:
        yield url_of(tmp_path / "delay.db")


@pytest_asyncio.fixture(params=DATABASES, ids=lambda url: url.partition("+")[0])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    url = f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}" if request.param == "sqlite" else request.param
    database = create_async_engine(url)
    async with database.begin() as connection:
        await connection.run_sync(Table.metadata.drop_all)
        await connection.run_sync(Table.metadata.create_all)
    yield database
    await database.dispose()


async def write(database: AsyncEngine, *rows: tuple[str, int, timedelta]) -> None:
    async with AsyncSession(database) as session, session.begin():
        for message_id, number, delay in rows:
            schedule(session, number, to="handler:work", delay=delay, message_id=message_id)


async def rows_left(database: AsyncEngine) -> list[Outbox]:
    async with AsyncSession(database) as session:
        return list(await session.scalars(select(Outbox)))


async def is_empty(database: AsyncEngine) -> bool:
    return not await rows_left(database)


def working(url: str, runs: Counter[bytes]) -> Scheduler:
    scheduler = Scheduler(url)

    @scheduler.handler(name="work")
    async def work(payload: bytes) -> None:
        runs[payload] += 1

    return scheduler


async def until_done(scheduler: Scheduler) -> None:
    """Wait until nothing is left that is due."""

    async def is_done() -> bool:
        return not [each async for each in scheduler.pending(before=datetime.now(UTC))]

    await until(is_done, "nothing is left that is due")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.asyncio
async def test_a_relay_killed_at_any_step_loses_doubles_and_resurrects_nothing(
    database: AsyncEngine, store_url: str, tmp_path: Path, step: str
) -> None:
    await write(database, ("plain", 0, NOW), ("changed", 1, HOUR), ("changed", 2, NOW), ("cancelled", 3, HOUR))
    arguments = [database.url.render_as_string(hide_password=False), store_url, step]
    with Crew(tmp_path) as crew:
        relay = crew.run(["-m", "tests.faults.programs.outbox_relay", *arguments], name="relay", forks=True)
        assert await asyncio.to_thread(relay.wait) == -9, relay.errors
    runs: Counter[bytes] = Counter()
    async with working(store_url, runs) as scheduler:
        was_scheduled = await scheduler.cancel("cancelled") is CancelOutcome.CANCELLED
        await until_done(scheduler)
        while await move_rows(database, scheduler):
            pass
        await until_done(scheduler)
        assert runs == {b"0": 1, b"2": 1}
        assert [each.record.id async for each in scheduler.pending()] == ([] if was_scheduled else ["cancelled"])
    assert was_scheduled == (step in STEPS[STEPS.index("scheduled") :])


@pytest.mark.asyncio
async def test_relays_side_by_side_schedule_each_message_once(database: AsyncEngine, store_url: str) -> None:
    runs: Counter[bytes] = Counter()
    await write(database, *((f"m-{number}", number, NOW) for number in range(150)))
    async with working(store_url, runs) as scheduler:
        stop = asyncio.Event()
        relays = [asyncio.create_task(relay(database, scheduler, stop)) for _ in range(3)]
        await until(lambda: is_empty(database), "no row is left")
        stop.set()
        await asyncio.gather(*relays)
        await until_done(scheduler)
    assert runs == {b"%d" % number: 1 for number in range(150)}


@pytest.mark.asyncio
async def test_an_id_is_scheduled_anew_once_its_message_has_ended(database: AsyncEngine, store_url: str) -> None:
    runs: Counter[bytes] = Counter()
    async with working(store_url, runs) as scheduler:
        for number in range(3):
            await write(database, ("again", number, NOW))
            assert await move_rows(database, scheduler) == 1
            await until_done(scheduler)
    assert runs == {b"0": 1, b"1": 1, b"2": 1}


@pytest.mark.asyncio
async def test_a_row_that_cannot_be_scheduled_stays_and_holds_up_nobody(database: AsyncEngine, store_url: str) -> None:
    runs: Counter[bytes] = Counter()
    async with AsyncSession(database) as session, session.begin():
        schedule(session, 0, to="nowhere:at-all", delay=NOW, message_id="refused")
        schedule(session, 1, to="handler:work", delay=NOW)
    async with working(store_url, runs) as scheduler:
        assert await move_rows(database, scheduler) == 2
        assert await move_rows(database, scheduler) == 0
        await until_done(scheduler)
    assert runs == {b"1": 1}
    (row,) = await rows_left(database)
    assert row.id == "refused"
    assert "nowhere" in (row.refused or "")


@pytest.mark.asyncio
async def test_a_relay_outlives_a_store_that_is_away(database: AsyncEngine) -> None:
    server = start(redis_programs()[0].program, "--appendonly", "yes")
    try:
        runs: Counter[bytes] = Counter()
        async with working(server.url, runs) as scheduler:
            stop = asyncio.Event()
            relaying = asyncio.create_task(relay(database, scheduler, stop))
            server.kill()
            await write(database, ("waits", 0, NOW))
            await asyncio.sleep(0.3)  # it tries meanwhile
            assert len(await rows_left(database)) == 1
            server.start()
            await until(lambda: runs, "the message has run")
            stop.set()
            await relaying
        assert runs == {b"0": 1}
    finally:
        server.stop()
