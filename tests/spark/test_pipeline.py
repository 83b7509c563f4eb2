"""The example pipeline, end to end, on a real Redis and a real broker."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiodelay.testing.servers import redis_servers, serving

PIPELINE = Path(__file__).parents[2] / "examples" / "spark" / "pipeline.py"
ROWS = 120


@pytest.fixture
def redis() -> Iterator[str]:
    with serving(redis_servers()[0]) as url:
        yield url


@pytest.mark.timeout(300)
def test_orders_become_reminders_in_kafka_each_once_and_none_early(redis: str, kafka: str, tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    servers = ["--redis", redis, "--kafka", kafka]
    command = [sys.executable, f"{PIPELINE}", *servers, "--dir", f"{folder}", "--rows", f"{ROWS}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-5000:]
    steps = [re.split(r"  +", line)[0] for line in ended.stdout.splitlines()]
    assert steps == [
        "orders",
        "backfill",
        "backfill",
        "reconcile before",
        "dispatch",
        "archive",
        "archive",
        "report",
        "reconcile after",
        "done",
    ]
    assert f"records {ROWS}  orders {ROWS}  early 0" in ended.stdout
    with (folder / "report.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line["lane"] for line in lines} == {"kafka"}
    assert sum(int(line["delivered"]) for line in lines) == ROWS
    assert "Delivery report" in (folder / "report.html").read_text("utf-8")
