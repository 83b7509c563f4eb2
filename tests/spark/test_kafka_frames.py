"""Frames of Spark's own Kafka connector give the same events as aiodelay's readers of a history topic."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from msgspec.structs import replace
from pyspark.sql import Row, SparkSession

from aiodelay.core.values import JournalEntry
from aiodelay.kafka.records import decode_history, encode_history
from aiodelay.spark.kafka import kafka_to_events

KAFKA = (
    "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, timestampType INT, "
    "headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ENTRIES = [
    JournalEntry(
        0, 1_795_000_000_001, "delivered", "bestellung-ä-日本", 1_794_999_999_999, "kafka", 1_795_000_000_000, 0
    ),
    JournalEntry(0, 1_795_000_000_017, "dead", 'a "quoted" id\\', 17, "Order", 1_600_000_000_003, 3, 'E: "no"\nway'),
    JournalEntry(0, 4_102_444_800_000, "again", "far", (1 << 48) - 1, "kafka", 4_102_444_799_999, 1, "later"),
]


def test_a_history_topic_reads_the_same_by_the_connector(spark: SparkSession) -> None:
    written = [encode_history(entry) for entry in ENTRIES]
    read = [decode_history(wire.value, offset) for offset, wire in enumerate(written, start=40)]
    others = [None, b"", b"{", b"7", b'{"event": "delivered"}', b"\xff\xfe"]
    impossible = {"at_ms": 253_402_300_800_000, "revision": 1 << 63, "due_ms": 1 << 48, "attempt": 1 << 31}
    for name, number in impossible.items():  # of no day, or of no column
        others += [encode_history(replace(ENTRIES[0], **{name: each})).value for each in (number, -1)]
    assert {decode_history(each, 0) for each in others} == {None}
    values = [*(wire.value for wire in written), *others]
    rows: list[tuple[object, ...]] = [
        (None, bytearray(value) if value is not None else None, "history", 2, offset, EPOCH, 0, [])
        for offset, value in enumerate(values, start=40)
    ]
    found = kafka_to_events(spark.createDataFrame(rows, KAFKA)).orderBy("number").collect()
    assert found == [
        Row(
            partition=2,
            number=entry.number,
            at=_naive(entry.at_ms),
            event=entry.event,
            id=entry.id,
            revision=entry.revision,
            lane=entry.lane,
            due_at=_naive(entry.due_ms),
            attempt=entry.attempt,
            detail=entry.detail or None,
        )
        for entry in read
        if entry is not None
    ]
    assert len(found) == len(ENTRIES)


def _naive(ms: int) -> datetime:
    """As PySpark's rows hold times: local, which `TZ` says, without a zone."""
    return (EPOCH + timedelta(milliseconds=ms)).astimezone().replace(tzinfo=None)
