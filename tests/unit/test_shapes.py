"""The JSON shapes: written JSON can be read and posted again, and bad JSON is refused with the name of the field."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest

from aiodelay import Conflict, Context, Cron, Every, Late, Message, MessageIdError, Retry, Scheduler, Snapshot
from aiodelay.core.values import DeadLetter, LaneCounts
from aiodelay.errors import AiodelayError
from aiodelay.operations.json_shapes import (
    counts_shape,
    dead_letter_shape,
    error_shape,
    message_shape,
    read_message,
    rule_shape,
    time_shape,
)
from aiodelay.testing.clock import VirtualClock
from tests.support.clear_errors import KEY, PAYLOAD, PYTHON_WORDS, Sink, assert_no_secret

TEXT, BYTES = "größe ☃", b"\xff\x00"
GOOD: dict[str, Any] = {"to": "sink:x", "payload": PAYLOAD, "delay": "1s"}


def read(**changed: object) -> Message:
    fields = {name: value for name, value in (GOOD | changed).items() if value is not ...}
    return read_message(json.dumps(fields).encode())


async def stored(clock: VirtualClock, message: Message) -> Snapshot:
    async with Scheduler("memory://", clock=clock, sinks=[Sink()], dispatch=False) as scheduler:
        await scheduler.schedule_many([message])
        (snapshot,) = [each async for each in scheduler.pending()]
        return snapshot


@pytest.mark.parametrize("payload", [TEXT.encode(), BYTES, b"", b'{"a": 1}', None], ids=repr)
@pytest.mark.parametrize("key", [b"k", BYTES], ids=repr)
@pytest.mark.asyncio
async def test_a_message_that_was_written_is_read_back(payload: bytes | None, key: bytes, clock: VirtualClock) -> None:
    headers = {"a": TEXT.encode(), "b": BYTES}
    at = datetime(2031, 1, 1, 12, tzinfo=timezone(timedelta(hours=1)))
    snapshot = await stored(clock, Message(payload, at=at, id="a", to="sink:x", key=key, headers=headers))
    shape = json.loads(json.dumps(message_shape(snapshot)))
    assert shape["due"] == shape["next_attempt"] == "2031-01-01T11:00:00.000Z"
    assert (shape["id"], shape["to"], shape["state"], shape["attempt"]) == ("a", "sink:x", "scheduled", 0)
    assert ("payload" in shape, "key" in shape) != ("payload_base64" in shape, "key_base64" in shape)
    again = {
        name: shape[name] for name in shape if name.split("_base64")[0] in ("to", "payload", "id", "key", "headers")
    }
    message = read_message(json.dumps(again | {"at": shape["due"]}).encode())
    assert message == Message(payload, at=at, id="a", to="sink:x", key=key, headers=headers)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ("10m", Every("10m")),
        ("0 9 * * mon", Cron("0 9 * * mon")),
        ({"cron": "0 9 * * mon", "tz": "Europe/Paris"}, Cron("0 9 * * mon", tz="Europe/Paris")),
        (
            {"interval": "1h", "start": "2031-01-01T00:00:00Z", "missed": "skip"},
            Every("1h", start=datetime(2031, 1, 1, tzinfo=UTC), missed="skip"),
        ),
        ({"interval": "1h", "overlap": "skip"}, Every("1h", overlap="skip")),
    ],
    ids=repr,
)
def test_rules(given: object, rule: Every | Cron) -> None:
    assert read(every=given, delay=...).every == rule
    assert read(every=rule_shape(rule), delay=...).every == rule


@pytest.mark.parametrize(
    ("changed", "field", "wanted"),
    [
        ({"conflict": "keep"}, "conflict", Conflict.keep()),
        ({"conflict": "debounce:5s:1m", "delay": ...}, "conflict", Conflict.debounce("5s", "1m")),
        ({"conflict": {"newer": 7}}, "conflict", Conflict.newer(7)),
        ({"late": {"drop": "15m"}}, "late", Late.drop("15m")),
        ({"late": {"dead_letter": "1s"}}, "late", Late.dead_letter("1s")),
        ({"late": "deliver", "conflict": None}, "late", Late.deliver()),
        ({"payload": {"a": [1, None]}}, "event", b'{"a": [1, null]}'),
        ({"payload": ..., "payload_base64": base64.b64encode(BYTES).decode()}, "event", BYTES),
        ({"key_base64": base64.b64encode(BYTES).decode()}, "key", BYTES),
        ({"headers": {"b": {"base64": "/wA="}}}, "headers", {"b": BYTES}),
    ],
    ids=str,
)
def test_what_may_be_written(changed: dict[str, object], field: str, wanted: object) -> None:
    assert getattr(read(**changed), field) == wanted


def test_numbers_in_a_payload_stay_as_they_are_written() -> None:
    assert read_message(b'{"to": "sink:x", "payload": {"n": 1.10, "m": 12345678901234567890123}}').event == (
        b'{"n": 1.10, "m": 12345678901234567890123}'
    )


BAD: dict[str, tuple[bytes | dict[str, object], str, str, str]] = {
    "no json": (b"x", "InputError", "message", "not a JSON object"),
    "no utf-8": (b'{"id": "\xff"}', "InputError", "message", "not UTF-8 from byte 8 on"),
    "array": (b"[]", "InputError", "message", "not a JSON object"),
    "deep": (b'{"payload": ' + b"[" * 100_000, "InputError", "message", "not a JSON object"),
    "cut": (b'{"id": "a"', "InputError", "message", "not a JSON object"),
    "other field": ({"countdwn": 1}, "InputError", "field of message", "'countdwn'"),
    "no payload": ({"payload": ...}, "PayloadTypeError", "payload", "missing"),
    "number": ({"payload": 4111}, "PayloadTypeError", "payload", "a number"),
    "bool": ({"payload": True}, "PayloadTypeError", "payload", "true or false"),
    "two payloads": ({"payload_base64": "AA=="}, "PayloadTypeError", "payload", "given as payload and as"),
    "base64": ({"payload": ..., "payload_base64": PAYLOAD}, "PayloadTypeError", "payload_base64", "not base64"),
    "surrogate": (b'{"payload": "\\ud800"}', "InputError", "message", "not a JSON object"),
    "at": ({"at": "noon", "delay": ...}, "ScheduleTimeError", "at", "'noon'"),
    "at number": ({"at": 5, "delay": ...}, "ScheduleTimeError", "at", "5"),
    "naive": ({"at": "2031-01-01", "delay": ...}, "ScheduleTimeError", "at", "'2031-01-01', which has no offset"),
    "naive start": (
        {"every": {"interval": "1h", "start": "2031-01-01T00:00:00"}},
        *("ScheduleTimeError", "every.start", "which has no offset"),
    ),
    "start": (
        {"every": {"interval": "1h", "start": "0001-01-01T00:00:00+14:00"}},
        *("ScheduleTimeError", "every.start", "0001-01-01T00:00:00+14:00"),
    ),
    "interval": ({"every": {"interval": True}}, "ScheduleTimeError", "every.interval", "true"),
    "missed": ({"every": {"interval": "1h", "missed": {}}}, "ScheduleTimeError", "every.missed", "an object"),
    "delay": ({"delay": [1]}, "ScheduleTimeError", "delay", "an array"),
    "id": ({"id": 7}, "MessageIdError", "id", "7"),
    "to": ({"to": {}}, "TargetError", "to", "an object"),
    "no to": ({"to": ...}, "TargetError", "to", "missing"),
    "null": ({"payload": None}, "PayloadTypeError", "payload", "null"),
    "null, to a handler": ({"payload": None, "key": "k", "to": "handler:m"}, "PayloadTypeError", "payload", "null"),
    "every": ({"every": {"cron": "0 9 * * *", "x": 1}}, "ScheduleTimeError", "every", "an object"),
    "every number": ({"every": 5}, "ScheduleTimeError", "every", "5"),
    "zone": ({"every": {"cron": "0 9 * * *", "tz": "Mars"}}, "ScheduleTimeError", "every.tz", "'Mars'"),
    "cron type": ({"every": {"cron": 5}}, "ScheduleTimeError", "every.expression", "5"),
    "key": ({"key": 7}, "HeaderError", "key", "a number"),
    "key base64": ({"key_base64": KEY}, "HeaderError", "key_base64", "not base64"),
    "headers": ({"headers": []}, "HeaderError", "headers", "an array"),
    "header": ({"headers": {"a": 1}}, "HeaderError", "value of header 'a'", "a number"),
    "conflict": ({"conflict": "first"}, "ConfigurationError", "conflict", "'first'"),
    "no conflict": ({"conflict": {}}, "ConfigurationError", "conflict", "an object"),
    "version": ({"conflict": {"newer": "7"}}, "ConfigurationError", "conflict.version", "'7'"),
    "no version": ({"conflict": {"newer": None}}, "ConfigurationError", "conflict.version", "null"),
    "no revision": ({"conflict": {"if_revision": [None]}}, "ConfigurationError", "conflict.revision", "an array"),
    "late": ({"late": "drop"}, "ConfigurationError", "late", "'drop'"),
    "late after": ({"late": {"drop": 5}}, "ConfigurationError", "late.after", "5"),
}


@pytest.mark.parametrize(("given", "error", "field", "value"), BAD.values(), ids=BAD)
def test_what_is_refused(given: bytes | dict[str, object], error: str, field: str, value: str) -> None:
    with pytest.raises(AiodelayError) as caught:
        read_message(given) if isinstance(given, bytes) else read(**given)
    shape = error_shape(caught.value)
    assert (shape["error"], shape["field"]) == (error, field)
    assert value in shape["value"]
    assert shape["allowed"]
    assert not PYTHON_WORDS.search(shape["detail"])
    assert_no_secret(caught.value, json.dumps(shape))


def test_an_error_names_the_id_that_the_line_gives() -> None:
    with pytest.raises(AiodelayError, match="'order-7'"):
        read(id="order-7", payload=...)


def test_an_error_without_field() -> None:
    assert error_shape(MessageIdError("id", "empty", "text"))["field"] == "id"
    assert error_shape(AiodelayError("x")) == {"error": "AiodelayError", "detail": "x"}


@pytest.mark.asyncio
async def test_a_message_that_was_cancelled_in_flight_says_so(clock: VirtualClock) -> None:
    """The retry plan, of which `context.is_last_attempt` tells, has no part in it."""
    scheduler, shapes = Scheduler("memory://", clock=clock), []

    @scheduler.handler(name="pay", retry=Retry(attempts=1))
    async def pay(event: bytes, context: Context) -> None:
        assert context.is_last_attempt
        for cancels in (False, True):
            if cancels:
                await scheduler.cancel("a")
            snapshot = await scheduler.get("a")
            assert snapshot is not None
            shapes.append(message_shape(snapshot))

    async with scheduler:
        await scheduler.schedule(b"x", to="handler:pay", delay="1s", id="a")
        await scheduler.run_until_idle()
    assert [each["is_cancelled"] for each in shapes] == [False, True]
    assert [each["is_last_attempt"] for each in shapes] == [False, True], "its former name, which is deprecated"


@pytest.mark.asyncio
async def test_dead_letters_and_counts(clock: VirtualClock) -> None:
    snapshot = await stored(clock, Message(b"x", delay="1s", id="a", to="handler:pay"))
    shape = dead_letter_shape(DeadLetter(snapshot.record, "rejected", clock.now_ms()))
    assert (shape["reason"], shape["to"], shape["given_up"][-1]) == ("rejected", "handler:pay", "Z")
    assert "state" not in shape
    assert counts_shape({"b": LaneCounts(), "a": LaneCounts(overdue=2)})[0] == {
        "lane": "a",
        **dict.fromkeys(("scheduled", "in_flight", "held", "dead"), 0),
        "overdue": 2,
        "read_by_nobody": False,
    }
    assert msgspec.json.encode(shape)


def test_instants_beyond_the_year_9999_are_shown_as_its_end() -> None:
    assert time_shape((1 << 48) - 1) == time_shape(253_402_300_799_999) == "9999-12-31T23:59:59.999Z"
