import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from aiodelay.ports import Store
from aiodelay.sqlite import SqliteStore, open_store
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.conformance import StoreConformance
from tests.support.disks import IN_MEMORY
from tests.support.slow_stores import wait_long_for_wake_ups


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Holds `empty.db`: copying it takes a tenth of the time of making the tables."""
    with tempfile.TemporaryDirectory(prefix="aiodelay-", dir=IN_MEMORY) as name:
        asyncio.run(_make(f"{name}/empty.db"))
        yield Path(name)


async def _make(path: str) -> None:
    async with open_store(f"sqlite:///{path}", namespace="", clock=VirtualClock()):
        pass


class TestSqliteStore(StoreConformance):
    wakes_other_processes = True
    numbers = count(1)

    @pytest.fixture(autouse=True)
    def _patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wait_long_for_wake_ups(monkeypatch, SqliteStore)

    @pytest.fixture(autouse=True)
    def _folder(self, folder: Path) -> None:
        self.folder = folder

    def make_store(self, clock: VirtualClock, *, journal: int = 0) -> Store:
        path = shutil.copy(self.folder / "empty.db", self.folder / f"{next(self.numbers)}.db")
        self.url = f"sqlite:///{path}?journal={journal}"
        return open_store(self.url, namespace="", clock=clock)

    def reopen(self, store: Store, clock: VirtualClock) -> Store:
        return open_store(self.url, namespace="", clock=clock)
