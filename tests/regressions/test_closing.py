"""Closing and `remove_handler` end within their bounds for any handler and sink, and leave no thread behind."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import pytest

from aiodelay import ClosedError, Context, OutcomeUnknownError, Scheduler, StoreUnavailableError
from aiodelay.core.values import Delivery, Demand, SendOutcome, Sent, State
from aiodelay.engine.subscriptions import CANCEL_S, CLOSE_S
from aiodelay.memory import MemoryStore
from aiodelay.testing import Fault, FaultyStore
from aiodelay.testing.clock import VirtualClock
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

DRAIN_S, LEASE_S = 5, 15
SOON_S = 10.0
"""Far less than what was waited for before, and enough for a busy machine."""


@dataclass
class Order:
    pass


@dataclass
class Parcel:
    pass


Ending: TypeAlias = Callable[[Scheduler], Awaitable[None]]


async def closing(scheduler: Scheduler) -> None:
    await scheduler.__aexit__(None, None, None)


async def removing(scheduler: Scheduler) -> None:
    await scheduler.remove_handler(Order)


ENDINGS = pytest.mark.parametrize("end", [closing, removing])


class Stubborn:
    """Goes on whenever it is cancelled, until it is told to let go."""

    def __init__(self) -> None:
        self.cancelled, self.has_let_go = 0, False

    async def go_on(self) -> None:
        while not self.has_let_go:
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                self.cancelled += 1

    async def handle(self, order: Order) -> None:
        await self.go_on()

    async def handle_whatever_comes(self, order: Order) -> None:
        while not self.has_let_go:
            try:
                await self.go_on()
            except BaseException:  # noqa: BLE001 - as a bare `except` does
                continue

    async def handle_by_task(self, order: Order) -> None:
        """As libraries do that wait for a task of their own to end in good order."""
        await asyncio.create_task(self.go_on())


class Seen:
    """A handler that does what it should."""

    def __init__(self) -> None:
        self.attempts: list[int] = []

    async def handle(self, order: Order, context: Context) -> None:
        self.attempts.append(context.attempt)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("aiodelay ")]


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


# --- coroutines that cannot be cancelled ------------------------------------------------------------------


@ENDINGS
@pytest.mark.parametrize("way", ["handle", "handle_whatever_comes", "handle_by_task"])
async def test_a_handler_that_swallows_every_cancellation_is_left_behind(
    clock: VirtualClock, end: Ending, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, stubborn, seen = MemoryStore(clock=clock), Stubborn(), Seen()
    scheduler = Scheduler(store, clock=clock, drain=f"{DRAIN_S}s")
    scheduler.add_handler(getattr(stubborn, way))
    async with scheduler:
        await scheduler.schedule(Order(), delay="1s", id="stuck")
        await asyncio.sleep(2)
        begun = clock.monotonic_ms()
        await end(scheduler)
        assert DRAIN_S * 1000 < clock.monotonic_ms() - begun <= (DRAIN_S + CANCEL_S) * 1000
        assert stubborn.cancelled > 1, "it was asked more than once"
        (told,) = errors(caplog)
        assert "Order" in told
        assert "stuck" in told
    async with Scheduler(store, clock=clock) as other:
        other.add_handler(seen.handle)
        assert (await other.get("stuck")).state is State.IN_FLIGHT  # type: ignore[union-attr]
        await asyncio.sleep(LEASE_S)
        assert await other.get("stuck") is None
        stubborn.has_let_go = True
        await asyncio.sleep(1)
    assert seen.attempts == [1], "nobody prolonged its lease"
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert len(errors(caplog)) == 1


async def test_a_handler_that_is_left_behind_ends_there(clock: VirtualClock) -> None:
    """Nothing drives it any more: it would keep `asyncio.run` from ending."""
    stubborn = Stubborn()
    async with Scheduler("memory://", clock=clock, drain="1s") as scheduler:
        scheduler.add_handler(stubborn.handle)
        await scheduler.schedule(Order(), delay="1s")
        await asyncio.sleep(2)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not stubborn.has_let_go


async def test_what_is_left_behind_changes_nothing_when_it_ends_after_all(clock: VirtualClock) -> None:
    stubborn, seen = Stubborn(), Seen()
    async with Scheduler("memory://", clock=clock, drain="1s") as scheduler:
        scheduler.add_handler(stubborn.handle_by_task)
        await scheduler.schedule(Order(), delay="1s", id="stuck")
        await asyncio.sleep(2)
        await scheduler.remove_handler(Order)
        stubborn.has_let_go = True
        await asyncio.sleep(2)
        assert (await scheduler.get("stuck")).state is State.IN_FLIGHT  # type: ignore[union-attr]
        scheduler.add_handler(seen.handle)
        await scheduler.run_until_idle()
        assert seen.attempts == [1]
        assert scheduler._running is not None
        assert scheduler._running.subscriptions.in_flight == 0


async def test_a_removed_handler_that_is_stuck_holds_up_neither_others_nor_the_end(clock: VirtualClock) -> None:
    stubborn, parcels = Stubborn(), list[Parcel]()

    async def take(parcel: Parcel) -> None:
        parcels.append(parcel)

    async with Scheduler("memory://", clock=clock, drain=f"{DRAIN_S}s") as scheduler:
        scheduler.add_handler(stubborn.handle_by_task)
        scheduler.add_handler(take)
        await scheduler.schedule(Order(), delay="1s")
        await scheduler.schedule(Parcel(), delay="9s")
        await asyncio.sleep(2)
        await scheduler.remove_handler(Order)
        assert parcels == [Parcel()]
        begun = clock.monotonic_ms()
    assert clock.monotonic_ms() == begun
    stubborn.has_let_go = True


class StuckSink:
    """A sink whose send never ends."""

    name = "stuck"
    limits = Demand(10)

    def __init__(self) -> None:
        self.stubborn = Stubborn()

    def check(self, address: str) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        await self.stubborn.go_on()
        return [Sent()] * len(deliveries)


async def test_a_sink_that_swallows_every_cancellation_is_left_behind(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    store, sink = MemoryStore(clock=clock), StuckSink()
    async with Scheduler(store, sinks=[sink], clock=clock, drain=f"{DRAIN_S}s") as scheduler:
        for message_id in ("a", "b"):
            await scheduler.schedule(b"", to="stuck:x", delay="1s", id=message_id)
        await asyncio.sleep(2)
        begun = clock.monotonic_ms()
    assert DRAIN_S * 1000 < clock.monotonic_ms() - begun <= (DRAIN_S + CANCEL_S) * 1000
    assert len(errors(caplog)) == 2
    assert all("stuck" in told and message_id in told for told, message_id in zip(errors(caplog), "ab", strict=True))
    sink.stubborn.has_let_go = True
    await asyncio.sleep(2)
    assert (await store.counts())["stuck"].in_flight == 2, "nobody has settled them"


# --- stores that are gone ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["hang", "unavailable", "reply_lost"])
@pytest.mark.parametrize("drain_s", [0, DRAIN_S])
async def test_a_store_that_is_gone_holds_up_closing_for_a_few_seconds_after_the_drain(
    clock: VirtualClock, fault: Fault, drain_s: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = FaultyStore(MemoryStore(clock=clock))
    scheduler = Scheduler(store, clock=clock, drain=f"{drain_s}s")

    @scheduler.handler(concurrency=3)
    async def handle(order: Order) -> None:
        await asyncio.sleep(3)

    async with scheduler:
        for _ in range(2):
            await scheduler.schedule(Order(), delay="1s")
        await asyncio.sleep(2)
        store.inject(fault, times=None)
        call = asyncio.create_task(scheduler.schedule(Order(), delay="1s"))
        await asyncio.sleep(1)
        begun = clock.monotonic_ms()
        await closing(scheduler)
        assert clock.monotonic_ms() - begun <= (drain_s + CLOSE_S) * 1000
    await asyncio.wait([call])
    assert isinstance(call.exception(), OutcomeUnknownError | StoreUnavailableError | ClosedError)
    assert "2 messages were not settled: they are delivered again when their leases end" in errors(caplog)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_store_that_comes_back_during_the_drain_gets_the_settlements(clock: VirtualClock) -> None:
    memory = MemoryStore(clock=clock)
    store = FaultyStore(memory)
    scheduler = Scheduler(store, clock=clock, drain=f"{DRAIN_S}s")
    scheduler.add_handler(Seen().handle)
    async with scheduler:
        await scheduler.schedule(Order(), delay="1s")
        await asyncio.sleep(0.5)
        store.inject("hang", "settle", times=None)
        await asyncio.sleep(1)
        asyncio.get_running_loop().call_later(DRAIN_S - 1, store.heal)
    assert await memory.counts() == {}


# --- threads ----------------------------------------------------------------------------------------------


class Blocker:
    """A plain handler that blocks its thread until it is released."""

    def __init__(self) -> None:
        self.released, self.running = threading.Event(), 0

    def handle(self, order: Order) -> None:
        self.running += 1
        self.released.wait(60)

    async def until_running(self, count: int) -> None:
        await until(lambda: self.running >= count, f"{count} run, each in a thread")


@pytest.fixture
def blocker() -> Iterator[Blocker]:
    blocker = Blocker()
    yield blocker
    blocker.released.set()
    join_threads()


def join_threads() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("aiodelay "):
            thread.join(10)
            assert not thread.is_alive()


@ENDINGS
async def test_a_plain_handler_that_is_stuck_is_left_behind_after_the_drain_time(
    end: Ending, blocker: Blocker, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    async with Scheduler(store, drain="200ms") as scheduler:
        scheduler.add_handler(blocker.handle)
        await scheduler.schedule(Order(), delay="1ms", id="stuck")
        await blocker.until_running(1)
        begun = time.monotonic()
        await end(scheduler)
        assert time.monotonic() - begun < SOON_S
    given_back = await store.get("stuck")
    assert given_back is not None
    assert (given_back.state, given_back.record.attempt) == (State.OVERDUE, 0)
    (told,) = [each.getMessage() for each in caplog.records if "cannot be stopped" in each.getMessage()]
    assert "Order" in told
    assert "stuck" in told
    assert threads() == ["aiodelay Order_0"]


async def test_one_that_is_stuck_keeps_no_other_thread(blocker: Blocker) -> None:
    def take(parcel: Parcel) -> None: ...

    async with Scheduler("memory://", drain="200ms") as scheduler:
        scheduler.add_handler(blocker.handle)
        scheduler.add_handler(take)
        await scheduler.schedule(Parcel(), delay="1ms")
        await scheduler.run_until_idle()
        await scheduler.schedule(Order(), delay="1ms")
        await blocker.until_running(1)
        assert sorted(threads()) == ["aiodelay Order_0", "aiodelay Parcel_0"]
    assert threads() == ["aiodelay Order_0"]


async def test_all_tasks_cancelled_at_once_as_an_interrupt_does_wait_for_no_thread(blocker: Blocker) -> None:
    async with Scheduler("memory://") as scheduler:
        scheduler.add_handler(blocker.handle)
        await scheduler.schedule(Order(), delay="1ms")
        await blocker.until_running(1)
        begun = time.monotonic()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
    assert time.monotonic() - begun < SOON_S


@ENDINGS
async def test_the_threads_of_a_plain_handler_end_with_it(end: Ending) -> None:
    together = threading.Barrier(3, timeout=30)

    def take(order: Order) -> None:
        together.wait()

    async with Scheduler("memory://") as scheduler:
        scheduler.add_handler(take, concurrency=3)
        for _ in range(6):
            await scheduler.schedule(Order(), delay="1ms")
        await scheduler.run_until_idle()
        assert len(threads()) == 3
        await end(scheduler)
        assert threads() == []


async def test_more_concurrency_brings_more_threads() -> None:
    together = threading.Barrier(4, timeout=30)
    met: list[int] = []

    def take(order: Order) -> None:
        met.append(together.wait())

    async with Scheduler("memory://") as scheduler:
        scheduler.add_handler(take, concurrency=2)
        for _ in range(4):
            await scheduler.schedule(Order(), delay="1ms")
        await until(lambda: together.n_waiting == 2, "two wait, each in a thread")
        scheduler.set_concurrency(Order, 4)
        await scheduler.run_until_idle()
    assert sorted(met) == [0, 1, 2, 3]
    assert threads() == []


async def test_a_plain_handler_of_concurrency_one_has_one_thread() -> None:
    """So that what it keeps there, such as a connection, serves all its runs."""
    ran_in: set[int] = set()

    def take(order: Order) -> None:
        ran_in.add(threading.get_ident())

    async with Scheduler("memory://") as scheduler:
        scheduler.add_handler(take, concurrency=1)
        for _ in range(200):
            await scheduler.schedule(Order(), delay="1ms")
        await scheduler.run_until_idle()
    assert len(ran_in) == 1
