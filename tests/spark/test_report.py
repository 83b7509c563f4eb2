"""The report: archived events become numbers by lane and hour, written as Parquet, CSV and a page."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everyone who uses Spark calls it

from aiodelay.errors import ConfigurationError, InputError
from aiodelay.spark.jobs import report as report_job
from aiodelay.spark.jobs.report import report, run
from aiodelay.spark.schemas import EVENTS
from tests.support.cli import Ran

DAY = datetime(2026, 3, 28, tzinfo=UTC)
DUE = DAY + timedelta(hours=9, minutes=30)
HOUR, MS = timedelta(hours=1), timedelta(milliseconds=1)
NINE, TEN = DAY + 9 * HOUR, DAY + 10 * HOUR
LATENESS = ("p50_ms", "p95_ms", "p99_ms", "max_ms", "min_ms")
FAILURES = ("again", "dead", "dropped", "skipped")


class Journal:
    """Numbers entries in the order in which they are added; `late_ms` is how long after the due time one is written."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []

    def add(self, event: str, name: str, late_ms: int = 0, **given: Any) -> None:  # noqa: ANN401 - columns
        entry: Mapping[str, Any] = {"lane": "mail", "due": DUE, "revision": 1, "detail": ""} | given
        number, at = len(self.rows) + 1, entry["due"] + late_ms * MS
        place = (0, number, at, event, name)
        self.rows.append((*place, entry["revision"], entry["lane"], entry["due"], 0, entry["detail"]))

    def deliver(self, name: str, late_ms: int, took_ms: int = 7, **given: Any) -> None:  # noqa: ANN401 - columns
        self.add("claimed", name, late_ms, **given)
        self.add("delivered", name, late_ms + took_ms, **given)

    def frame(self, spark: SparkSession) -> DataFrame:
        return spark.createDataFrame(self.rows, EVENTS)

    def archive(self, spark: SparkSession, folder: Path) -> str:
        by_day = self.frame(spark).withColumn("day", F.to_date("at"))
        by_day.coalesce(1).write.partitionBy("day").parquet(f"{folder}")
        return f"{folder}"


def figures_of(frame: DataFrame) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return rows by what they stand for, hours as instants whatever this machine's time zone is."""
    if "hour" in frame.columns:
        frame = frame.withColumn("hour", F.unix_seconds("hour"))
    rows = [row.asDict() for row in frame.collect()]
    for row in rows:
        if row.get("hour") is not None:
            row["hour"] = datetime.fromtimestamp(row["hour"], UTC)
    return {tuple(row[name] for name in ("lane", "hour", "day") if name in row): row for row in rows}


def lateness_of(row: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(row[name] for name in LATENESS)


def busy_journal() -> Journal:
    """One of everything."""
    journal = Journal()
    for late_ms in range(1, 101):
        journal.deliver(f"k{late_ms}", late_ms, lane="kafka")
    for event, late_ms in (("claimed", 10), ("again", 20), ("claimed", 5_000), ("delivered", 5_010)):
        journal.add(event, "retried", late_ms)
    journal.add("delivered", "moved", 40)
    journal.add("stored", "moved", -90_000)
    journal.deliver("early", -15)
    journal.deliver("twice", 5)
    journal.deliver("twice", 900)
    journal.deliver("twice", 2, revision=2)
    journal.deliver("over", 5, took_ms=20, due=TEN - 10 * MS)
    for reason in ("late", "late", "not_retryable", "of a later version"):
        journal.add("dead", f"dead {len(journal.rows)}", 3, lane="broken", detail=reason)
    journal.add("dropped", "dropped", 1, lane="broken", detail="late")
    journal.add("skipped", "skipped", 1, lane="broken")
    for name, late_ms in (("a", 123_456_789), ("b", 200_000_001)):
        journal.deliver(name, late_ms, lane="slow", due=NINE - late_ms * MS)
    return journal


def test_each_lane_and_hour_has_its_figures_and_so_have_their_totals(spark: SparkSession) -> None:
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")  # half an hour aside: hours are of UTC nevertheless
    try:
        found = figures_of(report(busy_journal().frame(spark), totals=True))
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    rows = {("broken", NINE), ("kafka", NINE), ("mail", NINE), ("mail", TEN), ("slow", NINE)}
    lanes = {(lane, None) for lane, _ in rows}
    assert set(found) == rows | lanes | {(None, NINE), (None, TEN), (None, None)}

    assert lateness_of(found["kafka", NINE]) == (50, 95, 99, 100, 1)
    mail = found["mail", NINE]
    assert lateness_of(mail) == (5, 5_000, 5_000, 5_000, -15)  # of -15, 2, 5, 40, 5,000
    assert [mail[name] for name in ("delivered", "early", "unclaimed", "repeated")] == [5, 1, 1, 1]
    assert [mail[name] for name in FAILURES] == [1, 0, 0, 0]
    assert (found["mail", TEN]["delivered"], found["mail", TEN]["max_ms"]) == (1, 5)

    broken = found["broken", NINE]
    assert {broken[name] for name in LATENESS} == {None}
    assert [broken[name] for name in ("delivered", *FAILURES)] == [0, 0, 4, 1, 1]
    assert {name: n for name, n in broken.items() if name.startswith("dead_") and n} == {
        "dead_late": 2,
        "dead_not_retryable": 1,
        "dead_other": 1,
    }
    assert lateness_of(found["slow", NINE]) == (123_500_000, 200_000_001, 200_000_001, 200_000_001, 123_456_789)

    total = found[None, None]
    assert [total[name] for name in ("delivered", *FAILURES)] == [108, 1, 4, 1, 1]
    assert (total["p50_ms"], total["max_ms"], total["min_ms"]) == (49, 200_000_001, -15)
    assert found[None, NINE]["delivered"] + found[None, TEN]["delivered"] == total["delivered"]


def test_a_report_is_of_a_span_and_a_condition_and_still_knows_claims_from_before(
    spark: SparkSession, tmp_path: Path
) -> None:
    journal = Journal()
    journal.deliver("before", 1)
    journal.deliver("across", 4, took_ms=2_000, due=TEN - 1_000 * MS)
    journal.deliver("elsewhere", 70, lane="kafka", due=TEN)
    journal.deliver("two days later", 30, due=TEN + 48 * HOUR)
    journal.deliver("at the end", 0, took_ms=0, due=TEN + 72 * HOUR)
    events = spark.read.parquet(journal.archive(spark, tmp_path / "archive"))
    days = report(events, by=["day"], start=TEN, end=TEN + 72 * HOUR, where="lane = 'mail'")
    found = figures_of(days)
    assert {day: (row["delivered"], row["max_ms"], row["unclaimed"]) for day, row in found.items()} == {
        (date(2026, 3, 28),): (1, 4, 0),
        (date(2026, 3, 30),): (1, 30, 0),
    }
    (whole,) = report(events, by=[]).collect()
    assert (whole["delivered"], whole["max_ms"]) == (5, 70)


def test_what_was_asked_wrongly_is_named(spark: SparkSession, tmp_path: Path) -> None:
    events = spark.createDataFrame([], EVENTS)
    for by in (["hour", "day"], ["lane", "lane"], ["topic"]):
        with pytest.raises(ConfigurationError, match=r"^by is \[.*; allowed: lane, hour and day, each at most once"):
            report(events, by=by)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"^start is .*; allowed: before the end"):
        report(events, start=TEN, end=TEN)
    with pytest.raises(InputError, match=r"^start is .*timezone-aware"):
        report(events, start=TEN.replace(tzinfo=None))
    for condition in ("lane == == 'a'", "topic = 'a'", "concat(lane, '=')"):
        with pytest.raises(InputError, match=r"^where is .*=.*; allowed: a condition"):
            report(events, where=condition)
    with pytest.raises(InputError, match=r"^column 'lane' of the events is missing; allowed: string"):
        report(events.drop("lane"))
    with pytest.raises(InputError, match=r"^column 'at' of the events is timestamp_ntz; allowed: timestamp"):
        report(events.withColumn("at", F.col("at").cast("timestamp_ntz")))
    with pytest.raises(InputError, match=r"^archive is .*nowhere'; allowed: a folder"):
        run(spark, archive=f"{tmp_path / 'nowhere'}")
    with pytest.raises(ConfigurationError, match=r"^parquet is .*; allowed: a folder outside the archive"):
        run(spark, archive=f"{tmp_path}/", parquet=f"{tmp_path / 'report'}")
    with pytest.raises(ConfigurationError, match=r"^html is .*; allowed: a name in an existing folder"):
        run(spark, archive=f"{tmp_path}", html=tmp_path / "nowhere" / "report.html")


def test_an_archive_in_which_there_is_nothing_yet_has_a_report_that_says_so(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "archive").mkdir()
    summary = run(spark, archive=f"{tmp_path / 'archive'}", html=tmp_path / "report.html", csv=tmp_path / "report.csv")
    assert summary.rows == 0
    assert set(summary.counts.values()) == {0}
    assert "Nothing happened" in (tmp_path / "report.html").read_text("utf-8")
    assert (tmp_path / "report.csv").read_text("utf-8").startswith("lane,hour,delivered,p50_ms")


def test_the_figures_are_written_as_parquet_csv_and_a_page(spark: SparkSession, tmp_path: Path) -> None:
    archive = busy_journal().archive(spark, tmp_path / "archive")
    paths: dict[str, Any] = {
        "parquet": f"{tmp_path / 'report'}",
        "csv": tmp_path / "report.csv",
        "html": tmp_path / "report.html",
    }
    summary = run(spark, archive=archive, **paths)
    assert (summary.rows, summary.rejected) == (116, 0)
    assert summary.counts["delivered"] == 108
    assert summary.facts["lateness"]["p50_ms"] == 49
    assert summary.facts["written"] == {name: f"{path}" for name, path in paths.items()}

    written = figures_of(spark.read.parquet(paths["parquet"]))
    assert set(written) == {("broken", NINE), ("kafka", NINE), ("mail", NINE), ("mail", TEN), ("slow", NINE)}
    with paths["csv"].open(encoding="utf-8", newline="") as file:
        lines = {(line["lane"], line["hour"]): line for line in csv.DictReader(file)}
    assert len(lines) == len(written)
    assert lines["kafka", "2026-03-28T09:00:00Z"]["p99_ms"] == "99"
    assert lines["broken", "2026-03-28T09:00:00Z"]["p99_ms"] == ""
    assert "<td>50 ms</td>" in paths["html"].read_text("utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "report", "report.csv", "report.html"]

    for name, path in paths.items():
        with pytest.raises(ConfigurationError, match=f"^{name} is .*; allowed: a name that is free"):
            run(spark, archive=archive, **{name: path})
    run(spark, archive=archive, where="lane = 'kafka'", overwrite=True, **paths)
    assert spark.read.parquet(paths["parquet"]).count() == 1


def test_what_is_too_much_for_a_page_is_left_out_and_said(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_job, "MOST_ROWS", 4)
    archive = busy_journal().archive(spark, tmp_path / "archive")
    run(spark, archive=archive, html=tmp_path / "report.html", csv=tmp_path / "report.csv")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "By lane and hour: more than 4 rows, which are not shown" in page
    assert "Figures of each lane<" in page
    assert "Figures of each lane and hour" not in page
    assert len((tmp_path / "report.csv").read_text("utf-8").splitlines()) == 6


def test_the_command_writes_a_page_and_one_line_of_json(
    spark: SparkSession, job: Callable[..., Ran], tmp_path: Path
) -> None:
    archive = busy_journal().archive(spark, tmp_path / "archive")
    arguments = [
        "--archive",
        archive,
        "--by",
        "lane",
        "--from",
        "2026-03-28T11:00:00+01:00",
        "--to",
        "2026-03-29T00:00Z",
    ]
    ended = job("report", *arguments, "--html", f"{tmp_path / 'report.html'}")
    assert ended.code == 0, ended.err
    summary = ended.object
    assert (summary["job"], summary["counts"]["delivered"]) == ("report", 1)
    assert summary["facts"]["within"] == "from 2026-03-28 10:00:00 before 2026-03-29 00:00:00"
    assert "Figures of each lane" in (tmp_path / "report.html").read_text("utf-8")
