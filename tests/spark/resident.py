"""Run `aiodelay` for all lines of a shell script, in one process and one Connect session.

Otherwise each line starts a client and, on the server, Python workers of its session: most of what a small job costs.
`connect.py` has the script's part.

The process reads commands from standard input: the URL of the store and the arguments, a NUL behind each, and the end
of a line. It runs the command, with file 3 as its standard output, and answers with a line that has the exit code.
"""

from __future__ import annotations

import os
import sys
from typing import BinaryIO
from unittest import mock

from pyspark.sql.connect.session import SparkSession

from aiodelay.cli.app import run_app


def words(lines: BinaryIO) -> list[str]:
    """Return the words of the next command; none at the end."""
    found = b""
    for line in lines:
        found += line
        if found.endswith(b"\0\n"):
            return found[:-2].decode().split("\0")
    return []


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(3, 1)
    mock.patch.object(SparkSession, "stop").start()
    while command := words(sys.stdin.buffer):
        store, *arguments = command
        if store:
            os.environ["AIODELAY_STORE"] = store
        code = run_app(arguments)
        sys.stdout.flush()
        print(code, file=answers, flush=True)


if __name__ == "__main__":
    main()
