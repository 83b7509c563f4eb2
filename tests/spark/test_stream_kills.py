"""An archive job is killed with all of Spark at several points: every number is in the archive once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark.commands import command_running
from tests.spark.program import BUSY
from tests.support.journals import note

N = 1000
START_S = 300.0


@pytest.mark.nightly  # killed at one point: test_kills; interrupted: test_connect
@pytest.mark.usefixtures("java")
def test_every_event_is_archived_once_over_kills_and_an_interrupted_job_tells_what_it_did(
    spark: SparkSession, tmp_path: Path
) -> None:
    url, folder = f"sqlite:///{tmp_path / 'delay.db'}?journal=100000", tmp_path / "archive"
    asyncio.run(note(url, 1, N))
    log, checkpoint = folder / "_spark_metadata", folder / "_checkpoint"
    for place in (checkpoint / "offsets" / "2", log / "5.compact"):
        with _archived(place.exists, url, folder) as job:
            os.killpg(job.pid, signal.SIGKILL)
    before = spark.read.parquet(f"{folder}").count()
    assert 0 < before < N
    with _archived(lambda: spark.read.parquet(f"{folder}").count() == N, url, folder, "--every", "1s") as job:
        job.send_signal(signal.SIGINT)
        summary = json.loads(job.communicate(timeout=START_S)[0])
    assert (job.returncode, summary["job"]) == (0, "archive")
    assert 0 < summary["rows"] <= N - before
    numbers = [row.number for row in spark.read.parquet(f"{folder}").select("number").collect()]
    assert sorted(numbers) == [*range(1, N + 1)]


@contextmanager
def _archived(is_so: Callable[[], bool], url: str, folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run the job until something is so, then a block; run it anew where the machine was too busy for Spark."""
    is_reached = False
    while not is_reached:
        with _archiving(url, folder, *options) as job:
            if is_reached := _reached(job, is_so, folder.parent / "log"):
                yield job


def _archiving(url: str, folder: Path, *options: str) -> AbstractContextManager[subprocess.Popen[str]]:
    arguments = ("--store", url, "--to", f"{folder}", "--max-rows-per-batch", "20", *options)
    return command_running(folder.parent, "archive", *arguments)


def _reached(job: subprocess.Popen[str], is_so: Callable[[], bool], log: Path) -> bool:
    deadline = time.monotonic() + START_S
    while not is_so():
        if job.poll() is not None:
            said = log.read_text("utf-8")
            assert BUSY in said, said[-5_000:]
            return False
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return True
