"""`format("aiodelay")`: the door through which Spark reads and writes a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)

from .options import read_table
from .schemas import SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["AiodelaySource"]


class AiodelaySource(DataSource):
    """Reads and writes a store's messages, reads its dead letters, its ended ones, and its events as a stream.

    What happens where: this object lives on the driver; readers and writers are pickled and sent to executors.
    """

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "aiodelay"

    def schema(self) -> str:
        """Return the columns of the table that the options name."""
        return SCHEMAS[read_table(self.options)]

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return what reads a table once; only the columns of the schema are fetched."""
        from .reading import reader_of  # noqa: PLC0415 - a writer needs none of it

        return reader_of(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return what follows a store's events."""
        from .events import stream_reader_of  # noqa: PLC0415 - as above

        return stream_reader_of(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:  # noqa: FBT001 - Spark's signature
        """Return what stores a frame's messages."""
        from .writing import writer_of  # noqa: PLC0415 - as above

        return writer_of(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: FBT001, N802 - Spark's
        """Return what stores a stream's messages."""
        from .writing import stream_writer_of  # noqa: PLC0415 - as above

        return stream_writer_of(self.options, schema, overwrite=overwrite)
