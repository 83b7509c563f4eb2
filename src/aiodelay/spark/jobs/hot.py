"""The store into which a cold tier is promoted (the *hot* store), for `cold put`, `cold cancel` and `promote`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, Self

from msgspec import structs
from pyspark.sql import DataFrame
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType, TimestampType

from aiodelay.core.values import TOMBSTONE_WINDOW_MS
from aiodelay.errors import ConfigurationError
from aiodelay.operations.spark_options import ColdCancelOptions, ColdPutOptions, WriteOptions
from aiodelay.scheduler import MOST_PAYLOAD
from aiodelay.spark.cold import MESSAGE, Standing
from aiodelay.spark.ending import end_frame
from aiodelay.spark.write_settings import WriteSettings, read_settings, store_of, write_options
from aiodelay.spark.writing import write_frame

__all__ = ["Hot"]

_WITHIN_MS: Final = TOMBSTONE_WINDOW_MS - 3_600_000
"""The most time between the reading of a tier and the last write to a store.

A store remembers ended messages for one hour longer. So at the last write, the store still knows all messages that have
ended since the reading.
"""
_SCHEMA: Final = StructType(
    [
        StructField("id", StringType()),
        StructField("due_at", TimestampType()),
        StructField("payload", BinaryType()),
        StructField("to", StringType()),
        StructField("version", LongType()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Hot(WriteOptions):
    """The hot store, and the settings for writing to it."""

    @classmethod
    def of(cls, options: WriteOptions | ColdPutOptions | ColdCancelOptions) -> Self:
        """Return the hot store, and the settings for writing to it, from the options of a job."""
        return cls(**{each.name: getattr(options, each.name) for each in fields(cls)})

    @classmethod
    def checked(cls, options: ColdPutOptions | ColdCancelOptions) -> Self | None:
        """Return the hot store of a job, checked before Spark starts work; None if the job has no store.

        Raises:
            ConfigurationError: A setting is wrong.
            UnsupportedByStoreError: The store cannot load messages in bulk.
        """
        if options.store is None:
            return None
        hot = cls.of(options)
        hot.settings()
        return hot

    def settings(self) -> WriteSettings:
        """Check and return the settings for writing.

        Raises:
            ConfigurationError: A setting is wrong.
            UnsupportedByStoreError: The store cannot load messages in bulk.
        """
        return read_settings(self._options(), _SCHEMA)

    @property
    def name(self) -> str:
        """The name of the store in the log of a tier: its masked URL, and the namespace."""
        return f"{store_of(self.settings()).name} {self.namespace}"

    def check_of(self, tier: Standing) -> None:
        """Check that this is the store into which the tier is promoted.

        Raises:
            ConfigurationError: The tier is promoted into another store.
        """
        if tier.store not in (None, self.name):
            allowed = f"{tier.store}, into which this tier is promoted; or, for a promotion, the option new_store"
            raise ConfigurationError("store", self.name, allowed)

    def write(self, messages: DataFrame, *, read_ms: int) -> dict[str, int]:
        """Store messages with their versions; return the numbers of `stored`, `replaced` and `known` messages.

        Args:
            messages: Rows with the columns of a message; other columns are ignored.
            read_ms: The time at which the tier was read, in epoch ms of this machine's clock.

        Raises:
            ConfigurationError: The write took too long. The store may have forgotten messages that ended since
                `read_ms`.
        """
        rows = messages.select(*(name for name in MESSAGE if name in messages.columns))
        return structs.asdict(write_frame(rows, self._options(), until_ms=read_ms + _WITHIN_MS))

    def end(self, rows: DataFrame) -> Mapping[str, int]:
        """End messages by version, as `end_frame` does."""
        return end_frame(rows, self.settings())

    def _options(self) -> dict[str, str]:
        return write_options(self, conflict="newer", max_payload=MOST_PAYLOAD)
