"""Migration between stores in use: the right store delivers every message, once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from aiodelay import CancelOutcome, Context, Scheduler
from aiodelay.backends.kafka.topics.topic import SETTINGS
from aiodelay.spark.jobs import migrate
from aiodelay.spark.summary import Summary
from tests.support.kafka import create_topic, new_name
from tests.support.servers import RedisServer

pytestmark = pytest.mark.timeout(900)  # passes are many small jobs of Spark, which take a loaded machine long

CUTOVER = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
NEAR, FAR = CUTOVER - timedelta(hours=1), CUTOVER + timedelta(hours=1)
ROUNDS, IDS, CALM = 25, 20, 10


def moved(spark: SparkSession, source: str, target: str, folder: Path, namespace: str, **options: Any) -> Summary:  # noqa: ANN401 - any option
    is_kafka = [url.startswith("kafka:") for url in (source, target)]
    names = ["default" if each else namespace for each in is_kafka]
    given: dict[str, Any] = {"cutover": CUTOVER, "rate": 0, "concurrency": 2, "verify": True}
    given |= {"namespace": names[0], "to_namespace": names[1]} | options
    return migrate.run(spark, source=source, target=target, work=f"{folder / 'work'}", **given)


def opened(url: str, namespace: str) -> Scheduler:
    return Scheduler(url) if url.startswith("kafka:") else Scheduler(url, namespace=namespace)


class Delivered:
    """Which store delivered what."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str, bytes]] = Counter()
        self.early: list[str] = []
        self._changed = asyncio.Event()

    def by(self, name: str, scheduler: Scheduler) -> Scheduler:
        @scheduler.handler(name="orders")
        async def take(payload: bytes, context: Context) -> None:
            self.found[name, context.id, payload] += 1
            if context.due > datetime.now(UTC) + timedelta(seconds=1):
                self.early.append(context.id)
            self._changed.set()

        return scheduler

    async def until(self, n: int) -> None:
        while len(self.found) < n:
            self._changed.clear()
            async with asyncio.timeout(120):
                await self._changed.wait()


class Traffic:
    """Applications that schedule, replace and cancel, by the rule of docs/spark/migrate.md."""

    def __init__(self, first: Scheduler, second: Scheduler) -> None:
        self._first, self._second = first, second
        self._choose = random.Random(7)
        self.wants: dict[str, tuple[datetime, bytes]] = {}
        self.now: set[tuple[str, str, bytes]] = set()

    async def play(self, number: int) -> None:
        """Cancel a message, schedule one, new or again, on one side of the cut-over, and one that is due now."""
        choose, payload = self._choose, b"%d" % number
        message_id = f"o{choose.randrange(IDS)}"
        if choose.random() < 0.3:
            answers = [await each.cancel(message_id) for each in (self._first, self._second)]
            was_there = any(each is not CancelOutcome.NOT_FOUND for each in answers)
            assert was_there or message_id not in self.wants
            self.wants.pop(message_id, None)
            return
        due = choose.choice([NEAR, FAR, FAR])
        await self.schedule(message_id, due, payload)
        await self._first.schedule(payload, to="handler:orders", delay="0s", id=f"now{number}")
        self.now.add(("first", f"now{number}", payload))

    async def schedule(self, message_id: str, due: datetime, payload: bytes) -> None:
        await self._first.schedule(payload, to="handler:orders", at=due, id=message_id)
        self.wants[message_id] = due, payload

    async def check_each_once(self, delivered: Delivered) -> None:
        """Make due what is wanted, each where it should be; all of it must come there, and once."""
        names = {NEAR: "first", FAR: "second"}
        wanted = self.now | {(names[due], each, payload) for each, (due, payload) in self.wants.items()}
        for each, (due, _) in self.wants.items():
            assert await (self._first if due == NEAR else self._second).fire(each) == "fired", each
        await delivered.until(len(wanted))
        assert dict(delivered.found) == dict.fromkeys(wanted, 1)


@pytest.fixture
def urls(kafka: str, redis_server: RedisServer, tmp_path: Path) -> Mapping[str, str]:
    settings = {name.replace(".", "_"): value for name, value in SETTINGS.items()}
    topic = asyncio.run(create_topic(kafka, new_name("schedules"), 3, **settings))
    return {
        "kafka": f"kafka://{kafka}/{topic}",
        "redis": redis_server.url,
        "sqlite": f"sqlite:///{tmp_path / 'delay.db'}",
    }


@pytest.mark.nightly  # test_connect moves from Redis to Kafka by the line of the page, test_migrate_faults to SQLite
@pytest.mark.parametrize("way", ["kafka redis", "redis kafka", "sqlite redis", "redis sqlite"])
def test_a_store_moves_under_traffic(
    spark: SparkSession, urls: Mapping[str, str], tmp_path: Path, namespace: str, way: str
) -> None:
    first, second = (urls[name] for name in way.split())

    async def move(**options: Any) -> Summary:  # noqa: ANN401 - as of `moved`
        return await asyncio.to_thread(moved, spark, first, second, tmp_path, namespace, **options)

    async def live() -> None:
        delivered = Delivered()
        a = delivered.by("first", opened(first, namespace))
        b = delivered.by("second", opened(second, namespace))
        async with a, b:
            traffic = Traffic(a, b)
            for number in range(CALM):
                await traffic.schedule(f"calm{number}", FAR, b"calm")
            for number in range(ROUNDS):
                await traffic.play(number)
            moving = asyncio.create_task(move(passes=1, verify=False))
            number = ROUNDS
            while not moving.done():
                number += 1
                await traffic.play(number)
                await asyncio.sleep(0.1)  # messages change at all times of a pass
            assert (await moving).counts["moved"] >= CALM
            summary = await move()
            assert (summary.rejected, summary.counts["left"], summary.counts["drift"]) == (0, 0, 0), summary
            assert summary.counts["moved"] == summary.counts["same"]
            await traffic.check_each_once(delivered)
            assert not delivered.early

    asyncio.run(live())
