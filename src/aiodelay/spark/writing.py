"""The writers of `format("aiodelay")`, and `write_frame`, which the jobs use.

Spark sends rows at least once. The store takes each version once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from msgspec import structs
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.functions import spark_partition_id

from .loading import Counts, load
from .write_settings import WriteSettings, read_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

__all__ = ["Counts", "cores_of", "stream_writer_of", "write_frame", "writer_of"]

log: logging.Logger = logging.getLogger("aiodelay.spark")

_COUNTS = "stored BIGINT, replaced BIGINT, known BIGINT"


def writer_of(given: Mapping[str, str], schema: StructType, *, overwrite: bool = False) -> DataSourceArrowWriter:
    """Return the writer that stores the rows of a frame.

    Raises:
        ConfigurationError: An option or a column is missing, unknown or of a wrong type; or the mode is overwrite.
        UnsupportedByStoreError: The store cannot load messages in bulk.
    """
    return _Writer(read_settings(given, schema, overwrite=overwrite))


def stream_writer_of(
    given: Mapping[str, str], schema: StructType, *, overwrite: bool = False
) -> DataSourceStreamArrowWriter:
    """Return the writer that stores the rows of a stream. A batch that is repeated after a restart changes nothing.

    Raises:
        ConfigurationError: An option or a column is missing, unknown or of a wrong type; or the output mode is
            `complete`, which counts as overwrite.
        UnsupportedByStoreError: The store cannot load messages in bulk.
    """
    return _StreamWriter(read_settings(given, schema, overwrite=overwrite))


def write_frame(frame: DataFrame, given: Mapping[str, str], *, until_ms: int | None = None) -> Counts:
    """Store the rows of a frame and return their counts. The counts do not include failed attempts of a task.

    Spark cuts the frame into `concurrency` tasks, or one task for each core, so that the tasks together keep to the
    rate.

    Args:
        frame: Rows with the columns of a message; docs/spark/data-source.md lists them.
        given: The options of the data source for writing.
        until_ms: The time in epoch ms after which no row is sent; None = no limit.

    Raises:
        ConfigurationError: An option or a column is missing, unknown or of a wrong type; or not all rows were sent by
            `until_ms`.
        UnsupportedByStoreError: The store cannot load messages in bulk.
        PythonException: A task failed; `clear_error` returns the cause.
    """
    settings = structs.replace(read_settings(given, frame.schema), until_ms=until_ms)
    if settings.rate:
        tasks = settings.concurrency or cores_of(frame.sparkSession)
        settings = structs.replace(settings, concurrency=tasks)
        frame = frame.repartition(tasks)
    elif settings.concurrency:
        frame = frame.repartition(settings.concurrency)

    def counted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counts = load(settings, batches)
        yield pa.RecordBatch.from_pydict({name: [n] for name, n in structs.asdict(counts).items()})

    tasks_counts = frame.mapInArrow(counted, _COUNTS).collect()
    return sum((Counts(*each) for each in tasks_counts), Counts())


def cores_of(spark: SparkSession) -> int:
    """Return the number of tasks that run at the same time: Spark cuts a range into this number of parts."""
    return spark.range(100_000).select(spark_partition_id()).distinct().count()


@dataclass
class _Written(WriterCommitMessage):
    counts: Counts


class _CountsLogger:
    """Logs the counts on the driver at the end of a write. The store needs no commit."""

    def __init__(self, settings: WriteSettings) -> None:
        self._settings = settings

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _Written(load(self._settings, iterator))

    def _tell(self, messages: Sequence[WriterCommitMessage | None], what: str, level: int) -> None:
        counts = sum((each.counts for each in messages if isinstance(each, _Written)), Counts())
        told = ", ".join(f"{n} {name}" for name, n in structs.asdict(counts).items())
        log.log(level, "%s: %d rows, %s", what, counts.rows, told)


_DONE = "written"
_FAILED = "a write failed, and you can safely repeat it; stored by tasks that had finished"


class _Writer(_CountsLogger, DataSourceArrowWriter):
    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._tell(messages, _DONE, logging.INFO)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._tell(messages, _FAILED, logging.WARNING)


class _StreamWriter(_CountsLogger, DataSourceStreamArrowWriter):
    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        self._tell(messages, f"{_DONE}, batch {batchId}", logging.INFO)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        self._tell(messages, f"{_FAILED}, batch {batchId}", logging.WARNING)
