"""Run commands as processes with a separate JVM and workers, for tests that kill or interrupt them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["QUIET", "command_running"]

QUIET = ("--master", "local[2]", "--conf", "spark.ui.enabled=false", "--conf", "spark.driver.host=127.0.0.1")


@contextmanager
def command_running(folder: Path, name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run `aiodelay spark NAME` in a folder for as long as a block; then it, its JVM and its workers are killed.

    What it says of itself stands in the file `log` of the folder.
    """
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "aiodelay", "spark", name, *arguments, *QUIET],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            cwd=folder,
        )
    with process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGKILL)
