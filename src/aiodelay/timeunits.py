"""The old import path of `aiodelay.core.durations`, kept for existing programs."""

from aiodelay.core.durations import (
    LAST_MS,
    MAX_HORIZON_MS,
    Duration,
    check_horizon,
    format_duration,
    from_epoch_ms,
    parse_duration,
    parse_instant,
    to_epoch_ms,
)

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
