"""How templates write values: instants, lengths of time, sizes."""

from __future__ import annotations

from urllib.parse import quote

from markupsafe import Markup

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
    "message_path",
    "moment",
    "number",
    "size",
    "words",
]


def instant(ms: int) -> Markup:
    """Return an instant in UTC, to the millisecond; a script adds the viewer's zone for who points at it."""
    return _time(ms, slice(0, 23))


def moment(ms: int) -> Markup:
    """Return an instant as `instant`, to the second."""
    return _time(ms, slice(0, 19))


def _time(ms: int, shown: slice) -> Markup:
    text = time_shape(ms)
    return Markup('<time datetime="{}">{} <abbr>UTC</abbr></time>').format(text, text[shown].replace("T", " "))


def clock_time(ms: int) -> str:
    """Return an instant's hour and minute in UTC."""
    return time_shape(ms)[11:16]


def day(ms: int) -> str:
    """Return an instant's month and day in UTC."""
    return time_shape(ms)[5:10]


def counted(value: int) -> Markup:
    """Return a number for a table, in which those that are not zero stand out."""
    return Markup("{}" if value else '<span class="zero">{}</span>').format(number(value))


def number(value: int) -> str:
    """Return a number with thin spaces between thousands."""
    return f"{value:,}".replace(",", "\u202f")


def size(value: int) -> str:
    """Return a number of bytes."""
    for limit, unit in ((1 << 20, "MB"), (1 << 10, "kB")):
        if value >= limit:
            return f"{value / limit:.1f}\u00a0{unit}"
    return f"{value}\u00a0B"


def duration(ms: int) -> str:
    """Return a length of time in one unit, or two where there are less than ten of the larger one."""
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
    """Return how far away an instant is."""
    if ms == now_ms:
        return "now"
    return f"in {duration(ms - now_ms)}" if ms > now_ms else f"{duration(now_ms - ms)} ago"


def destination(envelope: Envelope) -> str:
    """Return where a message goes."""
    return to_of(envelope)


def words(text: str) -> str:
    """Return a name of the API's as words."""
    return text.replace("_", " ")


def message_path(message_id: str) -> str:
    """Return the path of a message's page."""
    return f"messages/{quote(message_id, safe='')}"
