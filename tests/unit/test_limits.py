"""Limits as callers write them, the rules that count, and what a scheduler makes of them."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodelay import Limit, Scheduler, event
from aiodelay.backends.registry import open_store
from aiodelay.core import limits as rules
from aiodelay.core.limits import PARTS, Use
from aiodelay.core.values import Envelope, LaneLimits, lane_limits
from aiodelay.errors import ConfigurationError, PayloadTypeError, UnsupportedByStoreError
from aiodelay.memory import MemoryStore
from aiodelay.testing.faults import FaultyStore
from tests.support.waiting import until

MINUTE_MS = 60_000


# --- Limit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "window"),
    [
        ("5/min", (5, 60_000)),
        ("5/m", (5, 60_000)),
        ("1000/s", (1000, 1000)),
        ("10/5m", (10, 300_000)),
        ("1/PT2H", (1, 7_200_000)),
        ("100/day", (100, 86_400_000)),
        ("3/250ms", (3, 250)),
        (None, None),
    ],
)
def test_a_rate_is_a_number_per_time(rate: str | None, window: tuple[int, int] | None) -> None:
    assert Limit(concurrency=1, rate=rate).window == window


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "limit"),
        ({"concurrency": 0}, "limit.concurrency"),
        ({"concurrency": True}, "limit.concurrency"),
        ({"concurrency": 100_001}, "limit.concurrency"),
        ({"concurrency": 1, "key": "a b"}, "limit.key"),
        ({"concurrency": 1, "key": 3}, "limit.key"),
        *(
            ({"rate": rate}, "limit.rate")
            for rate in ("", "5", "0/s", "5/", "5/x", "-1/s", "1/8d", "9999999/s", 5, "1/0s")
        ),
    ],
)
def test_a_wrong_limit_is_refused_by_name(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Limit(**arguments)  # type: ignore[arg-type]
    assert caught.value.setting == field


@pytest.mark.parametrize("limits", [[Limit(concurrency=1), Limit(rate="1/s")], [Limit("a", 1), Limit("b", 1)], [3]])
def test_a_lane_has_one_limit_of_each_kind(limits: Sequence[Limit]) -> None:
    with pytest.raises(ConfigurationError, match="limit"):
        lane_limits(limits)


def test_the_key_of_a_message() -> None:
    keyed = Envelope("m", "lane", "x", key=b"k")
    assert lane_limits([Limit("customer", 1)]).key_of(keyed) == b"k"
    assert lane_limits([Limit("address", 1)]).key_of(keyed) == b"x"
    assert LaneLimits().key_of(Envelope("m", "lane")) == b""
    assert [bool(each) for each in (LaneLimits(), lane_limits([Limit(concurrency=1)]))] == [False, True]


# --- the rules --------------------------------------------------------------------------------------------


def test_without_a_limit_there_is_room() -> None:
    assert rules.room(None, Use(9), 0) is None
    assert (rules.why_full(None, Use(9), 0), rules.next_ms(None, Use(9), 0)) == ("", None)
    assert rules.next_ms(Limit(concurrency=1), Use(9), 0) is None


def test_messages_in_flight_use_the_room_up() -> None:
    limit = Limit(concurrency=2)
    use = rules.began(limit, Use(), 2, 0)
    assert (use, rules.room(limit, use, 0), rules.why_full(limit, use, 0)) == (Use(2), 0, "concurrency")
    assert rules.room(limit, Use(3), 0) == 0
    assert rules.why_full(limit, Use(1), 0) == ""


@given(
    most=st.integers(1, 20),
    span_ms=st.sampled_from([50, 1000, MINUTE_MS]),
    waits=st.lists(st.integers(0, 3000), min_size=1, max_size=60),
)
def test_no_span_has_more_beginnings_than_the_rate(most: int, span_ms: int, waits: list[int]) -> None:
    limit = Limit(rate=f"{most}/{span_ms}ms")
    use, now, begun = Use(), 1_000_000, []
    for wait in waits:
        now += wait
        room = rules.room(limit, use, now) or 0
        taking = min(room, 1 + wait % 7)
        begun += [now] * taking
        use = rules.began(limit, use, taking, now) if taking else use
        next_ms = rules.next_ms(limit, use, now)
        assert (next_ms is None) == bool(rules.room(limit, use, now))
        if next_ms is not None:
            assert now < next_ms <= now + span_ms + span_ms // PARTS + 1
            assert not rules.room(limit, use, next_ms - 1)
            assert rules.room(limit, use, next_ms)
            assert rules.why_full(limit, use, now) == "rate"
        assert len(use.marks) <= PARTS + 1
    assert all(later - first >= span_ms for first, later in zip(begun, begun[most:], strict=False))


def test_room_comes_when_enough_beginnings_no_longer_count() -> None:
    limit, marks = Limit(rate="2/min"), ((1000, 1), (2000, 1), (3000, 1))  # the rate was higher before
    assert rules.next_ms(limit, Use(0, marks), 4000) == 2000 + MINUTE_MS
    assert rules.counted(None, marks, 4000) == ()


def test_a_mark_far_ahead_was_made_before_the_clock_stepped_back() -> None:
    limit = Limit(rate="1/min")
    use = rules.began(limit, Use(), 1, 10 * MINUTE_MS)
    assert rules.room(limit, use, 10 * MINUTE_MS - 1) == 0
    assert rules.room(limit, use, 9 * MINUTE_MS) == 1


# --- declarations -----------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


@event("limits.check", limit=Limit("customer", 2))
@dataclass
class Check:
    customer: object


@event("limits.paid", limit=Limit("customer", 2))
@dataclass
class Paid:
    customer: str


@dataclass
class Plain:
    customer: str = "c"


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("c", b"c"),
        (7, b"7"),
        (UUID(int=1), b"00000000-0000-0000-0000-000000000001"),
        (Colour.RED, b"red"),
        (None, None),
    ],
)
@pytest.mark.asyncio
async def test_the_field_of_the_event_gives_the_key(value: object, key: bytes | None) -> None:
    async with Scheduler("memory://", dispatch=False, check_events=False) as scheduler:
        await scheduler.schedule(Check(value), delay="1h", id="m")
        await scheduler.schedule(Check("c"), delay="1h", id="own", key=b"own")
        found = [await scheduler.get(name) for name in ("m", "own")]
    assert [each and each.record.envelope.key for each in found] == [key, b"own"]


@pytest.mark.asyncio
async def test_a_field_that_gives_no_key_is_refused() -> None:
    async with Scheduler("memory://", dispatch=False, check_events=False) as scheduler:
        with pytest.raises(PayloadTypeError, match=r"event\.customer.*list"):
            await scheduler.schedule(Check(["c"]), delay="1h")


@pytest.mark.parametrize(
    ("limit", "why"),
    [
        (Limit("city", 1), "a field of Plain"),
        (Limit("address", 1), "the key of sinks"),
        ("5/min", "Limit"),
        ([Limit("customer", 1), Limit("customer", 2)], "two limits with a key"),
    ],
)
def test_a_wrong_declaration_is_refused(limit: Limit, why: str) -> None:
    async def handle(event: Plain) -> None: ...

    with pytest.raises(ConfigurationError, match=why):
        event("limits.plain", limit=limit)(Plain)
    with pytest.raises(ConfigurationError, match=why):
        Scheduler("memory://").handler(limit=limit)(handle)


def test_a_handler_has_the_limits_of_its_event_type_or_its_own() -> None:
    scheduler = Scheduler("memory://")

    async def check(event: Check) -> None: ...

    with pytest.raises(ConfigurationError, match="given to the handler and to Check"):
        scheduler.handler(limit=Limit("customer", 3))(check)
    scheduler.handler(limit=Limit("customer", 2))(check)


def test_a_source_has_no_limits() -> None:
    async def check(event: Check) -> None: ...

    with pytest.raises(ConfigurationError, match="source"):
        Scheduler("redis://127.0.0.1:1").handler(source="redis-list:x")(check)


def test_a_store_without_limits_refuses_them() -> None:
    async def check(event: Check) -> None: ...

    with pytest.raises(UnsupportedByStoreError, match="a store with limits"):
        Scheduler("kafka://127.0.0.1:1/schedules").handler(check)


# --- a scheduler ------------------------------------------------------------------------------------------


def declaring(store: MemoryStore, *limits: Limit) -> Scheduler:
    """Return a scheduler whose code declares limits."""
    made = Scheduler(store)

    @made.handler(limit=limits)
    async def handle(event: Plain) -> None: ...

    return made


@pytest.mark.asyncio
async def test_a_limit_that_an_operator_has_ended_holds_when_the_code_declares_it_again() -> None:
    store, two = MemoryStore(), Limit("customer", 2)
    async with declaring(store, two) as opened:
        await opened.set_limits(Plain)
    for declared, found in [((two,), {}), ((), {}), ((two,), {"Plain": (two,)})]:
        async with declaring(store, *declared) as opened:
            assert await opened.limits() == found


@pytest.mark.asyncio
async def test_declarations_are_stored_when_a_scheduler_opens_and_end_with_the_code() -> None:
    scheduler = partial(declaring, MemoryStore())
    async with scheduler(Limit("customer", 2)) as opened:
        assert await opened.limits() == {"Plain": (Limit("customer", 2),)}
        await opened.set_limits(Plain, Limit("customer", 5), Limit(rate="9/s"))
    async with scheduler(Limit("customer", 2)) as opened:
        assert await opened.limits() == {"Plain": (Limit(rate="9/s"), Limit("customer", 5))}
    async with scheduler() as opened:
        assert await opened.limits() == {}
        await opened.set_limits("Plain", Limit(concurrency=1))
    async with scheduler() as opened:
        assert await opened.limits() == {"Plain": (Limit(concurrency=1),)}


@pytest.mark.asyncio
async def test_a_handler_that_is_added_while_the_scheduler_is_open_has_its_limits_first() -> None:
    running, most, ended = 0, 0, 0

    async def check(event: Paid) -> None:
        nonlocal running, most, ended
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        ended += 1

    async with Scheduler("memory://") as scheduler:
        for n in range(20):
            await scheduler.schedule(Paid("c"), delay="0s", id=f"m{n}")
        scheduler.add_handler(check)
        await until(lambda: ended == 20, "20 runs")
    assert most == 2


@pytest.mark.asyncio
async def test_operators_are_told_what_cannot_be_limited() -> None:
    async with Scheduler("memory://", sinks=["stdout:"], dispatch=False) as scheduler:
        with pytest.raises(ConfigurationError, match="without an address"):
            await scheduler.set_limits("stdout:x", Limit(concurrency=1))
        with pytest.raises(ConfigurationError, match="'address', or no key"):
            await scheduler.set_limits("stdout", Limit("customer", 1))
        await scheduler.set_limits("stdout", Limit("address", 1))
        assert await scheduler.limited_keys("stdout") == []


@pytest.mark.asyncio
async def test_a_limit_by_address_may_be_of_a_sink_of_another_process_but_of_no_handler() -> None:
    scheduler = Scheduler("memory://")
    scheduler.add_handler(_checks_payments)
    async with scheduler:
        with pytest.raises(ConfigurationError, match=r"limits\.paid is no sink"):
            await scheduler.set_limits(Paid, Limit("address", 1))
        await scheduler.set_limits("webhook", Limit("address", 1))
        assert (await scheduler.limits())["webhook"] == (Limit("address", 1),)


async def _checks_payments(event: Paid) -> None: ...


@pytest.mark.asyncio
async def test_the_key_of_an_operators_limit_gives_no_message_a_key() -> None:
    async with Scheduler("memory://", dispatch=False) as scheduler:
        await scheduler.set_limits(Plain, Limit("customer", 1))
        for n, key in enumerate((None, None, b"k")):
            await scheduler.schedule(Plain(f"c{n}"), delay="0s", id=f"m{n}", key=key)
        keys = {each.key: each.waiting for each in await scheduler.limited_keys(Plain)}
        assert keys == {b"": 2, b"k": 1}


@pytest.mark.asyncio
async def test_a_store_with_faults_has_the_limits_of_the_store_within() -> None:
    async with FaultyStore(MemoryStore()) as store:
        await store.set_limits("Plain", lane_limits([Limit(concurrency=1)]), is_declared=True)
        assert await store.limits() == {"Plain": lane_limits([Limit(concurrency=1)])}
        assert await store.limited_keys("Plain") == []
    without = FaultyStore(open_store("kafka://127.0.0.1:1/schedules", namespace="default", clock=None))
    assert await without.limits() == {}
    with pytest.raises(UnsupportedByStoreError, match="a store with limits"):
        await without.set_limits("Plain", LaneLimits(), is_declared=False)
