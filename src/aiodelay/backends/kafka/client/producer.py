"""`Producer`: writes batches until its first error, because aiokafka's state after an error cannot be trusted.

After an error the producer is *spent*: it takes no more records, and the caller must close it.
docs/decisions/0007-kafka-client.md describes the faults of aiokafka, K1 to K31.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from aiokafka.errors import (
    BrokerResponseError,
    KafkaConnectionError,
    KafkaError,
    MessageSizeTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
from msgspec import Struct, field

from aiodelay.backends.kafka.murmur2 import murmur2_of_each, partition_at
from aiodelay.core.completion import run_to_completion

from ._overrides.producer import OwnProducer, note
from .clock_check import ClockCheck
from .consumer import CLOSE_S
from .options import Cluster
from .outgoing import Outgoing, Written

__all__ = ["BATCH_BYTES", "REQUEST_BYTES", "Producer"]

BATCH_BYTES = 524_288
"""Most bytes of a batch: half of a broker's default limit."""
REQUEST_BYTES = 2 << 20


class Producer:
    """Writes batches idempotently until the first error. After an error, the caller must close the producer.

    Args:
        cluster: The cluster to write to.
        batch_bytes: Returns the most bytes of a batch for a topic; None = `BATCH_BYTES` for each topic.
        clock_check: Compares the clocks of the brokers with another clock at each write; None = nothing does.
        options: More options of aiokafka's producer.
    """

    is_spent: bool = False
    """Whether an error has occurred: sequence numbers may have a gap (K7), or a request may still be under way (K4)."""
    _made_of: type[OwnProducer] = OwnProducer

    def __init__(
        self,
        cluster: Cluster,
        *,
        batch_bytes: Callable[[str], int] | None = None,
        clock_check: ClockCheck | None = None,
        **options: Any,  # noqa: ANN401 - aiokafka's own
    ) -> None:
        self._timeout_s, self._batch_bytes, self._clock_check = cluster.timeout_ms / 1000, batch_bytes, clock_check
        self._client = self._made_of(
            **cluster.client,
            acks="all",
            enable_idempotence=True,
            max_batch_size=BATCH_BYTES,
            max_request_size=REQUEST_BYTES,
            request_timeout_ms=cluster.timeout_ms,
            **options,
        )
        self._client.client.ask_for_named_topics()

    async def start(self) -> None:
        """Connect.

        Raises:
            KafkaError: The producer could not connect. No connection is left open.
            TimeoutError: The cluster did not answer in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._client.start()
        except BaseException as error:
            await self.close()
            if isinstance(error, AssertionError):  # a cluster that has just started may list no broker yet (K22)
                raise KafkaConnectionError("the cluster lists no broker") from error
            raise

    async def close(self) -> None:
        """Close the producer within twice `CLOSE_S`, also if the cluster does not answer (K6). Unsent batches fail.

        A caller that is cancelled meanwhile goes on waiting: a producer that is half closed keeps its connections.
        """
        await run_to_completion(self._close(), name="aiodelay kafka producer closes")

    async def _close(self) -> None:
        self.is_spent = True
        await self._client.end(within_s=CLOSE_S)

    async def partitions(self, topic: str) -> int | None:
        """Return the number of partitions of a topic, or None if there is no such topic.

        Raises:
            KafkaError: The cluster does not answer.
            TimeoutError: The cluster does not answer in time.
        """
        count: int | None = await self._client.client.partition_count(topic, timeout_s=self._timeout_s)
        return count

    async def write(self, records: Sequence[Outgoing]) -> list[Written]:
        """Write records, and return the results of the batches. Each record is in exactly one result.

        Records of one partition are written in their order. The call may be cancelled; records that were under way may
        then still be written.
        """
        refused, batches = await self._batches(records)
        asked_ms = 0 if self._clock_check is None else self._clock_check.now_ms()
        waiting: list[tuple[_Batch, asyncio.Future[Any]]] = []
        problem: Exception = TimeoutError()
        try:
            async with asyncio.timeout(self._timeout_s):
                for batch in batches:
                    sent = await self._client.send_batch(batch.builder, batch.topic, partition=batch.partition)
                    sent.add_done_callback(note)
                    waiting.append((batch, sent))
                self._client.client.ask_metadata_now()  # aiokafka may be pausing because another batch has no leader
                if waiting:  # `asyncio.wait` does not cancel the futures when this call is cancelled
                    await asyncio.wait([sent for _, sent in waiting])
        except (KafkaError, TimeoutError) as error:
            problem = error
        unsent = [Written(batch.indices, problem) for batch in batches[len(waiting) :]]
        written = [_outcome(batch, sent) for batch, sent in waiting] + unsent
        self.is_spent = self.is_spent or any(each.error for each in written)
        if self._clock_check is not None:
            for each in written:
                self._clock_check.compare(asked_ms, each.appended_ms)
        return written + refused

    async def _batches(self, records: Sequence[Outgoing]) -> tuple[list[Written], list[_Batch]]:
        """Put records into batches by partition. Return failed results for records that no batch can take."""
        refused: list[Written] = []
        topics: dict[str, _Topic] = {}
        batches: list[_Batch] = []
        unkeyed = random.getrandbits(31)
        hashes = murmur2_of_each({each.key for each in records if each.partition is None and each.key is not None})
        for index, record in enumerate(records):
            topic = topics.get(record.topic)
            if topic is None:
                topic = topics[record.topic] = await self._topic(record.topic)
            if topic.problem is not None:
                refused.append(Written([index], topic.problem))
                continue
            key, value, headers, partition = record.key, record.value, record.headers, record.partition
            if partition is None:
                partition = partition_at(unkeyed if key is None else hashes[key], topic.partitions)
            batch = topic.batches.get(partition)
            if batch is not None and topic.limit and batch.builder.size() + record.size > topic.limit:
                batch = None
            if batch is None or batch.builder.append(key=key, value=value, headers=headers, timestamp=None) is None:
                if record.size > REQUEST_BYTES:
                    refused.append(Written([index], MessageSizeTooLargeError()))
                    continue
                batch = topic.batches[partition] = _Batch(record.topic, partition, self._client.create_batch(), [])
                batch.builder.append(key=key, value=value, headers=headers, timestamp=None)  # an empty batch has room
                batches.append(batch)
            batch.indices.append(index)
        return refused, batches

    async def _topic(self, name: str) -> _Topic:
        count = await self._count(name)
        if isinstance(count, Exception):
            return _Topic(problem=count)
        limit = BATCH_BYTES if self._batch_bytes is None else self._batch_bytes(name)
        return _Topic(count, limit if limit < BATCH_BYTES else 0)

    async def _count(self, topic: str) -> int | Exception:
        try:
            found = await self.partitions(topic)
        except (KafkaError, TimeoutError) as error:
            return error
        is_forbidden = topic in self._client.client.cluster.unauthorized_topics
        return found or (TopicAuthorizationFailedError if is_forbidden else UnknownTopicOrPartitionError)(topic)


class _Batch(NamedTuple):
    topic: str
    partition: int
    builder: Any
    indices: list[int]


class _Topic(Struct):
    """A topic to which a call writes.

    Attributes:
        partitions: The number of its partitions.
        limit: The most bytes of a batch; 0 = `BATCH_BYTES`.
        problem: The reason why nothing can be written; None = the topic is there.
        batches: The last batch of each partition.
    """

    partitions: int = 0
    limit: int = 0
    problem: Exception | None = None
    batches: dict[int, _Batch] = field(default_factory=dict)


def _outcome(batch: _Batch, sent: asyncio.Future[Any]) -> Written:
    indices = batch.indices
    if not sent.done() or sent.cancelled():
        return Written(indices, TimeoutError(), in_doubt=True, partition=batch.partition)
    error = sent.exception()
    if error is None:
        found = sent.result()
        return Written(indices, None, found.offset, partition=batch.partition, appended_ms=found.timestamp)
    rejected = isinstance(error, BrokerResponseError) and not error.retriable
    problem = error if isinstance(error, Exception) else KafkaError()
    return Written(indices, problem, in_doubt=not rejected, partition=batch.partition)
