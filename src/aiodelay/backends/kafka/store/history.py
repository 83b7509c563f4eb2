"""`read_history`: lists entries of the history topic, to which owners write the journal of the store."""

from __future__ import annotations

import asyncio
import heapq

from aiokafka.errors import KafkaError

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client import Consumer, consumer_of, reason_of, stop
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.topics.remedies import remedied
from aiodelay.core.transitions import base_id
from aiodelay.core.values import JournalEntry
from aiodelay.errors import StoreUnavailableError

__all__ = ["read_history"]


async def read_history(
    cluster: Cluster, topic: str, *, message_id: str | None, after: int, limit: int
) -> list[JournalEntry]:
    """List entries of a history topic. For one message, only the partition of its id is read.

    A transaction writes the entries together with the changes that they describe. Kafka deletes old entries by the
    topic's limits of age and size.

    Raises:
        StoreUnavailableError: The cluster does not answer.
    """
    consumer = consumer_of(cluster, topic, auto_offset_reset="earliest")
    try:
        async with asyncio.timeout(cluster.timeout_ms / 1000):
            await consumer.start()
            return await _entries(consumer, message_id, after, limit)
    except (KafkaError, TimeoutError, OSError) as error:
        raise StoreUnavailableError(cluster.name, remedied(reason_of(error, "Read"), cluster)) from error
    finally:
        await stop(consumer)


async def _entries(consumer: Consumer, message_id: str | None, after: int, limit: int) -> list[JournalEntry]:
    places = sorted(consumer.assignment())
    consumer.pause(*places)
    n = len(places)
    if message_id is not None:
        places = [places[records.java_partition(records.key_of(base_id(message_id)), n)]]
    ends = await consumer.end_offsets(places)
    begins = await consumer.beginning_offsets(places)
    found: list[JournalEntry] = []
    for place in places:
        consumer.seek(place, max(begins[place], (after - 1 - place.partition) // n + 1))
        consumer.resume(place)
        here: list[JournalEntry] = []
        while len(here) < limit and await consumer.position(place) < ends[place]:
            for read in (await consumer.getmany(place, timeout_ms=100)).get(place, ()):
                entry = records.decode_history(read.value, read.offset * n + place.partition + 1)
                if entry is not None and message_id in (None, entry.id):
                    here.append(entry)
        consumer.pause(place)
        found += here[:limit]
    return heapq.nsmallest(limit, found, key=lambda entry: entry.number)
