"""Handlers: every form of function and event, their names, and adding and removing them at run time."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import msgspec
import pydantic
import pytest

from aiodelay import CodecError, Context, Every, Limit, Retry, Scheduler, event
from aiodelay.core.values import State
from aiodelay.testing import VirtualClock, assert_delivered, assert_scheduled

pytestmark = pytest.mark.asyncio


@dataclass
class Order:
    number: int = 0


class Parcel(msgspec.Struct):
    weight: float


class Letter(pydantic.BaseModel):
    lines: list[str]


@event("payment.check", aliases=("CheckPayment", "payment.checked"))
@dataclass
class Check:
    number: int


Note: TypeAlias = Callable[[object], None]
Encoding: TypeAlias = Literal["json", "msgpack"]


# --- the function -----------------------------------------------------------------------------------------


class Shop:
    """Something that handlers belong to."""

    def __init__(self, note: Note) -> None:
        self._note = note

    async def bound(self, order: Order) -> None:
        self._note(order)

    def plain(self, order: Order) -> None:
        self._note(order)

    async def __call__(self, order: Order) -> None:
        self._note(order)


class PlainCall(Shop):
    def __call__(self, order: Order) -> None:  # type: ignore[override]
        self._note(order)


async def with_a_note(note: Note, order: Order, *, times: int = 1) -> None:
    for _ in range(times):
        note(order)


def plain_with_a_note(order: Order, *, note: Note) -> None:
    note(order)


def decorated(function: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(function)
    async def decorated(*args: object, **kwargs: object) -> None:
        await function(*args, **kwargs)

    return decorated


def by_decorator(scheduler: Scheduler, note: Note) -> None:
    @scheduler.handler
    async def handle(order: Order) -> None:
        note(order)


def by_called_decorator(scheduler: Scheduler, note: Note) -> None:
    @scheduler.handler()
    def handle(order: Order) -> None:
        note(order)


def by_decorator_with_options(scheduler: Scheduler, note: Note) -> None:
    @scheduler.handler(concurrency=1, timeout="1m", retry=Retry(attempts=2))
    async def handle(order: Order) -> None:
        note(order)


def added(make: Callable[[Note], Callable[..., Any]]) -> Callable[[Scheduler, Note], None]:
    return lambda scheduler, note: scheduler.add_handler(make(note))


FORMS: dict[str, Callable[[Scheduler, Note], None]] = {
    "decorator": by_decorator,
    "called decorator, plain function": by_called_decorator,
    "decorator with options": by_decorator_with_options,
    "bound method": added(lambda note: Shop(note).bound),
    "plain bound method": added(lambda note: Shop(note).plain),
    "object": added(Shop),
    "object with a plain call": added(PlainCall),
    "partial": added(lambda note: functools.partial(with_a_note, note)),
    "partial with keywords": added(lambda note: functools.partial(with_a_note, note, times=1)),
    "partial of a plain function": added(lambda note: functools.partial(plain_with_a_note, note=note)),
    "partial of an object": added(lambda note: functools.partial(Shop(note))),
    "decorated function": added(lambda note: decorated(Shop(note).bound)),
}


@pytest.mark.parametrize("register", FORMS.values(), ids=FORMS)
async def test_every_form_of_function_is_served(
    scheduler: Scheduler, clock: VirtualClock, register: Callable[[Scheduler, Note], None]
) -> None:
    handled: list[object] = []
    register(scheduler, handled.append)
    async with scheduler:
        await scheduler.schedule(Order(7), delay="1s")
        await clock.advance("2s")
        assert await scheduler.counts() == {}, "it is settled"
    assert handled == [Order(7)]


async def test_a_decorated_function_stays_what_it_was(scheduler: Scheduler) -> None:
    async def handle(order: Order) -> int:
        return order.number + 1

    assert scheduler.handler(handle) is handle  # type: ignore[type-var]
    assert await handle(Order(7)) == 8


async def test_a_plain_function_runs_in_a_thread_and_a_coroutine_on_the_loop(
    scheduler: Scheduler, clock: VirtualClock
) -> None:
    ran_in: dict[str, threading.Thread] = {}

    @scheduler.handler
    def plain(order: Order) -> None:
        ran_in["plain"] = threading.current_thread()

    @scheduler.handler
    async def coroutine(parcel: Parcel) -> None:
        ran_in["coroutine"] = threading.current_thread()

    async with scheduler:
        await scheduler.schedule(Order(), delay="1s")
        await scheduler.schedule(Parcel(1.5), delay="1s")
        await clock.advance("2s")
    assert ran_in["coroutine"] is threading.current_thread()
    assert ran_in["plain"].name.startswith("aiodelay Order")


# --- the event --------------------------------------------------------------------------------------------


async def of_dataclass(given: Order) -> None: ...
async def of_struct(given: Parcel) -> None: ...
async def of_model(given: Letter) -> None: ...
async def of_bytes(given: bytes) -> None: ...


EVENTS = {
    "dataclass": (of_dataclass, Order(7), None),
    "struct": (of_struct, Parcel(1.5), None),
    "model": (of_model, Letter(lines=["a", "b"]), None),
    "bytes": (of_bytes, b"\x00\xff", "raw"),
}


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize(("function", "given", "name"), EVENTS.values(), ids=EVENTS)
async def test_s8_every_kind_of_event_arrives_as_it_was_given(
    clock: VirtualClock, function: Callable[..., Awaitable[None]], given: object, name: str | None, encoding: Encoding
) -> None:
    handled: list[object] = []

    @functools.wraps(function)
    async def handle(given: object) -> None:
        handled.append(given)

    async with Scheduler("memory://", clock=clock, encoding=encoding) as scheduler:
        scheduler.add_handler(handle, name=name)
        await scheduler.schedule(given, delay="1s", to=None if name is None else f"handler:{name}")
        await clock.advance("2s")
    assert handled == [given]
    assert type(handled[0]) is type(given)


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
async def test_what_was_written_in_the_other_encoding_is_read(clock: VirtualClock, encoding: Encoding) -> None:
    handled: list[Order] = []
    async with Scheduler("memory://", clock=clock, encoding=encoding) as before:
        await before.schedule(Order(7), delay="1m")
        other: Encoding = "json" if encoding == "msgpack" else "msgpack"
        async with Scheduler(before.store, clock=clock, encoding=other) as scheduler:

            @scheduler.handler
            async def handle(order: Order) -> None:
                handled.append(order)

            await scheduler.schedule(Order(8), delay="2m")
            await clock.advance("3m")
    assert handled == [Order(7), Order(8)]


# --- the context ------------------------------------------------------------------------------------------


async def second(order: Order, context: Context) -> Context:
    return context


async def that_may_be_left_out(order: Order, unused: str = "", context: Context | None = None) -> Context | None:
    return context


async def by_another_name(order: Order, told: Context) -> Context:
    return told


async def after_a_default(order: Order, times: int = 3, *, context: Context) -> Context:
    assert times == 3
    return context


async def before_variadic(order: Order, context: Context, *more: object, **others: object) -> Context:
    assert not more
    assert not others
    return context


@pytest.mark.parametrize("function", [second, that_may_be_left_out, by_another_name, after_a_default, before_variadic])
async def test_the_context_goes_where_its_annotation_stands(
    scheduler: Scheduler, clock: VirtualClock, function: Callable[..., Awaitable[Context]]
) -> None:
    contexts: list[Context] = []

    @functools.wraps(function)
    async def handle(*args: object, **kwargs: object) -> None:
        contexts.append(await function(*args, **kwargs))

    scheduler.add_handler(handle)
    async with scheduler:
        await scheduler.schedule(Order(), delay="1s", id="a")
        await clock.advance("2s")
    assert [context.id for context in contexts] == ["a"]


async def test_the_context_tells_of_the_message_and_of_this_attempt(scheduler: Scheduler, clock: VirtualClock) -> None:
    told: list[dict[str, object]] = []
    scheduled_at = clock.now()

    @scheduler.handler(retry=Retry.intervals(["10s"], jitter=0))
    async def handle(order: Order, context: Context) -> None:
        names = ["id", "due", "lateness", "attempt", "headers", "key", "scheduled_at", "delivery_id", "scheduler"]
        told.append({name: getattr(context, name) for name in names})
        if context.attempt == 1:
            raise ConnectionError

    async with scheduler:
        made = await scheduler.schedule(Order(), delay="5s", id="a", key=b"k", headers={"h": b"v"})
        await clock.advance("1m")
    always = {
        "id": "a",
        "due": made.due,
        "headers": {"h": b"v"},
        "key": b"k",
        "scheduled_at": scheduled_at,
        "delivery_id": f"a/{made.revision}/{made.due_ms}",
        "scheduler": scheduler,
    }
    assert told == [
        always | {"attempt": 1, "lateness": timedelta()},
        always | {"attempt": 2, "lateness": timedelta(seconds=10)},
    ]


# --- names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["payment.check", "CheckPayment", "payment.checked"])
async def test_what_was_scheduled_under_a_former_name_reaches_its_handler(
    scheduler: Scheduler, clock: VirtualClock, name: str
) -> None:
    handled: list[Check] = []

    @scheduler.handler
    async def handle(check: Check) -> None:
        handled.append(check)

    async with scheduler:
        await scheduler.schedule(b'{"number":7}', to=f"handler:{name}", delay="1s")
        await clock.advance("2s")
    assert handled == [Check(7)]


async def test_an_event_is_stored_under_its_name_of_now(scheduler: Scheduler) -> None:
    async with scheduler:
        await scheduler.schedule(Check(7), delay="1m", id="a")
        snapshot = await scheduler.get("a")
    assert snapshot is not None
    assert snapshot.record.envelope.lane == "payment.check"


async def test_handlers_of_bytes_are_told_apart_by_name(scheduler: Scheduler, clock: VirtualClock) -> None:
    handled: list[tuple[str, bytes]] = []

    @scheduler.handler(name="left")
    async def left(payload: bytes) -> None:
        handled.append(("left", payload))

    @scheduler.handler(name="right.one")
    async def right(payload: bytes) -> None:
        handled.append(("right", payload))

    async with scheduler:
        await scheduler.schedule(b"1", to="handler:right.one", delay="1s")
        await scheduler.schedule(Order(7), to="handler:left", delay="2s")
        await clock.advance("3s")
    assert handled == [("right", b"1"), ("left", b'{"number":7}')]


# --- coming and going while it runs -----------------------------------------------------------------------


async def test_a_handler_added_while_open_gets_what_has_waited(scheduler: Scheduler, clock: VirtualClock) -> None:
    handled: list[Order] = []
    async with scheduler:
        await scheduler.schedule(Order(1), delay="1s")
        await clock.advance("1m")

        @scheduler.handler
        async def handle(order: Order) -> None:
            handled.append(order)

        await clock.advance()
        assert handled == [Order(1)]


class Counter:
    """A handler that takes its time, and notes who began, ended and was cut off."""

    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s
        self.began: list[tuple[int, int]] = []
        self.ended: list[int] = []
        self.cut_off: list[int] = []

    async def __call__(self, order: Order, context: Context) -> None:
        self.began.append((order.number, context.attempt))
        try:
            await asyncio.sleep(self._takes_s)
        except asyncio.CancelledError:
            self.cut_off.append(order.number)
            raise
        self.ended.append(order.number)


async def test_removing_a_handler_settles_what_is_in_flight_and_keeps_the_rest_for_the_next(
    scheduler: Scheduler, clock: VirtualClock
) -> None:
    first, second = Counter(5), Counter(0)
    scheduler.add_handler(first, concurrency=2)
    async with scheduler:
        for number in range(4):
            await scheduler.schedule(Order(number), delay="1s")
        await asyncio.sleep(2)
        assert first.began == [(0, 1), (1, 1)]
        await scheduler.remove_handler(Order)
        assert sorted(first.ended) == [0, 1], "remove_handler returns when they have settled"
        await scheduler.schedule(Order(4), delay="1s")
        await clock.advance("1h")
        assert len(first.began) == 2
        assert len(assert_scheduled(scheduler, Order)) == 3, "what came due waits in the store"
        scheduler.add_handler(second)
        await clock.advance()
        assert await scheduler.counts() == {}
    assert second.began == [(2, 1), (3, 1), (4, 1)]


async def test_removing_a_handler_gives_back_what_does_not_end_within_the_drain_time(clock: VirtualClock) -> None:
    slow, quick = Counter(1000), Counter(0)
    async with Scheduler("memory://", clock=clock, drain="5s") as scheduler:
        scheduler.add_handler(slow)
        await scheduler.schedule(Order(7), delay="1s", id="a")
        await asyncio.sleep(2)
        begun = clock.now()
        await scheduler.remove_handler("Order")
        assert clock.now() - begun == timedelta(seconds=5)
        assert (slow.cut_off, slow.ended) == ([7], [])
        snapshot = await scheduler.get("a")
        assert snapshot is not None
        assert (snapshot.state, snapshot.record.attempt) == (State.OVERDUE, 0)
        scheduler.add_handler(quick)
        await clock.advance("1s")
    assert quick.began == [(7, 1)], "to be cut off costs no attempt"


async def test_a_handler_that_was_removed_and_added_again_while_its_last_run_goes_on(
    scheduler: Scheduler, clock: VirtualClock
) -> None:
    old, new = Counter(10), Counter(0)
    scheduler.add_handler(old)
    async with scheduler:
        await scheduler.schedule(Order(1), delay="1s")
        await asyncio.sleep(2)
        removing = asyncio.create_task(scheduler.remove_handler(Order))
        await asyncio.sleep(1)
        scheduler.add_handler(new)
        await scheduler.schedule(Order(2), delay="1s")
        await asyncio.sleep(2)
        assert new.ended == [2], "the new one does not wait for the old one"
        await removing
    assert (old.ended, new.began) == ([1], [(2, 1)])


async def test_a_removed_handler_is_not_served_at_the_next_opening(scheduler: Scheduler, clock: VirtualClock) -> None:
    scheduler.add_handler(of_dataclass)
    scheduler.add_handler(of_struct)
    await scheduler.remove_handler(Order)
    async with scheduler:
        await scheduler.schedule(Order(), delay="1s")
        await scheduler.schedule(Parcel(1), delay="1s")
        await clock.advance("1m")
        assert set(await scheduler.counts()) == {"Order"}
    assert_delivered(scheduler, Order, times=0)
    assert_delivered(scheduler, Parcel, times=1)


async def test_the_series_of_a_removed_handler_waits_for_it(scheduler: Scheduler, clock: VirtualClock) -> None:
    handled: list[Order] = []

    async def handle(order: Order) -> None:
        handled.append(order)

    scheduler.add_handler(handle, every=Every("10s"))
    async with scheduler:
        await clock.advance("25s")
        await scheduler.remove_handler(Order)
        await clock.advance("1h")
        assert len(handled) == 2
        scheduler.add_handler(handle, every=Every("10s"))
        await clock.advance("11s")
    assert len(handled) == 4, "the occurrences that were missed, as one, and the next"


@dataclass
class Unwritable:
    number: float = float("nan")


async def of_unwritable(given: Unwritable) -> None: ...


async def test_a_series_whose_event_cannot_be_written_is_refused_on_opening(scheduler: Scheduler) -> None:
    scheduler.add_handler(of_unwritable, every=Every("10s"))
    with pytest.raises(CodecError, match="of message 'handler:Unwritable' is an Unwritable that holds a float"):
        await scheduler.__aenter__()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_series_whose_event_cannot_be_written_is_told_while_open_and_harms_nobody(
    scheduler: Scheduler, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    counter = Counter(0)
    scheduler.add_handler(counter)
    async with scheduler:
        scheduler.add_handler(of_unwritable, every=Every("10s"))
        await scheduler.schedule(Order(1), delay="1s")
        await clock.advance("1m")
    assert counter.ended == [1]
    assert "the series of handler Unwritable cannot be scheduled" in caplog.text


async def test_concurrency_may_change_while_it_runs(scheduler: Scheduler, clock: VirtualClock) -> None:
    counter = Counter(10)
    scheduler.add_handler(counter, concurrency=1)
    async with scheduler:
        for number in range(9):
            await scheduler.schedule(Order(number), delay="1s")
        await asyncio.sleep(2)
        assert len(counter.began) == 1
        scheduler.set_concurrency(Order, 5)
        await asyncio.sleep(1)
        assert len(counter.began) == 5
        scheduler.set_concurrency("Order", 2)
        await asyncio.sleep(8.5)  # the first has ended: four are under way, more than may be now
        assert (len(counter.began), len(counter.ended)) == (5, 1)
        await asyncio.sleep(2)  # the other four as well
        assert (len(counter.began), len(counter.ended)) == (7, 5)
        await clock.advance("1m")
    assert sorted(counter.ended) == list(range(9))


async def test_concurrency_may_change_while_the_limits_of_a_new_handler_are_stored(scheduler: Scheduler) -> None:
    counter = Counter(10)
    async with scheduler:
        scheduler.add_handler(counter, concurrency=1, limit=Limit(concurrency=9))
        scheduler.set_concurrency(Order, 3)
        for number in range(5):
            await scheduler.schedule(Order(number), delay="1s")
        await asyncio.sleep(2)
        assert len(counter.began) == 3


async def test_concurrency_set_while_closed_holds_from_the_next_opening_on(scheduler: Scheduler) -> None:
    counter = Counter(10)
    scheduler.add_handler(counter, concurrency=1)
    scheduler.set_concurrency(Order, 3)
    async with scheduler:
        for number in range(5):
            await scheduler.schedule(Order(number), delay="1s")
        await asyncio.sleep(2)
        assert len(counter.began) == 3
