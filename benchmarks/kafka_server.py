"""The broker of the BK benchmarks, with topics, producers and readers for their bare sides and checks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeAlias

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from aiodelay.backends.kafka.topics.topic import SETTINGS
from tests.support import kafka

from .harness import check

__all__ = ["LINGER", "Record", "delivered", "producing", "running_broker", "topics"]

Record: TypeAlias = Any
"""aiokafka's `ConsumerRecord`."""
LINGER = {"linger_ms": 5, "max_batch_size": 256 << 10}
"""The settings of the bare producers."""
READ_MS = 30_000


@contextmanager
def running_broker(given: str | None) -> Iterator[str]:
    """Yield the address of the given broker, or of a broker found in the same way as in the tests."""
    broker = kafka.Given(given) if given else kafka.find()
    try:
        yield broker.bootstrap
    finally:
        broker.stop()


@asynccontextmanager
async def topics(bootstrap: str, partitions: int) -> AsyncIterator[tuple[str, str]]:
    """Create a topic of schedules and a target topic, and delete them after the block."""
    settings = {name.replace(".", "_"): value for name, value in SETTINGS.items()}
    schedules = await kafka.create_topic(bootstrap, kafka.new_name("schedules"), partitions, **settings)
    target = await kafka.create_topic(bootstrap, kafka.new_name("target"), partitions)
    try:
        async with AIOKafkaConsumer(bootstrap_servers=bootstrap) as consumer:
            places = [TopicPartition(name, number) for name in (schedules, target) for number in range(partitions)]
            await consumer.end_offsets(places)  # each partition has its leader
        yield schedules, target
    finally:
        admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
        await admin.start()
        await admin.delete_topics([schedules, target])
        await admin.close()


@asynccontextmanager
async def producing(bootstrap: str, **options: Any) -> AsyncIterator[AIOKafkaProducer]:  # noqa: ANN401 - aiokafka's
    """Open a plain producer that loses and duplicates no record."""
    options = {"acks": "all", "enable_idempotence": True, **options}
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, **options) as producer:
        yield producer


async def delivered(bootstrap: str, topic: str, n: int) -> Sequence[Record]:
    """Read all records of a topic with `read_committed`, and check that there are n."""
    found: list[Record] = []
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    async with consumer:
        ends = await consumer.end_offsets(consumer.assignment())
        while len(found) < n or any([await consumer.position(place) < end for place, end in ends.items()]):
            read = await consumer.getmany(timeout_ms=READ_MS)  # the last commits may not be visible before
            check(bool(read) or len(found) >= n, f"{len(found)} records were delivered, not {n}")
            found += [each for batch in read.values() for each in batch]
    check(len(found) == n, f"{len(found)} records were delivered, not {n}")
    return found
