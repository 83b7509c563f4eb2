"""Opening and closing: their order, the state after a failure, and which calls are allowed when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import pytest

from aiodelay import ClosedError, ConfigurationError, Context, Later, Scheduled, Scheduler, StoreUnavailableError
from aiodelay.core.values import (
    Claimed,
    Command,
    Delivery,
    Demand,
    Lane,
    Outcome,
    SendOutcome,
    Settlement,
    SettleOutcome,
    SourcePosition,
    State,
)
from aiodelay.engine.delivery import pulse_thread
from aiodelay.memory import MemoryStore
from aiodelay.ports import Work
from aiodelay.ports.clock import Clock
from aiodelay.testing import FaultyStore, RecordingSink, VirtualClock, VirtualLoop
from tests.support.disks import IN_MEMORY
from tests.support.leftovers import open_files, threads

Event = str


@dataclass
class Order:
    number: int = 0


class RefusalError(Exception):
    """What something raises that does not open or close."""


class Stage:
    """What was opened, called and closed, in order; and what shall fail."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.fails: dict[Event, type[BaseException] | None] = {}

    async def note(self, event: Event) -> None:
        """Note it; then raise what was told, or wait for ever where None was."""
        self.events.append(event)
        if event in self.fails:
            error = self.fails[event]
            if error is None:
                await asyncio.get_running_loop().create_future()
            else:
                raise error(event)

    @property
    def opened_and_closed(self) -> list[Event]:
        return [event for event in self.events if event.startswith(("open", "close"))]

    def since(self, event: Event) -> list[Event]:
        return self.events[self.events.index(event) + 1 :]


class NotedStore(MemoryStore):
    """Tells the stage what it does."""

    def __init__(self, stage: Stage, clock: Clock) -> None:
        super().__init__(clock=clock)
        self._stage = stage

    async def __aenter__(self) -> Self:
        await self._stage.note("open store")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stage.note("close store")

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        await self._stage.note("apply")
        return await super().apply(commands, source=source)

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        await self._stage.note("open work")
        async with super().work(worker, lanes) as work:
            yield NotedWork(self._stage, work)
        await self._stage.note("close work")


class NotedWork:
    def __init__(self, stage: Stage, work: Work) -> None:
        self._stage, self._work = stage, work

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the work has
        return getattr(self._work, name)

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        await self._stage.note("claim")
        return await self._work.claim(demand, request=request, lease_ms=lease_ms)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        await self._stage.note("settle")
        return await self._work.settle(settlements)


class NotedSink(RecordingSink):
    def __init__(self, name: str, stage: Stage) -> None:
        super().__init__(name)
        self._stage = stage

    async def __aenter__(self) -> Self:
        await self._stage.note(f"open {self.name}")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stage.note(f"close {self.name}")

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        await asyncio.sleep(3)
        await self._stage.note(f"sent {self.name}")
        return await super().send(deliveries)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def scheduler_on(stage: Stage, clock: VirtualClock, **settings: Any) -> Scheduler:  # noqa: ANN401 - any setting
    sinks = [NotedSink("left", stage), NotedSink("right", stage)]
    return Scheduler(NotedStore(stage, clock), clock=clock, sinks=sinks, **settings)


def our_tasks() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {task for task in [asyncio.current_task()] if task is not None}


# --- opening ----------------------------------------------------------------------------------------------

OPENING = ["open store", "open left", "open right", "open work"]
CLOSING = ["close work", "close right", "close left", "close store"]


@pytest.mark.asyncio
async def test_it_opens_the_store_first_and_closes_it_last(stage: Stage, clock: VirtualClock) -> None:
    async with scheduler_on(stage, clock):
        assert stage.opened_and_closed == OPENING
    assert stage.opened_and_closed == OPENING + CLOSING


@pytest.mark.parametrize("error", [RefusalError, StoreUnavailableError, KeyboardInterrupt])
@pytest.mark.parametrize("at", range(len(OPENING)), ids=OPENING)
@pytest.mark.asyncio
async def test_r1_what_fails_while_opening_leaves_nothing_open(
    stage: Stage, clock: VirtualClock, at: int, error: type[BaseException]
) -> None:
    stage.fails = {OPENING[at]: error if error is not StoreUnavailableError else StoreAwayError}
    scheduler = scheduler_on(stage, clock, open_timeout="0s")
    with pytest.raises(error, match=OPENING[at]):
        await scheduler.__aenter__()
    assert stage.opened_and_closed == OPENING[: at + 1] + CLOSING[len(CLOSING) - at :]
    assert our_tasks() == set()
    with pytest.raises(ClosedError, match="not open yet"):
        await scheduler.cancel("a")
    stage.fails.clear()
    async with scheduler:
        await scheduler.schedule(b"", to="left:x", delay="1h")


class StoreAwayError(StoreUnavailableError):
    def __init__(self, event: Event) -> None:
        super().__init__("memory://", event)


@pytest.mark.parametrize("at", range(len(OPENING)), ids=OPENING)
@pytest.mark.asyncio
async def test_r1_cancelled_while_opening_it_leaves_nothing_open(stage: Stage, clock: VirtualClock, at: int) -> None:
    stage.fails = {OPENING[at]: None}
    scheduler = scheduler_on(stage, clock)
    opening = asyncio.create_task(scheduler.__aenter__())
    await asyncio.sleep(1)
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    assert stage.opened_and_closed == OPENING[: at + 1] + CLOSING[len(CLOSING) - at :]
    assert our_tasks() == set()


@pytest.mark.asyncio
async def test_a_process_that_only_schedules_opens_nothing_but_the_store(stage: Stage, clock: VirtualClock) -> None:
    async with scheduler_on(stage, clock, dispatch=False) as scheduler:
        await scheduler.schedule(b"", to="left:x", delay="1s")
        await asyncio.sleep(60)
    assert stage.events == ["open store", "apply", "close store"]


@pytest.mark.asyncio
async def test_sinks_that_are_not_served_are_not_opened(stage: Stage, clock: VirtualClock) -> None:
    async with scheduler_on(stage, clock, lanes=["right"]):
        pass
    assert stage.opened_and_closed == [
        "open store",
        "open right",
        "open work",
        "close work",
        "close right",
        "close store",
    ]


@pytest.mark.asyncio
async def test_lanes_that_name_nothing_are_refused_before_anything_is_opened(stage: Stage, clock: VirtualClock) -> None:
    with pytest.raises(ConfigurationError, match="lanes"):
        await scheduler_on(stage, clock, lanes=["middle"]).__aenter__()
    assert stage.events == []


# --- closing ----------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_closing_ends_claims_then_deliveries_then_settlements_then_commands(
    stage: Stage, clock: VirtualClock
) -> None:
    scheduler = scheduler_on(stage, clock)

    @scheduler.handler(concurrency=5)
    async def handle(order: Order, context: Context) -> None:
        await asyncio.sleep(4)
        await context.scheduler.schedule(Order(7), delay="1h", id="from the handler")
        await stage.note("handled")

    async with scheduler:
        await scheduler.schedule(Order(1), delay="1s")
        await scheduler.schedule(b"", to="left:x", delay="1s")
        await scheduler.schedule(Order(2), delay="3s", id="due while closing")
        await asyncio.sleep(2)
        await stage.note("block ends")
    assert stage.since("block ends") == ["sent left", "settle", "apply", "handled", "settle", *CLOSING]
    async with scheduler:
        assert await scheduler.get("from the handler") is not None
        assert await scheduler.get("due while closing") is not None


@pytest.mark.asyncio
async def test_s2_a_call_under_way_when_the_block_ends_is_answered(
    scheduler: Scheduler, faulty_store: FaultyStore
) -> None:
    faulty_store.inject("delay", "apply", times=2, lasting="2s")
    calls: list[asyncio.Task[Scheduled]] = []
    async with scheduler:
        for n in range(3):
            calls.append(asyncio.create_task(scheduler.schedule(Order(n), delay="1h", id=f"m{n}")))
            await asyncio.sleep(0.1)
    assert faulty_store.applied == [1, 2], "one was under way, the others waited for it"
    assert [isinstance(await call, Scheduled) for call in calls] == [True] * 3
    async with scheduler:
        assert [each.record.id async for each in scheduler.pending()] == ["m0", "m1", "m2"]


@pytest.mark.asyncio
async def test_a_claim_under_way_when_the_block_ends_is_given_back(clock: VirtualClock) -> None:
    store, handled = FaultyStore(MemoryStore(clock=clock)), list[Order]()
    scheduler = Scheduler(store, clock=clock)

    @scheduler.handler
    async def handle(order: Order) -> None:
        handled.append(order)

    async with scheduler:
        await scheduler.schedule(Order(), delay="1s", id="a")
        await asyncio.sleep(0.5)
        store.inject("late_reply", "claim", lasting="3s")
        await asyncio.sleep(1)
        snapshot = await scheduler.get("a")
        assert snapshot is not None
        assert snapshot.state is State.IN_FLIGHT
    assert handled == []
    async with Scheduler(store, clock=clock, dispatch=False) as other:
        snapshot = await other.get("a")
    assert snapshot is not None
    assert (snapshot.state, snapshot.record.attempt) == (State.OVERDUE, 0)


@pytest.mark.asyncio
async def test_what_has_not_begun_is_given_back_at_once(clock: VirtualClock) -> None:
    store, began = MemoryStore(clock=clock), list[int]()
    scheduler = Scheduler(store, clock=clock)

    @scheduler.handler(concurrency=2)
    async def handle(order: Order) -> None:
        began.append(order.number)
        await asyncio.sleep(5)

    async with scheduler:
        for number in range(4):
            await scheduler.schedule(Order(number), delay="1s", id=f"m{number}")
        await asyncio.sleep(2)
    assert began == [0, 1]
    assert clock.monotonic_ms() == 6_000, "it waits for the runs under way, and for nothing else"
    async with Scheduler(store, clock=clock, dispatch=False) as other:
        left = [(each.record.id, each.state, each.record.attempt) async for each in other.pending()]
    assert left == [("m2", State.OVERDUE, 0), ("m3", State.OVERDUE, 0)]


@pytest.mark.asyncio
async def test_what_does_not_end_within_the_drain_time_is_cut_off_and_given_back(clock: VirtualClock) -> None:
    store = MemoryStore(clock=clock)
    scheduler = Scheduler(store, clock=clock, drain="5s")
    cut_off: list[int] = []

    @scheduler.handler
    async def handle(order: Order) -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cut_off.append(order.number)
            raise

    async with scheduler:
        await scheduler.schedule(Order(7), delay="1s", id="a")
        await asyncio.sleep(2)
    assert (cut_off, clock.monotonic_ms()) == ([7], 7_000)
    async with Scheduler(store, clock=clock, dispatch=False) as other:
        snapshot = await other.get("a")
    assert snapshot is not None
    assert (snapshot.state, snapshot.record.attempt) == (State.OVERDUE, 0), "claimable at once, and no attempt lost"


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.asyncio
async def test_cancelled_while_closing_it_gives_back_at_once_what_is_in_flight(clock: VirtualClock, times: int) -> None:
    store = MemoryStore(clock=clock)
    scheduler = Scheduler(store, clock=clock)

    @scheduler.handler
    async def handle(order: Order) -> None:
        await asyncio.sleep(1000)

    async def main() -> None:
        async with scheduler:
            await scheduler.schedule(Order(), delay="1s", id="a")
            await asyncio.sleep(2)

    task = asyncio.create_task(main())
    await asyncio.sleep(3)  # it has been closing for a second, of thirty that it may
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([task])
    assert task.cancelled()
    assert clock.monotonic_ms() == 3_000
    assert our_tasks() == set()
    async with Scheduler(store, clock=clock, dispatch=False) as other:
        snapshot = await other.get("a")
    assert snapshot is not None
    assert (snapshot.state, snapshot.record.attempt) == (State.OVERDUE, 0)


@pytest.mark.parametrize(
    "error",
    [ValueError("mine"), ExceptionGroup("ours", [ValueError("mine")]), KeyboardInterrupt(), asyncio.CancelledError()],
    ids=repr,
)
@pytest.mark.asyncio
async def test_what_ends_the_block_goes_through_as_it_is(
    stage: Stage, clock: VirtualClock, error: BaseException
) -> None:
    async def main() -> None:
        async with scheduler_on(stage, clock) as scheduler:
            await scheduler.schedule(b"", to="left:x", delay="1s")
            await asyncio.sleep(2)
            raise error

    with pytest.raises(type(error)) as caught:
        await main()
    assert caught.value is error
    assert (error.__cause__, error.__context__) == (None, None)
    assert stage.events[-6:] == ["sent left", "settle", *CLOSING], "it was delivered, and closed in order"


@pytest.mark.parametrize("at", range(len(CLOSING)), ids=CLOSING)
@pytest.mark.asyncio
async def test_what_fails_while_closing_does_not_keep_the_rest_open(stage: Stage, clock: VirtualClock, at: int) -> None:
    stage.fails = {CLOSING[at]: RefusalError}
    scheduler = scheduler_on(stage, clock)
    with pytest.raises(RefusalError, match=CLOSING[at]):
        async with scheduler:
            pass
    assert stage.opened_and_closed == OPENING + CLOSING
    assert our_tasks() == set()
    stage.fails.clear()
    async with scheduler:
        await scheduler.schedule(b"", to="left:x", delay="1h")


@pytest.mark.asyncio
async def test_closing_what_is_closed_does_nothing(stage: Stage, clock: VirtualClock) -> None:
    scheduler = scheduler_on(stage, clock)
    await scheduler.__aexit__(None, None, None)
    assert stage.events == []
    async with scheduler:
        pass
    await scheduler.__aexit__(None, None, None)
    assert stage.opened_and_closed == OPENING + CLOSING


@pytest.mark.asyncio
async def test_closed_by_several_at_once_it_closes_once_and_all_wait_for_it(stage: Stage, clock: VirtualClock) -> None:
    scheduler = scheduler_on(stage, clock)
    await scheduler.__aenter__()
    await scheduler.schedule(b"", to="left:x", delay="1s")
    await asyncio.sleep(2)
    for each in await asyncio.gather(
        *(scheduler.__aexit__(None, None, None) for _ in range(3)), return_exceptions=True
    ):
        assert each is None
        assert stage.events[-6:] == ["sent left", "settle", *CLOSING]
    assert our_tasks() == set()


@pytest.mark.asyncio
async def test_opened_while_it_is_closing_it_refuses(clock: VirtualClock) -> None:
    scheduler = Scheduler("memory://", clock=clock)

    @scheduler.handler
    async def handle(order: Order) -> None:
        await asyncio.sleep(10)

    await scheduler.__aenter__()
    await scheduler.schedule(Order(), delay="1s")
    await asyncio.sleep(2)
    closing = asyncio.create_task(scheduler.__aexit__(None, None, None))
    await asyncio.sleep(1)
    with pytest.raises(ClosedError, match="open already"):
        await scheduler.__aenter__()
    await closing
    async with scheduler:
        assert await scheduler.counts() == {}


@pytest.mark.asyncio
async def test_its_state_can_be_seen(clock: VirtualClock) -> None:
    scheduler = Scheduler("memory://", clock=clock)
    assert repr(scheduler) == "<Scheduler memory:// closed>"
    async with scheduler:
        assert repr(scheduler) == "<Scheduler memory:// open>"
    assert repr(scheduler) == "<Scheduler memory:// closed>"


# --- what is left afterwards ------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with TemporaryDirectory(prefix="aiodelay-", dir=IN_MEMORY) as folder:
        yield "memory://" if request.param == "memory" else f"sqlite:///{folder}/delay.db"


async def ends_well(scheduler: Scheduler) -> None:
    async with scheduler:
        await use(scheduler)


async def fails(scheduler: Scheduler) -> None:
    async def main() -> None:
        async with scheduler:
            await use(scheduler)
            raise RefusalError

    with pytest.raises(RefusalError):
        await main()


async def is_cancelled(scheduler: Scheduler) -> None:
    using = asyncio.create_task(scheduler.run())
    while "open" not in repr(scheduler):  # noqa: ASYNC110 - virtual time
        await asyncio.sleep(0.001)
    await use(scheduler)
    using.cancel()
    await asyncio.wait([using])


async def use(scheduler: Scheduler) -> None:
    for given in range(5):
        await scheduler.schedule(Order(given), delay=timedelta(milliseconds=given))
        await scheduler.schedule(b"", to="handler:plain", delay=timedelta(milliseconds=given))
    await scheduler.counts()
    await asyncio.sleep(0.003)


@pytest.mark.parametrize("how", [ends_well, fails, is_cancelled])
@pytest.mark.asyncio
async def test_r1_tasks_threads_and_files_return_to_what_they_were(
    url: str, clock: VirtualClock, how: Callable[[Scheduler], Any]
) -> None:
    scheduler = Scheduler(url, clock=clock, drain="1s")

    @scheduler.handler
    async def coroutine(order: Order) -> None:
        await asyncio.sleep(order.number)

    @scheduler.handler(name="plain")
    def plain(payload: bytes) -> None: ...

    before = open_files(), threads(), our_tasks()
    for _ in range(3):
        await how(scheduler)
    assert (open_files(), threads(), our_tasks()) == before


@pytest.mark.asyncio
async def test_r1_an_opening_without_a_thread_for_its_pulse_leaves_nothing_open(
    tmp_path: Path, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(f"sqlite:///{tmp_path}/delay.db", clock=clock)

    @scheduler.handler
    async def handle(order: Order) -> None: ...

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RefusalError

    before = open_files(), threads(), our_tasks()
    with monkeypatch.context() as patch:
        patch.setattr(pulse_thread, "Thread", NoThread)
        with pytest.raises(RefusalError):
            await scheduler.__aenter__()
    assert (open_files(), threads(), our_tasks()) == before
    await ends_well(scheduler)


@pytest.mark.asyncio
async def test_a_thread_that_a_middleware_has_given_up_does_not_hold_up_closing() -> None:
    scheduler, ends, begun = Scheduler("memory://", drain="1s"), threading.Event(), asyncio.Event()
    loop, waiting = asyncio.get_running_loop(), list[asyncio.Future[object]]()

    @scheduler.middleware("handle")
    async def give_up(context: Context, call_next: Callable[[Context], Awaitable[object]]) -> object:
        waiting.append(asyncio.ensure_future(call_next(context)))
        await begun.wait()
        return Later("1h")

    @scheduler.handler(name="plain")
    def plain(payload: bytes) -> None:
        loop.call_soon_threadsafe(begun.set)
        ends.wait()

    async with scheduler:
        await scheduler.schedule(b"", to="handler:plain", delay="0s")
        await begun.wait()
        threading.Timer(30, ends.set).start()  # if closing waits for the thread, the assertion fails
    assert not ends.is_set()
    ends.set()
    await asyncio.wait(waiting)


def test_one_scheduler_serves_one_loop_after_another(url: str) -> None:
    clock = VirtualClock()
    scheduler, handled = Scheduler(url, clock=clock), list[int]()

    @scheduler.handler
    async def handle(order: Order) -> None:
        handled.append(order.number)

    async def live(number: int) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        clock.follow(loop)
        await scheduler.__aenter__()
        await scheduler.schedule(Order(number), delay="1s")
        await scheduler.run_until_idle()
        await asyncio.gather(*(scheduler.__aexit__(None, None, None) for _ in range(2)))

    for number in range(3):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(live(number))
    assert handled == [0, 1, 2]
