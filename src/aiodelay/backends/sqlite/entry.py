"""`Entry`: a row of the table `messages`, as `Tables` returns it to the rules."""

from __future__ import annotations

from msgspec import Struct

from aiodelay.core.values import Record

__all__ = ["Entry"]


class Entry(Struct, gc=False):
    """A row of the table `messages`.

    Attributes:
        n: The number of the message: its scheduling order.
        place_ms: The time of its next attempt, epoch ms.
        lane: The number of its lane.
        record: The record.
        token: The token of its claim; 0 = none.
        is_over: True if the message has ended, and the row only remembers it.
    """

    n: int
    place_ms: int
    lane: int
    record: Record
    token: int = 0
    is_over: bool = False
