"""A Spark Connect server next to a session, and `aiodelay` as its client without Java."""

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

from pyspark.sql import SparkSession

from tests.support.importing import import_path
from tests.support.processes import ROOT

__all__ = ["EACH", "SERVER", "SHELL", "Client", "port_of"]

SERVER = {
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
    "spark.connect.grpc.binding.port": "0",
}
"""Settings that make a session a server too, at a free port."""

EACH = 'aiodelay() { python -m aiodelay "$@"; }'
"""Makes the command `aiodelay` in a script of bash: each a process of its own."""
SHELL = r"""
exec 3>&1
coproc AIODELAY_RESIDENT { python -m tests.spark.resident; }
aiodelay() {
  printf '%s\0' "${AIODELAY_STORE-}" "$@" >&"${AIODELAY_RESIDENT[1]}"
  echo >&"${AIODELAY_RESIDENT[1]}"
  read -r code <&"${AIODELAY_RESIDENT[0]}"
  return "$code"
}
"""
"""Makes the command `aiodelay` in a script of bash: all of them in one process."""


def port_of(spark: SparkSession) -> int:
    """Return where the server of a session listens."""
    service = getattr(spark._jvm, "org.apache.spark.sql.connect.service.SparkConnectService$")
    port: int = getattr(service, "MODULE$").localPort()
    return port


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
        ours = {"PATH": f"{Path(sys.executable).parent}", "PYTHONPATH": import_path(f"{ROOT}"), "SPARK_REMOTE": url}
        self.environment = clean | ours

    def ran(self, script: str, aiodelay: str = EACH) -> list[dict[str, Any]]:
        """Run a script; return the summaries that it printed.

        Args:
            script: For bash.
            aiodelay: `EACH` or `SHELL`.
        """
        bash = shutil.which("bash")
        assert bash is not None
        command = [bash, "-e", "-c", f"{aiodelay}\n{script}"]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr[-5_000:]
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
