"""`Program`: a program in a separate process. Tests wait for its output lines, never for a fixed time."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Self

from aiodelay.cli.signals import SAME_S

from .importing import import_path

DEADLINE_S = 120.0
STOOD_STILL = re.compile(
    "the event loop ran |closing (the store and sinks took|cancels tasks)"
    "|did not reach the server for 3 s|it stood still, or did not reach"
)
"""What the log tells of a process that a busy machine did not let run."""
PYTEST = (
    "-m",
    "pytest",
    "-p",
    "no:cacheprovider",
    *(
        word
        for name in ("schemathesis", "faker", "valkey", "hypothesispytest", "xdist", "anyio")
        for word in ("-p", f"no:{name}")
    ),
)
"""Arguments that start pytest as users do, without the plugins of this project, whose import takes two seconds."""


class Program:
    """A running program. The end of its block kills it if it still runs.

    Args:
        arguments: The arguments of Python, such as `-m aiodelay demo`.
        cwd: The working directory.
        environment: Environment variables in addition to those of this process.
    """

    def __init__(self, *arguments: str, cwd: Path, environment: Mapping[str, str] | None = None) -> None:
        clean = {
            name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")
        }
        variables = {**clean, "PYTHONPATH": absolute_path(clean.get("PYTHONPATH", "")), **(environment or {})}
        self._process = subprocess.Popen(
            [sys.executable, "-u", *arguments],
            cwd=cwd,
            env={**variables, "PYTHONPATH": import_path(variables["PYTHONPATH"])},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.out, self.err = Lines(self._process.stdout), Lines(self._process.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self.exit_code()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def end_at_once(self, number: int = signal.SIGTERM) -> int:
        """Repeat a signal until the process has ended: it counts early repetitions as one. Return the exit code."""
        ends = time.monotonic() + DEADLINE_S
        while self.is_running():
            assert time.monotonic() < ends, "the process does not end"
            self.send(number)
            time.sleep(0.02)  # one signal at a time
        return self.exit_code()

    def end_by_a_later_signal(self, number: int = signal.SIGTERM) -> int:
        """Send one signal, so late that the process counts it as a second signal. Return the exit code.

        Call this after the process has reported the first signal.
        """
        time.sleep(SAME_S)  # before this time, the process takes both signals for one
        self.send(number)
        return self.exit_code()

    def end_by_many_later_signals(self, number: int = signal.SIGTERM) -> int:
        """Wait until signals no longer count as one, then send them as fast as possible. Return the exit code."""
        time.sleep(SAME_S)  # before this time, the process takes both signals for one
        ends = time.monotonic() + DEADLINE_S
        while self.is_running():
            assert time.monotonic() < ends, "the process does not end"
            self.send(number)
        return self.exit_code()

    def exit_code(self, within_s: float = DEADLINE_S) -> int:
        """Wait until the program has ended and its output is read. Return the exit code."""
        code = self._process.wait(within_s)
        self.out.wait_until_read(within_s)
        self.err.wait_until_read(within_s)
        return code

    def is_running(self) -> bool:
        return self._process.poll() is None

    def complaints(self) -> list[str]:
        """Return the lines of standard error, without the lines that a busy machine causes."""
        return [line for line in self.err.seen if not STOOD_STILL.search(line)]


class Lines:
    """The lines of a stream. `seen` has the lines up to the last one that a test waited for."""

    def __init__(self, stream: IO[str]) -> None:
        self.seen: list[str] = []
        self._coming: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._reader.start()

    def wait_for(self, pattern: str, within_s: float = DEADLINE_S) -> str:
        """Return the next line that matches a pattern. Raise AssertionError if none comes in time."""
        ends = time.monotonic() + within_s
        while (line := self._next(ends)) is not None:
            if re.search(pattern, line):
                return line
        raise AssertionError(f"no line with {pattern!r} came; these did:\n" + "\n".join(self.seen))

    def wait_until_read(self, within_s: float) -> None:
        ends = time.monotonic() + within_s
        while self._next(ends) is not None:
            pass

    def _next(self, ends: float) -> str | None:
        try:
            line = self._coming.get(timeout=max(ends - time.monotonic(), 0))
        except queue.Empty:
            return None
        if line is None:
            self._coming.put(None)  # end the next wait, too
            return None
        self.seen.append(line)
        return line

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._coming.put(line.rstrip("\n"))
        self._coming.put(None)


def aiodelay(*arguments: str, cwd: Path, environment: Mapping[str, str] | None = None) -> Program:
    return Program("-m", "aiodelay", *arguments, cwd=cwd, environment=environment)


def absolute_path(path: str) -> str:
    return os.pathsep.join(os.path.abspath(entry) for entry in path.split(os.pathsep) if entry)
