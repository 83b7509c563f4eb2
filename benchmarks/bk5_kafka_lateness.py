"""BK5: the lateness of messages from a Kafka store to a topic, exactly once, compared with bare transactions."""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from aiodelay import Scheduler
from aiodelay.kafka import KafkaStore
from aiodelay.kafka.records import encode_end, key_of, partition_of

from .bk1_kafka_dispatch import PARTITIONS, message
from .harness import Benchmark, Goal, Plan, Row, check, check_once_each, in_turn, number_of, quantile, raw_payload
from .kafka_server import producing, topics
from .lateness import DELAYS_S, PER_S, SPAN_S

__all__ = ["BENCHMARK"]

AHEAD_S = 1.0
"""The time until the first message is scheduled. Both sides have started by then."""
P50_GOAL, P99_GOAL = Goal("at most", 4.0), Goal("at most", 1.5)


class Arrival(NamedTuple):
    """The times at which a message is scheduled and due, in epoch ms."""

    number: int
    at_ms: int
    due_ms: int


def run(plan: Plan) -> list[Row]:
    n = plan.size(round(PER_S * SPAN_S))
    rounds: dict[str, list[list[float]]] = {"ours": [], "bare": []}

    def measure(side: str) -> float:
        lateness = plan.run(ours(plan, n) if side == "ours" else bare(plan, n))
        rounds[side].append(lateness)
        return quantile(lateness, 0.5)

    in_turn(plan, {side: partial(measure, side) for side in rounds})
    of = f"Kafka -> Kafka, exactly once: {n:,} messages at {PER_S}/s, p{{}} of the lateness{{}}"
    rows = []
    for part, goal in ((0.5, P50_GOAL), (0.99, P99_GOAL)):
        late, limit = ([quantile(each, part) for each in rounds[side]] for side in ("ours", "bare"))
        beside = f"{quantile(late, 0.5):.1f} ms, bare loop {quantile(limit, 0.5):.1f} ms"
        pairs = zip(late, limit, strict=True)
        if part == 0.5:
            values = tuple(o - b for o, b in pairs)
            rows.append(Row("BK5", of.format("50", " minus that of a bare loop"), "ms", values, goal, beside))
        else:
            values = tuple(o / b for o, b in pairs)
            rows.append(Row("BK5", of.format("99", ""), "x bare lateness", values, goal, beside))
    return rows


def arrivals(n: int, scale: float) -> list[Arrival]:
    """Return the messages for both sides, with the same delays from now on."""
    chance, since_ms = random.Random(n), time.time_ns() // 1_000_000 + round(AHEAD_S * 1000)
    found = []
    for number in range(n):
        at_ms = since_ms + number * 1000 // PER_S
        found.append(Arrival(number, at_ms, at_ms + round(chance.uniform(*DELAYS_S) * scale * 1000)))
    return found


async def _until(at_ms: int) -> None:
    await asyncio.sleep(max(0.0, at_ms / 1000 - time.time()))


@asynccontextmanager
async def arriving(bootstrap: str, topic: str, dues: Sequence[int]) -> AsyncIterator[dict[int, float]]:
    """Read the topic with `read_committed`, and yield the lateness by number.

    Check that each message came once, and no message early.
    """
    numbers, lateness_ms = list[int](), dict[int, float]()

    async def read() -> None:
        while len(numbers) < len(dues):
            found = await consumer.getmany(timeout_ms=1000)
            now_ms = time.time_ns() / 1e6
            for record in (each for batch in found.values() for each in batch):
                numbers.append(number_of(record.value))
                lateness_ms[numbers[-1]] = now_ms - dues[numbers[-1]]

    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    async with consumer, asyncio.TaskGroup() as tasks:
        tasks.create_task(read())
        yield lateness_ms
    check_once_each(numbers, len(dues))
    check(min(lateness_ms.values()) >= 0, f"a message came {-min(lateness_ms.values()):.3f} ms early")


@asynccontextmanager
async def paced(plan: Plan, n: int) -> AsyncIterator[tuple[Scheduler, dict[int, float]]]:
    """Schedule at a steady rate while one process delivers. Yield the scheduler, and the lateness in ms by number."""
    async with topics(plan.kafka, PARTITIONS) as (schedules, target):
        url = f"kafka://{plan.kafka}/{schedules}"
        async with Scheduler(KafkaStore(url)) as owner, Scheduler(KafkaStore(url), dispatch=False) as producer:
            planned = arrivals(n, plan.scale)
            async with (
                arriving(plan.kafka, target, [each.due_ms for each in planned]) as lateness_ms,
                asyncio.TaskGroup() as tasks,
            ):
                tasks.create_task(_schedule(producer, target, planned))
                yield owner, lateness_ms


async def _schedule(producer: Scheduler, target: str, planned: Sequence[Arrival]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for each in planned:
            await _until(each.at_ms)
            due = datetime.fromtimestamp(each.due_ms / 1000, UTC)
            to_send = message(each.number, target, due)
            tasks.create_task(
                producer.schedule(to_send.event, at=to_send.at, to=to_send.to, key=to_send.key, id=to_send.id)
            )


async def ours(plan: Plan, n: int) -> list[float]:
    """Measure our side: one process schedules and moves the messages."""
    async with paced(plan, n) as (_, lateness_ms):
        pass
    return list(lateness_ms.values())


async def bare(plan: Plan, n: int) -> list[float]:
    """Measure the bare limit: messages wait in memory, and a loop for each partition commits those that became due."""
    async with topics(plan.kafka, PARTITIONS) as (schedules, target):
        planned = arrivals(n, plan.scale)
        shares: list[list[Arrival]] = [[] for _ in range(PARTITIONS)]
        for each in planned:
            shares[partition_of(key_of(f"order-{each.number}"), PARTITIONS)].append(each)
        async with (
            arriving(plan.kafka, target, [each.due_ms for each in planned]) as lateness_ms,
            asyncio.TaskGroup() as tasks,
        ):
            for number, share in enumerate(shares):
                tasks.create_task(_commit_due(plan.kafka, schedules, target, number, share))
    return list(lateness_ms.values())


async def _commit_due(bootstrap: str, schedules: str, target: str, partition: int, share: Sequence[Arrival]) -> None:
    waiting = [(each.due_ms, each.number) for each in share]
    heapq.heapify(waiting)
    async with producing(bootstrap, transactional_id=f"{schedules}.{partition}") as producer:
        while waiting:
            await _until(waiting[0][0])
            now_ms = time.time_ns() // 1_000_000
            due = []
            while waiting and waiting[0][0] <= now_ms:
                due.append(heapq.heappop(waiting)[1])
            if due:
                await _commit(producer, schedules, target, partition, due)


async def _commit(
    producer: AIOKafkaProducer, schedules: str, target: str, partition: int, numbers: Sequence[int]
) -> None:
    async with producer.transaction():
        for number in numbers:
            await producer.send(target, raw_payload(number), b"%d" % number)
            end = encode_end(key_of(f"order-{number}"), read_to=number, outcome="delivered")
            await producer.send(schedules, None, end.key, partition, headers=end.headers)


BENCHMARK = Benchmark("BK5", "lateness from Kafka to Kafka", run, needs_kafka=True)
