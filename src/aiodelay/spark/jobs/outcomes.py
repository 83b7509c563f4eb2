"""Aggregation of events into the figures of a report: outcomes and lateness by lane and hour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain, combinations
from typing import Final, get_args

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay.core.durations import to_epoch_ms
from aiodelay.core.values import DeadReason
from aiodelay.errors import ConfigurationError, InputError, shortened
from aiodelay.operations.spark_options import By

from .settings_origin import problem_of_condition

__all__ = ["levels_of", "report"]

DEAD_REASONS: Final[tuple[str, ...]] = get_args(DeadReason)
_OUTCOMES = ("delivered", "again", "dead", "dropped", "skipped")
_PERCENTS = (50, 95, 99)
_EXACT_MS, _DIGITS = 10_000, 4
_LOOK_BACK = timedelta(days=1)
_NEEDED = {"number": "bigint", "at": "timestamp", "event": "string", "id": "string", "revision": "bigint"}
_NEEDED |= {"lane": "string", "due_at": "timestamp", "detail": "string"}


def report(
    events: DataFrame,
    *,
    by: Sequence[By] = ("lane", "hour"),
    start: datetime | None = None,
    end: datetime | None = None,
    where: str | None = None,
    totals: bool = False,
) -> DataFrame:
    """Return one row for each lane and hour in which a message had an outcome.

    Lateness is the start of a delivery minus the due time. The start is the last `claimed` event before the `delivered`
    event. Transfers inside a server and Kafka stores write no claims: there, the start is the `delivered` event itself.
    For each id, revision and due time, the first success counts, in the hour in which that delivery ended. Percentiles
    are nearest ranks: exact up to 10 s of lateness, above that rounded up to four digits.

    Args:
        events: Columns of `schemas.EVENTS`; also `day`, if the events are an archive.
        by: The columns by which rows are grouped: `lane`, and `hour` or `day` in UTC; empty = one row for all events.
        start: The first instant that is counted; aware.
        end: The first instant that is not counted any more; aware.
        where: An SQL condition on the columns of `events`. It should hold for all events of a message, or for none.
        totals: Also return totals: rows that sum over some or all columns of `by`, with null in these columns.

    Returns:
        Rows in no order, with the columns of `by` and these columns:

        - `delivered`: deliveries that succeeded;
        - `p50_ms`, `p95_ms`, `p99_ms`, `max_ms` and `min_ms` of lateness; null if nothing was delivered;
        - `early`: deliveries before the due time, by the clocks that wrote the events;
        - `unclaimed`: deliveries without a claim in the journal;
        - `repeated`: successes after the first success;
        - `again`: retries;
        - `dropped`: messages that ended without a delivery, because they were too late or cancelled in flight;
        - `skipped`: occurrences that were left out of their series;
        - `dead` and `dead_<reason>`: dead letters.

    Raises:
        InputError: A column is missing or has another type, or `where` is not a valid condition.
        ConfigurationError: `by` has an unknown or repeated name, or `start` is not before `end`.
    """
    _check_by(by)
    _check_range(start, end)
    found = _outcomes(_chosen(events, start, end, where))
    if start is not None:
        found = found.where(F.col("at") >= _instant(start))
    return _figures(_histogram(found, by), levels_of(by) if totals else [tuple(by)], by)


def _check_by(by: Sequence[By]) -> None:
    is_known = set(by) <= set(get_args(By)) and len(set(by)) == len(by)
    if not is_known or {"hour", "day"} <= set(by):
        raise ConfigurationError(
            "by", shortened(list(by)), "lane, hour and day, each at most once, but not hour together with day"
        )


def _check_range(start: datetime | None, end: datetime | None) -> None:
    start_ms = None if start is None else to_epoch_ms(start, field="start")
    end_ms = None if end is None else to_epoch_ms(end, field="end")
    if start_ms is not None and end_ms is not None and start_ms >= end_ms:
        raise ConfigurationError("start", shortened(start), f"before the end, {end}")


def _chosen(events: DataFrame, start: datetime | None, end: datetime | None, where: str | None) -> DataFrame:
    """Return claims and outcomes from one day before the start of the time range until its end."""
    _check_columns(events)
    chosen = events.where(F.col("event").isin("claimed", *_OUTCOMES))
    if where is not None:
        chosen = _where(chosen, where)
    if start is not None:
        first = start - _LOOK_BACK
        chosen = _in_days(chosen, lambda day: day >= _day_of(first)).where(F.col("at") >= _instant(first))
    if end is not None:
        chosen = _in_days(chosen, lambda day: day <= _day_of(end)).where(F.col("at") < _instant(end))
    return chosen


def _check_columns(events: DataFrame) -> None:
    there = {field.name: field.dataType.simpleString() for field in events.schema.fields}
    for name, kind in _NEEDED.items():
        if there.get(name) != kind:
            raise InputError(f"column {name!r} of the events", there.get(name, "missing"), kind)


def _where(events: DataFrame, condition: str) -> DataFrame:
    allowed = "a condition on the events' columns"
    if problem := problem_of_condition(events, condition):
        raise InputError("where", f"{shortened(condition)}{problem}", allowed)
    return events.where(condition)


def _in_days(events: DataFrame, condition: Callable[[Column], Column]) -> DataFrame:
    """Limit an archive to some days by its partition column `day`, so that Spark reads only these folders."""
    return events.where(condition(F.col("day"))) if "day" in events.columns else events


def _day_of(at: datetime) -> Column:
    return F.lit(at.astimezone(UTC).date())


def _instant(at: datetime) -> Column:
    return F.timestamp_millis(F.lit(to_epoch_ms(at, field="at")))


def _outcomes(events: DataFrame) -> DataFrame:
    """Return a row for each outcome: `lane`, `at`, `what`; for a first success, also `late_ms` and `is_claimed`."""
    occurrence = Window.partitionBy("id", "revision", "due_at").orderBy("number")
    upto_now = occurrence.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    event, is_delivered = F.col("event"), F.col("event") == "delivered"
    told = events.select(
        "lane",
        "at",
        "event",
        "due_at",
        "detail",
        F.last(F.when(event == "claimed", F.col("at")), ignorenulls=True).over(upto_now).alias("claimed_at"),
        F.count(F.when(is_delivered, 1)).over(upto_now).alias("successes"),
    ).where(event != "claimed")
    is_first = is_delivered & (F.col("successes") == 1)
    reason = F.when(F.col("detail").isin(*DEAD_REASONS), F.col("detail")).otherwise("other")
    what = (
        F.when(event == "dead", F.concat(F.lit("dead_"), reason))
        .when(is_delivered & ~is_first, "repeated")
        .otherwise(event)
    )
    late_ms = F.unix_millis(F.coalesce("claimed_at", "at")) - F.unix_millis("due_at")
    return told.select(
        "lane",
        "at",
        what.alias("what"),
        F.when(is_first, late_ms).alias("late_ms"),
        F.when(is_first, F.col("claimed_at").isNotNull()).alias("is_claimed"),
    )


def _histogram(outcomes: DataFrame, by: Sequence[By]) -> DataFrame:
    """Return the number of outcomes by kind and rounded lateness. More events do not make this table larger."""
    seconds = F.unix_seconds("at")
    places = {
        "lane": F.col("lane"),
        "hour": F.timestamp_seconds(F.floor(seconds / 3600) * 3600).alias("hour"),  # in any session's time zone
        "day": F.date_from_unix_date(F.floor(seconds / 86_400).cast("int")).alias("day"),
    }
    within = outcomes.select(*(places[each] for each in by), "what", "is_claimed", "late_ms")
    return within.groupBy(*by, "what", "is_claimed", _rounded("late_ms").alias("ms")).agg(
        F.count("*").alias("n"), F.min("late_ms").alias("least_ms"), F.max("late_ms").alias("most_ms")
    )


def _rounded(name: str) -> Column:
    size = F.abs(F.col(name))
    step = F.pow(F.lit(10.0), F.floor(F.log10(F.greatest(size, F.lit(1)))) - (_DIGITS - 1)).cast("bigint")
    return F.when(size <= _EXACT_MS, F.col(name)).otherwise(F.ceil(F.col(name) / step) * step)


def levels_of(by: Sequence[By]) -> list[tuple[By, ...]]:
    """Return the groupings of a report with totals: all columns of `by`, then every smaller selection, last none."""
    return list(chain.from_iterable(combinations(by, n) for n in range(len(by), -1, -1)))


def _figures(histogram: DataFrame, levels: Sequence[tuple[By, ...]], by: Sequence[By]) -> DataFrame:
    rows = _by_levels(histogram, levels, by)
    group = Window.partitionBy("level", *by)
    is_late = F.col("what") == "delivered"
    upto = F.sum(F.when(is_late, F.col("n"))).over(group.orderBy("ms").rangeBetween(Window.unboundedPreceding, 0))
    ranked = rows.select("*", upto.alias("upto"), F.sum(F.when(is_late, F.col("n"))).over(group).alias("all"))
    reasons = (*DEAD_REASONS, "other")
    return (
        ranked.groupBy("level", *by)
        .agg(
            _sum(is_late).alias("delivered"),
            *(_percentile(percent).alias(f"p{percent}_ms") for percent in _PERCENTS),
            F.max("most_ms").alias("max_ms"),
            F.min("least_ms").alias("min_ms"),
            _sum(is_late & (F.col("ms") < 0)).alias("early"),
            _sum(is_late & ~F.col("is_claimed")).alias("unclaimed"),
            *(_sum(F.col("what") == name).alias(name) for name in ("repeated", "again", "dropped", "skipped")),
            _sum(F.col("what").startswith("dead_")).alias("dead"),
            *(_sum(F.col("what") == f"dead_{reason}").alias(f"dead_{reason}") for reason in reasons),
        )
        .drop("level")
    )


def _by_levels(histogram: DataFrame, levels: Sequence[tuple[By, ...]], by: Sequence[By]) -> DataFrame:
    """Return the histogram once for each level, summed over the columns that the level leaves out."""
    kinds = ("what", "is_claimed", "ms")
    sets = [[*level, *kinds] for level in levels]
    return histogram.groupingSets(sets, *by, *kinds).agg(
        F.grouping_id().alias("level"),
        F.sum("n").alias("n"),
        F.min("least_ms").alias("least_ms"),
        F.max("most_ms").alias("most_ms"),
    )


def _sum(condition: Column) -> Column:
    return F.coalesce(F.sum(F.when(condition, F.col("n"))), F.lit(0))


def _percentile(percent: int) -> Column:
    """Return the smallest lateness that `percent` percent of the deliveries do not exceed."""
    has_reached = F.col("upto") * 100 >= F.col("all") * percent
    return F.least(F.min(F.when(has_reached, F.col("ms"))), F.max("most_ms"))
