"""Reading a topic from any place, of no group: started, read on, stopped, and what a silent cluster comes to."""

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
    """Have a cluster that does not answer told as what it is.

    Raises:
        StoreUnavailableError: It does not answer.
    """
    try:
        yield
    except UNAVAILABLE as error:
        raise StoreUnavailableError(cluster.name, reason_of(error, "Read")) from error


@asynccontextmanager
async def observer(cluster: Cluster) -> AsyncGenerator[Consumer]:
    """Have a consumer of no topic yet.

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
    """Return a partition's next records, none where only marks of transactions stand, and where to go on, beyond `at`.

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
