"""A cold tier keeps each message once, on its day, with its highest version, until it is cancelled."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from aiodelay.errors import ConfigurationError
from aiodelay.spark.cold import Load, Tier, due_day, standing_of
from aiodelay.spark.jobs import cold_cancel
from tests.spark.messages import stored
from tests.spark.tiers import NOW, cancel, days, kept, moved, put, rows

TENTH = (NOW + days(10)).date()


def counts_of(counts: dict[str, int], *names: str) -> tuple[int, ...]:
    return tuple(counts[name] for name in names)


def test_the_log_tells_what_counts_in_any_order() -> None:
    entries = [
        ("promoted", "p", "2026-01-03", [], "2026-01-05", "first"),
        ("claim", "c", "2026-01-04", [], "2026-01-09", "second"),
        ("load", "a", "2026-01-05", ["2026-01-03", "2026-01-07"], None, None),
        ("claim", "b", "2026-01-02", [], "2026-01-05", "first"),
        ("load", "b", "2026-01-01", ["2026-01-07"], None, None),
    ]
    for standing in (standing_of(entries), standing_of(reversed(entries))):
        assert (standing.promoted, standing.claimed) == (date(2026, 1, 5), date(2026, 1, 9))
        assert standing.store == "second"
        assert standing.days(lambda day: day > date(2026, 1, 3)) == {date(2026, 1, 7)}
        assert standing.since(standing_of(entries[:3]), "b").loads == {}
        assert set(standing.since(standing_of([]), "b").loads) == {"a"}
    assert standing_of([]).claimed_ms == 0


def test_rows_are_kept_once_on_their_day_in_utc(spark: SparkSession, tmp_path: Path) -> None:
    tier = f"{tmp_path / 'tier'}"
    frame = rows(spark, ("a", 10, 0), ("b", 10, 0), ("c", 800, 0), ("soon", 7.9, 0), (None, 10, 0)).drop("version")
    first = put(frame, tier, conflict="insert", rejects=f"{tmp_path / 'rejects'}")
    assert counts_of({**first.counts}, "accepted", "put", "ended", "known") == (3, 3, 0, 0)
    assert (first.rejected, first.facts["reasons"]) == (2, {"due_at.too_soon": 1, "id.missing": 1})
    assert spark.read.parquet(f"{tmp_path / 'rejects'}").count() == 2
    moved_rows = rows(spark, ("a", 30, 7), ("b", 10, 8), ("c", 800, 9)).selectExpr("*", "nullif(version, 9) version")
    moved_rows = moved_rows.toDF("id", "due_at", "_", "payload", "version").drop("_")
    again = put(moved_rows, tier, conflict="insert")
    assert counts_of({**again.counts}, "put", "ended", "known") == (0, 0, 3), "the first one stands"
    assert kept(spark, tier) == {"a": (10, 0), "b": (10, 0), "c": (800, 0)}

    place = Tier(spark, tier)
    near = place.facts(place.standing(), lambda day: day <= TENTH)
    assert near is not None
    assert {Path(file).parent.name for file in near.inputFiles()} == {f"due_day={TENTH}"}
    spark.conf.set("spark.sql.session.timeZone", "Pacific/Auckland")
    try:
        late = spark.sql("SELECT timestamp'2026-01-11 23:59:59.999Z' at")
        assert late.select(due_day(F.col("at"))).first() == (date(2026, 1, 11),)
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_the_highest_version_stands_and_what_is_cancelled_does_not(spark: SparkSession, tmp_path: Path) -> None:
    tier = f"{tmp_path / 'tier'}"
    put(rows(spark, ("a", 10, 1), ("b", 10, 1), ("c", 10, 1), ("d", 10, 1), ("e", 10, 1)), tier)
    replacing = rows(spark, ("a", 20, 2), ("b", 10, 2), ("c", 30, 0), ("d", 9, 2))
    second = put(replacing, tier)
    assert counts_of({**second.counts}, "put", "ended", "known") == (3, 2, 1), "a tombstone on each day that one left"
    want = {"a": (20, 2), "b": (10, 2), "c": (10, 1), "d": (9, 2), "e": (10, 1)}
    assert kept(spark, tier) == want

    told = cancel(spark, tier, ("a", 2), ("c", 0), ("e", 7), ("nowhere", 1))
    assert counts_of({**told.counts}, "ended", "newer", "not_found", "promoted") == (2, 1, 1, 0)
    assert told.facts["reasons"] == {"id.not_found": 1}, "it may be in the store"
    assert kept(spark, tier) == {name: want[name] for name in "bcd"}
    again = put(rows(spark, ("a", 20, 2), ("e", 10, 1), ("b", 12, 3)), tier)
    assert counts_of({**again.counts}, "put", "ended", "known") == (1, 1, 2)
    assert kept(spark, tier) == {"b": (12, 3), "c": (10, 1), "d": (9, 2)}, "what was cancelled does not come back"

    last = rows(spark, ("a", 40, 3), ("c", 40, 5)).withColumn("was", F.lit(NOW + days(10)))
    assert put(last, tier, was_due="was").counts["ended"] == 1
    assert kept(spark, tier) == {"a": (40, 3), "b": (12, 3), "c": (40, 5), "d": (9, 2)}


def test_only_the_days_that_are_named_are_looked_at(spark: SparkSession, tmp_path: Path) -> None:
    tier = f"{tmp_path / 'tier'}"
    put(rows(spark, ("a", 10, 1), ("b", 11, 1), ("c", 12, 1)), tier)
    asked = rows(spark, ("a", 30, 2)).withColumn("was_due_at", F.lit(NOW + days(10)))
    asked = asked.withColumn("due_day", due_day(F.col("due_at")))
    place = Tier(spark, tier)
    known = place.known(place.standing(), asked, now_ms=0)
    assert known is not None
    assert {Path(file).parent.name for file in known.inputFiles()} == {f"due_day={TENTH}"}
    assert [tuple(row) for row in known.collect()] == [("a", TENTH, 1, None, None)]
    plan = known._jdf.queryExecution().executedPlan().toString()
    assert "ReadSchema: struct<kind:string,id:string,version:bigint>" in plan


def test_a_day_that_cannot_be_read_is_told_and_one_that_is_not_given_is_any(
    spark: SparkSession, tmp_path: Path
) -> None:
    tier = f"{tmp_path / 'tier'}"
    put(rows(spark, ("a", 10, 1), ("b", 11, 1), ("c", 12, 1)), tier)
    replacing = rows(spark, ("a", 30, 2), ("new", 30, 2)).selectExpr(
        "*", "CASE id WHEN 'a' THEN '2026-01-11T12:00:00' ELSE '+12000-01-01T00:00:00Z' END was"
    )
    told = put(replacing, tier, was_due="was")
    assert told.facts["reasons"] == {"was_due_at.unreadable": 1}, "it has no offset: the old one would not be found"
    assert (told.counts["put"], kept(spark, tier)["a"]) == (1, (10, 1))
    asked = rows(spark, ("b", 0, 0), ("c", 0, 0)).selectExpr(
        "id", "CASE id WHEN 'b' THEN timestamp'2026-01-12 12:00:00Z' END was_due_at"
    )
    assert cold_cancel.run(asked, tier=tier, now=NOW).counts["ended"] == 2, "without a time, of whichever day"
    assert {*kept(spark, tier)} == {"a", "new"}


def test_what_went_straight_into_the_store_is_replaced_and_cancelled_like_what_was_promoted(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, store = f"{tmp_path / 'tier'}", f"sqlite:///{tmp_path / 'delay.db'}"
    near = rows(spark, ("a", 2, 1), ("b", 2, 1), ("c", 2, 1), ("d", 2, 1))
    assert put(near, tier, store=store).counts["hot_stored"] == 4
    assert put(rows(spark, ("a", 50, 2), ("b", 60, 2)), tier, store=store).counts["hot_cancelled"] == 2
    assert cancel(spark, tier, ("c", None), store=store).counts["hot_cancelled"] == 1
    assert {name: n for name, n in put(near, tier, store=store).counts.items() if n} == {
        "accepted": 4,
        "known": 4,
        "hot_known": 1,
    }
    assert {*stored(store, "default")} == {"d"}
    assert kept(spark, tier) == {"a": (50, 2), "b": (60, 2)}

    meanwhile(monkeypatch, lambda: put(rows(spark, ("x", 60, 2)), tier, store=store))
    put(rows(spark, ("x", 2, 1), ("y", 2, 1)), tier, store=store)
    assert {*stored(store, "default")} == {"d", "y"}
    assert kept(spark, tier)["x"] == (60, 2)
    moved(spark, tier, store, NOW)
    assert {*stored(store, "default")} == {"d", "y"}, "it is not promoted once more"


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Have something happen after a run has looked at the log, and before it adds to it."""
    add = Tier.add
    acts = [act]

    def add_later(self: Tier, facts: DataFrame, *, now_ms: int) -> Load | None:
        if acts:
            acts.pop()()
        return add(self, facts, now_ms=now_ms)

    monkeypatch.setattr(Tier, "add", add_later)


def test_of_two_runs_at_once_each_id_stands_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = f"{tmp_path / 'tier'}"
    meanwhile(monkeypatch, lambda: put(rows(spark, ("x", 12, 1), ("y", 12, 2), ("z", 12, 1), ("w", 9, 1)), tier))
    outer = put(rows(spark, ("x", 10, 1), ("y", 10, 1), ("z", 10, 2), ("w", 10, 1), ("v", 10, 1)), tier)
    assert counts_of({**outer.counts}, "put", "ended") == (5, 4)
    assert kept(spark, tier) == {"x": (10, 1), "y": (12, 2), "z": (10, 2), "w": (9, 1), "v": (10, 1)}


def test_what_a_run_has_left_that_was_killed_beside_another_is_mended_when_it_is_repeated(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, ours = f"{tmp_path / 'tier'}", rows(spark, ("x", 10, 1), ("y", 10, 1), ("z", 10, 1))
    meanwhile(monkeypatch, lambda: put(rows(spark, ("x", 12, 1), ("y", 12, 2)), tier))
    add, entered = Tier.add, list[Load | None]()

    def add_once(self: Tier, facts: DataFrame, *, now_ms: int) -> Load | None:
        if len(entered) == 2:  # the other's, and ours
            raise InterruptedError
        entered.append(add(self, facts, now_ms=now_ms))
        return entered[-1]

    monkeypatch.setattr(Tier, "add", add_once)
    with pytest.raises(InterruptedError):
        put(ours, tier)
    monkeypatch.undo()
    again = put(ours, tier)
    assert counts_of({**again.counts}, "put", "ended", "known") == (0, 2, 3)
    assert kept(spark, tier) == {"x": (10, 1), "y": (12, 2), "z": (10, 1)}


def test_what_a_promotion_overtakes_goes_into_the_store(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, store, namespace = f"{tmp_path / 'tier'}", f"sqlite:///{tmp_path / 'delay.db'}", "default"
    put(rows(spark, ("p", 8.2, 1), ("q", 8.3, 1), ("far", 60, 1)), tier)
    later = NOW + days(2)
    meanwhile(monkeypatch, lambda: moved(spark, tier, store, later))
    behind = put(rows(spark, ("r", 8.2, 1), ("p", 50, 2)), tier)
    assert (behind.rejected, behind.facts["reasons"]) == (2, {"due_at.overtaken": 1, "id.promoted": 1})
    assert {*stored(store, namespace)} == {"p", "q"}, "without a store it can only be told"

    ours = rows(spark, ("r", 8.2, 1), ("p", 50, 2), ("q", 8.5, 2), ("far", 8.4, 2), ("s", 9, 1))
    with_store = put(ours, tier, store=store)
    assert with_store.rejected == 0
    names = ("put", "ended", "known", "hot_stored", "hot_replaced", "hot_cancelled")
    assert counts_of({**with_store.counts}, *names) == (0, 2, 2, 3, 1, 1)
    found = {name: record.envelope.version for name, record in stored(store, namespace).items()}
    assert found == {"q": 2, "r": 1, "far": 2, "s": 1}
    later_still = moved(spark, tier, store, NOW + days(60), min_lead="0s")
    assert later_still.counts["stored"] == 1
    assert {*stored(store, namespace)} == {*found, "p"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tier": " / "}, "tier is ' / '; allowed: a folder"),
        ({"tier": "/data/{cold}"}, "tier is '/data/{cold}'; allowed: a folder"),
        ({"min_lead": "soon"}, "min_lead is 'soon'"),
        ({"conflict": "replace"}, "conflict is 'replace'; allowed: insert, newer"),
        ({"was_due": "nope"}, "map was_due_at is 'nope'; allowed: a column or an SQL expression"),
        ({"store": "kafka://127.0.0.1:1/schedules"}, "store is kafka"),
        ({"rate": -1, "store": "sqlite:///x.db"}, "option 'rate' is '-1'"),
        ({"was_due": "version"}, "column 'was_due_at' is BIGINT"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_kept(
    spark: SparkSession, tmp_path: Path, options: dict[str, str], told: str
) -> None:
    tier = f"{tmp_path / 'tier'}"
    with pytest.raises(ConfigurationError) as caught:
        put(rows(spark, ("a", 10, 1)), **{"tier": tier} | options)  # type: ignore[arg-type]
    assert f"{caught.value}".startswith(told)
    assert not (tmp_path / "tier").exists()


def test_what_cannot_be_cancelled_is_named(spark: SparkSession, tmp_path: Path) -> None:
    ids = spark.createDataFrame([("a",)], "id STRING")
    for frame, told in (
        (ids, "tier is an empty folder; allowed: a folder that `cold put` has written"),
        (ids.withColumnRenamed("id", "name"), "map is missing 'id'"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            cold_cancel.run(frame, tier=f"{tmp_path}")
        assert f"{caught.value}".startswith(told)
