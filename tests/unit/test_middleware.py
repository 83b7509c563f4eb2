"""Middleware around runs of handlers and around schedules, with the same interface."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from aiodelay import (
    ClosedError,
    ConfigurationError,
    Context,
    DuplicateIdError,
    Every,
    HeaderError,
    Later,
    Message,
    PartlyScheduledError,
    Reject,
    Retry,
    Scheduled,
    Scheduler,
)
from aiodelay.core.values import Conflict, Query
from aiodelay.memory import MemoryStore
from aiodelay.testing.clock import VirtualClock
from tests.support.noted import NotedStore

pytestmark = pytest.mark.asyncio

TENANT: ContextVar[str] = ContextVar("TENANT", default="nobody")


@dataclass
class Pay:
    order: int = 0


class Stage:
    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.store = clock, NotedStore(clock)
        self.scheduler = Scheduler(self.store, clock=clock, retry=Retry(attempts=1))
        self.steps: list[Any] = []

    def around(self, name: str) -> None:
        @self.scheduler.middleware("handle")
        async def around(context: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:  # noqa: ANN401
            self.steps.append(f"{name} in")
            try:
                return await call_next(context)
            finally:
                self.steps.append(f"{name} out")

    async def run(self, *, delay: str = "0s") -> None:
        async with self.scheduler as scheduler:
            await scheduler.schedule(Pay(), delay=delay, id="pay")
            await scheduler.run_until_idle()

    async def died_of(self) -> list[str | None]:
        return [letter.record.last_error for letter in await self.store.memory.dead_letters()]

    async def stored(self) -> dict[str, dict[str, bytes]]:
        """Return the headers of what is stored, by id."""
        found = await self.store.memory.search(Query(limit=2000))
        return {each.record.id: dict(each.record.envelope.headers) for each in found}

    def carry_tenant(self) -> None:
        @self.scheduler.middleware("schedule")
        async def send(message: Message, call_next: Callable[[Message], Awaitable[Scheduled]]) -> Scheduled:
            return await call_next(replace(message, headers={**message.headers, "tenant": TENANT.get().encode()}))

        @self.scheduler.middleware("handle")
        async def receive(context: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:  # noqa: ANN401
            TENANT.set(context.headers["tenant"].decode())
            return await call_next(context)


@pytest.fixture
def stage(clock: VirtualClock) -> Stage:
    return Stage(clock)


# --- handling ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_plain", [False, True])
async def test_the_first_added_is_the_outermost(stage: Stage, is_plain: bool) -> None:
    stage.around("first")
    stage.around("second")

    async def pay(event: Pay) -> None:
        stage.steps.append(event)

    def plainly(event: Pay) -> None:
        stage.steps.append(event)
        assert threading.current_thread() is not threading.main_thread()

    stage.scheduler.add_handler(plainly if is_plain else pay)
    await stage.run()
    assert stage.steps == ["first in", "second in", Pay(), "second out", "first out"]
    assert await stage.died_of() == []


async def test_it_sees_what_the_handler_raises_and_may_turn_it_into_a_result(stage: Stage) -> None:
    @stage.scheduler.middleware("handle")
    async def reject(context: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:  # noqa: ANN401
        try:
            return await call_next(context)
        except LookupError as error:
            return Reject(f"{error}")

    @stage.scheduler.handler
    async def pay(event: Pay) -> None:
        raise LookupError("no such order")

    await stage.run()
    assert await stage.died_of() == ["no such order"]


async def test_what_it_raises_is_a_failed_attempt(stage: Stage) -> None:
    @stage.scheduler.middleware("handle")
    async def refuse(context: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:  # noqa: ANN401
        raise PermissionError(context.id)

    @stage.scheduler.handler
    async def pay(event: Pay) -> None:
        stage.steps.append(event)

    await stage.run()
    assert stage.steps == []
    assert await stage.died_of() == ["PermissionError: pay"]


async def test_one_that_forgets_to_return_loses_no_result(stage: Stage) -> None:
    @stage.scheduler.middleware("handle")
    async def forgets(context: Context, call_next: Callable[[Context], Awaitable[Any]]) -> None:
        await call_next(context)

    @stage.scheduler.handler
    async def pay(event: Pay) -> Later | None:
        stage.steps.append(stage.clock.monotonic_ms())
        return Later("5s") if len(stage.steps) == 1 else None

    await stage.run()
    assert stage.steps == [0, 5000]


async def test_the_time_limit_counts_it_and_ends_it(stage: Stage) -> None:
    @stage.scheduler.middleware("handle")
    async def slow(context: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:  # noqa: ANN401
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            stage.steps.append("cancelled")
            raise

    @stage.scheduler.handler(timeout="5s")
    async def pay(event: Pay) -> None: ...

    await stage.run()
    assert (stage.steps, stage.clock.monotonic_ms()) == (["cancelled"], 5000)


async def test_a_plain_handler_keeps_its_slot_until_it_returns_whatever_its_time_limit() -> None:
    """In real time: virtual time stands still while a thread works."""
    steps: list[str] = []
    go_on = threading.Event()
    scheduler = Scheduler(MemoryStore(), retry=Retry.never())

    @scheduler.middleware("handle")
    async def around(context: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:  # noqa: ANN401
        result = await call_next(context)
        steps.append(f"{context.id} out")
        return result

    @scheduler.handler(timeout="20ms", concurrency=1)
    def pay(event: Pay, context: Context) -> None:
        steps.append(context.id)
        go_on.wait(30)

    async with scheduler:
        await scheduler.schedule(Pay(), delay="0s", id="a")
        await scheduler.schedule(Pay(), delay="0s", id="b")
        await asyncio.sleep(0.2)
        assert steps == ["a"]
        go_on.set()
        await scheduler.run_until_idle()
    assert steps == ["a", "a out", "b", "b out"]


# --- scheduling -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_plain", [False, True])
async def test_context_variables_travel_from_the_caller_to_the_handler(stage: Stage, is_plain: bool) -> None:
    stage.carry_tenant()
    seen: list[str] = []

    async def pay(event: Pay) -> None:
        seen.append(TENANT.get())

    def plainly(event: Pay) -> None:
        seen.append(TENANT.get())

    stage.scheduler.add_handler(plainly if is_plain else pay, concurrency=1)
    async with stage.scheduler as scheduler:
        for tenant in ("a", "b"):
            TENANT.set(tenant)
            await scheduler.schedule(Pay(), delay="1s")
        await scheduler.schedule_many([Message(Pay(), delay="2s")])
        TENANT.set("c")
        await scheduler.run_until_idle()
    assert seen == ["a", "b", "b"]
    assert TENANT.get() == "c", "what a handler's middleware sets ends with the run"


async def test_many_go_through_it_and_share_round_trips(stage: Stage) -> None:
    stage.carry_tenant()
    async with stage.scheduler as scheduler:
        stored = await scheduler.schedule_many(Message(Pay(n), delay="1h", id=f"m{n}") for n in range(1_200))
        assert stored == 1_200
    assert len(stage.store.made("apply")) <= 6
    assert await stage.stored() == {f"m{n}": {"tenant": b"nobody"} for n in range(1_200)}


async def test_of_many_the_refused_ones_are_named(stage: Stage) -> None:
    stage.carry_tenant()
    async with stage.scheduler as scheduler:
        await scheduler.schedule(Pay(), delay="1h", id="m1")
        messages = [Message(Pay(n), delay="1h", id=f"m{n}", conflict=Conflict.error()) for n in range(3)]
        with pytest.raises(PartlyScheduledError) as caught:
            await scheduler.schedule_many([*messages, Message(Pay(), delay="1h", headers={"a b": b""})])
    assert [(each.position, type(each.error)) for each in caught.value.rejected] == [
        (1, DuplicateIdError),
        (3, HeaderError),
    ]
    assert caught.value.stored == 2


async def test_of_many_what_it_raises_itself_is_told_after_the_rest_was_stored(stage: Stage) -> None:
    @stage.scheduler.middleware("schedule")
    async def refuse(message: Message, call_next: Callable[[Message], Awaitable[Scheduled]]) -> Scheduled:
        if message.id == "m1":
            raise PermissionError("m1")
        return await call_next(message)

    async with stage.scheduler as scheduler:
        messages = [Message(Pay(n), delay="1h", id=f"m{n}") for n in range(3)]
        with pytest.raises(PermissionError) as caught:
            await scheduler.schedule_many([*messages, Message(Pay(), delay="1h", headers={"a b": b""})])
        (note,) = caught.value.__notes__
        assert note.startswith("schedule_many: 2 messages stored, 1 refused: message 3: ")
        with pytest.raises(PermissionError):
            await scheduler.schedule(Pay(), delay="1h", id="m1")
    assert (await stage.stored()).keys() == {"m0", "m2"}


async def test_what_it_passes_on_is_checked(stage: Stage) -> None:
    @stage.scheduler.middleware("schedule")
    async def break_it(message: Message, call_next: Callable[[Any], Awaitable[Scheduled]]) -> Scheduled:
        return await call_next(message.event)

    async with stage.scheduler as scheduler:
        with pytest.raises(ConfigurationError, match="a Message"):
            await scheduler.schedule(Pay(), delay="1h")


async def test_the_answer_is_the_callers(stage: Stage) -> None:
    stage.carry_tenant()
    async with stage.scheduler as scheduler:
        assert (await scheduler.schedule(Pay(), delay="1h", id="m")).id == "m"


async def test_a_handlers_own_series_does_not_go_through_it(stage: Stage) -> None:
    stage.carry_tenant()

    @stage.scheduler.handler(every=Every("1h"))
    async def pay(event: Pay) -> None: ...

    async with stage.scheduler:
        pass
    assert await stage.stored() == {"handler:Pay": {}}


# --- adding -----------------------------------------------------------------------------------------------


async def test_what_cannot_be_added(stage: Stage) -> None:
    with pytest.raises(ConfigurationError, match="'handle' or 'schedule'"):
        stage.scheduler.middleware("http")  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match="async def middleware"):
        stage.scheduler.middleware("handle")(print)  # type: ignore[type-var]
    async with stage.scheduler:
        with pytest.raises(ClosedError, match="open already"):
            stage.scheduler.middleware("handle")
