import pytest

from aiodelay.kafka import open_store
from aiodelay.ports import Store
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.conformance import StoreConformance
from tests.support.kafka import new_name


class TestKafkaStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def _broker(self, kafka: str) -> None:
        self.bootstrap = kafka

    def make_store(self, clock: VirtualClock, *, journal: int = 0) -> Store:
        self.url = f"kafka://{self.bootstrap}/{new_name('schedules')}?create_topic=true&partitions=1"
        return open_store(self.url, namespace="", clock=clock)

    def reopen(self, store: Store, clock: VirtualClock) -> Store:
        return open_store(self.url, namespace="", clock=clock)
