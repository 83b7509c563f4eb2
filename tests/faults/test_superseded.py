"""A version that was replaced while it was claimed: what a cancel says of it, and that it does not begin afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from aiodelay import CancelOutcome, ScheduleOutcome, Scheduler
from aiodelay.memory import MemoryStore
from aiodelay.model import Claimed, Demand, Lane
from aiodelay.ports import Work
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio


@dataclass
class Order:
    version: str


class SlowStore(MemoryStore):
    """Claims, and answers only when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.has_claimed, self.may_answer = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        async with super().work(worker, lanes) as work:
            claim = work.claim

            async def claim_slowly(demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
                claimed = await claim(demand, request=request, lease_ms=lease_ms)
                if claimed.claims:
                    self.has_claimed.set()
                    await self.may_answer.wait()
                return claimed

            work.claim = claim_slowly  # type: ignore[method-assign]
            yield work


async def test_s4_a_claim_whose_answer_comes_after_the_replacement_does_not_begin() -> None:
    store, began = SlowStore(), list[str]()
    scheduler = Scheduler(store)

    @scheduler.handler(concurrency=2)
    async def take(order: Order) -> None:
        began.append(order.version)

    async with scheduler, asyncio.timeout(30):
        await scheduler.schedule(Order("old"), delay="0s", id="m")
        await store.has_claimed.wait()
        replaced = await scheduler.schedule(Order("new"), delay="1h", id="m")
        assert (replaced.outcome, replaced.is_older_in_flight) == (ScheduleOutcome.REPLACED, True)
        assert await scheduler.cancel("m") is CancelOutcome.IN_FLIGHT
        await scheduler.schedule(Order("newest"), delay="0s", id="m")
        store.may_answer.set()
        await until(lambda: "newest" in began, "the newest version runs")
    assert began == ["newest"]


@pytest.mark.parametrize("url", ["memory://", "sqlite:///delay.db"])
async def test_s5_a_cancel_tells_of_a_replaced_version_until_it_has_ended(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scheduler, has_begun, may_end = Scheduler(url), asyncio.Event(), asyncio.Event()
    ended = list[str]()

    @scheduler.handler(concurrency=2)
    async def take(order: Order) -> None:
        has_begun.set()
        await may_end.wait()
        ended.append(order.version)

    async def is_over() -> bool:
        return ended == ["1", "4"] and await scheduler.get("last") is None

    async with scheduler, asyncio.timeout(30):
        await scheduler.schedule(Order("1"), delay="0s", id="m")
        await has_begun.wait()
        assert (await scheduler.schedule(Order("2"), delay="1h", id="m")).is_older_in_flight
        assert await scheduler.cancel("m") is CancelOutcome.IN_FLIGHT
        await scheduler.schedule(Order("3"), delay="1h", id="m")
        may_end.set()
        await scheduler.schedule(Order("4"), delay="0s", id="last")
        await until(is_over, "the last one was settled, and so was the first")
        assert await scheduler.cancel("m") is CancelOutcome.CANCELLED
