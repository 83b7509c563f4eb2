"""Where the bars stand: geometry of the charts, in the units of their `viewBox`."""

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
        scale: Numbers beside it, evenly spread, the highest first; the last is 0.
        ticks: Instants below it, evenly spread.
        busiest: The highest bars, highest first.
    """

    bars: Sequence[Bar]
    width: int
    total: int
    peak: Bar | None
    scale: Sequence[int]
    ticks: Sequence[int]
    busiest: Sequence[Bar]


def load_bars(load: Sequence[LoadBucket], span: Span, now_ms: int) -> Bars:
    """Return the chart of what comes due."""
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
    """Return round numbers from 0 up to `most` or somewhat more, evenly spread, the highest first."""
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
    """How many were later than `above_ms`, and at most `upto_ms`, None = however late."""

    x: int
    y: float
    height: float
    count: int
    above_ms: int
    upto_ms: int | None
    holds: str


@dataclass(frozen=True, slots=True)
class Columns:
    """The histogram of lateness; `scale` as of `Bars`."""

    columns: Sequence[Column]
    scale: Sequence[int]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a stacked bar: of which kind, and where."""

    kind: str
    y: float
    height: float


@dataclass(frozen=True, slots=True)
class Stack:
    """What ended in one minute, stacked; `title` says it in words."""

    x: int
    parts: Sequence[Part]
    title: str


@dataclass(frozen=True, slots=True)
class Past:
    """The chart of the last hour.

    Attributes:
        stacks: The minutes in which something ended.
        unknown: How many minutes, from the left, are not known.
        totals: How much of each kind there was.
        scale: As of `Bars`.
        ticks: As of `Bars`.
    """

    stacks: Sequence[Stack]
    unknown: int
    totals: Mapping[str, int]
    scale: Sequence[int]
    ticks: Sequence[int]


KINDS = ("delivered", "retried", "given_up")


def past_stacks(activity: Activity) -> Past:
    """Return the chart of what ended in each minute of the last hour."""
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
    told = ", ".join(f"{getattr(minute, kind)} {kind.replace('_', ' ')}" for kind in KINDS)
    return Stack(x, parts, f"{time_shape(minute.from_ms)[:16].replace('T', ' ')} UTC: {told}")


def lateness_columns(lateness: Lateness) -> Columns:
    """Return the histogram; `holds` says which of p50 and p99 a column has."""
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
