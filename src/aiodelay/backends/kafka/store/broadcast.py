"""`write_everywhere`: writes one record to every partition, such as a feature or the pause of a lane."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiokafka import TopicPartition

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client import UNAVAILABLE, Outgoing, reason_of
from aiodelay.errors import StoreUnavailableError

from .store_parts import StoreParts

__all__ = ["all_places", "write_everywhere"]


def all_places(parts: StoreParts) -> list[TopicPartition]:
    """Return all partitions of the store's topics."""
    return [TopicPartition(topic, i) for topic, n in parts.assignment.counts.items() for i in range(n)]


async def write_everywhere(parts: StoreParts, wire: records.Wire, places: Sequence[TopicPartition], what: str) -> None:
    """Write a record to partitions, and wait until this process has read it in the partitions that it owns.

    Args:
        parts: The parts of the store.
        wire: The record.
        places: The partitions.
        what: A noun for the record in the error text, such as "the pause".

    Raises:
        StoreUnavailableError: Not all partitions are known to have the record. Some or all of them may have it.
    """
    outgoing = [Outgoing(place.topic, *wire, place.partition) for place in places]
    try:
        async with asyncio.timeout(parts.cluster.timeout_ms / 1000):
            for place, each in zip(places, await parts.writer.write(outgoing), strict=True):
                if each.error is not None:
                    raise each.error
                if (partition := parts.assignment.partitions.get(place)) is not None:
                    await partition.until_read(each.offset)
    except UNAVAILABLE as error:
        problem = f"{what} may be missing in some or all partitions: {reason_of(error)}"
        raise StoreUnavailableError(parts.cluster.name, problem) from error
