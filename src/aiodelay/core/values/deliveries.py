"""Messages on their way into sinks, and what became of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TypeAlias

from msgspec import Struct

from .claims import DeadReason
from .record import Envelope, Lane, Record

__all__ = ["Blocked", "Delivery", "Failed", "NotTaken", "Promise", "Reach", "SendOutcome", "Sent", "Transferred"]

# --- sinks ------------------------------------------------------------------------------------------------


class Delivery(Struct, frozen=True, gc=False):
    """One message on its way into a sink.

    Attributes:
        delivery_id: `id/revision/occurrence-due`, what consumers de-duplicate by.
        attempt: From 1.
        lateness_ms: Start of this delivery minus the due time.
    """

    envelope: Envelope
    delivery_id: str
    due_ms: int
    scheduled_at_ms: int
    attempt: int
    lateness_ms: int


class Sent(Struct, frozen=True, gc=False):
    """The sink has taken it.

    `partition`, `offset`: where the record stands in its topic, of one that was sent alone, where the sink knows it.
    """

    partition: int | None = None
    offset: int | None = None


class Failed(Struct, frozen=True, gc=False):
    """The sink refused this message; `retryable` False gives it up at once, for `reason`."""

    error: str
    retryable: bool = True
    reason: DeadReason = "not_retryable"


class NotTaken(Struct, frozen=True, gc=False):
    """The address takes nothing now: it is full, or broken. Costs no attempt; tried again, later each time."""

    reason: str


SendOutcome: TypeAlias = Sent | Failed | NotTaken


class Promise(StrEnum):
    """How often a message reaches a sink."""

    EXACTLY_ONCE = "exactly once"
    AT_LEAST_ONCE = "at least once"


class Reach(Struct, frozen=True):
    """What is promised from a store to a sink, and why, in words."""

    promise: Promise
    reason: str


class Blocked(Struct, frozen=True):
    """A destination whose sink takes nothing now: its messages wait in the store, and hold up no others.

    `reason` is the sink's: the destination is full, is of a wrong type, or may not be written.
    """

    lane: Lane
    address: str
    reason: str
    messages: int


class Transferred(Struct, frozen=True):
    """The answer to a transfer.

    Attributes:
        moved: How many messages were moved.
        series: Recurring messages with a due occurrence: the caller says how it ends.
        changed: Destinations that were found to take nothing, with the reason; "" = it takes messages again.
        now_ms: The store's time of the answer.
        next_due_ms: When to look again; None = nothing waits.
        traces: Id and trace of messages that were moved and have one, as many as were wanted.
    """

    moved: int
    series: Sequence[Record]
    changed: Mapping[str, str]
    now_ms: int
    next_due_ms: int | None
    traces: Sequence[tuple[str, Mapping[str, str]]] = ()
