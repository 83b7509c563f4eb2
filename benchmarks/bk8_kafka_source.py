"""BK8: the rate at which a handler takes the records of a Kafka topic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from aiodelay import Scheduler
from tests.support import kafka

from .harness import (
    DEFAULT_CONCURRENCY,
    Benchmark,
    Goal,
    Order,
    Plan,
    Row,
    Stopwatch,
    beside_tuned,
    check,
    check_once_each,
    in_turn,
    order,
    per_message_us,
    ratios,
)
from .kafka_server import LINGER, producing

__all__ = ["BENCHMARK"]

MESSAGES = 100_000
PARTITIONS = 3
CONCURRENCY = 1_500
"""The concurrency of BP9."""
MOST_RECORDS = 2_000
AT_ONCE = 5_000
GOAL = Goal("at least", 0.7)


def run(plan: Plan) -> list[Row]:
    n = plan.size(MESSAGES)
    times = in_turn(
        plan,
        {
            "bare": lambda: plan.run(bare(plan.kafka, n)),
            "ours": lambda: plan.run(take(plan.kafka, n, CONCURRENCY)),
            "default": lambda: plan.run(take(plan.kafka, n, DEFAULT_CONCURRENCY)),
        },
    )

    of = f"Kafka: {n:,} records of a topic, to an empty handler, concurrency"

    def row(ours: str, concurrency: str, goal: Goal | None) -> Row:
        what = f"{of} {concurrency}"
        beside = f"{per_message_us(times[ours], n)} a record, bare {per_message_us(times['bare'], n)}"
        return Row("BK8", what, "x bare speed", ratios(times["bare"], times[ours]), goal, beside)

    return [
        row("ours", f"{CONCURRENCY:,}", GOAL),
        row("default", f"{DEFAULT_CONCURRENCY} (default)", None),
        beside_tuned(
            "BK8",
            of,
            CONCURRENCY,
            times["ours"],
            times["default"],
            beside=f"{per_message_us(times['default'], n)} a record",
        ),
    ]


@asynccontextmanager
async def filled(bootstrap: str, n: int) -> AsyncIterator[str]:
    """Create a topic with n events, and delete it after the block."""
    topic = await kafka.create_topic(bootstrap, kafka.new_name("source"), PARTITIONS)
    try:
        async with AIOKafkaConsumer(bootstrap_servers=bootstrap) as consumer:
            await consumer.end_offsets([TopicPartition(topic, i) for i in range(PARTITIONS)])  # each has a leader
        async with producing(bootstrap, **LINGER) as producer:
            for first in range(0, n, AT_ONCE):
                numbers = range(first, min(first + AT_ONCE, n))
                values = [msgspec.json.encode(order(i)) for i in numbers]
                sent = [
                    await producer.send(topic, value, b"%d" % i, i % PARTITIONS)
                    for i, value in zip(numbers, values, strict=True)
                ]
                await asyncio.gather(*sent)
        yield topic
    finally:
        admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
        await admin.start()
        await admin.delete_topics([topic])
        await admin.close()


async def bare(bootstrap: str, n: int) -> float:
    """Measure the bare limit: `getmany` in a group with automatic commits, and a task for each record."""
    handled: list[bytes] = []

    async def handle(value: bytes) -> None:
        handled.append(value)

    async with filled(bootstrap, n) as topic:
        consumer = AIOKafkaConsumer(
            topic,
            bootstrap_servers=bootstrap,
            group_id=kafka.new_name("group"),
            isolation_level="read_committed",
            auto_offset_reset="earliest",
        )
        with Stopwatch() as watch:
            async with consumer:
                while len(handled) < n:
                    found = await consumer.getmany(timeout_ms=30_000, max_records=MOST_RECORDS)
                    check(bool(found), f"{len(handled)} records were read, not {n}")
                    started = [asyncio.create_task(handle(each.value)) for batch in found.values() for each in batch]
                    for task in started:
                        await task
        check_once_each((msgspec.json.decode(value, type=Order).number for value in handled), n)
    return watch.seconds


async def take(bootstrap: str, n: int, concurrency: int) -> float:
    """Measure our side, from the open of the scheduler to its close, with every offset committed."""
    handled, group = list[int](), kafka.new_name("group")
    all_handled = asyncio.get_running_loop().create_future()
    async with filled(bootstrap, n) as topic:
        scheduler = Scheduler("memory://", sources=[f"kafka://{bootstrap}"])

        @scheduler.handler(concurrency=concurrency, timeout="30s", source=f"kafka:{topic}?group={group}")
        async def handle(event: Order) -> None:
            handled.append(event.number)
            if len(handled) == n:
                all_handled.set_result(None)

        with Stopwatch() as watch:
            async with scheduler:
                await all_handled
        check_once_each(handled, n)
        async with AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=group) as consumer:
            places = [TopicPartition(topic, number) for number in range(PARTITIONS)]
            ends = await consumer.end_offsets(places)
            left = [place for place in places if (await consumer.committed(place) or 0) != ends[place]]
            check(not left, f"the offsets of {left} were not committed")
    return watch.seconds


BENCHMARK = Benchmark("BK8", "a Kafka topic as source", run, needs_kafka=True)
