"""The simulation: pending messages of a store or of files become lateness and backlog, by hour and rate."""

from __future__ import annotations

import csv
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from aiodelay.errors import ConfigurationError, InputError
from aiodelay.spark.forecast import HOUR_MS, Span
from aiodelay.spark.jobs.simulate import MOST_RATES, pending, read_rates, run, slots, span_of
from aiodelay.spark.summary import Summary
from tests.spark.messages import given
from tests.support.cli import Ran
from tests.support.servers import RedisServer

START = datetime(2031, 3, 3, 9, tzinfo=UTC)
FROM_MS = int(START.timestamp()) * 1000
DAY = Span(FROM_MS, FROM_MS + 24 * HOUR_MS)


def due_frame(spark: SparkSession, seconds: list[float | None]) -> DataFrame:
    """Return messages that are due so long after the start."""
    rows = [(None if each is None else START + timedelta(seconds=each),) for each in seconds]
    return spark.createDataFrame(rows, "due_at timestamp")


def rates_of(summary: Summary) -> dict[float, dict[str, Any]]:
    return {each["rate"]: each for each in summary.facts["rates"]}


def test_messages_are_counted_by_slot_and_what_is_overdue_is_due_at_the_start(spark: SparkSession) -> None:
    due = due_frame(spark, [-86_400, -0.001, 0, 0.0999991, 0.1, 7, 7.05, 86_399.999, 86_400, None])
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    try:
        rows = slots(due, span=DAY, slot_ms=100).collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    found = {row["at_ms"]: (row["n"], row["overdue"]) for row in rows}
    assert found == {0: (3, 2), 100: (2, 0), 7_000: (2, 0), 86_399_900: (1, 0), None: (1, 0)}
    between = Span(FROM_MS + 30, FROM_MS + 7_020)
    rows = slots(due.where("due_at IS NOT NULL"), span=between, slot_ms=100).collect()
    assert {row["at_ms"]: (row["n"], row["overdue"]) for row in rows} == {0: (3, 3), 70: (2, 0), 6_970: (1, 0)}


def test_a_day_is_foretold_for_each_rate_and_written_as_table_and_page(spark: SparkSession, tmp_path: Path) -> None:
    burst: list[float | None] = [3600.0] * 7_200
    frame = due_frame(spark, [-5.0, -3.0, *burst, 40_000.0, 90_000.0])
    out = tmp_path / "out"
    summary = run(frame, rates=[2, 0.05], span=DAY, out=out, source="here")
    assert (summary.job, summary.rows, summary.rejected) == ("simulate", 7_203, 0)
    assert summary.counts == {"messages": 7_203, "overdue": 2}
    assert summary.facts["from"] == "2031-03-03T09:00:00.000Z"
    assert summary.facts["slot"] == "100ms"
    slow, fast = rates_of(summary)[0.05], rates_of(summary)[2]
    assert (fast["max_ms"], fast["backlog"]) == (3_599_500, 7_200)
    assert fast["p50_ms"] == pytest.approx(1_800_000, abs=2_000)
    assert (fast["worst_at"], fast["drained_at"]) == ("2031-03-03T10:00:00.000Z", "2031-03-03T11:00:00.000Z")
    assert (fast["left"], fast["load"], fast["utilisation"]) == (0, 0.0417, 0.0417)
    assert (slow["drained_at"], slow["load"]) == (None, pytest.approx(1.667, abs=0.001))
    assert slow["left"] == pytest.approx(7_203 - 0.05 * (86_400 - 3_600) - 2, abs=2)

    with (out / "simulate.csv").open(encoding="utf-8", newline="") as file:
        lines = {(line["rate"], line["hour"]): line for line in csv.DictReader(file)}
    assert len(lines) == 2 * 24
    assert lines["2.0", "2031-03-03T10:00:00.000Z"]["max_ms"] == "3599500"
    assert lines["2.0", "2031-03-03T10:00:00.000Z"]["left"] == "0"
    assert lines["0.05", "2031-03-03T11:00:00.000Z"]["max_ms"] == ""
    assert lines["0.05", "2031-03-03T11:00:00.000Z"]["backlog"] == "7020"
    page = (out / "simulate.html").read_text("utf-8")
    assert "0.05/s is too low: on average 0.08337 messages a second are due" in page
    assert "<code>here</code>" in page

    with pytest.raises(ConfigurationError, match=r"^out is .*; allowed: a name that is free"):
        run(frame, rates=[2], span=DAY, out=out)
    again = run(frame, rates=[2], span=DAY, overdue="ignore", scale=2.5, out=out, overwrite=True)
    assert again.counts == {"messages": 7_201, "overdue": 0}
    assert rates_of(again)[2]["messages"] == 18_003
    assert "2.5 times as many" in (out / "simulate.html").read_text("utf-8")


def test_nothing_and_all_at_once_have_a_forecast_too(spark: SparkSession, tmp_path: Path) -> None:
    nothing = run(due_frame(spark, []), rates=[5], span=DAY, out=tmp_path / "out")
    assert nothing.rows == 0
    figures = rates_of(nothing)[5]
    assert {figures[name] for name in ("p50_ms", "p95_ms", "p99_ms", "max_ms", "worst_at", "drained_at")} == {None}
    assert {figures[name] for name in ("messages", "backlog", "left", "left_ms", "load", "utilisation")} == {0}
    assert "No message is due" in (tmp_path / "out" / "simulate.html").read_text("utf-8")
    text = (
        due_frame(spark, [60.0] * 100)
        .selectExpr("concat(string(due_at), 'Z') at", "1 n")
        .union(spark.createDataFrame([("2031-03-03T10:00:00+09:00", 2)], "at string, n int"))
    )
    at_once = run(text, rates=[5], span=DAY, mapping={"due_at": "at", "id": "nowhere"}, where="n = 1", slot="1s")
    assert rates_of(at_once)[5]["p95_ms"] == 18_800
    with pytest.raises(InputError, match=r"^due_at is null, or no instant, in 1 of 101 rows; allowed: a due time in"):
        run(text.selectExpr("replace(at, '+09:00') due_at"), rates=[5], span=DAY)


def test_what_is_pending_in_a_store_is_read_without_bodies(
    spark: SparkSession, redis_server: RedisServer, namespace: str
) -> None:
    rows = spark.range(40).selectExpr(
        "string(id) id",
        f"timestamp_millis({FROM_MS} + 1000 * id) due_at",
        "if(id % 2 = 0, 'redis-list:orders', 'kafka:orders') to",
        "'' payload",
    )
    options = given(redis_server.url, namespace)
    rows.write.format("aiodelay").mode("append").options(**options).save()
    span = Span(FROM_MS + 10_000, FROM_MS + 30_000)
    place = {"store": redis_server.url, "namespace": namespace}
    found = run(pending(spark, span=span, **place), rates=[10], span=span)
    assert found.counts == {"messages": 30, "overdue": 10}
    assert rates_of(found)[10]["max_ms"] == 1_000  # the one that is due at the start comes after those that are overdue
    lane = pending(spark, span=span, lane="kafka", **place)
    assert lane.columns == ["due_at"]
    assert run(lane, rates=[10], span=span).counts == {"messages": 15, "overdue": 5}


def test_what_was_asked_wrongly_is_named(spark: SparkSession, tmp_path: Path) -> None:
    frame = due_frame(spark, [1.0])
    for rates in ([], [0], [-5], [float("nan")], [2_000_000], [5, 5.0001], list(range(1, MOST_RATES + 2))):
        with pytest.raises(ConfigurationError, match=r"^rate is .*; allowed: 1 to 6 different numbers from 0.001"):
            run(frame, rates=rates)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"scale": 0}, r"scale is 0; allowed: a number from 0.01 to 100"),
        ({"slot": "7s"}, r"slot is 7s; allowed: a length that divides an hour"),
        ({"slot": "1ms"}, r"slot is 1ms; allowed: a longer slot, or a shorter"),
        ({"slot": "fast"}, r"slot is 'fast'; allowed: text such as"),
        ({"overdue": "drop"}, r"overdue is 'drop'; allowed: backlog, ignore"),
        ({"where": "due_at"}, r"where is 'due_at' \(the given text has the type timestamp\); allowed: an SQL"),
        ({"mapping": {"id": "due_at"}}, r"map is missing 'due_at'; allowed: due_at=COLUMN; columns: due_at"),
        ({"mapping": {"due_at": "remind_at"}}, r"map due_at is 'remind_at'; allowed: a column or"),
        ({"mapping": {"due_at": "1"}}, r"column 'due_at' is INT; allowed: TIMESTAMP, or STRING"),
        ({"out": tmp_path / "nowhere" / "out"}, r"out is .*; allowed: a name in an existing folder"),
        ({"out": tmp_path}, r"out is .*; allowed: a name that is free"),
    ]
    for options, text in wrong:
        with pytest.raises(ConfigurationError, match=f"^{text}"):
            run(frame, rates=[5], **options)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"^out is .*file'; allowed: a folder"):
        run(frame, rates=[5], out=tmp_path / "file", overwrite=True)
    with pytest.raises(ConfigurationError, match=r"^rate is '5,many'; allowed: messages a second, such as"):
        read_rates("5,many")
    for end in (START, START + timedelta(days=93)):
        at_most = r"^to_time is .*; allowed: a time after 2031-03-03T09:00:00.000Z, at most 92"
        with pytest.raises(ConfigurationError, match=at_most):
            span_of(START, end)
    with pytest.raises(InputError, match=r"^from_time is .*timezone-aware"):
        span_of(START.replace(tzinfo=None))
    assert span_of(START) == Span(FROM_MS, FROM_MS + 7 * 24 * HOUR_MS)


def test_the_command_simulates_files_and_prints_one_line(
    spark: SparkSession, job: Callable[..., Ran], tmp_path: Path
) -> None:
    due_frame(spark, [60.0] * 100).withColumnRenamed("due_at", "remind_at").write.parquet(f"{tmp_path / 'orders'}")
    command = ["simulate", "--rate", "5,50"]
    command += ["--from-time", "2031-03-03T10:00:00+01:00", "--to-time", "2031-03-04T00:00Z"]
    files = ["--from", f"parquet:{tmp_path / 'orders'}", "--map", "due_at=remind_at", "--out", f"{tmp_path / 'out'}"]
    ended = job(*command, *files)
    assert ended.code == 0, ended.err
    facts = ended.object["facts"]
    assert [each["max_ms"] for each in facts["rates"]] == [19_800, 1_980]
    assert facts["written"] == [f"{tmp_path / 'out' / name}" for name in ("simulate.csv", "simulate.html")]
    for arguments, line in (
        ([], "--store is missing"),
        ([*files, "--lane", "kafka"], "--lane is 'kafka'; allowed: --lane with a store"),
    ):
        wrong = job(*command, *arguments)
        assert wrong.code == 2
        assert line in wrong.err
