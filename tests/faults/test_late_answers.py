"""F4, F8: a claim is answered late, by a stalled store or a blocked loop, so its leases may have ended."""

from __future__ import annotations

import asyncio

import pytest

from aiodelay import Context, Scheduler
from aiodelay.memory import MemoryStore
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.faults import FaultyStore

LEASE_S = 15


class Pair:
    """Two processes on one store; the answers that `slow` gets can be held up."""

    def __init__(self, clock: VirtualClock, *, takes_s: float = 0) -> None:
        memory = MemoryStore(clock=clock)
        self.store = FaultyStore(memory)
        self.slow = Scheduler(self.store, clock=clock)
        self.other = Scheduler(memory, clock=clock)
        self.runs: list[str] = []
        self.cancelled: list[str] = []
        for name, scheduler in (("slow", self.slow), ("other", self.other)):
            self._serve(name, scheduler, takes_s)

    def _serve(self, name: str, scheduler: Scheduler, takes_s: float) -> None:
        @scheduler.handler(name="work")
        async def work(payload: bytes, context: Context) -> None:
            self.runs.append(f"{name} {context.id}")
            try:
                await asyncio.sleep(takes_s)
            except asyncio.CancelledError:
                self.cancelled.append(f"{name} {context.id}")
                raise


@pytest.mark.asyncio
async def test_f4_a_claim_whose_lease_is_over_when_its_answer_comes_is_not_run(clock: VirtualClock) -> None:
    pair = Pair(clock)
    async with pair.slow as scheduler:
        await scheduler.schedule(b"", to="handler:work", delay="5s", id="m")
        await asyncio.sleep(1)
        injected = pair.store.inject("late_reply", "claim", lasting="40s")
        await asyncio.sleep(5)
        assert injected.hits == 1
        async with pair.other:
            await asyncio.sleep(60)
    assert pair.runs == ["other m"], "S7: whose lease has ended owns nothing"


@pytest.mark.asyncio
async def test_f4_leases_are_renewed_in_full_after_an_answer_that_was_late(clock: VirtualClock) -> None:
    pair = Pair(clock, takes_s=120)
    pair.slow.set_concurrency("work", 1)
    async with pair.slow as scheduler:
        await scheduler.schedule(b"", to="handler:work", delay="5s", id="m")
        await asyncio.sleep(1)
        injected = pair.store.inject("late_reply", "claim", lasting=f"{LEASE_S - 2}s")
        await asyncio.sleep(5)
        assert injected.hits == 1
        async with pair.other:
            await asyncio.sleep(300)
    assert pair.cancelled == []
    assert pair.runs == ["slow m"]
