"""A scheduler starts while its store, a sink or a source does not answer: how long it waits, and what it leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import pytest

from aiodelay import ClosedError, Every, Scheduler, StoreUnavailableError
from aiodelay.core.values import Lane, PutBack, Stored, WorkStatus
from aiodelay.errors import ConfigurationError, SinkUnavailableError, StoreMismatchError, WrongLoopError
from aiodelay.memory import MemoryStore
from aiodelay.ports import Feed, Work
from aiodelay.ports.clock import Clock
from aiodelay.testing import FaultyStore, RecordingSink, VirtualClock
from tests.support.disks import IN_MEMORY
from tests.support.leftovers import open_files, threads

pytestmark = pytest.mark.asyncio


@dataclass
class Order:
    number: int = 0


class Stage:
    """What was opened and closed, in order; and for how many openings a part does not answer."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.away: dict[str, int] = {}
        self.error: Callable[[str], Exception] = lambda reason: StoreUnavailableError("noted://", reason)

    def open(self, what: str) -> None:
        self.events.append(f"open {what}")
        if self.away.get(what, 0) > 0:
            self.away[what] -= 1
            raise self.error(f"opening {self.events.count(f'open {what}')} of {what}")

    def close(self, what: str) -> None:
        self.events.append(f"close {what}")


class NotedStore(MemoryStore):
    name = "noted://"

    def __init__(self, stage: Stage, clock: Clock) -> None:
        super().__init__(clock=clock)
        self._stage = stage

    async def __aenter__(self) -> Self:
        self._stage.open("store")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._stage.close("store")

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        self._stage.open("work")
        async with super().work(worker, lanes) as work:
            yield work
        self._stage.close("work")


class NotedSink(RecordingSink):
    def __init__(self, stage: Stage) -> None:
        super().__init__("sink")
        self._stage = stage

    async def __aenter__(self) -> Self:
        self._stage.open("sink")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._stage.close("sink")


class NotedSource:
    name = "source"

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def check(self, address: str) -> None: ...

    async def __aenter__(self) -> Self:
        self._stage.open("source")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._stage.close("source")

    def feed(
        self,
        address: str,
        consumer: str,
        put_back: Callable[[Sequence[PutBack]], Awaitable[Sequence[Stored]]],
        now_ms: Callable[[], int],
    ) -> AbstractAsyncContextManager[Feed]:
        raise NotImplementedError


READY = WorkStatus("ready")
PARTS = ("store", "sink", "source", "work")
OPENING = [f"open {part}" for part in PARTS]
CLOSING = [f"close {part}" for part in reversed(PARTS)]


def failed_at(at: int) -> list[str]:
    """Return what an attempt opens that fails at a part, and what it closes: all that it has opened."""
    return OPENING[: at + 1] + CLOSING[len(PARTS) - at :]


@pytest.fixture
def stage() -> Stage:
    return Stage()


def scheduler_on(stage: Stage, clock: VirtualClock, **settings: Any) -> Scheduler:  # noqa: ANN401 - any setting
    return Scheduler(
        NotedStore(stage, clock), sinks=[NotedSink(stage)], sources=[NotedSource(stage)], clock=clock, **settings
    )


def our_tasks() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {task for task in [asyncio.current_task()] if task is not None}


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(each.levelname, each.getMessage()) for each in caplog.records if each.name == "aiodelay"]


# --- it waits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [StoreUnavailableError, SinkUnavailableError])
@pytest.mark.parametrize("at", range(len(PARTS)), ids=PARTS)
async def test_it_opens_once_all_of_it_answers_and_leaves_nothing_open_in_between(
    stage: Stage, clock: VirtualClock, caplog: pytest.LogCaptureFixture, at: int, error: Callable[[str, str], Exception]
) -> None:
    caplog.set_level(logging.INFO, "aiodelay")
    stage.away, stage.error = {PARTS[at]: 3}, lambda reason: error("noted://", reason)
    async with scheduler_on(stage, clock):
        assert stage.events == failed_at(at) * 3 + OPENING
        (warned, why), (informed, text) = told(caplog)
        assert (warned, informed) == ("WARNING", "INFO")
        assert why.startswith("opening noted:// failed: ")
        assert why.endswith(f"is unavailable: opening 1 of {PARTS[at]}; trying again for up to 30s")
        assert text.startswith("opening noted:// succeeded after 3 failures in ")
    assert our_tasks() == set()


async def test_what_was_scheduled_before_is_delivered_once_the_store_answers(
    faulty_store: FaultyStore, scheduler: Scheduler
) -> None:
    handled: list[int] = []

    @scheduler.handler
    async def handle(order: Order) -> None:
        handled.append(order.number)

    async with scheduler:
        await scheduler.schedule(Order(7), delay="5s")
    away = faulty_store.inject("unavailable", "open", times=10)
    async with scheduler:
        assert away.hits == 10
        await scheduler.run_until_idle()
    assert handled == [7]


async def test_a_series_is_armed_once_the_store_answers(
    faulty_store: FaultyStore, scheduler: Scheduler, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    @scheduler.handler(every=Every("1h"))
    async def handle(order: Order) -> None: ...

    faulty_store.inject("unavailable", "apply", times=None)

    async def heal() -> None:
        await clock.advance("20s")
        faulty_store.heal()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(heal())
        async with scheduler:
            assert clock.monotonic_ms() >= 20_000
            assert await scheduler.get("handler:Order") is not None
    assert any(text.startswith("scheduling the series of Order failed: ") for _, text in told(caplog))


# --- up to a time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "waits_ms"),
    [
        ({}, 30_000),
        ({"open_timeout": "5s"}, 5_000),
        ({"open_timeout": "0s"}, 0),
        ({"dispatch": False}, 0),
        ({"dispatch": False, "open_timeout": "2s"}, 2_000),
    ],
    ids=str,
)
async def test_it_gives_up_in_time_with_the_last_reason(
    stage: Stage, clock: VirtualClock, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], waits_ms: int
) -> None:
    stage.away = {"store": 10_000}
    scheduler = scheduler_on(stage, clock, **settings)
    with pytest.raises(StoreUnavailableError) as caught:
        await scheduler.__aenter__()
    attempts = len(stage.events)
    assert caught.value.reason == f"opening {attempts} of store"
    assert clock.monotonic_ms() == waits_ms
    assert (attempts > 1) == (waits_ms > 0) == bool(told(caplog))
    assert (our_tasks(), scheduler.status().phase) == (set(), "ended")
    stage.away.clear()
    async with scheduler:
        await scheduler.schedule(b"", to="sink:x", delay="1h")


async def test_an_attempt_under_way_is_not_cut_off(stage: Stage, clock: VirtualClock) -> None:
    class SlowStore(NotedStore):
        async def __aenter__(self) -> Self:
            await asyncio.sleep(40)
            return await super().__aenter__()

    stage.away = {"store": 1}
    with pytest.raises(StoreUnavailableError, match="opening 1 of store"):
        await Scheduler(SlowStore(stage, clock), clock=clock).__aenter__()
    async with Scheduler(SlowStore(stage, clock), clock=clock, open_timeout="1s"):
        assert clock.monotonic_ms() == 80_000


@pytest.mark.parametrize(
    "error",
    [
        StoreMismatchError("layout", "another", "this one"),
        ConfigurationError("url", "wrong", "right"),
        WrongLoopError("store", "event loop or thread"),
        OSError("no file descriptor is left"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("at", range(len(PARTS)), ids=PARTS)
async def test_what_does_not_pass_is_not_waited_for(
    stage: Stage, clock: VirtualClock, caplog: pytest.LogCaptureFixture, at: int, error: Exception
) -> None:
    stage.away, stage.error = {PARTS[at]: 1}, lambda reason: error
    with pytest.raises(type(error)) as caught:
        await scheduler_on(stage, clock).__aenter__()
    assert caught.value is error
    assert (clock.monotonic_ms(), told(caplog), stage.events) == (0, [], failed_at(at))


# --- meanwhile --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(len(PARTS)), ids=PARTS)
async def test_r1_cancelled_while_it_waits_it_ends_at_once_and_leaves_nothing_open(
    stage: Stage, clock: VirtualClock, at: int
) -> None:
    stage.away = {PARTS[at]: 10_000}
    scheduler = scheduler_on(stage, clock)
    opening = asyncio.create_task(scheduler.__aenter__())
    await asyncio.sleep(12.3)
    attempts = stage.events.count(OPENING[at])
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    assert (clock.monotonic_ms(), our_tasks()) == (12_300, set())
    assert stage.events == failed_at(at) * attempts
    stage.away.clear()
    async with scheduler:
        assert stage.events == failed_at(at) * attempts + OPENING


async def test_it_tells_why_it_is_not_open_yet(stage: Stage, clock: VirtualClock) -> None:
    stage.away = {"store": 2}
    scheduler, told = scheduler_on(stage, clock), list[WorkStatus]()

    async def keep_open() -> None:
        async with scheduler:
            await asyncio.sleep(1)

    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(keep_open())
        while not keeping.done():
            if (status := scheduler.status()) not in told:
                told.append(status)
            await asyncio.sleep(0.001)
    whys = [f"noted:// is unavailable: opening {n} of store" for n in (1, 2)]
    assert told == [WorkStatus("ended", why="not open"), *(WorkStatus("loading", why=why) for why in whys), READY]


async def test_what_is_opening_cannot_be_opened_again(stage: Stage, clock: VirtualClock) -> None:
    stage.away = {"store": 10_000}
    scheduler = scheduler_on(stage, clock)
    opening = asyncio.create_task(scheduler.__aenter__())
    await asyncio.sleep(3)
    with pytest.raises(ClosedError, match="open already"):
        await scheduler.__aenter__()
    with pytest.raises(ClosedError, match="not open yet"):
        await scheduler.cancel("a")
    opening.cancel()
    await asyncio.wait([opening])


# --- the stores are entered again ---------------------------------------------------------------------------


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with TemporaryDirectory(prefix="aiodelay-", dir=IN_MEMORY) as folder:
        yield "memory://" if request.param == "memory" else f"sqlite:///{folder}/delay.db"


async def test_r1_a_store_is_entered_again_after_a_sink_did_not_answer(
    url: str, stage: Stage, clock: VirtualClock
) -> None:
    sink, before = NotedSink(stage), (open_files(), threads(), our_tasks())
    scheduler = Scheduler(url, sinks=[sink], clock=clock)
    stage.away = {"sink": 3}
    async with scheduler:
        await scheduler.schedule(b"x", to="sink:a", delay="1s")
        await scheduler.run_until_idle()
    assert [each.envelope.payload for each in sink.deliveries] == [b"x"]
    stage.away = {"sink": 10_000}
    with pytest.raises(StoreUnavailableError):
        await scheduler.__aenter__()
    assert (open_files(), threads(), our_tasks()) == before


async def test_a_file_whose_directory_comes_later_is_waited_for(clock: VirtualClock) -> None:
    with TemporaryDirectory(prefix="aiodelay-", dir=IN_MEMORY) as folder:
        scheduler = Scheduler(f"sqlite:///{folder}/later/delay.db", clock=clock)
        before = open_files(), threads(), our_tasks()
        opening = asyncio.create_task(scheduler.__aenter__())
        await asyncio.sleep(10)
        assert "there is no directory" in scheduler.status().why
        (Path(folder) / "later").mkdir()
        await opening
        await scheduler.schedule(b"x", to="handler:a", delay="1h")
        await scheduler.__aexit__(None, None, None)
        assert (open_files(), threads(), our_tasks()) == before
