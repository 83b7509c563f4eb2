"""Overload: ten times as many messages come as the handler can run, and then no more."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from aiodelay import Context, Scheduler
from aiodelay.testing.clock import VirtualClock

pytestmark = pytest.mark.asyncio

CONCURRENCY, RUN_S = 4, 0.2
RATE = round(CONCURRENCY / RUN_S)
"""Messages per second that the handler can run."""
SECONDS = 3


async def test_l3_l4_under_ten_times_the_load_lateness_grows_and_nothing_else(clock: VirtualClock) -> None:
    scheduler = Scheduler("memory://", clock=clock)
    begun: list[Context] = []
    calm_s: list[float] = []
    in_flight: list[int] = []

    @scheduler.handler(name="work", concurrency=CONCURRENCY)
    async def work(payload: bytes, context: Context) -> None:
        begun.append(context)
        await asyncio.sleep(RUN_S)

    @scheduler.handler(name="calm")
    async def calm(payload: bytes, context: Context) -> None:
        calm_s.append(context.lateness.total_seconds())

    async with scheduler:
        for _ in range(SECONDS * 10):
            for _ in range(RATE):
                await scheduler.schedule(b"", to="handler:work", delay="0s")
            await scheduler.schedule(b"", to="handler:calm", delay="0s")
            await asyncio.sleep(0.1)
            in_flight.append((await scheduler.counts())["work"].in_flight)
        load_ends = len(begun)
        await scheduler.run_until_idle()
        recovered = await scheduler.schedule(b"", to="handler:work", delay="1s")
        await scheduler.run_until_idle()

    assert len(begun) == 10 * RATE * SECONDS + 1
    late_s = [context.lateness.total_seconds() for context in begun]
    assert late_s[load_ends] == pytest.approx(SECONDS * 0.9, rel=0.1), "the excess waits"
    assert max(late_s) == pytest.approx(SECONDS * 9, rel=0.1), "and is delivered as fast as the handler can"
    assert all(earlier.due <= later.due for earlier, later in pairwise(begun)), "oldest first"
    assert max(in_flight) == CONCURRENCY, "the excess waits in the store, not in the process"
    assert len(calm_s) == SECONDS * 10
    assert max(calm_s) < 0.05, "the other lane is on time"
    assert begun[-1].id == recovered.id
    assert late_s[-1] < 0.01, "after the load, messages are on time again"
