"""`aiodelay spark cold cancel`: add tombstones to a cold tier, and end promoted messages in the store."""

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
"""The columns that the option `mapping` may give."""


@dataclass(frozen=True, kw_only=True)
class _Options(ColdCancelOptions):
    mapping: Mapping[str, str] | None = None


@job("cold cancel", _Options)
def run(frame: DataFrame, options: _Options) -> Summary:
    """Cancel messages in the tier, and in the store if `store` is given. A promotion may run meanwhile.

    The job may be repeated. If a message is put again with a higher version, it is a new message.

    Args:
        frame: A row for each message.
        options: See `ColdCancelOptions`; callers give each option by keyword. Python callers may also give `mapping`: a
            column or an SQL expression for `id`, `version` and `was_due_at`. Without `mapping`, the columns have these
            names. If a row has a `version`, newer versions are not cancelled; otherwise every version is cancelled. If
            each row has a `was_due_at`, the job reads only those days.

    Returns:
        `rows` is the number of ids. `counts` has these numbers:

        - `ended`: messages that got a tombstone;
        - `newer`: ids with a version that is newer than the given version, and therefore not cancelled;
        - `not_found`: ids that are not in the tier;
        - `promoted`: ids that are in the store, or on a day that a promotion has claimed;
        - `hot_…`: the outcomes in the store, if the job has a store.

    Raises:
        ConfigurationError: An option is wrong, or a column has a wrong name or type, or nothing was ever put into the
            tier.
        StoreUnavailableError: The store did not answer. Running the job again is safe.
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
    """Cancel the asked messages and return counts.

    Race with a promotion: this function first adds tombstones and then reads claims. The promotion first adds its claim
    and then reads tombstones. So either the promotion sees the tombstone, or this function sees the claim.
    """
    before = place.standing()
    if not before.loads:
        raise ConfigurationError("tier", "an empty folder", "a folder that `cold put` has written")
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
    """Return a row for each id, which says how many of its versions in the tier may be cancelled.

    `days` is the number of days with a version of the id. `older` is the number of days whose version may be cancelled.
    `barred_version` is the highest version that may be cancelled and is, or soon may be, in the store: `cold put` has
    stored it there, or a promotion has claimed its day. The promotion may have stored the version, or may have read it
    and will still store it.
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
