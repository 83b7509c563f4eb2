import asyncio
import shutil
from itertools import count
from pathlib import Path

import pytest

from aiodelay.ports import Store
from aiodelay.sqlite import open_store
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.conformance import StoreConformance


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store's file, made once: copying it takes a tenth of the time of making the tables."""
    path = tmp_path_factory.mktemp("sqlite") / "empty.db"

    async def make() -> None:
        async with open_store(f"sqlite:///{path}", namespace="", clock=VirtualClock()):
            pass

    asyncio.run(make())
    return path


class TestSqliteStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, empty: Path, tmp_path: Path) -> None:
        self.empty, self.paths = empty, (tmp_path / f"{number}.db" for number in count(1))

    def make_store(self, clock: VirtualClock, *, journal: int = 0) -> Store:
        self.url = f"sqlite:///{shutil.copy(self.empty, next(self.paths))}?journal={journal}"
        return open_store(self.url, namespace="", clock=clock)

    def reopen(self, store: Store, clock: VirtualClock) -> Store:
        return open_store(self.url, namespace="", clock=clock)
