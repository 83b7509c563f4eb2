"""The example pipeline, end to end, on a real Redis and a real broker."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from aiodelay.spark.summary import Summary
from aiodelay.testing.servers import redis_servers, serving
from examples.spark import pipeline
from examples.spark.pipeline import Pipeline, WrongError

PIPELINE = Path(__file__).parents[2] / "examples" / "spark" / "pipeline.py"
ROWS = 120


@pytest.fixture
def redis() -> Iterator[str]:
    with serving(redis_servers()[0]) as url:
        yield url


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders are due about when the first jobs have ended."""
    monkeypatch.setattr(pipeline, "LEAD", timedelta(seconds=5))
    monkeypatch.setattr(pipeline, "SPAN_S", 5)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_soon")
def test_orders_become_reminders_in_kafka_each_once_and_none_early(
    spark: SparkSession, redis: str, kafka: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "pipeline"
    folder.mkdir()
    Pipeline(spark, redis, kafka, folder, ROWS).run()
    check(capsys.readouterr().out, folder)


@pytest.mark.nightly  # its steps: above; this waits for 35 seconds
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("java")
def test_the_program_runs_as_its_page_says(redis: str, kafka: str, tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    servers = ["--redis", redis, "--kafka", kafka]
    command = [sys.executable, f"{PIPELINE}", *servers, "--dir", f"{folder}", "--rows", f"{ROWS}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-5000:]
    assert ended.stdout.splitlines()[-1].startswith("done ")
    check(ended.stdout.rpartition("done ")[0], folder)


def check(said: str, folder: Path) -> None:
    """All steps were taken, each order was delivered once and not early, and the report tells of all of them."""
    assert [re.split(r"  +", line)[0] for line in said.splitlines()] == [
        "orders",
        "backfill",
        "backfill",
        "reconcile before",
        "dispatch",
        "archive",
        "archive",
        "report",
        "reconcile after",
    ]
    assert f"records {ROWS}  orders {ROWS}  early 0" in said
    with (folder / "report.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line["lane"] for line in lines} == {"kafka"}
    assert sum(int(line["delivered"]) for line in lines) == ROWS
    assert "Delivery report" in (folder / "report.html").read_text("utf-8")


@dataclass
class Arrived:
    """A record in the topic: which order, and how many ms after it was due."""

    order: str
    late_ms: int

    @property
    def value(self) -> bytes:
        return json.dumps({"order_id": self.order, "remind_at": datetime.fromtimestamp(1000, UTC).isoformat()}).encode()

    @property
    def timestamp(self) -> int:
        return 1_000_000 + self.late_ms


@pytest.mark.parametrize(
    ("records", "in_topic", "told"),
    [
        ([Arrived("a", 0), Arrived("b", -1)], 2, "2 records of 2 orders, 1 early"),
        ([Arrived("a", 0), Arrived("a", 9)], 2, "2 records of 1 orders, 0 early"),
        ([Arrived("a", 0), Arrived("b", 9)], 3, "3 records of 2 orders, 0 early"),
    ],
)
def test_an_early_a_missing_and_a_second_reminder_end_the_example(
    spark: SparkSession, tmp_path: Path, records: Sequence[Arrived], in_topic: int, told: str
) -> None:
    steps = Pipeline(spark, "redis://localhost", "localhost:9092", tmp_path, rows=2)
    steps.check([Arrived("a", 0), Arrived("b", 9)], 2)
    with pytest.raises(WrongError, match=told):
        steps.check(records, in_topic)


def test_a_job_that_comes_to_something_else_ends_the_example(spark: SparkSession, tmp_path: Path) -> None:
    steps = Pipeline(spark, "redis://localhost", "localhost:9092", tmp_path, rows=2)
    summary = Summary(job="reconcile", seconds=0.1, rows=2, rejected=1, counts={"same": 1, "missing": 1})
    steps.expect(summary, {"rows": 2, "same": 1})
    with pytest.raises(WrongError, match=r"^reconcile before: .*'rejected': 1.*expected .*'rejected': 0"):
        steps.expect(summary, {"rows": 2, "rejected": 0}, "before")
