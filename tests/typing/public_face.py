"""The public API for type checkers. mypy and basedpyright read this file; nothing in it runs.

Each `type: ignore` names a mistake that must be told; strict mode reports those that are not needed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, assert_type

from fastapi import FastAPI
from litestar import Litestar
from starlette.applications import Starlette

from aiodelay import (
    Alarm,
    CancelOutcome,
    Conflict,
    Context,
    Cron,
    DeadLetter,
    Depends,
    Duration,
    Every,
    FireOutcome,
    InputError,
    Late,
    Later,
    Message,
    OutcomeUnknownError,
    PartlyScheduledError,
    Received,
    Reject,
    Rejected,
    RescheduleOutcome,
    Retry,
    Scheduled,
    ScheduleOutcome,
    Scheduler,
    Snapshot,
    State,
    event,
)
from aiodelay.backends.stdout import StdoutSink
from aiodelay.blocking import BlockingScheduler
from aiodelay.contrib.litestar import AiodelayPlugin
from aiodelay.core.event_codecs import Codec, JsonCodec, MessagePackCodec
from aiodelay.core.values import JournalEntry, LaneCounts, LoadBucket, Outcome
from aiodelay.memory import MemoryStore
from aiodelay.ports import DeadLetters, Inspectable, Journal, Pauses, Sink, Store
from aiodelay.reactive import Publisher, Subscription
from aiodelay.sqlite import SqliteStore

NOON = datetime(2031, 1, 1, 12, tzinfo=UTC)
scheduler = Scheduler("memory://", sinks=["stdout:", StdoutSink()], retry=Retry(attempts=3))


@event("pay", aliases=("payment",))
@dataclass
class Pay:
    id: int


assert_type(Pay(1), Pay)
assert_type(Pay(1).id, int)


# --- schedule ---------------------------------------------------------------------------------------------


async def schedules(key: bytes, headers: dict[str, bytes]) -> None:
    scheduled = await scheduler.schedule(Pay(1), delay="5s")
    assert_type(scheduled, Scheduled)
    assert_type(scheduled.id, str)
    assert_type(scheduled.due, datetime)
    assert_type(scheduled.due_ms, int)
    assert_type(scheduled.outcome, ScheduleOutcome)
    await scheduler.schedule(b"x", to="stdout:x", at=NOON, id="a", key=key, headers=headers)
    await scheduler.schedule(Pay(1), delay=timedelta(hours=3), conflict=Conflict.newer(7), late=Late.drop("15m"))
    await scheduler.schedule(Pay(1), every=Every("10m"))
    await scheduler.schedule(Pay(1), every=Cron("0 9 * * mon", tz="Europe/Paris", overlap="skip"))

    await scheduler.schedule(Pay(1), delay=5)  # type: ignore[arg-type]
    await scheduler.schedule(Pay(1), at="noon")  # type: ignore[arg-type]
    await scheduler.schedule(Pay(1), every="10m")  # type: ignore[arg-type]
    await scheduler.schedule(Pay(1), delay="5s", id=7)  # type: ignore[arg-type]
    await scheduler.schedule(Pay(1), delay="5s", key="text")  # type: ignore[arg-type]
    await scheduler.schedule(Pay(1), delay="5s", headers={"x": "text"})  # type: ignore[dict-item]
    await scheduler.schedule(Pay(1), delay="5s", headers=None)  # type: ignore[arg-type]
    await scheduler.schedule(Pay(1), delay="5s", conflict="keep")  # type: ignore[arg-type]
    await scheduler.schedule(Pay(1), delay="5s", late=timedelta(1))  # type: ignore[arg-type]
    await scheduler.schedule(Pay(1), "5s")  # type: ignore[call-arg, arg-type]
    await scheduler.schedule(event=Pay(1), delay="5s")  # type: ignore[call-arg]
    await scheduler.schedule(Pay(1), after="5s")  # type: ignore[call-arg]


async def schedules_many(some: list[Message], every: AsyncIterator[Message]) -> None:
    assert_type(await scheduler.schedule_many(some), int)
    assert_type(await scheduler.schedule_many(every), int)
    await scheduler.schedule_many(Message(Pay(n), delay="5s") for n in range(9))
    await scheduler.schedule_many(tuple(some), progress=print)
    await scheduler.schedule_many([Message(b"x", at=NOON, to="stdout:x", id="a", headers={"x": b""})])

    await scheduler.schedule_many([Pay(1)])  # type: ignore[list-item]
    await scheduler.schedule_many(Message(Pay(1), delay="5s"))  # type: ignore[arg-type]
    await scheduler.schedule_many(some, progress=lambda: None)  # type: ignore[arg-type, misc]
    Message(Pay(1), delay=5)  # type: ignore[arg-type]
    Message(delay="5s")  # type: ignore[call-arg]


async def other_commands() -> None:
    assert_type(await scheduler.cancel("a"), CancelOutcome)
    assert_type(await scheduler.reschedule("a", at=NOON), RescheduleOutcome)
    assert_type(await scheduler.fire("a"), FireOutcome)
    await scheduler.cancel(7)  # type: ignore[arg-type]
    await scheduler.reschedule("a", "5s")  # type: ignore[call-arg, arg-type]


async def errors() -> None:
    try:
        await scheduler.schedule(Pay(1), delay="5s")
    except InputError as error:
        assert_type((error.field, error.value, error.allowed), tuple[str, str, str])
        assert_type(error.message_id, str | None)
    except OutcomeUnknownError as error:
        assert_type(await error.retry(), object)
    except PartlyScheduledError as error:
        assert_type(error.stored, int)
        assert_type(error.rejected, Sequence[Rejected])


# --- handlers ---------------------------------------------------------------------------------------------


@scheduler.handler
async def bare(event: Pay) -> None:
    """Both forms keep the function as it is."""


@scheduler.handler(concurrency=16, timeout="30s", retry=Retry.never(), every=Every("1m"))
async def with_options(event: Pay, context: Context) -> Later | Reject | None:
    assert_type(context.id, str)
    assert_type(context.delivery_id, str)
    assert_type(context.due, datetime)
    assert_type(context.lateness, timedelta)
    assert_type(context.attempt, int)
    assert_type(context.key, bytes | None)
    assert_type(context.headers, Mapping[str, bytes])
    assert_type(context.scheduled_at, datetime)
    assert_type(context.scheduler, Scheduler)
    return Later("5s") if context.attempt < 3 else Reject("too often")


@scheduler.handler()
def plain(event: Pay, *, context: Context, times: int = 3) -> Reject | None:
    return None if times else Reject("never")


@scheduler.handler(name="raw")
async def raw(event: bytes) -> None: ...


class Service:
    @staticmethod
    async def handle(event: Pay) -> None: ...

    async def method(self, event: Pay) -> Later:
        return Later(timedelta(seconds=5))


async def functions_stay_callable(context: Context) -> None:
    assert_type(await bare(Pay(1)), None)
    assert_type(await with_options(Pay(1), context), Later | Reject | None)
    assert_type(plain(Pay(1), context=context), Reject | None)
    scheduler.add_handler(Service.handle, concurrency=4)
    scheduler.add_handler(Service().method, timeout=timedelta(seconds=5))
    await scheduler.remove_handler(Pay)
    await scheduler.remove_handler("raw")
    scheduler.set_concurrency(Pay, 4)

    await bare("text")  # type: ignore[arg-type]
    plain(Pay(1))  # type: ignore[call-arg]


@scheduler.handler  # type: ignore[type-var]
async def returns_text(event: Pay) -> str:
    return "done"


@scheduler.handler(concurrency=4)  # type: ignore[type-var]
def returns_number(event: Pay) -> int:
    return 1


@scheduler.handler(timeout=5)  # type: ignore[call-overload, untyped-decorator]
async def bare_number(event: Pay) -> None: ...


@scheduler.handler("pay")  # type: ignore[call-overload, untyped-decorator]
async def named_by_position(event: Pay) -> None: ...


# --- looking, and settings --------------------------------------------------------------------------------


async def looks() -> None:
    async with scheduler as opened:
        assert_type(opened, Scheduler)
    assert_type(await scheduler.get("a"), Snapshot | None)
    async for snapshot in scheduler.pending(Pay, since=NOON, limit=5):
        assert_type(snapshot, Snapshot)
        assert_type(snapshot.state, State)
    async for letter in scheduler.dead_letters("pay"):
        assert_type(letter, DeadLetter)
        assert_type(await scheduler.redrive(letter, letter.key), Sequence[Outcome])
        assert_type(await scheduler.purge(letter), int)
    assert_type(await scheduler.counts(), Mapping[str, LaneCounts])
    assert_type(await scheduler.load(bucket="1h", buckets=24), Sequence[LoadBucket])
    assert_type(await scheduler.pause(Pay), bool)
    assert_type(await scheduler.resume("stdout:x"), bool)
    assert_type(await scheduler.paused(), Sequence[str])
    assert_type(await scheduler.journal("a"), Sequence[JournalEntry])
    assert_type(await scheduler.run_until_idle(), None)
    assert_type(scheduler.overdue_age_ms, int)
    await scheduler.redrive("a")  # type: ignore[arg-type]


def settings(alarm: Callable[[Alarm], object], store: Store) -> None:
    Scheduler(
        store, on_alarm=alarm, store_timeout="10s", open_timeout=None, drain=timedelta(seconds=30), encoding="msgpack"
    )
    Scheduler(MemoryStore(), lanes={"pay"}, allowed_targets=["stdout:*"], max_payload=1024, dispatch=False)
    Scheduler(5)  # type: ignore[arg-type]
    Scheduler(store, encoding="xml")  # type: ignore[arg-type]
    Scheduler(store, sinks=[5])  # type: ignore[list-item]
    Scheduler(store, "shop")  # type: ignore[call-arg]
    Retry.intervals(["5s", timedelta(minutes=1)], by_type={ValueError: Retry.never()})
    Retry(first=5)  # type: ignore[arg-type]
    Every("1m", missed="later")  # type: ignore[arg-type]
    Conflict.newer("7")  # type: ignore[arg-type]
    Late.drop(after=5)  # type: ignore[arg-type]
    event("a", aliases="b")  # type: ignore[arg-type]


def durations(duration: Duration) -> timedelta | str:
    return duration


# --- what backends are ------------------------------------------------------------------------------------


def ports(memory: MemoryStore, sqlite: SqliteStore) -> None:
    stores: list[Store] = [memory, sqlite]
    inspectable: list[Inspectable] = [memory, sqlite]
    dead_letters: list[DeadLetters] = [memory, sqlite]
    holds: list[Pauses] = [memory, sqlite]
    journals: list[Journal] = [memory, sqlite]
    sink: Sink = StdoutSink()
    codecs: list[Codec] = [JsonCodec(), MessagePackCodec()]
    wrong: Store = sink  # type: ignore[assignment]
    del stores, inspectable, dead_letters, holds, journals, codecs, wrong


HANDLERS: list[Callable[..., Awaitable[Any]]] = [bare, with_options, raw]


# --- messages without a handler, dependencies, middleware --------------------------------------------------


def orders() -> list[int]:
    return [1]


@scheduler.handler
async def with_orders(event: Pay, known: Annotated[list[int], Depends(orders)]) -> None:
    assert_type(known, list[int])


@scheduler.middleware("handle")
async def around(context: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:  # noqa: ANN401
    return await call_next(context)


@scheduler.middleware("schedule")
async def before(message: Message, call_next: Callable[[Message], Awaitable[Scheduled]]) -> Scheduled:
    return await call_next(message)


scheduler.middleware("schedule")(around)  # type: ignore[type-var]


class Takes:
    def on_subscribe(self, subscription: Subscription) -> None:
        subscription.request(1)

    def on_next(self, item: Received[Pay], /) -> None:
        assert_type(item.settle(Later("5m")), bool)

    def on_error(self, error: Exception) -> None: ...

    def on_complete(self) -> None: ...


async def take() -> None:
    publisher: Publisher[Received[Pay]] = scheduler.messages(Pay)
    publisher.subscribe(Takes())
    scheduler.messages("raw").subscribe(Takes())  # type: ignore[arg-type]
    async for message in scheduler.messages(Pay, concurrency=3, retry=Retry(attempts=3), source="redis-list:a"):
        with message as pay:
            assert_type(pay, Pay)
    async for raw in scheduler.messages("raw"):
        assert_type(raw.event, bytes)


# --- frameworks -------------------------------------------------------------------------------------------


@asynccontextmanager
async def own(app: FastAPI) -> AsyncIterator[dict[str, int]]:
    yield {"port": 25}


def frameworks() -> None:
    FastAPI(lifespan=scheduler.lifespan())
    FastAPI(lifespan=scheduler.lifespan(own))
    Starlette(lifespan=scheduler.lifespan())
    Litestar(lifespan=[scheduler.lifespan()])
    Litestar(plugins=[AiodelayPlugin(scheduler, name="delays")])
    assert_type(scheduler.lifespan(own), Callable[[FastAPI], AbstractAsyncContextManager[dict[str, int]]])

    Starlette(lifespan=scheduler.lifespan(own))  # type: ignore[arg-type]
    scheduler.lifespan(7)  # type: ignore[call-overload]


# --- without asyncio --------------------------------------------------------------------------------------


def blocking() -> None:
    with BlockingScheduler("sqlite:///a.db", namespace="shop", sinks=["stdout:"]) as delays:
        assert_type(delays, BlockingScheduler)
        assert_type(delays.schedule(Pay(1), delay="5s"), Scheduled)
        assert_type(delays.schedule_many(Message(Pay(n), delay="5s") for n in range(9)), int)
        assert_type(delays.cancel("a"), CancelOutcome)
        assert_type(delays.get("a"), Snapshot | None)
        assert_type(delays.call(lambda scheduler: scheduler.counts()), Mapping[str, LaneCounts])
        delays.schedule(Pay(1), delay=5)  # type: ignore[arg-type]
        delays.call(lambda scheduler: scheduler.namespace)  # type: ignore[arg-type, return-value]
    BlockingScheduler(MemoryStore())  # type: ignore[arg-type]
