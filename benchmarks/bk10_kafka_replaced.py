"""BK10: the time after an acknowledged replacement in which a Kafka store may still deliver the old version.

A client in another process replaces each message at about its due time. The figure is the longest time from the
acknowledgement until a `read_committed` reader has the old version. An old version before the acknowledgement is
allowed.
"""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime, timedelta

from aiokafka import AIOKafkaConsumer

from aiodelay import Scheduler
from aiodelay.kafka import KafkaStore

from .bk1_kafka_dispatch import PARTITIONS
from .harness import Benchmark, Goal, Plan, Row, check, quantile
from .kafka_server import topics

__all__ = ["BENCHMARK"]

MESSAGES, PER_S = 2_000, 100
LEAD_S = 2.0
AROUND_MS = 30.0
"""A message is replaced at most this long before or after its due time."""
NEW_AFTER = timedelta(seconds=2)
SHARE_GOAL, LONGEST_GOAL = Goal("at most", 5.0), Goal("at most", 16.0)
LONGEST_S = 60.0


def run(plan: Plan) -> list[Row]:
    n = plan.size(MESSAGES)
    rounds = [plan.run(replaced(plan.kafka, n)) for _ in range(plan.runs)]
    late = [[each_ms for each_ms in after_ms if each_ms > 0] for after_ms in rounds]
    of = f"Kafka: {n:,} messages replaced within {AROUND_MS:g} ms before or after their due time"
    middle = quantile([each_ms for after_ms in late for each_ms in after_ms] or [0.0], 0.5)
    shares, longest = tuple(100 * len(each) / n for each in late), tuple(max(each, default=0.0) for each in late)
    half = f"half of these old versions come within {middle:.1f} ms of the answer"
    return [
        Row("BK10", f"{of}: old versions that come after the answer", "% of messages", shares, SHARE_GOAL, half),
        Row("BK10", f"{of}: time from the answer to the last old version", "ms", longest, LONGEST_GOAL, ""),
    ]


async def replaced(bootstrap: str, n: int) -> list[float]:
    """Replace each message at its due time. For each old version that came, return the ms since the answer."""
    answered_ms, old_ms = dict[int, float](), dict[int, float]()
    async with topics(bootstrap, PARTITIONS) as (schedules, target):
        url, new = f"kafka://{bootstrap}/{schedules}", set[int]()
        consumer = AIOKafkaConsumer(
            target, bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
        )

        async def read() -> None:
            while len(new) < n:
                found = await consumer.getmany(timeout_ms=1000)
                now_ms = time.time_ns() / 1e6
                for record in (each for batch in found.values() for each in batch):
                    version, number = record.value.split()
                    check(int(number) not in (new if version == b"new" else old_ms), f"{record.value} came twice")
                    if version == b"new":
                        new.add(int(number))
                    else:
                        old_ms[int(number)] = now_ms

        async def replace(number: int, at_s: float) -> None:
            await asyncio.sleep(max(0.0, at_s - time.time()))
            await user.schedule(b"new %d" % number, delay=NEW_AFTER, to=f"kafka:{target}", id=f"m{number}")
            answered_ms[number] = time.time_ns() / 1e6

        async with Scheduler(KafkaStore(url)), Scheduler(KafkaStore(url), dispatch=False) as user, consumer:
            since, chance = time.time() + LEAD_S, random.Random(n)
            dues = [since + number / PER_S for number in range(n)]
            async with asyncio.timeout(LONGEST_S + n / PER_S), asyncio.TaskGroup() as tasks:
                tasks.create_task(read())
                for number, due_s in enumerate(dues):
                    await asyncio.sleep(max(0.0, due_s - LEAD_S - time.time()))
                    at = datetime.fromtimestamp(due_s, UTC)
                    await user.schedule(b"old %d" % number, at=at, to=f"kafka:{target}", id=f"m{number}")
                    replaced_s = due_s + chance.uniform(-AROUND_MS, AROUND_MS) / 1000
                    tasks.create_task(replace(number, replaced_s))
    return [came_ms - answered_ms[number] for number, came_ms in old_ms.items()]


BENCHMARK = Benchmark("BK10", "what was replaced on Kafka at the last moment", run, needs_kafka=True)
