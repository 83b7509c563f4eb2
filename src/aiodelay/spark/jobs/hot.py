"""The store that a cold tier's messages go into when their time comes near."""

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
"""How old what was read of a tier may be when it is written: an hour less than a store knows what has ended since."""
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
    """A store, and how it is written to."""

    @classmethod
    def of(cls, options: WriteOptions | ColdPutOptions | ColdCancelOptions) -> Self:
        """Return the store that a job's options name."""
        return cls(**{each.name: getattr(options, each.name) for each in fields(cls)})

    @classmethod
    def checked(cls, options: ColdPutOptions | ColdCancelOptions) -> Self | None:
        """Return the store of a job that may do without, before Spark has any work.

        Raises:
            ConfigurationError: As `settings`.
            UnsupportedByStoreError: As `settings`.
        """
        if options.store is None:
            return None
        hot = cls.of(options)
        hot.settings()
        return hot

    def settings(self) -> WriteSettings:
        """Return them, checked.

        Raises:
            ConfigurationError: One is wrong.
            UnsupportedByStoreError: The store takes nothing in bulk.
        """
        return read_settings(self._options(), _SCHEMA)

    @property
    def name(self) -> str:
        """What the store is called: its URL, masked, and the namespace."""
        return f"{store_of(self.settings()).name} {self.namespace}"

    def check_of(self, tier: Standing) -> None:
        """Refuse to have a tier end or store anything in another store than it is promoted into.

        Raises:
            ConfigurationError: It is promoted into another one.
        """
        if tier.store not in (None, self.name):
            allowed = f"{tier.store}, into which this tier is promoted; or new_store for a promotion"
            raise ConfigurationError("store", self.name, allowed)

    def write(self, messages: DataFrame, *, read_ms: int) -> dict[str, int]:
        """Store messages under their versions; return how many were `stored`, `replaced` and `known`.

        Args:
            messages: With columns of a message, and others.
            read_ms: When they were read of the tier, in epoch ms of this machine's clock.

        Raises:
            ConfigurationError: It took so long that the store may have forgotten what was ended meanwhile.
        """
        rows = messages.select(*(name for name in MESSAGE if name in messages.columns))
        return structs.asdict(write_frame(rows, self._options(), until_ms=read_ms + _WITHIN_MS))

    def end(self, rows: DataFrame) -> Mapping[str, int]:
        """End messages by version; as `end_frame`."""
        return end_frame(rows, self.settings())

    def _options(self) -> dict[str, str]:
        return write_options(self, conflict="newer", max_payload=MOST_PAYLOAD)
