"""BK1: the rate at which due messages of a Kafka store reach topics of the same cluster, exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec.structs import replace

from aiodelay import Message, Scheduler
from aiodelay.backends.kafka.client import Outgoing
from aiodelay.kafka import KafkaStore
from aiodelay.kafka.records import encode_end, java_partition, key_of, partition_of
from aiodelay.ports.clock import SystemClock

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
    raw_payload,
)
from .kafka_server import LINGER, Record, delivered, producing, topics

__all__ = ["BENCHMARK", "Waiting", "message"]

MESSAGES = 20_000
PARTITIONS = 3
BARE_BATCH = 500
AHEAD = timedelta(minutes=30)
GOAL = Goal("at least", 0.7)
POLL_S = 0.002

Send = Callable[[Any, Sequence[Outgoing]], Coroutine[None, None, None]]


class Waiting(SystemClock):
    """A clock that is behind until it catches up on request. Then all messages are due at once."""

    __slots__ = ("behind",)

    def __init__(self) -> None:
        self.behind = timedelta()

    def now_ms(self) -> int:
        """Return the time of this clock."""
        return super().now_ms() - self.behind // timedelta(milliseconds=1)

    def seconds_until(self, at_ms: int) -> float:
        """Return the seconds until this clock shows a time."""
        return super().seconds_until(at_ms) + self.behind.total_seconds()


def message(number: int, topic: str, at: datetime) -> Message:
    """Return the message with a number."""
    return Message(raw_payload(number), at=at, to=f"kafka:{topic}", key=b"%d" % number, id=f"order-{number}")


def run(plan: Plan) -> list[Row]:
    n = plan.size(MESSAGES)
    to_send = plan.run(dispatched(plan.kafka, n))
    sides = {
        "ours": lambda: plan.run(ours(plan.kafka, n)),
        "bare": lambda: plan.run(bare(plan.kafka, to_send, send)),
        "batches": lambda: plan.run(bare(plan.kafka, to_send, send_batches)),
    }
    times = in_turn(plan, sides)

    def row(what: str, limit: str, goal: Goal | None) -> Row:
        of = f"{per_message_us(times['ours'], n)} a message, bare {per_message_us(times[limit], n)}"
        return Row("BK1", what, "x bare speed", ratios(times[limit], times["ours"]), goal, of)

    of = f"Kafka -> Kafka, exactly once: {n:,} messages due at once, {PARTITIONS} partitions"
    return [
        row(f"{of}, bare side with `send`", "bare", GOAL),
        row(f"{of}, bare side with `send_batch`", "batches", GOAL),
    ]


# --- ours -------------------------------------------------------------------------------------------------


async def ours(bootstrap: str, n: int) -> float:
    """Measure our side, from the instant at which all messages are due until the store is empty."""
    async with topics(bootstrap, PARTITIONS) as (schedules, target):
        seconds = await _dispatch(bootstrap, schedules, target, n)
        records = await delivered(bootstrap, target, n)
        check_once_each((number_of(each.value) for each in records), n)
    return seconds


async def _dispatch(bootstrap: str, schedules: str, target: str, n: int) -> float:
    url, clock, at = f"kafka://{bootstrap}/{schedules}", Waiting(), datetime.now(UTC)
    clock.behind = AHEAD
    async with Scheduler(KafkaStore(url, clock=clock), dispatch=False) as producer:
        await producer.schedule_many(message(i, target, at) for i in range(n))
    store = KafkaStore(url, clock=clock)
    async with Scheduler(store):
        with Stopwatch() as watch:
            clock.behind = timedelta()
            store.assignment.waiters.wake()
            while any(  # noqa: ASYNC110 - there is no event for the end of the last message
                partition.index.table.entries for partition in store.partitions.values()
            ):
                await asyncio.sleep(POLL_S)
    return watch.seconds


async def dispatched(bootstrap: str, n: int) -> dict[int, list[tuple[Outgoing, Outgoing]]]:
    """Return the records that aiodelay writes, by partition of the schedules: each message, and its tombstone."""
    async with topics(bootstrap, PARTITIONS) as (schedules, target):
        await _dispatch(bootstrap, schedules, target, n)
        records = await delivered(bootstrap, target, n)
    found: dict[int, list[tuple[Outgoing, Outgoing]]] = {number: [] for number in range(PARTITIONS)}
    for each in records:
        found[_partition_of(each)].append(_both(each))
    return found


def _key_of(record: Record) -> bytes:
    return key_of(f"order-{number_of(record.value)}")


def _partition_of(record: Record) -> int:
    return partition_of(_key_of(record), PARTITIONS)


def _both(record: Record) -> tuple[Outgoing, Outgoing]:
    end = encode_end(_key_of(record), read_to=record.offset, outcome="delivered")
    moved = Outgoing("", record.key, record.value, list(record.headers))
    return moved, Outgoing("", *end, _partition_of(record))


# --- the bare limit ---------------------------------------------------------------------------------------


async def bare(bootstrap: str, to_send: dict[int, list[tuple[Outgoing, Outgoing]]], send: Send) -> float:
    """Measure the bare limit: a transactional producer for each partition of the schedules.

    Each transaction has 500 messages.
    """
    n = sum(len(each) for each in to_send.values())
    async with topics(bootstrap, PARTITIONS) as (schedules, target):
        batches = {
            number: [
                _addressed(both[at : at + BARE_BATCH], schedules, target) for at in range(0, len(both), BARE_BATCH)
            ]
            for number, both in to_send.items()
        }
        producers = [producing(bootstrap, transactional_id=f"{schedules}.{number}", **LINGER) for number in batches]
        async with producers[0] as first, producers[1] as second, producers[2] as third:
            for producer in (first, second, third):  # the first transaction also asks for metadata
                async with producer.transaction():
                    await producer.send(schedules, value=b"", key=b"barrier", partition=0)
            with Stopwatch() as watch:
                async with asyncio.TaskGroup() as tasks:
                    for producer, each in zip((first, second, third), batches.values(), strict=True):
                        tasks.create_task(_commit(producer, each, send))
        records = await delivered(bootstrap, target, n)
        check_once_each((number_of(each.value) for each in records), n)
    return watch.seconds


def _addressed(both: Sequence[tuple[Outgoing, Outgoing]], schedules: str, target: str) -> list[Outgoing]:
    return [each for moved, end in both for each in (replace(moved, topic=target), replace(end, topic=schedules))]


async def _commit(producer: Any, batches: Sequence[Sequence[Outgoing]], send: Send) -> None:  # noqa: ANN401 - aiokafka's
    for batch in batches:
        async with producer.transaction():
            await send(producer, batch)


async def send(producer: Any, batch: Sequence[Outgoing]) -> None:  # noqa: ANN401 - aiokafka's
    """Write with aiokafka's plain call."""
    for each in batch:
        await producer.send(each.topic, each.value, each.key, each.partition, headers=each.headers)


async def send_batches(producer: Any, batch: Sequence[Outgoing]) -> None:  # noqa: ANN401 - aiokafka's
    """Write in batches with one future each: the fastest call of aiokafka."""
    builders: dict[tuple[str, int], Any] = {}
    for each in batch:
        partition = java_partition(each.key or b"", PARTITIONS) if each.partition is None else each.partition
        builder = builders.get((each.topic, partition))
        if builder is None:
            builder = builders[each.topic, partition] = producer.create_batch()
        builder.append(key=each.key, value=each.value, headers=each.headers, timestamp=None)
    for (topic, partition), builder in builders.items():
        await producer.send_batch(builder, topic, partition=partition)


BENCHMARK = Benchmark("BK1", "exactly once from Kafka to Kafka", run, needs_kafka=True)
