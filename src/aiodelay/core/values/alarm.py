"""`Alarm`: a condition to which a person should react."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from aiodelay.core.durations import format_duration

from .record import Lane

__all__ = ["Alarm"]


class Alarm(Struct, frozen=True):
    """A condition to which a person should react.

    | kind | meaning |
    | --- | --- |
    | `overdue` | A message waits past its due time. |
    | `store` | Housekeeping cannot reach the store. |
    | `unserved` | A lane holds messages and no live process serves it, at two steps of housekeeping in a row. |
    | `ended` | Until the process starts again, the store serves no claims for all or some of its messages. |
    | `vanished` | The store's data were deleted or replaced. |

    At each step of housekeeping, a process tells the store which lanes it serves.

    Attributes:
        kind: The condition.
        lane: The lane that the alarm concerns; "" if the alarm concerns no particular lane.
        age_ms: For `overdue` and `unserved`: how long the lane's oldest overdue message has waited; 0 if the lane has
            none. For `store` and `vanished`: how long the store has not been reached, or its data have not been seen.
            0 for `ended`, and for an alarm that is over.
        is_over: Whether the condition has ended.
        reason: For `ended` and `vanished`: the cause, as text.
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
