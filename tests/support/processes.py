"""Real processes, and what befalls them: started, waited for line by line, killed, stopped, and never left behind."""

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

from . import history as h
from .forking import ForkedProcess, fork_server
from .importing import import_path

__all__ = ["ROOT", "Crew", "Worker"]

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0
"""Longest wait for a process; twenty times and more what it takes on an idle machine."""


class Worker:
    """A process. Its standard output is read line by line, its standard error goes to a file.

    Args:
        name: What the history calls it.
        arguments: The program and its arguments, after `python`.
        folder: Where its standard error goes.
        history: Where its faults are written.
        environment: Variables beside our own.
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
        """What it has written to standard error so far."""
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

    def line(self, start: str, timeout_s: float = PATIENCE_S) -> str:
        """Wait for a line that starts so, take all lines up to it, and return the rest of it.

        Raises:
            AssertionError: It did not come in time, or the process ended before.
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
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    # --- faults -------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill -9, and wait for its end."""
        self._history.write(h.Process(process=self.name, what="killed"))
        self._process.send_signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> None:
        """Freeze it (SIGSTOP)."""
        self._history.write(h.Process(process=self.name, what="stopped"))
        self._process.send_signal(signal.SIGSTOP)

    def continue_(self) -> None:
        """Thaw it (SIGCONT)."""
        self._process.send_signal(signal.SIGCONT)
        self._history.write(h.Process(process=self.name, what="continued"))

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for its end and return its exit code; minus the signal's number if one ended it."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {timeout_s:.0f} s; {self._said()}") from None
        if not self._was_reaped:
            self._was_reaped = True
            self._reader.join(PATIENCE_S)
            self._history.write(h.Process(process=self.name, what="ended", code=code))
        return code

    def ended_well(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait for its end; it must be an orderly one.

        Raises:
            AssertionError: Its exit code is not 0.
        """
        code = self.wait(timeout_s)
        assert code == 0, f"{self.name} ended with {code}; {self._said()}"

    def dispose(self) -> None:
        """Leave nothing behind, whatever state it is in."""
        if self.is_alive:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Crew:
    """All processes of one test; at its end none is left.

    Args:
        folder: For what they write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
            print(f"--- {worker.name}\n{worker.errors[-4000:]}")  # pytest shows it where the test fails
        self.history.close()

    def start(self, program: str, plan: msgspec.Struct, *, name: str, forks: bool = True) -> Worker:
        """Start a program of `tests/faults/programs`.

        Args:
            program: Its module.
            plan: Handed to it as JSON.
            name: What the history calls it.
            forks: Fork it from a process that has imported it; else it gets an interpreter of its own, which takes
                half a second of processor time, and whose memory holds nothing but what it needs.
        """
        arguments = ["-m", f"tests.faults.programs.{program}", msgspec.json.encode(plan).decode()]
        return self.run(arguments, name=name, forks=forks)

    def run(
        self, arguments: list[str], *, name: str, environment: Mapping[str, str] | None = None, forks: bool = False
    ) -> Worker:
        """Start `python` with these arguments, and these variables beside our own."""
        worker = Worker(name, arguments, self.folder, self.history, environment or {}, forks=forks)
        self.workers.append(worker)
        return worker
