from pathlib import Path
from uuid import uuid4

import pytest

from aiodelay.ports import Store
from aiodelay.sqlite import open_store
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.conformance import StoreConformance


class TestSqliteStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_store(self, clock: VirtualClock, *, journal: int = 0) -> Store:
        self.url = f"sqlite:///{self.folder / uuid4().hex}.db?journal={journal}"
        return open_store(self.url, namespace="", clock=clock)

    def reopen(self, store: Store, clock: VirtualClock) -> Store:
        return open_store(self.url, namespace="", clock=clock)
