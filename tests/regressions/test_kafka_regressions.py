"""Measured faults of another Kafka scheduler: changes near the due time, deletes, starts, and kills.

That one lost the new version whenever the old one came out, ignored deletes astride a full second, delivered nothing it
had missed while its topic was written to, and doubled what was on its way when it was killed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
from aiokafka import AIOKafkaProducer

from aiodelay import Scheduler
from tests.faults.programs.kafka_owner import Plan
from tests.faults.test_kafka_storm import fill, read_until
from tests.support.kafka import create_topic, ids_in, new_name, read
from tests.support.processes import Crew, Worker
from tests.support.waiting import until as comes

pytestmark = pytest.mark.asyncio

What = Literal["replace", "delete"]
EVERY_MS = 40
SOON_MS = 2_000


def now_ms() -> float:
    return time.time_ns() / 1e6


class Try(NamedTuple):
    """A change: how long before the due time it was acknowledged, and how often each version came out."""

    before_ms: float
    old: int
    new: int


class User:
    """A plain client that schedules, replaces and deletes."""

    def __init__(self, producer: AIOKafkaProducer, schedules: str, target: str) -> None:
        self._producer, self._schedules, self._target = producer, schedules, target

    async def put(self, key: str, value: str, due_ms: float) -> None:
        headers = [
            ("scheduler-epoch", b"%d" % (due_ms // 1000 + 1)),
            ("aiodelay-due-ms", b"%d" % due_ms),
            ("scheduler-target-topic", self._target.encode()),
        ]
        await self._producer.send_and_wait(self._schedules, value.encode(), key.encode(), headers=headers)

    async def delete(self, key: str) -> None:
        await self._producer.send_and_wait(self._schedules, None, key.encode())


async def until(at_ms: float) -> None:
    await asyncio.sleep(max(at_ms - now_ms(), 0) / 1000)  # a real service delivers then


async def tried(
    kafka: str, what: What, tries: int, *, due_in_ms: float, sent_before_ms: tuple[float, float], second: bool
) -> list[Try]:
    """Change so many messages so long before they are due, `second`: at a full second."""
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    acknowledged: dict[int, float] = {}

    async def one(user: User, i: int, due_ms: float) -> None:
        await user.put(f"m{i}", f"{i} old", due_ms)
        await until(due_ms - due_in_ms - random.uniform(*sent_before_ms))
        if what == "replace":
            await user.put(f"m{i}", f"{i} new", due_ms)
        else:
            await user.delete(f"m{i}")
        acknowledged[i] = due_ms - now_ms()

    async with Scheduler(f"kafka://{kafka}/{schedules}?create_topic=true&partitions=3"):
        async with AIOKafkaProducer(bootstrap_servers=kafka, acks="all") as producer, asyncio.TaskGroup() as tasks:
            user, start_ms = User(producer, schedules, target), now_ms() + SOON_MS + due_in_ms
            for i in range(tries):
                due_ms = start_ms + EVERY_MS * i
                tasks.create_task(one(user, i, due_ms // 1000 * 1000 if second else due_ms))
        expected = {f"{i} new" for i in range(tries)} if what == "replace" else set()
        await read_until(kafka, target, expected, 30)
        # Nothing more may come: what was deleted, or an old version, would come at its due time.
        await until(start_ms + EVERY_MS * tries + 1_000)
    found = Counter(record.value.decode() for record in await read(kafka, target))
    return [Try(acknowledged[i], found[f"{i} old"], found[f"{i} new"]) for i in range(tries)]


SIZES = pytest.mark.parametrize("n", [50, pytest.param(150, marks=pytest.mark.nightly)])


@SIZES
@pytest.mark.parametrize("what", ["replace", "delete"])
async def test_a_change_near_the_due_time_loses_nothing(kafka: str, what: What, n: int) -> None:
    tries = await tried(kafka, what, n, due_in_ms=0, sent_before_ms=(0, 60), second=False)
    late = sorted((each.before_ms for each in tries if each.old), reverse=True)
    print(f"{what}: old version out in {len(late)} of {n}; acknowledged before it was due by {late[:5]} ms at most")
    assert all(each.old <= 1 for each in tries)
    assert what == "delete" or all(each.new == 1 for each in tries)


@SIZES
@pytest.mark.parametrize("what", ["replace", "delete"])
async def test_a_change_well_before_the_due_time_is_heeded_also_astride_a_full_second(
    kafka: str, what: What, n: int
) -> None:
    tries = await tried(kafka, what, n, due_in_ms=3_000, sent_before_ms=(-1, 10), second=True)
    assert not any(each.old for each in tries)
    assert what == "delete" or all(each.new == 1 for each in tries)


async def test_what_was_missed_is_delivered_while_the_topic_is_written_to(kafka: str) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    url = f"kafka://{kafka}/{schedules}?create_topic=true&partitions=3"
    async with Scheduler(url, dispatch=False):
        pass  # which creates the topic
    async with AIOKafkaProducer(bootstrap_servers=kafka, acks="all") as producer:
        user = User(producer, schedules, target)
        for i in range(20):
            await user.put(f"m{i}", f"{i}", now_ms() - 60_000)

        async def traffic() -> None:
            for i in range(1_000_000):
                await user.put(f"t{i % 100}", "later", now_ms() + 3_600_000)
                await asyncio.sleep(0.02)  # a steady load

        writing = asyncio.create_task(traffic())
        async with Scheduler(url):
            await read_until(kafka, target, {f"{i}" for i in range(20)}, 15)
            assert not writing.done()
        writing.cancel()
        await asyncio.wait([writing])


@pytest.mark.parametrize("n", [1_500, pytest.param(6_000, marks=pytest.mark.nightly)])
async def test_kills_during_a_drain_double_nothing(kafka: str, tmp_path: Path, n: int) -> None:
    target = await create_topic(kafka, new_name())
    store = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=3&catch_up={n // 3}"
    async with Scheduler(store, dispatch=False):
        pass  # which creates the topic
    await fill(kafka, store, target, {f"m{i:05}": round(now_ms()) - 60_000 for i in range(n)})
    with Crew(tmp_path) as crew:

        def owner() -> Worker:
            name = f"owner-{len(crew.workers)}"
            return crew.start("kafka_owner_soon", Plan(name=name, store=store, runs=f"{tmp_path / 'runs'}"), name=name)

        async def end(owner: Worker) -> None:
            owner.terminate()
            await asyncio.to_thread(owner.ended_well)

        async def has_come(count: int) -> bool:
            return len(await read(kafka, target)) >= count

        now = owner()
        for part in (n // 10, n // 4):
            await comes(partial(has_come, part), f"{part} messages are out")
            now.kill()
            assert len(await read(kafka, target)) < n
            now = owner()
        await comes(partial(has_come, n), "all messages are out", 60)
        await end(now)
        now = owner()  # and nothing comes again at a clean start, before what is due after it
        await fill(kafka, store, target, {ids_in(number, 3)[0]: round(now_ms()) for number in range(3)})
        await comes(partial(has_come, n + 3), "what is due last is out")
        await end(now)
    found = Counter(record.value for record in await read(kafka, target))
    assert len(found) == n + 3
    assert set(found.values()) == {1}
