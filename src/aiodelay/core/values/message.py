"""What a caller schedules, and what became of it: `Message` and `Scheduled`; `Rejected`, for one of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct

from aiodelay.core.durations import Duration, from_epoch_ms
from aiodelay.core.recurrence import Cron, Every
from aiodelay.errors import AiodelayError

from .commands import Conflict, ScheduleOutcome
from .record import NO_HEADERS, Late

__all__ = ["Message", "PartlyScheduledError", "Rejected", "Scheduled"]

REJECTED_SHOWN = 3


class Message(Struct, frozen=True, kw_only=False):
    """One message for `schedule_many`; the fields are the arguments of `schedule`."""

    event: Any
    at: datetime | None = None
    delay: Duration | None = None
    every: Every | Cron | None = None
    id: str | None = None
    to: str | None = None
    key: bytes | None = None
    headers: Mapping[str, bytes] = NO_HEADERS
    conflict: Conflict = Conflict.replace()
    late: Late = Late.deliver()


class Scheduled(Struct, frozen=True):
    """What became of `schedule()`.

    Attributes:
        id: The message id: yours, or one made for it.
        due_ms: When the message that stands under the id is due, epoch ms on the store's clock; 0 where none does.
        revision: Of that message; it grows with each replacement. 0 where none stands.
        outcome: Whether it was stored, replaced another, or left another as it is.
        is_older_in_flight: It replaced a version that is still being delivered, or a series with a retry that is, and
            may run beside that one.
    """

    id: str
    due_ms: int
    revision: int
    outcome: ScheduleOutcome
    is_older_in_flight: bool = False

    @property
    def due(self) -> datetime:
        """When it is due, aware, UTC."""
        return from_epoch_ms(self.due_ms)


class Rejected(Struct, frozen=True):
    """One message that `schedule_many` could not store.

    Attributes:
        position: Its place in what was given, from 0.
        error: Why.
    """

    position: int
    error: AiodelayError


class PartlyScheduledError(AiodelayError):
    """Some messages of a `schedule_many` were refused; all others are stored.

    Attributes:
        stored: How many were stored.
        rejected: The refused ones, by position.
    """

    stored: int
    rejected: Sequence[Rejected]

    def __init__(self, stored: int, rejected: Sequence[Rejected]) -> None:
        super().__init__(stored, rejected)
        self.stored, self.rejected = stored, rejected

    def __str__(self) -> str:
        first = "; ".join(f"message {r.position}: {r.error}" for r in self.rejected[:REJECTED_SHOWN])
        more = len(self.rejected) - REJECTED_SHOWN
        return f"{self.stored} messages stored, {len(self.rejected)} refused: {first}" + (
            f"; and {more} more" if more > 0 else ""
        )
