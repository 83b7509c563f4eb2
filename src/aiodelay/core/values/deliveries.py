"""Deliveries: messages on their way into sinks, and their outcomes."""

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
        envelope: The message.
        delivery_id: `id/revision/occurrence-due`, the key by which consumers recognise a repeated delivery.
        due_ms: The due time, epoch ms.
        scheduled_at_ms: The time of the put, epoch ms.
        attempt: The number of the attempt, from 1.
        lateness_ms: The start of this delivery minus the due time.
    """

    envelope: Envelope
    delivery_id: str
    due_ms: int
    scheduled_at_ms: int
    attempt: int
    lateness_ms: int


class Sent(Struct, frozen=True, gc=False):
    """The sink has taken the message.

    `partition` and `offset` locate the record in its topic. They are None if the sink does not know them, or if the
    message was not sent alone.
    """

    partition: int | None = None
    offset: int | None = None


class Failed(Struct, frozen=True, gc=False):
    """The sink refused this message.

    Attributes:
        error: The error text.
        retryable: Whether another attempt follows. If not, the message becomes a dead letter at once.
        reason: The reason of that dead letter.
    """

    error: str
    retryable: bool = True
    reason: DeadReason = "not_retryable"


class NotTaken(Struct, frozen=True, gc=False):
    """The address is full or broken, and takes nothing now.

    This does not count as an attempt. The message is sent again, after a longer pause each time.
    """

    reason: str


SendOutcome: TypeAlias = Sent | Failed | NotTaken


class Promise(StrEnum):
    """How often a message may reach a sink. `BY_ADDRESS`: the address decides between the two others."""

    EXACTLY_ONCE = "exactly once"
    AT_LEAST_ONCE = "at least once"
    BY_ADDRESS = "exactly once or at least once, by address"


class Reach(Struct, frozen=True):
    """The promise of a store for a sink, with the reason as text."""

    promise: Promise
    reason: str


class Blocked(Struct, frozen=True):
    """A destination that takes nothing now. Its messages wait in the store, and delay no other messages.

    `reason` comes from the sink: the destination is full, has a wrong type, or may not be written.
    """

    lane: Lane
    address: str
    reason: str
    messages: int


class Transferred(Struct, frozen=True):
    """The answer to a transfer.

    Attributes:
        moved: How many messages were moved.
        series: Recurring messages with a due occurrence. The caller settles these occurrences in a later call.
        changed: Destinations that became blocked, with the reason; "" = the destination takes messages again.
        now_ms: The store's time of the answer.
        next_due_ms: When to transfer again; None = no message waits.
        traces: Ids and traces of moved messages that have a trace, as many as requested.
    """

    moved: int
    series: Sequence[Record]
    changed: Mapping[str, str]
    now_ms: int
    next_due_ms: int | None
    traces: Sequence[tuple[str, Mapping[str, str]]] = ()
