"""Imports the pending schedules of a topic of etf1/kafka-message-scheduler into another store."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from aiokafka.errors import KafkaError
from msgspec.structs import replace

from aiodelay.backends.kafka.client import admin_of, consumer_of, reason_of, stop
from aiodelay.backends.kafka.client.options import Cluster, read_cluster, read_topics
from aiodelay.backends.kafka.records import RESERVED, decode
from aiodelay.core.transitions import NO_OP
from aiodelay.core.urls import UrlOptions
from aiodelay.core.values import At, Conflict, Put
from aiodelay.errors import RecordFormatError, StoreMismatchError, StoreUnavailableError
from aiodelay.ports import Store

from .put_all import PAGE, VERSION, Imported, put_all

__all__ = ["import_etf1"]

FORM = "kafka://host:9092/schedules"
WAIT_MS = 500
MOST_RECORDS = 2_000


class _Newest(NamedTuple):
    """The newest record of a key in a partition. If `value` is None, the schedule has ended."""

    written_ms: int
    value: bytes | None
    headers: Any


async def import_etf1(url: str, store: Store) -> Imported:
    """Store each pending schedule of a topic as a message for the sink `kafka`. The key of the schedule becomes the id.

    Stop the schedulers of the topic first. The import only reads the topic, and may be repeated: it stores no message
    again that is pending, or that has ended within 24 h. In a partition, the last record of a key counts. If several
    partitions have records of one key, the record with the latest time counts: the record that ends a schedule may be
    in another partition than the schedule (docs/migration.md). The import holds all pending schedules in memory.

    Args:
        url: `kafka://host:9092/topic`, with several topics separated by commas, and the options of a cluster.
        store: The store, open. On Kafka it must own all partitions.

    Raises:
        ConfigurationError: The URL has another form.
        StoreMismatchError: The topic does not exist.
        StoreUnavailableError: The cluster or the store did not answer. Repeat the import.
    """
    given = UrlOptions(url)
    cluster = read_cluster(given)
    given.finish()
    stored = known = 0
    skipped: dict[str, str] = {}
    for topic in read_topics(given, "source", FORM):
        puts = _puts(await _newest(cluster, topic), skipped)
        while page := list(islice(puts, PAGE)):
            new = await put_all(store, page)
            stored, known = stored + new, known + len(page) - new
    return Imported(stored, known, skipped)


async def _newest(cluster: Cluster, topic: str) -> dict[bytes, _Newest]:
    """Read a topic to its end; return the newest record of each pending schedule, by key."""
    await _check_there(cluster, topic)
    consumer = consumer_of(cluster, topic, auto_offset_reset="earliest", group_id=None)
    try:
        await consumer.start()
        last: dict[tuple[bytes, int], _Newest] = {}
        left = {place: end for place, end in (await consumer.end_offsets(consumer.assignment())).items() if end}
        while left:
            found = await consumer.getmany(*left, timeout_ms=WAIT_MS, max_records=MOST_RECORDS)
            for record in (each for records in found.values() for each in records):
                if record.key is not None and not record.key.startswith(RESERVED):
                    last[record.key, record.partition] = _Newest(record.timestamp, record.value, record.headers)
            left = {place: end for place, end in left.items() if await consumer.position(place) < end}
    except (KafkaError, TimeoutError, OSError) as error:
        raise StoreUnavailableError(cluster.name, reason_of(error)) from error
    finally:
        await stop(consumer)
    newest: dict[bytes, _Newest] = {}
    for (key, _), each in last.items():
        newest[key] = max(newest.get(key, each), each, key=lambda record: record.written_ms)
    return {key: each for key, each in newest.items() if each.value is not None}


async def _check_there(cluster: Cluster, topic: str) -> None:
    """Check that a topic exists. Without this check, the read of a missing topic could create the topic."""
    admin = admin_of(cluster)
    try:
        await admin.start()
        (described,) = await admin.describe_topics([topic])
    except (KafkaError, TimeoutError, OSError) as error:
        raise StoreUnavailableError(cluster.name, reason_of(error)) from error
    finally:
        await admin.close()
    if described["error_code"]:
        raise StoreMismatchError(f"topic {topic}", "missing", "a topic that exists")


def _puts(newest: dict[bytes, _Newest], skipped: dict[str, str]) -> Iterator[Put]:
    """Yield the command that stores each schedule. If a schedule cannot be imported, add the reason to `skipped`."""
    for key, each in newest.items():
        try:
            record = decode(key, each.value or b"", each.headers, written_ms=each.written_ms)
        except RecordFormatError as error:
            skipped[key.decode("utf-8", "backslashreplace")] = error.problem
            continue
        version = VERSION if record.envelope.version is None else record.envelope.version
        yield Put(NO_OP, replace(record.envelope, version=version), At(record.due_ms), Conflict.newer(version))
