from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodelay.cli.report import Attempt, Report, Tally
from aiodelay.cli.screen import Screen

STARTED = datetime(2030, 1, 1, tzinfo=UTC)


@given(st.lists(st.integers(0, 50), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_nearest_rank(lateness_ms: list[int], percent: int) -> None:
    expected = sorted(lateness_ms)[-(-len(lateness_ms) * percent // 100) - 1]
    assert Tally(lateness_ms=Counter(lateness_ms)).percentile_ms(percent) == expected


def test_nothing_measured_has_no_percentile() -> None:
    assert Tally().percentile_ms(50) is None
    assert Tally(scheduled=1).summary(None) == (
        "scheduled 1 │ delivered 0 │ cancelled 0 │ replaced 0 │ retried 0 │ dead 0"
    )


def test_a_summary_ends_with_the_lateness() -> None:
    tally = Tally(scheduled=9, delivered=3, lateness_ms=Counter({1: 2, 7: 1}))
    assert tally.summary(5).endswith("dead 0 │ pending 5 │ lateness p50 1 ms p99 7 ms")


@pytest.fixture
def stream() -> StringIO:
    return StringIO()


@pytest.fixture
def report(stream: StringIO) -> Report:
    return Report(Screen(stream, lambda: None, {}), STARTED)


def attempt(number: int = 1, *, message_id: str = "a", due: datetime = STARTED) -> Attempt:
    return Attempt("Work", message_id, due, 3, number)


def told(stream: StringIO) -> list[str]:
    return [line[14:] for line in stream.getvalue().splitlines()]


def test_only_first_attempts_are_measured(report: Report, stream: StringIO) -> None:
    report.retried(attempt(1), "away, again in 5 ms")
    report.delivered(attempt(2))
    assert report.tally.lateness_ms == {3: 1}
    assert (report.tally.retried, report.tally.delivered) == (1, 1)
    assert told(stream) == [
        "retry        Work          a         late 3 ms, away, again in 5 ms",
        "delivered    Work          a         attempt 2, due 3 ms ago",
    ]


def test_what_was_due_before_the_start_is_told_and_not_measured(report: Report, stream: StringIO) -> None:
    report.delivered(attempt(due=STARTED - timedelta(milliseconds=1)))
    assert not report.tally.lateness_ms
    assert told(stream) == ["delivered    Work          a         late 3 ms (was due before this start)"]


@pytest.mark.parametrize(
    ("message_id", "shown"),
    [("0123456789abcdef0123456789abcdef", "89abcdef"), ("order-7", "order-7"), ("handler:Heartbeat", "handler…")],
)
def test_ids_are_shortened_to_what_tells(report: Report, stream: StringIO, message_id: str, shown: str) -> None:
    report.delivered(attempt(message_id=message_id))
    assert told(stream)[0].split()[2] == shown
