"""BK3: the rate at which a starting process reads the pending messages of a Kafka store."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Sequence

from aiokafka import AIOKafkaConsumer, TopicPartition

from aiodelay.core.transitions import NO_OP
from aiodelay.core.values import Envelope, Record
from aiodelay.kafka import KafkaStore
from aiodelay.kafka.records import encode_record, partition_of

from .harness import Benchmark, Goal, Plan, Row, Stopwatch, check, per_message_us, ratios, raw_payload
from .kafka_server import LINGER, producing, topics

__all__ = ["BENCHMARK", "LONGEST_S", "MONTH", "PARTITIONS", "fill", "opened_and_ready"]

MESSAGES = 300_000
PARTITIONS = 3
AT_ONCE = 5_000
MOST_RECORDS = 2_000
DAY_MS = 86_400_000
LONGEST_S = 600
SOON_MS = 50 * 60_000
"""A due time within the horizon, but after the end of this benchmark."""
GOAL = Goal("at least", 0.5)
MONTH = range(DAY_MS, 30 * DAY_MS)
AHEAD = (("due in 1 to 30 days", MONTH, GOAL), ("due within the horizon", range(SOON_MS, SOON_MS + 60_000), None))


def run(plan: Plan) -> list[Row]:
    n = plan.size(MESSAGES)
    rows = []
    for what, ahead_ms, goal in AHEAD:
        bare, ours = plan.run(both(plan, n, ahead_ms))
        beside = f"{per_message_us(ours, n)} a message, bare `getmany` {per_message_us(bare, n)}"
        title = f"Kafka: start with {n:,} messages pending, {what}, {PARTITIONS} partitions"
        rows.append(Row("BK3", title, "x bare speed", ratios(bare, ours), goal, beside))
    return rows


async def both(plan: Plan, n: int, ahead_ms: range) -> tuple[list[float], list[float]]:
    """Return the seconds of a bare reader and of aiodelay for the same topic, round by round."""
    times: dict[str, list[float]] = {"bare": [], "ours": []}
    async with topics(plan.kafka, PARTITIONS) as (schedules, _):
        await fill(plan.kafka, schedules, n, ahead_ms)
        for number in range(plan.runs):
            for side in ("bare", "ours") if number % 2 else ("ours", "bare"):
                gc.collect()
                read = bare_read if side == "bare" else our_read
                times[side].append(await read(plan.kafka, schedules, n))
    return times["bare"], times["ours"]


async def fill(bootstrap: str, schedules: str, n: int, ahead_ms: range) -> None:
    """Schedule n messages, as a plain client does."""
    chance, now = random.Random(n), time.time_ns() // 1_000_000
    async with producing(bootstrap, **LINGER) as producer:
        for first in range(0, n, AT_ONCE):
            sent = []
            for i in range(first, min(first + AT_ONCE, n)):
                envelope = Envelope(f"order-{i:032}", "kafka", "target", payload=raw_payload(i), key=b"%d" % i)
                wire = encode_record(Record(envelope, 0, now + chance.choice(ahead_ms), NO_OP))
                assert wire.key is not None
                number = partition_of(wire.key, PARTITIONS)
                sent.append(await producer.send(schedules, wire.value, wire.key, number, headers=wire.headers))
            await asyncio.gather(*sent)


# --- both sides -------------------------------------------------------------------------------------------


async def our_read(bootstrap: str, schedules: str, n: int) -> float:
    """Measure our side, from the open of the store until every partition is ready."""
    with Stopwatch() as watch:
        store = await opened_and_ready(bootstrap, schedules, n)
    await store.__aexit__(None, None, None)
    return watch.seconds


async def opened_and_ready(bootstrap: str, schedules: str, n: int, options: str = "") -> KafkaStore:
    """Open a store, and wait until it knows all pending messages. The caller closes it."""
    url = f"kafka://{bootstrap}/{schedules}?member=0&members=1&timeout_ms={LONGEST_S * 1000}{options}"
    store = KafkaStore(url)
    await store.__aenter__()
    async with store.work("bk3", ["kafka"]) as work:
        check(work.status().phase == "ready", "not all was read")
    counts = await store.counts()
    check(sum(each.scheduled for each in counts.values()) == n, f"not {n} are pending: {counts}")
    return store


async def bare_read(bootstrap: str, schedules: str, n: int) -> float:
    """Measure the bare limit: a consumer that reads all records and keeps none."""
    with Stopwatch() as watch:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=bootstrap,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            max_partition_fetch_bytes=8 << 20,
        )
        async with consumer:
            consumer.assign([TopicPartition(schedules, number) for number in range(PARTITIONS)])
            left = await _read(consumer, n)
    check(left <= 0, f"{left} of {n} were not read")
    return watch.seconds


async def _read(consumer: AIOKafkaConsumer, left: int) -> int:
    while left > 0:
        found: Sequence[Sequence[object]] = list(
            (await consumer.getmany(timeout_ms=30_000, max_records=MOST_RECORDS)).values()
        )
        if not found:
            break
        left -= sum(map(len, found))
    return left


BENCHMARK = Benchmark("BK3", "start of a Kafka store", run, needs_kafka=True)
