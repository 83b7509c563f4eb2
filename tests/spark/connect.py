"""A Spark Connect server in a process of its own, and `aiodelay` as its client without Java."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT

__all__ = ["Client", "serving_connect"]

AIODELAY = 'aiodelay() { python -m aiodelay "$@"; }'


class Client:
    """A client of the server.

    Args:
        url: URL of the server.
        folder: Where both run, so that both mean the same files.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.folder = folder
        self.url = url
        clean = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "SPARK_HOME")}
        ours = {"PATH": f"{Path(sys.executable).parent}", "PYTHONPATH": f"{ROOT}", "SPARK_REMOTE": url}
        self.environment = clean | ours

    def ran(self, script: str, code: int = 0) -> list[dict[str, Any]]:
        """Run a script; return the summaries that it printed."""
        bash = shutil.which("bash")
        assert bash is not None
        command = [bash, "-e", "-c", f"{AIODELAY}\n{script}"]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr[-5_000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    @property
    def errors(self) -> str:
        """What the last that was running wrote to stderr so far."""
        return (self.folder / "errors").read_text("utf-8")

    @contextmanager
    def running(self, line: str) -> Iterator[subprocess.Popen[str]]:
        """Run a line of `aiodelay` for as long as a block."""
        command = [sys.executable, "-m", *shlex.split(line.replace("\\\n", ""))]
        with (self.folder / "errors").open("w") as errors:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        with process:
            try:
                yield process
            finally:
                process.kill()


@contextmanager
def serving_connect(folder: Path, log: Path) -> Iterator[Client]:
    """Run a server in a folder for as long as a block; `log` takes its standard error."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.program", "serve_connect"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": f"{ROOT}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    with process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, log.read_text("utf-8")[-5_000:]
        try:
            yield Client(f"sc://localhost:{port}", folder)
        finally:
            process.communicate()
