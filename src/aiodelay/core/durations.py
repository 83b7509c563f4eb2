"""Conversion of durations and instants from the forms that callers may write to whole milliseconds.

A due time is rounded **up** to a whole millisecond, so that no message is ever early. All arithmetic is on integers.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

from aiodelay.errors import ConfigurationError, InputError, ScheduleTimeError, shortened

__all__ = [
    "LAST_MS",
    "MAX_HORIZON_MS",
    "Duration",
    "check_horizon",
    "format_duration",
    "from_epoch_ms",
    "parse_duration",
    "parse_instant",
    "to_epoch_ms",
]

Duration: TypeAlias = timedelta | str
"""A length of time: a `timedelta`, or text such as `"5s"`, `"1h30m"`, `"1.5d"`, `"250ms"`, `"PT5M"`."""

LAST_MS = 253_402_300_799_999
"""The last instant that text can name: the end of the year 9999. Records of other programs may have later times."""
MAX_HORIZON_MS = 3650 * 86_400_000
"""The longest duration, and the longest time ahead for which a message may be scheduled: 3650 days."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
_UNIT_MS = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_TEXT = re.compile("".join(rf"(?:(?P<{unit}>{_NUMBER}){unit})?" for unit in _UNIT_MS))
_ISO = re.compile(
    rf"P(?:(?P<w>{_NUMBER})W)?(?:(?P<d>{_NUMBER})D)?"
    rf"(?:T(?=[0-9])(?:(?P<h>{_NUMBER})H)?(?:(?P<m>{_NUMBER})M)?(?:(?P<s>{_NUMBER})S)?)?"
)
_MAX_TEXT = 64  # no duration needs more; the limit also keeps int() below its own limit of 4300 digits
_TEXTS = 'text such as "250ms", "5s", "1h30m", "2d", "1w", "PT5M"'
_FORMS = f"a timedelta or {_TEXTS}"
_INSTANTS = "ISO 8601 text with an offset, such as 2027-01-01T09:00:00Z or 2027-01-01T10:00:00+01:00"


def parse_duration(
    value: Duration,
    *,
    field: str,
    error: type[InputError | ConfigurationError] = ScheduleTimeError,
    least_ms: int = 0,
) -> int:
    """Return the duration in whole milliseconds, rounded up.

    Text is a number and a unit (`w d h m s ms`, lower case, no spaces). It may also be several of these pairs, from the
    longest unit to the shortest, each unit once. Numbers may have a decimal fraction. ISO 8601 durations without years
    and months are allowed too.

    Args:
        value: The caller's value.
        field: The name of the argument or setting, for the error.
        error: The error class to raise: the default for arguments, `ConfigurationError` for settings.
        least_ms: Least duration allowed, in milliseconds.

    Returns:
        Milliseconds, from `least_ms` to `MAX_HORIZON_MS`.

    Raises:
        InputError: The value is not a duration, or it is negative, too short or too long. The class is `error`.
        ConfigurationError: The value is wrong in one of these ways, and `error` is this class.
    """
    if isinstance(value, timedelta):
        ms = -(value // -_MS) if value >= timedelta() else -1
    elif isinstance(value, str):
        found = _text_ms(value)
        if found is None and value.startswith("-") and _text_ms(value[1:]) is not None:
            found = -1
        if found is None:
            raise error(field, shortened(value), _TEXTS)
        ms = found
    else:
        raise error(field, shortened(value), _FORMS + _number_hint(value))
    if ms < least_ms:
        given = f"{shortened(value)}, which is negative" if ms < 0 else shortened(value)
        raise error(field, given, f"a duration of at least {format_duration(least_ms)}")
    if ms > MAX_HORIZON_MS:
        raise error(field, shortened(value), f"at most {format_duration(MAX_HORIZON_MS)}")
    return ms


@lru_cache(maxsize=256)  # programs use few texts, each many times, and parsing a text takes about 15 µs
def _text_ms(text: str) -> int | None:
    """Return the milliseconds of a duration's text; None if the text is not a duration."""
    found = len(text) <= _MAX_TEXT and (_TEXT.fullmatch(text) or _ISO.fullmatch(text))
    parts = {unit: number for unit, number in found.groupdict().items() if number} if found else {}
    if not parts:
        return None
    return -(-sum(Fraction(number) * _UNIT_MS[unit] for unit, number in parts.items()) // 1)


def _number_hint(value: object) -> str:
    """Return a hint for a bare number, which has no unit; otherwise an empty text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return '; a bare number has no unit: write timedelta(seconds=5) or "5s"'


def format_duration(ms: int) -> str:
    """Return the duration as exact text: `1h30m`, `1.5s`, `250ms`, `0s`.

    The text of a negative duration begins with a minus, and `parse_duration` does not read it back.
    """
    if ms < 0:
        return "-" + format_duration(-ms)
    text = ""
    for unit in ("d", "h", "m"):
        count, ms = divmod(ms, _UNIT_MS[unit])
        text += f"{count}{unit}" if count else ""
    seconds, thousandths = divmod(ms, 1000)
    if seconds and thousandths:
        return text + f"{seconds}.{thousandths:03d}".rstrip("0") + "s"
    if thousandths:
        return text + f"{thousandths}ms"
    return text + f"{seconds}s" if seconds or not text else text


def parse_instant(text: str, *, field: str) -> datetime:
    """Return the instant of an ISO 8601 text, as an aware datetime.

    Args:
        text: Date, time and offset.
        field: The argument's name, for the error.

    Raises:
        ScheduleTimeError: The text is not an instant, or has no offset.
    """
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ScheduleTimeError(field, shortened(text), _INSTANTS) from None
    if at.tzinfo is None:
        raise ScheduleTimeError(field, f"{shortened(text)}, which has no offset", _INSTANTS)
    return at


def to_epoch_ms(at: datetime, *, field: str) -> int:
    """Return the instant in whole milliseconds since 1970, rounded up. An instant before 1970 is negative.

    Args:
        at: An aware datetime of any zone.
        field: The argument's name, for the error.

    Raises:
        ScheduleTimeError: The value is not a datetime, or is naive.
    """
    if not isinstance(at, datetime):
        raise ScheduleTimeError(field, shortened(at), "a timezone-aware datetime, e.g. datetime.now(UTC)")
    if _utcoffset(at, field) is None:
        raise ScheduleTimeError(
            field, f"the naive {shortened(at)}", "a timezone-aware datetime, e.g. datetime.now(UTC)"
        )
    return -((_EPOCH - at) // _MS)


def _utcoffset(at: datetime, field: str) -> timedelta | None:
    try:
        return at.utcoffset()
    except Exception as error:  # noqa: BLE001 - a caller's tzinfo may raise anything
        problem = f"a datetime whose time zone raises {type(error).__name__}"
    raise ScheduleTimeError(field, problem, "a timezone-aware datetime, e.g. datetime.now(UTC)")


def from_epoch_ms(ms: int) -> datetime:
    """Return the instant as an aware datetime in UTC, exactly.

    Raises:
        OverflowError: The instant is outside the years 1 to 9999.
    """
    return _EPOCH + ms * _MS


def check_horizon(due_ms: int, now_ms: int, field: str) -> None:
    """Refuse a due time that is more than `MAX_HORIZON_MS` ahead of now.

    Args:
        due_ms: The due time, in epoch milliseconds. A past time is allowed.
        now_ms: The store's time, in epoch milliseconds.
        field: The argument's name, for the error.

    Raises:
        ScheduleTimeError: The due time is too far ahead.
    """
    ahead_ms = due_ms - now_ms
    if ahead_ms > MAX_HORIZON_MS:
        raise ScheduleTimeError(
            field, f"{format_duration(ahead_ms)} ahead", f"at most {format_duration(MAX_HORIZON_MS)} ahead"
        )
