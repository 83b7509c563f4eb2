"""Results of inspecting a store: states, counts, dead letters, the journal."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple

from msgspec import Struct

from .claims import DeadReason
from .record import AWAY_AFTER_MS, Lane, Record

__all__ = [
    "FIRST_ENTRY",
    "DeadKey",
    "DeadLetter",
    "Instance",
    "JournalEntry",
    "LaneCounts",
    "LoadBucket",
    "Query",
    "Registered",
    "Snapshot",
    "State",
]

# --- messages, lanes and processes ------------------------------------------------------------------------


class State(StrEnum):
    """The state of a stored message.

    `SCHEDULED`: the message waits for its next attempt. `OVERDUE`: the message could be claimed, but is not yet.
    `IN_FLIGHT`: the message is claimed. `HELD`: its lane or destination is paused, or its destination is blocked.
    """

    SCHEDULED = "scheduled"
    OVERDUE = "overdue"
    IN_FLIGHT = "in_flight"
    HELD = "held"


class Snapshot(Struct, frozen=True):
    """A stored message at the time of the call. `next_attempt_ms` is its place in the lane."""

    record: Record
    state: State
    next_attempt_ms: int


class Query(Struct, frozen=True):
    """A selection of messages, listed by their places in the lanes.

    Attributes:
        lanes: Only these lanes; empty = all.
        from_ms: Only messages whose next attempt is at this time or later.
        to_ms: Only messages whose next attempt is before this time.
        after: The (next attempt, id) of the last message of the previous page.
        limit: Most messages to return, 1 to 1,000.
    """

    lanes: tuple[Lane, ...] = ()
    from_ms: int | None = None
    to_ms: int | None = None
    after: tuple[int, str] | None = None
    limit: int = 100


class LaneCounts(Struct, frozen=True):
    """The number of messages of a lane in each state. `read_by_nobody`: no live process serves the lane."""

    scheduled: int = 0
    overdue: int = 0
    in_flight: int = 0
    held: int = 0
    dead: int = 0
    read_by_nobody: bool = False


class LoadBucket(Struct, frozen=True):
    """The number of messages of a lane that become due within one span of time, which begins at `from_ms`."""

    from_ms: int
    lane: Lane
    messages: int


class Instance(Struct, frozen=True):
    """A live process that dispatches from a store.

    Attributes:
        name: The worker id: host name, process id and a random part.
        lanes: The lanes that the process serves; None if the store does not know the lanes of other processes.
        seen_ms: When the process last reported to the store, epoch ms. A process reports about every 10 s.
        parts: In a store that divides its messages among processes: the parts that only this process serves.
    """

    name: str
    lanes: tuple[Lane, ...] | None
    seen_ms: int
    parts: tuple[str, ...] = ()


class Registered(Struct, frozen=True):
    """A consumer that is registered with a topic, at the time of the call.

    Attributes:
        topic: The topic.
        kind: The kind of topic. `fan-out`: each consumer has messages of its own. `log`: all consumers read the same
            entries.
        consumer: The name of the consumer.
        ordered: Whether the consumer has at most one message in flight.
        since_ms: When the consumer was registered, epoch ms.
        seen_ms: When the consumer last claimed, epoch ms, exact to 10 s; None = never.
        waiting: The number of messages that the consumer has not taken: its lag.
        in_flight: The number of messages that the consumer has taken and not settled.
        retrying: The number of messages that wait for another attempt.
        missed: The number of messages that expired before the consumer took them.
        cursor: For a log: the last index up to which the consumer has settled all entries. None for a fan-out.
    """

    topic: str
    kind: Literal["fan-out", "log"]
    consumer: str
    ordered: bool
    since_ms: int
    seen_ms: int | None
    waiting: int
    in_flight: int
    retrying: int
    missed: int
    cursor: int | None

    def is_away(self, now_ms: int) -> bool:
        """Return whether the consumer is away: it has no message in flight, and has not claimed for a minute."""
        return not self.in_flight and (self.seen_ms is None or self.seen_ms <= now_ms - AWAY_AFTER_MS)


class DeadKey(NamedTuple):
    """The key of one dead letter."""

    id: str
    revision: int


class DeadLetter(Struct, frozen=True):
    """A message that was given up: its record, the reason and the time."""

    record: Record
    reason: DeadReason
    at_ms: int

    @property
    def key(self) -> DeadKey:
        """The key for `redrive` and `purge`."""
        return DeadKey(self.record.id, self.record.revision)

    @property
    def errors(self) -> tuple[str, ...]:
        """The errors of the last attempts, oldest first. If an error repeats the previous error, it appears once."""
        last = self.record.last_error
        return self.record.earlier_errors if last is None else (*self.record.earlier_errors, last)

    @property
    def traceback(self) -> str | None:
        """The traceback of the last attempt, at most 8 KiB; None if that attempt raised no exception."""
        return self.record.traceback


FIRST_ENTRY = 1
"""The number of the first journal entry of a store, except of a Kafka store."""


class JournalEntry(Struct, frozen=True, gc=False):
    """One event of a message, written in the step that caused it.

    Attributes:
        number: A number that grows with each entry. All stores except Kafka count entries by one, so a gap means that
            entries were trimmed.
        at_ms: The time of the event, epoch ms.
        event: `stored`, `replaced`, `cancelled`, `rescheduled`, `fired`, `claimed`, `delivered`, `again`, `dead`,
            `dropped`, `skipped`, `lapsed` or `redriven`.
        id: The message id.
        revision: The revision of the message.
        lane: The lane of the message.
        due_ms: The due time of the message.
        attempt: The number of attempts so far.
        detail: The reason or the error text, never a payload. For `again`: empty if no attempt failed.
    """

    number: int
    at_ms: int
    event: str
    id: str
    revision: int
    lane: Lane
    due_ms: int
    attempt: int
    detail: str = ""

    @property
    def is_put_off(self) -> bool:
        """Whether the message was given back: it waits for another attempt, although no attempt failed."""
        return self.event == "again" and not self.detail
