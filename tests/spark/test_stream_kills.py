"""An archive job that is killed, with all of Spark, at several points: every number is in the archive once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession

from aiodelay.spark.jobs import archive
from tests.support.journals import note

JOB = """
import sys
from aiodelay.spark.jobs.archive import run
from aiodelay.spark.session import local_session

url, folder = sys.argv[1:]
spark = local_session("local[2]", {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1"})
run(spark, store=url, to=folder, max_rows_per_batch=20)
"""
N = 3000
START_S = 180.0


def test_every_event_is_archived_once_over_kills_of_the_job_and_all_its_processes(
    spark: SparkSession, tmp_path: Path
) -> None:
    url, folder = f"sqlite:///{tmp_path / 'delay.db'}?journal=100000", tmp_path / "archive"
    asyncio.run(note(url, 1, N))
    log, checkpoint = folder / "_spark_metadata", folder / "_checkpoint"
    for place in (checkpoint / "offsets" / "2", log / "6.compact", checkpoint / "commits" / "9"):
        _run_until(place, url, folder)
    assert 0 < _written(spark, folder) < N
    archive.run(spark, store=url, to=f"{folder}")
    numbers = [row.number for row in spark.read.parquet(f"{folder}").select("number").collect()]
    assert sorted(numbers) == [*range(1, N + 1)]


def _run_until(place: Path, url: str, folder: Path) -> None:
    """Run the job, and kill it, its JVM and its workers as soon as a file is there: a step of a batch is done."""
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, url, f"{folder}"],
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd=folder.parent,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable},
    )
    assert job.stderr is not None
    os.set_blocking(job.stderr.fileno(), False)
    try:
        deadline, told = time.monotonic() + START_S, b""
        while not place.exists():
            told = (told + (job.stderr.read() or b""))[-5000:]  # or it would wait for us
            assert job.poll() is None, told.decode()
            assert time.monotonic() < deadline, told.decode()
            time.sleep(0.001)
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        job.stderr.close()


def _written(spark: SparkSession, folder: Path) -> int:
    return spark.read.parquet(f"{folder}").count()
