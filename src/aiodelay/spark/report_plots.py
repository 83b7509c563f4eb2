"""Plots over time as inline SVG, for the pages of `report` and `simulate`. The style sheet has the colours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from html import escape
from math import log10
from typing import Any, Final, TypeAlias

from msgspec import Struct

__all__ = ["SLOTS_S", "Figures", "bar_plot", "count_text", "line_plot", "ms_text", "slot_text"]

Figures: TypeAlias = Mapping[str, Any]
"""One row of a report: its columns by name; `hour` is an aware `datetime`, `day` a `date`."""

SLOTS_S: Final = {"hour": 3600, "day": 86_400}
"""The length of a slot on the time axis, in seconds."""

_UNITS_MS: Final = {"d": 86_400_000, "h": 3_600_000, "min": 60_000, "s": 1000}
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 960, 230, 88, 8, 14, 28
_FLOOR = _HEIGHT - _BOTTOM
_MOST_DOTS, _TICKS, _LINES = 200, 6, 4


def count_text(n: int) -> str:
    """Return a number with commas."""
    return f"{n:,}"


def ms_text(ms: int | None) -> str:
    """Return the text of a duration: three digits, in the largest unit that is not longer than the duration."""
    if ms is None:
        return "-"
    for unit, unit_ms in _UNITS_MS.items():
        if abs(ms) >= unit_ms:
            return f"{ms / unit_ms:,.0f} {unit}" if abs(ms) >= 100 * unit_ms else f"{ms / unit_ms:.3g} {unit}"
    return f"{ms} ms"


def slot_text(slot: date) -> str:
    """Return the text of an hour or a day, in UTC."""
    return f"{slot.astimezone(UTC):%Y-%m-%d %H:%M}" if isinstance(slot, datetime) else f"{slot}"


def line_plot(
    title: str,
    about: str,
    times: Sequence[Figures],
    unit: str,
    names: Mapping[str, str],
    *,
    text_of: Callable[[int], str] = ms_text,
) -> str:
    """Return a plot with a line for each column, on a logarithmic scale. Time without a value is a gap.

    Args:
        title: The title of the plot.
        about: A description of the plot for screen readers.
        times: The figures of each slot, in order; not empty.
        unit: The name of the column that has the start of the slot: `hour` or `day`.
        names: The columns with their labels. Each name is a class of the style sheet.
        text_of: The function that converts a value into text.
    """
    axis = _Axis.of(times, unit)
    most = max(row[name] or 1 for row in times for name in names)
    power = next(each for each in range(1, 20) if 10**each >= most)

    def y(ms: int) -> float:
        return _FLOOR - log10(max(ms, 1)) / power * (_FLOOR - _TOP)

    marks = []
    for name, meaning in names.items():
        points = [(row[unit], axis.middle(row[unit]), row[name]) for row in times]
        lines = (" ".join(f"{x:.1f},{y(ms):.1f}" for _, x, ms in run) for run in _runs(points, axis.slot_s))
        marks += [f"<polyline class='{name}' points='{line}'/>" for line in lines]
        for slot, x, ms in points if len(times) <= _MOST_DOTS else ():
            if ms is not None:
                text = f"{slot_text(slot)}: {meaning} {text_of(ms)}"
                marks.append(f"<circle class='{name} mark' cx='{x:.1f}' cy='{y(ms):.1f}' r='3'>{_title(text)}</circle>")
    scale = [(y(10**each), text_of(10**each)) for each in range(power + 1)]
    return _svg(title, about, axis, scale, marks) + _legend(names, _line_key)


def bar_plot(title: str, about: str, times: Sequence[Figures], unit: str, names: Mapping[str, str]) -> str:
    """Return a plot with a bar for each slot. The columns of `names` are stacked. Arguments are as for `line_plot`."""
    axis = _Axis.of(times, unit)
    steps = _steps(max(sum(row[name] for name in names) for row in times))

    def height(n: int) -> float:
        return n / steps[-1] * (_FLOOR - _TOP)

    marks = []
    for row in times:
        width, floor = axis.width, float(_FLOOR)
        x = axis.middle(row[unit]) - width / 2  # centred below the dot of `line_plot` for the same slot
        for name, meaning in names.items():
            if row[name]:
                floor -= height(row[name])
                text = f"{slot_text(row[unit])}: {meaning} {count_text(row[name])}"
                place = f"x='{x:.1f}' y='{floor:.1f}' width='{width:.1f}' height='{height(row[name]):.1f}'"
                marks.append(f"<rect class='{name} mark' {place}>{_title(text)}</rect>")
    scale = [(_FLOOR - height(n), count_text(n)) for n in steps]
    legend = _legend(names, _bar_key) if len(names) > 1 else ""
    return _svg(title, about, axis, scale, marks) + legend


class _Axis(Struct, frozen=True):
    """The time axis: from the start of the first slot to the end of the last slot, in seconds since 1970."""

    from_s: int
    to_s: int
    slot_s: int

    @classmethod
    def of(cls, times: Sequence[Figures], unit: str) -> _Axis:
        slot_s = SLOTS_S[unit]
        return cls(_epoch_s(times[0][unit]), _epoch_s(times[-1][unit]) + slot_s, slot_s)

    def x(self, at_s: float) -> float:
        return _LEFT + (at_s - self.from_s) / (self.to_s - self.from_s) * (_WIDTH - _LEFT - _RIGHT)

    def middle(self, slot: date) -> float:
        return self.x(_epoch_s(slot) + self.slot_s / 2)

    @property
    def width(self) -> float:
        whole = self.slot_s / (self.to_s - self.from_s) * (_WIDTH - _LEFT - _RIGHT)
        return max(min(whole * 0.85, 48.0), 0.5)

    def ticks(self) -> list[tuple[float, str]]:
        n = (self.to_s - self.from_s) // self.slot_s
        starts = [self.from_s + i * self.slot_s for i in range(0, n, -(-n // _TICKS))]
        form = "%Y-%m-%d" if self.slot_s == SLOTS_S["day"] else "%m-%d %H:%M"
        return [(self.x(each), f"{datetime.fromtimestamp(each, UTC):{form}}") for each in starts]


def _epoch_s(slot: date) -> int:
    at = slot if isinstance(slot, datetime) else datetime(slot.year, slot.month, slot.day, tzinfo=UTC)
    return int(at.timestamp())


def _runs(points: Sequence[tuple[date, float, int | None]], slot_s: int) -> list[list[tuple[date, float, int]]]:
    """Split the points that have a value into runs of consecutive slots. A run of one point holds the point twice."""
    runs: list[list[tuple[date, float, int]]] = []
    for slot, x, ms in points:
        if ms is None:
            continue
        if not runs or _epoch_s(slot) - _epoch_s(runs[-1][-1][0]) > slot_s:
            runs.append([])
        runs[-1].append((slot, x, ms))
    return [run if len(run) > 1 else run * 2 for run in runs]


def _steps(most: int) -> list[int]:
    """Return evenly spaced round numbers from 0 to at least `most`."""
    sizes = (factor * 10**power for power in range(19) for factor in (1, 2, 5))
    step = next(size for size in sizes if size * _LINES >= most)
    return list(range(0, -(-max(most, 1) // step) * step + 1, step))


def _svg(title: str, about: str, axis: _Axis, scale: Sequence[tuple[float, str]], marks: Sequence[str]) -> str:
    lines = [
        f"<line class='grid' x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>"
        f"<text x='{_LEFT - 8}' y='{y + 4:.1f}' text-anchor='end'>{text}</text>"
        for y, text in scale
    ]
    lines += [f"<text x='{x:.1f}' y='{_HEIGHT - 9}'>{text}</text>" for x, text in axis.ticks()]
    lines.append(f"<line class='axis' x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{_FLOOR}' y2='{_FLOOR}'/>")
    return (
        f"<div class='scroll' tabindex='0' role='group' aria-label='{escape(title)}, a plot'>"
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='{escape(title)}'>"
        f"{_title(title)}<desc>{escape(about)}</desc>{''.join(lines)}{''.join(marks)}</svg></div>"
    )


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _legend(names: Mapping[str, str], key: Callable[[str], str]) -> str:
    keys = (
        f"<span><svg viewBox='0 0 24 10' aria-hidden='true'>{key(name)}</svg>{escape(meaning)}</span>"
        for name, meaning in names.items()
    )
    return f"<p class='legend'>{''.join(keys)}</p>"


def _line_key(name: str) -> str:
    return f"<line class='{name}' x1='0' x2='24' y1='5' y2='5' stroke-width='3'/>"


def _bar_key(name: str) -> str:
    return f"<rect class='{name}' width='24' height='10' rx='2'/>"
