"""`aiodelay spark cold put`: keep rows that are due far ahead in files, until `promote` moves them into a store."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial, reduce
from typing import Final, get_args

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay.core.durations import format_duration, from_epoch_ms, parse_duration
from aiodelay.core.validation import check_count
from aiodelay.core.values import TOMBSTONE_WINDOW_MS
from aiodelay.errors import ConfigurationError
from aiodelay.operations.spark_options import ColdPutOptions, OnConflict
from aiodelay.ports.clock import SystemClock
from aiodelay.scheduler import MOST_PAYLOAD
from aiodelay.spark.cold import END, PUT, STORED, WAS_DUE_AT, Standing, Tier, due_day, ends
from aiodelay.spark.summary import Summary

from .backfill import given_whole, sorted_out
from .checking import Rules, judged
from .hot import Hot
from .job import job, judging_ms
from .mapping import MAPPED
from .settings_origin import one_of

__all__ = ["MIN_LEAD", "run"]

MIN_LEAD: Final = ColdPutOptions.min_lead
"""The default minimum lead. It covers the window of a promotion, and the day until the next promotion."""


@job("cold put", ColdPutOptions)
def run(frame: DataFrame, options: ColdPutOptions) -> Summary:
    """Add a message to the tier for each row that can be a message and is due far enough ahead.

    Either all rows of a run become valid at one moment, or none. The job may be repeated. With `insert`, the tier keeps
    the first version of an id. With `newer`, it keeps the highest version. A newer version ends an older version, even
    if the older version is due on another day.

    Args:
        frame: Any rows.
        options: See `ColdPutOptions`; callers give each option by keyword.

    Returns:
        The counts of rows as for `backfill`, and these:

        - `put` and `ended`: messages and tombstones that were added to the tier;
        - `known`: rows that changed nothing;
        - `hot_…`: outcomes of rows and of ended messages in the store, if the job has a store.

        If the job has no store, it rejects rows that need a store. The reason is `due_at.overtaken` if a promotion has
        claimed the day of the row, or `id.promoted` if the row replaces a promoted message.

    Raises:
        ConfigurationError: An option is wrong, or a column has a wrong name or type. Nothing was added.
        StoreUnavailableError: The store did not answer for too long. Running the job again is safe.
    """
    read_ms, now_ms = SystemClock().now_ms(), judging_ms(options.now)
    hot = Hot.checked(options)
    place = Tier(frame.sparkSession, options.tier)
    lead_ms = parse_duration(options.min_lead, field="min_lead", error=ConfigurationError)
    kind = one_of("conflict", options.conflict, get_args(OnConflict))
    payload = check_count(options.max_payload, "max_payload", 1, MOST_PAYLOAD)
    before = place.standing()
    if hot is not None:
        hot.check_of(before)
    first_ms = max(now_ms + lead_ms, before.claimed_ms)
    least_ms = 0 if hot else first_ms - now_ms
    rules = Rules(now_ms=now_ms, min_lead_ms=least_ms, max_payload=payload, conflict=kind, timezone=options.timezone)
    rows = judged(_given(frame, options, rules), rules)
    with sorted_out(rows, rules, options.rejects) as (good, found):
        put = _Put(place, before, hot, now_ms=now_ms, first_ms=first_ms, read_ms=read_ms)
        outcome = {} if options.dry_run else put.run(good.drop("version") if kind == "insert" else good)
    reasons = found.reasons | {name: n for name, n in outcome.items() if name in _UNDONE and n}
    return Summary(
        rows=found.rows,
        rejected=sum(reasons.values()),
        counts={"accepted": found.accepted, **found.dropped}
        | {name: n for name, n in outcome.items() if name not in _UNDONE},
        facts={
            "dry_run": options.dry_run,
            "reasons": reasons,
            "first_due": _time(first_ms),
            "tombstone_window": format_duration(TOMBSTONE_WINDOW_MS),
        },
    )


_UNDONE: Final = ("due_at.overtaken", "id.promoted")


def _given(frame: DataFrame, options: ColdPutOptions, rules: Rules) -> DataFrame:
    if options.was_due is None:
        return given_whole(frame, options.mapping, options.to, rules)
    named = dict(options.mapping or {name: name for name in MAPPED if name in frame.columns})
    return given_whole(frame, named | {WAS_DUE_AT: options.was_due}, options.to, rules, names=(*MAPPED, WAS_DUE_AT))


class _Put:
    """Writes the rows of one run into the tier, and rows that are due too soon into the store.

    Args:
        place: The tier.
        before: The state of the tier when the rows were checked.
        hot: The store; None if the job has no store.
        now_ms: The current time, in epoch ms.
        first_ms: Rows that are due before this time, in epoch ms, do not go into the tier.
        read_ms: The start of the run by this machine's clock, in epoch ms.
    """

    def __init__(
        self, place: Tier, before: Standing, hot: Hot | None, *, now_ms: int, first_ms: int, read_ms: int
    ) -> None:
        self._place, self._before, self._hot = place, before, hot
        self._now_ms, self._first_ms, self._read_ms = now_ms, first_ms, read_ms

    def run(self, rows: DataFrame) -> dict[str, int]:
        """Write the rows and return counts."""
        own = _stamped(rows, self._first_ms)
        known = self._place.known(self._before, own, now_ms=self._now_ms)
        decided = (_as_new(own) if known is None else _decided(own, known)).persist()
        try:
            return self._run(decided, known)
        finally:
            decided.unpersist()

    def _run(self, decided: DataFrame, known: DataFrame | None) -> dict[str, int]:
        puts = decided.where("is_new AND NOT is_near").withColumn("kind", F.lit(PUT))
        near = decided.where("is_new AND is_near").select(F.lit(STORED).alias("kind"), "id", "version", "due_day")
        older = [] if known is None else [_older(known, decided)]
        load = self._place.add(_all([puts, near, *map(ends, older)]), now_ms=self._now_ms)
        counts = {"put": load.counts[PUT], "ended": load.counts[END]} if load else {"put": 0, "ended": 0}
        after = self._place.standing()
        rivals = self._place.known(after.since(self._before, load.name if load else None), decided, now_ms=self._now_ms)
        if rivals is not None:  # race: another run has added the same ids; the later run ends the version that loses
            lost = _lost(decided, rivals)
            decided = decided.join(lost.select("id"), "id", "left_anti")
            older += [_older(rivals, decided), lost]
            ended = self._place.add(_all(map(ends, [older[-2], lost])), now_ms=self._now_ms)
            counts["ended"] += ended.counts[END] if ended else 0
            after = self._place.standing()
        return counts | self._in_store(decided, older, after)

    def _in_store(self, decided: DataFrame, older: list[DataFrame], after: Standing) -> dict[str, int]:
        """Write rows to the store and end replaced messages there, if promotions miss them. Return counts.

        Promotions miss rows that are due too soon. They also miss rows and tombstones that were added after a promotion
        had claimed the day.
        """
        is_claimed = F.col("due_day") < F.lit(after.claimed)
        is_soon = F.col("stands") & (F.col("is_near") | is_claimed)
        is_there = is_claimed | (F.col("stored") == F.col("version"))
        old = [each.where(is_there).where("version < newer_version") for each in older]
        endings = _endings(_all(old)) if old else None
        (row,) = decided.agg(F.count_if(~F.col("is_new")), F.count_if(is_soon)).collect()
        if self._hot is None:
            promoted = endings.count() if endings is not None else 0
            return {"known": row[0], "due_at.overtaken": row[1], "id.promoted": promoted}
        written = self._hot.write(decided.where(is_soon), read_ms=self._read_ms) if row[1] else {}
        ended = self._hot.end(endings) if endings is not None else {}
        return {"known": row[0]} | {f"hot_{name}": n for name, n in (*written.items(), *sorted(ended.items()))}


def _stamped(rows: DataFrame, first_ms: int) -> DataFrame:
    version = F.col("version") if "version" in rows.columns else F.lit(0).cast("bigint")
    near = F.col("due_at") < F.timestamp_millis(F.lit(first_ms))
    return rows.withColumns({"version": version, "due_day": due_day(F.col("due_at")), "is_near": near})


def _as_new(own: DataFrame) -> DataFrame:
    found = {"is_new": F.expr("true"), "stands": F.expr("true")}
    return own.withColumns(found | {"newer_version": F.col("version"), "newer_day": F.col("due_day")})


def _decided(own: DataFrame, known: DataFrame) -> DataFrame:
    """Return the rows with the decision about each row.

    `is_new`: the row is newer than all versions of its id in the tier. `stands`: the row is valid after this run.
    `newer_version` and `newer_day`: version and day of the valid message, which is this row or a message in the tier.
    If two concurrent runs have put the same version on several days, the earliest day is valid.
    """
    best = F.max(F.struct("version", -F.unix_date("due_day"), "due_day", "ended")).alias("best")
    rows = own.join(known.groupBy("id").agg(best), "id", "left")
    is_new = F.col("best").isNull() | (F.col("version") > F.col("best.version"))
    is_same = (F.col("version") == F.col("best.version")) & (F.col("due_day") == F.col("best.due_day"))
    is_over = F.expr("coalesce(best.ended >= version, false)")
    newer = {
        "newer_version": F.when(is_new, F.col("version")).otherwise(F.col("best.version")),
        "newer_day": F.when(is_new, F.col("due_day")).otherwise(F.col("best.due_day")),
    }
    return rows.withColumns({"is_new": is_new, "stands": is_new | (is_same & ~is_over), **newer}).drop("best")


def _older(known: DataFrame, decided: DataFrame) -> DataFrame:
    """Return the versions in the tier that the rows replace.

    The result includes versions that an earlier run should have ended. If a run is killed while another run adds the
    same ids, both versions may be left.
    """
    newer = decided.select("id", "newer_version", "newer_day", "is_near", "stands")
    is_older = _comes_after(F.col("newer_version"), F.col("newer_day"), F.col("version"), F.col("due_day"))
    is_ours = F.col("stands") & (F.col("is_near") | (F.col("due_day") != F.col("newer_day")))
    is_left = ~F.col("stands") & (F.col("ended").isNull() | (F.col("ended") < F.col("version")))
    return known.join(newer, "id").where(is_older & (is_ours | is_left))


def _lost(decided: DataFrame, rivals: DataFrame) -> DataFrame:
    """Return our rows that lose against rows of a concurrent run."""
    best = F.max(F.struct("version", -F.unix_date("due_day"), "due_day")).alias("best")
    unknown = [F.lit(None).cast("bigint").alias(name) for name in ("stored", "ended")]
    rows = decided.where("is_new").select("id", "version", "due_day", *unknown)
    rows = rows.join(rivals.groupBy("id").agg(best), "id")
    is_lost = _comes_after(F.col("best.version"), F.col("best.due_day"), F.col("version"), F.col("due_day"))
    return rows.where(is_lost).withColumn("newer_version", F.col("best.version"))


def _comes_after(version: Column, day: Column, old_version: Column, old_day: Column) -> Column:
    return (version > old_version) | ((version == old_version) & (day < old_day))


def _endings(older: DataFrame) -> DataFrame:
    most = older.groupBy("id").agg(F.max("version").alias("most_version"))
    return most.withColumn("barred_version", F.col("most_version"))


def _all(frames: Iterable[DataFrame]) -> DataFrame:
    return reduce(partial(DataFrame.unionByName, allowMissingColumns=True), frames)


def _time(ms: int) -> str:
    return f"{from_epoch_ms(ms):%Y-%m-%dT%H:%M:%SZ}"
