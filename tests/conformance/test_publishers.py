"""The publisher suite for `scheduler.messages(...)`, on the stores that need no server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aiodelay import Received, Scheduler
from aiodelay.testing.clock import VirtualLoop
from tests.support.publishing import MessagesConformance


class TestOffMemory(MessagesConformance):
    def new_loop(self) -> asyncio.AbstractEventLoop:
        return VirtualLoop()


class TestHeld(TestOffMemory):
    """Messages that nobody settles: demand is what was requested, whatever became of what came before."""

    def take(self, item: Received[bytes]) -> None: ...


class TestOffSqlite(MessagesConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_scheduler(self, **settings: Any) -> Scheduler:  # noqa: ANN401
        return Scheduler(f"sqlite:///{self.folder}/delay.db", **settings)
