"""The data source `format("aiodelay")`, by which Spark reads and writes a store."""

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
    """Reads and writes messages of a store, and reads dead letters, ended messages and events of the store.

    This object lives on the driver. Spark pickles readers and writers and sends them to executors.
    """

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "aiodelay"

    def schema(self) -> str:
        """Return the columns of the table that the options name."""
        return SCHEMAS[read_table(self.options)]

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a table. The reader fetches only the columns of the schema."""
        from .reading import reader_of  # noqa: PLC0415 - a writer needs none of it

        return reader_of(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the stream reader of a store's events."""
        from .events import stream_reader_of  # noqa: PLC0415 - as above

        return stream_reader_of(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:  # noqa: FBT001 - Spark's signature
        """Return the writer that stores the rows of a frame."""
        from .writing import writer_of  # noqa: PLC0415 - as above

        return writer_of(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: FBT001, N802 - Spark's
        """Return the writer that stores the rows of a stream."""
        from .writing import stream_writer_of  # noqa: PLC0415 - as above

        return stream_writer_of(self.options, schema, overwrite=overwrite)
