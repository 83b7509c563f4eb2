"""A scheduler made of Spark's own state: records wait in slots, with one timer each (experimental).

For seconds rather than milliseconds, where Spark and Kafka are there already and what waits is larger than one Redis.
The entries of a shard's slot stand in one list of state, which moves as a whole: one timer, one read, whatever their
number. A slot is given out after its end, so nothing is early; what that costs is a slot, a trigger and a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql import functions as F  # noqa: N812 - its name everywhere
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from aiodelay.ports.clock import SystemClock

from .slots import Entry, Given, Slots, newest, output

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

__all__ = ["OUTPUT", "SlotScheduler", "due", "pending", "placed"]

_ENTRY: Final = "id STRING, seq BIGINT, due_ms BIGINT, wire BINARY"
_PLACED: Final = f"shard INT, slot_ms BIGINT, {_ENTRY}"
_STATE: Final = "entries"
OUTPUT: Final = (
    "topic STRING, key BINARY, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, "
    "due_ms BIGINT, fired_ms BIGINT"
)
"""What is written: `due_ms` is null of a dead letter, `fired_ms` when it was given out, both in epoch ms."""
_Output = Row("topic", "key", "value", "headers", "due_ms", "fired_ms")
_entry = attrgetter("id", "seq", "due_ms", "wire")


def placed(raw: DataFrame, slots: Slots) -> DataFrame:
    """Return what records of a schedules topic come to, and where it waits: `shard`, `slot_ms`, and an entry's columns.

    Args:
        raw: Of `format("aiodelay_kafka")`, or of Spark's Kafka source with `includeHeaders`: `key`, `value`, `topic`,
            `partition`, `offset`, `timestamp`, `headers`. The format: docs/formats.md, "Kafka".
        slots: How time, and ids, are cut.
    """

    def place(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = [(each.shard, each.slot_ms, *each.entry) for given in _given(batch) for each in slots.place(given)]
            columns = zip(*rows, strict=True) if rows else [()] * len(_PLACED_TYPES)
            arrays = [pa.array(column, kind) for column, kind in zip(columns, _PLACED_TYPES.values(), strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, list(_PLACED_TYPES))

    columns = ("key", "value", "topic", "partition", "offset", "timestamp", "headers")
    return raw.select(*columns).mapInArrow(place, _PLACED)


_PLACED_TYPES: Final = {
    "shard": pa.int32(),
    "slot_ms": pa.int64(),
    "id": pa.string(),
    "seq": pa.int64(),
    "due_ms": pa.int64(),
    "wire": pa.binary(),
}


def _given(batch: pa.RecordBatch) -> Iterator[Given]:
    keys, values, topics, partitions, offsets = (batch.column(n).to_pylist() for n in range(5))
    written = (us // 1000 for us in batch.column(5).cast(pa.int64()).to_pylist())
    headers = ([(each["key"], each["value"]) for each in given or ()] for given in batch.column(6).to_pylist())
    yield from map(Given, keys, values, topics, partitions, offsets, written, headers)


class SlotScheduler(StatefulProcessor):
    """Keeps the entries of a (shard, slot) until the slot is over, then gives out the newest of each id.

    Spark calls its methods with keyword arguments, so their names are Spark's.

    Args:
        schedules: The topic that records come from.
        dead: The topic for dead letters.
    """

    def __init__(self, schedules: str, dead: str) -> None:
        self._schedules, self._dead = schedules, dead

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Open the state."""
        self._handle = handle
        self._entries = handle.getListState(_STATE, _ENTRY)

    def handleInputRows(  # noqa: N802 - Spark's
        self,
        key: Any,  # noqa: ANN401 - Spark's
        rows: Iterator[Row],
        timerValues: TimerValues,  # noqa: N803 - Spark's
    ) -> Iterator[Row]:
        """Keep what came, or give it out if its slot is over."""
        came, now_ms = list(rows), timerValues.getCurrentProcessingTimeInMs()
        slot_ms, entries = came[0].slot_ms, [*map(_entry, came)]
        if slot_ms <= now_ms:
            if self._entries.exists():  # its timer has not fired yet: what came belongs to it
                entries = [*self._entries.get(), *entries]
                self._entries.clear()
                self._handle.deleteTimer(slot_ms)
            yield from self._given_out(entries, now_ms)
            return
        if not self._entries.exists():
            self._handle.registerTimer(slot_ms)
        self._entries.appendList(entries)

    def handleExpiredTimer(  # noqa: N802 - Spark's
        self,
        key: Any,  # noqa: ANN401 - Spark's
        timerValues: TimerValues,  # noqa: N803 - Spark's
        expiredTimerInfo: ExpiredTimerInfo,  # noqa: N803 - Spark's
    ) -> Iterator[Row]:
        """Give out a slot that is over."""
        entries = list(self._entries.get())
        self._entries.clear()
        yield from self._given_out(entries, timerValues.getCurrentProcessingTimeInMs())

    def _given_out(self, entries: list[tuple[Any, ...]], now_ms: int) -> Iterator[Row]:
        fired_ms = SystemClock().now_ms()
        for due_ms, wire in newest(Entry(*each) for each in entries):
            found = output(due_ms, wire, now_ms=now_ms, schedules=self._schedules, dead=self._dead)
            if found is not None:
                yield _Output(*found, fired_ms)


def due(entries: DataFrame, schedules: str, dead: str) -> DataFrame:
    """Return the records to write as they come due, in the columns of `OUTPUT`; the stream's checkpoint keeps the rest.

    The session must keep state in RocksDB; a checkpoint's number of shuffle partitions stays what it was.

    Args:
        entries: A stream of `placed`.
        schedules: The topic that they come from.
        dead: The topic for dead letters.
    """
    processor = SlotScheduler(schedules, dead)
    return entries.groupBy("shard", "slot_ms").transformWithState(processor, OUTPUT, "Append", "ProcessingTime")


def pending(spark: SparkSession, checkpoint: str) -> DataFrame:
    """Return what waits in an engine's checkpoint, as of its last batch: `id`, `due_at`, `seq`, `bytes`.

    Args:
        spark: The session.
        checkpoint: The engine's folder; it may be running.
    """
    state = spark.read.format("statestore").option("path", checkpoint).option("stateVarName", _STATE).load()
    entries = state.select("key.slot_ms", "list_element.*")
    newest_of = entries.groupBy("slot_ms", "id").agg(F.max_by(F.struct("due_ms", "seq", "wire"), "seq").alias("entry"))
    return newest_of.where("entry.wire IS NOT NULL").select(
        "id",
        F.timestamp_millis("entry.due_ms").alias("due_at"),
        "entry.seq",
        F.octet_length("entry.wire").alias("bytes"),
    )
