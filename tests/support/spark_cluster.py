"""A Spark cluster on one machine whose two workers have different hosts: 127.0.0.2 and 127.0.0.3.

Spark runs a speculative copy of a task only on another host, and all workers of `local-cluster` are on one host.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark

__all__ = ["two_hosts"]

HOME = Path(pyspark.__file__).parent


@contextmanager
def two_hosts(folder: Path) -> Iterator[str]:
    """Yield the URL of a master with two workers of one core each."""
    with ExitStack() as stack:
        master = stack.enter_context(_running(folder, "master.Master", "--host", "127.0.0.1", "--port", "0"))
        url = _url_of(master)
        for host in ("127.0.0.2", "127.0.0.3"):
            size = ("--cores", "1", "--memory", "1g", "--work-dir", f"{folder / host}")
            stack.enter_context(_running(folder, "worker.Worker", "--host", host, *size, url))
        yield url


@contextmanager
def _running(folder: Path, kind: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a part of the cluster during a block."""
    command = [f"{HOME / 'bin' / 'spark-class'}", f"org.apache.spark.deploy.{kind}", "--webui-port", "0", *arguments]
    settings = {"SPARK_HOME": f"{HOME}", "SPARK_DAEMON_MEMORY": "256m"}
    logged = subprocess.PIPE if kind == "master.Master" else subprocess.DEVNULL
    with subprocess.Popen(command, cwd=folder, env=os.environ | settings, stderr=logged, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def _url_of(master: subprocess.Popen[str]) -> str:
    """Return the address of a master. Its later output is short enough for the buffer of the pipe."""
    assert master.stderr is not None
    for line in master.stderr:
        if found := re.search(r"spark://[\d.]+:\d+", line):
            return found[0]
    raise AssertionError(f"the master ended with {master.wait()}")
