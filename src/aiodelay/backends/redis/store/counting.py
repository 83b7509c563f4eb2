"""Decodes the answers of `counts.lua` and `load.lua` for the store's `counts()` and `load()`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from aiodelay.core.values import Lane, LaneCounts

from .workers import served_lanes

__all__ = ["add_load", "counts_of"]


def counts_of(reply: Sequence[Any]) -> Mapping[Lane, LaneCounts]:
    """Return the counts in an answer of `counts.lua`. Leave out lanes that have neither messages nor dead letters."""
    served = served_lanes(reply[1], int(reply[0]))
    held = frozenset(reply[2])
    parked = _parked(reply[3])
    found: dict[Lane, LaneCounts] = {}
    flat = reply[4:]
    for name, number, *numbers in (flat[i : i + 6] for i in range(0, len(flat), 6)):
        scheduled, overdue, in_flight, dead = map(int, numbers)
        waiting = parked.get(number, 0)
        if number in held:
            scheduled, overdue, waiting = 0, 0, scheduled + overdue + waiting
        lane = name.decode()
        if scheduled or overdue or in_flight or waiting or dead:
            found[lane] = LaneCounts(scheduled, overdue, in_flight, waiting, dead, read_by_nobody=lane not in served)
    return dict(sorted(found.items()))


def _parked(flat: Sequence[bytes]) -> dict[bytes, int]:
    """Return the number of parked messages for each lane number."""
    found: dict[bytes, int] = {}
    for name, count in zip(flat[::2], flat[1::2], strict=True):
        number = name.partition(b":")[0]
        found[number] = found.get(number, 0) + int(count)
    return found


def add_load(found: Counter[tuple[int, Lane]], lane: Lane, first: int, counted: Sequence[bytes]) -> None:
    """Add the counts in an answer of `load.lua` to `found`. Span 0 of the answer is span `first` of `found`."""
    for span, messages in zip(counted[::2], counted[1::2], strict=True):
        found[first + int(span), lane] += int(messages)
