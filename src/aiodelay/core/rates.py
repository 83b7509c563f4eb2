"""Rates as callers write them: a number per time, such as "5/min"."""

from __future__ import annotations

import re

from aiodelay.errors import ConfigurationError, shortened

from .durations import parse_duration

__all__ = ["parse_rate"]

MAX_NUMBER = 1_000_000
MAX_SPAN_MS = 7 * 86_400_000
_TEXT = re.compile(r"([0-9]{1,7})/(.{1,20})", re.DOTALL)
_WORDS = {"s": 1000, "sec": 1000, "second": 1000, "min": 60_000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
_UNITS = frozenset({"ms", "m", "h", "d", "w"})
_FORMS = "a number per time, such as '5/min', '1000/s', '10/5m' or '100/day'; at most 1000000, at most 7 days"


def parse_rate(value: object, *, field: str) -> tuple[int, int]:
    """Return a rate as (number, length of the time in ms).

    Args:
        value: A number from 1 to 1,000,000, a slash, and a time: `s`, `min`, `hour`, `day`, a unit of a duration, or a
            duration of at most 7 days, such as `5m`.
        field: The name of the argument or setting, for the error.

    Raises:
        ConfigurationError: The value is not such a rate.
    """
    found = _TEXT.fullmatch(value) if isinstance(value, str) else None
    if found is None or not 1 <= int(found[1]) <= MAX_NUMBER:
        raise ConfigurationError(field, shortened(value), _FORMS)
    span_ms = _WORDS.get(found[2])
    if span_ms is None:
        text = f"1{found[2]}" if found[2] in _UNITS else found[2]
        span_ms = parse_duration(text, field=field, error=ConfigurationError, least_ms=1)
    if span_ms > MAX_SPAN_MS:
        raise ConfigurationError(field, shortened(value), _FORMS)
    return int(found[1]), span_ms
