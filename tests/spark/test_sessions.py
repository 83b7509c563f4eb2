"""Sessions that must be the only one in a process: Connect, remote executors, copies of tasks, no pandas."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from aiodelay.spark.writing import write_frame
from tests.spark.connect import Client
from tests.spark.messages import end_some, frame_of, given, stored
from tests.spark.program import OWN_PORT, ROWS
from tests.spark.test_kills import running, wait_for_rows
from tests.support.processes import ROOT
from tests.support.servers import RedisServer
from tests.support.spark_cluster import two_hosts

pytestmark = [pytest.mark.usefixtures("java"), pytest.mark.timeout(600)]

ELSEWHERE = "local-cluster[1,2,1024]"
"""The master of a session whose executor is a process beside the driver's."""
KNOWN = f"Counts(stored=0, replaced=0, known={ROWS})"


def ran(*arguments: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """Run a program; return the lines that it printed."""
    program = [sys.executable, "-m", "tests.spark.program", *arguments]
    variables = {**os.environ, **(environment or {})}
    ended = subprocess.run(program, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-5_000:]
    return ended.stdout.splitlines()


@pytest.mark.nightly  # every job of the pages runs in one: test_connect
def test_a_connect_session_writes_and_reads(connect: Client, redis_server: RedisServer, namespace: str) -> None:
    lines = ran("count_again", "", redis_server.url, namespace, environment={"SPARK_REMOTE": connect.url})
    assert lines == [f"{ROWS}", KNOWN]


@pytest.mark.nightly  # a server of its own: test_declarative has one too
def test_a_connect_session_with_a_server_of_its_own_writes_and_reads(redis_server: RedisServer, namespace: str) -> None:
    lines = ran("count_again", "", redis_server.url, namespace, environment={"SPARK_REMOTE": "local[2]"} | OWN_PORT)
    assert lines == [f"{ROWS}", KNOWN]


@pytest.mark.nightly  # five programs in Java; what a failed write has left: test_write_faults
def test_what_a_killed_driver_with_an_executor_elsewhere_has_left_is_completed_by_another(
    spark: SparkSession, redis_server: RedisServer, namespace: str
) -> None:
    url = redis_server.url
    with running("write_slowly", ELSEWHERE, url, namespace) as process:
        wait_for_rows(process, url, namespace)
    some = stored(url, namespace)
    assert 0 < len(some) < ROWS
    ended = end_some(url, namespace, deliver=1)
    counts = write_frame(frame_of(spark, ROWS, due="2020-01-01"), given(url, namespace))
    assert (counts.rows, counts.known >= len(some)) == (ROWS, True)
    assert stored(url, namespace).keys() == {f"{n}" for n in range(ROWS)} - ended


@pytest.mark.nightly  # it writes: above
def test_an_executor_in_a_process_of_its_own_writes_and_reads(redis_server: RedisServer, namespace: str) -> None:
    lines = ran("count_again", ELSEWHERE, redis_server.url, namespace)
    assert lines == [f"{ROWS}", KNOWN]


@pytest.mark.nightly  # seven programs in Java
def test_a_speculative_copy_beside_a_slow_task_stores_every_message_once(
    redis_server: RedisServer, namespace: str, tmp_path: Path
) -> None:
    with two_hosts(tmp_path) as master:
        lines = ran("speculate", master, redis_server.url, namespace, f"{tmp_path}")
    assert (tmp_path / "copy").exists()
    assert lines == [f"{ROWS}"], "of the two attempts one is counted"
    assert stored(redis_server.url, namespace).keys() == {f"{n}" for n in range(ROWS)}


@pytest.mark.nightly  # a JVM of its own; that our modules import no pandas: tests/unit/test_architecture.py
def test_the_data_source_needs_no_pandas(redis_server: RedisServer, namespace: str, tmp_path: Path) -> None:
    (tmp_path / "pandas").mkdir()
    (tmp_path / "pandas" / "__init__.py").write_text("raise ImportError('this environment has no pandas')\n")
    path = os.pathsep.join([f"{tmp_path}", os.environ.get("PYTHONPATH", "")])
    lines = ran("round_trip", "local[2]", redis_server.url, namespace, environment={"PYTHONPATH": path})
    assert lines == [f"{ROWS}"]
