"""The forecast for a backlog matches the simulated delivery of each message, within the stated bound."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aiodelay.core.load_forecast import ComingLoad
from aiodelay.spark.forecast import HOUR_MS, MESSAGE, Arrivals, Forecast, Hour, Span, forecast

FROM_MS = 1_900_000_000_000 // HOUR_MS * HOUR_MS + 1_234_567
"""Within an hour."""


class Played(NamedTuple):
    """What happened: when messages were due, begun and ended, in ms from the start."""

    due: list[int]
    begun: list[Fraction]
    ended: list[Fraction]

    def backlog(self, number: int) -> int:
        """Return how many messages were due and not ended when that one and those of the same instant came due."""
        at = self.due[number]
        return bisect_right(self.due, at) - bisect_right(self.ended, at)

    def drained(self, number: int) -> Fraction:
        """Return when, after that message, nothing was left for the first time."""
        while number + 1 < len(self.due) and self.due[number + 1] <= self.ended[number]:
            number += 1
        return self.ended[number]


def play(due: Sequence[int], rate: float) -> Played:
    """Serve messages one by one: each begins when it is due and the one before has ended."""
    due, takes = sorted(due), Fraction(1_000_000, round(rate * 1000))
    begun, free = list[Fraction](), Fraction()
    for at in due:
        begun.append(max(Fraction(at), free))
        free = begun[-1] + takes
    return Played(due, begun, [each + takes for each in begun])


def rank(values: Sequence[Fraction], percent: int) -> Fraction:
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def arrivals_of(due: Sequence[int], slot_ms: int) -> Arrivals:
    """Count messages by slot, as Spark does."""
    begins = [max(0, (FROM_MS + at) // slot_ms * slot_ms - FROM_MS) for at in due]
    at_ms, n = np.unique(np.array(begins, np.int64), return_counts=True)
    return Arrivals(at_ms, n.astype(np.int64))


def foretell(due: Sequence[int], rate: float, span_ms: int, slot_ms: int = 1, weight: int = MESSAGE) -> Forecast:
    return forecast(arrivals_of(due, slot_ms), round(rate * 1000), Span(FROM_MS, FROM_MS + span_ms), weight)


def check_lateness(found: Forecast | Hour, due: Sequence[int], begun: Sequence[Fraction], bound_ms: float) -> None:
    late = [begin - at for begin, at in zip(begun, due, strict=True)]
    assert found.messages == len(late)
    if not late:
        assert {found.p50_ms, found.p95_ms, found.p99_ms, found.max_ms} == {None}
        return
    told = {50: found.p50_ms, 95: found.p95_ms, 99: found.p99_ms, 100: found.max_ms}
    for percent, ms in told.items():
        assert ms is not None
        assert abs(ms - rank(late, percent)) <= bound_ms, percent


BURSTS = st.lists(st.tuples(st.integers(0, 3 * HOUR_MS - 1), st.integers(1, 60), st.integers(0, 4000)), max_size=12)


@settings(max_examples=300, deadline=None)
@given(
    bursts=BURSTS, rate=st.sampled_from([0.004, 0.02, 0.7, 3, 50, 1000]), slot_ms=st.sampled_from([1, 10, 1000, 60_000])
)
@example(bursts=[(0, 1, 0)], rate=0.02, slot_ms=1)
@example(bursts=[(0, 60, 0), (3 * HOUR_MS - 1, 60, 0)], rate=0.004, slot_ms=1000)
def test_a_forecast_is_what_happens_within_a_slot_and_the_time_of_a_message(
    bursts: list[tuple[int, int, int]], rate: float, slot_ms: int
) -> None:
    span_ms = 3 * HOUR_MS
    due = [min(at + k * apart, span_ms - 1) for at, n, apart in bursts for k in range(n)]
    found, played = foretell(due, rate, span_ms, slot_ms), play(due, rate)
    bound_ms = slot_ms + 1000 / rate + 1
    check_lateness(found, played.due, played.begun, bound_ms)
    assert abs(found.left_ms - max(Fraction(), max(played.ended, default=Fraction()) - span_ms)) <= bound_ms
    if slot_ms == 1 and due:
        backlogs = {FROM_MS + at: played.backlog(number) for number, at in enumerate(played.due)}
        assert found.backlog == max(backlogs.values()) == backlogs[found.worst_ms or 0]
        drained_ms = math.ceil(played.drained(played.due.index((found.worst_ms or 0) - FROM_MS)))
        assert found.drained_ms == (FROM_MS + drained_ms if drained_ms <= span_ms else None)
    assert found.left == pytest.approx(found.left_ms * rate / 1000, abs=1 + rate / 1000)
    assert found.load == pytest.approx(len(due) / (rate * span_ms / 1000))
    for hour in found.hours:
        since, until = hour.from_ms - FROM_MS, (hour.from_ms // HOUR_MS + 1) * HOUR_MS - FROM_MS
        some = [number for number, at in enumerate(played.due) if since <= at < until]
        check_lateness(hour, [played.due[each] for each in some], [played.begun[each] for each in some], bound_ms)
        assert 0 <= hour.utilisation <= 1
    assert sum(hour.messages for hour in found.hours) == len(due)
    assert found.hours[-1].left == found.left


def test_hours_without_messages_pass_the_backlog_on() -> None:
    found = foretell([0] * 9000, 1, 4 * HOUR_MS)
    assert [hour.messages for hour in found.hours] == [9000, 0, 0, 0, 0]
    first_s = (HOUR_MS - FROM_MS % HOUR_MS) / 1000
    left = [math.ceil(max(0, 9000 - first_s - 3600 * n)) for n in range(5)]
    assert [hour.left for hour in found.hours] == left
    assert [hour.backlog for hour in found.hours] == [9000, *left[:-1]]
    assert [hour.p99_ms for hour in found.hours[1:]] == [None] * 4
    assert (found.p50_ms, found.p99_ms, found.max_ms) == (4_499_000, 8_909_000, 8_999_000)
    assert [hour.utilisation for hour in found.hours][:3] == [1, 1, pytest.approx((9000 - first_s - 3600) / 3600)]
    assert found.utilisation == pytest.approx(9000 / (4 * 3600))


def test_more_traffic_is_that_of_as_many_messages_more() -> None:
    due = [at * 997 % HOUR_MS for at in range(4000)]
    scaled, more = foretell(due, 2, HOUR_MS, weight=3 * MESSAGE), foretell(due * 3, 2, HOUR_MS)
    assert (scaled.messages, scaled.load, scaled.left) == (12_000, more.load, more.left)
    assert abs((scaled.p50_ms or 0) - (more.p50_ms or 0)) <= 3 * 500
    assert abs((scaled.max_ms or 0) - (more.max_ms or 0)) <= 3 * 500
    assert more.load > 1
    assert more.drained_ms is None


@settings(max_examples=100, deadline=None)
@given(bursts=BURSTS, rate=st.sampled_from([0.02, 3, 50, 1000]), slot_ms=st.sampled_from([1000, 60_000]))
def test_aiodelay_load_forecasts_the_same(bursts: list[tuple[int, int, int]], rate: float, slot_ms: int) -> None:
    """It needs no Spark and no numpy, and answers less. What both answer is the same."""
    span_ms = 3 * HOUR_MS
    due = [min(at + k * apart, span_ms - 1) for at, n, apart in bursts for k in range(n)]
    arrivals = arrivals_of(due, slot_ms)
    slots = {FROM_MS + at: n for at, n in zip(arrivals.at_ms.tolist(), arrivals.n.tolist(), strict=True)}
    here = ComingLoad(slots, slot_ms, FROM_MS, FROM_MS + span_ms, 0, rate).forecast()
    there = foretell(due, rate, span_ms, slot_ms)
    assert here.most_ms == pytest.approx(there.max_ms or 0, abs=1)
    assert here.late_ms.get(there.worst_ms or 0, 0) == pytest.approx(here.most_ms, abs=1)
    if here.worst_ms == there.worst_ms and here.empty_ms != pytest.approx(there.drained_ms, abs=1):
        ends = [*slots, FROM_MS + span_ms]  # the queue is empty at the instant at which the next messages come due
        assert any(abs(end - (here.empty_ms or there.drained_ms or 0)) <= 1 for end in ends)
