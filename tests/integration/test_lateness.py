"""Lateness for operators: read from the newest journal entries of the last 5 minutes, never guessed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from aiodelay import Context, Message, Retry, Scheduler
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Envelope, Put
from aiodelay.memory import MemoryStore
from aiodelay.operations.queries import LATENESS_WINDOW_MS, LatenessMeter
from aiodelay.testing import VirtualClock
from tests.support.api import serving_api
from tests.support.cli import Cli
from tests.support.journals import note
from tests.support.kafka import new_name
from tests.support.stores import SHARED_STORES, empty_store
from tests.support.waiting import PATIENCE_S

UNKNOWN = "not known: the newest"


def kafka_url(bootstrap: str) -> str:
    """Return the URL of a new store with a history, both of one partition."""
    options = f"create_topic=true&partitions=1&history={new_name('history')}"
    return f"kafka://{bootstrap}/{new_name('schedules')}?{options}"


async def trimmed(url: str) -> None:
    """Write entries to a journal whose oldest ones are deleted."""
    await note(url, 1, 4000 if "journal=" in url else 100)
    if url.startswith("kafka:"):  # an operator deletes them; the others keep 3,000
        bootstrap, history = url.removeprefix("kafka://").partition("/")[0], url.partition("history=")[2]
        with AdminClient({"bootstrap.servers": bootstrap}) as admin:
            place = TopicPartition(history, 0, 50)
            await asyncio.to_thread(admin.delete_records([place])[place].result, PATIENCE_S)


@pytest.fixture(params=[*SHARED_STORES, "kafka"], ids=str)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "kafka":
        yield kafka_url(request.getfixturevalue("kafka"))
        return
    with empty_store(request.param, tmp_path, "?journal=3000") as url:
        yield url


@dataclass
class Order:
    number: int = 0


async def handled(event: Order) -> None:
    """Take an order."""


async def deliver(url: str) -> None:
    """Deliver one message."""
    async with Scheduler(url) as scheduler:
        scheduler.add_handler(handled)
        await scheduler.schedule(Order(), delay="1ms")
        await scheduler.run_until_idle()


def test_a_long_journal_is_read_from_its_end(url: str) -> None:
    async def play() -> None:
        await note(url, 1, 1500)
        await deliver(url)
        async with Scheduler(url, dispatch=False) as scheduler:
            meter, whole = LatenessMeter(), LatenessMeter()
            partly = await meter.measure(scheduler, most=5)
            assert (partly.samples, partly.is_complete) == (1, False)
            found = await whole.measure(scheduler)
            assert (found.samples, found.is_complete, found.p50_ms) == (1, True, partly.p50_ms)
            await note(url, 2000, 50)
            await deliver(url)
            assert (await whole.measure(scheduler)).samples == 2, "it goes on from where it was"
            assert (await meter.measure(scheduler, most=5)).samples == 2

    asyncio.run(play())


def test_entries_that_were_trimmed_unread_are_a_gap(url: str) -> None:
    async def play() -> None:
        async with Scheduler(url, dispatch=False) as scheduler:
            meter = LatenessMeter()
            assert (await meter.measure(scheduler)).is_complete
            await trimmed(url)
            for each in (meter, LatenessMeter()):
                found = await each.measure(scheduler)
                assert (found.samples, found.is_complete) == (0, False)

    asyncio.run(play())


@pytest.mark.asyncio
async def test_attempts_before_the_last_five_minutes_do_not_count(clock: VirtualClock) -> None:
    async with Scheduler(MemoryStore(clock=clock, journal=1000), clock=clock) as scheduler:
        scheduler.add_handler(handled)
        await scheduler.schedule(Order(), delay="1s")
        await scheduler.run_until_idle()
        meter, newest = LatenessMeter(), LatenessMeter()
        assert (await meter.measure(scheduler)).samples == 1
        puts = [Put(new_op(), Envelope(f"m{i}", "work"), After(3_600_000)) for i in range(10)]
        await scheduler.store.apply(puts)
        seen = await newest.measure(scheduler, most=5)
        assert (seen.samples, seen.is_complete) == (0, False)
        await asyncio.sleep(LATENESS_WINDOW_MS / 1000 + 1)
        for each in (meter, newest):
            seen = await each.measure(scheduler)
            assert (seen.samples, seen.is_complete) == (0, True)


@pytest.mark.asyncio
async def test_second_attempts_do_not_count(clock: VirtualClock) -> None:
    async def fail_once(event: Order, context: Context) -> None:
        if context.attempt == 1:
            raise ValueError

    async with Scheduler(MemoryStore(clock=clock, journal=1000), clock=clock) as scheduler:
        scheduler.add_handler(fail_once, retry=Retry(attempts=2, first="1s"))
        await scheduler.schedule(Order(), delay="1s")
        await scheduler.run_until_idle()
        assert [each.event for each in await scheduler.journal()][-2:] == ["claimed", "delivered"]
        for most, samples in ((2, 0), (5_000, 1)):
            assert (await LatenessMeter().measure(scheduler, most=most)).samples == samples


@pytest.mark.asyncio
async def test_a_backlog_gives_the_dispatch_rate_also_if_entries_were_not_read(clock: VirtualClock) -> None:
    async def run_for_a_second(event: Order) -> None:
        await asyncio.sleep(1)

    store = MemoryStore(clock=clock, journal=1000)
    async with Scheduler(store, clock=clock, claim_ahead=False) as scheduler:
        scheduler.add_handler(run_for_a_second, concurrency=1)
        meter = LatenessMeter()
        await scheduler.schedule_many([Message(Order(n), delay="0s") for n in range(100)])
        await asyncio.sleep(15)
        await meter.measure(scheduler)
        assert meter.rates() == {}, "too few starts"
        await asyncio.sleep(15)
        await meter.measure(scheduler)
        assert meter.rates()["Order"].per_s == pytest.approx(1, rel=0.01)
        await asyncio.sleep(60)
        await meter.measure(scheduler, most=20)
        rate = meter.rates()["Order"]
        assert rate.per_s == pytest.approx(1, rel=0.01), "the time without known starts does not count"
        assert 30 < rate.starts < 50


@pytest.mark.parametrize("kind", ["sqlite", "kafka"])
def test_the_page_and_top_tell_nothing_delivered_from_not_known(kind: str, kafka: str, tmp_path: Path) -> None:
    url = kafka_url(kafka) if kind == "kafka" else f"sqlite:///{tmp_path}/delay.db?journal=6000"

    async def page() -> str:
        async with Scheduler(url, lanes=()) as scheduler, serving_api(scheduler) as client:
            return (await client.get("/")).text

    async def play() -> None:
        assert "No first attempt began in the last 5 minutes." in await page()
        await note(url, 2, 5_500)  # more than a page reads at once
        assert UNKNOWN in await page()

    cli = Cli(url, tmp_path)
    asyncio.run(note(url, 1, 1))
    assert "no first attempt in the last 5m" in cli("top", "--own").out
    asyncio.run(play())
    assert UNKNOWN in cli("top", "--own").out


def test_the_page_and_top_claim_the_last_five_minutes_only_if_all_of_them_were_read(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/delay.db?journal=6000"
    cli = Cli(url, tmp_path)

    async def page() -> str:
        async with Scheduler(url, dispatch=False) as scheduler, serving_api(scheduler) as client:
            return re.sub(r"<[^>]*>", "", (await client.get("/")).text)

    def look() -> tuple[str, str]:
        asyncio.run(deliver(url))
        return asyncio.run(page()), cli("top").out

    whole, top = look()
    assert "of the 1 first attempts in the last 5 minutes" in whole
    assert "of 1 in the last 5m" in top
    assert "newest" not in whole + top
    asyncio.run(note(url, 1, 5_500))  # more than is read at once
    partial, top = look()
    assert "of the newest 1 first attempts" in partial
    assert partial.count("of the newest 1") == 2, "beside the strip's figures too"
    assert "of the newest 1" in top
    assert "last 5" not in partial + top
