"""Messages for a cold tier and readers of its content, for the tests of putting, cancelling and promoting."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from aiodelay.spark.cold import Tier, live
from aiodelay.spark.jobs import cold_cancel, cold_put, promote
from aiodelay.spark.summary import Summary

__all__ = ["NOW", "cancel", "days", "kept", "moved", "put", "rows"]

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
"""When these tests play, unless they say otherwise."""
_ROW = "id STRING, due_at TIMESTAMP, version BIGINT, payload STRING"


def days(n: float) -> timedelta:
    return timedelta(days=n)


def rows(spark: SparkSession, *given: tuple[str | None, float, int]) -> DataFrame:
    """Return messages of ids, due in how many days from `NOW`, and versions."""
    values = [(each, NOW + days(due), version, f"v{version}") for each, due, version in given]
    return spark.createDataFrame(values, _ROW)


def put(frame: DataFrame, tier: str, *, now: datetime = NOW, **options: Any) -> Summary:  # noqa: ANN401 - as of the job
    given: dict[str, Any] = {"conflict": "newer", "to": "redis-list:orders", "rate": 0, "concurrency": 1}
    return cold_put.run(frame, tier=tier, now=now, **(given | options))


def cancel(
    spark: SparkSession, tier: str, *ids: tuple[str, int | None], now: datetime = NOW, store: str | None = None
) -> Summary:
    frame = spark.createDataFrame(ids, "id STRING, version BIGINT")
    named = frame if any(version is not None for _, version in ids) else frame.select("id")
    return cold_cancel.run(named, tier=tier, now=now, store=store, rate=0, concurrency=1)


def moved(spark: SparkSession, tier: str, store: str, now: datetime, **options: Any) -> Summary:  # noqa: ANN401 - as above
    return promote.run(spark, tier=tier, store=store, now=now, **({"rate": 0, "concurrency": 1} | options))


def kept(spark: SparkSession, tier: str) -> dict[str, tuple[float, int]]:
    """Return what a tier would deliver: days from `NOW`, and version; each id once, or this fails."""
    place = Tier(spark, tier)
    facts = place.facts(place.standing(), lambda _: True)
    assert facts is not None
    found = live(facts).selectExpr("id", "unix_millis(due_at) ms", "version").collect()
    by_id = {row["id"]: ((row["ms"] / 1000 - NOW.timestamp()) / 86_400, row["version"]) for row in found}
    assert len(by_id) == len(found)
    return by_id
