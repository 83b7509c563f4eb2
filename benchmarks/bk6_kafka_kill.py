"""BK6: the lateness after a process is killed (kill -9), if another process continues, or if it is started again."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from multiprocessing.context import SpawnProcess

from aiodelay import Scheduler
from aiodelay.kafka import KafkaStore
from aiodelay.kafka.records import key_of, partition_of

from .bk1_kafka_dispatch import PARTITIONS, message
from .bk5_kafka_lateness import arriving
from .harness import Benchmark, Goal, Plan, Row, check
from .kafka_server import delivered, topics

__all__ = ["BENCHMARK"]

PROCESSES = 2
PENDING = 100_000
DUE = 10_000
"""The number of messages that become due evenly, from before the kill until long after it.

All other messages are due far ahead.
"""
SPAN_S, LEAD_S, KILL_AFTER_S = 25.0, 3.0, 5.0
FIRST = 12
"""The number of messages that are due at once. When they have arrived, both processes have read their partitions."""
GOAL = Goal("at most", 15_000)
MOST_AGAIN = Goal("at most", 3_000)


def run(plan: Plan) -> list[Row]:
    pending, due = plan.size(PENDING), plan.size(DUE)
    lateness_ms = tuple(plan.run(outage(plan.kafka, pending, due)) for _ in range(plan.runs if plan.nightly else 1))
    what = f"Kafka: one of {PROCESSES} processes killed, {pending:,} messages pending: largest lateness"
    beside = f"{PARTITIONS} partitions; {due:,} messages due within {SPAN_S:g} s, each delivered once"
    rows = [Row("BK6", what, "ms", lateness_ms, GOAL, beside)]
    for name, how, goal in (("?instance=orders-0", "with `instance=`", MOST_AGAIN), ("", "without `instance=`", None)):
        what = f"Kafka: the only process killed and started again, {how}: lateness of a message due at the kill"
        waits_ms = tuple(plan.run(started_again(plan.kafka, name)) for _ in range(plan.runs))
        rows.append(Row("BK6", what, "ms", waits_ms, goal, f"{PARTITIONS} partitions"))
    return rows


async def outage(bootstrap: str, pending: int, due: int) -> float:
    """Kill a process while messages become due. Return the largest lateness, in ms."""
    async with topics(bootstrap, PARTITIONS) as (schedules, target):
        url = f"kafka://{bootstrap}/{schedules}"
        async with Scheduler(KafkaStore(url), dispatch=False) as producer:
            now = datetime.now(UTC)
            far = (message(i, target, now + timedelta(hours=1)) for i in range(FIRST + due, pending))
            await producer.schedule_many(far)
            with _processes(url) as processes:
                await producer.schedule_many(message(i, target, now) for i in range(FIRST))
                await _all_read(bootstrap, target)
                dues = [now] * FIRST + _dues(due)
                await producer.schedule_many(message(i, target, dues[i]) for i in range(FIRST, FIRST + due))
                due_ms = [round(each.timestamp() * 1000) for each in dues]
                async with arriving(bootstrap, target, due_ms) as arrived:
                    await asyncio.sleep(due_ms[FIRST] / 1000 + KILL_AFTER_S - time.time())
                    processes[0].kill()
                await delivered(bootstrap, target, FIRST + due)  # check that no further record came
        return max(lateness_ms for number, lateness_ms in arrived.items() if number >= FIRST)


async def started_again(bootstrap: str, name: str) -> float:
    """Kill the only process, and start it again. Return the lateness of a message that is due at the kill, in ms."""
    async with topics(bootstrap, PARTITIONS) as (schedules, target):
        url = f"kafka://{bootstrap}/{schedules}"
        async with Scheduler(KafkaStore(url), dispatch=False) as producer:
            now = datetime.now(UTC)
            with _processes(url + name, 1) as (first,):
                await producer.schedule_many(message(i, target, now) for i in range(FIRST))
                await _all_read(bootstrap, target)
                first.kill()
                first.join()
            killed = datetime.now(UTC)
            await producer.schedule_many([message(FIRST, target, killed)])
            dues_ms = [round(each.timestamp() * 1000) for each in [now] * FIRST + [killed]]
            with _processes(url + name, 1):
                async with arriving(bootstrap, target, dues_ms) as lateness_ms:
                    pass
    return lateness_ms[FIRST]


async def _all_read(bootstrap: str, target: str) -> None:
    partitions = {partition_of(key_of(f"order-{i}"), PARTITIONS) for i in range(FIRST)}
    check(len(partitions) == PARTITIONS, "the first messages are not in all partitions")
    await delivered(bootstrap, target, FIRST)


def _dues(n: int) -> list[datetime]:
    since = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=LEAD_S)
    return [since + timedelta(milliseconds=round(SPAN_S * 1000 * i / n)) for i in range(n)]


@contextmanager
def _processes(url: str, n: int = PROCESSES) -> Iterator[Sequence[SpawnProcess]]:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=dispatch, args=(url,)) for _ in range(n)]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def dispatch(url: str) -> None:
    """Move due messages until this process is killed."""
    asyncio.run(Scheduler(KafkaStore(url)).run())


BENCHMARK = Benchmark("BK6", "a process killed on Kafka", run, needs_kafka=True)
