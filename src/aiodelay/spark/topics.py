"""`format("aiodelay_kafka")`: topics of Kafka as streams, read and written, where Spark's own connector is not at hand.

Rows look as the connector's do. What is read is exact: offsets stand in the checkpoint, and only what is committed
counts. What is written is written at least once: all of a batch is acknowledged before Spark commits it.

Spark imports this module anew for each batch, on the driver; so nothing large is imported but where work is done.
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
"""What is read: a topic's records, as Spark's Kafka connector gives them with `includeHeaders`."""
_WRITTEN: Final = {
    "topic": "string",
    "key": "binary",
    "value": "binary",
    "headers": "array<struct<key:string,value:binary>>",
}


class TopicSource(DataSource):
    """A topic as a stream of its records, and a stream's rows as records of the topics that they name."""

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "aiodelay_kafka"

    def schema(self) -> str:
        """Return the columns of what is read."""
        return RECORDS

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return what follows a topic."""
        from .topic_reading import topic_reader_of  # noqa: PLC0415 - see above

        return topic_reader_of(self.options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> TopicWriter:  # noqa: FBT001, N802 - Spark's
        """Return what writes records.

        Raises:
            ConfigurationError: An option or a column is missing, unknown or of a wrong type.
        """
        options = Options(self.options)
        url = options.required("url", "kafka://host:9092")
        dead = options.required("dead", "a topic for what cannot be written")
        timeout = options.text("timeout", "60s") or "60s"
        timeout_ms = parse_duration(timeout, field="option 'timeout'", error=ConfigurationError)
        options.text("checkpointLocation")  # this and the next: Spark's own
        options.text("queryName")
        options.finish()
        found = {field.name: field.dataType.simpleString() for field in schema.fields}
        for name, kind in _WRITTEN.items():
            if found.get(name) != kind:
                raise ConfigurationError(f"column {name!r}", found.get(name, "missing"), kind)
        return TopicWriter(_Writing(url=url, dead=dead, timeout_ms=timeout_ms))


class _Writing(Struct, frozen=True, kw_only=True):
    """How records are written; pickled with the writer."""

    url: str
    dead: str
    timeout_ms: int

    def __repr__(self) -> str:  # as `Following`
        return "_Writing()"


class TopicWriter(DataSourceStreamArrowWriter):
    """Writes each row to the topic that it names; what that topic never takes, to the dead topic, with the reason.

    Args:
        writing: How.
    """

    def __init__(self, writing: _Writing) -> None:
        self._writing = writing

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Return once every record is acknowledged.

        Raises:
            StoreUnavailableError: The cluster did not answer for too long; some may be written.
        """
        from .producing import write_batches  # noqa: PLC0415 - see above

        how = self._writing
        write_batches(how.url, iterator, dead=how.dead, timeout_ms=how.timeout_ms)
        return WriterCommitMessage()

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Do nothing: all is written."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Do nothing: what was written stays, and is written again."""
