"""`KafkaJournalReader`: reads a topic, such as the history topic, from any offset, without opening a store.

The number of an entry is its offset, and a part of the journal is a partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from aiokafka import TopicPartition

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client import Consumer
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.topics.observing import answering, next_records, observer
from aiodelay.backends.kafka.topics.topic import history_partitions
from aiodelay.core.values import JournalEntry

__all__ = ["KafkaJournalReader", "open_journal"]


class KafkaJournalReader:
    """The port `JournalReader` over a topic, with a part for each partition.

    Not every offset has an entry: where a transaction ends, Kafka puts a marker at the offset.

    Args:
        cluster: The cluster of the topic.
        topic: The history topic, or another topic.
        consumer: A started consumer without a topic.
    """

    def __init__(self, cluster: Cluster, topic: str, consumer: Consumer) -> None:
        self._cluster, self._topic, self._consumer = cluster, topic, consumer

    async def spans(self) -> Mapping[int, range]:
        """Return the offsets that can be read in each partition, up to the first open transaction."""
        n = await history_partitions(self._cluster, self._topic)
        with answering(self._cluster):
            return await self._spans(range(n))

    async def entries(
        self, part: int, span: range, trimmed: Callable[[range], object]
    ) -> AsyncIterator[Sequence[JournalEntry]]:
        """Yield the journal entries of a partition."""
        async with aclosing(self.records(part, span, trimmed)) as batches:
            async for found in batches:
                entries = [records.decode_history(each.value, each.offset) for each in found]
                yield [entry for entry in entries if entry is not None]

    async def records(
        self, part: int, span: range, trimmed: Callable[[range], object]
    ) -> AsyncGenerator[Sequence[Any]]:
        """Yield all records of a partition, as aiokafka returns them."""
        place = TopicPartition(self._topic, part)
        with answering(self._cluster):
            kept = (await self._spans([part]))[part]
        first, stop_at = max(span.start, kept.start), min(span.stop, kept.stop)
        if first > span.start:
            trimmed(range(span.start, min(first, span.stop)))
        if stop_at < span.stop:
            trimmed(range(max(stop_at, span.start), span.stop))
        if first >= stop_at:
            return
        self._consumer.assign([place])
        self._consumer.seek(place, first)
        at = first
        while at < stop_at:
            found, at = await next_records(self._consumer, place, at, self._cluster)
            yield [each for each in found if each.offset < stop_at]

    async def _spans(self, parts: Sequence[int]) -> dict[int, range]:
        places = [TopicPartition(self._topic, part) for part in parts]
        async with asyncio.timeout(self._cluster.timeout_ms / 1000):
            begins = await self._consumer.beginning_offsets(places)
            ends = await self._consumer.end_offsets(places)
        return {place.partition: range(begins[place], max(begins[place], ends[place])) for place in places}


@asynccontextmanager
async def open_journal(cluster: Cluster, topic: str) -> AsyncGenerator[KafkaJournalReader]:
    """Connect to the cluster of a topic.

    Raises:
        StoreUnavailableError: The cluster does not answer.
    """
    async with observer(cluster) as consumer:
        yield KafkaJournalReader(cluster, topic, consumer)
