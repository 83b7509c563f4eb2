"""The last hour on the page, counted from the journal of a real store: failed messages, and those put off."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from aiodelay import Context, Later, Retry, Scheduler
from aiodelay.core.values import Failed, NotTaken
from aiodelay.operations.activity import ActivityMeter
from aiodelay.service import admin
from aiodelay.testing import RecordingSink
from tests.support.api import client_of, serving_app
from tests.support.stores import SHARED_STORES, empty_store


@pytest.fixture(params=SHARED_STORES, ids=str)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with empty_store(request.param, tmp_path, "?journal=1000") as url:
        yield url


@dataclass
class Order:
    number: int


def totals(scheduler: Scheduler) -> tuple[int, int, int]:
    """Return how many messages the last hour shows as delivered, tried again and given up."""

    async def read() -> tuple[int, int, int]:
        async with scheduler:
            store, meter = scheduler.opened_store(), ActivityMeter()
            async with store.journal_reader() as reader:
                await meter.read(reader, now_ms=store.now_ms())
            minutes = meter.last_hour(store.now_ms()).minutes
        parts = [(each.delivered, each.retried, each.given_up) for each in minutes]
        delivered, retried, given_up = zip(*parts, strict=True)
        return sum(delivered), sum(retried), sum(given_up)

    return asyncio.run(read())


@pytest.mark.parametrize("counts", [False, True], ids=["plain", "counted"])
def test_a_message_that_its_handler_puts_off_has_not_failed(url: str, counts: bool) -> None:
    scheduler = Scheduler(url, retry=Retry(attempts=5, first="1ms"))
    runs: list[int] = []

    @scheduler.handler
    async def handled(event: Order, context: Context) -> Later | None:
        runs.append(event.number)
        return Later("1ms", counts=counts) if len(runs) < 3 else None

    async def play() -> None:
        async with scheduler:
            await scheduler.schedule(Order(1), delay="1ms")
            await scheduler.run_until_idle()

    asyncio.run(play())
    assert len(runs) == 3
    assert totals(Scheduler(url, dispatch=False)) == (1, 0, 0)


@pytest.mark.asyncio
async def test_the_page_shows_an_attempt_that_was_put_off_as_such(tmp_path: Path) -> None:
    scheduler = Scheduler(f"sqlite:///{tmp_path}/delay.db?journal=100")

    @scheduler.handler
    async def handled(event: Order, context: Context) -> Later | None:
        return Later("1ms", counts=True) if context.attempt == 1 else None

    async with scheduler, serving_app(admin(scheduler)) as base, client_of(base) as client:
        await scheduler.schedule(Order(1), id="order", delay="1ms")
        await scheduler.run_until_idle()
        text = re.sub(r"<[^>]*>", "", (await client.get("/messages/order")).text)
    assert "#1 put off" in text
    assert "failed" not in text


def test_an_attempt_that_raised_has_failed_and_is_tried_again(url: str) -> None:
    scheduler = Scheduler(url, retry=Retry(attempts=2, first="1ms"))

    @scheduler.handler
    async def handled(event: Order, context: Context) -> None:
        if event.number or context.attempt == 1:
            raise ValueError

    async def play() -> None:
        async with scheduler:
            await scheduler.schedule(Order(0), delay="1ms")
            await scheduler.schedule(Order(1), delay="1ms")
            await scheduler.run_until_idle()

    asyncio.run(play())
    assert totals(Scheduler(url, dispatch=False)) == (1, 2, 1)


@pytest.mark.parametrize(
    "answer", [NotTaken("full"), Failed("no"), Failed("")], ids=["not taken", "failed", "no reason"]
)
def test_a_message_that_its_sink_refused_has_failed_and_is_tried_again(url: str, answer: NotTaken | Failed) -> None:
    """Also one that the sink did not take for now: this costs no attempt, but the delivery did fail."""
    sink = RecordingSink("line")
    sink.inject(answer)

    async def play() -> None:
        async with Scheduler(url, sinks=[sink], retry=Retry(attempts=2, first="1ms")) as scheduler:
            await scheduler.schedule(b"x", to="line:a", delay="1ms")
            await scheduler.run_until_idle()

    asyncio.run(play())
    assert totals(Scheduler(url, dispatch=False)) == (1, 1, 0)


def test_a_message_that_a_process_gives_back_has_not_failed(url: str) -> None:
    worker, began = Scheduler(url, drain="0s"), asyncio.Event()

    @worker.handler
    async def handled(event: Order, context: Context) -> None:
        began.set()
        await asyncio.Event().wait()

    async def play() -> None:
        async with worker:
            await worker.schedule(Order(1), delay="1ms")
            await began.wait()

    asyncio.run(play())
    assert totals(Scheduler(url, dispatch=False)) == (0, 0, 0)
