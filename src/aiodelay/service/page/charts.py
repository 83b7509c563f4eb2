"""Geometry of the charts: positions and sizes of bars, in the units of the SVG `viewBox`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aiodelay.core.values import LoadBucket
from aiodelay.operations.activity import Activity, Minute
from aiodelay.operations.json_shapes import time_shape
from aiodelay.operations.queries import Lateness

from .state import Span

__all__ = [
    "Bar",
    "Bars",
    "Column",
    "Columns",
    "Part",
    "Past",
    "Stack",
    "lateness_columns",
    "load_bars",
    "past_stacks",
    "scale_of",
]

HEIGHT = 100
LEAST = 1.5
MOST_LINES = 4


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of the chart of coming messages. `title` describes it in words."""

    x: int
    y: float
    height: float
    count: int
    from_ms: int
    title: str
    is_peak: bool


@dataclass(frozen=True, slots=True)
class Bars:
    """The chart of the messages that come due.

    Attributes:
        bars: The bars that are not empty.
        width: The width of the chart: one unit per bucket.
        total: The number of messages in all bars.
        peak: The highest bar; None if there are no messages.
        scale: The numbers of the vertical axis, evenly spread, highest first; the last is 0.
        ticks: The times of the horizontal axis, evenly spread.
        busiest: The five highest bars, highest first.
    """

    bars: Sequence[Bar]
    width: int
    total: int
    peak: Bar | None
    scale: Sequence[int]
    ticks: Sequence[int]
    busiest: Sequence[Bar]


def load_bars(load: Sequence[LoadBucket], span: Span, now_ms: int) -> Bars:
    """Return the chart of the messages that come due."""
    by_place: dict[int, list[LoadBucket]] = {}
    for each in load:
        place = (each.from_ms - now_ms + span.bucket_ms // 2) // span.bucket_ms
        by_place.setdefault(min(max(place, 0), span.buckets - 1), []).append(each)
    most = max((sum(each.messages for each in found) for found in by_place.values()), default=0)
    scale = scale_of(most)
    bars = [_bar(place, found, most, scale[0]) for place, found in sorted(by_place.items())]
    peak = next((bar for bar in bars if bar.is_peak), None)
    step = span.buckets * span.bucket_ms // 4
    return Bars(
        bars,
        span.buckets,
        sum(bar.count for bar in bars),
        peak,
        scale,
        [now_ms + i * step for i in range(5)],
        sorted(bars, key=lambda bar: (-bar.count, bar.x))[:5],
    )


def scale_of(most: int) -> Sequence[int]:
    """Return round numbers for an axis from 0 to at least `most`, evenly spread, highest first."""
    steps = (factor * 10**power for power in range(19) for factor in (1, 2, 5))
    step = next(step for step in steps if step * MOST_LINES >= most)
    return range(-(-max(most, 1) // step) * step, -1, -step)


def _bar(place: int, found: Sequence[LoadBucket], most: int, top: int) -> Bar:
    messages = sum(each.messages for each in found)
    height = max(messages / top * HEIGHT, LEAST)
    lanes = ", ".join(f"{each.lane} {each.messages}" for each in sorted(found, key=lambda each: -each.messages)[:4])
    from_ms = found[0].from_ms
    title = f"{time_shape(from_ms)[:16].replace('T', ' ')} UTC: {messages} ({lanes})"
    return Bar(place, round(HEIGHT - height, 2), round(height, 2), messages, from_ms, title, messages == most)


@dataclass(frozen=True, slots=True)
class Column:
    """One bar of the histogram: the deliveries that were later than `above_ms`, and at most `upto_ms` late.

    If `upto_ms` is None, there is no upper bound.
    """

    x: int
    y: float
    height: float
    count: int
    above_ms: int
    upto_ms: int | None
    holds: str


@dataclass(frozen=True, slots=True)
class Columns:
    """The histogram of lateness. `scale` means the same as in `Bars`."""

    columns: Sequence[Column]
    scale: Sequence[int]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a stacked bar: its kind, position and height."""

    kind: str
    y: float
    height: float


@dataclass(frozen=True, slots=True)
class Stack:
    """The stacked bar of one minute: the attempts that ended in it, by kind. `title` describes it in words."""

    x: int
    parts: Sequence[Part]
    title: str


@dataclass(frozen=True, slots=True)
class Past:
    """The chart of the last hour.

    Attributes:
        stacks: The bars of minutes in which attempts ended.
        unknown: The number of minutes at the left end for which the counts are not known.
        totals: The number of attempts of each kind.
        scale: See `Bars`.
        ticks: See `Bars`.
    """

    stacks: Sequence[Stack]
    unknown: int
    totals: Mapping[str, int]
    scale: Sequence[int]
    ticks: Sequence[int]


KINDS = ("delivered", "retried", "given_up")


def past_stacks(activity: Activity) -> Past:
    """Return the chart of the attempts that ended in each minute of the last hour."""
    minutes = activity.minutes
    scale = scale_of(max(sum(getattr(each, kind) for kind in KINDS) for each in minutes))
    stacks = [_stack(x, each, scale[0]) for x, each in enumerate(minutes)]
    since_ms = activity.since_ms or 0
    first, last = minutes[0].from_ms, minutes[-1].from_ms
    return Past(
        [each for each in stacks if each.parts],
        sum(each.from_ms < since_ms for each in minutes),
        {kind: sum(getattr(each, kind) for each in minutes) for kind in KINDS},
        scale,
        [first + (last - first) * i // 4 for i in range(5)],
    )


def _stack(x: int, minute: Minute, top: int) -> Stack:
    parts, y = list[Part](), float(HEIGHT)
    for kind in KINDS:
        if count := getattr(minute, kind):
            height = max(count / top * HEIGHT, LEAST)
            y -= height
            parts.append(Part(kind, round(y, 2), round(height, 2)))
    counts = ", ".join(f"{getattr(minute, kind)} {kind.replace('_', ' ')}" for kind in KINDS)
    return Stack(x, parts, f"{time_shape(minute.from_ms)[:16].replace('T', ' ')} UTC: {counts}")


def lateness_columns(lateness: Lateness) -> Columns:
    """Return the histogram of lateness. The attribute `holds` of a column names the percentiles in it: p50, p99."""
    scale = scale_of(max(count for _, count in lateness.buckets))
    columns = []
    for i, (bound, count) in enumerate(lateness.buckets):
        above_ms = lateness.buckets[i - 1][0] if i else -1
        height = max(count / scale[0] * HEIGHT, LEAST) if count else 0.0
        holds = [
            name
            for name, value in (("p50", lateness.p50_ms), ("p99", lateness.p99_ms))
            if value is not None and above_ms is not None and value > above_ms and (bound is None or value <= bound)
        ]
        y = round(HEIGHT - height, 2)
        columns.append(Column(i, y, round(height, 2), count, max(above_ms or 0, 0), bound, " ".join(holds)))
    return Columns(columns, scale)
