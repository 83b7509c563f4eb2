"""`aiodelay spark reconcile`: compare the messages that should be pending (the truth) with a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay.core.durations import format_duration, parse_duration
from aiodelay.core.values import TOMBSTONE_WINDOW_MS
from aiodelay.errors import ConfigurationError, InputError, shortened
from aiodelay.operations.spark_options import ReconcileOptions
from aiodelay.ports.clock import SystemClock
from aiodelay.spark.summary import Summary

from .differences import FINDINGS, compared_in, judged, tallied
from .job import job, judging_ms
from .mapping import mapped
from .settings_origin import writing_anew
from .sources import stored

__all__ = ["FORMATS", "MARGIN", "run"]

MARGIN: Final = ReconcileOptions.margin
FORMATS: Final = ("parquet", "csv", "json")

_KINDS = (*FINDINGS, "same", "soon", "ended", "ahead", "recurring")
_UNFIT = {
    "null_id": ("id of truth", "null", "an id in each row"),
    "null_due": ("due_at of truth", "null", "a due time in each row"),
    "repeated": ("id of truth", "in more than one row", "one row for each id"),
}


class _Count(Struct, frozen=True):
    ids: int
    in_truth: int
    in_store: int
    example: str | None


@dataclass(frozen=True, kw_only=True)
class _Options(ReconcileOptions):
    truth: DataFrame = field(kw_only=False)


@job("reconcile", _Options)
def run(spark: SparkSession, options: _Options) -> Summary:
    """Compare a truth with the pending messages of a store, and change nothing.

    The store changes during the read. So the job does not compare messages that are due before `now` plus the margin.
    If the read takes longer than the margin, the job does not compare messages that were due before the read ended.

    Args:
        spark: A session, classic or Connect.
        options: First `truth`: a frame with a row for each message that should be pending. Spark evaluates the frame
            once. Then the options of `ReconcileOptions`; callers give each option by keyword.

    Returns:
        `rows`: rows of the truth. `rejected`: differences. `counts`: messages by kind.

    Raises:
        ConfigurationError: An option is wrong, the truth lacks a column, or `out` already exists.
        InputError: An id or a due time of the truth is null, or the truth has an id twice.
    """
    clock = SystemClock()
    started_ms = clock.monotonic_ms()
    margin_ms = parse_duration(options.margin, field="margin", error=ConfigurationError)
    now_ms = judging_ms(options.now)
    place = None if options.out is None else _read_place(options.out)
    wanted = mapped(options.truth, options.mapping, to=options.to, timezone=options.timezone)
    compared = compared_in(wanted)
    place_of = {"store": options.store, "namespace": options.namespace}
    lane = {} if options.lane is None else {"lane": options.lane}
    pending = stored(spark, "id", "due_at", "version", "revision", "rule", *compared, **place_of, **lane)
    ended = stored(spark, "id", "version", table="done", **place_of)
    found = tallied(judged(wanted, pending, ended, horizon_ms=now_ms + margin_ms))
    # A checkpoint, not a cache: Spark must not compare again, because truth and store have changed since.
    found = found.localCheckpoint(eager=True)
    took_ms = clock.monotonic_ms() - started_ms
    found = _with_soon(found, now_ms + took_ms)
    counts = _counted(found)
    _check_fit(counts)
    differences = {kind: counts[kind].ids for kind in FINDINGS if kind in counts}
    rows = sum(each.in_truth for each in counts.values())
    if place is not None:
        _write(_differences(found, now_ms=now_ms, rows=rows), place, overwrite=options.overwrite)
    return Summary(
        rows=rows,
        rejected=sum(differences.values()),
        counts={kind: counts[kind].ids if kind in counts else 0 for kind in _KINDS},
        facts={
            "compared": ["due_at", *compared],
            "margin": format_duration(max(margin_ms, took_ms)),
            "stored": sum(each.in_store for each in counts.values()),
            "differences": options.out,
            "tombstone_window": format_duration(TOMBSTONE_WINDOW_MS),
        },
    )


def _with_soon(found: DataFrame, horizon_ms: int) -> DataFrame:
    """Set the kind of a difference to `soon` if its message became due while the store was read."""
    is_soon = F.col("kind").isin(*FINDINGS) & (F.least("want_due_ms", "have_due_ms") <= horizon_ms)
    return found.withColumn("kind", F.when(is_soon, F.lit("soon")).otherwise(F.col("kind")))


def _counted(found: DataFrame) -> dict[str, _Count]:
    sums = [F.sum(name).alias(name) for name in ("ids", "in_truth", "in_store")]
    counts = found.groupBy("kind").agg(*sums, F.min("id").alias("example")).collect()
    return {each["kind"]: _Count(each["ids"], each["in_truth"], each["in_store"], each["example"]) for each in counts}


def _check_fit(counts: Mapping[str, _Count]) -> None:
    for kind, (name, problem, allowed) in _UNFIT.items():
        if kind in counts:
            found = counts[kind]
            example = "" if found.example is None else f", such as {shortened(found.example)}"
            raise InputError(name, f"{problem}: {found.in_truth:,} rows{example}", allowed)


def _write(differences: DataFrame, place: tuple[str, str], *, overwrite: bool) -> None:
    form, path = place
    with writing_anew("out", path, "a new folder, or the option overwrite"):
        differences.write.mode("overwrite" if overwrite else "error").format(form).save(path)


def _read_place(text: str) -> tuple[str, str]:
    form, colon, path = text.partition(":")
    if form not in FORMATS or not colon or not path:
        raise ConfigurationError("out", shortened(text), ", ".join(f"{each}:DIR" for each in FORMATS))
    return form, path


def _differences(found: DataFrame, *, now_ms: int, rows: int) -> DataFrame:
    """Return a row for each difference, with the time of the comparison and the number of rows of the truth."""
    return found.where(F.col("kind").isin(*FINDINGS)).select(
        "kind",
        "id",
        "differs",
        F.timestamp_millis("want_due_ms").alias("want_due_at"),
        F.timestamp_millis("have_due_ms").alias("have_due_at"),
        "want_version",
        "have_version",
        "have_revision",
        F.timestamp_millis(F.lit(now_ms)).alias("found_at"),
        F.lit(rows).cast("bigint").alias("truth_rows"),
    )
