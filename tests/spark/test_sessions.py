"""Writing and reading in sessions that stand beside no other in a process: Connect."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from tests.spark.program import ROWS
from tests.support.processes import ROOT
from tests.support.servers import RedisServer

KNOWN = f"Counts(stored=0, replaced=0, known={ROWS})"


def ran(*arguments: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """Run a program; return the lines that it printed."""
    program = [sys.executable, "-m", "tests.spark.program", *arguments]
    variables = {**os.environ, **(environment or {})}
    ended = subprocess.run(program, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-5_000:]
    return ended.stdout.splitlines()


def test_a_connect_session_writes_and_reads(redis_server: RedisServer, namespace: str) -> None:
    lines = ran("count_again", "", redis_server.url, namespace, environment={"SPARK_REMOTE": "local[2]"})
    assert lines == [f"{ROWS}", KNOWN]
