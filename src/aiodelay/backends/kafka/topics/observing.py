"""Functions that read a topic from any offset, without a group. They map errors to `StoreUnavailableError`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiokafka import TopicPartition

from aiodelay.backends.kafka.client import UNAVAILABLE, Consumer, consumer_of, reason_of, stop
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.errors import StoreUnavailableError

__all__ = ["answering", "next_records", "observer"]

WAIT_MS = 200
MOST_RECORDS = 5_000


@contextmanager
def answering(cluster: Cluster) -> Iterator[None]:
    """Map the client's errors to `StoreUnavailableError`.

    Raises:
        StoreUnavailableError: The cluster does not answer.
    """
    try:
        yield
    except UNAVAILABLE as error:
        raise StoreUnavailableError(cluster.name, reason_of(error, "Read")) from error


@asynccontextmanager
async def observer(cluster: Cluster) -> AsyncGenerator[Consumer]:
    """Yield a started consumer that reads no topic yet.

    Raises:
        StoreUnavailableError: The cluster does not answer.
    """
    consumer = consumer_of(cluster)
    try:
        with answering(cluster):
            async with asyncio.timeout(cluster.timeout_ms / 1000):
                await consumer.start()
        yield consumer
    finally:
        await stop(consumer)


async def next_records(
    consumer: Consumer, place: TopicPartition, at: int, cluster: Cluster
) -> tuple[Sequence[Any], int]:
    """Return a partition's next records, and the offset to go on from, which is beyond `at`.

    There may be no records, because markers of transactions also take offsets.

    Raises:
        StoreUnavailableError: The cluster does not answer.
    """
    with answering(cluster):
        async with asyncio.timeout(cluster.timeout_ms / 1000):
            while True:
                found = await consumer.getmany(place, timeout_ms=WAIT_MS, max_records=MOST_RECORDS)
                position: int = await consumer.position(place)
                if position > at:
                    return found.get(place, ()), position
