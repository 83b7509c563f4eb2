"""The engine: a scheduler on Spark's state, in which records wait in slots of time (experimental).

Use the engine if a lateness of seconds is acceptable, if you already have Spark and Kafka, and if the pending messages
do not fit into one Redis. A *slot* is a short interval of due times. The ids are divided into groups, the *shards*.
Each pair of shard and slot has one list of entries in Spark's state, with one timer. So Spark reads a list of any
length in one step. The engine delivers the messages of a slot after the end of the slot, so no message is early.
Therefore a message may be late by the length of a slot, plus a trigger interval, plus the duration of a batch.
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
"""The output columns. `due_ms` is null for a dead letter; `fired_ms` is the start of delivery. Both are epoch ms."""
_Output = Row("topic", "key", "value", "headers", "due_ms", "fired_ms")
_entry = attrgetter("id", "seq", "due_ms", "wire")


def placed(raw: DataFrame, slots: Slots) -> DataFrame:
    """Convert records of a schedules topic into entries, with the `shard` and the slot (`slot_ms`) in which they wait.

    Args:
        raw: A stream of `format("aiodelay_kafka")`, or of Spark's Kafka source with `includeHeaders`: `key`, `value`,
            `topic`, `partition`, `offset`, `timestamp`, `headers`. docs/formats.md describes the format under "Kafka".
        slots: The length of a slot, and the number of shards.
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
    """Keeps the entries of a shard's slot until the slot is over, then delivers the newest entry of each id.

    Spark calls the methods with keyword arguments, so their parameters have Spark's names.

    Args:
        schedules: The topic from which the records come.
        dead: The topic for dead letters.
    """

    def __init__(self, schedules: str, dead: str) -> None:
        self._schedules, self._dead = schedules, dead

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Open the list of entries in Spark's state."""
        self._handle = handle
        self._entries = handle.getListState(_STATE, _ENTRY)

    def handleInputRows(  # noqa: N802 - Spark's
        self,
        key: Any,  # noqa: ANN401 - Spark's
        rows: Iterator[Row],
        timerValues: TimerValues,  # noqa: N803 - Spark's
    ) -> Iterator[Row]:
        """Add the new entries to the slot, or deliver the slot if it is over."""
        came, now_ms = list(rows), timerValues.getCurrentProcessingTimeInMs()
        slot_ms, entries = came[0].slot_ms, [*map(_entry, came)]
        if slot_ms <= now_ms:
            if self._entries.exists():  # the slot's timer has not fired yet: deliver old and new together
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
        """Deliver a slot that is over."""
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
    """Return the stream of records to write, in the columns of `OUTPUT`.

    The checkpoint keeps the entries that are not due yet. The session must keep state in RocksDB. The first run with a
    checkpoint fixes the number of shuffle partitions.

    Args:
        entries: The stream that `placed` returned.
        schedules: The topic from which the entries come.
        dead: The topic for dead letters.
    """
    processor = SlotScheduler(schedules, dead)
    return entries.groupBy("shard", "slot_ms").transformWithState(processor, OUTPUT, "Append", "ProcessingTime")


def pending(spark: SparkSession, checkpoint: str) -> DataFrame:
    """Return the pending messages of an engine as of its last batch: `id`, `due_at`, `seq` (offset), `bytes`.

    Args:
        spark: The session.
        checkpoint: The checkpoint folder of the engine. The engine may be running.
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
