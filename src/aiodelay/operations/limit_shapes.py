"""Limits, and the keys that wait because of them, in JSON, as the API answers and the CLI prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiodelay.core.values import Lane, Limit, LimitedKey

from .json_shapes import text_pair, time_shape

__all__ = ["limit_shapes", "limited_key_shape"]


def limit_shapes(what: Lane, limits: Iterable[Limit]) -> list[dict[str, Any]]:
    """Return the JSON forms of the limits of a handler or sink."""
    return [{"what": what, "key": each.key, "concurrency": each.concurrency, "rate": each.rate} for each in limits]


def limited_key_shape(key: LimitedKey) -> dict[str, Any]:
    """Return the JSON form of a key that has messages in flight, or messages that wait because of a limit."""
    return {
        "what": key.lane,
        **text_pair("key", key.key),
        "running": key.running,
        "waiting": key.waiting,
        "why": key.why,
        "until": None if key.until_ms is None else time_shape(key.until_ms),
        "since": None if key.since_ms is None else time_shape(key.since_ms),
    }
