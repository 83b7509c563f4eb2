"""What a store tells of its messages: states, counts, dead letters, the journal."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple

from msgspec import Struct

from .claims import DeadReason
from .record import AWAY_AFTER_MS, Lane, Record

__all__ = [
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

# --- looking into a store ---------------------------------------------------------------------------------


class State(StrEnum):
    """Where a message stands."""

    SCHEDULED = "scheduled"
    OVERDUE = "overdue"
    IN_FLIGHT = "in_flight"
    HELD = "held"


class Snapshot(Struct, frozen=True):
    """A stored message as it stood when asked; `next_attempt_ms` is its place in the lane."""

    record: Record
    state: State
    next_attempt_ms: int


class Query(Struct, frozen=True):
    """Which messages to list, by place in their lanes.

    Attributes:
        lanes: Only these lanes; empty = all.
        from_ms: Only those whose next attempt is not before this.
        to_ms: Only those whose next attempt is before this.
        after: The (next attempt, id) of the last message of the page before.
        limit: Most messages to return, 1 to 1,000.
    """

    lanes: tuple[Lane, ...] = ()
    from_ms: int | None = None
    to_ms: int | None = None
    after: tuple[int, str] | None = None
    limit: int = 100


class LaneCounts(Struct, frozen=True):
    """How many messages of a lane stand where; `read_by_nobody`: no live instance serves the lane."""

    scheduled: int = 0
    overdue: int = 0
    in_flight: int = 0
    held: int = 0
    dead: int = 0
    read_by_nobody: bool = False


class LoadBucket(Struct, frozen=True):
    """How many messages of a lane come due from `from_ms` on, within one bucket."""

    from_ms: int
    lane: Lane
    messages: int


class Instance(Struct, frozen=True):
    """A live process that dispatches from a store.

    Attributes:
        name: Its host's, its process id and a random part.
        lanes: What it serves, by name; None where the store does not tell of others.
        seen_ms: When it was last heard of, epoch ms; every 10 s or so.
        parts: Of a store whose messages are shared out, the parts that this one alone serves.
    """

    name: str
    lanes: tuple[Lane, ...] | None
    seen_ms: int
    parts: tuple[str, ...] = ()


class Registered(Struct, frozen=True):
    """A consumer that is registered with a topic, as it was found.

    Attributes:
        topic: Its topic.
        kind: Of the topic: whether it gives each consumer its own (`fan-out`), or keeps entries for all (`log`).
        consumer: Its name.
        ordered: Whether one message at a time is in flight to it.
        since_ms: When it was registered, epoch ms.
        seen_ms: When it last asked for messages, epoch ms, within 10 s; None = never.
        waiting: How many messages it has not taken: its lag.
        in_flight: How many it has taken and not settled.
        retrying: How many are to be tried again later.
        missed: How many the topic kept no longer before it took them.
        cursor: Of a log, the last index up to which it is done; None of a fan-out.
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
        """Whether it has nothing in flight, and has asked for nothing for a minute."""
        return not self.in_flight and (self.seen_ms is None or self.seen_ms <= now_ms - AWAY_AFTER_MS)


class DeadKey(NamedTuple):
    """Names one dead letter."""

    id: str
    revision: int


class DeadLetter(Struct, frozen=True):
    """A message given up: its record as it was, with the reason and the time."""

    record: Record
    reason: DeadReason
    at_ms: int

    @property
    def key(self) -> DeadKey:
        """What `redrive` and `purge` name it by."""
        return DeadKey(self.record.id, self.record.revision)

    @property
    def errors(self) -> tuple[str, ...]:
        """The errors of the last attempts, oldest first; an error that repeats the one before it is there once."""
        last = self.record.last_error
        return self.record.earlier_errors if last is None else (*self.record.earlier_errors, last)

    @property
    def traceback(self) -> str | None:
        """The traceback of the last attempt, at most 8 KiB; None where no exception of a handler or sink led to it."""
        return self.record.traceback


class JournalEntry(Struct, frozen=True, gc=False):
    """One outcome, written in the step that caused it.

    Attributes:
        number: Grows; by one where the store counts entries, as all but Kafka do: then a gap is of trimmed entries.
        event: What happened: `stored`, `replaced`, `cancelled`, `rescheduled`, `fired`, `claimed`, `delivered`,
            `again`, `dead`, `dropped`, `skipped`, `lapsed`, `redriven`.
        detail: The reason or the error's text, never a payload. Of `again`, empty where nothing failed.
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
        """Whether the message is tried again although nothing failed: its handler or its process gave it back."""
        return self.event == "again" and not self.detail
