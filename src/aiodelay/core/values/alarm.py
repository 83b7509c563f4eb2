"""`Alarm`: something that needs a person."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from aiodelay.core.durations import format_duration

from .record import Lane

__all__ = ["Alarm"]


class Alarm(Struct, frozen=True):
    """Something that needs a person.

    Attributes:
        kind: `overdue`: a message waits past its due time. `store`: housekeeping cannot reach the store.
            `unserved`: a lane holds messages and no live instance reads it, at two steps of housekeeping in a row. At
            each step an instance tells the store which lanes it reads. `ended`: the store serves no more claims, for
            all or a part of its messages, until the process starts again. `vanished`: the store's data were deleted or
            replaced.
        lane: Which one, where it concerns one.
        age_ms: How long it has lasted.
        is_over: The alarm has ended.
        reason: Of `ended` and `vanished`: what happened.
    """

    kind: Literal["overdue", "store", "unserved", "ended", "vanished"]
    lane: Lane
    age_ms: int
    is_over: bool = False
    reason: str = ""

    def __str__(self) -> str:
        age = format_duration(self.age_ms)
        if self.is_over:
            return f"alarm is over: {self.kind} {self.lane}".rstrip()
        if self.kind == "overdue":
            return f"the oldest overdue message of {self.lane} has waited {age}"
        if self.kind == "store":
            return f"housekeeping has not reached the store for {age}"
        if self.kind == "ended":
            return f"the store serves no more claims: {self.reason}"
        if self.kind == "vanished":
            return f"the store's data have vanished: {self.reason}"
        return f"{self.lane} holds messages and no instance reads it"
