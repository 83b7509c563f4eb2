import asyncio

from aiodelay.memory import MemoryStore
from aiodelay.testing.clock import VirtualClock, VirtualLoop
from aiodelay.testing.conformance import StoreConformance


class TestMemoryStore(StoreConformance):
    def new_loop(self) -> asyncio.AbstractEventLoop:
        return VirtualLoop()

    def make_store(self, clock: VirtualClock, *, journal: int = 0) -> MemoryStore:
        return MemoryStore(clock=clock, journal=journal)
