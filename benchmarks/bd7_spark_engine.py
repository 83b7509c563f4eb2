"""BD7: the lateness of the engine on Spark, from Kafka to Kafka, and whether it keeps up with the rate."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from aiodelay.kafka.records import partition_of

from .bk5_kafka_lateness import arriving
from .harness import Benchmark, Goal, Plan, Row, quantile, raw_payload
from .kafka_server import LINGER, producing, topics
from .spark_tables import PROCESSES, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["BENCHMARK"]

PARTITIONS = 2
PER_S = 5_000
SPAN_S, NIGHTLY_SPAN_S, LEAST_SPAN_S = 30.0, 120.0, 4.0
AHEAD_S = 15.0
STEP_S = 0.02
SLOT, TRIGGER = "1s", "500ms"
WITHOUT_KAFKA_MS = {0.5: 810, 0.99: 1_330}
"""The lateness of the same slots at the same rate, with a source that generates rows and a sink that counts them."""
KEEPS_UP = Goal("at most", 1.5)


def run(plan: Plan) -> list[Row]:
    span_s = max(LEAST_SPAN_S, (NIGHTLY_SPAN_S if plan.nightly else SPAN_S) * plan.scale)
    per_s = plan.size(PER_S)
    with session(plan) as spark:
        rounds = [
            plan.run(measured(plan, spark, f"{plan.directory / f'engine-{number}'}", per_s, span_s))
            for number in range(plan.runs)
        ]
    of = f"Kafka -> Spark -> Kafka, slots of {SLOT}, {per_s:,}/s in and out for {span_s:g} s"
    growth = tuple(quantile(each[-(len(each) // 4) :], 0.5) / quantile(each[: len(each) // 4], 0.5) for each in rounds)
    told = f"p95 of the lateness {quantile((quantile(each, 0.95) for each in rounds), 0.5):,.0f} ms"
    last = f"{of}: median lateness of the last quarter"
    rows = [Row("BD7", last, "x lateness of the first quarter", growth, KEEPS_UP, told)]
    for part, before_ms in WITHOUT_KAFKA_MS.items():
        values = tuple(quantile(each, part) for each in rounds)
        beside = f"{before_ms:,} ms without Kafka, on another machine"
        rows.append(Row("BD7", f"{of}: p{part * 100:.0f} of the lateness", "ms", values, None, beside))
    return rows


async def measured(plan: Plan, spark: SparkSession, checkpoint: str, per_s: int, span_s: float) -> list[float]:
    """Return the lateness of each message, by due time. Check that each message came once, and no message early."""
    from aiodelay.spark.jobs.engine import start  # noqa: PLC0415 - where Spark is

    n, ahead_s = round(per_s * span_s), min(AHEAD_S, span_s / 2)
    async with topics(plan.kafka, PARTITIONS) as (schedules, target), topics(plan.kafka, 1) as (_, warm):
        query = start(
            spark,
            source=f"kafka://{plan.kafka}/{schedules}",
            checkpoint=checkpoint,
            dead=target,  # a dead letter shows as an additional message
            slot=SLOT,
            trigger=TRIGGER,
            shards=PROCESSES,
        )
        try:
            async with producing(plan.kafka, **LINGER) as producer:
                async with arriving(plan.kafka, warm, [0]):
                    await producer.send_and_wait(schedules, raw_payload(0), b"warm", 0, headers=_headers(0, warm))
                since_ms = time.time_ns() // 1_000_000
                at_ms = [since_ms + number * 1000 // per_s for number in range(n)]
                dues = [each + round(ahead_s * 1000) for each in at_ms]
                async with arriving(plan.kafka, target, dues) as lateness_ms:
                    for number in range(n):
                        if at_ms[number] > time.time_ns() // 1_000_000:
                            await asyncio.sleep(STEP_S)
                        key = b"order-%d" % number
                        place, headers = partition_of(key, PARTITIONS), _headers(dues[number], target)
                        await producer.send(schedules, raw_payload(number), key, place, headers=headers)
        finally:
            await asyncio.to_thread(query.stop)
    return [lateness_ms[number] for number in range(n)]


def _headers(due_ms: int, topic: str) -> list[tuple[str, bytes]]:
    return [("scheduler-target-topic", topic.encode()), ("aiodelay-due-ms", b"%d" % due_ms)]


BENCHMARK = Benchmark("BD7", "the engine on Spark, from Kafka to Kafka", run, needs_kafka=True, needs_spark=True)
