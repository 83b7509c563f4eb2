"""Cancel in a cold tier: a tombstone for each message, and its end in the store if it has gone there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay.core.durations import format_duration
from aiodelay.core.values import TOMBSTONE_WINDOW_MS
from aiodelay.errors import ConfigurationError
from aiodelay.operations.spark_options import ColdCancelOptions, OnConflict
from aiodelay.spark.cold import END, WAS_DUE_AT, Standing, Tier, ends
from aiodelay.spark.summary import Summary

from .backfill import sorted_out
from .checking import Rules, judged
from .hot import Hot
from .job import job, judging_ms
from .mapping import given

__all__ = ["COLUMNS", "run"]

COLUMNS: Final = ("id", "version", WAS_DUE_AT)
"""What a mapping may give."""


@dataclass(frozen=True, kw_only=True)
class _Options(ColdCancelOptions):
    mapping: Mapping[str, str] | None = None


@job("cold cancel", _Options)
def run(frame: DataFrame, options: _Options) -> Summary:
    """Cancel messages: in the tier, and with a store also there, in whatever order this and a promotion run.

    May be repeated. A message that is put again under a higher version is a new one.

    Args:
        frame: A row for each message.
        options: See `ColdCancelOptions`; callers give each by keyword. In Python also `mapping`: a column or an SQL
            expression for `id`, `version` and `was_due_at`; None: columns called so. Without a version, any is
            cancelled; with it none that is newer. With a due time only that day is looked at.

    Returns:
        `rows`: ids. `counts`: `ended` by a new tombstone; `newer` than the version given, and left alone; `not_found`
        in the tier; `promoted`: they went into the store, or a promotion has claimed their day; with a store `hot_…`:
        what came of them there.

    Raises:
        ConfigurationError: An option, or a column's name or type, is wrong; or nothing was ever put into the tier.
        StoreUnavailableError: The store did not answer; to run it again is safe.
    """
    now_ms = judging_ms(options.now)
    hot = Hot.checked(options)
    place = Tier(frame.sparkSession, options.tier)
    asked = given(frame, options.mapping, names=COLUMNS, required=("id",))
    conflict: OnConflict = "newer" if "version" in asked.columns else "insert"
    rules = Rules(now_ms=now_ms, conflict=conflict, timezone=options.timezone)
    with sorted_out(judged(asked, rules), rules) as (good, found):
        counts = _cancel(place, good, hot, now_ms)
    undone = {} if hot else {f"id.{name}": n for name in ("promoted", "not_found") if (n := counts[name])}
    reasons = found.reasons | undone
    return Summary(
        rows=found.rows,
        rejected=sum(reasons.values()),
        counts={**found.dropped, **counts},
        facts={"reasons": reasons, "tombstone_window": format_duration(TOMBSTONE_WINDOW_MS)},
    )


def _cancel(place: Tier, asked: DataFrame, hot: Hot | None, now_ms: int) -> dict[str, int]:
    """Add tombstones first, and look for claims then: a promotion that has not seen the ones is seen by its other."""
    before = place.standing()
    if not before.loads:
        raise ConfigurationError("tier", "a folder in which there is nothing", "one that `cold put` has written")
    if hot is not None:
        hot.check_of(before)
    most = F.col("version") if "version" in asked.columns else F.lit(None).cast("bigint")
    asked = asked.withColumn("most_version", most).drop("version")
    known = place.known(before, asked, now_ms=now_ms)
    if known is None:
        known = asked.sparkSession.createDataFrame([], _KNOWN)
    matches = known.join(asked.select("id", "most_version"), "id").persist()
    try:
        load = place.add(ends(matches.where(_IS_OLDER)), now_ms=now_ms)
        standing = place.standing()
        told = _told(asked, matches, standing).persist()
        counts = {"ended": load.counts[END] if load else 0, **_counts(told)}
        ended = hot.end(told) if hot is not None else {}
        told.unpersist()
    finally:
        matches.unpersist()
    return counts | {f"hot_{name}": n for name, n in sorted(ended.items())}


_KNOWN: Final = "id STRING, due_day DATE, version BIGINT, stored BIGINT, ended BIGINT"
_IS_OLDER: Final = "version <= coalesce(most_version, version)"


def _told(asked: DataFrame, matches: DataFrame, standing: Standing) -> DataFrame:
    """Return each id with the number of `days` that have it, and `older` ones of them.

    `barred_version`: what is in the store, or what a promotion may have read and not written yet.
    """
    is_there = (F.col("due_day") < F.lit(standing.claimed)) | (F.col("stored") == F.col("version"))
    found = matches.groupBy("id").agg(
        F.count("*").alias("days"),
        F.count_if(F.expr(_IS_OLDER)).alias("older"),
        F.max(F.when(F.expr(_IS_OLDER) & is_there, F.col("version"))).alias("barred_version"),
    )
    return asked.select("id", "most_version").join(found, "id", "left")


def _counts(told: DataFrame) -> dict[str, int]:
    counts = {
        "newer": F.count_if(F.col("older") < F.col("days")),
        "not_found": F.count_if(F.col("days").isNull()),
        "promoted": F.count_if(F.col("barred_version").isNotNull()),
    }
    (row,) = told.agg(*(count.alias(name) for name, count in counts.items())).collect()
    return dict(row.asDict())
