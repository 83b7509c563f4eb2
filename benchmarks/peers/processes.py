"""The processes of a side: a scheduling process, and a worker's processes. Linux only, because it reads /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from benchmarks.harness import WrongResultError

from .environments import Environment
from .sides import Settings

__all__ = ["Record", "Worker", "schedule", "variables", "wait_until"]

POLL_S = 0.02
LONGEST_SCHEDULE_S = 600.0


def variables(environment: Environment, settings: Settings, url: str, folder: Path, handler_s: float) -> dict[str, str]:
    """Return the environment variables of a program. `programs/shared.py` reads those whose names begin with PEER_."""
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **environment.variables,
        "PEER_REDIS": url,
        "PEER_SETTINGS": settings,
        "PEER_HANDLER_S": f"{handler_s}",
        "PEER_RECORD": f"{folder / 'record'}",
    }


def schedule(environment: Environment, settings: dict[str, str], folder: Path, due_ms: dict[int, int]) -> None:
    """Schedule messages by their numbers and due times, in a process of the peer.

    Raises:
        WrongResultError: The process failed. The text has its last output.
    """
    asked = "".join(f"{number} {due}\n" for number, due in due_ms.items())
    done = subprocess.run(
        [*environment.command, "schedule"],
        input=asked, capture_output=True, text=True, check=False, env=settings, cwd=folder, timeout=LONGEST_SCHEDULE_S,
    )  # fmt: skip
    if done.returncode:
        raise WrongResultError(f"scheduling failed: {_last_line(done.stderr)}")


def wait_until(holds: Callable[[], bool], limit_s: float, poll_s: float = POLL_S) -> bool:
    """Wait until a condition holds; at most for `limit_s`. Return whether it holds."""
    deadline = time.monotonic() + limit_s
    while not (is_true := holds()) and time.monotonic() < deadline:
        time.sleep(poll_s)
    return is_true


class Worker:
    """A worker with all its processes: they are one session, and one kill ends them together."""

    def __init__(self, environment: Environment, settings: dict[str, str], folder: Path) -> None:
        self._command, self._settings, self._folder = [*environment.command, "work"], settings, folder

    def __enter__(self) -> Self:
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._settings, cwd=self._folder, start_new_session=True
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    @property
    def log(self) -> str:
        """The last line that the worker wrote."""
        return _last_line((self._folder / "log").read_text(encoding="utf-8", errors="replace"))

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill all processes (kill -9), and the processes that they start meanwhile."""
        while pids := self._pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()  # a killed child stays in /proc until it is polled
            time.sleep(POLL_S)
        self._process.wait()

    def processor_s(self) -> float:
        """Return the processor time of all processes, in seconds."""
        return sum(_processor_s(pid) for pid in self._pids())

    def memory_bytes(self) -> int:
        """Return the memory of all processes. Memory that processes share counts once."""
        return sum(_memory_bytes(pid) for pid in self._pids())

    def _pids(self) -> list[int]:
        return [pid for pid, session in _sessions() if session == self._process.pid]


def _sessions() -> Iterable[tuple[int, int]]:
    """Yield each process with its session. A zombie has ended, so it is left out."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state, _parent, _group, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if state != "Z":
                    yield int(entry.name), int(session)


def _processor_s(pid: int) -> float:
    clock_of_process = (~pid << 3) | 2  # clock_getcpuclockid() of the C library
    with suppress(OSError):
        return time.clock_gettime(clock_of_process)
    return 0.0


def _memory_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


class Run(NamedTuple):
    """The begin or the end of a run of a handler, in epoch ns."""

    number: int
    at_ns: int


class Record:
    """The file in which the workers record runs."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "record"

    def began(self) -> list[Run]:
        """Return the begins in order of their time."""
        return self._events("b")

    def ended(self) -> list[Run]:
        """Return the ends in order of their time."""
        return self._events("e")

    def lines(self) -> int:
        """Return the number of begins and ends so far, which costs less than reading them."""
        return self._path.read_bytes().count(b"\n") if self._path.exists() else 0

    def _events(self, kind: str) -> list[Run]:
        if not self._path.exists():
            return []
        lines = (line.split() for line in self._path.read_text().splitlines())
        return sorted((Run(int(line[1]), int(line[2])) for line in lines if line[0] == kind), key=lambda run: run.at_ns)
