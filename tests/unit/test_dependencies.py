"""`Depends`: the arguments that a handler gets besides its event, and when they are closed."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import fast_depends
import pytest

from aiodelay import Context, Depends, HandlerSignatureError, Retry, Scheduler
from aiodelay.testing.clock import VirtualClock
from tests.support.noted import NotedStore

pytestmark = pytest.mark.asyncio

STEPS: list[str] = []


@dataclass
class Pay:
    order: int


@pytest.fixture(autouse=True)
def no_steps() -> None:
    STEPS.clear()


async def run(clock: VirtualClock, handler: Callable[..., Any], **options: Any) -> NotedStore:  # noqa: ANN401
    store = NotedStore(clock)
    scheduler = Scheduler(store, clock=clock)
    scheduler.add_handler(handler, **options)
    async with scheduler:
        await scheduler.schedule(Pay(7), delay="0s", id="pay-7")
        await scheduler.run_until_idle()
    return store


def number() -> int:
    STEPS.append("number")
    return 3


async def doubled(n: Annotated[int, Depends(number)]) -> int:
    return 2 * n


async def session() -> AsyncIterator[str]:
    STEPS.append("open")
    yield "session"
    STEPS.append("close")


def plain_session() -> Iterator[str]:
    STEPS.append("open")
    yield "session"
    STEPS.append("close")


# --- what is given ----------------------------------------------------------------------------------------


async def test_values_are_made_for_each_run_once_for_all_who_depend_on_them(clock: VirtualClock) -> None:
    seen: list[object] = []

    async def pay(
        event: Pay,
        n: Annotated[int, Depends(number)],
        context: Context,
        twice: Annotated[int, Depends(doubled)],
        *,
        default: str = "as it was",
        again: int = Depends(number),
    ) -> None:
        seen.append((event, n, context.id, twice, default, again))

    await run(clock, pay)
    assert seen == [(Pay(7), 3, "pay-7", 6, "as it was", 3)]
    assert STEPS == ["number"]


async def test_dependencies_may_take_the_context_and_the_event_by_type(clock: VirtualClock) -> None:
    seen: list[str] = []

    async def named(where: Context, what: Pay) -> str:
        return f"{where.id} of {what.order}"

    async def pay(event: Pay, name: Annotated[str, Depends(named)]) -> None:
        seen.append(name)

    await run(clock, pay)
    assert seen == ["pay-7 of 7"]


async def test_a_plain_handler_has_plain_dependencies_in_its_thread(clock: VirtualClock) -> None:
    seen: list[object] = []

    def thread(context: Context) -> threading.Thread:
        return threading.current_thread()

    def pay(
        event: Pay, a: Annotated[threading.Thread, Depends(thread)], s: Annotated[str, Depends(plain_session)]
    ) -> None:
        seen.append((a is threading.current_thread(), s))
        STEPS.append("run")

    await run(clock, pay)
    assert seen == [(True, "session")]
    assert STEPS == ["open", "run", "close"]


async def test_another_can_be_put_in_its_place_for_tests(clock: VirtualClock) -> None:
    seen: list[int] = []

    async def pay(event: Pay, n: Annotated[int, Depends(doubled)]) -> None:
        seen.append(n)

    with fast_depends.dependency_provider.scope(number, lambda: 50):
        await run(clock, pay)
    assert seen == [100]


# --- when it ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dependency", [session, plain_session])
async def test_what_was_opened_is_closed_before_the_message_is_settled(
    clock: VirtualClock, dependency: Callable[..., Any]
) -> None:
    store = NotedStore(clock)
    scheduler = Scheduler(store, clock=clock)
    closed_first: list[bool] = []

    def watch() -> Iterator[str]:
        yield "watching"
        closed_first.append(not store.made("settle"))

    @scheduler.handler
    async def pay(event: Pay, s: Annotated[str, Depends(dependency)], w: Annotated[str, Depends(watch)]) -> None:
        STEPS.append("run")

    async with scheduler:
        await scheduler.schedule(Pay(7), delay="0s")
        await scheduler.run_until_idle()
    assert STEPS == ["open", "run", "close"]
    assert closed_first == [True]
    assert len(store.made("settle")) == 1


@pytest.mark.parametrize("is_plain", [False, True])
async def test_what_fails_while_closing_is_a_failed_attempt(clock: VirtualClock, is_plain: bool) -> None:
    def breaks() -> Iterator[None]:
        yield
        raise ConnectionError("the commit failed")

    async def pay(event: Pay, s: Annotated[None, Depends(breaks)]) -> None: ...

    def plainly(event: Pay, s: Annotated[None, Depends(breaks)]) -> None: ...

    store = await run(clock, plainly if is_plain else pay, retry=Retry(attempts=1))
    (letter,) = await store.memory.dead_letters()
    assert letter.record.last_error == "ConnectionError: the commit failed"


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("fails_in", ["handler", "dependency"])
async def test_a_dependency_cannot_hide_a_failure(clock: VirtualClock, is_plain: bool, fails_in: str) -> None:
    def hides() -> Iterator[None]:
        try:
            yield
        except LookupError:
            STEPS.append("rolled back")

    def fails() -> None:
        if fails_in == "dependency":
            raise LookupError("no such order")

    async def pay(event: Pay, h: Annotated[None, Depends(hides)], f: Annotated[None, Depends(fails)]) -> None:
        raise LookupError("no such order")

    def plainly(event: Pay, h: Annotated[None, Depends(hides)], f: Annotated[None, Depends(fails)]) -> None:
        raise LookupError("no such order")

    store = await run(clock, plainly if is_plain else pay, retry=Retry(attempts=1))
    assert STEPS == ["rolled back"]
    (letter,) = await store.memory.dead_letters()
    assert letter.record.last_error == "LookupError: no such order"


async def test_dependencies_end_when_the_time_of_a_run_is_up(clock: VirtualClock) -> None:
    async def pay(event: Pay, s: Annotated[str, Depends(guarded)]) -> None:
        await asyncio.sleep(60)

    store = await run(clock, pay, timeout="5s", retry=Retry(attempts=1))
    assert STEPS == ["open", "closed"]
    (letter,) = await store.memory.dead_letters()
    assert "5000 ms" in (letter.record.last_error or "")


async def guarded() -> AsyncIterator[str]:
    STEPS.append("open")
    try:
        yield "session"
    finally:
        STEPS.append("closed")


# --- what is refused, when it is added ----------------------------------------------------------------------


def wants_text(text: str) -> str:
    return text


def wants_wants_text(text: Annotated[str, Depends(wants_text)]) -> str:
    return text


async def awaited() -> int:
    return 1


def wants_event(thing: Pay) -> None: ...


def wants_context(thing: Context) -> None: ...


def wants_default(thing: str = "") -> None: ...


@pytest.mark.parametrize("dependency", [wants_text, wants_wants_text])
async def test_a_dependency_with_a_parameter_that_nothing_can_fill(dependency: Callable[..., Any]) -> None:
    async def pay(event: Pay, n: Annotated[str, Depends(dependency)]) -> None: ...

    with pytest.raises(HandlerSignatureError, match="'wants_text', in which nothing can fill the parameter 'text'"):
        Scheduler("memory://").add_handler(pay)


@pytest.mark.parametrize("other", [wants_context, wants_default])
async def test_two_parameters_of_one_name_that_want_different_things(other: Callable[..., Any]) -> None:
    async def pay(event: Pay, a: Annotated[None, Depends(wants_event)], b: Annotated[None, Depends(other)]) -> None: ...

    with pytest.raises(HandlerSignatureError, match="nothing can fill the parameter 'thing'"):
        Scheduler("memory://").add_handler(pay)


async def test_a_plain_handler_with_a_coroutine_function_as_dependency() -> None:
    def pay(event: Pay, n: Annotated[int, Depends(awaited)]) -> None: ...

    with pytest.raises(HandlerSignatureError, match="'awaited' as a dependency"):
        Scheduler("memory://").add_handler(pay)


async def test_what_is_no_function() -> None:
    async def pay(event: Pay, n: Annotated[int, Depends(3)]) -> None: ...

    with pytest.raises(HandlerSignatureError, match="parameter 'n', whose dependency cannot be read"):
        Scheduler("memory://").add_handler(pay)
