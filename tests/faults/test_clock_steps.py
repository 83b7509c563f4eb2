"""F16, F17: the wall clock is wrong, or steps by an hour while the dispatcher sleeps or a handler runs."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from aiodelay import Context, Scheduler
from aiodelay.memory import MemoryStore
from aiodelay.ports import Store
from aiodelay.sqlite import SqliteStore
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.faults import FaultyStore

HOUR = timedelta(hours=1)


def poll_of(store: FaultyStore) -> timedelta:
    """Return the longest sleep, and so the longest time until a step is noticed."""
    return timedelta(milliseconds=store.traits.safety_poll_ms)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: VirtualClock) -> FaultyStore:
    """A store that counts calls."""
    real: Store = MemoryStore(clock=clock) if request.param == "memory" else SqliteStore(tmp_path / "d.db", clock=clock)
    return FaultyStore(real)


class Runs:
    """A scheduler with one handler that takes its time, and when it ran."""

    def __init__(self, store: FaultyStore, clock: VirtualClock, *, takes_s: float = 0) -> None:
        self.scheduler = Scheduler(store, clock=clock)
        self.started: list[datetime] = []
        self.ended: list[datetime] = []

        @self.scheduler.handler(name="work")
        async def work(payload: bytes, context: Context) -> None:
            self.started.append(clock.now())
            assert clock.now() >= context.due, "early (S1)"
            await asyncio.sleep(takes_s)
            self.ended.append(clock.now())


@pytest.mark.asyncio
async def test_f17_after_a_step_forwards_what_is_due_runs_within_the_safety_poll(
    clock: VirtualClock, store: FaultyStore
) -> None:
    runs = Runs(store, clock)
    async with runs.scheduler as scheduler:
        await scheduler.schedule(b"", to="handler:work", delay="30m")
        await asyncio.sleep(600)
        clock.step(HOUR)
        stepped = clock.now()
        await asyncio.sleep(poll_of(store).total_seconds() + 0.01)
    assert len(runs.started) == 1
    assert runs.started[0] - stepped <= poll_of(store)


@pytest.mark.asyncio
async def test_f17_after_a_step_backwards_it_waits_for_its_due_time_and_does_not_spin(
    clock: VirtualClock, store: FaultyStore
) -> None:
    runs = Runs(store, clock)
    async with runs.scheduler as scheduler:
        scheduled = await scheduler.schedule(b"", to="handler:work", delay="30m")
        await asyncio.sleep(1_790)
        clock.step(-HOUR)
        before = store.calls["claim"]
        await asyncio.sleep(HOUR.total_seconds())
        assert not runs.started
        polls = HOUR / poll_of(store)
        assert store.calls["claim"] - before <= 1.1 * polls + 10
        await asyncio.sleep(15)
    assert len(runs.started) == 1
    assert timedelta() <= runs.started[0] - scheduled.due <= timedelta(milliseconds=10)


@pytest.mark.parametrize(
    ("step", "most_runs"),
    [(HOUR, 10), (-HOUR, 5), (timedelta(seconds=-50), 5)],
    ids=["forwards", "backwards", "a little back"],
)
@pytest.mark.asyncio
async def test_f17_a_step_forwards_costs_at_most_one_run_each_that_is_in_flight_and_one_backwards_none(
    clock: VirtualClock, store: FaultyStore, step: timedelta, most_runs: int
) -> None:
    runs = Runs(store, clock, takes_s=30)
    async with runs.scheduler as scheduler:
        for _ in range(5):
            await scheduler.schedule(b"", to="handler:work", delay="1m")
        await asyncio.sleep(75)
        assert len(runs.started) == 5
        clock.step(step)
        before = store.calls["claim"]
        await asyncio.sleep(1.1 * HOUR.total_seconds())
        assert store.calls["claim"] - before <= 1.1 * HOUR / poll_of(store) * 1.1 + 50
        counts = await scheduler.counts()
    assert len(runs.ended) >= 5
    assert len(runs.started) <= most_runs
    assert not any(lane.in_flight or lane.scheduled or lane.overdue for lane in counts.values())


@pytest.mark.asyncio
async def test_f17_many_small_steps_never_make_it_early(clock: VirtualClock, store: FaultyStore) -> None:
    runs = Runs(store, clock)
    async with runs.scheduler as scheduler:
        for i in range(60):
            await scheduler.schedule(b"", to="handler:work", delay=timedelta(seconds=i))
        for i in range(240):
            clock.step(timedelta(milliseconds=(-1) ** i * 700))
            await asyncio.sleep(0.5)
    assert len(runs.started) == 60


@pytest.mark.parametrize("wrong", [HOUR, -HOUR], ids=["fast", "slow"])
@pytest.mark.asyncio
async def test_f16_a_scheduler_whose_clock_is_wrong_goes_by_that_of_the_store(
    clock: VirtualClock, store: FaultyStore, wrong: timedelta
) -> None:
    theirs = VirtualClock.of_next_loop(start=clock.now() + wrong)
    runs = Runs(store, clock)
    runs.scheduler = scheduler = Scheduler(store, clock=theirs)

    @scheduler.handler(name="work")
    async def work(payload: bytes) -> None:
        runs.started.append(clock.now())

    async with scheduler:
        start = clock.now()
        await scheduler.schedule(b"", to="handler:work", delay="10s")
        await scheduler.schedule(b"", to="handler:work", at=start + timedelta(seconds=20))
        await asyncio.sleep(60)
    assert [round((at - start).total_seconds(), 2) for at in runs.started] == [10, 20]
