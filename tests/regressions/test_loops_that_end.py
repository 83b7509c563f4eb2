"""An unexpected end of a scheduler loop reaches the user, and ends the wait of everybody who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

import pytest

from aiodelay import AiodelayError, ClosedError, Context, ScheduleOutcome, Scheduler
from aiodelay.core.values import Command, Delivery, Demand, Outcome, SendOutcome, SourcePosition
from aiodelay.testing.clock import VirtualClock
from tests.support.noted import Name, NotedStore

pytestmark = pytest.mark.asyncio

TO = "handler:work"


class Bug(BaseException):
    """What no loop outlives."""


async def raised_by(scheduler: Scheduler, use: Callable[[], Awaitable[None]]) -> list[BaseException]:
    """Use a scheduler in its block, and return what the block raises."""

    async def block() -> None:
        async with scheduler:
            await use()

    with pytest.raises(BaseExceptionGroup) as raised:
        await block()
    return list(raised.value.exceptions)


async def until_bug(name: Name, scheduler: Scheduler, store: NotedStore) -> None:
    """Have a call of the store raise, with a run under way, and give every loop a reason to make that call."""
    await scheduler.schedule(b"", to=TO, delay="1s", id="long")
    await scheduler.schedule(b"", to=TO, delay="30s", id="short")
    await asyncio.sleep(2)
    store.errors[name].append(Bug(name))
    await scheduler.schedule(b"", to=TO, delay="1h")
    await asyncio.sleep(3_600)
    raise AssertionError("the block went on")


@pytest.mark.parametrize("name", ["apply", "claim", "settle", "renew", "wait", "tidy"])
async def test_it_ends_the_block_and_all_that_wait(clock: VirtualClock, name: Name) -> None:
    store, cut_off = NotedStore(clock), list[str]()
    scheduler = Scheduler(store, clock=clock)

    @scheduler.handler(name="work")
    async def work(payload: bytes, context: Context) -> None:
        try:
            await asyncio.sleep(3_600 if context.id == "long" else 1)
        except asyncio.CancelledError:
            cut_off.append(context.id)
            raise

    async def schedule_on() -> None:
        while True:
            await scheduler.schedule(b"", to=TO, delay="1h")
            await asyncio.sleep(0.1)

    others: list[asyncio.Task[None]] = []

    async def use() -> None:
        others.extend([asyncio.create_task(scheduler.run_until_idle()), asyncio.create_task(schedule_on())])
        await until_bug(name, scheduler, store)

    assert [str(error) for error in await raised_by(scheduler, use)] == [name]
    assert clock.monotonic_ms() < 45_000, "neither the drain time nor anything else was waited for"
    assert cut_off == ["long"]
    async with asyncio.timeout(1):
        ends = await asyncio.gather(*others, return_exceptions=True)
    assert all(isinstance(end, AiodelayError) for end in ends), ends
    assert asyncio.all_tasks() == {asyncio.current_task()}
    with pytest.raises(ClosedError):
        await scheduler.schedule(b"", to=TO, delay="1h")


@pytest.mark.parametrize("name", ["settle", "tidy"])
async def test_it_is_raised_by_closing_as_well(clock: VirtualClock, name: Name) -> None:
    store = NotedStore(clock)
    scheduler = Scheduler(store, clock=clock)

    @scheduler.handler(name="work")
    async def work(payload: bytes) -> None:
        await asyncio.sleep(25)

    async def use() -> None:
        await scheduler.schedule(b"", to=TO, delay="1s")
        await asyncio.sleep(2)
        store.errors[name].append(Bug(name))

    assert [str(error) for error in await raised_by(scheduler, use)] == [name]
    assert clock.monotonic_ms() <= 26_000
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_what_a_handler_raises_beyond_exceptions_ends_the_block(clock: VirtualClock) -> None:
    scheduler = Scheduler("memory://", clock=clock)

    @scheduler.handler(name="work")
    async def work(payload: bytes) -> None:
        await asyncio.sleep(1)
        raise Bug("handler")

    async def use() -> None:
        await scheduler.schedule(b"", to=TO, delay="1s")
        await scheduler.schedule(b"", to=TO, delay="1s")
        await asyncio.sleep(3_600)

    assert {str(error) for error in await raised_by(scheduler, use)} == {"handler"}
    assert clock.monotonic_ms() == 2_000
    assert asyncio.all_tasks() == {asyncio.current_task()}


class BrokenSink:
    name = "broken"
    limits = Demand(10)

    def check(self, address: str) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        raise Bug("sink")


async def test_what_a_sink_raises_beyond_exceptions_ends_the_block(clock: VirtualClock) -> None:
    scheduler = Scheduler("memory://", sinks=[BrokenSink()], clock=clock)

    async def use() -> None:
        await scheduler.schedule(b"", to="broken:x", delay="1s")
        await asyncio.sleep(3_600)

    assert [str(error) for error in await raised_by(scheduler, use)] == ["sink"]
    assert clock.monotonic_ms() == 1_000


# --- errors of programming, which the loops outlive --------------------------------------------------------


class WrongStore(NotedStore):
    """Answers `apply` or `tidy` with what is no answer."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.wrong: dict[Name, list[Any]] = {"apply": [], "tidy": []}

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        outcomes = await super().apply(commands, source=source)
        wrong: list[Any] = self.wrong["apply"]
        return wrong.pop(0) if wrong else outcomes

    async def note(self, name: Name, *arguments: Any, **more: Any) -> Any:  # noqa: ANN401
        answer = await super().note(name, *arguments, **more)
        wrong = self.wrong["tidy"]
        return wrong.pop(0) if name == "tidy" and wrong else answer


@pytest.mark.parametrize("wrong", [None, [], [None, None], 7], ids=repr)
async def test_a_command_whose_answer_is_none_is_sent_again(clock: VirtualClock, wrong: object) -> None:
    store = WrongStore(clock)
    async with Scheduler(store, clock=clock) as scheduler:
        store.wrong["apply"].append(wrong)
        async with asyncio.timeout(5):
            scheduled = await scheduler.schedule(b"", to=TO, delay="1h", id="m")
        assert scheduled.outcome is ScheduleOutcome.STORED
        assert [len(call.asked) for call in store.made("apply")] == [1, 1]


async def test_housekeeping_outlives_an_answer_that_is_none(clock: VirtualClock) -> None:
    store = WrongStore(clock)
    async with Scheduler(store, clock=clock):
        store.wrong["tidy"].append(None)
        await asyncio.sleep(60)
        assert len(store.made("tidy")) >= 5


async def test_the_dispatcher_outlives_a_wait_that_fails(clock: VirtualClock) -> None:
    store, seen = NotedStore(clock), list[bytes]()
    scheduler = Scheduler(store, clock=clock)

    @scheduler.handler(name="work")
    async def work(payload: bytes) -> None:
        seen.append(payload)

    async with scheduler:
        store.errors["wait"] += [TypeError("wait() takes no arguments")] * 5
        await scheduler.schedule(b"1", to=TO, delay="20s")
        await asyncio.sleep(21)
    assert seen == [b"1"]
    assert not store.errors["wait"]
