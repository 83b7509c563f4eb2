"""A Kafka producer that is thrown away after any error: what aiokafka leaves behind one cannot be trusted.

The numbers K1 to K29 are those of docs/decisions/0007-kafka-client.md, which tells each defect.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import (
    BrokerResponseError,
    GroupAuthorizationFailedError,
    InvalidTimestampError,
    KafkaConnectionError,
    KafkaError,
    MessageSizeTooLargeError,
    PolicyViolationError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
    UnknownTopicOrPartitionError,
    kafka_errors,
)
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from msgspec import Struct

from aiodelay.completion import run_to_completion
from aiodelay.errors import cut
from aiodelay.kafka.options import Cluster
from aiodelay.kafka.records import java_partition

from . import client as metadata
from . import connection, record_batches

__all__ = [
    "BATCH_BYTES",
    "INVALID_RECORD",
    "PERMANENT",
    "TOO_LARGE",
    "UNAVAILABLE",
    "MayNotCreateError",
    "Outgoing",
    "Producer",
    "Written",
    "consumer_of",
    "log_failure",
    "missing_right",
    "reason_of",
    "stop",
    "tame",
]

BATCH_BYTES = 524_288
"""Most bytes of a batch: half of what a broker takes unless told otherwise."""
REQUEST_BYTES = 2 << 20
CLOSE_S = 2.0
RIGHT_S = 60.0
"""So long a missing right is not logged again."""
UNAVAILABLE: tuple[type[Exception], ...] = (KafkaError, TimeoutError, OSError)


_BATCH_HEADER, _RECORD_OVERHEAD, _RECORD_FIELDS = 61, 21, 3
"""Bytes of a batch's header; what aiokafka adds to a record at most; and what a batch's first record has of these."""


class _InvalidRecordError(BrokerResponseError):  # type: ignore[misc]  # aiokafka has no types
    """The topic refuses what a record is, such as one without key where it is compacted."""

    errno = 87
    message = "INVALID_RECORD"
    description = "the topic refuses such a record (one without key, where it is compacted)"


class MayNotCreateError(TopicAuthorizationFailedError):  # type: ignore[misc]  # aiokafka has no types
    """This user may not create a topic; the argument names it."""


INVALID_RECORD: type[Exception] = _InvalidRecordError
"""A topic refuses a record for what the record is."""
TOO_LARGE: tuple[type[Exception], ...] = (MessageSizeTooLargeError, RecordListTooLargeError)
"""A topic refuses a batch that has too many bytes."""
PERMANENT: tuple[type[Exception], ...] = (*TOO_LARGE, INVALID_RECORD, InvalidTimestampError, PolicyViolationError)
"""A topic refuses a record, and refuses it again if we send it again."""


class Outgoing(Struct, frozen=True, gc=False):
    """A record to write; `partition` None: by its key, as Java's producer, or any if it has none."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]
    partition: int | None = None

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        size: int = DefaultRecordBatchBuilder.estimate_size_in_bytes(self.key, self.value, self.headers)
        return size

    @property
    def batch_size(self) -> int:
        """Bytes of a batch with this record alone; a topic's `max.message.bytes` limits them."""
        body = self.size - _BATCH_HEADER - _RECORD_OVERHEAD + _RECORD_FIELDS
        return _BATCH_HEADER + -(-(body << 1).bit_length() // 7) + body


class Written(NamedTuple):
    """What became of a batch.

    Attributes:
        indices: Of its records, in what was to be written.
        error: Why it was not written, or may not have been; None: it was.
        offset: Of its first record.
        in_doubt: It may have been written.
        partition: Where it was written, or was to be; -1: it was not sent.
    """

    indices: list[int]
    error: Exception | None
    offset: int = -1
    in_doubt: bool = False
    partition: int = -1


def tame() -> None:
    """Keep aiokafka from what it does to all its clients of a process, before one is made; repeating changes nothing.

    It would log whole requests, passwords and payloads included, unless told otherwise (K9), and stop at a header whose
    name is no UTF-8 (K18), and leave a connection open when a start is cancelled (K20), and ask without a pause who
    leads a partition that nobody leads (K26), and call a record that is refused an unknown error (K28).
    """
    kafka_errors.setdefault(_InvalidRecordError.errno, _InvalidRecordError)
    connection.install()
    metadata.install()
    record_batches.install()
    log = logging.getLogger("aiokafka")
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    logging.getLogger("aiokafka.conn").addFilter(_is_news)


_said: set[str] = set()


def _is_news(record: logging.LogRecord) -> bool:
    """Let aiokafka warn once of a login in the clear; it would at each connection, of which there are many."""
    message = record.getMessage()
    if "in the clear" not in message:
        return True
    is_first = message not in _said
    _said.add(message)
    return is_first


def consumer_of(cluster: Cluster, *topics: str, **options: Any) -> AIOKafkaConsumer:  # noqa: ANN401 - aiokafka's
    """Return a consumer, not started yet, that reads what is committed where it is told to, and commits nothing itself.

    Args:
        cluster: Where it is.
        topics: What it reads; none: what it is assigned later.
        options: Others, or for others: aiokafka's.
    """
    tame()
    ours = {
        "isolation_level": "read_committed",
        "auto_offset_reset": "none",
        "enable_auto_commit": False,
        "request_timeout_ms": cluster.timeout_ms,
    }
    return AIOKafkaConsumer(*topics, **cluster.client, **(ours | options))


def log_failure(log: logging.Logger, what: str, reason: str, error: Exception, expected: tuple[type, ...]) -> None:
    """Log why something begins anew; with its traceback, as an error, if it is a fault of our own.

    A right that is missing stops many things many times over: it is logged once a minute.
    """
    now_s = asyncio.get_running_loop().time()
    if not isinstance(error, expected):
        log.error("%s, by a fault of aiodelay itself: %s", what, reason, exc_info=error)
    elif _RIGHT not in reason:
        log.warning("%s: %s", what, reason)
    elif now_s < _quiet_until.get(reason, now_s):
        log.debug("%s: %s", what, reason)
    else:
        _quiet_until[reason] = now_s + RIGHT_S
        log.error("%s, and what needs it is tried again (docs/kafka.md#rights)", reason)


_RIGHT = "the right "
_quiet_until: dict[str, float] = {}
"""Until when a missing right is not logged again."""
_RIGHTS: dict[type[BaseException], tuple[str, str]] = {
    GroupAuthorizationFailedError: ("Read", "Group"),
    MayNotCreateError: ("Create", "Topic"),
    TransactionalIdAuthorizationFailed: ("Write", "TransactionalId"),
}
"""Which operation on which resource an error is about; of a topic, who asks knows the operation."""


def reason_of(error: BaseException, operation: str = "Write") -> str:
    """Return an error in words, on one line; a missing right is named.

    Args:
        error: Any.
        operation: The operation on a topic that failed.
    """
    if type(error) is TimeoutError:
        return "no answer in time"
    right = (operation, "Topic") if type(error) is TopicAuthorizationFailedError else _RIGHTS.get(type(error))
    if right is not None and error.args:
        return cut(missing_right(right[0], right[1], error.args[0]), 400)
    return cut(str(error) or type(error).__name__, 200)


def missing_right(operation: str, resource: str, names: str | Collection[str]) -> str:
    """Name a missing right in the words of kafka-acls.sh."""
    named = [names] if isinstance(names, str) else sorted(names)
    if resource == "TransactionalId":  # one for each partition, which are granted together
        named = [f"{name.rpartition('.')[0]}. and what begins so" for name in named]
    return f"{_RIGHT}{operation} on {resource} {', '.join(named)} is missing"


async def stop(consumer: AIOKafkaConsumer) -> None:
    """Stop a consumer within twice `CLOSE_S`, also while the cluster is away; its connections are closed afterwards.

    A caller that is cancelled meanwhile goes on waiting: a consumer that is half closed keeps its connections.
    """
    await run_to_completion(_stop(consumer), name="aiodelay kafka consumer closes")


async def _stop(consumer: AIOKafkaConsumer) -> None:
    async with asyncio.TaskGroup() as tasks:
        leaving = tasks.create_task(_leave(consumer), name="aiodelay kafka consumer leaves")
        await asyncio.wait([leaving], timeout=CLOSE_S)
        await consumer._client.close()
        await asyncio.wait([leaving], timeout=CLOSE_S)
        leaving.cancel()


async def _leave(consumer: AIOKafkaConsumer) -> None:
    with suppress(KafkaError, OSError):
        await consumer.stop()


class _Batches(set[Any]):
    """Those under way, of which one that failed may be taken out again (K21)."""

    remove = set.discard


class Producer:
    """Writes batches, idempotently, until the first error; then it is to be closed.

    Args:
        cluster: Where to.
        batch_bytes: Returns the most bytes of a batch for a topic; None: `BATCH_BYTES` for each.
        options: Further options of aiokafka's producer.
    """

    is_spent: bool = False
    """Something went wrong: sequence numbers have a gap (K7), or a request may still be on its way (K4)."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        batch_bytes: Callable[[str], int] | None = None,
        **options: Any,  # noqa: ANN401 - aiokafka's own
    ) -> None:
        tame()
        self._timeout_s, self._batch_bytes = cluster.timeout_ms / 1000, batch_bytes
        self._client = AIOKafkaProducer(
            **cluster.client,
            acks="all",
            enable_idempotence=True,
            max_batch_size=BATCH_BYTES,
            max_request_size=REQUEST_BYTES,
            request_timeout_ms=cluster.timeout_ms,
            **options,
        )
        metadata.ask_for_named_topics(self._client.client)

    async def start(self) -> None:
        """Connect.

        Raises:
            KafkaError: It could not; nothing is left open.
            TimeoutError: It took too long.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._client.start()
        except BaseException as error:
            await self.close()
            if isinstance(error, AssertionError):  # a cluster that has just started counts no broker yet (K22)
                raise KafkaConnectionError("the cluster counts no broker") from error
            raise

    async def close(self) -> None:
        """End it within twice `CLOSE_S`, also while the cluster is away (K6); what it still held fails.

        A caller that is cancelled meanwhile goes on waiting: a producer that is half closed keeps its connections.
        """
        await run_to_completion(self._close(), name="aiodelay kafka producer closes")

    async def _close(self) -> None:
        self.is_spent = True
        sender = self._client._sender
        if sender.sender_task is not None:
            sender.sender_task.remove_done_callback(sender._fail_all)  # it fails itself without transactions
        accumulator = self._client._message_accumulator
        accumulator._pending_batches = _Batches(accumulator._pending_batches)
        accumulator.fail_all(KafkaConnectionError("closed"))
        drains = [batch._drain_waiter for batches in accumulator._batches.values() for batch in batches]
        for _ in range(2):  # whatever it could not do cleanly, or in time, it holds nothing afterwards
            with suppress(TimeoutError, Exception):
                async with asyncio.timeout(CLOSE_S):
                    await self._client.client.close()
                    await self._client.stop()
                break
        await asyncio.sleep(0)  # connections' tasks end in the next step of the loop
        for left in (sender.sender_task, getattr(self._client._txn_manager, "_transaction_waiter", None), *drains):
            if left is not None and left.done():
                _note(left)

    async def partitions(self, topic: str) -> int | None:
        """Return how many partitions a topic has, None if there is no such topic.

        Raises:
            KafkaError: The cluster does not say.
            TimeoutError: Not in time.
        """
        client = self._client.client
        known = client.cluster.partitions_for_topic(topic)
        for _ in range(2):
            if known is not None:
                break
            async with asyncio.timeout(self._timeout_s):
                client.add_topic(topic)
                metadata.hurry(client)
                await client.force_metadata_update()
            known = client.cluster.partitions_for_topic(topic)
        if known is None:
            client._topics.discard(topic)  # or else each answer would lack it, and be asked for again
            return None
        return len(known)

    async def write(self, records: Sequence[Outgoing]) -> list[Written]:
        """Write records, each partition's in order; return what became of them, each accounted for once.

        May be cancelled: what was on its way then may be written.
        """
        refused, batches = await self._batches(records)
        waiting: list[tuple[_Batch, asyncio.Future[Any]]] = []
        problem: Exception = TimeoutError()
        try:
            async with asyncio.timeout(self._timeout_s):
                for batch in batches:
                    sent = await self._client.send_batch(batch.builder, batch.topic, partition=batch.partition)
                    sent.add_done_callback(_note)
                    waiting.append((batch, sent))
                metadata.hurry(self._client.client)  # the sender may be waiting for another batch's leader alone
                if waiting:  # `wait`, which leaves the futures alone when this call is cancelled
                    await asyncio.wait([sent for _, sent in waiting])
        except (KafkaError, TimeoutError) as error:
            problem = error
        unsent = [Written(batch.indices, problem) for batch in batches[len(waiting) :]]
        written = [_outcome(batch, sent) for batch, sent in waiting] + unsent
        self.is_spent = self.is_spent or any(each.error for each in written)
        return written + refused

    async def _batches(self, records: Sequence[Outgoing]) -> tuple[list[Written], list[_Batch]]:
        """Put records into batches by partition; those that no batch can take are answered at once."""
        refused: list[Written] = []
        counts: dict[str, int | Exception] = {}
        limits: dict[str, int] = {}  # of those topics that take less than our batches hold
        open_batches: dict[tuple[str, int], _Batch] = {}
        batches: list[_Batch] = []
        unkeyed = random.getrandbits(31)
        for index, record in enumerate(records):
            topic, key, value, headers = record.topic, record.key, record.value, record.headers
            count = counts.get(topic)
            if count is None:
                count = counts[topic] = await self._count(topic)
                if self._batch_bytes is not None and (limit := self._batch_bytes(topic)) < BATCH_BYTES:
                    limits[topic] = limit
            if isinstance(count, Exception):
                refused.append(Written([index], count))
                continue
            partition = record.partition
            if partition is None:
                partition = unkeyed % count if key is None else java_partition(key, count)
            batch = open_batches.get((topic, partition))
            if batch is not None and topic in limits and batch.builder.size() + record.size > limits[topic]:
                batch = None
            if batch is None or batch.builder.append(key=key, value=value, headers=headers, timestamp=None) is None:
                if record.size > REQUEST_BYTES:
                    refused.append(Written([index], MessageSizeTooLargeError()))
                    continue
                batch = open_batches[topic, partition] = _Batch(topic, partition, self._client.create_batch(), [])
                batch.builder.append(key=key, value=value, headers=headers, timestamp=None)  # a first one always fits
                batches.append(batch)
            batch.indices.append(index)
        return refused, batches

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


def _outcome(batch: _Batch, sent: asyncio.Future[Any]) -> Written:
    indices = batch.indices
    if not sent.done() or sent.cancelled():
        return Written(indices, TimeoutError(), in_doubt=True, partition=batch.partition)
    error = sent.exception()
    if error is None:
        return Written(indices, None, sent.result().offset, partition=batch.partition)
    rejected = isinstance(error, BrokerResponseError) and not error.retriable
    problem = error if isinstance(error, Exception) else KafkaError()
    return Written(indices, problem, in_doubt=not rejected, partition=batch.partition)


def _note(sent: asyncio.Future[Any]) -> None:
    """Look at an error that nobody may be waiting for any more, so that asyncio does not log it."""
    if not sent.cancelled():
        sent.exception()
