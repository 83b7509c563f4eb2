"""The rules of limits: whether another message of a limited key may begin, as functions of values and a time.

A limit counts messages in flight, and the messages that began within the last span of its rate. It counts the
beginnings as *marks*: pairs of a time and a number. Beginnings that are close together share a mark, which has the time
of the last of them. So no span of the rate's length ever has more beginnings than the rate allows, and a key has few
marks.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

from .values.limits import LaneLimits, Limit

__all__ = ["PARTS", "Marks", "Use", "began", "counted", "next_ms", "room", "why_full", "why_waiting"]

Marks: TypeAlias = tuple[tuple[int, int], ...]
"""Beginnings that a rate still counts, oldest first: (time of the last of them, epoch ms; their number)."""
PARTS = 64
"""The number of parts of a rate's span. Beginnings in the same part share a mark."""


class Use(Struct, frozen=True, gc=False):
    """What a limit counts.

    Attributes:
        running: The messages in flight.
        marks: The beginnings.
    """

    running: int = 0
    marks: Marks = ()


def counted(limit: Limit | None, marks: Marks, now_ms: int) -> Marks:
    """Return the marks that the rate still counts.

    A mark that lies ahead was made before the clock stepped back. It counts unless it lies ahead by the whole span.
    """
    if limit is None or limit.window is None:
        return ()
    span_ms = limit.window[1]
    return tuple(mark for mark in marks if -span_ms < now_ms - mark[0] < span_ms)


def room(limit: Limit | None, use: Use, now_ms: int) -> int | None:
    """Return how many more messages may begin now; None = any number."""
    if limit is None:
        return None
    rooms = [] if limit.concurrency is None else [limit.concurrency - use.running]
    if limit.window is not None:
        rooms.append(limit.window[0] - sum(number for _, number in counted(limit, use.marks, now_ms)))
    return max(min(rooms), 0)


def why_full(limit: Limit | None, use: Use, now_ms: int) -> Literal["concurrency", "rate", ""]:
    """Return which number of the limit lets no message begin now; "" if one may begin."""
    if limit is None or room(limit, use, now_ms):
        return ""
    is_busy = limit.concurrency is not None and use.running >= limit.concurrency
    return "concurrency" if is_busy else "rate"


def why_waiting(
    limits: LaneLimits, whole: Use, each: Use, now_ms: int
) -> tuple[Literal["concurrency", "rate", "lane", ""], int | None]:
    """Return which limit makes the due messages of a key wait, and when a rate has room for the next message.

    Args:
        limits: The limits of the lane.
        whole: What the limit of the whole lane counts.
        each: What the limit of the key counts.
        now_ms: The store's time, epoch ms.
    """
    if why := why_full(limits.whole, whole, now_ms):
        return "lane", next_ms(limits.whole, whole, now_ms) if why == "rate" else None
    why = why_full(limits.each, each, now_ms)
    return why, next_ms(limits.each, each, now_ms) if why == "rate" else None


def began(limit: Limit | None, use: Use, number: int, now_ms: int) -> Use:
    """Return the use after the beginning of `number` messages."""
    running = use.running + number
    if limit is None or limit.window is None:
        return Use(running)
    marks, span_ms = counted(limit, use.marks, now_ms), limit.window[1]
    if marks and marks[-1][0] * PARTS // span_ms == now_ms * PARTS // span_ms:
        last_ms, before = marks[-1]
        return Use(running, (*marks[:-1], (max(last_ms, now_ms), before + number)))
    return Use(running, (*marks, (now_ms, number)))


def next_ms(limit: Limit | None, use: Use, now_ms: int) -> int | None:
    """Return when the rate has room again, epoch ms; None if it has room now, or there is no rate."""
    if limit is None or limit.window is None:
        return None
    most, span_ms = limit.window
    oldest_last = sorted(counted(limit, use.marks, now_ms), reverse=True)
    used, free_ms = sum(number for _, number in oldest_last), None
    while used >= most:
        at_ms, number = oldest_last.pop()
        used, free_ms = used - number, at_ms + span_ms
    return free_ms
