"""Who serves which lanes: what `tidy` writes of a worker, and what is read of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from aiodelay.model import Lane

__all__ = ["SERVED_WINDOW_MS", "served_lanes"]

SERVED_WINDOW_MS = 60_000
"""A worker that tidied within this many ms counts as alive."""


def served_lanes(workers: Sequence[bytes], now_ms: int) -> set[Lane]:
    """Return the lanes of live workers.

    Args:
        workers: Names, each followed by what it serves: a MessagePack list of its time in ms and its lanes.
        now_ms: The store's time.
    """
    served: set[Lane] = set()
    for value in workers[1::2]:
        try:
            seen: Any = msgspec.msgpack.decode(value)
            if seen[0] > now_ms - SERVED_WINDOW_MS:
                served.update(seen[1:])
        except (msgspec.MsgspecError, TypeError, IndexError):  # written by another program
            continue
    return served
