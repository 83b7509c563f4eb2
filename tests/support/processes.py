"""Start real processes, wait for their output lines, kill and stop them, and leave none behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from aiodelay.testing import history as h

from .forking import ForkedProcess, fork_server
from .importing import import_path

__all__ = ["ROOT", "Crew", "Worker"]

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0
"""The longest wait for a process, at least twenty times the wait on an idle machine."""
OUTPUT_END_S = 30.0
"""The longest wait for the end of the output of a process that has ended. A child of the process may hold it open."""


class Worker:
    """A process. Its standard output is read line by line, and its standard error goes to a file.

    Args:
        name: The name of the process in the history.
        arguments: The program and its arguments, after `python`.
        folder: The folder for the file with its standard error.
        history: The history to which its faults are written.
        environment: Environment variables in addition to those of this process.
        forks: Fork `arguments` (`-m`, a module, its arguments) from a process that has imported the module.
    """

    def __init__(
        self,
        name: str,
        arguments: list[str],
        folder: Path,
        history: h.History,
        environment: Mapping[str, str],
        *,
        forks: bool = False,
    ) -> None:
        self.name, self._history = name, history
        self._errors = folder / f"{name}.err"
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._is_at_end = self._was_reaped = False
        variables = {**os.environ, "PYTHONPATH": import_path(str(ROOT)), "PYTHONUNBUFFERED": "1", **environment}
        self._process: subprocess.Popen[str] | ForkedProcess
        with self._errors.open("wb") as errors:
            if forks:
                _, module, *rest = arguments
                self._process = fork_server().start(module, rest, environment=variables, errors=errors)
            else:
                self._process = subprocess.Popen(
                    [sys.executable, *arguments],
                    cwd=ROOT,
                    env=variables,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
        self._reader = threading.Thread(target=self._read, name=f"reads {name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def errors(self) -> str:
        """The standard error of the process so far."""
        return self._errors.read_text(errors="replace")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self._lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._is_at_end = True
            self._changed.notify_all()

    def _join_reader(self) -> None:
        self._reader.join(OUTPUT_END_S)
        assert not self._reader.is_alive(), f"{self.name} has ended, and another process holds its standard output"

    def line(self, start: str, timeout_s: float = PATIENCE_S) -> str:
        """Wait for a line that begins with `start`. Drop the lines before it, and return the rest of the line.

        Raises:
            AssertionError: The line did not come in time, or the process ended before.
        """
        ends = time.monotonic() + timeout_s
        with self._changed:
            while True:
                for i, line in enumerate(self._lines):
                    if line.startswith(start):
                        del self._lines[: i + 1]
                        return line[len(start) :].strip()
                left = ends - time.monotonic()
                if self._is_at_end or left <= 0:
                    why = "ended" if self._is_at_end else f"did not within {timeout_s:.0f} s"
                    raise AssertionError(f"{self.name} should have said {start!r} and {why}; {self._said()}")
                self._changed.wait(left)

    def _said(self) -> str:
        return f"lines: {self._lines[-5:]}; errors: {self.errors[-2000:]}"

    def tell(self, line: str) -> None:
        """Write a line to the standard input of the process."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    # --- faults -------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill the process (SIGKILL), and wait for its end."""
        self._history.write(h.Process(process=self.name, what="killed"))
        self._process.send_signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> None:
        """Freeze the process (SIGSTOP)."""
        self._history.write(h.Process(process=self.name, what="stopped"))
        self._process.send_signal(signal.SIGSTOP)

    def continue_(self) -> None:
        """Continue the process (SIGCONT)."""
        self._process.send_signal(signal.SIGCONT)
        self._history.write(h.Process(process=self.name, what="continued"))

    def terminate(self) -> None:
        """Ask the process to end (SIGTERM)."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the end of the process. Return its exit code, or minus the number of the signal that ended it."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {timeout_s:.0f} s; {self._said()}") from None
        if not self._was_reaped:
            self._was_reaped = True
            self._join_reader()
            self._history.write(h.Process(process=self.name, what="ended", code=code))
        return code

    def ended_well(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait for the end of the process, which must be orderly.

        Raises:
            AssertionError: The exit code is not 0.
        """
        code = self.wait(timeout_s)
        assert code == 0, f"{self.name} ended with {code}; {self._said()}"

    def dispose(self) -> None:
        """End the process in any state, and close its files."""
        if self.is_alive:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._join_reader()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Crew:
    """All processes of one test. The end of the test kills the processes that are left.

    Args:
        folder: The folder for their files.
        shows_errors: Print the end of the standard error of each process. The whole text is in the folder.
    """

    def __init__(self, folder: Path, *, shows_errors: bool = True) -> None:
        self.folder, self._shows_errors = folder, shows_errors
        self.history_path = folder / "history.jsonl"
        self.history = h.History(self.history_path, "supervisor")
        self.workers: list[Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self.workers:
            worker.dispose()
            if self._shows_errors:
                print(f"--- {worker.name}\n{worker.errors[-4000:]}")  # pytest shows this if the test fails
        self.history.close()

    def start(self, program: str, plan: msgspec.Struct, *, name: str, forks: bool = True) -> Worker:
        """Start a program of `tests/faults/programs`.

        Args:
            program: The name of its module.
            plan: The plan, which the program gets as JSON.
            name: The name of the process in the history.
            forks: Fork the program from a process that has imported it. If False, start a new interpreter: this takes
                half a second of processor time, but its memory contains only the modules that the program needs.
        """
        arguments = ["-m", f"tests.faults.programs.{program}", msgspec.json.encode(plan).decode()]
        return self.run(arguments, name=name, forks=forks)

    def run(
        self, arguments: list[str], *, name: str, environment: Mapping[str, str] | None = None, forks: bool = False
    ) -> Worker:
        """Start `python` with these arguments, and these variables in addition to those of this process."""
        worker = Worker(name, arguments, self.folder, self.history, environment or {}, forks=forks)
        self.workers.append(worker)
        return worker
