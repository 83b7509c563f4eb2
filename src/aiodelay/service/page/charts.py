"""Where the bars stand: geometry of the charts, in the units of their `viewBox`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiodelay.model import LoadBucket
from aiodelay.queries import Lateness
from aiodelay.shapes import time_shape

from .state import Span

__all__ = ["Bar", "Bars", "Column", "lateness_columns", "load_bars"]

HEIGHT = 100
LEAST = 1.5
LABELS = ("1", "2", "5", "10", "20", "50", "100", "200", "500", "1\u00a0s", "2\u00a0s", "5\u00a0s", "10\u00a0s")
LATE_LABELS = (*LABELS, "1\u00a0min", "10\u00a0min", "1\u00a0h", "more")


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar; `title` says it in words."""

    x: int
    y: float
    height: float
    count: int
    from_ms: int
    title: str
    is_peak: bool


@dataclass(frozen=True, slots=True)
class Bars:
    """A chart of what comes.

    Attributes:
        bars: Those that are not empty.
        width: Of the chart: one unit per span.
        total: How many come.
        peak: The highest of the bars.
        ticks: Instants below it, evenly spread.
        busiest: The highest bars, highest first.
    """

    bars: Sequence[Bar]
    width: int
    total: int
    peak: Bar | None
    ticks: Sequence[int]
    busiest: Sequence[Bar]


def load_bars(load: Sequence[LoadBucket], span: Span, now_ms: int) -> Bars:
    """Return the chart of what comes due."""
    by_place: dict[int, list[LoadBucket]] = {}
    for each in load:
        place = (each.from_ms - now_ms + span.bucket_ms // 2) // span.bucket_ms
        by_place.setdefault(min(max(place, 0), span.buckets - 1), []).append(each)
    most = max((sum(each.messages for each in found) for found in by_place.values()), default=0)
    bars = [_bar(place, found, most) for place, found in sorted(by_place.items())]
    peak = next((bar for bar in bars if bar.is_peak), None)
    step = span.buckets * span.bucket_ms // 4
    return Bars(
        bars,
        span.buckets,
        sum(bar.count for bar in bars),
        peak,
        [now_ms + i * step for i in range(5)],
        sorted(bars, key=lambda bar: (-bar.count, bar.x))[:5],
    )


def _bar(place: int, found: Sequence[LoadBucket], most: int) -> Bar:
    count = sum(each.messages for each in found)
    height = max(count / most * HEIGHT, LEAST)
    lanes = ", ".join(f"{each.lane} {each.messages}" for each in sorted(found, key=lambda each: -each.messages)[:4])
    from_ms = found[0].from_ms
    title = f"{time_shape(from_ms)[:16].replace('T', ' ')} UTC: {count} ({lanes})"
    return Bar(place, round(HEIGHT - height, 2), round(height, 2), count, from_ms, title, count == most)


@dataclass(frozen=True, slots=True)
class Column:
    """How many were that late."""

    x: int
    y: float
    height: float
    count: int
    label: str
    holds: str


def lateness_columns(lateness: Lateness) -> Sequence[Column]:
    """Return the histogram; `holds` says which of p50 and p99 a column has."""
    most = max((count for _, count in lateness.buckets), default=0) or 1
    columns = []
    for i, (bound, count) in enumerate(lateness.buckets):
        before = lateness.buckets[i - 1][0] if i else -1
        height = max(count / most * HEIGHT, LEAST) if count else 0.0
        holds = [
            name
            for name, value in (("p50", lateness.p50_ms), ("p99", lateness.p99_ms))
            if value is not None and before is not None and value > before and (bound is None or value <= bound)
        ]
        columns.append(Column(i, round(HEIGHT - height, 2), round(height, 2), count, LATE_LABELS[i], " ".join(holds)))
    return columns
