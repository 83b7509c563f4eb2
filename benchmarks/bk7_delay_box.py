"""BK7: the rate of a delay box from end to end through Redis, compared with the slowest of its bare parts."""

from __future__ import annotations

import asyncio
import json

from aiokafka import AIOKafkaConsumer

from aiodelay.backends.redis.records.keys import Keys
from aiodelay.delay_box import DelayBox

from .bk2_redis_to_kafka import bare as bare_producer
from .bp3_redis_schedule import bare as bare_put
from .bp3_redis_schedule import written
from .harness import (
    PAYLOAD_BYTES,
    Benchmark,
    Goal,
    Plan,
    Row,
    Stopwatch,
    check,
    check_once_each,
    in_turn,
    per_message_us,
    ratios,
)
from .kafka_server import LINGER, Record, delivered, producing, topics
from .redis_server import MESSAGES_KEY, Client, emptied

__all__ = ["BENCHMARK"]

MESSAGES = 50_000
PARTITIONS = 3
POSITIONS_KEY = Keys("default").key("src")
GOAL = Goal("at least", 0.6)
POLL_S = 0.002


def run(plan: Plan) -> list[Row]:
    n = plan.size(MESSAGES)
    records: list[Record] = []
    plan.run(ours(plan, n, records))
    stored = plan.run(written(plan.redis, n))
    sides = {
        "ours": lambda: plan.run(ours(plan, n, [])),
        "getmany": lambda: plan.run(bare_getmany(plan.kafka, n)),
        "script put": lambda: plan.run(bare_put(plan.redis, stored)),
        "producer": lambda: plan.run(bare_producer(plan.kafka, records, number_in)),
    }
    times = in_turn(plan, sides)
    bare = [times[name] for name in sides if name != "ours"]
    what = f"delay box with a Redis store: {n:,} requests"
    parts = ", ".join(f"{name} {per_message_us(times[name], n)}" for name in sides if name != "ours")
    beside = f"{per_message_us(times['ours'], n)} a message; bare parts: {parts}"
    slowest = [max(each) for each in zip(*bare, strict=True)]
    return [Row("BK7", what, "x speed of the slowest bare part", ratios(slowest, times["ours"]), GOAL, beside)]


async def ours(plan: Plan, n: int, records: list[Record]) -> float:
    """Measure our side, from the open of the box until the store is empty. Add the arrived records to `records`."""
    async with (
        topics(plan.kafka, PARTITIONS) as (dead, target),
        topics(plan.kafka, PARTITIONS) as (_, intake),
        emptied(plan.redis) as client,
    ):
        await ask(plan.kafka, intake, target, n)
        with Stopwatch() as watch:
            async with DelayBox(plan.redis, f"kafka://{plan.kafka}/{intake}", allow=[target], dead_topic=dead):
                while await has_left(client, n):  # noqa: ASYNC110 - the change happens in the servers
                    await asyncio.sleep(POLL_S)
        records += await delivered(plan.kafka, target, n)
        check_once_each((number_in(each.value) for each in records), n)
    return watch.seconds


def number_in(value: bytes) -> int:
    """Return the number of the request from which a message comes."""
    return int(value[:10])


async def has_left(client: Client, n: int) -> bool:
    """Return whether requests wait for intake, or messages wait for delivery."""
    positions = await client.hvals(POSITIONS_KEY)
    return sum(map(int, positions)) < n or bool(await client.hlen(MESSAGES_KEY))


async def ask(bootstrap: str, intake: str, target: str, n: int) -> None:
    """Write requests for messages that are due at once."""
    async with producing(bootstrap, **LINGER) as producer:
        for number in range(n):
            request = {"topic": target, "message": f"{number:010}".ljust(PAYLOAD_BYTES, "x"), "countdown": 0}
            headers = [("CALLER_SERVICE", b"benchmark")]
            await producer.send(intake, json.dumps(request).encode(), headers=headers, partition=number % PARTITIONS)


async def bare_getmany(bootstrap: str, n: int) -> float:
    """Measure the bare limit of reading: the same requests with aiokafka's consumer."""
    async with topics(bootstrap, PARTITIONS) as (_, intake):
        await ask(bootstrap, intake, "target", n)
        found = 0
        with Stopwatch() as watch:
            async with AIOKafkaConsumer(intake, bootstrap_servers=bootstrap, auto_offset_reset="earliest") as consumer:
                while found < n:
                    found += sum(map(len, (await consumer.getmany(timeout_ms=1_000)).values()))
        check(found == n, f"{found} requests were read, not {n}")
    return watch.seconds


BENCHMARK = Benchmark("BK7", "delay box", run, needs_redis=True, needs_kafka=True)
