"""`Report`: counts the events of the demo and prints a line for each event.

One call counts and prints, so that the counts agree with the lines.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime

from .screen import SEPARATOR, Screen

__all__ = ["Attempt", "Report", "Tally"]

SHORT_ID, MADE_ID = 8, 32


@dataclass
class Tally:
    """The counts of events, and the measured lateness.

    Attributes:
        scheduled: Messages whose `schedule()` returned. Occurrences of a recurring message are not counted.
        delivered: Handlers that returned, and messages that the sink took.
        lateness_ms: The number of first attempts, by lateness in ms.
    """

    scheduled: int = 0
    delivered: int = 0
    cancelled: int = 0
    replaced: int = 0
    retried: int = 0
    dead: int = 0
    lateness_ms: Counter[int] = field(default_factory=Counter)

    def percentile_ms(self, percent: int) -> int | None:
        """Return the lateness that `percent` of the first attempts did not exceed; None if there are none."""
        rank = -(-self.lateness_ms.total() * percent // 100)
        for lateness_ms, count in sorted(self.lateness_ms.items()):
            rank -= count
            if rank <= 0:
                return lateness_ms
        return None

    def summary(self, pending: int | None) -> str:
        """Return the summary line. `pending` is the number of pending messages in the store; None = not known."""
        counts = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        if pending is not None:
            counts["pending"] = pending
        p50, p99 = self.percentile_ms(50), self.percentile_ms(99)
        parts = [f"{name} {value}" for name, value in counts.items()]
        if p50 is not None:
            parts.append(f"lateness p50 {p50} ms p99 {p99} ms")
        return SEPARATOR.join(parts)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to deliver one message.

    Attributes:
        what: The event type, or the destination.
        number: The number of the attempt, from 1.
    """

    what: str
    id: str
    due: datetime
    lateness_ms: int
    number: int


class Report:
    """Prints a line for each event of the demo, and counts the events.

    Args:
        screen: The screen that shows the lines.
        started: The start of the demo. If a message was due before, its lateness is printed but not counted: no process
            was there to deliver it.
    """

    def __init__(self, screen: Screen, started: datetime) -> None:
        self._screen, self._started = screen, started
        self.tally: Tally = Tally()

    def scheduled(self) -> None:
        """Count a stored message, without a line. Later events of the message get lines."""
        self.tally.scheduled += 1

    def scheduled_many(self, what: str, n: int, note: str) -> None:
        """Report messages that were stored together."""
        self.tally.scheduled += n
        self._print("scheduled", what, "", f"{n} messages {note}")

    def delivered(self, attempt: Attempt, note: str = "") -> None:
        """Report that a handler returned, or that the sink took a message."""
        self.tally.delivered += 1
        self._print("delivered", attempt.what, attempt.id, self._lateness(attempt) + note)

    def retried(self, attempt: Attempt, note: str) -> None:
        """Report that a handler failed and that its message will be delivered again."""
        self.tally.retried += 1
        self._print("retry", attempt.what, attempt.id, f"{self._lateness(attempt)}, {note}")

    def cancelled(self, what: str, message_id: str, note: str) -> None:
        """Report that the store confirmed a cancel."""
        self.tally.cancelled += 1
        self._print("cancelled", what, message_id, note)

    def replaced(self, what: str, message_id: str, note: str) -> None:
        """Report that the store confirmed a replacement."""
        self.tally.replaced += 1
        self._print("replaced", what, message_id, note)

    def dead(self, what: str, message_id: str, note: str) -> None:
        """Report that the store has a message as a dead letter."""
        self.tally.dead += 1
        self._print("dead letter", what, message_id, note)

    def failed(self, what: str, error: Exception) -> None:
        """Report that a call to the scheduler failed."""
        self._print("error", what, "", f"{type(error).__name__}: {error}")

    def _lateness(self, attempt: Attempt) -> str:
        if attempt.number > 1:
            return f"attempt {attempt.number}, due {attempt.lateness_ms} ms ago"
        if attempt.due < self._started:
            return f"late {attempt.lateness_ms} ms (was due before this start)"
        self.tally.lateness_ms[attempt.lateness_ms] += 1
        return f"late {attempt.lateness_ms} ms"

    def _print(self, verb: str, what: str, message_id: str, note: str) -> None:
        time = datetime.now(UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
        self._screen.line(f"{time}  {verb:<11}  {what:<12}  {_shortened(message_id):<8}  {note}", verb)


def _shortened(message_id: str) -> str:
    """Return the significant part of an id: the random end of a generated id, or the start of a chosen id."""
    if len(message_id) == MADE_ID:
        return message_id[-SHORT_ID:]
    return message_id if len(message_id) <= SHORT_ID else message_id[: SHORT_ID - 1] + "…"
