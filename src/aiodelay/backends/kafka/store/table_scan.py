"""`Scanner`: reads whole schedules topics without owning partitions, by the same rules as an owner.

A scan joins no group and writes nothing. A part of a scan is one partition, up to its end at the time when the parts
were made. While a part is read, all its live and ended messages are in memory. The tracebacks of dead letters are in
memory only for a scan that asks for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from aiokafka import TopicPartition
from msgspec import Struct

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.pending.pending_index import PendingIndex
from aiodelay.backends.kafka.pending.pending_messages import pending_messages
from aiodelay.backends.kafka.pending.placement import Placement
from aiodelay.backends.kafka.records import Read
from aiodelay.backends.kafka.topics.observing import answering, next_records, observer
from aiodelay.backends.kafka.topics.topic import schedules_partitions
from aiodelay.core.table_scan import (
    Columns,
    Ended,
    Scan,
    batched,
    columns_of_ended,
    columns_of_letters,
    columns_of_messages,
)
from aiodelay.core.values import DeadLetter, Snapshot
from aiodelay.ports.clock import Clock

__all__ = ["Part", "Scanner"]

_TRACEBACK = records.HEADER["traceback"]


class Part(Struct, frozen=True):
    """A partition up to an offset, with the number of partitions of its topic."""

    topic: str
    number: int
    partitions: int
    end: int


class Scanner:
    """Reads schedules topics.

    Args:
        cluster: The cluster of the topics.
        topics: The names of the topics.
        clock: Decides which messages are overdue.
    """

    def __init__(self, cluster: Cluster, topics: Sequence[str], clock: Clock) -> None:
        self._cluster, self._topics, self._clock = cluster, topics, clock

    def parts(self) -> list[Part]:
        """Return a part for each partition, up to the current end of the partition; see `ports.Scannable`."""
        return asyncio.run(self._parts())

    async def _parts(self) -> list[Part]:
        counts = await schedules_partitions(self._cluster, self._topics)
        places = [TopicPartition(topic, number) for topic, n in counts.items() for number in range(n)]
        async with observer(self._cluster) as consumer:
            with answering(self._cluster):
                ends = await consumer.end_offsets(places)
        return [Part(place.topic, place.partition, counts[place.topic], ends[place]) for place in places]

    def read(self, scan: Scan, part: Part) -> Iterator[Columns]:
        """Read a partition, then yield its rows; see `ports.Scannable`."""
        index, ends = asyncio.run(self._read(scan, part))
        ids = None if scan.ids is None else frozenset(scan.ids)
        now = self._clock.now_ms()
        if scan.table == "done":
            for ended in batched((each, 1) for each in _ended(index, ends, now) if ids is None or each.id in ids):
                yield columns_of_ended(ended, scan.columns)
        elif scan.table == "dead":
            for letters in batched(_sized(scan, index.table.letters)):
                yield columns_of_letters(letters, scan.columns)
        else:
            for snapshots in batched(_sized(scan, pending_messages(index, now))):
                yield columns_of_messages(snapshots, scan.columns)

    async def _read(self, scan: Scan, part: Part) -> tuple[PendingIndex, set[bytes]]:
        """Return the partition's index. For the table of ended messages, also return the keys that had a tombstone."""
        placement = Placement(f"{part.topic}/{part.number}", part.number, part.partitions, self._topics)
        index = PendingIndex(clock=self._clock, placement=placement, claims=count(1))
        place, ends = TopicPartition(part.topic, part.number), set[bytes]()
        reads_tracebacks = "traceback" in scan.columns
        async with observer(self._cluster) as consumer:
            consumer.assign([place])
            with answering(self._cluster):
                at = (await consumer.beginning_offsets([place]))[place]
            consumer.seek(place, at)
            while at < part.end:
                found, at = await next_records(consumer, place, at, self._cluster)
                for each in found:
                    if each.offset < part.end:
                        headers = each.headers if reads_tracebacks else _without_traceback(each.key, each.headers)
                        index.reader.read(Read(each.offset, each.timestamp, each.key, each.value, headers))
                        if scan.table == "done" and each.value is None and each.key is not None:
                            ends.add(each.key)
        return index, ends


def _sized(scan: Scan, found: Iterable[Snapshot | DeadLetter]) -> Iterator[tuple[Any, int]]:
    """Yield the rows that a scan takes, each with its size in bytes."""
    ids = None if scan.ids is None else frozenset(scan.ids)
    for each in found:
        record = each.record
        if (ids is None or record.id in ids) and scan.takes(record.envelope.lane, record.due_ms):
            yield each, record.envelope.size + (_text_size(each) if isinstance(each, DeadLetter) else 0)


def _text_size(letter: DeadLetter) -> int:
    return sum(map(len, (*letter.errors, letter.traceback or "")))


def _without_traceback(key: bytes | None, headers: records.Headers) -> records.Headers:
    """Return a record's headers without the traceback, which only a dead letter has."""
    if key is None or not key.startswith(records.DEAD):
        return headers
    return [(name, value) for name, value in headers if name != _TRACEBACK]


def _ended(index: PendingIndex, ends: Iterable[bytes], now: int) -> Iterator[Ended]:
    """Yield the messages that have a tombstone and are not pending, with a version if the tombstone has it."""
    versions = {each: (version, until_ms) for each, version, until_ms in index.table.answers.versions.items(now)}
    pending = {each.record.id for each in pending_messages(index, now)}
    for key in filter(records.is_plain, ends):
        message_id = records.id_of(key)
        if message_id not in pending:
            version, until_ms = versions.get(message_id, (None, None))
            yield Ended(message_id, version, until_ms)
