"""The comparison of a truth with a store, as pure transforms. A transform evaluates each of its frames once.

A *truth* is a frame with the messages that should be pending.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Final, Literal, TypeAlias

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay.core.validation import HANDLER_TARGET

__all__ = ["COMPARED", "FINDINGS", "UNFIT", "Finding", "compared_in", "judged", "tallied"]

Finding: TypeAlias = Literal["missing", "orphan", "drift"]
FINDINGS: Final[tuple[Finding, ...]] = ("missing", "orphan", "drift")
"""The kinds of difference. `missing`: only in the truth. `orphan`: only in the store. `drift`: in both, not equal."""

UNFIT: Final = ("null_id", "null_due", "repeated")
"""Kinds of rows that make a truth unfit for a comparison."""

COMPARED: Final = ("to", "type", "encoding", "payload", "key", "headers")
"""Columns that are compared in addition to the due time, if the truth has them."""

_ANY_VERSION = (1 << 63) - 1


def compared_in(truth: DataFrame) -> tuple[str, ...]:
    """Return the columns of a truth that are compared in addition to the due time."""
    return tuple(name for name in COMPARED if name in truth.columns)


def judged(truth: DataFrame, stored: DataFrame, ended: DataFrame, *, horizon_ms: int) -> DataFrame:
    """Return one row for each id of the truth and of the store, with its kind.

    This is a pure transform, which evaluates each frame once.

    Args:
        truth: Columns `id` and `due_at`. The columns `version` and `COMPARED` are compared too, if the truth has them.
        stored: The same columns of the pending messages, with `version`, `revision` and `rule`.
        ended: `id` and `version` of the ended messages that the store remembers.
        horizon_ms: Messages that are due until this time, in epoch ms, are `soon`: they may end during the read.

    Returns:
        `kind`, `id`, `differs` (names of columns), `want_due_ms`, `have_due_ms`, `want_version`, `have_version`,
        `have_revision`, `in_truth` and `in_store` (0 or 1). The kinds are `FINDINGS` and:

        - `same`: equal in truth and store;
        - `soon`: not compared, see `horizon_ms`;
        - `ended`: not in the store, which remembers that the message ended;
        - `ahead`: the store has a higher version than the truth;
        - `recurring`: a series in the store, which is not compared with single messages;
        - `null_id`, `null_due`, `repeated`: the truth is unfit for a comparison. A repeated id has several rows.
    """
    compared = compared_in(truth)
    # The window and both joins are ordered by id, so Spark shuffles and sorts each side once.
    wanted = _side(truth, "want", compared).withColumn("rows_of_id", F.count("*").over(Window.partitionBy("id")))
    over = ended.groupBy("id").agg(F.max(F.coalesce("version", F.lit(_ANY_VERSION))).alias("ended_version"))
    had = _side(stored, "have", compared, have_revision=F.col("revision"), recurs=F.col("rule").isNotNull())
    return (
        wanted.join(over, "id", "left")
        .join(had, "id", "full_outer")
        .select(
            _kind(compared, horizon_ms).alias("kind"),
            "id",
            _differs(compared).alias("differs"),
            "want_due_ms",
            "have_due_ms",
            "want_version",
            "have_version",
            "have_revision",
            F.coalesce("in_want", F.lit(0)).alias("in_truth"),
            F.coalesce("in_have", F.lit(0)).alias("in_store"),
        )
    )


def tallied(judgements: DataFrame) -> DataFrame:
    """Summarise the result of `judged`: a row for each difference and each unfit id, and one row for each other kind.

    Equal messages therefore do not make the result larger. The result has the columns of `judged`, and `ids`: the
    number of rows of `judged` that a row stands for. In the row of a whole kind, `id` and `differs` are null.
    """
    is_told = F.col("kind").isin(*FINDINGS, *UNFIT)
    # Group by the texts: for a maximum of text, Spark would sort all rows.
    texts = [F.when(is_told, F.col(name)).alias(name) for name in ("id", "differs")]
    sums = [F.sum(name).alias(name) for name in ("in_truth", "in_store")]
    numbers = ("want_due_ms", "have_due_ms", "want_version", "have_version", "have_revision")
    kept = [F.max(name).alias(name) for name in numbers]
    return judgements.groupBy(F.col("kind"), *texts).agg(F.count("*").alias("ids"), *sums, *kept)


def _side(frame: DataFrame, name: str, compared: Sequence[str], **more: Column) -> DataFrame:
    """Return the columns of one side, with hashes of the compared columns, so that Spark does not sort payloads."""
    columns = {
        "due_ms": F.ceil(F.unix_micros("due_at") / 1000),
        "version": F.col("version") if "version" in frame.columns else F.lit(None).cast("bigint"),
        **{each: F.xxhash64(_comparable(frame, each)) for each in compared},
    }
    named = (column.alias(f"{name}_{each}") for each, column in columns.items())
    return frame.select(
        "id", F.lit(1).alias(f"in_{name}"), *named, *(column.alias(each) for each, column in more.items())
    )


def _comparable(frame: DataFrame, name: str) -> Column:
    """Return a column in a form in which equal values of truth and store are equal.

    Null and empty become the same value, except for a key. The entries of a map are sorted.
    """
    column = F.col(name)
    match name:
        case "headers":
            return F.when(F.size(column) > 0, F.array_sort(F.map_entries(column)))
        case "key":
            return column.cast("binary")
        case "payload":
            return F.coalesce(column.cast("binary"), F.lit(b""))
        case "encoding" if "payload" in frame.columns:
            return F.when(F.col("payload").isNull(), F.lit("null")).otherwise(F.coalesce(column, F.lit("")))
        case "type" if "to" in frame.columns:
            is_told_by_to = F.concat(F.lit(f"{HANDLER_TARGET}:"), column) == F.col("to")
            return F.when(is_told_by_to, F.lit("")).otherwise(F.coalesce(column, F.lit("")))
        case _:
            return F.coalesce(column, F.lit(""))


def _differs(compared: Sequence[str]) -> Column:
    """Return the names of the columns that differ, joined by commas."""
    pairs = [("due_at", "due_ms"), *((name, name) for name in compared)]
    return F.concat_ws(
        ",", *(F.when(F.col(f"want_{column}") != F.col(f"have_{column}"), F.lit(name)) for name, column in pairs)
    )


def _kind(compared: Sequence[str], horizon_ms: int) -> Column:
    column = F.col
    kinds = [
        ("null_id", column("id").isNull()),
        ("repeated", column("rows_of_id") > 1),
        ("null_due", column("in_want").isNotNull() & column("want_due_ms").isNull()),
        ("recurring", column("recurs")),
        ("soon", F.least("want_due_ms", "have_due_ms") <= horizon_ms),
        ("orphan", column("in_want").isNull()),
        ("ended", column("in_have").isNull() & (column("ended_version") >= F.coalesce("want_version", F.lit(0)))),
        ("missing", column("in_have").isNull()),
        ("ahead", column("have_version") > column("want_version")),
        ("drift", _differs(compared) != ""),
    ]
    first = F.when(kinds[0][1], F.lit(kinds[0][0]))
    return reduce(lambda kind, each: kind.when(each[1], F.lit(each[0])), kinds[1:], first).otherwise(F.lit("same"))
