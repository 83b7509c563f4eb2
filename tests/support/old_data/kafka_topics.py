"""Save Kafka topics as lines of JSON, and write them again with each record at its old offset.

The records of an owner name offsets, so the offsets must not change. An offset without a record belongs to the marker
of a transaction, or to an aborted transaction. The loader writes a transaction there again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from uuid import uuid4

import msgspec
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka import Message as Read
from msgspec import Struct

from tests.support.topics import new_producer
from tests.support.waiting import PATIENCE_S, until_sync

__all__ = ["Partition", "Stands", "load", "read_lines", "read_topic", "written"]


class Stands(Struct, frozen=True, omit_defaults=True):
    """A record of a partition."""

    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


class Partition(Struct, frozen=True):
    """A partition: its records by offset, and the offset after its last record."""

    number: int
    end: int
    records: list[Stands]


def read_topic(bootstrap: str, topic: str) -> list[Partition]:
    """Return all committed records of a topic."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": uuid4().hex, "enable.partition.eof": True})
    try:
        numbers = sorted(consumer.list_topics(topic, PATIENCE_S).topics[topic].partitions)
        return [_read(consumer, topic, number) for number in numbers]
    finally:
        consumer.close()


def _read(consumer: Consumer, topic: str, number: int) -> Partition:
    place = TopicPartition(topic, number, 0)
    _, end = consumer.get_watermark_offsets(place, PATIENCE_S)
    consumer.assign([place])
    records: list[Stands] = []
    while (read := consumer.poll(PATIENCE_S)) is not None and read.error() is None:
        records.append(_stands(read))
    assert read is not None, f"{topic}/{number} was not read to its end"
    return Partition(number, end, records)


def _stands(read: Read) -> Stands:
    partition, offset, (_, timestamp) = read.partition(), read.offset(), read.timestamp()
    assert partition is not None
    assert offset is not None
    headers: Any = tuple(read.headers() or ())
    return Stands(partition, offset, timestamp, read.key(), read.value(), headers)


def written(partitions: Iterable[Partition]) -> bytes:
    """Return a topic as lines: for each partition, a line for the partition and then a line for each of its records."""
    lines: list[Struct | dict[str, int]] = []
    for each in partitions:
        lines += [{"partition": each.number, "end": each.end}, *each.records]
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def read_lines(lines: bytes) -> list[Partition]:
    """Return the topic that is saved in lines."""
    partitions: list[Partition] = []
    for line in lines.splitlines():
        fields = msgspec.json.decode(line)
        if "end" in fields:
            partitions.append(Partition(fields["partition"], fields["end"], []))
        else:
            partitions[-1].records.append(msgspec.convert(fields, Stands))
    return partitions


def load(bootstrap: str, topic: str, partitions: Iterable[Partition]) -> None:
    """Write the records into a topic, which must exist and be empty."""
    for each in partitions:
        _Loading(bootstrap, topic, each.number).load(each)


class _Loading:
    """Writes one partition."""

    def __init__(self, bootstrap: str, topic: str, number: int) -> None:
        options: dict[str, str | int] = {"linger.ms": 0, "log_level": 0}
        self._topic, self._number = topic, number
        self._plain = new_producer(bootstrap, options)
        self._bound = new_producer(bootstrap, {**options, "transactional.id": uuid4().hex})
        self._bound.init_transactions(PATIENCE_S)
        self._reader = Consumer({"bootstrap.servers": bootstrap, "group.id": uuid4().hex})

    def load(self, partition: Partition) -> None:
        for records, gap in _runs(partition):
            if gap in (0, 2):
                self._wait_for(records[0].offset)
                self._write(self._plain, records)
                assert self._plain.flush(PATIENCE_S) == 0
            else:
                self._bound.begin_transaction()
                self._write(self._bound, records)
                self._bound.commit_transaction(PATIENCE_S)
            self._fill(gap if gap in (0, 2) else gap - 1)
        self._wait_for(partition.end)
        self._reader.close()

    def _wait_for(self, end: int) -> None:
        """Wait for the marker of a transaction, which is written after the transaction is committed or aborted."""
        place = TopicPartition(self._topic, self._number)
        until_sync(lambda: self._reader.get_watermark_offsets(place, PATIENCE_S)[1] == end, f"the end is at {end}")

    def _write(self, producer: Producer, records: Sequence[Stands]) -> None:
        for each in records:
            producer.produce(
                self._topic,
                each.value,
                each.key,
                self._number,
                on_delivery=_at(each.offset),
                timestamp=each.timestamp,
                headers=list(each.headers),
            )

    def _fill(self, offsets: int) -> None:
        """Fill two or more offsets with an aborted transaction: records that nobody reads, and a marker."""
        if not offsets:
            return
        self._bound.begin_transaction()
        for _ in range(offsets - 1):
            self._bound.produce(self._topic, b"", b"", self._number)
        assert self._bound.flush(PATIENCE_S) == 0
        self._bound.abort_transaction(PATIENCE_S)


def _runs(partition: Partition) -> Iterator[tuple[list[Stands], int]]:
    """Yield consecutive records, each group with the number of offsets without a record after it."""
    run: list[Stands] = []
    ends = [*[each.offset for each in partition.records[1:]], partition.end]
    for record, following in zip(partition.records, ends, strict=True):
        run.append(record)
        if following > record.offset + 1:
            yield run, following - record.offset - 1
            run = []
    if run:
        yield run, 0


def _at(offset: int) -> Any:  # noqa: ANN401 - a callback of librdkafka
    def check(error: object, message: Read) -> None:
        assert error is None, error
        assert message.offset() == offset, f"a record stands at {message.offset()}, not {offset}"

    return check
