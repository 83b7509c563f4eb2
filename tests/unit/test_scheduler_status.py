"""The status of a scheduler before, while and after it is open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

import pytest

from aiodelay import Scheduler
from aiodelay.core.values import WorkStatus
from aiodelay.memory import MemoryStore

pytestmark = pytest.mark.asyncio


class SlowStore(MemoryStore):
    """Opens when it is told to, and meanwhile says how far it is."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.told = WorkStatus("ready", 1, 3, "slowly")

    async def __aenter__(self) -> Self:
        self.begun.set()
        await self.go_on.wait()
        return await super().__aenter__()

    def status(self) -> WorkStatus:
        return self.told

    def tell_restored(self, told: Callable[[float], None] | None) -> None:
        """Tell nobody: no part of it begins before another."""


async def test_it_tells_how_far_it_is() -> None:
    store = SlowStore()
    scheduler = Scheduler(store)
    assert scheduler.status() == WorkStatus("ended", why="not open")

    async def keep_open() -> None:
        async with scheduler:
            assert scheduler.status() == WorkStatus("ready")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(keep_open())
        await store.begun.wait()
        assert scheduler.status() == WorkStatus("loading", 1, 3, "slowly")
        store.told = WorkStatus("ended", 1, 3, "for ever")
        assert scheduler.status() == store.told
        store.go_on.set()
    assert scheduler.status().phase == "ended"


@pytest.mark.parametrize("dispatch", [True, False])
async def test_it_is_ready_when_it_is_open(dispatch: bool) -> None:
    async with Scheduler("memory://", dispatch=dispatch) as scheduler:
        assert scheduler.status() == WorkStatus("ready")
