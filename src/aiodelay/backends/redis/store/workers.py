"""Decodes the key `workers`. Each worker records there when it was last alive, and which lanes it serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from aiodelay.core.values import Instance, Lane

__all__ = ["SERVED_WINDOW_MS", "live_workers", "served_lanes"]

SERVED_WINDOW_MS = 60_000
"""The time in ms for which a worker counts as alive after its last housekeeping."""


def served_lanes(workers: Sequence[bytes], now_ms: int) -> set[Lane]:
    """Return the lanes that live workers serve. The arguments are those of `live_workers`."""
    return {lane for each in live_workers(workers, now_ms) for lane in each.lanes or ()}


def live_workers(workers: Sequence[bytes], now_ms: int) -> list[Instance]:
    """Return the live workers, in the order of their names.

    Args:
        workers: Names and values of the key `workers`, in turn. A value is a MessagePack list: the time in epoch ms at
            which the worker was last alive, and the lanes that it serves.
        now_ms: The store's time, in epoch ms.
    """
    found: list[Instance] = []
    for name, value in zip(workers[::2], workers[1::2], strict=True):
        try:
            seen: Any = msgspec.msgpack.decode(value)
            if seen[0] > now_ms - SERVED_WINDOW_MS:
                found.append(Instance(name.decode(errors="replace"), tuple(seen[1:]), seen[0]))
        except (msgspec.MsgspecError, TypeError, IndexError):  # Another program has written this entry.
            continue
    return sorted(found, key=lambda each: each.name)
