"""The chart of a soak as SVG: the lateness of messages, and memory, over time."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

__all__ = ["as_svg", "figures_in"]

WIDTH, HEIGHT, LEFT, TOP, GAP = 720, 150, 70, 30, 60
"""The size of a panel, the margins, and the space below a panel, in pixels."""
COLOURS = ("#0072b2", "#d55e00")


class Panel(NamedTuple):
    """A panel of the chart.

    Attributes:
        title: The text above the panel.
        names: The figures that it shows.
        unit: The number of the figure's unit in one unit of the axis.
        ticks: The values of the lines of the axis, from below. They divide the panel evenly.
    """

    title: str
    names: tuple[str, ...]
    unit: float
    ticks: tuple[float, ...]


def figures_in(path: Path) -> dict[str, list[float]]:
    """Return the columns of a file of figures."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


def as_svg(figures: Mapping[str, Sequence[float]], title: str) -> str:
    """Return the chart.

    Args:
        figures: The columns of the file of figures of a soak.
        title: The text above the chart.
    """
    seconds = figures["seconds"]
    panels = (
        Panel(
            "lateness in ms, greatest and median of ten seconds",
            ("late_ms", "median_ms"),
            1,
            (0, 10, 100, 1e3, 1e4, 1e5),
        ),
        Panel("memory of the spared service in MB", ("kb",), 1e3, _ticks(figures["kb"], 1e3)),
        Panel("data of the Redis server in MB", ("redis_kb",), 1e3, _ticks(figures["redis_kb"], 1e3)),
    )
    height = TOP + len(panels) * (HEIGHT + GAP)
    box = f"0 0 {LEFT + WIDTH + 20} {height}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="#fff"/><text x="{LEFT}" y="18" font-size="14">{title}</text>',
    ]
    for number, panel in enumerate(panels):
        top = TOP + GAP // 2 + number * (HEIGHT + GAP)
        lines += _axes(panel, top, seconds[-1])
        for name, colour in zip(panel.names, COLOURS, strict=False):
            lines.append(_line(panel, top, seconds, [value / panel.unit for value in figures[name]], colour))
    return "\n".join([*lines, "</svg>", ""])


def _ticks(values: Iterable[float], unit: float) -> tuple[float, ...]:
    """Return five even values from 0 to a round number above all values."""
    most, step = max(values) / unit, 1.0
    while 4 * step < most:
        step *= 2 if f"{step:g}"[0] in "15" else 2.5
    return tuple(step * number for number in range(5))


def _axes(panel: Panel, top: float, last_s: float) -> list[str]:
    lines = [f'<text x="{LEFT}" y="{top - 8}">{panel.title}</text>']
    for number, tick in enumerate(panel.ticks):
        y = top + HEIGHT * (1 - number / (len(panel.ticks) - 1))
        lines.append(f'<path d="M{LEFT} {y:.0f}h{WIDTH}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{tick:,g}</text>')
    for number in range(7):
        text = f"{last_s * number / 6 / 60:.0f} min"
        lines.append(
            f'<text x="{LEFT + WIDTH * number / 6:.0f}" y="{top + HEIGHT + 16}" text-anchor="middle">{text}</text>'
        )
    return lines


def _line(panel: Panel, top: float, seconds: Sequence[float], values: Sequence[float], colour: str) -> str:
    """Return a line of values. An axis whose steps grow, such as 0, 10, 100, is even within each step."""
    points = []
    for at_s, value in zip(seconds, values, strict=True):
        x = LEFT + WIDTH * at_s / (seconds[-1] or 1)
        points.append(f"{x:.0f},{top + HEIGHT * (1 - _height(panel.ticks, value)):.0f}")
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.2"/>'


def _height(ticks: Sequence[float], value: float) -> float:
    """Return the place of a value between the lowest tick, 0, and the highest, 1."""
    for number, (low, high) in enumerate(pairwise(ticks)):
        if value <= high:
            return (number + (value - low) / (high - low)) / (len(ticks) - 1)
    return 1.0
