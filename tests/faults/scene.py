"""What most tests of faults are about: several processes on one file, and the history of what they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tests.faults.programs.worker import Plan
from tests.support import history as h
from tests.support.checker import Limits, Report
from tests.support.judging import judge, url_of
from tests.support.processes import Crew, Worker
from tests.support.story import Story

__all__ = ["LEASE_MS", "TAKEOVER_MS", "Scene"]

LEASE_MS = 1_000
TAKEOVER_MS = LEASE_MS + 1_000 + 10_000
"""What is promised, and what a busy machine may add."""


class Scene:
    """One file, its processes, their history.

    Args:
        crew: The processes.
        folder: Where the file is.
    """

    def __init__(self, crew: Crew, folder: Path) -> None:
        self.crew, self.path = crew, folder / "delay.db"

    def plan(self, name: str, **settings: Any) -> Plan:  # noqa: ANN401 - the fields of a plan
        """Return a plan for this file and this history."""
        settings = {"lease_ms": LEASE_MS} | settings
        return Plan(name=name, store=url_of(self.path), history=str(self.crew.history_path), **settings)

    def start(self, name: str, **settings: Any) -> Worker:  # noqa: ANN401 - the fields of a plan
        """Start a worker; `settings` are those of its `Plan`."""
        return self.crew.start("worker", self.plan(name, **settings), name=name)

    def start_command(self, name: str, **settings: Any) -> Worker:  # noqa: ANN401 - the fields of a plan
        """Start `aiodelay run` with a worker's scheduler."""
        plan = msgspec.json.encode(self.plan(name, **settings)).decode()
        program = "from aiodelay.cli import main; main()"
        arguments = ["-c", program, "run", "tests.faults.programs.app:scheduler"]
        return self.crew.run(arguments, name=name, environment={"AIODELAY_TEST_PLAN": plan})

    def judge(self, limits: Limits | None = None) -> Report:
        """Check the history; nobody may be using the file any more."""
        return judge(self.crew, self.path, limits)

    def story(self) -> Story:
        """Return what the history tells."""
        return Story(h.read(self.crew.history_path))
