"""BK2: the rate at which due messages of a Redis store reach a Kafka topic, compared with a bare producer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from aiodelay import Scheduler
from aiodelay.kafka import KafkaSink
from aiodelay.redis import RedisStore

from .bk1_kafka_dispatch import message
from .harness import (
    Benchmark,
    Goal,
    Plan,
    Row,
    Stopwatch,
    check_once_each,
    in_turn,
    number_of,
    per_message_us,
    ratios,
)
from .kafka_server import LINGER, Record, delivered, producing, topics
from .redis_server import MESSAGES_KEY, MinuteAgo, emptied

__all__ = ["BENCHMARK"]

MESSAGES = 20_000
PARTITIONS = 3
GOAL = Goal("at least", 0.7)
POLL_S = 0.002


def run(plan: Plan) -> list[Row]:
    n = plan.size(MESSAGES)
    records: list[Record] = []
    plan.run(ours(plan, n, records))
    sides = {
        "ours": lambda: plan.run(ours(plan, n, [])),
        "bare": lambda: plan.run(bare(plan.kafka, records)),
    }
    times = in_turn(plan, sides)
    what = f"Redis -> Kafka: {n:,} messages due at once, bare side with `send`"
    beside = f"{per_message_us(times['ours'], n)} a message, bare {per_message_us(times['bare'], n)}"
    return [Row("BK2", what, "x bare speed", ratios(times["bare"], times["ours"]), GOAL, beside)]


async def ours(plan: Plan, n: int, records: list[Record]) -> float:
    """Measure our side, from the open of the scheduler until the store is empty. Add arrived records to `records`."""
    async with topics(plan.kafka, PARTITIONS) as (_, target), emptied(plan.redis) as client:
        at, sink = datetime.now(UTC), KafkaSink(plan.kafka)
        async with Scheduler(RedisStore(plan.redis, clock=MinuteAgo()), sinks=[sink], dispatch=False) as producer:
            await producer.schedule_many(message(i, target, at) for i in range(n))
        with Stopwatch() as watch:
            async with Scheduler(RedisStore(plan.redis), sinks=[sink]):
                while await client.hlen(MESSAGES_KEY):  # noqa: ASYNC110 - the change happens in the server
                    await asyncio.sleep(POLL_S)
        records += await delivered(plan.kafka, target, n)
    check_once_each((number_of(each.value) for each in records), n)
    return watch.seconds


async def bare(bootstrap: str, records: Sequence[Record], number_in: Callable[[bytes], int] = number_of) -> float:
    """Measure the bare limit: the same records with aiokafka's plain call, each acknowledged by the broker."""
    async with topics(bootstrap, PARTITIONS) as (_, target):
        with Stopwatch() as watch:
            async with producing(bootstrap, **LINGER) as producer:
                sent = [
                    await producer.send(target, each.value, each.key, headers=list(each.headers)) for each in records
                ]
                await asyncio.gather(*sent)
        arrived = await delivered(bootstrap, target, len(records))
        check_once_each((number_in(each.value) for each in arrived), len(records))
    return watch.seconds


BENCHMARK = Benchmark("BK2", "from Redis to Kafka", run, needs_redis=True, needs_kafka=True)
