"""`aiodelay spark archive`: write the events of a store to Parquet by day, each event once, even if a run is killed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everywhere
from pyspark.sql.streaming.query import StreamingQuery

from aiodelay.core.durations import Duration, parse_duration
from aiodelay.errors import ConfigurationError, shortened
from aiodelay.operations.spark_options import ArchiveOptions
from aiodelay.spark.archived import CHECKPOINT, LOG, local_path
from aiodelay.spark.progress import Batches, followed
from aiodelay.spark.session import register
from aiodelay.spark.summary import Summary

from .job import job
from .settings_origin import setting

__all__ = ["by_day", "run"]

_EVERY_BATCH: Final = "spark.sql.streaming.fileSink.log.compactInterval"
"""Spark's setting: the number of batches after which Spark writes the whole log of files into one file."""


def by_day(events: DataFrame) -> DataFrame:
    """Return events with a column `day`: the date in UTC. The time zone of the session has no effect."""
    return events.withColumn("day", F.expr("date_from_unix_date(cast(floor(unix_millis(at) / 86400000) as int))"))


@job("archive", ArchiveOptions)
def run(spark: SparkSession, options: ArchiveOptions) -> Summary:
    """Write the events that are not in the archive yet.

    A program that reads the folder with Spark sees each event exactly once, at any time. Spark's log `_spark_metadata`
    names the valid files. You can kill a run at any point and run it again. Do not archive into one folder twice at the
    same time: the second run ends with an error.

    Args:
        spark: The session.
        options: See `ArchiveOptions`; callers give each option by keyword.

    Returns:
        The number of events and batches of this run; `facts` has the days of the events.

    Raises:
        ConfigurationError: An option is wrong, or the checkpoint belongs to another archive.
        UnsupportedByStoreError: The store keeps no journal.
        StreamingQueryException: The stream failed; `clear_error` returns the cause.
    """
    checkpoint = options.checkpoint or f"{options.to.rstrip('/')}/{CHECKPOINT}"
    _check_places(options.to, checkpoint)
    trigger = _trigger(options.every)
    register(spark)
    reading = {
        "table": "events",
        "store": options.store,
        "namespace": options.namespace,
        "maxRowsPerBatch": f"{options.max_rows_per_batch}",
        "failOnDataLoss": f"{options.fail_on_data_loss}".lower(),
    }
    events = by_day(spark.readStream.format("aiodelay").options(**reading).load())
    days = F.collect_set(F.col("day").cast("string"))
    rows = Batches.observing(events, F.count(F.lit(1)).alias("rows"), days.alias("days"))
    writer = rows.writeStream.format("parquet").partitionBy("day").option("checkpointLocation", checkpoint)
    written = _Totals()
    with setting(spark, _EVERY_BATCH, "1"):
        query = writer.trigger(**trigger).start(options.to)
    if followed(query, written.note) and options.every is None:
        raise KeyboardInterrupt
    facts = {"to": options.to, "checkpoint": checkpoint, "days": sorted(written.days)}
    return Summary(rows=written.rows, counts={"batches": written.batches}, facts=facts)


class _Totals:
    """Totals of the batches of this run."""

    def __init__(self) -> None:
        self.rows, self.batches = 0, 0
        self.days: set[str] = set()
        self._told = Batches()

    def note(self, query: StreamingQuery) -> None:
        for batch in self._told.since(query):
            self.rows += batch.observed["rows"]
            self.batches += bool(batch.observed["rows"])
            self.days |= set(batch.observed["days"])


def _trigger(every: Duration | None) -> Mapping[str, Any]:
    if every is None:
        return {"availableNow": True}
    ms = parse_duration(every, field="every", error=ConfigurationError, least_ms=1000)
    return {"processingTime": f"{ms} milliseconds"}


def _check_places(to: str, checkpoint: str) -> None:
    """Check that the checkpoint belongs to the archive. With another checkpoint, Spark would skip batches of events.

    Spark first plans a batch in the checkpoint, then writes it to the archive's log, then commits it in the checkpoint.
    So the last planned batch is never older than the last written batch, which is never older than the last committed
    batch.
    """
    if not to.strip():
        raise ConfigurationError("to", "blank", "the archive's folder")
    archive, place = local_path(to), local_path(checkpoint)
    if archive is None or place is None:
        return
    planned, written, committed = map(_last_batch, (place / "offsets", archive / LOG, place / "commits"))
    if not committed <= written <= planned:
        allowed = f"the checkpoint with which {archive} was begun, or another folder for the archive"
        raise ConfigurationError("checkpoint", shortened(checkpoint), allowed)
    if planned < 0 and any(not each.name.startswith("_") for each in archive.glob("*")):
        raise ConfigurationError(
            "to", f"{shortened(to)}, which has other files", "a new folder, or the folder of an archive"
        )


def _last_batch(folder: Path) -> int:
    """Return the number of the last batch in one of Spark's logs; -1 if the log has no batch."""
    numbers = (each.name.partition(".")[0] for each in folder.glob("*"))
    return max((int(number) for number in numbers if number.isdigit()), default=-1)
