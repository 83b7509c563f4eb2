"""The load forecast: the dispatch rate from backlogs, the lateness of a queue, and the words for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodelay.core.dispatch_rate import BEHIND_MS, LEAST_STARTS, DispatchRate, RateMeter
from aiodelay.core.load_forecast import ComingLoad
from aiodelay.core.values import LaneCounts, LoadBucket
from aiodelay.errors import ConfigurationError
from aiodelay.operations.load_forecast import (
    Asked,
    LaneForecast,
    asked,
    forecast_shape,
    forecasts,
    slot_ms_of,
)

NINE = 1_893_488_400_000  # 2030-01-01T09:00:00Z
MINUTE = 60_000


def load(slots: dict[int, int], *, per_s: float = 500, overdue: int = 0, slot_ms: int = MINUTE) -> ComingLoad:
    to_ms = NINE + 60 * MINUTE
    return ComingLoad({NINE + at_ms: n for at_ms, n in slots.items()}, slot_ms, NINE, to_ms, overdue, per_s)


# --- the queue --------------------------------------------------------------------------------------------


def test_a_burst_is_late_by_its_size_and_a_spread_makes_it_punctual() -> None:
    morning = load({10 * MINUTE: 120_000, 11 * MINUTE: 60})
    found = morning.forecast()
    assert found.worst_ms == NINE + 10 * MINUTE
    assert (found.most_ms, found.late_ms[NINE + 11 * MINUTE]) == (239_998, 180_118)
    assert found.least_ms == pytest.approx(180_000, abs=200), "evenly over the minute"
    assert found.empty_ms == NINE + 14 * MINUTE + 120
    assert morning.spread(5 * MINUTE).late_ms == 0
    suggested = morning.spread_within(10_000)
    assert suggested is not None
    assert (suggested.window_ms, suggested.late_ms) == (5 * MINUTE, 0)
    assert morning.spread(2 * MINUTE).late_ms > 10_000


def test_an_overdue_message_delays_the_next_and_is_not_spread() -> None:
    found = load({0: 1}, overdue=50_000).forecast()
    assert (found.overdue_ms, found.most_ms, found.empty_ms) == (99_998, 100_000, NINE + 100_002)
    assert load({0: 1}, overdue=50_000).spread_within(10_000) is None


def test_nothing_is_late_where_nothing_comes() -> None:
    found = load({}).forecast()
    assert (found.late_ms, found.worst_ms, found.most_ms, found.least_ms, found.empty_ms) == ({}, None, 0, 0, None)


def test_a_queue_that_outlasts_the_span_has_no_end() -> None:
    assert load({0: 10, 59 * MINUTE: 1_000_000}).forecast().empty_ms is None
    assert load({0: 1_000_000_000, MINUTE: 1}).forecast().empty_ms is None


def starts_of(dues: Iterable[int], per_s: float, free_ms: float) -> list[tuple[int, float]]:
    """Simulate one server, message by message; return the due times and the starts."""
    found = []
    for due_ms in sorted(dues):
        start_ms = max(float(due_ms), free_ms)
        free_ms = start_ms + 1000 / per_s
        found.append((due_ms, start_ms))
    return found


SLOTS = st.dictionaries(st.integers(0, 30).map(lambda n: n * 1000), st.integers(1, 40), min_size=1, max_size=12)


@given(SLOTS, st.integers(1, 60), st.integers(0, 50))
def test_the_queue_agrees_with_a_simulation_of_every_message(slots: dict[int, int], per_s: int, overdue: int) -> None:
    queue = load(slots, per_s=per_s, overdue=overdue, slot_ms=1000)
    dues = [NINE + at_ms for at_ms, n in slots.items() for _ in range(n)]
    simulated: Counter[int] = Counter()
    for due_ms, start_ms in starts_of(dues, per_s, NINE + overdue * 1000 / per_s):
        simulated[due_ms] = max(simulated[due_ms], round(start_ms - due_ms))
    found = queue.forecast()
    assert found.late_ms == pytest.approx(dict(simulated), abs=1)
    assert found.least_ms <= found.most_ms
    assert found.worst_ms is not None
    assert found.late_ms[found.worst_ms] == found.most_ms


@given(SLOTS, st.integers(1, 60), st.integers(0, 50), st.integers(1, 40).map(lambda n: n * 500))
def test_a_spread_agrees_with_a_simulation_of_every_message(
    slots: dict[int, int], per_s: int, overdue: int, window_ms: int
) -> None:
    queue = load(slots, per_s=per_s, overdue=overdue, slot_ms=1000)
    dues = [NINE + at_ms + window_ms * i // n for at_ms, n in slots.items() for i in range(n)]
    simulated = max(start - due for due, start in starts_of(dues, per_s, NINE + overdue * 1000 / per_s))
    message_ms = 1000 / per_s
    assert queue.spread(window_ms).late_ms == pytest.approx(simulated, abs=(len(slots) + 2) * message_ms + 1)


# --- the dispatch rate ------------------------------------------------------------------------------------


def rate_of(starts: Sequence[tuple[int, int]]) -> DispatchRate | None:
    meter = RateMeter()
    for at_ms, due_ms in starts:
        meter.note(at_ms, due_ms)
    return meter.rate()


def backlog(from_ms: int, n: int, *, every_ms: int, due_ms: int) -> list[tuple[int, int]]:
    return [(from_ms + i * every_ms, due_ms) for i in range(n)]


def test_a_backlog_gives_the_rate() -> None:
    found = rate_of(backlog(5_000, 101, every_ms=20, due_ms=0))
    assert found == DispatchRate(100, 2_000, 7_000)
    assert found is not None
    assert found.per_s == 50


def test_claims_of_many_messages_count_once_at_the_start() -> None:
    batches = [(5_000 + 1_000 * batch, 0) for batch in range(4) for _ in range(10)]
    found = rate_of(batches)
    assert found is not None
    assert found.per_s == 10, "three batches of 10 in three seconds: the first batch only starts the clock"


def test_a_lane_without_a_backlog_has_no_rate() -> None:
    assert rate_of([(at_ms, at_ms - BEHIND_MS + 1) for at_ms in range(5_000, 50_000, 10)]) is None
    assert rate_of(backlog(5_000, LEAST_STARTS, every_ms=100, due_ms=0)) is None, "one start short"
    assert rate_of(backlog(5_000, 500, every_ms=1, due_ms=0)) is None, "too short"
    assert rate_of([]) is None


def test_times_in_which_no_message_waits_do_not_count() -> None:
    first, second = backlog(5_000, 31, every_ms=100, due_ms=0), backlog(900_000, 31, every_ms=100, due_ms=800_000)
    assert rate_of([*first, *second]) == DispatchRate(60, 6_000, 903_000)
    punctual = [(8_001, 8_001)]
    assert rate_of([*first, *punctual, *backlog(9_500, 31, every_ms=100, due_ms=8_000)]) == DispatchRate(
        60, 6_000, 12_500
    )


def test_a_gap_in_the_journal_begins_a_new_backlog() -> None:
    meter = RateMeter()
    for at_ms, due_ms in backlog(5_000, 31, every_ms=100, due_ms=0):
        meter.note(at_ms, due_ms)
    meter.skip()
    for at_ms, due_ms in backlog(100_000, 31, every_ms=100, due_ms=0):
        meter.note(at_ms, due_ms)
    assert meter.rate() == DispatchRate(60, 6_000, 103_000)


# --- the answer -------------------------------------------------------------------------------------------

SPAN = range(NINE, NINE + 3_600_000, 2_000)
MEASURED = DispatchRate(12_000, 24_000, NINE - MINUTE)


def told(
    *load: LoadBucket, overdue: int = 0, given: Asked | None = None, rates: dict[str, DispatchRate] | None = None
) -> LaneForecast:
    counts = {"mail": LaneCounts(overdue=overdue)}
    (found,) = forecasts(load, counts, {"mail": MEASURED} if rates is None else rates, SPAN, given or Asked())
    return found


BURST = LoadBucket(NINE + 10 * MINUTE, "mail", 120_000)


def test_a_late_lane_is_told_in_words() -> None:
    assert told(BURST).text == (
        "at 2030-01-01 09:10:00Z messages will be up to 4m late, at 500 a second"
        " (measured: 12,000 starts in 24s of backlog, until 2030-01-01 08:59:00Z)"
        "; no message waits any more at 2030-01-01 09:14:00Z; with spread=5m messages will be less than 1s late"
    )
    text = told(BURST, overdue=1_000, given=asked(rate="500/s", spread="2m")).text
    assert text.startswith("at 2030-01-01 09:10:00Z messages will be up to 4m late, at 500 a second; no message")
    assert text.endswith("1,000 are overdue now: the last starts in 2s; with spread=2m messages will be up to 2m late")


def test_a_punctual_lane_is_told_in_words() -> None:
    few, minute = LoadBucket(NINE, "mail", 600), LoadBucket(NINE, "mail", 6_000)
    assert told(few, given=asked("500/s")).text == "messages will be up to 2s late, at 500 a second"
    (found,) = forecasts([minute], {}, {"mail": MEASURED}, range(NINE, NINE + 3_600_000, MINUTE), Asked())
    assert found.text.startswith("messages will be on time, or up to 12s late, at 500 a second (measured")
    assert found.text.endswith("): they are counted per 1m")
    assert told(overdue=7, given=asked("3/2m")).text == (
        "no message comes due; 7 are overdue now: the last starts in 4m, at 0.025 a second"
    )
    endless = told(BURST, overdue=9_000_000, given=asked("100/h")).text
    assert endless.endswith("no spread up to 1d keeps the lateness within 10s")


def test_an_unknown_rate_is_told_in_words() -> None:
    found = told(BURST, rates={})
    assert found.text == "how late messages will be is not known: no backlog was measured"
    shape = forecast_shape(found)
    assert {key for key, value in shape.items() if value is None} == set(shape) - {
        "lane",
        "messages",
        "overdue",
        "text",
    }


def test_each_lane_has_a_forecast_and_a_given_rate_is_for_all() -> None:
    load, counts = [BURST, LoadBucket(NINE, "sms", 5)], {"sms": LaneCounts(), "old": LaneCounts(overdue=1)}
    assert [each.lane for each in forecasts(load, counts, {}, SPAN, Asked())] == ["mail", "old", "sms"]
    (together,) = forecasts(load, counts, {}, SPAN, asked("500/s"))
    assert (together.lane, together.messages, together.overdue, together.measured) == (None, 120_005, 1, None)
    (one,) = forecasts([BURST], {}, {"mail": MEASURED}, SPAN, asked("250/s"), lane="mail")
    assert (one.lane, one.per_s) == ("mail", 250)
    assert forecast_shape(one)["spread"] == "10m"


@pytest.mark.parametrize(
    ("span_ms", "slot_ms"),
    [(1, 1_000), (3_600_000, 2_000), (86_400_000, 60_000), (86_400_000 * 30, 1_800_000), (10**12, 500_000_000)],
)
def test_there_are_at_most_2000_slots(span_ms: int, slot_ms: int) -> None:
    assert slot_ms_of(span_ms) == slot_ms


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"rate": "500"}, "rate"),
        ({"rate": "0/s"}, "rate"),
        ({"rate": "-5/s"}, "rate"),
        ({"rate": "5/year"}, "rate"),
        ({"rate": "x" * 500}, "rate"),
        ({"spread": "0s"}, "spread"),
        ({"spread": "5"}, "spread"),
        ({"within": "0s"}, "within"),
        ({"within": "-1s"}, "within"),
    ],
)
def test_a_wrong_choice_is_refused_by_its_name(given: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        asked(**given)
    assert refused.value.setting == field
    assert refused.value.allowed
    assert len(str(refused.value)) < 300
