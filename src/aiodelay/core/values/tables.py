"""Results that a notebook shows as tables: a notebook calls `_repr_html_` of a value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from aiodelay.core.durations import from_epoch_ms

from .inspection import LaneCounts, LoadBucket
from .record import Lane

__all__ = ["CountsTable", "LoadTable", "html_table", "time_text"]

MOST_ROWS = 200
"""The most rows that a table shows."""


class CountsTable(dict[Lane, LaneCounts]):
    """The counts of lanes, by lane."""

    def _repr_html_(self) -> str:
        states = [name for name in LaneCounts.__struct_fields__ if name != "read_by_nobody"]
        rows = [
            (lane, *(getattr(counts, state) for state in states), "no" if counts.read_by_nobody else "yes")
            for lane, counts in self.items()
        ]
        return html_table(("lane", *states, "served"), rows)


class LoadTable(list[LoadBucket]):
    """The messages that become due in each span of time, by lane."""

    def _repr_html_(self) -> str:
        rows = [(time_text(each.from_ms), each.lane, each.messages) for each in self]
        return html_table(("from", "lane", "messages"), rows)


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table of at most 200 rows. All texts are escaped."""
    shown = list(rows)
    left = len(shown) - MOST_ROWS
    lines = [_row("th", header), *(_row("td", row) for row in shown[:MOST_ROWS])]
    more = f"<p>and {left} more rows</p>" if left > 0 else ""
    return f"<table>{''.join(lines)}</table>{more}"


def time_text(epoch_ms: int) -> str:
    """Return a time in UTC, such as `2030-01-01 00:00:00.000Z`."""
    return f"{from_epoch_ms(epoch_ms).replace(tzinfo=None).isoformat(' ', 'milliseconds')}Z"


def _row(cell: str, values: Sequence[object]) -> str:
    return f"<tr>{''.join(f'<{cell}>{escape(str(value))}</{cell}>' for value in values)}</tr>"
