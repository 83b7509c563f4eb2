"""Recurrence rules, for users. The public names of `aiodelay.core.recurrence`."""

from aiodelay.core.recurrence import (
    MIN_INTERVAL_MS,
    Cron,
    Every,
    Missed,
    Overlap,
    Rule,
    decode_rule,
    describe,
    encode_rule,
    first_due,
    is_missed,
    is_overlapped,
    next_due,
    upcoming,
)

__all__ = [
    "MIN_INTERVAL_MS",
    "Cron",
    "Every",
    "Missed",
    "Overlap",
    "Rule",
    "decode_rule",
    "describe",
    "encode_rule",
    "first_due",
    "is_missed",
    "is_overlapped",
    "next_due",
    "upcoming",
]
