"""`aiodelay spark engine`: a scheduler on Spark, from one Kafka topic to other topics (experimental)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everywhere
from pyspark.sql.streaming.query import StreamingQuery

from aiodelay.backends.kafka.records import is_topic
from aiodelay.backends.kafka.topics.topic import prepare_dead
from aiodelay.core.durations import Duration, parse_duration
from aiodelay.core.validation import check_count
from aiodelay.errors import ConfigurationError, shortened
from aiodelay.operations.spark_options import EngineOptions
from aiodelay.spark.engine import due, placed
from aiodelay.spark.places import read_cluster_of, read_topic
from aiodelay.spark.producing import check_writable
from aiodelay.spark.progress import Batch, Batches, followed
from aiodelay.spark.slots import Slots
from aiodelay.spark.summary import Summary
from aiodelay.spark.topic_reading import readable_partitions
from aiodelay.spark.topics import TopicSource

from .job import job, taking
from .settings_origin import run_coroutine, setting

__all__ = ["OnBatch", "run", "start"]

OnBatch: TypeAlias = Callable[[Mapping[str, Any]], object]
"""A callback for each batch with output. Its argument has `batch`, `delivered`, `dead`, `seconds` and `lateness_ms`."""

_PARTS: Final = (0.5, 0.99)
_STATE_STORE: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_LEAST_MS: Final = 100


@taking(EngineOptions)
def start(spark: SparkSession, options: EngineOptions) -> StreamingQuery:
    """Start the engine, which delivers each scheduled record to the topic that the record names. Return its query.

    No message is early. Delivery is at least once: after a stop or a crash, the engine delivers the interrupted batch
    again, with the same delivery ids. A record that cannot be scheduled, or that its topic never takes, goes to the
    dead topic with the reason.

    Args:
        spark: The session.
        options: See `EngineOptions`; callers give each option by keyword.

    Raises:
        ConfigurationError: An option is wrong.
        StoreMismatchError: There is no such topic.
        StoreUnavailableError: Kafka does not answer, or this user lacks a right.
    """
    return _started(spark, options)


def _started(spark: SparkSession, options: EngineOptions) -> StreamingQuery:
    if not options.checkpoint.strip():
        raise ConfigurationError("checkpoint", "blank", "a folder for the offsets and the pending messages")
    slots = Slots(_ms("slot", options.slot), check_count(options.shards, "shards", 1, 10_000))
    trigger_ms = _ms("trigger", options.trigger)
    topic = _prepared(options)
    dead = options.dead or f"{topic}.dead"
    spark.dataSource.register(TopicSource)
    reading = {
        "url": options.source,
        "purpose": f"{topic} in slots of {slots.slot_ms} ms and {slots.shards} shards",
        "startingOffset": options.starting,
        "maxRowsPerBatch": f"{options.max_rows_per_batch}",
        "failOnDataLoss": f"{options.fail_on_data_loss}".lower(),
    }
    raw = spark.readStream.format("aiodelay_kafka").options(**reading).load()
    rows = Batches.observing(due(placed(raw, slots), topic, dead), *_observed())
    writing = {"url": options.to or options.source, "dead": dead, "timeout": options.timeout}
    writer = rows.writeStream.format("aiodelay_kafka").options(**writing)
    with (
        setting(spark, "spark.sql.streaming.stateStore.providerClass", _STATE_STORE),
        setting(spark, "spark.sql.shuffle.partitions", f"{slots.shards}"),
    ):
        return (
            writer.option("checkpointLocation", options.checkpoint)
            .outputMode("append")
            .trigger(processingTime=f"{trigger_ms} milliseconds")
            .start()
        )


@dataclass(frozen=True, kw_only=True)
class _Options(EngineOptions):
    on_batch: OnBatch | None = None


@job("engine", _Options)
def run(spark: SparkSession, options: _Options) -> Summary:
    """Run the engine until it is interrupted.

    Args:
        spark: The session.
        options: The options of `start`, and `on_batch`, which is called for each batch with output.

    Returns:
        The numbers of delivered messages, dead letters and batches of this run; `facts` has the largest lateness.

    Raises:
        ConfigurationError: An option is wrong, or the checkpoint belongs to another source, or to other slots.
        StoreMismatchError: There is no such topic.
        StoreUnavailableError: Kafka does not answer, or this user lacks a right.
        StreamingQueryException: The query failed; `clear_error` returns the cause.
    """
    query = _started(spark, options)
    totals = _Totals(options.on_batch)
    followed(query, totals.note)
    return Summary(
        rows=totals.delivered + totals.dead,
        rejected=totals.dead,
        counts={"batches": totals.batches, "delivered": totals.delivered, "dead": totals.dead},
        facts={"lateness_ms": {"max": totals.latest_ms}},
    )


def _ms(name: str, given: Duration) -> int:
    return parse_duration(given, field=name, error=ConfigurationError, least_ms=_LEAST_MS)


def _prepared(options: EngineOptions) -> str:
    """Check the topic of schedules, and create a missing dead topic. Return the topic of schedules."""
    cluster, topic = read_topic(options.source, "source")
    target = read_cluster_of(options.to or options.source, "to")
    dead = options.dead or f"{topic}.dead"
    if not is_topic(dead) or dead == topic:
        raise ConfigurationError(
            "dead", shortened(dead), "a topic other than the source, with a name of A-Z a-z 0-9 . _ -"
        )

    async def prepare() -> None:
        await prepare_dead(target, dead, partitions=await readable_partitions(cluster, topic))
        await check_writable(target)

    run_coroutine(prepare())
    return topic


def _observed() -> list[Column]:
    late = F.col("fired_ms") - F.col("due_ms")
    return [
        F.count(F.lit(1)).alias("rows"),
        F.count("due_ms").alias("delivered"),
        F.percentile_approx(late, list(_PARTS)).alias("late"),
        F.max(late).alias("latest"),
    ]


class _Totals:
    """Totals of the batches of this run."""

    def __init__(self, on_batch: OnBatch | None) -> None:
        self.batches, self.delivered, self.dead = 0, 0, 0
        self.latest_ms: int | None = None
        self._told, self._on_batch = Batches(), on_batch

    def note(self, query: StreamingQuery) -> None:
        for batch in self._told.since(query):
            if batch.observed["rows"]:
                self._add(batch)

    def _add(self, batch: Batch) -> None:
        found = batch.observed
        delivered, dead = found["delivered"], found["rows"] - found["delivered"]
        self.batches += 1
        self.delivered += delivered
        self.dead += dead
        lateness_ms = None
        if delivered:
            self.latest_ms = max(self.latest_ms or 0, found["latest"])
            p50, p99 = found["late"]
            lateness_ms = {"p50": p50, "p99": p99, "max": found["latest"]}
        if self._on_batch is not None:
            figures = {"batch": batch.number, "delivered": delivered, "dead": dead, "seconds": batch.seconds}
            self._on_batch(figures | {"lateness_ms": lateness_ms})
