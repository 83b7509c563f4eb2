"""`to="kafka:<topic>"`: records in topics, from any store, at least once."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Self

from aiokafka.errors import (
    InvalidTopicError,
    KafkaConnectionError,
    KafkaError,
    MessageSizeTooLargeError,
    OutOfOrderSequenceNumber,
    PolicyViolationError,
    RecordListTooLargeError,
    UnknownTopicOrPartitionError,
)

from aiodelay.clock import Clock, SystemClock
from aiodelay.errors import ConfigurationError, SinkUnavailableError, TargetError, shortened
from aiodelay.model import Delivery, Demand, Failed, SendOutcome, Sent
from aiodelay.urls import UrlOptions

from .client import Outgoing, Producer, Written, reason_of
from .options import Cluster, read_cluster
from .records import SINK, delivered

__all__ = ["KafkaSink", "check_topic", "open_sink"]

_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_TOO_LARGE = (MessageSizeTooLargeError, RecordListTooLargeError)
_MOST_REPEATS = 20
_FINAL = (*_TOO_LARGE, PolicyViolationError, InvalidTopicError)


def check_topic(topic: str, field: str = "topic in to") -> str:
    """Refuse what cannot be a topic, and Kafka's own.

    Raises:
        TargetError: Says what is allowed.
    """
    if not _TOPIC.fullmatch(topic) or topic in (".", "..") or topic.startswith("__"):
        raise TargetError(
            field, shortened(topic), "1 to 249 of A-Z a-z 0-9 . _ -, not '.', '..' or beginning with '__'"
        )
    return topic


class KafkaSink:
    """Takes messages into topics: key, payload and headers as scheduled, by Java's partitioner, `acks=all`, idempotent.

    A record may be written twice if its acknowledgement is lost with the connection, or this process ends before its
    message is settled; consumers drop the second by header `aiodelay-delivery-id`.

    Args:
        cluster: `host:9092`, several with commas, or a `kafka://` URL (docs/reference.md).
        name: What stands before the colon in `to=`.
        messages: Most messages in flight.
        max_bytes: Most bytes in flight.
        clock: For `scheduler-timestamp`.
        options: Further options of aiokafka's client, such as `ssl_context` or `sasl_oauth_token_provider`.

    Raises:
        ConfigurationError: The cluster, or an option in its URL, cannot be read.
    """

    name: str
    limits: Demand
    _tasks: asyncio.TaskGroup
    """While open: producers being closed, while others go on."""

    def __init__(
        self,
        cluster: str | Cluster,
        *,
        name: str = SINK,
        messages: int = 2_000,
        max_bytes: int = 8 << 20,
        clock: Clock | None = None,
        **options: Any,  # noqa: ANN401 - aiokafka's
    ) -> None:
        self.cluster = _read_url(cluster) if isinstance(cluster, str) else cluster
        self.name, self.limits = name, Demand(messages, max_bytes)
        self._clock, self._options = clock or SystemClock(), options
        self._producer: Producer | None = None
        self._users: Counter[Producer] = Counter()
        self._starting = asyncio.Lock()

    def is_at(self, cluster: Cluster) -> bool:
        """Say whether this is surely the same cluster, with the same login."""
        return not self._options and self.cluster.is_same(cluster)

    def check(self, address: str) -> None:
        """Refuse what cannot be a topic.

        Raises:
            TargetError: Says what is allowed.
        """
        check_topic(address)

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            SinkUnavailableError: The cluster does not answer.
        """
        await self._started()
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._producer is not None:
            self._close(self._producer)
        await self._tasks.__aexit__(None, None, None)

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        """Write the records. May be cancelled: what was on its way then may be written.

        Raises:
            SinkUnavailableError: Nothing was written, as far as is known.
        """
        now_ms = self._clock.now_ms()
        sending = _Sending([_outgoing(delivery, now_ms) for delivery in deliveries])
        while sending.queue:
            indices = sending.queue.popleft()
            for written in await self._write([sending.records[i] for i in indices]):
                sending.note(written, [indices[i] for i in written.indices])
        return sending.outcomes(self.name)

    async def _write(self, records: Sequence[Outgoing]) -> Sequence[Written]:
        producer = await self._started()
        self._users[producer] += 1
        try:
            return await producer.write(records)
        finally:
            self._users[producer] -= 1
            if producer.is_spent and not self._users[producer]:
                self._close(producer)

    async def _started(self) -> Producer:
        """Return a producer that has had no error yet."""
        async with self._starting:
            if self._producer is None or self._producer.is_spent:
                producer = Producer(self.cluster, linger_ms=0, **self._options)
                try:
                    await producer.start()
                except (KafkaError, TimeoutError, OSError) as error:
                    raise SinkUnavailableError(self.name, reason_of(error)) from error
                self._producer = producer
            return self._producer

    def _close(self, producer: Producer) -> None:
        del self._users[producer]
        if producer is self._producer:
            self._producer = None
        self._tasks.create_task(producer.close(), name="aiodelay kafka sink closes a producer")


def _read_url(given: str) -> Cluster:
    url = UrlOptions(given if "://" in given else f"kafka://{given}")
    cluster = read_cluster(url)
    url.finish()
    if url.parts.scheme != "kafka" or url.parts.path.strip("/") or url.parts.fragment:
        raise ConfigurationError("cluster of KafkaSink", url.masked, "host:9092, or kafka://host:9092")
    return cluster


class _Sending:
    """One call of `send`: what is still to be written, in batches of at most so many, and what became of the rest."""

    def __init__(self, records: Sequence[Outgoing]) -> None:
        self.records = records
        self.queue: deque[list[int]] = deque([list(range(len(records)))] if records else [])
        self._outcomes: list[SendOutcome | None] = [None] * len(records)
        self._problem = ""
        self._repeats = 0

    def note(self, written: Written, indices: list[int]) -> None:
        error = written.error
        if error is None:
            self._set(indices, Sent())
        elif isinstance(error, _TOO_LARGE) and len(indices) > 1:
            # The limit is on batches: the one that is too large by itself is found by halving.
            half = len(indices) // 2
            self.queue += (indices[:half], indices[half:])
        elif isinstance(error, OutOfOrderSequenceNumber) and self._repeats < _MOST_REPEATS:
            self._repeats += 1  # the batch before it was refused (K7)
            self.queue.append(indices)
        elif written.in_doubt or isinstance(error, TimeoutError | KafkaConnectionError):
            self._problem = self._problem or reason_of(error)
        else:
            reason = f"no topic {self.records[indices[0]].topic!r}" if _is_missing(error) else reason_of(error)
            self._set(indices, Failed(reason, retryable=not isinstance(error, _FINAL)))

    def outcomes(self, sink: str) -> Sequence[SendOutcome]:
        """Return what became of each; if nothing is known of any, the cluster is away."""
        if self._problem and not any(self._outcomes):
            raise SinkUnavailableError(sink, self._problem)
        return [outcome or Failed(self._problem) for outcome in self._outcomes]

    def _set(self, indices: list[int], outcome: SendOutcome) -> None:
        for index in indices:
            self._outcomes[index] = outcome


def _is_missing(error: Exception) -> bool:
    return isinstance(error, UnknownTopicOrPartitionError)


def _outgoing(delivery: Delivery, now_ms: int) -> Outgoing:
    wire = delivered(delivery, now_ms=now_ms)
    return Outgoing(delivery.envelope.address, wire.key, wire.value, wire.headers)


def open_sink(url: str) -> KafkaSink:
    """Open `kafka://host:9092`."""
    return KafkaSink(url)
