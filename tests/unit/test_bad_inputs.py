"""RELIABILITY.md, table (b), and what a hostile caller adds: what messages may not be, and how that is said."""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from typing import Any

import msgspec
import pydantic
import pytest

from aiodelay import (
    CodecError,
    ConfigurationError,
    Conflict,
    Cron,
    DuplicateHandlerError,
    Every,
    HeaderError,
    InputError,
    Late,
    Message,
    MessageIdError,
    PartlyScheduledError,
    PayloadTooLargeError,
    PayloadTypeError,
    ScheduleOutcome,
    Scheduler,
    ScheduleTimeError,
    TargetError,
    TargetNotAllowedError,
    UnknownSinkError,
    UnsupportedByStoreError,
)
from aiodelay.model import Delivery, Demand, Put, Sent
from aiodelay.testing.clock import START, VirtualClock
from tests.support.clear_errors import HEADER, KEY, PAYLOAD, Bad, RecordingStore, assert_clear, assert_no_secret

HORIZON = timedelta(days=3650)
MOST = 262_144


@dataclasses.dataclass
class Pay:
    card: Any = PAYLOAD


class Struct(msgspec.Struct):
    card: Any = PAYLOAD


class Model(pydantic.BaseModel):
    card: str = PAYLOAD

    @pydantic.field_serializer("card")
    def refuse(self, card: str) -> str:
        raise ValueError(f"cannot write {card}")


class Holder(msgspec.Struct):
    model: Model


class Untellable:
    def __repr__(self) -> str:
        raise RuntimeError(PAYLOAD)


class Endless:
    def __repr__(self) -> str:
        return PAYLOAD + "x" * 1_000_000


class Named(enum.StrEnum):
    ORDER = "order-9"


class Bytes(bytes):
    pass


class Broken(tzinfo):
    def utcoffset(self, moment: datetime | None) -> timedelta:
        raise RuntimeError(PAYLOAD)


class ManyHeaders(Mapping[str, bytes]):
    """Says that it is short, and goes on for ever."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        return (f"h{n}" for n in range(1_000_000_000))

    def __getitem__(self, name: str) -> bytes:
        return b"x"


class Sink:
    """Refuses one address, takes all others."""

    name = "sink"
    limits = Demand(10)

    def check(self, address: str) -> None:
        if address == "nowhere":
            raise TargetError("to", "'sink:nowhere'", "addresses that exist")

    async def __aenter__(self) -> Sink:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        return None

    async def send(self, deliveries: list[Delivery]) -> list[Sent]:
        return [Sent()] * len(deliveries)


def circular() -> Pay:
    event = Pay([])
    event.card.append(event)
    return event


def nested(depth: int) -> list[Any]:
    value: list[Any] = [PAYLOAD]
    for _ in range(depth):
        value = [value]
    return value


@asynccontextmanager
async def opened(clock: VirtualClock, **settings: Any) -> AsyncIterator[tuple[Scheduler, RecordingStore]]:
    store = RecordingStore(clock=clock)
    async with Scheduler(store, clock=clock, sinks=[Sink()], dispatch=False, **settings) as scheduler:  # type: ignore[list-item]
        yield scheduler, store


GOOD: dict[str, Any] = {
    "event": Pay(),
    "delay": "1s",
    "id": "order-7",
    "key": KEY.encode(),
    "headers": {"authorization": HEADER.encode()},
}


def call(**changed: Any) -> dict[str, Any]:
    """The arguments of a good call, with these in their places; None leaves one out."""
    return {name: value for name, value in (GOOD | changed).items() if value is not None}


def at(when: object) -> dict[str, Any]:
    return call(at=when, delay=None)


def every(rule: object) -> dict[str, Any]:
    return call(every=rule, delay=None)


def time_(field: str, value: str, allowed: str) -> Bad:
    return Bad(ScheduleTimeError, field, value, allowed)


AWARE, FORMS, ONE = "a timezone-aware datetime", "a timedelta or text such as", "exactly one of them"
TIMES: dict[str, tuple[dict[str, Any], Bad]] = {
    "naive": (at(datetime(2031, 1, 1)), time_("at", "the naive datetime", "must be timezone-aware")),  # noqa: DTZ001
    "at as text": (at("2031-01-01T00:00:00Z"), time_("at", "'2031-01-01", AWARE)),
    "at as date": (at(date(2031, 1, 1)), time_("at", "datetime.date(2031", AWARE)),
    "at as number": (at(1_924_992_000), time_("at", "1924992000", AWARE)),
    "at as object": (at(Pay()), time_("at", "a Pay", AWARE)),
    "at in a broken zone": (at(datetime(2031, 1, 1, tzinfo=Broken())), time_("at", "raises RuntimeError", AWARE)),
    "1 ms too far": (at(START + HORIZON + timedelta(milliseconds=1)), time_("at", "3650d1ms ahead", "3650d ahead")),
    "1 us too far": (at(START + HORIZON + timedelta(microseconds=1)), time_("at", "3650d1ms ahead", "3650d ahead")),
    "year 9999": (at(datetime.max.replace(tzinfo=UTC)), time_("at", "d", "at most 3650d ahead")),
    "year 9999, west": (at(datetime.max.replace(tzinfo=timezone(-timedelta(hours=12)))), time_("at", "d", "3650d")),
    "neither": (call(delay=None), time_("at, delay, every", "neither", ONE)),
    "at and delay": (call(at=START), time_("at, delay, every", "both", ONE)),
    "delay and every": (call(every=Every("1m")), time_("at, delay, every", "several", ONE)),
    "at and every": (call(at=START, delay=None, every=Every("1m")), time_("at, delay, every", "several", ONE)),
    "all three": (call(at=START, every=Every("1m")), time_("at, delay, every", "several", ONE)),
    "-1 ms": (call(delay=timedelta(milliseconds=-1)), time_("delay", "timedelta", "at least 0s")),
    "-1 us": (call(delay=timedelta(microseconds=-1)), time_("delay", "timedelta", "at least 0s")),
    "least timedelta": (call(delay=timedelta.min), time_("delay", "timedelta", "at least 0s")),
    "greatest timedelta": (call(delay=timedelta.max), time_("delay", "timedelta", "at most 3650d")),
    "delay too far": (call(delay=HORIZON + timedelta(microseconds=1)), time_("delay", "timedelta", "at most 3650d")),
    "delay too far, text": (call(delay="3650d1ms"), time_("delay", "'3650d1ms'", "at most 3650d")),
    "int": (call(delay=5), time_("delay", "5", 'timedelta(seconds=5) or "5s"')),
    "-1": (call(delay=-1), time_("delay", "-1", FORMS)),
    "true": (call(delay=True), time_("delay", "True", FORMS)),
    "false": (call(delay=False), time_("delay", "False", FORMS)),
    "NaN": (call(delay=float("nan")), time_("delay", "nan", FORMS)),
    "inf": (call(delay=float("inf")), time_("delay", "inf", FORMS)),
    "-inf": (call(delay=float("-inf")), time_("delay", "-inf", FORMS)),
    "10^5000": (call(delay=10**5000), time_("delay", "an int", FORMS)),
    "object": (call(delay=Pay()), time_("delay", "a Pay", FORMS)),
    "dict": (call(delay={"s": PAYLOAD}), time_("delay", "a dict", FORMS)),
    "bytes": (call(delay=b"5s"), time_("delay", "2 bytes", FORMS)),
    "repr raises": (call(delay=Untellable()), time_("delay", "an Untellable", FORMS)),
    "repr is huge": (call(delay=Endless()), time_("delay", "an Endless", FORMS)),
    "list holding it": (call(delay=[Untellable()]), time_("delay", "a list", FORMS)),
    **{
        repr(text)[:20]: (call(delay=text), time_("delay", "", FORMS))
        for text in (
            *("", " ", "5", "-5s", "+5s", "5 s", " 5s", "5s ", "5s\n", "5S", "1-ms", "ms", "s", "1.s", ".5s", "1,5s", "1e3s"),
            *("nan", "inf", "nans", "5s1h", "5s5s", "٥s", "５s", "5s\x00", "\ud800s", "5\u2028s", "5\u202es", "P", "PT", "P1Y"),
            *("9" * 64 + "s", "9" * 1_000_000 + "s", "1" * 5000),
        )
    },
    "rule as text": (every("10m"), time_("every", "'10m'", "Every('10m')")),
    "rule as number": (every(60), time_("every", "60", "Every('10m')")),
    "rule as class": (every(Every), time_("every", "Every", "Every('10m')")),
    "rule as timedelta": (every(timedelta(minutes=1)), time_("every", "timedelta", "Every('10m')")),
    "cron as text": (every("0 9 * * mon"), time_("every", "'0 9 * * mon'", "Cron(")),
    "grid too far": (every(Every("1d", start=START + 2 * HORIZON)), time_("every", "7300d ahead", "3650d ahead")),
    "leap day too far": (every(Cron("0 0 29 2 mon#1")), time_("every", "ahead", "3650d ahead")),
}  # fmt: skip


TYPES, WRITABLE = "bytes with to=, or an instance of a dataclass", "json can hold"


def codec(value: str) -> Bad:
    return Bad(CodecError, "event", value, WRITABLE)


def payload(event: object, value: str, **more: Any) -> tuple[dict[str, Any], Bad]:
    return call(event=event, **more), Bad(PayloadTypeError, "event", value, TYPES)


PAYLOADS: dict[str, tuple[dict[str, Any], Bad]] = {
    "text": payload(PAYLOAD, "a str"),
    "text, to a sink": payload(PAYLOAD, "a str", to="sink:x"),
    "text, to a handler": payload(PAYLOAD, "a str", to="handler:Pay"),
    "dict": payload({"card": PAYLOAD}, "a dict"),
    "dict, to a sink": payload({"card": PAYLOAD}, "a dict", to="sink:x"),
    "list": payload([PAYLOAD], "a list"),
    "int": payload(4111, "an int"),
    "exception": payload(ValueError(PAYLOAD), "a ValueError"),
    "bytearray": payload(bytearray(PAYLOAD.encode()), "a bytearray", to="sink:x"),
    "memoryview": payload(memoryview(PAYLOAD.encode()), "a memoryview", to="sink:x"),
    "bytes subclass": payload(Bytes(PAYLOAD.encode()), "a Bytes", to="sink:x"),
    "bytes subclass, to a handler": payload(Bytes(PAYLOAD.encode()), "a Bytes", to="handler:Pay"),
    "the class": payload(Pay, "the class Pay"),
    "repr raises": payload(Untellable(), "an Untellable"),
    "a Message": payload(Scheduler, "the class Scheduler"),
    "bytes without to": (call(event=PAYLOAD.encode()), Bad(TargetError, "to", "missing", "bytes name no handler")),
    "bytes too large": (
        call(event=b"x" * (MOST + 1), to="sink:x"),
        Bad(PayloadTooLargeError, "payload", "262145 bytes", "at most 262144 bytes (Scheduler(max_payload=...))"),
    ),
    "event too large": (
        call(event=Pay(PAYLOAD * 40_000)),
        Bad(PayloadTooLargeError, "payload", "360011 bytes", "at most 262144 bytes"),
    ),
    "circular": (call(event=circular()), codec("a Pay that refers to itself")),
    "deep": (call(event=Pay(nested(100_000))), codec("a Pay that refers to itself, or is nested too deeply")),
    "unknown object": (call(event=Pay(object())), codec("a Pay that holds an object")),
    "to a sink": (call(event=Pay(object()), to="sink:x"), codec("a Pay that holds an object")),
    "repr of a part raises": (call(event=Pay(Untellable())), codec("a Pay that holds an Untellable")),
    "repr of a part is huge": (call(event=Struct(Endless())), codec("a Struct that holds an Endless")),
    "lone surrogate": (call(event=Pay(PAYLOAD + "\ud800")), codec("holds text with a lone surrogate")),
    "NaN": (call(event=Pay(float("nan"))), codec("holds a float that is not finite")),
    "inf inside": (call(event=Pay([None, {"a": (1.0, float("-inf"))}])), codec("holds a float that is not finite")),
    "keys of a dict": (call(event=Pay({(1, PAYLOAD): 2})), codec("a Pay that holds a tuple")),
    "function": (call(event=Pay(len)), codec("holds a builtin_function_or_method")),
    "model that raises": (call(event=Model()), codec("holds a Model whose model_dump raises")),
    "model inside": (call(event=Holder(Model())), codec("a Holder that holds a Model whose model_dump raises")),
}


def id_(message_id: object, value: str, allowed: str) -> tuple[dict[str, Any], Bad]:
    return call(id=message_id), Bad(MessageIdError, "id", value, allowed)


SIZE, CONTROL, UTF8 = "1 to 255 bytes of UTF-8", "no control characters or line breaks", "no lone surrogates"
IDS: dict[str, tuple[dict[str, Any], Bad]] = {
    "empty": id_("", "empty", SIZE),
    "256 bytes": id_("a" * 256, "256 bytes long ('aaa", SIZE),
    "129 characters": id_("é" * 129, "258 bytes long", SIZE),
    "10^6 characters": id_("a" * 1_000_000, "1000000 bytes long", SIZE),
    "10^6 NULs": id_("\x00" * 1_000_000, "1000000 bytes long", SIZE),
    "int": id_(7, "an int", "a str"),
    "bool": id_(True, "a bool", "a str"),  # noqa: FBT003
    "bytes": id_(b"order-7", "a bytes", "a str"),
    "object": id_(Untellable(), "an Untellable", "a str"),
    "lone surrogate": id_("order-\ud800", r"'order-\ud800'", UTF8),
    "series form": id_("order~1893456000000", "'order~1893456000000'", "an id that does not end in '~'"),
    "reserved prefix of old": id_("\x00aiodelay/x", r"\x00aiodelay/x", CONTROL),
    **{repr(c): id_(f"a{c}b", "", CONTROL) for c in "\x00\t\n\r\x1b\x7f\x85\x9f\u2028\u2029"},
}


def header(headers: object, field: str, value: str, allowed: str) -> tuple[dict[str, Any], Bad]:
    return call() | {"headers": headers}, Bad(HeaderError, field, value, allowed)


NAMES = "1 to 128 of A-Z a-z 0-9 . _ -"
VALUE = "value of header 'x'"
HEADERS: dict[str, tuple[dict[str, Any], Bad]] = {
    "none": header(None, "headers", "None", "a mapping of str to bytes"),
    "pairs": header([("x", HEADER.encode())], "headers", "a list", "a mapping"),
    "text": header(HEADER, "headers", "a str", "a mapping"),
    "empty list": header([], "headers", "a list", "a mapping"),
    **{
        repr(name)[:20]: header({name: HEADER.encode()}, "header name", "", NAMES)
        for name in ("", " ", "a b", "a:b", "a\r\nb", "a\n", "é", "a\x00", "\ud800", "\u2028", "a" * 129, "a" * 1_000_000, b"x", 5, None)
    },
    "reserved": header({"aiodelay-id": HEADER.encode()}, "header 'aiodelay-id'", "reserved", "names without 'aiodelay-'"),
    "reserved, upper case": header({"AioDelay-x": b""}, "header 'AioDelay-x'", "reserved", "names without 'aiodelay-'"),
    "text value": header({"x": HEADER}, VALUE, "a str", "bytes"),
    "no value": header({"x": None}, VALUE, "None", "bytes"),
    "number": header({"x": 5}, VALUE, "an int", "bytes"),
    "bytearray": header({"x": bytearray(HEADER.encode())}, VALUE, "a bytearray", "bytes"),
    "memoryview": header({"x": memoryview(HEADER.encode())}, VALUE, "a memoryview", "bytes"),
    "65": header({f"h{n}": b"" for n in range(65)}, "headers", "65 of them", "at most 64"),
    "without end": header(ManyHeaders(), "headers", "65 of them", "at most 64"),
    "16 KiB and 1": header({"x": b"x" * 16_384}, "headers", "16385 bytes together", "at most 16384 bytes"),
    "key as text": (call(key=KEY), Bad(HeaderError, "key", "a str", "bytes or None")),
    "key as number": (call(key=0), Bad(HeaderError, "key", "an int", "bytes or None")),
    "key as bytearray": (call(key=bytearray(KEY.encode())), Bad(HeaderError, "key", "a bytearray", "bytes or None")),
    "key too long": (call(key=KEY.encode() * 2000), Bad(HeaderError, "key", "26000 bytes long", "at most 16384 bytes")),
}  # fmt: skip


def to(target: object, value: str, allowed: str, *, field: str = "to") -> tuple[dict[str, Any], Bad]:
    return call(to=target), Bad(TargetError, field, value, allowed)


FORM, HANDLERS = "'<sink>:<address>'", "1 to 128 characters without spaces"
TARGETS: dict[str, tuple[dict[str, Any], Bad]] = {
    **{
        repr(target)[:20]: to(target, "", FORM)
        for target in ("", ":", "sink", "sink:", ":x", "Sink:x", "sink :x", " sink:x", "sïnk:x", "s\nk:x", "1:x", "s" * 65 + ":x", "x" * 1_000_000)
    },
    "int": to(5, "an int", FORM),
    "bytes": to(b"sink:x", "a bytes", FORM),
    "the sink": to(Sink(), "a Sink", FORM),
    **{repr(c): to(f"sink:a{c}b", "", CONTROL) for c in "\x00\r\n\x7f\x85\u2028\u2029"},
    "lone surrogate": to("sink:\ud800", r"\ud800", UTF8),
    "256 bytes": to("sink:" + "x" * 256, "256 bytes of address", "at most 255 bytes"),
    "10^6 bytes": to("sink:" + "x" * 1_000_000, "1000000 bytes of address", "at most 255 bytes"),
    "sink refuses": to("sink:nowhere", "'sink:nowhere'", "addresses that exist"),
    "handler with space": to("handler:a b", "'a b'", HANDLERS, field="handler name in to"),
    "handler with colon": to("handler:a:b", "'a:b'", HANDLERS, field="handler name in to"),
    "handler with brace": to("handler:{a}", "'{a}'", HANDLERS, field="handler name in to"),
    "handler too long": to("handler:" + "a" * 129, "aaa", HANDLERS, field="handler name in to"),
    "unknown sink": (call(to="kafka:x"), Bad(UnknownSinkError, "sink in to", "'kafka'", "handler:, sink: (name others")),
}  # fmt: skip


def conflict(value: object, shown: str) -> tuple[dict[str, Any], Bad]:
    return call() | {"conflict": value}, Bad(ConfigurationError, "conflict", shown, "Conflict.replace(), .keep()")


def late(value: object, shown: str) -> tuple[dict[str, Any], Bad]:
    return call() | {"late": value}, Bad(ConfigurationError, "late", shown, "Late.deliver(), .drop(after=...)")


POLICIES: dict[str, tuple[dict[str, Any], Bad]] = {
    "conflict as text": conflict("replace", "'replace'"),
    "no conflict": conflict(None, "None"),
    "conflict as class": conflict(Conflict, "class"),
    "conflict uncalled": conflict(Conflict.keep, "a method"),
    "conflict as dict": conflict({"mode": PAYLOAD}, "a dict"),
    "newer without version": conflict(Conflict("newer"), "a Conflict"),
    "newer than text": conflict(Conflict("newer", "7"), "a Conflict"),  # type: ignore[arg-type]
    "newer than true": conflict(Conflict("newer", True), "a Conflict"),  # noqa: FBT003
    "keep with version": conflict(Conflict("keep", 7), "a Conflict"),
    "unknown conflict": (
        call(conflict=Conflict("newest")),  # type: ignore[arg-type]
        Bad(UnsupportedByStoreError, "conflict", "newest", "error keep newer replace"),
    ),
    "late as text": late("drop", "'drop'"),
    "no late": late(None, "None"),
    "late as duration": late(timedelta(minutes=15), "timedelta"),
    "late as class": late(Late, "class"),
    "late by hand": late(Late(1, 5), "a Late"),  # type: ignore[arg-type]
    "late for text": late(Late(Late.drop("1s").action, "5s"), "a Late"),  # type: ignore[arg-type]
}

ALL = [
    pytest.param(arguments, bad, id=f"{group}: {name}")
    for group, rows in {
        "time": TIMES,
        "payload": PAYLOADS,
        "id": IDS,
        "header": HEADERS,
        "to": TARGETS,
        "policy": POLICIES,
    }.items()
    for name, (arguments, bad) in rows.items()
]


@pytest.mark.parametrize(("arguments", "bad"), ALL)
@pytest.mark.asyncio
async def test_bad_argument_of_schedule(
    arguments: dict[str, Any], bad: Bad, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    options = dict(arguments)
    event = options.pop("event")
    async with opened(clock) as (scheduler, store):
        with pytest.raises(bad.error) as caught:
            await scheduler.schedule(event, **options)
        assert await scheduler.get("order-7") is None
    assert_clear(caught.value, bad)
    assert_no_secret(caught.value, caplog.text)
    assert store.applied == []
    if isinstance(caught.value, InputError) and bad.field != "id":
        assert caught.value.message_id == "order-7"
        assert "of message 'order-7' is" in str(caught.value)


@pytest.mark.parametrize(("arguments", "bad"), ALL)
@pytest.mark.asyncio
async def test_bad_message_among_good_ones(
    arguments: dict[str, Any], bad: Bad, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    good = [Message(Pay(), delay="1s", id=f"good-{n}") for n in range(4)]
    async with opened(clock) as (scheduler, store):
        with pytest.raises(PartlyScheduledError) as caught:
            await scheduler.schedule_many([*good[:2], Message(**arguments), *good[2:]])
    (rejected,) = caught.value.rejected
    assert (caught.value.stored, rejected.position) == (4, 2)
    assert_clear(rejected.error, bad)
    assert_no_secret(caught.value, caplog.text)
    assert str(caught.value).startswith("4 messages stored, 1 refused: message 2: ")
    assert [command.id for command in store.applied] == ["good-0", "good-1", "good-2", "good-3"]


@pytest.mark.parametrize("given", ["text", PAYLOAD.encode(), Pay(), {"id": PAYLOAD}, None, Message], ids=repr)
@pytest.mark.asyncio
async def test_what_is_no_message_among_good_ones(given: object, clock: VirtualClock) -> None:
    messages: list[Any] = [Message(Pay(), delay="1s"), given, Message(Pay(), delay="1s")]
    async with opened(clock) as (scheduler, store):
        with pytest.raises(PartlyScheduledError) as caught:
            await scheduler.schedule_many(messages)
    (rejected,) = caught.value.rejected
    assert_clear(rejected.error, Bad(ConfigurationError, "message", "", "a Message"))
    assert len(store.applied) == caught.value.stored == 2


@pytest.mark.parametrize(
    "given", [None, 5, Pay(), Message(Pay(), delay="1s"), Scheduler], ids=["None", "5", "event", "message", "class"]
)
@pytest.mark.asyncio
async def test_many_wants_an_iterable(given: Any, clock: VirtualClock) -> None:
    async with opened(clock) as (scheduler, store):
        with pytest.raises(InputError) as caught:
            await scheduler.schedule_many(given)
        with pytest.raises(InputError) as caught_progress:
            await scheduler.schedule_many([Message(Pay(), delay="1s")], progress="yes")  # type: ignore[arg-type]
    assert_clear(caught.value, Bad(InputError, "messages", "", "an iterable or asynchronous iterable of Message"))
    assert_clear(caught_progress.value, Bad(InputError, "progress", "a str", "a function that takes a number"))
    assert store.applied == []


# --- other calls ------------------------------------------------------------------------------------------

NO_ID = Bad(MessageIdError, "id", "", "1 to 255 bytes of UTF-8")
NO_COUNT = "an integer from"
NO_WHAT = Bad(ConfigurationError, "what", "", "1 to 128 characters")


async def listing(rows: AsyncIterator[object]) -> list[object]:
    return [row async for row in rows]


Call = Callable[[Any], Awaitable[object]]
CALLS: dict[str, tuple[Call, Bad]] = {
    "cancel nothing": (lambda s: s.cancel(""), NO_ID),
    "cancel a number": (lambda s: s.cancel(7), Bad(MessageIdError, "id", "an int", "a str")),
    "cancel an occurrence": (lambda s: s.cancel("a~1893456000000"), Bad(MessageIdError, "id", "'a~", "occurrence of")),
    "fire nothing": (lambda s: s.fire(""), NO_ID),
    "get nothing": (lambda s: s.get(""), NO_ID),
    "reschedule nothing": (lambda s: s.reschedule("", delay="1s"), NO_ID),
    "reschedule without time": (lambda s: s.reschedule("a"), time_("at, delay", "neither", "exactly one of them")),
    "reschedule twice": (lambda s: s.reschedule("a", at=START, delay="1s"), time_("at, delay", "both", ONE)),
    "reschedule naive": (lambda s: s.reschedule("a", at=datetime(2031, 1, 1)), time_("at", "naive", "aware")),  # noqa: DTZ001
    "reschedule far": (lambda s: s.reschedule("a", delay="4000d"), time_("delay", "'4000d'", "at most 3650d")),
    "pending of a number": (lambda s: listing(s.pending(7)), NO_WHAT),
    "pending of int": (lambda s: listing(s.pending(int)), Bad(ConfigurationError, "what", "int", "an event class")),
    "pending since naive": (lambda s: listing(s.pending(since=datetime(2031, 1, 1))), time_("since", "naive", "aware")),  # noqa: DTZ001
    "pending before text": (lambda s: listing(s.pending(before="noon")), time_("before", "'noon'", AWARE)),
    "pending, -1": (lambda s: listing(s.pending(limit=-1)), Bad(ConfigurationError, "limit", "-1", NO_COUNT)),
    "pending, true": (lambda s: listing(s.pending(limit=True)), Bad(ConfigurationError, "limit", "True", NO_COUNT)),
    "letters, text": (lambda s: listing(s.dead_letters(limit="9")), Bad(ConfigurationError, "limit", "'9'", NO_COUNT)),
    "letters of ''": (lambda s: listing(s.dead_letters("")), NO_WHAT),
    "letters of 'x:'": (lambda s: listing(s.dead_letters("x:")), Bad(TargetError, "what", "'x:'", FORM)),
    "pause a number": (lambda s: s.pause(7), NO_WHAT),
    "pause an address of nothing": (lambda s: s.pause(":x"), Bad(TargetError, "what", "':x'", FORM)),
    "pause an event": (lambda s: s.pause(Pay()), Bad(ConfigurationError, "what", "a Pay", "1 to 128")),
    "resume with space": (lambda s: s.resume("a b"), NO_WHAT),
    "load, 0 spans": (lambda s: s.load(bucket="1h", buckets=0), Bad(ConfigurationError, "buckets", "0", "from 1 to 10000")),
    "load, text": (lambda s: s.load(bucket="1h", buckets="9"), Bad(ConfigurationError, "buckets", "'9'", NO_COUNT)),
    "load, no span": (lambda s: s.load(bucket="0s", buckets=1), Bad(ConfigurationError, "bucket", "'0s'", "at least 1ms")),
    "redrive an id": (lambda s: s.redrive("order-7"), Bad(ConfigurationError, "letter", "a str", "a DeadLetter or its key")),
    "purge a pair": (lambda s: s.purge(("a", 1)), Bad(ConfigurationError, "letter", "a tuple", "a DeadLetter or its key")),
    "journal, 0": (lambda s: s.journal(limit=0), Bad(ConfigurationError, "limit", "0", "from 1 to")),
    "journal of a number": (lambda s: s.journal(7), Bad(MessageIdError, "id", "an int", "a str")),
    "journal after text": (lambda s: s.journal(after="x"), Bad(ConfigurationError, "after", "'x'", NO_COUNT)),
}  # fmt: skip


@pytest.mark.parametrize(("bad_call", "bad"), CALLS.values(), ids=CALLS)
@pytest.mark.asyncio
async def test_bad_argument_of_another_call(bad_call: Call, bad: Bad, clock: VirtualClock) -> None:
    async with opened(clock) as (scheduler, store):
        with pytest.raises(bad.error) as caught:
            await bad_call(scheduler)
    assert_clear(caught.value, bad)
    assert store.applied == []


# --- what settings allow ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allowed", "target"),
    [
        ([], "sink:x"),
        (["sink:a"], "sink:b"),
        (["sink:a"], "sink:ab"),
        (["sink:a*"], "sink:b"),
        (["sink:a*"], "handler:a"),
        (["handler:*"], "sink:handler"),
        (["sink:A"], "sink:a"),
    ],
)
@pytest.mark.asyncio
async def test_target_not_allowed(allowed: list[str], target: str, clock: VirtualClock) -> None:
    async with opened(clock, allowed_targets=allowed) as (scheduler, store):
        with pytest.raises(TargetNotAllowedError) as caught:
            await scheduler.schedule(PAYLOAD.encode(), to=target, delay="1s", id="a")
    assert_clear(caught.value, Bad(TargetNotAllowedError, "to", repr(target), "Scheduler(allowed_targets=...)"))
    assert store.applied == []


@pytest.mark.parametrize(
    ("allowed", "target"),
    [
        (["sink:a"], "sink:a"),
        (iter(["sink:a"]), "sink:a"),
        ({"sink:a*"}, "sink:a"),
        (("sink:a*", "x:y"), "sink:ab"),
        (["sink:*"], "sink:x"),
        (["handler:pay"], "handler:pay"),
        (None, "sink:x"),
    ],
)
@pytest.mark.asyncio
async def test_target_allowed(allowed: Any, target: str, clock: VirtualClock) -> None:
    async with opened(clock, allowed_targets=allowed) as (scheduler, store):
        for _ in range(2):
            await scheduler.schedule(b"x", to=target, delay="1s")
    assert len(store.applied) == 2


@pytest.mark.asyncio
async def test_max_payload_is_the_limit(clock: VirtualClock) -> None:
    async with opened(clock, max_payload=10) as (scheduler, store):
        await scheduler.schedule(b"x" * 10, to="sink:x", delay="1s")
        with pytest.raises(PayloadTooLargeError, match=r"payload is 11 bytes; allowed: at most 10 bytes"):
            await scheduler.schedule(b"x" * 11, to="sink:x", delay="1s")
    assert len(store.applied) == 1


@pytest.mark.asyncio
async def test_what_messagepack_can_hold(clock: VirtualClock) -> None:
    async with opened(clock, encoding="msgpack") as (scheduler, store):
        await scheduler.schedule(Pay(float("inf")), delay="1s")
        with pytest.raises(CodecError) as caught:
            await scheduler.schedule(Pay(1 << 64), delay="1s", id="a")
    assert_clear(caught.value, Bad(CodecError, "event", "a Pay that cannot be written (can't serialize", "msgpack can"))
    assert len(store.applied) == 1


@pytest.mark.asyncio
async def test_two_classes_of_one_name(clock: VirtualClock) -> None:
    other = dataclasses.make_dataclass("Pay", [("card", str)])
    async with opened(clock) as (scheduler, store):
        await scheduler.schedule(Pay(), delay="1s")
        with pytest.raises(DuplicateHandlerError) as caught:
            await scheduler.schedule(other(PAYLOAD), delay="1s")
    assert_clear(caught.value, Bad(DuplicateHandlerError, "event type", "'Pay', the name of both", "@event(...)"))
    assert len(store.applied) == 1


@pytest.mark.asyncio
async def test_class_of_no_allowed_name(clock: VirtualClock) -> None:
    other = dataclasses.make_dataclass("a:b", [("card", str)])
    async with opened(clock) as (scheduler, store):
        with pytest.raises(ConfigurationError) as caught:
            await scheduler.schedule(other(PAYLOAD), delay="1s")
    assert_clear(caught.value, Bad(ConfigurationError, "event type name", "'a:b'", "1 to 128 characters"))
    assert store.applied == []


# --- at the limits, and odd but good ----------------------------------------------------------------------

ACCEPTED: dict[str, dict[str, Any]] = {
    "id of 255 bytes": call(id="a" * 255),
    "id of 255 bytes in 85 characters": call(id="€" * 85),
    "id with spaces and quotes": call(id='order 7\'s "x"; DROP TABLE messages --'),
    "id right to left, with joiners": call(id="\u05d0\u202e\u200d\U0001f469"),
    "id with a tilde": call(id="a~123456789"),
    "id of an enum": call(id=Named.ORDER),
    "64 headers": call(headers={f"h{n}": b"" for n in range(64)}),
    "16 KiB of headers": call(headers={"x": b"x" * 16_383}),
    "header name of 128": call(headers={"a" * 128: b"\x00\xff\r\n"}),
    "header name of an enum": call(headers={Named.ORDER: Bytes(b"x")}),
    "no headers": call(headers={}),
    "key of 16 KiB": call(key=b"\x00" * 16_384),
    "empty key": call(key=b""),
    "key of a subclass": call(key=Bytes(b"x")),
    "largest payload": call(event=b"\x00" * MOST, to="sink:x"),
    "empty payload": call(event=b"", to="sink:x"),
    "payload of None": call(event=Pay(None)),
    "payload of bytes": call(event=Pay(b"\x00\xff")),
    "address of 255 bytes": call(event=b"x", to="sink:" + "é" * 127 + "x"),
    "address with colons": call(event=b"x", to="sink:a:b://c d"),
    "to an enum": call(event=b"x", to=enum.StrEnum("To", {"X": "sink:x"}).X),  # type: ignore[attr-defined]
    "handler name of 128": call(event=b"x", to="handler:" + "a" * 128),
    "to the horizon": at(START + HORIZON),
    "delay to the horizon": call(delay="3650d"),
    "no delay": call(delay=timedelta()),
    "least delay": call(delay=timedelta(microseconds=1)),
    "an hour ago": at(START - timedelta(hours=1)),
    "year 1": at(datetime.min.replace(tzinfo=UTC)),
    "1969": at(datetime(1969, 7, 20, tzinfo=UTC)),
    "other zone": at(START.astimezone(timezone(timedelta(hours=14)))),
    "newest version": call(conflict=Conflict.newer((1 << 63) - 1)),
    "version 0": call(conflict=Conflict.newer(0)),
}


@pytest.mark.parametrize("arguments", ACCEPTED.values(), ids=ACCEPTED)
@pytest.mark.asyncio
async def test_accepted_and_kept_as_given(arguments: dict[str, Any], clock: VirtualClock) -> None:
    options = dict(arguments)
    event = options.pop("event")
    async with opened(clock) as (scheduler, store):
        scheduled = await scheduler.schedule(event, **options)
        found = await scheduler.get(options["id"])
    assert scheduled.outcome is ScheduleOutcome.STORED
    assert found is not None
    (put,) = store.applied
    assert isinstance(put, Put)
    for envelope in (put.envelope, found.record.envelope):
        assert envelope.id == options["id"]
        assert envelope.key == options.get("key")
        assert envelope.headers == options["headers"]
        if type(event) is bytes:
            assert envelope.payload == event
        assert {type(text) for text in (envelope.id, envelope.lane, envelope.address, *envelope.headers)} == {str}
        assert {type(value) for value in envelope.headers.values()} <= {bytes}
        assert type(envelope.key) is bytes
    assert scheduled.due_ms <= clock.now_ms() + HORIZON // timedelta(milliseconds=1)


@pytest.mark.asyncio
async def test_headers_are_read_once_and_copied(clock: VirtualClock) -> None:
    given = {"x": b"1"}
    async with opened(clock) as (scheduler, store):
        await scheduler.schedule(Pay(), delay="1s", headers=given)
        given["x"] = HEADER.encode()
    (put,) = store.applied
    assert isinstance(put, Put)
    assert put.envelope.headers == {"x": b"1"}


@pytest.mark.asyncio
async def test_ids_are_made_where_none_is_given(clock: VirtualClock) -> None:
    async with opened(clock) as (scheduler, _):
        made = [(await scheduler.schedule(Pay(), delay="1s")).id for _ in range(100)]
    assert len(set(made)) == 100
    assert made == sorted(made)
    assert {len(each) for each in made} == {32}
