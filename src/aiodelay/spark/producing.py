"""Writing the records of the engine to their topics.

Either Kafka acknowledges all records, or `produce` raises an error. If a topic never takes a record, the record goes to
the dead topic.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

import pyarrow as pa
from aiokafka.errors import (
    InvalidTopicError,
    PolicyViolationError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)

from aiodelay.backends.kafka.client import TOO_LARGE, UNAVAILABLE, Outgoing, Written, reason_of
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.records import DEAD_REASON
from aiodelay.backends.kafka.topics.intake import DEAD_FROM, DEAD_TIMESTAMP, MOST_REASON
from aiodelay.backends.kafka.topics.observing import answering
from aiodelay.backends.kafka.topics.targets import refused_topics
from aiodelay.backends.kafka.topics.writer import Writer
from aiodelay.errors import StoreUnavailableError, cut

from .places import read_cluster_of

__all__ = ["check_writable", "dead_reason", "produce", "write_batches"]

log: logging.Logger = logging.getLogger("aiodelay.spark")

AT_ONCE: Final = 2_000
PAUSE_S: Final = 0.1
_TIMES_ALONE: Final = 3
_FINAL = (*TOO_LARGE, InvalidTopicError, PolicyViolationError, UnknownTopicOrPartitionError)
_KEPT = (DEAD_REASON, DEAD_FROM, DEAD_TIMESTAMP)


def dead_reason(reason: str) -> tuple[str, bytes]:
    """Return the header with the reason why a record is in the dead topic."""
    return DEAD_REASON, cut(reason, MOST_REASON).encode(errors="backslashreplace")


async def check_writable(cluster: Cluster) -> None:
    """Check that a producer may connect and may write to some topic. Kafka checks a single topic only at a write.

    Raises:
        StoreUnavailableError: The cluster does not answer, or allows no writes at all.
    """
    async with Writer(cluster) as writer:
        with answering(cluster):
            await writer.start()


def write_batches(url: str, batches: Iterator[pa.RecordBatch], *, dead: str, timeout_ms: int) -> None:
    """Write the rows of batches with `produce`. The columns are `topic`, `key`, `value` and `headers`.

    Raises:
        ConfigurationError: The URL does not name a cluster.
        StoreUnavailableError: The cluster did not answer for `timeout_ms`. Some records may have been written; the next
            try writes them again.
    """
    cluster = read_cluster_of(url, "option 'url'")
    asyncio.run(produce(cluster, _records(batches), dead=dead, timeout_ms=timeout_ms))


async def produce(cluster: Cluster, records: Iterator[Outgoing], *, dead: str, timeout_ms: int) -> None:
    """Write records in any order. Return after Kafka has acknowledged each record, in its topic or in the dead topic.

    Args:
        cluster: The cluster of the topics.
        records: The records to write.
        dead: The topic for records that their own topic never takes: the topic does not exist, the record is too large,
            or the broker refuses it even when it is sent alone.
        timeout_ms: How long this function tries again to write the same records, at most `AT_ONCE`.

    Raises:
        StoreUnavailableError: The cluster did not answer for `timeout_ms`. Some records may have been written; the next
            try writes them again.
    """
    page = list(islice(records, AT_ONCE))
    if not page:
        return
    async with Writer(cluster) as writer:
        while page:
            deadline = asyncio.get_running_loop().time() + timeout_ms / 1000
            while page:
                page, problem = await _written(writer, page, dead)
                if problem is None:
                    continue
                if asyncio.get_running_loop().time() > deadline:
                    raise StoreUnavailableError(cluster.name, reason_of(problem)) from problem
                await asyncio.sleep(PAUSE_S)
            page = list(islice(records, AT_ONCE))


async def _written(writer: Writer, records: Sequence[Outgoing], dead: str) -> tuple[list[Outgoing], Exception | None]:
    """Write records once. Return the records to write next, and the error if some of them failed."""
    try:
        written = await writer.write(records)
    except UNAVAILABLE as error:
        return list(records), error
    left, buried, problem = list[Outgoing](), list[Outgoing](), None
    for record, found in zip(records, written, strict=True):
        is_suspect = _is_suspect(record, found, dead)
        each = await _alone(writer, record) if is_suspect else found
        if each.error is None:
            continue
        is_refused = is_suspect and _is_suspect(record, each, dead)
        instead = _instead(record, each.error, dead, is_refused=is_refused)
        if instead is None:
            left.append(record)
            problem = each.error
        else:
            buried.append(instead)
    if buried:
        reason = dict(buried[0].headers)[DEAD_REASON].decode(errors="replace")
        log.warning("%d records go to %s; the reason for the first: %s", len(buried), dead, reason)
    return left + buried, problem


def _instead(record: Outgoing, error: Exception, dead: str, *, is_refused: bool) -> Outgoing | None:
    """If a topic never takes a record, return the record to write into the dead topic. Otherwise return None.

    After None, the caller tries the record again. `is_refused` is true if the broker refused the record when it was
    sent alone.
    """
    if isinstance(error, TopicAuthorizationFailedError):
        is_final = record.topic in refused_topics(error, record.topic)
    else:
        is_final = is_refused or isinstance(error, _FINAL)
    if not is_final:
        return None
    if record.topic != dead:
        return _dead_letter(record, error, dead)
    if isinstance(error, TOO_LARGE) and (record.value is not None or record.key is not None):
        return Outgoing(dead, None, None, [each for each in record.headers if each[0] in _KEPT])
    return None


def _dead_letter(record: Outgoing, error: Exception, dead: str) -> Outgoing:
    is_missing = isinstance(error, UnknownTopicOrPartitionError)
    reason = "there is no such topic" if is_missing else reason_of(error)
    return Outgoing(dead, record.key, record.value, [*record.headers, dead_reason(f"{record.topic}: {reason}")])


def _is_suspect(record: Outgoing, written: Written, dead: str) -> bool:
    """Return whether a record may have made its batch fail: for example, it has no key and its topic is compacted."""
    if written.error is None or written.in_doubt or isinstance(written.error, _FINAL) or record.topic == dead:
        return False
    return not refused_topics(written.error, record.topic)


async def _alone(writer: Writer, record: Outgoing) -> Written:
    """Write a record alone, a few times, because the broker may have a temporary problem."""
    for _ in range(_TIMES_ALONE):
        try:
            (written,) = await writer.write([record])
        except UNAVAILABLE as error:
            return Written([0], error, in_doubt=True)
        if written.error is None or written.in_doubt:
            break
        await asyncio.sleep(PAUSE_S)
    return written


def _records(batches: Iterator[pa.RecordBatch]) -> Iterator[Outgoing]:
    for batch in batches:
        if not batch.num_rows:
            continue
        topics, keys, values = (batch.column(name).to_pylist() for name in ("topic", "key", "value"))
        yield from map(Outgoing, topics, keys, values, _headers(batch.column("headers")))


def _headers(column: pa.Array) -> list[list[tuple[str, bytes]]]:
    lengths = column.value_lengths().fill_null(0).to_pylist()
    names, values = (each.to_pylist() for each in column.flatten().flatten())
    every = iter(zip(names, (value or b"" for value in values), strict=True))
    return [[next(every) for _ in range(n)] for n in lengths]
