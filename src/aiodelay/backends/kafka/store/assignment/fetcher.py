"""`Fetcher`: reads single records of a partition again. Of these records, the index has kept only the offsets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiokafka import TopicPartition

from aiodelay.backends.kafka.client import Consumer, consumer_of, stop
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.records import Read

__all__ = ["Fetcher"]

WAIT_MS = 500
MOST_RECORDS = 200
FETCH_BYTES = 1 << 16
FAR_RECORDS = 200
"""If the next offset is this many records ahead, seeking it costs less than reading the records in between."""


class Fetcher:
    """Reads with one consumer for all partitions, made on first use.

    Args:
        cluster: The cluster to read from.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._timeout_s = cluster, cluster.timeout_ms / 1000
        self._consumer: Consumer | None = None
        self._lock = asyncio.Lock()

    async def fetch(self, place: TopicPartition, offsets: Sequence[int]) -> list[Read]:
        """Return the records at these offsets that still exist, in the order of their offsets.

        Raises:
            KafkaError, TimeoutError, OSError: The records cannot be read, or reading made no progress within the
                store's timeout.
        """
        async with self._lock:
            try:
                async with asyncio.timeout(self._timeout_s) as limit:
                    return await self._fetch(place, sorted(offsets), limit)
            except BaseException:
                await self._close()
                raise

    async def close(self) -> None:
        """Disconnect."""
        async with self._lock:
            await self._close()

    async def _fetch(self, place: TopicPartition, offsets: Sequence[int], limit: asyncio.Timeout) -> list[Read]:
        now_s = asyncio.get_running_loop().time
        consumer = await self._opened()
        (first,) = (await consumer.beginning_offsets([place])).values()
        (end,) = (await consumer.end_offsets([place])).values()
        wanted = {offset for offset in offsets if first <= offset < end}
        left = sorted(wanted, reverse=True)
        found: list[Read] = []
        at = -FAR_RECORDS
        if left:
            consumer.assign([place])  # a seek follows before the consumer asks for a position of its own
        while left:
            if not 0 <= left[-1] - at < FAR_RECORDS:
                at = left[-1]
                consumer.seek(place, at)
            read = await consumer.getmany(place, timeout_ms=WAIT_MS, max_records=MOST_RECORDS)
            found += (
                Read(each.offset, each.timestamp, each.key, each.value, each.headers)
                for each in read.get(place, ())
                if each.offset in wanted
            )
            if (position := await consumer.position(place)) > at:
                limit.reschedule(now_s() + self._timeout_s)
            at = position
            while left and left[-1] < at:
                left.pop()
        if wanted:
            consumer.pause(place)  # otherwise it reads ahead, which delays later answers on its connection (K24)
        return found

    async def _opened(self) -> Consumer:
        if self._consumer is None:
            options = {"max_partition_fetch_bytes": FETCH_BYTES, "fetch_max_wait_ms": 0}
            self._consumer = consumer_of(self._cluster, **options)
            await self._consumer.start()
        return self._consumer

    async def _close(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop(consumer)
