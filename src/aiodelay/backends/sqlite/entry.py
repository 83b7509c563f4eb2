"""`Entry`: a row of `messages`, as the tables of the rules find it."""

from __future__ import annotations

from msgspec import Struct

from aiodelay.core.values import Record

__all__ = ["Entry"]


class Entry(Struct, gc=False):
    """A row of `messages`: its record, its number and place, and the token of its claim (0 = none).

    `is_over`: it has ended and is only remembered.
    """

    n: int
    place_ms: int
    lane: int
    record: Record
    token: int = 0
    is_over: bool = False
