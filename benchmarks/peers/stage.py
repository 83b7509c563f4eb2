"""`Stage`: one side on an empty server, with its schedule, its workers and the record of its runs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import redis

from benchmarks.harness import Plan, check
from benchmarks.redis_server import empty

from .environments import Environment
from .processes import Record, Run, Worker, schedule, variables, wait_until
from .sides import Side

__all__ = ["Stage", "now_ms", "staged"]

START_S, STALLED_S = 90.0, 90.0
PROBE = -1
"""The number of the message that shows that a worker handles messages."""


class Stage:
    """One side on an empty server, with a folder of its own."""

    def __init__(self, side: Side, environment: Environment, url: str, folder: Path, handler_s: float) -> None:
        self._environment, self._folder = environment, folder
        self._settings = variables(environment, side.settings, url, folder, handler_s)
        self._record = Record(folder)
        self.probe_ms = 0
        self.server: Any = redis.Redis.from_url(url, decode_responses=True)

    def schedule(self, due_ms: dict[int, int]) -> None:
        schedule(self._environment, self._settings, self._folder, due_ms)

    @contextmanager
    def working(self) -> Iterator[Worker]:
        with Worker(self._environment, self._settings, self._folder) as worker:
            yield worker

    @contextmanager
    def ready(self) -> Iterator[Worker]:
        """Run a worker that has handled one message."""
        since_ms = now_ms()
        self.schedule({PROBE: since_ms})
        self.probe_ms = now_ms() - since_ms
        with self.working() as worker:
            self.wait_for_first(worker)
            yield worker

    def began(self) -> list[Run]:
        return [run for run in self._record.began() if run.number != PROBE]

    def ended(self) -> list[Run]:
        return self._record.ended()

    def wait_for_first(self, worker: Worker) -> None:
        """Wait until a worker has begun to handle a message."""
        has_begun = wait_until(lambda: self._record.lines() > 0 or worker.has_ended(), START_S)
        check(has_begun and not worker.has_ended(), f"the worker handled nothing in {START_S:g} s: {worker.log}")

    def wait_for(self, n: int) -> None:
        """Wait until n messages have begun, or nothing has happened for a long time."""
        while len({run.number for run in self.began()}) < n:
            before = self._record.lines()
            if not wait_until(partial(self._has_more_lines, before), STALLED_S):
                return
            wait_until(partial(self._has_more_lines, n - 1), STALLED_S)

    def _has_more_lines(self, than: int) -> bool:
        return self._record.lines() > than

    def server_s(self) -> float:
        info = self.server.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

    def commands(self) -> int:
        return int(self.server.info("stats")["total_commands_processed"])

    def dataset_bytes(self) -> int:
        return int(self.server.info("memory")["used_memory_dataset"])


@contextmanager
def staged(plan: Plan, side: Side, environment: Environment, handler_s: float = 0.0) -> Iterator[Stage]:
    """Empty the server, before and after the block.

    Args:
        plan: The plan, with the URL of the server.
        side: The side.
        environment: Its environment.
        handler_s: How long each handler runs, in seconds. An empty handler records no end.
    """
    empty(plan.redis)
    with tempfile.TemporaryDirectory(dir=plan.directory) as folder:
        stage = Stage(side, environment, plan.redis, Path(folder), handler_s)
        try:
            yield stage
        finally:
            stage.server.close()
            empty(plan.redis)


def now_ms() -> int:
    return time.time_ns() // 1_000_000
