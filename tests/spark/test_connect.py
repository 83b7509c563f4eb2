"""Every job by the line that docs/spark/README.md shows, as a client of a Spark Connect server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT

pytestmark = pytest.mark.timeout(600)

PAGE = ROOT / "docs" / "spark" / "README.md"
AIODELAY = 'aiodelay() { python -m aiodelay "$@"; }'


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The URL of a server that runs where the commands do, so that both mean the same files."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.program", "serve_connect"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": f"{ROOT}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    with process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, (tmp_path / "log").read_text("utf-8")[-5_000:]
        try:
            yield f"sc://localhost:{port}"
        finally:
            process.communicate()


def ran(script: str, folder: Path, server: str) -> list[dict[str, Any]]:
    """Run a script as a client that has no Java; return the summaries that it printed."""
    bash = shutil.which("bash")
    assert bash is not None
    clean = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "SPARK_HOME")}
    ours = {"PATH": f"{Path(sys.executable).parent}", "PYTHONPATH": f"{ROOT}", "SPARK_REMOTE": server}
    command = [bash, "-e", "-c", f"{AIODELAY}\n{script}"]
    done = subprocess.run(command, cwd=folder, env=clean | ours, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-5_000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_every_job_runs_by_its_line_on_the_example_data(server: str, tmp_path: Path) -> None:
    found = re.search(r"## Every job once\n.*?```sh\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None
    summaries = {each["job"]: each for each in ran(found[1], tmp_path, server)}
    counts = {job: {name: n for name, n in each["counts"].items() if n} for job, each in summaries.items()}
    assert counts == {
        "backfill": {"accepted": 1000, "stored": 1000},
        "simulate": {"messages": 1000},
        "snapshot": {"messages": 1000},
        "reconcile": {"drift": 1, "same": 999},
        "repair": {"rescheduled": 1},
        "archive": {"batches": 1},
        "compact": {},
        "replay": {"accepted": 2, "stored": 2},
        "report": {"delivered": 2},
    }
    assert summaries["archive"]["facts"]["days"]
    for job in ("backfill", "reconcile", "repair", "replay"):
        assert summaries[job]["facts"]["tombstone_window"] == "1d"
    assert "Delivery report" in (tmp_path / "report.html").read_text("utf-8")
    assert "Dispatch simulation" in (tmp_path / "next-week" / "simulate.html").read_text("utf-8")
