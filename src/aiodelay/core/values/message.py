"""`Message` and `Scheduled`, the argument and the result of scheduling, and the errors of `schedule_many`."""

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
from .tables import html_table, time_text

__all__ = ["Message", "PartlyScheduledError", "Rejected", "Scheduled"]

REJECTED_SHOWN = 3


class Message(Struct, frozen=True, kw_only=False):
    """One message for `schedule_many`. Its fields are the arguments of `schedule`."""

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
    spread: Duration | None = None


class Scheduled(Struct, frozen=True):
    """The result of `schedule()`.

    Attributes:
        id: The message id: the id that the caller gave, or a generated id.
        due_ms: The due time of the message that is stored under the id now, epoch ms on the store's clock. 0 if no
            message is stored. If `Conflict.throttle` has kept a message that has ended: the beginning of its window.
        revision: The revision of that message. It grows with each replacement. 0 if no message is stored.
        outcome: Whether the message was stored, replaced an earlier message, or left an earlier message unchanged.
        is_older_in_flight: Whether the message replaced a version that is still being delivered, or a series with a
            retry in flight. The old and the new version may run at the same time.
    """

    id: str
    due_ms: int
    revision: int
    outcome: ScheduleOutcome
    is_older_in_flight: bool = False

    @property
    def due(self) -> datetime:
        """The due time, as an aware datetime in UTC."""
        return from_epoch_ms(self.due_ms)

    def _repr_html_(self) -> str:
        due = time_text(self.due_ms) if self.due_ms else "none"
        return html_table(("id", "due", "outcome"), [(self.id, due, self.outcome)])


class Rejected(Struct, frozen=True):
    """One message that `schedule_many` could not store.

    Attributes:
        position: The position of the message in the iterable, from 0.
        error: Why the message was refused.
    """

    position: int
    error: AiodelayError


class PartlyScheduledError(AiodelayError):
    """Some messages of a `schedule_many` were refused; all others are stored.

    Attributes:
        stored: The number of stored messages.
        rejected: The refused messages, by position.
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
