"""Events of a history topic, for clusters that read Kafka with Spark's own connector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - its name everywhere

from aiodelay.core.durations import LAST_MS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["kafka_to_events"]

_ENTRY: Final = (
    "at_ms BIGINT, event STRING, id STRING, revision BIGINT, lane STRING, due_ms BIGINT, attempt INT, detail STRING"
)
_MOST: Final = {
    "at_ms": LAST_MS,
    "revision": (1 << 63) - 1,
    "due_ms": (1 << 48) - 1,
    "attempt": (1 << 31) - 1,
}
"""The limits in `aiodelay.backends.kafka.records`, repeated here because that module needs a Kafka client."""
_WHOLE: Final = " AND ".join(
    [f"entry.{name} IS NOT NULL" for name in ("event", "id", "lane")]
    + [f"entry.{name} BETWEEN 0 AND {most}" for name, most in _MOST.items()]
)


def kafka_to_events(raw: DataFrame) -> DataFrame:
    """Convert the records of a history topic into events, in the columns of `schemas.EVENTS`.

    Records that are not entries of a journal are left out.

    The rows are equal to the rows of `format("aiodelay").option("table", "events")`. docs/formats.md describes the
    format of the records under "Kafka".

    Args:
        raw: A batch or a stream with the columns `partition`, `offset` and `value` of Spark's connector.
    """
    entry = F.from_json(F.col("value").cast("string"), _ENTRY)
    told = raw.select("partition", "offset", entry.alias("entry")).where(_WHOLE)
    return told.select(
        "partition",
        F.col("offset").alias("number"),
        F.timestamp_millis("entry.at_ms").alias("at"),
        "entry.event",
        "entry.id",
        "entry.revision",
        "entry.lane",
        F.timestamp_millis("entry.due_ms").alias("due_at"),
        "entry.attempt",
        F.nullif("entry.detail", F.lit("")).alias("detail"),
    )
