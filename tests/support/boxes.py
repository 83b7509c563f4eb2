"""Use a delay box from outside, with confluent-kafka only: write requests and read the delivered messages."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from confluent_kafka import Consumer, Message, Producer, TopicPartition

from tests.support.topics import new_producer
from tests.support.waiting import until_sync

__all__ = ["Out", "headers_of", "request", "send"]

PATIENCE_S = 90.0


def request(topic: str, message: object, countdown: float | None = None, **fields: Any) -> bytes:  # noqa: ANN401 - JSON
    """Return the JSON of a request."""
    given = {} if countdown is None else {"countdown": countdown}
    return json.dumps({"topic": topic, "message": message, **given, **fields}).encode()


def send(
    bootstrap: str,
    topic: str,
    values: Sequence[bytes | None],
    *,
    headers: Mapping[str, str | bytes | None] | None = None,
    key: bytes | None = None,
    partition: int = -1,
    timestamp_ms: int = 0,
    producer: Producer | None = None,
) -> None:
    """Write records in order, and wait until they are stored. Without `producer`, use a new producer."""
    if producer is None:
        producer = new_producer(bootstrap, {"linger.ms": 5})
    given = dict(headers or {})
    for value in values:
        producer.produce(topic, value, key, partition, timestamp=timestamp_ms, headers=given)
    assert producer.flush(PATIENCE_S) == 0


def headers_of(record: Message) -> dict[str, bytes | None]:
    """Return the headers of a record."""
    return dict(cast("list[tuple[str, bytes | None]]", record.headers() or []))


class Out:
    """A reader of all records of a topic, from its beginning.

    Args:
        bootstrap: The address of the cluster.
        topic: The name of the topic.
        read: `committed`, or `uncommitted` to read the records of open and aborted transactions, too.
    """

    def __init__(self, bootstrap: str, topic: str, *, read: str = "uncommitted") -> None:
        options = {"bootstrap.servers": bootstrap, "group.id": "out", "enable.auto.commit": False}
        self._consumer = Consumer(options | {"isolation.level": f"read_{read}", "auto.offset.reset": "earliest"})
        partitions = until_sync(lambda: self._partitions(topic), f"the broker knows {topic}")
        self._consumer.assign([TopicPartition(topic, n, 0) for n in partitions])
        self.records: list[Message] = []

    def _partitions(self, topic: str) -> Collection[int]:
        return list(self._consumer.list_topics(topic, timeout=PATIENCE_S).topics[topic].partitions)

    async def until(self, n: int, timeout_s: float = PATIENCE_S) -> list[Message]:
        """Wait for at least `n` records. Return all records."""
        await asyncio.to_thread(self._read, lambda: len(self.records) >= n, timeout_s)
        assert len(self.records) >= n, f"{len(self.records)} of {n} came out: {self.values[-10:]}"
        return self.records

    async def until_different(self, n: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait for at least `n` different values."""
        await asyncio.to_thread(self._read, lambda: len(self.records) >= n and len(set(self.values)) >= n, timeout_s)
        assert len(set(self.values)) >= n, f"{len(set(self.values))} of {n} came out: {self.values[-10:]}"

    async def quiet(self, for_s: float = 1.5) -> list[Message]:
        """Wait until no record has come for `for_s` seconds. Return all records."""
        before = -1
        while before < len(self.records):
            before = len(self.records)
            await asyncio.to_thread(self._read, lambda n=before: len(self.records) > n, for_s)
        return self.records

    def _read(self, is_enough: Any, timeout_s: float) -> None:  # noqa: ANN401 - a predicate
        ends = time.monotonic() + timeout_s
        while not is_enough() and time.monotonic() < ends:
            for record in self._consumer.consume(1000, 0.05):
                assert record.error() is None, record.error()
                self.records.append(record)

    @property
    def values(self) -> list[bytes]:
        """The values of the records so far."""
        return [record.value() or b"" for record in self.records]

    def close(self) -> None:
        """Disconnect."""
        self._consumer.close()
