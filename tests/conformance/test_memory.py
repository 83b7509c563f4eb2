from aiodelay.memory import MemoryStore
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.conformance import StoreConformance


class TestMemoryStore(StoreConformance):
    def make_store(self, clock: VirtualClock, *, journal: int = 0) -> MemoryStore:
        return MemoryStore(clock=clock, journal=journal)
