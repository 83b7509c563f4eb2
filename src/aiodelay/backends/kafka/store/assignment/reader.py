"""`Reader`: reads committed records of all owned partitions with one consumer, and passes them to the partitions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from aiokafka import TopicPartition
from aiokafka.errors import OffsetOutOfRangeError

from aiodelay.backends.kafka.client import UNAVAILABLE, Consumer, consumer_of, log_failure, reason_of, stop
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.store.partition import Partition
from aiodelay.backends.kafka.topics.group import METADATA_MS
from aiodelay.core.backoff import pause_s

__all__ = ["Reader"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

WAIT_MS = 200
MOST_RECORDS = 2_000
FETCH_BYTES = 8 << 20


class Reader:
    """Gives records to partitions. Reading a partition continues where its index stopped.

    Args:
        cluster: The cluster to read from.
    """

    why: str = ""
    """The reason why nothing can be read; "" while reading works."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._partitions: Mapping[TopicPartition, Partition] = {}
        self._changed = asyncio.Event()
        self._consumer: Consumer | None = None
        self._failures = 0

    def skip(self, place: TopicPartition, offset: int) -> None:
        """Go on reading a partition at an offset, because its index already knows all records before that offset."""
        if self._consumer is not None and place in self._consumer.assignment():
            self._consumer.seek(place, offset)

    def assign(self, partitions: Mapping[TopicPartition, Partition]) -> None:
        """Read exactly these partitions from now on."""
        self._partitions = partitions
        self._changed.set()

    async def run(self) -> None:
        """Read until cancelled. After an error, wait and read again."""
        while True:
            try:
                await self._read_on()
            except Exception as error:  # noqa: BLE001 - as in `SessionRunner.run`
                self._failures += 1
                self.why = reason_of(error, "Read")
                log_failure(log, f"reading {self._cluster.name} fails", self.why, error, UNAVAILABLE)
            await asyncio.sleep(pause_s(self._failures))

    async def _read_on(self) -> None:
        consumer = consumer_of(
            self._cluster,
            metadata_max_age_ms=METADATA_MS,
            fetch_max_bytes=FETCH_BYTES,
            max_partition_fetch_bytes=FETCH_BYTES,
        )
        try:
            await consumer.start()
            self._consumer = consumer
            while True:
                self._changed.clear()  # before reading the assignment: a change from here on ends the wait below
                partitions = self._partitions
                self._seek(consumer, partitions)
                while partitions and partitions is self._partitions:
                    await self._read_some(consumer, partitions)
                    self._note_partitions(consumer, partitions)
                await self._changed.wait()
        finally:
            self._consumer = None
            await stop(consumer)

    def _note_partitions(self, consumer: Consumer, partitions: Mapping[TopicPartition, Partition]) -> None:
        for place, partition in partitions.items():
            found = consumer.partitions_for_topic(place.topic)
            if found is not None:
                partition.has_partitions(len(found))
            end, high = consumer.last_stable_offset(place), consumer.highwater(place)
            is_open = end is not None and high is not None and end < high
            partition.open_at(end if is_open else None, asyncio.get_running_loop().time())

    def _seek(self, consumer: Consumer, partitions: Mapping[TopicPartition, Partition]) -> None:
        """Continue each partition where its index stopped. Ask no broker: a partition may have no leader to answer."""
        consumer.assign(list(partitions))
        now = asyncio.get_running_loop().time()
        for place, partition in partitions.items():
            partition.read_at(now, is_whole=False)
            consumer.seek(place, partition.index.state.read_to)

    async def _read_some(self, consumer: Consumer, partitions: Mapping[TopicPartition, Partition]) -> None:
        try:
            found = await consumer.getmany(timeout_ms=WAIT_MS, max_records=MOST_RECORDS)
        except OffsetOutOfRangeError as error:
            await self._leave_range(consumer, partitions, error.args[0])
            return
        now = asyncio.get_running_loop().time()
        for place, partition in partitions.items():
            read_to = await consumer.position(place)
            is_whole = place not in found or read_to >= (consumer.last_stable_offset(place) or 0)
            if not partition.read_at(now, is_whole=is_whole):
                consumer.seek(place, partition.index.state.read_to)
                continue
            batch = found.get(place, ())
            if batch or read_to > partition.index.state.read_to:
                partition.take_in(batch, read_to)
            partition.keep(now)
        self._failures, self.why = 0, ""

    async def _leave_range(
        self, consumer: Consumer, partitions: Mapping[TopicPartition, Partition], offsets: Mapping[TopicPartition, int]
    ) -> None:
        """Go on after a broker has answered that partitions have no records at these offsets.

        If the first records of a partition were deleted, go on with the first record that is left. If the last records
        are lost, stop reading the partition: fetches that fail again and again would hold up the other partitions.
        """
        begins, ends = await consumer.beginning_offsets(offsets), await consumer.end_offsets(offsets)
        for place, offset in offsets.items():
            if offset < begins[place]:
                name = partitions[place].index.name
                log.warning("%s: records were deleted; reading goes on at %d, not %d", name, begins[place], offset)
                consumer.seek(place, begins[place])
            else:
                consumer.pause(place)
                partitions[place].is_cut_off(ends[place])
