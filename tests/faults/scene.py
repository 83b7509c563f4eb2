"""The scene of most fault tests: several processes on one store, and their history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from aiodelay.testing import history as h
from aiodelay.testing.history import Limits, Report, Story
from tests.faults.programs.worker import Plan
from tests.support.judging import judge_store, leases_in, url_of
from tests.support.processes import Crew, Worker
from tests.support.servers import RedisServer

__all__ = ["LEASE_MS", "TAKEOVER_MS", "RedisScene", "Scene"]

LEASE_MS = 1_000
TAKEOVER_MS = LEASE_MS + 1_000 + 30_000
"""What is promised, and what a busy machine may add."""


class Scene:
    """One file, its processes, their history.

    Args:
        crew: The processes.
        folder: Where the file is.
    """

    def __init__(self, crew: Crew, folder: Path) -> None:
        self.crew, self.path = crew, folder / "delay.db"
        self.url = url_of(self.path)

    def plan(self, name: str, **settings: Any) -> Plan:  # noqa: ANN401 - the fields of a plan
        """Return a plan for this file and this history."""
        settings = {"lease_ms": LEASE_MS} | settings
        return Plan(name=name, store=self.url, history=str(self.crew.history_path), **settings)

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
        """Check the history; nobody may be using the store any more."""
        return judge_store(self.crew, self.store_url(), self.leases, limits)

    def store_url(self) -> str:
        """Return the URL by which this process reaches the store."""
        return self.url

    def leases(self) -> int:
        """Return the number of leases in the store."""
        return leases_in(self.path)

    def story(self) -> Story:
        """Return what the history tells."""
        return Story(h.read(self.crew.history_path))


class RedisScene(Scene):
    """A server, its clients, their history; `url` is how the clients started from now on reach it."""

    def __init__(self, crew: Crew, folder: Path, server: RedisServer) -> None:
        super().__init__(crew, folder)
        self.server, self.url = server, server.url

    def store_url(self) -> str:
        return self.server.url

    def leases(self) -> int:
        lanes = self.server.command("HVALS", "{default:00}:lanes").split(b"\r\n")[2::2]
        keys = ["{default:00}:leased:" + lane.decode() for lane in lanes if lane]
        return sum(int(self.server.command("ZCARD", key)[1:]) for key in keys)
