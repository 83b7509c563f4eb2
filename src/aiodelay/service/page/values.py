"""Filters of the templates: they write times, durations, numbers and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from markupsafe import Markup

from aiodelay.core.transitions import occurrence_of
from aiodelay.core.validation import to_of
from aiodelay.core.values import Envelope
from aiodelay.operations.json_shapes import time_shape

__all__ = [
    "away",
    "clock_time",
    "counted",
    "day",
    "destination",
    "duration",
    "instant",
    "key_text",
    "message_path",
    "moment",
    "named",
    "number",
    "series_of_retry",
    "size",
    "words",
]

MOST_NAMES = 20


def instant(ms: int) -> Markup:
    """Return a time in UTC, to the millisecond. A script adds the local time as a tooltip."""
    return _time(ms, slice(0, 23))


def moment(ms: int) -> Markup:
    """Return a time in UTC, to the second. A script adds the local time as a tooltip."""
    return _time(ms, slice(0, 19))


def _time(ms: int, shown: slice) -> Markup:
    text = time_shape(ms)
    return Markup('<time datetime="{}">{} <abbr>UTC</abbr></time>').format(text, text[shown].replace("T", " "))


def clock_time(ms: int) -> str:
    """Return the hour and the minute of a time, in UTC."""
    return time_shape(ms)[11:16]


def day(ms: int) -> str:
    """Return the month and the day of a time, in UTC."""
    return time_shape(ms)[5:10]


def counted(value: int) -> Markup:
    """Return a number for a table. Zeros are grey, so other numbers stand out."""
    return Markup("{}" if value else '<span class="zero">{}</span>').format(number(value))


def number(value: int) -> str:
    """Return a number with thin spaces between thousands."""
    return f"{value:,}".replace(",", "\u202f")


def size(value: int) -> str:
    """Return a number of bytes, with a unit."""
    for limit, unit in ((1 << 20, "MB"), (1 << 10, "kB")):
        if value >= limit:
            return f"{value / limit:.1f}\u00a0{unit}"
    return f"{value}\u00a0B"


def duration(ms: int) -> str:
    """Return a duration in one unit, such as `12 h`. Below ten units, add the next smaller unit: `2 h 5 min`."""
    ms = abs(ms)
    units = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"))
    for i, (unit, name) in enumerate(units):
        if ms >= unit:
            smaller, smaller_name = units[i + 1] if i + 1 < len(units) else (1_000, "s")
            rest = ms % unit // smaller
            return f"{ms // unit}\u00a0{name}" + (f" {rest}\u00a0{smaller_name}" if rest and ms < 10 * unit else "")
    if ms >= 10_000:
        return f"{ms // 1000}\u00a0s"
    return f"{ms / 1000:.2g}\u00a0s" if ms >= 1000 else f"{ms}\u00a0ms"


def away(ms: int, now_ms: int) -> str:
    """Return the distance of a time from now, such as "in 5 min" or "2 h ago"."""
    if ms == now_ms:
        return "now"
    return f"in {duration(ms - now_ms)}" if ms > now_ms else f"{duration(now_ms - ms)} ago"


def destination(envelope: Envelope) -> str:
    """Return the destination of a message."""
    return to_of(envelope)


def key_text(key: bytes | None) -> str:
    """Return the key of a limit as text."""
    return "all messages" if key is None else key.decode("utf-8", "backslashreplace") or "(none)"


def named(names: Sequence[str]) -> str:
    """Return names for a sentence, at most `MOST_NAMES` of them."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def words(text: str) -> str:
    """Return a name of the API as words, such as "in flight" for `in_flight`."""
    return text.replace("_", " ")


def series_of_retry(message_id: str) -> str:
    """Return the series if the id is that of a retry of one of its occurrences; "" for any other id."""
    found = occurrence_of(message_id)
    return "" if found is None else found[0]


def message_path(message_id: str) -> str:
    """Return the path of a message's page."""
    return f"messages/{quote(message_id, safe='')}"
