"""`aiodelay spark repair`: check again which differences of a reconcile still exist, and repair these differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, get_args

from msgspec import Struct
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay.core.durations import format_duration, parse_duration
from aiodelay.core.values import TOMBSTONE_WINDOW_MS
from aiodelay.errors import ConfigurationError, InputError, UnsupportedByStoreError, shortened
from aiodelay.operations.spark_options import Kind, RepairOptions
from aiodelay.spark.repairing import FOUND, OUTCOMES, Repairer
from aiodelay.spark.summary import Summary
from aiodelay.spark.write_settings import WriteSettings, read_settings, store_of

from .differences import compared_in
from .job import job, judging_ms
from .mapping import mapped

__all__ = ["KINDS", "MAX_FRACTION", "run"]

KINDS: Final[tuple[str, ...]] = get_args(Kind)
"""The kinds that are repaired by default. Orphans are cancelled only with `delete_orphans`."""
MAX_FRACTION: Final = RepairOptions.max_fraction

_COLUMNS = ("kind", "id", "have_due_at", "have_revision", "found_at", "truth_rows")


class _Chosen(Struct, frozen=True):
    counts: Mapping[str, int]
    found_ms: int
    truth_rows: int

    @property
    def rows(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True, kw_only=True)
class _Options(RepairOptions):
    differences: DataFrame = field(kw_only=False)
    truth: DataFrame = field(kw_only=False)


@job("repair", _Options)
def run(spark: SparkSession, options: _Options) -> Summary:
    """Repair the differences that a reconcile found and that still exist.

    Messages that have changed since the reconcile are not repaired: the next reconcile compares them again.
    A missing message is stored, unless the store remembers that it ended. A message with another due time is moved to
    the truth's time. A message with other differences gets the truth's values as a new version. Orphans are cancelled.
    Ended messages do not come back. A second run changes nothing more.

    Args:
        spark: A session, classic or Connect.
        options: First `differences`, which `reconcile` has written, and `truth` as for `reconcile`. The job reads the
            truth again, and the truth may have changed. Then the options of `RepairOptions`; callers give each option
            by keyword.

    Returns:
        `rows`: differences of the chosen kinds. `counts`: their outcomes. Repaired: `stored`, `replaced`,
        `rescheduled`, `cancelled`. Not repaired: `present` and `same` (the store is right by now), `ended`, `changed`
        (since the reconcile), `withdrawn` and `wanted` (the truth has changed), `ahead`, `soon`.

    Raises:
        ConfigurationError: An option is wrong, or there are more differences than allowed. Nothing was changed.
        InputError: The differences are older than the store's memory, or the truth has an id twice.
        UnsupportedByStoreError: The store cannot be repaired.
    """
    margin_ms = parse_duration(options.margin, field="margin", error=ConfigurationError)
    now_ms = judging_ms(options.now)
    wanted = mapped(options.truth, options.mapping, to=options.to, timezone=options.timezone)
    given = compared_in(wanted)
    wanted_kinds = _read_kinds(options.kinds, orphans=options.delete_orphans)
    _check_columns(options.differences, given, wanted_kinds)
    wanted, settings = _writable(wanted, options.store, options.namespace)
    chosen = _chosen(options.differences, wanted_kinds)
    _check_bounds(chosen, options.max_fraction, options.delete_orphans)
    _check_age(chosen, now_ms)
    counts: dict[str, int] = {}
    if chosen.rows:
        repairer = Repairer(settings, given, now_ms + margin_ms)
        work = _work(options.differences.where(F.col("kind").isin(*wanted_kinds)), wanted, settings)
        outcomes = work.mapInArrow(repairer, OUTCOMES).groupBy("outcome").agg(F.sum("n").alias("n"))
        counts = {each["outcome"]: each["n"] for each in outcomes.collect()}
    return Summary(
        rows=chosen.rows,
        counts=counts,
        facts={"found": chosen.counts, "tombstone_window": format_duration(TOMBSTONE_WINDOW_MS)},
    )


def _read_kinds(kinds: Sequence[str], *, orphans: int) -> tuple[str, ...]:
    for kind in kinds:
        if kind not in KINDS:
            allowed = f"{' and '.join(KINDS)}; for orphans, give delete_orphans"
            raise ConfigurationError("kinds", shortened(kind), allowed)
    return (*kinds, "orphan") if orphans else tuple(kinds)


def _check_columns(differences: DataFrame, given: Sequence[str], kinds: Sequence[str]) -> None:
    if lacking := [name for name in _COLUMNS if name not in differences.columns]:
        raise ConfigurationError("differences", f"missing column {lacking[0]!r}", "a frame that `reconcile` wrote")
    for name in ("payload", "to"):
        if "missing" in kinds and name not in given:
            raise ConfigurationError(
                f"column {name!r} of truth",
                "missing",
                "a column of the truth, to store missing messages; or kinds=drift",
            )


def _writable(wanted: DataFrame, store: str, namespace: str) -> tuple[DataFrame, WriteSettings]:
    """Return the rows of `wanted`, and the settings for writing them.

    `read_settings` requires the columns `payload` and `to`. If the rows lack one of these columns, this function adds a
    column with a constant value, which `repair_of` does not use.
    """
    for name, blank in {"payload": F.lit(b""), "to": F.lit("nowhere:nothing")}.items():
        wanted = wanted if name in wanted.columns else wanted.withColumn(name, blank)
    options = {"store": store, "namespace": namespace}
    if "version" in wanted.columns:
        wanted = wanted.withColumn("version", F.coalesce("version", F.lit(0)))
        options["conflict"] = "newer"
    settings = read_settings(options, wanted.schema)
    opened = store_of(settings)
    if opened.traits.lookup != "anywhere":
        raise UnsupportedByStoreError("store", opened.name, "a store that any process can inspect: Redis or SQLite")
    return wanted, settings


def _chosen(differences: DataFrame, kinds: Sequence[str]) -> _Chosen:
    totals = [F.count("*").alias("n"), F.unix_millis(F.min("found_at")).alias("at"), F.min("truth_rows").alias("of")]
    rows = differences.where(F.col("kind").isin(*kinds)).groupBy("kind").agg(*totals).collect()
    found_ms, truth_rows = (min((each[name] for each in rows), default=0) for name in ("at", "of"))
    return _Chosen({each["kind"]: each["n"] for each in rows}, found_ms, truth_rows)


def _check_bounds(chosen: _Chosen, max_fraction: float, delete_orphans: int) -> None:
    if not 0 <= max_fraction <= 1:
        raise ConfigurationError("max_fraction", shortened(max_fraction), "a part of the truth's rows, 0 to 1")
    if chosen.rows > max_fraction * chosen.truth_rows:
        found = f"{max_fraction:g}, with {chosen.rows:,} differences for {chosen.truth_rows:,} rows of truth"
        raise ConfigurationError(
            "max_fraction", found, "a larger fraction, once you know the reason; nothing was repaired"
        )
    orphans = chosen.counts.get("orphan", 0)
    if orphans > delete_orphans:
        found = f"{delete_orphans:,}, with {orphans:,} orphans"
        raise ConfigurationError("delete_orphans", found, "at least the number of orphans; nothing was repaired")


def _check_age(chosen: _Chosen, now_ms: int) -> None:
    age_ms = now_ms - chosen.found_ms
    if chosen.rows and age_ms > TOMBSTONE_WINDOW_MS:
        most = format_duration(TOMBSTONE_WINDOW_MS)
        allowed = f"at most {most} old, because a store remembers ended messages for this time only; reconcile again"
        raise InputError("differences", f"{format_duration(age_ms)} old", allowed)


def _work(chosen: DataFrame, wanted: DataFrame, settings: WriteSettings) -> DataFrame:
    """Join each difference with the rows that the truth has now. `rows_of_id` is the number of these rows."""
    found = chosen.select("id", "kind", "have_revision", F.unix_millis("have_due_at").alias("have_due_ms"))
    told = wanted.join(found.select("id"), "id", "left_semi")
    told = told.withColumn("rows_of_id", F.count("*").over(Window.partitionBy("id")))
    counted = F.coalesce("rows_of_id", F.lit(0)).alias("rows_of_id")
    kept = [name for name in FOUND if name != "rows_of_id"]
    return found.join(told, "id", "left").select(*kept, counted, *settings.columns)
