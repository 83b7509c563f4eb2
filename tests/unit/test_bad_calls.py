"""Bad calls: each is refused with a clear error. Settings at their limits are accepted."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from aiodelay import (
    CodecError,
    ConfigurationError,
    Conflict,
    DuplicateHandlerError,
    MessageIdError,
    PayloadTooLargeError,
    ScheduleOutcome,
    ScheduleTimeError,
    TargetError,
    TargetNotAllowedError,
)
from aiodelay.core.values import Put
from aiodelay.testing.clock import START, VirtualClock
from tests.support.clear_errors import HEADER, HORIZON, MOST_PAYLOAD, PAYLOAD, Bad, Pay, assert_clear, at, call, opened


class Bytes(bytes):
    pass


class Named(enum.StrEnum):
    ORDER = "order-9"


class To(enum.StrEnum):
    SINK = "sink:x"


def time_(field: str, value: str, allowed: str) -> Bad:
    return Bad(ScheduleTimeError, field, value, allowed)


AWARE, FORM, ONE = "a timezone-aware datetime", "'<sink>:<address>'", "exactly one of them"
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
    "reschedule without time": (lambda s: s.reschedule("a"), time_("at, delay", "missing", "exactly one of them")),
    "reschedule twice": (lambda s: s.reschedule("a", at=START, delay="1s"), time_("at, delay", "more than one", ONE)),
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
    "letters of 7": (lambda s: listing(s.dead_letters(message_id=7)), Bad(MessageIdError, "id", "an int", "a str")),
    "letters of no UTF-8": (
        lambda s: listing(s.dead_letters(message_id="\udc80")),
        Bad(MessageIdError, "id", "'\\udc80'", "UTF-8"),
    ),
    "pause a number": (lambda s: s.pause(7), NO_WHAT),
    "pause an address of nothing": (lambda s: s.pause(":x"), Bad(TargetError, "what", "':x'", FORM)),
    "pause an event": (lambda s: s.pause(Pay()), Bad(ConfigurationError, "what", "a Pay", "1 to 128")),
    "resume with space": (lambda s: s.resume("a b"), NO_WHAT),
    "load, 0 spans": (
        lambda s: s.load(bucket="1h", buckets=0),
        Bad(ConfigurationError, "buckets", "0", "from 1 to 10000"),
    ),
    "load, text": (lambda s: s.load(bucket="1h", buckets="9"), Bad(ConfigurationError, "buckets", "'9'", NO_COUNT)),
    "load, no span": (
        lambda s: s.load(bucket="0s", buckets=1),
        Bad(ConfigurationError, "bucket", "'0s'", "at least 1ms"),
    ),
    "redrive an id": (
        lambda s: s.redrive("order-7"),
        Bad(ConfigurationError, "letter", "a str", "a DeadLetter or its key"),
    ),
    "purge a pair": (
        lambda s: s.purge(("a", 1)),
        Bad(ConfigurationError, "letter", "a tuple", "a DeadLetter or its key"),
    ),
    "journal, 0": (lambda s: s.journal(limit=0), Bad(ConfigurationError, "limit", "0", "from 1 to")),
    "journal of a number": (lambda s: s.journal(7), Bad(MessageIdError, "id", "an int", "a str")),
    "journal after text": (lambda s: s.journal(after="x"), Bad(ConfigurationError, "after", "'x'", NO_COUNT)),
}


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
    assert_clear(caught.value, Bad(TargetNotAllowedError, "to", repr(target), "the setting allowed_targets"))
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
async def test_target_allowed(allowed: Collection[str] | None, target: str, clock: VirtualClock) -> None:
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
    "largest payload": call(event=b"\x00" * MOST_PAYLOAD, to="sink:x"),
    "empty payload": call(event=b"", to="sink:x"),
    "payload of None": call(event=Pay(None)),
    "payload of bytes": call(event=Pay(b"\x00\xff")),
    "address of 255 bytes": call(event=b"x", to="sink:" + "é" * 127 + "x"),
    "address with colons": call(event=b"x", to="sink:a:b://c d"),
    "to an enum": call(event=b"x", to=To.SINK),
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
