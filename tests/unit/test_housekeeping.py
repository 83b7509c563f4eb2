"""Housekeeping of an open scheduler: alarms, lanes without workers, late messages, a blocked loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from aiodelay import Alarm, Late, Message, Retry, Scheduler
from aiodelay.backends.memory.store import _MemoryWork
from aiodelay.core.values import LaneCounts, WorkStatus
from aiodelay.engine.housekeeping import STEP_LIMIT, STEP_S, LoopLag
from aiodelay.memory import MemoryStore
from aiodelay.reactive import Subscription
from aiodelay.scheduler import Received
from aiodelay.testing import Fault, FaultyStore, VirtualClock

pytestmark = pytest.mark.asyncio

STEP = STEP_S * 1.1
"""Longest time between two steps, in seconds."""


@dataclass
class Order:
    number: int = 0


@dataclass
class Parcel:
    pass


async def busy(order: Order) -> None:
    """Keep its only slot for ten minutes."""
    await asyncio.sleep(600)


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[int]:
    """The levels at which housekeeping logged this."""
    return [each.levelno for each in caplog.records if each.name == "aiodelay.housekeeping" and text in each.message]


# --- steps ------------------------------------------------------------------------------------------------


async def test_a_step_is_taken_on_opening_and_every_ten_seconds(clock: VirtualClock) -> None:
    store = FaultyStore(MemoryStore(clock=clock))
    async with Scheduler(store, clock=clock):
        await asyncio.sleep(1)
        assert store.calls["tidy"] == 1
        await asyncio.sleep(600)
        assert 600 / STEP <= store.calls["tidy"] - 1 <= 600 / (STEP_S * 0.9)


async def test_closing_does_not_wait_for_the_next_step(clock: VirtualClock) -> None:
    async with Scheduler("memory://", clock=clock):
        await asyncio.sleep(1)
    assert clock.monotonic_ms() == 1000


async def test_a_process_that_only_schedules_keeps_no_house(clock: VirtualClock) -> None:
    store = FaultyStore(MemoryStore(clock=clock))
    async with Scheduler(store, clock=clock, dispatch=False) as scheduler:
        await scheduler.schedule(Order(), delay="1s")
        await asyncio.sleep(600)
        assert scheduler.overdue_age_ms == 0
    assert store.calls["tidy"] == 0


# --- the alarm for what is overdue ------------------------------------------------------------------------


async def test_what_is_overdue_for_long_raises_an_alarm_once_and_ends_it_once(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    alarms: list[Alarm] = []
    async with Scheduler("memory://", clock=clock, on_alarm=alarms.append) as scheduler:
        scheduler.add_handler(busy, concurrency=1)
        for number in range(2):
            await scheduler.schedule(Order(number), delay="1s")
        await asyncio.sleep(60)
        assert alarms == []
        assert 59_000 - 1_000 * STEP <= scheduler.overdue_age_ms <= 59_000
        await asyncio.sleep(1 + STEP)
        (raised,) = alarms
        assert (raised.kind, raised.lane, raised.is_over) == ("overdue", "Order", False)
        assert 60_000 <= raised.age_ms <= 60_000 + 1_000 * STEP
        await asyncio.sleep(500)
        assert len(alarms) == 1, "it is told once, however long it lasts"
        await asyncio.sleep(600 - 560 + STEP)  # the second has its turn
        assert alarms[1:] == [Alarm("overdue", "Order", 0, is_over=True)]
        assert scheduler.overdue_age_ms == 0
        await asyncio.sleep(500)
        assert len(alarms) == 2
    assert said(caplog, "the oldest overdue message of Order has waited 1m") == [logging.ERROR]
    assert said(caplog, "alarm is over: overdue Order") == [logging.WARNING]


async def test_each_lane_has_an_alarm_of_its_own_and_may_raise_it_again(clock: VirtualClock) -> None:
    alarms: list[Alarm] = []
    scheduler = Scheduler("memory://", clock=clock, on_alarm=alarms.append, overdue_alarm="20s")
    is_late = asyncio.Event()

    @scheduler.handler(concurrency=1)
    async def order(order: Order) -> None:
        await is_late.wait()

    @scheduler.handler(concurrency=1)
    async def parcel(parcel: Parcel) -> None:
        await asyncio.sleep(1000)

    async with scheduler:
        for given in (Order(), Order(), Parcel(), Parcel()):
            await scheduler.schedule(given, delay="1s")
        await asyncio.sleep(21 + STEP)
        assert {(alarm.kind, alarm.lane) for alarm in alarms} == {("overdue", "Order"), ("overdue", "Parcel")}
        is_late.set()
        await asyncio.sleep(STEP)
        is_late.clear()
        for given in (Order(), Order()):
            await scheduler.schedule(given, delay="1s")
        await asyncio.sleep(21 + STEP)
        of_orders = [alarm.is_over for alarm in alarms if alarm.lane == "Order"]
        assert of_orders == [False, True, False]
        assert [alarm.is_over for alarm in alarms if alarm.lane == "Parcel"] == [False]
        is_late.set()


async def test_a_store_that_serves_no_more_claims_raises_an_alarm_with_its_reason(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarms: list[Alarm] = []
    async with Scheduler("memory://", clock=clock, on_alarm=alarms.append):
        await asyncio.sleep(STEP)
        assert alarms == []
        monkeypatch.setattr(_MemoryWork, "status", lambda _: WorkStatus("ended", why="its topic was deleted"))
        await asyncio.sleep(STEP)
        assert alarms == [Alarm("ended", "", 0, reason="its topic was deleted")]
        await asyncio.sleep(10 * STEP)
        assert len(alarms) == 1, "it is told once, however long it lasts"
    assert said(caplog, "the store serves no more claims: its topic was deleted") == [logging.ERROR]


async def test_what_waits_for_its_retry_is_not_overdue(clock: VirtualClock) -> None:
    alarms: list[Alarm] = []
    scheduler = Scheduler("memory://", clock=clock, on_alarm=alarms.append)

    @scheduler.handler(retry=Retry.intervals(["1h"]))
    async def handle(order: Order) -> None:
        raise ConnectionError

    async with scheduler:
        await scheduler.schedule(Order(), delay="1s")
        await asyncio.sleep(1800)
        assert scheduler.overdue_age_ms == 0
    assert alarms == []


async def test_what_is_paused_raises_no_alarm(clock: VirtualClock) -> None:
    alarms: list[Alarm] = []
    async with Scheduler("memory://", clock=clock, on_alarm=alarms.append) as scheduler:
        scheduler.add_handler(busy)
        await scheduler.pause(Order)
        await scheduler.schedule(Order(), delay="1s")
        await asyncio.sleep(600)
        assert alarms == []


async def test_an_alarm_hook_that_raises_harms_nothing(clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Alarm] = []

    def hook(alarm: Alarm) -> None:
        told.append(alarm)
        raise RuntimeError("pager is out of order")

    async with Scheduler("memory://", clock=clock, on_alarm=hook) as scheduler:
        await scheduler.schedule(Order(), delay="1s", id="a")
        await asyncio.sleep(61 + STEP)
        assert {alarm.kind for alarm in told} == {"unserved", "overdue"}
        await scheduler.cancel("a")
        await asyncio.sleep(STEP)
        assert sum(alarm.is_over for alarm in told) == 2
    assert said(caplog, "on_alarm failed") == [logging.ERROR] * 4


# --- lanes that nobody serves -----------------------------------------------------------------------------


async def test_a_lane_that_nobody_serves_is_told_once_until_somebody_does(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    alarms: list[Alarm] = []
    async with Scheduler("memory://", clock=clock, on_alarm=alarms.append) as scheduler:
        await scheduler.schedule(Order(), delay="1h")
        await asyncio.sleep(5 * STEP)
        assert alarms == [Alarm("unserved", "Order", 0)]
        assert (await scheduler.counts())["Order"] == LaneCounts(scheduled=1, read_by_nobody=True)
        scheduler.add_handler(busy)
        await asyncio.sleep(5 * STEP)
        assert alarms[1:] == [Alarm("unserved", "Order", 0, is_over=True)]
        assert (await scheduler.counts())["Order"] == LaneCounts(scheduled=1)
    assert said(caplog, "Order holds messages and no instance reads it") == [logging.WARNING]
    assert said(caplog, "alarm is over: unserved Order") == [logging.WARNING]


async def test_a_lane_that_another_instance_serves_is_served_until_that_one_leaves(clock: VirtualClock) -> None:
    store, alarms = MemoryStore(clock=clock), list[Alarm]()
    other = Scheduler(store, clock=clock)
    other.add_handler(busy)
    async with Scheduler(store, clock=clock, on_alarm=alarms.append) as scheduler:
        async with other:
            await scheduler.schedule(Order(), delay="1h")
            await asyncio.sleep(600)
            assert alarms == []
        await asyncio.sleep(2 * STEP)
        assert alarms == [Alarm("unserved", "Order", 0)]


class Waiting:
    """A subscriber that requests nothing yet."""

    def on_subscribe(self, subscription: Subscription) -> None: ...
    def on_next(self, message: Received[Order]) -> None: ...
    def on_error(self, error: Exception) -> None: ...
    def on_complete(self) -> None: ...


async def subscribe(scheduler: Scheduler) -> None:
    scheduler.messages(Order).subscribe(Waiting())


async def handle(scheduler: Scheduler) -> None:
    scheduler.add_handler(busy)


@pytest.mark.parametrize("begin", [subscribe, handle])
async def test_a_lane_that_is_served_within_a_step_raises_no_alarm(
    clock: VirtualClock, begin: Callable[[Scheduler], Awaitable[None]]
) -> None:
    """A program opens the scheduler, which looks at once, and begins to read messages of an earlier run only then."""
    store, alarms = MemoryStore(clock=clock), list[Alarm]()
    async with Scheduler(store, clock=clock, dispatch=False) as earlier:
        await earlier.schedule(Order(), delay="1h")
    async with Scheduler(store, clock=clock, on_alarm=alarms.append) as scheduler:
        await asyncio.sleep(5)
        await begin(scheduler)
        await asyncio.sleep(600)
    assert alarms == []


@pytest.mark.parametrize(("late", "dead"), [(Late.drop("5s"), []), (Late.dead_letter("5s"), ["late"])])
async def test_late_policies_hold_in_lanes_that_nobody_serves(clock: VirtualClock, late: Late, dead: list[str]) -> None:
    async with Scheduler("memory://?journal=10", clock=clock) as scheduler:
        await scheduler.schedule(Order(1), delay="1s", late=late, id="late")
        await scheduler.schedule(Order(2), delay="1s", id="patient")
        await asyncio.sleep(5.5)
        assert await scheduler.get("late") is not None
        await asyncio.sleep(1 + STEP)
        assert await scheduler.get("late") is None
        assert await scheduler.get("patient") is not None
        assert [letter.reason async for letter in scheduler.dead_letters()] == dead
        ends = [entry.event for entry in await scheduler.journal("late")]
    assert ends == ["stored", "dead" if dead else "dropped"]


async def test_a_late_backlog_is_ended_in_steps(clock: VirtualClock) -> None:
    async with Scheduler("memory://", clock=clock) as scheduler:
        await scheduler.schedule_many(
            Message(Order(number), delay="1s", late=Late.drop("5s")) for number in range(2 * STEP_LIMIT + 1)
        )
        await asyncio.sleep(7)
        left = [2 * STEP_LIMIT + 1]
        async with asyncio.timeout(3 * STEP):
            while left[-1]:
                await asyncio.sleep(1)
                counts = (await scheduler.counts()).get("Order", LaneCounts())
                if counts.overdue < left[-1]:
                    left.append(counts.overdue)
    assert left == [2 * STEP_LIMIT + 1, STEP_LIMIT + 1, 1, 0]


# --- a store that is away ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["unavailable", "crash", "hang"])
async def test_a_store_that_housekeeping_cannot_reach_raises_an_alarm_once_and_ends_it_once(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    store, alarms = FaultyStore(MemoryStore(clock=clock)), list[Alarm]()
    async with Scheduler(store, clock=clock, on_alarm=alarms.append, overdue_alarm="30s"):
        await asyncio.sleep(15)
        store.inject(fault, "tidy", times=None)
        await asyncio.sleep(15)
        assert alarms == []
        await asyncio.sleep(30 + 2 * STEP)
        (raised,) = alarms
        assert (raised.kind, raised.lane, raised.is_over) == ("store", "", False)
        assert 30_000 <= raised.age_ms <= 30_000 + 2_000 * STEP, "the last step that went well is older than the fault"
        await asyncio.sleep(300)
        assert len(alarms) == 1
        store.heal()
        await asyncio.sleep(STEP)
        assert alarms[1:] == [Alarm("store", "", 0, is_over=True)]
    assert said(caplog, "housekeeping has not reached the store for") == [logging.ERROR]


async def test_one_failed_step_is_no_alarm_and_the_next_makes_up_for_it(clock: VirtualClock) -> None:
    store, alarms = FaultyStore(MemoryStore(clock=clock)), list[Alarm]()
    async with Scheduler(store, clock=clock, on_alarm=alarms.append) as scheduler:
        await scheduler.schedule(Order(), delay="1s", late=Late.drop("1s"), id="late")
        store.inject("unavailable", "tidy", times=2)
        await asyncio.sleep(3 * STEP)
        assert await scheduler.get("late") is None
    assert [alarm for alarm in alarms if alarm.kind == "store"] == []


# --- a loop that is blocked -------------------------------------------------------------------------------


async def test_a_blocked_loop_is_noticed_and_nothing_claimed_until_it_runs_freely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LoopLag, "PROBE_S", 0.02)
    runs_freely = asyncio.Event()
    lag = LoopLag(0.5, lambda: True, runs_freely.set)
    assert lag.may_claim()
    time.sleep(0.7)  # noqa: ASYNC251 - as a handler does that does not know better
    assert not lag.may_claim(), "known at once, before the probe itself has run"
    assert not runs_freely.is_set()
    async with asyncio.timeout(60):
        await runs_freely.wait()
    assert lag.may_claim()
    lag.stop()
    assert said(caplog, "the event loop ran ")


async def test_a_loop_is_watched_only_while_something_is_in_flight(clock: VirtualClock) -> None:
    asked = 0
    in_flight = 3

    def is_needed() -> bool:
        nonlocal asked
        asked += 1
        return asked <= in_flight

    lag = LoopLag(1.0, is_needed, lambda: None)
    assert lag.may_claim()
    await asyncio.sleep(60)
    assert asked == in_flight + 1
    assert lag.may_claim()
    await asyncio.sleep(60)
    assert asked == in_flight + 2, "idle, nothing is asked, so no timer wakes the process"
