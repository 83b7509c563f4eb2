"""`Entry`: a row of the table `messages` in the form that `Tables` gives to the rules."""

from __future__ import annotations

from msgspec import Struct

from aiodelay.core.values import Record

__all__ = ["Entry"]


class Entry(Struct, gc=False):
    """A row of the table `messages`.

    Attributes:
        n: The number of the message. The scheduling order is the order of numbers.
        place_ms: The time of the next attempt, in epoch ms.
        lane: The number of the message's lane.
        record: The record of the message.
        token: The token of the claim, or 0 if the message is not in flight.
        is_over: True if the message has ended. The row then only remembers the message.
    """

    n: int
    place_ms: int
    lane: int
    record: Record
    token: int = 0
    is_over: bool = False
