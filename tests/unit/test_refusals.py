"""Calls refused because of the current state: closed, other loops, no store, unknown ids, damaged records."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import pydantic
import pytest

from aiodelay import (
    CancelOutcome,
    ClosedError,
    Conflict,
    DuplicateIdError,
    Every,
    FireOutcome,
    Message,
    OutcomeUnknownError,
    PartlyScheduledError,
    RecordFormatError,
    RescheduleOutcome,
    Scheduled,
    ScheduleOutcome,
    Scheduler,
    StoreBusyError,
    StoreFullError,
    StoreUnavailableError,
    WrongLoopError,
)
from aiodelay.core.record_codec import decode_record, encode_record
from aiodelay.core.values import FORMAT_VERSION, Command, Envelope, Outcome, Record, Refused, SourcePosition
from aiodelay.memory import MemoryStore
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.faults import FaultyStore
from tests.support.clear_errors import PAYLOAD, SECRETS, Pay, RecordingStore, assert_no_secret, call, opened

# --- closed, another loop, another process ----------------------------------------------------------------


@pytest.mark.asyncio
async def test_use_outside_of_the_block(clock: VirtualClock) -> None:
    store = RecordingStore(clock=clock)
    scheduler = Scheduler(store, clock=clock)

    async def uses() -> list[BaseException | object]:
        calls = (
            scheduler.schedule(Pay(), delay="1s"),
            scheduler.schedule_many([Message(Pay(), delay="1s")]),
            scheduler.cancel("a"),
            scheduler.reschedule("a", delay="1s"),
            scheduler.fire("a"),
            scheduler.get("a"),
            scheduler.counts(),
            scheduler.pause(Pay),
            scheduler.redrive(),
            scheduler.journal(),
            scheduler.run_until_idle(),
        )
        return await asyncio.gather(*calls, return_exceptions=True)

    before = await uses()
    async with scheduler:
        with pytest.raises(ClosedError, match="scheduler is open already"):
            await scheduler.__aenter__()
    after = await uses()
    use = "use it inside its 'async with' block"
    assert {repr(type(error)) + str(error) for error in before} == {f"{ClosedError!r}scheduler is not open yet; {use}"}
    assert {repr(type(error)) + str(error) for error in after} == {f"{ClosedError!r}scheduler is closed; {use}"}
    assert store.applied == []


@pytest.mark.asyncio
async def test_opened_twice_at_once(tmp_path: Path) -> None:
    threads, tasks = set(threading.enumerate()), asyncio.all_tasks()
    scheduler = Scheduler(f"sqlite:///{tmp_path}/delay.db")
    first, second = await asyncio.gather(scheduler.__aenter__(), scheduler.__aenter__(), return_exceptions=True)
    assert first is scheduler
    assert str(second) == "scheduler is open already; enter one 'async with' block, and share it inside"
    await scheduler.__aexit__(None, None, None)
    assert set(threading.enumerate()) <= threads
    assert asyncio.all_tasks() == tasks


@pytest.mark.asyncio
async def test_opened_again_after_close(clock: VirtualClock) -> None:
    scheduler = Scheduler(RecordingStore(clock=clock), clock=clock, dispatch=False)
    for outcome in (ScheduleOutcome.STORED, ScheduleOutcome.REPLACED):
        async with scheduler:
            assert (await scheduler.schedule(Pay(), delay="1h", id="a")).outcome is outcome


@pytest.mark.asyncio
async def test_use_from_another_thread() -> None:
    store, caught = RecordingStore(), list[BaseException]()
    async with Scheduler(store, dispatch=False) as scheduler:

        def elsewhere() -> None:
            try:
                asyncio.run(scheduler.schedule(Pay(), delay="1s"))
            except WrongLoopError as error:
                caught.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        await asyncio.to_thread(thread.join)
    assert str(caught[0]) == "scheduler was opened in another event loop or thread; open a separate scheduler here"
    assert store.applied == []


@pytest.mark.asyncio
async def test_use_after_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    store = RecordingStore()
    async with Scheduler(store, dispatch=False) as scheduler:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            with pytest.raises(WrongLoopError, match=r"in another process \(this process was forked\)"):
                await scheduler.schedule(Pay(), delay="1s")
    assert store.applied == []


# --- what the store answers -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_duplicate_id(clock: VirtualClock) -> None:
    async with opened(clock) as (scheduler, _):
        await scheduler.schedule(Pay(), delay="1h", id="order-7")
        with pytest.raises(DuplicateIdError) as caught:
            await scheduler.schedule(Pay(), delay="2h", id="order-7", conflict=Conflict.error())
        with pytest.raises(PartlyScheduledError, match="1 messages stored, 1 refused: message 0: message 'order-7' is"):
            await scheduler.schedule_many([Message(**call(conflict=Conflict.error())), Message(**call(id="b"))])
    assert str(caught.value).startswith("message 'order-7' is already scheduled; to avoid this error")


@pytest.mark.asyncio
async def test_unknown_ids_are_answers(clock: VirtualClock) -> None:
    async with opened(clock) as (scheduler, _):
        assert await scheduler.cancel("nobody") is CancelOutcome.NOT_FOUND
        assert await scheduler.reschedule("nobody", delay="1s") is RescheduleOutcome.NOT_FOUND
        assert await scheduler.fire("nobody") is FireOutcome.NOT_FOUND
        assert await scheduler.get("nobody") is None


@pytest.mark.asyncio
async def test_in_flight_is_an_answer(clock: VirtualClock) -> None:
    scheduler, started, go_on = Scheduler(MemoryStore(clock=clock), clock=clock), asyncio.Event(), asyncio.Event()

    @scheduler.handler
    async def handle(event: Pay) -> None:
        started.set()
        await go_on.wait()

    async with scheduler:
        await scheduler.schedule(Pay(), delay="1s", id="a")
        await started.wait()
        assert await scheduler.reschedule("a", delay="1h") is RescheduleOutcome.TOO_LATE
        assert await scheduler.fire("a") is FireOutcome.IN_FLIGHT
        assert await scheduler.cancel("a") is CancelOutcome.IN_FLIGHT
        go_on.set()


Asked = Literal["schedule", "cancel", "reschedule", "fire"]
DONE: dict[Asked, str] = {
    "schedule": "stored",
    "cancel": "cancelled",
    "reschedule": "rescheduled",
    "fire": "fired",
}


async def ask(scheduler: Scheduler, what: Asked) -> object:
    match what:
        case "schedule":
            return await scheduler.schedule(Pay(), delay="1h", id="order-7")
        case "cancel":
            return await scheduler.cancel("order-7")
        case "reschedule":
            return await scheduler.reschedule("order-7", delay="2h")
        case "fire":
            return await scheduler.fire("order-7")


ASKED: tuple[Asked, ...] = ("schedule", "cancel", "reschedule", "fire")


@pytest.mark.parametrize("what", ASKED)
@pytest.mark.asyncio
async def test_no_answer_from_the_start_is_surely_nothing(
    what: Asked, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    inner = RecordingStore(clock=clock)
    store = FaultyStore(inner)
    async with Scheduler(store, clock=clock, dispatch=False, store_timeout="3s") as scheduler:
        store.inject("unavailable", "apply", times=None)
        with pytest.raises(StoreUnavailableError) as caught:
            await ask(scheduler, what)
    told = f"memory:// is unavailable: injected unavailable (message 'order-7' was not {DONE[what]})"
    assert str(caught.value) == told
    assert 3_000 <= clock.monotonic_ms() < 3_500
    assert inner.applied == []
    assert_no_secret(caught.value, caplog.text)


@pytest.mark.parametrize("what", ASKED)
@pytest.mark.parametrize("fault", ["request_lost", "reply_lost"])
@pytest.mark.asyncio
async def test_lost_on_the_way_is_unknown_until_asked_again(
    what: Asked, fault: Literal["request_lost", "reply_lost"], clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    store = FaultyStore(MemoryStore(clock=clock))
    async with Scheduler(store, clock=clock, dispatch=False, store_timeout="3s") as scheduler:
        if what != "schedule":
            await scheduler.schedule(Pay(), delay="5h", id="order-7")
        store.inject(fault, "apply", times=None)
        with pytest.raises(OutcomeUnknownError) as caught:
            await ask(scheduler, what)
        error = caught.value
        assert str(error).startswith(f"whether message 'order-7' was {DONE[what]} is unknown: injected ")
        assert_no_secret(error, caplog.text)
        with pytest.raises(OutcomeUnknownError):
            await error.retry()
        store.heal()
        answer = await error.retry()
        assert await error.retry() == answer
    if isinstance(answer, Scheduled):
        assert (answer.id, answer.outcome) == ("order-7", ScheduleOutcome.STORED)
    else:
        assert answer in (CancelOutcome.CANCELLED, RescheduleOutcome.RESCHEDULED, FireOutcome.FIRED)


@pytest.mark.asyncio
async def test_asked_again_too_late(clock: VirtualClock) -> None:
    store = FaultyStore(MemoryStore(clock=clock))
    async with Scheduler(store, clock=clock, dispatch=False, store_timeout="3s") as scheduler:
        store.inject("reply_lost", "apply", times=None)
        with pytest.raises(OutcomeUnknownError) as caught:
            await scheduler.schedule(Pay(), delay="1h", id="order-7")
        store.heal()
        await clock.advance("28s")
        with pytest.raises(
            OutcomeUnknownError, match="the call began more than 25 s ago, so the store may have forgotten the command"
        ):
            await caught.value.retry()


@pytest.mark.asyncio
async def test_a_store_that_hangs_is_busy_for_the_next(clock: VirtualClock) -> None:
    store = FaultyStore(MemoryStore(clock=clock))
    async with Scheduler(store, clock=clock, dispatch=False, store_timeout="3s") as scheduler:
        store.inject("hang", "apply")
        first = asyncio.ensure_future(scheduler.schedule(Pay(), delay="1h", id="first"))
        await clock.advance("1s")
        with pytest.raises(StoreBusyError) as caught:
            await scheduler.schedule(Pay(), delay="1h", id="order-7")
        with pytest.raises(OutcomeUnknownError, match="whether message 'first' was stored is unknown"):
            await first
        store.heal()
        assert await scheduler.get("order-7") is None
    assert caught.value.waited_ms == 3_000
    assert "message 'order-7' was not sent: the store did not take it within 3000 ms (" in str(caught.value)
    assert "raise store_timeout or schedule less at once" in str(caught.value)
    assert_no_secret(caught.value)


@pytest.mark.asyncio
async def test_full_store(clock: VirtualClock) -> None:
    class FullStore(MemoryStore):
        async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> list[Outcome]:
            return [Refused("full", "database or disk is full")] * len(commands)

    async with Scheduler(FullStore(clock=clock), clock=clock, dispatch=False) as scheduler:
        with pytest.raises(StoreFullError) as caught:
            await scheduler.schedule(Pay(), delay="1h", id="order-7")
    assert str(caught.value) == "memory:// is full: database or disk is full (message 'order-7' was not stored)"


@pytest.mark.asyncio
async def test_store_that_raises_tells_no_secret(clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    class RaisingStore(MemoryStore):
        async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> list[Outcome]:
            raise RuntimeError("no such table")

    caplog.set_level(logging.DEBUG)
    async with Scheduler(RaisingStore(clock=clock), clock=clock, dispatch=False, store_timeout="1s") as scheduler:
        with pytest.raises(OutcomeUnknownError, match="unknown: RuntimeError;") as caught:
            await scheduler.schedule(Pay(), delay="1h", headers=call()["headers"], key=call()["key"])
    assert_no_secret(caught.value, caplog.text)


@dataclasses.dataclass
class Beat:
    n: int = 0


async def beat(event: Beat) -> None: ...


@pytest.mark.asyncio
async def test_a_series_that_cannot_be_armed_on_opening_leaves_nothing_open(clock: VirtualClock) -> None:
    store = FaultyStore(MemoryStore(clock=clock))
    scheduler = Scheduler(store, clock=clock, store_timeout="3s")
    scheduler.add_handler(beat, every=Every("1m"))
    store.inject("unavailable", "apply", times=None)
    with pytest.raises(StoreUnavailableError, match="message 'handler:Beat' was not stored"):
        await scheduler.__aenter__()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    with pytest.raises(ClosedError):
        await scheduler.cancel("a")
    store.heal()
    async with scheduler:
        assert await scheduler.get("handler:Beat") is not None


@pytest.mark.asyncio
async def test_a_series_added_while_the_store_is_away_is_armed_later_and_harms_nobody(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    store, handled = FaultyStore(MemoryStore(clock=clock)), list[Pay]()
    async with Scheduler(store, clock=clock, store_timeout="1s") as scheduler:

        @scheduler.handler
        async def pay(event: Pay) -> None:
            handled.append(event)

        await scheduler.schedule(Pay(), delay="5s")
        store.inject("unavailable", "apply", times=None)
        scheduler.add_handler(beat, every=Every("1m"))
        await clock.advance("10s")
        assert len(handled) == 1
        assert await scheduler.get("handler:Beat") is None
        assert "the series of handler Beat is not scheduled yet: memory:// is unavailable" in caplog.text
        store.heal()
        await clock.advance("3s")
        assert await scheduler.get("handler:Beat") is not None


@pytest.mark.asyncio
async def test_a_series_that_is_still_not_armed_does_not_hold_up_the_end(clock: VirtualClock) -> None:
    store = FaultyStore(MemoryStore(clock=clock))
    async with Scheduler(store, clock=clock, store_timeout="1s") as scheduler:
        store.inject("unavailable", "apply", times=None)
        scheduler.add_handler(beat, every=Every("1m"))
        await clock.advance("10s")
        ends = clock.monotonic_ms()
    assert clock.monotonic_ms() - ends <= 3_000
    assert asyncio.all_tasks() == {asyncio.current_task()}


# --- what cannot be read ----------------------------------------------------------------------------------


class Strict(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    kind: Literal["a", "b"] = "a"
    number: int = 0


@dataclasses.dataclass
class Checked:
    card: str = ""

    def __post_init__(self) -> None:
        if self.card:
            raise ValueError(f"no such card: {self.card}")


@dataclasses.dataclass
class Exploding:
    card: str = ""

    def __post_init__(self) -> None:
        if self.card:
            raise KeyError(self.card)


class Model(pydantic.BaseModel):
    number: int = 0


UNREADABLE: dict[str, tuple[type, bytes, str]] = {
    "no JSON": (Strict, PAYLOAD.encode(), "DecodeError: JSON is malformed: invalid character (byte 0)"),
    "no UTF-8": (Strict, b"\xff\xfe", "DecodeError: JSON is malformed: invalid character (byte 0)"),
    "empty": (Strict, b"", "DecodeError: Input data was truncated"),
    "wrong type": (Strict, b'{"type":"Strict","number":"%s"}', "Expected `int`, got `str` - at `$.number`"),
    "not in enum": (Strict, b'{"type":"Strict","kind":"%s"}', "ValidationError: Invalid enum value - at `$.kind`"),
    "wrong tag": (Strict, b'{"type":"%s"}', "ValidationError: Invalid value - at `$.type`"),
    "check of the type": (Checked, b'{"card":"%s"}', "ValueError"),
    "bug of the type": (Exploding, b'{"card":"%s"}', "KeyError"),
    "model": (Model, b'{"number":"%s"}', "ValidationError"),
}


@pytest.mark.parametrize(("type_", "payload", "text"), UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.asyncio
async def test_unreadable_payload_is_a_dead_letter_that_tells_no_value(
    type_: type, payload: bytes, text: str, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    scheduler, handled = Scheduler(MemoryStore(clock=clock), clock=clock), list[object]()

    async def handle(event: object) -> None:
        handled.append(event)

    handle.__annotations__["event"] = type_
    scheduler.add_handler(handle)
    async with scheduler:
        to = f"handler:{type_.__name__}"
        await scheduler.schedule(payload.replace(b"%s", PAYLOAD.encode()), to=to, delay="1s", id="bad")
        for n in range(3):
            await scheduler.schedule(type_(), delay="1s", id=f"good-{n}")
        await scheduler.run_until_idle()
        (letter,) = [letter async for letter in scheduler.dead_letters()]
    assert handled == [type_()] * 3
    assert (letter.record.id, letter.reason, letter.record.attempt) == ("bad", "undecodable", 0)
    assert letter.record.last_error is not None
    assert text in letter.record.last_error
    for told in (letter.record.last_error, letter.record.first_error or "", caplog.text):
        assert not any(secret in told for secret in SECRETS)
    assert f"message bad cannot be read: {letter.record.last_error}" in caplog.text


WRITTEN = encode_record(Record(Envelope("a", "Pay", payload=PAYLOAD.encode()), 1, 2, bytes(8)), 0)


@pytest.mark.parametrize("size", range(len(WRITTEN)))
def test_record_cut_short(size: int) -> None:
    with pytest.raises(RecordFormatError, match=r"stored record cannot be read: .*(bytes|damaged)") as caught:
        decode_record(WRITTEN[:size], message_id="a", lane=["Pay"].__getitem__)
    assert_no_secret(caught.value)


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 255])
def test_record_of_a_newer_format(version: int) -> None:
    with pytest.raises(RecordFormatError, match=f"cannot be read: format {version} is .*{FORMAT_VERSION}"):
        decode_record(bytes([version]) + WRITTEN[1:], message_id="a", lane=["Pay"].__getitem__)
