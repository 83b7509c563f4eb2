"""The data source `format("aiodelay_kafka")`: streams from and to Kafka topics, without Spark's own connector.

The rows have the columns of Spark's connector. Reading is exact: the checkpoint has the offsets, and only committed
records are read. Writing is at least once: Kafka acknowledges all records of a batch before Spark commits the batch.

Spark imports this module again for each batch, on the driver. So functions that do the work import the large modules,
and this module does not import them at its top.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, DataSourceStreamReader, WriterCommitMessage

from aiodelay.core.durations import parse_duration
from aiodelay.errors import ConfigurationError

from .options import Options

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

__all__ = ["RECORDS", "TopicSource", "TopicWriter"]

RECORDS: Final = (
    "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, "
    "headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
)
"""The columns of a read stream: those of Spark's Kafka connector with `includeHeaders`."""
_WRITTEN: Final = {
    "topic": "string",
    "key": "binary",
    "value": "binary",
    "headers": "array<struct<key:string,value:binary>>",
}


class TopicSource(DataSource):
    """Reads the records of a topic as a stream, and writes the rows of a stream to the topics that they name."""

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "aiodelay_kafka"

    def schema(self) -> str:
        """Return the columns of a read stream."""
        return RECORDS

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the stream reader of a topic."""
        from .topic_reading import topic_reader_of  # noqa: PLC0415 - see above

        return topic_reader_of(self.options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> TopicWriter:  # noqa: FBT001, N802 - Spark's
        """Return the writer of records.

        Raises:
            ConfigurationError: An option or a column is missing, unknown or of a wrong type.
        """
        options = Options(self.options)
        url = options.required("url", "kafka://host:9092")
        dead = options.required("dead", "orders.dead, the topic for records that cannot be written")
        timeout = options.text("timeout", "60s") or "60s"
        timeout_ms = parse_duration(timeout, field="option 'timeout'", error=ConfigurationError)
        options.text("checkpointLocation")  # Spark itself sets this option and the next
        options.text("queryName")
        options.finish()
        found = {field.name: field.dataType.simpleString() for field in schema.fields}
        for name, kind in _WRITTEN.items():
            if found.get(name) != kind:
                raise ConfigurationError(f"column {name!r}", found.get(name, "missing"), kind)
        return TopicWriter(_Writing(url=url, dead=dead, timeout_ms=timeout_ms))


class _Writing(Struct, frozen=True, kw_only=True):
    """The options of a writer; pickled with the writer."""

    url: str
    dead: str
    timeout_ms: int

    def __repr__(self) -> str:  # as in `Following`: no password in tracebacks
        return "_Writing()"


class TopicWriter(DataSourceStreamArrowWriter):
    """Writes each row to the topic that the row names. If this topic never takes the row, the dead topic gets the row.

    Args:
        writing: The options of the writer.
    """

    def __init__(self, writing: _Writing) -> None:
        self._writing = writing

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of a task. Return after Kafka has acknowledged every record.

        Raises:
            StoreUnavailableError: The cluster did not answer for too long. Some records may have been written.
        """
        from .producing import write_batches  # noqa: PLC0415 - see above

        how = self._writing
        write_batches(how.url, iterator, dead=how.dead, timeout_ms=how.timeout_ms)
        return WriterCommitMessage()

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Do nothing: all records are written."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Do nothing: written records stay, and the repeated batch writes them again."""
