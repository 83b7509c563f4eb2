"""Bad messages, also from a hostile caller: each is refused with a clear error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from typing import Any

import msgspec
import pydantic
import pytest

from aiodelay import (
    CodecError,
    ConfigurationError,
    Conflict,
    Every,
    HeaderError,
    InputError,
    Late,
    Message,
    MessageIdError,
    PartlyScheduledError,
    PayloadTooLargeError,
    PayloadTypeError,
    Scheduler,
    ScheduleTimeError,
    TargetError,
    UnknownSinkError,
    UnsupportedByStoreError,
)
from aiodelay.core.validation import RESERVED_HEADERS
from aiodelay.testing.clock import START, VirtualClock
from tests.support.clear_errors import (
    HEADER,
    HORIZON,
    KEY,
    MOST_PAYLOAD,
    PAYLOAD,
    Bad,
    Pay,
    Sink,
    assert_clear,
    assert_no_secret,
    at,
    call,
    opened,
)


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


class Bytes(bytes):
    pass


class Broken(tzinfo):
    def utcoffset(self, moment: datetime | None) -> timedelta:
        raise RuntimeError(PAYLOAD)

    def dst(self, moment: datetime | None) -> timedelta:
        raise RuntimeError(PAYLOAD)

    def tzname(self, moment: datetime | None) -> str:
        raise RuntimeError(PAYLOAD)


class ManyHeaders(Mapping[str, bytes]):
    """Says that it is short, and goes on for ever."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        return (f"h{n}" for n in range(1_000_000_000))

    def __getitem__(self, name: str) -> bytes:
        return b"x"


def circular() -> Pay:
    event = Pay([])
    event.card.append(event)
    return event


def nested(depth: int) -> list[Any]:
    value: list[Any] = [PAYLOAD]
    for _ in range(depth):
        value = [value]
    return value


def every(rule: object) -> dict[str, Any]:
    return call(every=rule, delay=None)


def time_(field: str, value: str, allowed: str) -> Bad:
    return Bad(ScheduleTimeError, field, value, allowed)


AWARE, FORMS, ONE = "a timezone-aware datetime", "a timedelta or text such as", "exactly one of them"
TEXTS = "text such as"
NO_DURATIONS = [
    *(
        "",
        " ",
        "5",
        "+5s",
        "5 s",
        " 5s",
        "5s ",
        "5s\n",
        "5S",
        "1-ms",
        "ms",
        "s",
        "1.s",
        ".5s",
        "1,5s",
        "1e3s",
        "nan",
    ),
    *(
        "inf",
        "nans",
        "5s1h",
        "5s5s",
        "\u0665s",
        "\uff15s",
        "5s\x00",
        "\ud800s",
        "5\u2028s",
        "5\u202es",
        "P",
        "PT",
        "P1Y",
    ),
    *("9" * 64 + "s", "9" * 1_000_000 + "s", "1" * 5000),
]
TIMES: dict[str, tuple[dict[str, Any], Bad]] = {
    "naive": (at(datetime(2031, 1, 1)), time_("at", "the naive datetime", AWARE)),  # noqa: DTZ001
    "at as text": (at("2031-01-01T00:00:00Z"), time_("at", "'2031-01-01", AWARE)),
    "at as date": (at(date(2031, 1, 1)), time_("at", "datetime.date(2031", AWARE)),
    "at as number": (at(1_924_992_000), time_("at", "1924992000", AWARE)),
    "at as object": (at(Pay()), time_("at", "a Pay", AWARE)),
    "at in a broken zone": (at(datetime(2031, 1, 1, tzinfo=Broken())), time_("at", "raises RuntimeError", AWARE)),
    "1 ms too far": (at(START + HORIZON + timedelta(milliseconds=1)), time_("at", "3650d1ms ahead", "3650d ahead")),
    "1 us too far": (at(START + HORIZON + timedelta(microseconds=1)), time_("at", "3650d1ms ahead", "3650d ahead")),
    "year 9999": (at(datetime.max.replace(tzinfo=UTC)), time_("at", "d", "at most 3650d ahead")),
    "year 9999, west": (at(datetime.max.replace(tzinfo=timezone(-timedelta(hours=12)))), time_("at", "d", "3650d")),
    "neither": (call(delay=None), time_("at, delay, every", "missing", ONE)),
    "at and delay": (call(at=START), time_("at, delay, every", "more than one", ONE)),
    "delay and every": (call(every=Every("1m")), time_("at, delay, every", "more than one", ONE)),
    "at and every": (call(at=START, delay=None, every=Every("1m")), time_("at, delay, every", "more than one", ONE)),
    "all three": (call(at=START, every=Every("1m")), time_("at, delay, every", "more than one", ONE)),
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
    **{repr(text)[:20]: (call(delay=text), time_("delay", "", TEXTS)) for text in NO_DURATIONS},
    "rule as text": (every("10m"), time_("every", "'10m'", "Every('10m')")),
    "rule as number": (every(60), time_("every", "60", "Every('10m')")),
    "rule as class": (every(Every), time_("every", "Every", "Every('10m')")),
    "rule as timedelta": (every(timedelta(minutes=1)), time_("every", "timedelta", "Every('10m')")),
    "cron as text": (every("0 9 * * mon"), time_("every", "'0 9 * * mon'", "Cron(")),
    "grid too far": (every(Every("1d", start=START + 2 * HORIZON)), time_("every", "7300d ahead", "3650d ahead")),
}


TYPES, WRITABLE = "bytes with to=, or an instance of a dataclass", "json can hold"


def codec(value: str) -> Bad:
    return Bad(CodecError, "event", value, WRITABLE)


def payload(event: object, value: str, **more: object) -> tuple[dict[str, Any], Bad]:
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
    "None without to": (call() | {"event": None}, Bad(TargetError, "to", "missing", "None names no handler")),
    "None without key": (
        call(to="sink:x") | {"event": None, "key": None},
        Bad(PayloadTypeError, "event", "None, and the message has no key", "None together with a key"),
    ),
    "None to a handler": (
        call(to="handler:Pay") | {"event": None},
        Bad(PayloadTypeError, "event", "None", "a handler cannot take None"),
    ),
    "bytes too large": (
        call(event=b"x" * (MOST_PAYLOAD + 1), to="sink:x"),
        Bad(PayloadTooLargeError, "payload", "262145 bytes", "at most 262144 bytes (setting max_payload)"),
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
    "bool": id_(True, "a bool", "a str"),
    "bytes": id_(b"order-7", "a bytes", "a str"),
    "object": id_(Untellable(), "an Untellable", "a str"),
    "lone surrogate": id_("order-\ud800", r"'order-\ud800'", UTF8),
    "series form": id_("order~1893456000000", "'order~1893456000000'", "an id that does not end in '~'"),
    "reserved prefix of old": id_("\x00aiodelay/x", r"\x00aiodelay/x", CONTROL),
    **{repr(c): id_(f"a{c}b", "", CONTROL) for c in "\x00\t\n\r\x1b\x7f\x85\x9f\u2028\u2029"},
}


def header(headers: object, field: str, value: str, allowed: str) -> tuple[dict[str, Any], Bad]:
    return call() | {"headers": headers}, Bad(HeaderError, field, value, allowed)


NAMES = "1 to 128 characters of A-Z a-z 0-9 . _ -"
VALUE = "value of header 'x'"
NO_NAMES = [
    *("", " ", "a b", "a:b", "a\r\nb", "a\n", "é", "a\x00", "\ud800", "\u2028", "a" * 129, "a" * 1_000_000),
    *(b"x", 5, None),
]
HEADERS: dict[str, tuple[dict[str, Any], Bad]] = {
    "none": header(None, "headers", "None", "a mapping of str to bytes"),
    "pairs": header([("x", HEADER.encode())], "headers", "a list", "a mapping"),
    "text": header(HEADER, "headers", "a str", "a mapping"),
    "empty list": header([], "headers", "a list", "a mapping"),
    **{repr(name)[:20]: header({name: HEADER.encode()}, "header name", "", NAMES) for name in NO_NAMES},
    "reserved": header(
        {"aiodelay-id": HEADER.encode()}, "header 'aiodelay-id'", "reserved", "names that do not begin with 'aiodelay-'"
    ),
    "reserved, upper case": header(
        {"AioDelay-x": b""}, "header 'AioDelay-x'", "reserved", "names that do not begin with 'aiodelay-'"
    ),
    **{
        name: header({name: HEADER.encode()}, f"header '{name}'", "reserved", "names except scheduler-epoch, ")
        for name in RESERVED_HEADERS
    },
    "text value": header({"x": HEADER}, VALUE, "a str", "bytes"),
    "no value": header({"x": None}, VALUE, "None", "bytes"),
    "number": header({"x": 5}, VALUE, "an int", "bytes"),
    "bytearray": header({"x": bytearray(HEADER.encode())}, VALUE, "a bytearray", "bytes"),
    "memoryview": header({"x": memoryview(HEADER.encode())}, VALUE, "a memoryview", "bytes"),
    "65": header({f"h{n}": b"" for n in range(65)}, "headers", "a mapping with 65 headers", "at most 64"),
    "without end": header(ManyHeaders(), "headers", "a mapping with 65 headers", "at most 64"),
    "16 KiB and 1": header({"x": b"x" * 16_384}, "headers", "a mapping of 16385 bytes", "at most 16384 bytes"),
    "key as text": (call(key=KEY), Bad(HeaderError, "key", "a str", "bytes or None")),
    "key as number": (call(key=0), Bad(HeaderError, "key", "an int", "bytes or None")),
    "key as bytearray": (call(key=bytearray(KEY.encode())), Bad(HeaderError, "key", "a bytearray", "bytes or None")),
    "key too long": (call(key=KEY.encode() * 2000), Bad(HeaderError, "key", "26000 bytes long", "at most 16384 bytes")),
}


def to(target: object, value: str, allowed: str, *, field: str = "to") -> tuple[dict[str, Any], Bad]:
    return call(to=target), Bad(TargetError, field, value, allowed)


FORM, HANDLERS = "'<sink>:<address>'", "1 to 128 characters without spaces"
NO_TARGETS = [
    *("", ":", "sink", "sink:", ":x", "Sink:x", "sink :x", " sink:x", "sïnk:x", "s\nk:x", "1:x", "s" * 65 + ":x"),
    "x" * 1_000_000,
]
TARGETS: dict[str, tuple[dict[str, Any], Bad]] = {
    **{repr(target)[:20]: to(target, "", FORM) for target in NO_TARGETS},
    "int": to(5, "an int", FORM),
    "bytes": to(b"sink:x", "a bytes", FORM),
    "the sink": to(Sink(), "a Sink", FORM),
    **{repr(c): to(f"sink:a{c}b", "", CONTROL) for c in "\x00\r\n\x7f\x85\u2028\u2029"},
    "lone surrogate": to("sink:\ud800", r"\ud800", UTF8),
    "256 bytes": to("sink:" + "x" * 256, "an address of 256 bytes", "at most 255 bytes"),
    "10^6 bytes": to("sink:" + "x" * 1_000_000, "an address of 1000000 bytes", "at most 255 bytes"),
    "sink refuses": to("sink:nowhere", "'sink:nowhere'", "addresses that exist"),
    "handler with space": to("handler:a b", "'a b'", HANDLERS, field="the handler name in to="),
    "handler with colon": to("handler:a:b", "'a:b'", HANDLERS, field="the handler name in to="),
    "handler with brace": to("handler:{a}", "'{a}'", HANDLERS, field="the handler name in to="),
    "handler too long": to("handler:" + "a" * 129, "aaa", HANDLERS, field="the handler name in to="),
    "unknown sink": (
        call(to="kafka:x"),
        Bad(UnknownSinkError, "the sink in to=", "'kafka'", "handler:, sink: (add other"),
    ),
}


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
    "newer than true": conflict(Conflict("newer", True), "a Conflict"),
    "keep with version": conflict(Conflict("keep", 7), "a Conflict"),
    "unknown conflict": (
        call(conflict=Conflict("newest")),  # type: ignore[arg-type]
        Bad(UnsupportedByStoreError, "conflict", "newest", "debounce, earlier, error, if_revision, keep, later"),
    ),
    "late as text": late("drop", "'drop'"),
    "no late": late(None, "None"),
    "late as duration": late(timedelta(minutes=15), "timedelta"),
    "late as class": late(Late, "class"),
    "late by hand": late(Late(1, 5), "a Late"),  # type: ignore[arg-type]
    "late for text": late(Late(Late.drop("1s").action, "5s"), "a Late"),  # type: ignore[arg-type]
}

GROUPS = {"time": TIMES, "payload": PAYLOADS, "id": IDS, "header": HEADERS, "to": TARGETS, "policy": POLICIES}
ALL = [
    pytest.param(arguments, bad, id=f"{group}: {name}")
    for group, rows in GROUPS.items()
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
    if bad.field != "id":
        assert isinstance(caught.value, InputError | ConfigurationError)
        assert caught.value.message_id == "order-7"
        assert "of message 'order-7' is" in str(caught.value)


@pytest.mark.parametrize("rows", GROUPS.values(), ids=GROUPS)
@pytest.mark.asyncio
async def test_bad_messages_among_good_ones(
    rows: dict[str, tuple[dict[str, Any], Bad]], clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    good = [Message(Pay(), delay="1s", id=f"good-{n}") for n in range(len(rows))]
    wrong = [Message(**arguments) for arguments, _ in rows.values()]
    async with opened(clock) as (scheduler, store):
        with pytest.raises(PartlyScheduledError) as caught:
            await scheduler.schedule_many(message for pair in zip(wrong, good, strict=True) for message in pair)
    assert caught.value.stored == len(good)
    assert [each.position for each in caught.value.rejected] == list(range(0, 2 * len(rows), 2))
    for rejected, (_, bad) in zip(caught.value.rejected, rows.values(), strict=True):
        assert_clear(rejected.error, bad)
    assert_no_secret(caught.value, caplog.text)
    assert str(caught.value).startswith(f"{len(good)} messages stored, {len(rows)} refused: message 0: ")
    assert [command.id for command in store.applied] == [message.id for message in good]


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
async def test_many_wants_an_iterable(given: object, clock: VirtualClock) -> None:
    async with opened(clock) as (scheduler, store):
        with pytest.raises(InputError) as caught:
            await scheduler.schedule_many(given)  # type: ignore[arg-type]
        with pytest.raises(InputError) as caught_progress:
            await scheduler.schedule_many([Message(Pay(), delay="1s")], progress="yes")  # type: ignore[arg-type]
        with pytest.raises(InputError, match="progress is a coroutine function, which nobody would await"):
            await scheduler.schedule_many([Message(Pay(), delay="1s")], progress=asyncio.sleep)
    assert_clear(caught.value, Bad(InputError, "messages", "", "an iterable or asynchronous iterable of Message"))
    assert_clear(caught_progress.value, Bad(InputError, "progress", "a str", "a plain function that takes a number"))
    assert store.applied == []
