"""Spreads: each id has its own place in the span, and always the same one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodelay import Conflict, Cron, Every, Late, Scheduler
from aiodelay.core.recurrence import decode_rule, describe, encode_rule, first_due, next_due, placed
from aiodelay.core.spread import spread_ms_of
from aiodelay.errors import ScheduleTimeError
from aiodelay.memory import MemoryStore
from aiodelay.operations.json_shapes import read_rule, rule_shape
from aiodelay.testing.clock import VirtualClock

MINUTE_MS, DAY_MS = 60_000, 86_400_000
NINE = Cron("0 9 * * *", spread="5m")
MIDNIGHT_MS = 1_893_456_000_000
NINE_MS = MIDNIGHT_MS + 9 * 60 * MINUTE_MS


@dataclass
class Digest:
    n: int


def test_the_places_of_many_ids_fill_the_span_evenly() -> None:
    counts = Counter(spread_ms_of(f"user-{n}", 5 * MINUTE_MS) // MINUTE_MS for n in range(10_000))
    assert sorted(counts) == [0, 1, 2, 3, 4]
    assert min(counts.values()) > 1_800


@given(st.text(), st.integers(1, 10**12))
def test_a_place_lies_in_the_span(message_id: str, span_ms: int) -> None:
    assert 0 <= spread_ms_of(message_id, span_ms) < span_ms


def test_a_place_never_changes() -> None:
    """Messages that are stored already have been placed by this function."""
    assert [spread_ms_of(each, 300_000) for each in ("a", "b", "user-7")] == [76_138, 155_212, 73_618]


def test_the_occurrences_of_a_series_have_the_same_place_each_day() -> None:
    rule = placed(NINE, "user-7")
    moved_ms = spread_ms_of("user-7", 5 * MINUTE_MS)
    first = first_due(rule, MIDNIGHT_MS)
    assert first == NINE_MS + moved_ms
    assert next_due(rule, first, first) == first + DAY_MS
    assert first_due(rule, NINE_MS) == first  # after the match, and before the series' place
    assert first_due(rule, first) == first + DAY_MS


def test_a_stored_rule_keeps_its_place() -> None:
    rule = placed(NINE, "user-7")
    read = decode_rule(encode_rule(rule))
    assert (read, first_due(read, MIDNIGHT_MS)) == (NINE, first_due(rule, MIDNIGHT_MS))
    assert encode_rule(rule) != encode_rule(placed(NINE, "user-8"))
    assert "w" not in encode_rule(Cron("0 9 * * *"))
    assert placed(Every("1h"), "user-7") == Every("1h")


def test_a_spread_is_shown() -> None:
    assert describe(NINE) == "At 09:00 every day (UTC), spread over 5m"
    assert read_rule(rule_shape(NINE)) == NINE
    assert read_rule({"cron": "0 9 * * *", "spread": "300s"}) == NINE


@pytest.mark.parametrize("spread", ["5", "0s", ""])
def test_a_wrong_spread_of_a_rule_is_refused(spread: str) -> None:
    with pytest.raises(ScheduleTimeError) as caught:
        Cron("0 9 * * *", spread=spread)
    assert caught.value.field == "every.spread"


@pytest.mark.asyncio
async def test_a_message_moves_within_its_span() -> None:
    clock = VirtualClock()
    at = datetime(2030, 1, 1, 9, tzinfo=UTC)
    moved = timedelta(milliseconds=spread_ms_of("m", 5 * MINUTE_MS))
    async with Scheduler(MemoryStore(clock=clock), clock=clock, dispatch=False) as scheduler:
        by_time = await scheduler.schedule(Digest(1), at=at, id="m", spread="5m", late=Late.drop("1m"))
        assert by_time.due == at + moved
        snapshot = await scheduler.get("m")
        assert snapshot is not None
        assert snapshot.record.expires_ms == by_time.due_ms + MINUTE_MS
        by_delay = await scheduler.schedule(Digest(1), delay="1h", id="m", spread=timedelta(minutes=5))
        assert by_delay.due_ms == clock.now_ms() + 60 * MINUTE_MS + moved // timedelta(milliseconds=1)
        series = await scheduler.schedule(Digest(1), every=NINE, id="s")
        assert series.due_ms == first_due(placed(NINE, "s"), clock.now_ms())


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"delay": "1h", "spread": "5"}, "spread"),
        ({"delay": "1h", "spread": "0s"}, "spread"),
        ({"every": NINE, "spread": "5m"}, "spread"),
        ({"spread": "5m"}, "at, delay, every"),
        ({"spread": "5m", "conflict": Conflict.debounce("5s")}, "at, delay, every"),
    ],
    ids=["no unit", "nothing", "with every", "without a time", "debounced"],
)
@pytest.mark.asyncio
async def test_a_wrong_spread_is_refused(arguments: dict[str, object], field: str) -> None:
    async with Scheduler(MemoryStore(), dispatch=False) as scheduler:
        with pytest.raises(ScheduleTimeError) as caught:
            await scheduler.schedule(Digest(1), id="m", **arguments)  # type: ignore[arg-type]
    assert caught.value.field == field
