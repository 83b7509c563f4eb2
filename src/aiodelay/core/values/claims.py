"""Claims of due messages, and the settlements that end claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Literal, TypeAlias

from msgspec import Struct

from .record import MAX_CLAIM_BYTES, MAX_LAPSES, Lane, Record

__all__ = [
    "Again",
    "Claim",
    "Claimed",
    "Dead",
    "DeadReason",
    "Demand",
    "Done",
    "LaneState",
    "PutBack",
    "RenewOutcome",
    "Renewal",
    "SettleOutcome",
    "Settlement",
    "Tidied",
    "WorkStatus",
    "lanes_of",
]

# --- claims and settlements -------------------------------------------------------------------------------


class Demand(Struct, frozen=True, gc=False):
    """The messages of a lane that a subscription requests now.

    Attributes:
        messages: Most messages wanted; 0 = no message is wanted.
        max_bytes: Most payload bytes wanted. A message that is larger than this is still given, alone.
        aliases: Further lanes that share this demand, such as an event's former type names.
        max_lapses: Most lapses in a row that a message may have. 0 requests messages that have never lapsed. 1 excludes
            suspects, which have lapsed twice or more.
    """

    messages: int
    max_bytes: int = MAX_CLAIM_BYTES
    aliases: tuple[Lane, ...] = ()
    max_lapses: int = MAX_LAPSES


def lanes_of(demand: Mapping[Lane, Demand]) -> list[Lane]:
    """Return the lanes from which a demand requests messages, with their aliases."""
    return [lane for name, each in demand.items() if each.messages > 0 for lane in (name, *each.aliases)]


class Claim(Struct, frozen=True, gc=False):
    """A leased message, with the token that is needed to settle it.

    Attributes:
        record: The message.
        token: The number of this claim. It fences off older claims of the message.
        queued_ms: How long the message waited in the list from which a source took it. None if the message comes from a
            store, or if the time is not known.
        missed: How many messages of the source's topic expired between the previous message and this message.
        partition: The partition of a topic from which a source read the record.
        offset: The offset of the record in that partition.
    """

    record: Record
    token: int
    queued_ms: int | None = None
    missed: int = 0
    partition: int | None = None
    offset: int | None = None


class Claimed(Struct, frozen=True, gc=False):
    """The answer to a claim.

    Attributes:
        claims: The claims; within a lane, the earliest due message comes first.
        now_ms: The store's time of the answer, epoch ms.
        next_due_ms: When to claim again: the earliest due time or end of a lease in these lanes, epoch ms. None = the
            lanes are empty.
        limited: The demanded lanes that have limits.
        next_by_lane: `next_due_ms` of each lane that was demanded, also as an alias. None = the store does not say.
    """

    claims: Sequence[Claim]
    now_ms: int
    next_due_ms: int | None
    limited: frozenset[Lane] = frozenset()
    next_by_lane: Mapping[Lane, int | None] | None = None


DeadReason: TypeAlias = Literal[
    "attempts_exhausted",
    "not_retryable",
    "rejected",
    "undecodable",
    "late",
    "killed_worker",
    "outcome_unknown",
    "resurrected",
]


class Done(Struct, frozen=True, gc=False):
    """End the occurrence.

    Attributes:
        id: The message id.
        revision: The revision of the message.
        token: The token of the claim.
        then_due_ms: The next due time of a series; None ends the series.
        outcome: How the occurrence ended, for the journal.
    """

    id: str
    revision: int
    token: int
    then_due_ms: int | None = None
    outcome: Literal["delivered", "dropped", "skipped"] = "delivered"


class Again(Struct, frozen=True, gc=False):
    """Deliver the message again at `due_ms`.

    Attributes:
        id: The message id.
        revision: The revision of the message.
        token: The token of the claim.
        due_ms: The time of the next attempt.
        attempt: The number of attempts so far.
        error: The error text of the attempt that failed; None if no attempt failed.
        then_due_ms: The next due time of a series; None ends the series.
        trace: The trace context that replaces the one in the envelope; None = the trace context does not change.
    """

    id: str
    revision: int
    token: int
    due_ms: int
    attempt: int
    error: str | None = None
    then_due_ms: int | None = None
    trace: Mapping[str, str] | None = None


class Dead(Struct, frozen=True, gc=False):
    """Give the message up, and keep it as a dead letter.

    Attributes:
        id: The message id.
        revision: The revision of the message.
        token: The token of the claim.
        reason: Why the message is given up.
        attempt: The number of attempts so far.
        error: The error text of the attempt that failed; None if no attempt failed.
        then_due_ms: The next due time of a series; None ends the series.
        trace: The trace context that replaces the one in the envelope; None = the trace context does not change.
        traceback: The traceback of the last attempt.
    """

    id: str
    revision: int
    token: int
    reason: DeadReason
    attempt: int
    error: str | None = None
    then_due_ms: int | None = None
    trace: Mapping[str, str] | None = None
    traceback: str | None = None


Settlement: TypeAlias = Done | Again | Dead
"""The end of a claim. `then_due_ms` schedules a series' next occurrence in the same step; None ends the series."""


class SettleOutcome(StrEnum):
    """The answer to a settlement.

    `SETTLED`: the claim has ended as requested.
    `SUPERSEDED`: a newer version of the message, or of its series, exists. Nothing was written.
    `GONE`: the worker no longer holds the claim. Perhaps this settlement was already written by an earlier call.
    """

    SETTLED = "settled"
    SUPERSEDED = "superseded"
    GONE = "gone"


class Renewal(Struct, frozen=True, gc=False):
    """The request to extend a lease: if the claim still has `token`, it gets the token `to`.

    Attributes:
        id: The message id.
        revision: The revision of the message.
        token: The token that the claim must still have. If the claim already has the token `to`, the renewal succeeds
            too.
        to: The new token, which contains the new end of the lease.
        ends_trial: Whether the message is a suspect whose trial is over.
    """

    id: str
    revision: int
    token: int
    to: int
    ends_trial: bool = False


class PutBack(Struct, frozen=True, gc=False):
    """A message that a source returns to the store after an attempt.

    Attributes:
        record: The message, with the attempt counted. Revision and due time are unchanged.
        due_ms: When the message may be claimed, epoch ms; not before the message's due time.
        reason: If a reason is given, the store keeps the message as a dead letter with this reason.
    """

    record: Record
    due_ms: int
    reason: DeadReason | None = None


class RenewOutcome(StrEnum):
    """The answer to a renewal.

    `RENEWED`: the lease was renewed.
    `SUPERSEDED`: the lease was renewed, but the message or its series was replaced.
    `CANCELLED`: the lease was renewed, but the message was cancelled: no retry follows.
    `LOST`: the worker no longer holds the claim.

    After `SUPERSEDED` or `CANCELLED`, a run that has not begun must not begin. Only `LOST` stops a running handler.
    """

    RENEWED = "renewed"
    SUPERSEDED = "superseded"
    CANCELLED = "cancelled"
    LOST = "lost"


class WorkStatus(Struct, frozen=True):
    """Whether a store serves claims.

    Attributes:
        phase: `loading`: not yet, because the store still reads its messages. `ready`: claims are served. `ended`: no
            more claims are served.
        done: While the store loads: the number of parts that were read.
        of: While the store loads: the number of all parts.
        why: The reason for the phase, as text.
    """

    phase: Literal["loading", "ready", "ended"]
    done: int = 0
    of: int = 0
    why: str = ""


class LaneState(Struct, frozen=True, gc=False):
    """The state of one lane at a step of housekeeping.

    Attributes:
        lane: The lane.
        oldest_due_ms: Since when the oldest overdue message could have been claimed, epoch ms; None if no message is
            overdue. Paused messages and messages in flight are not overdue.
        served: Whether a live process serves the lane.
    """

    lane: Lane
    oldest_due_ms: int | None
    served: bool


class Tidied(Struct, frozen=True):
    """The report of one step of housekeeping.

    Attributes:
        now_ms: The store's time of the step, epoch ms.
        lapsed: The number of claims that lapsed.
        expired: The number of late messages that were ended.
        lanes: The state of each lane that holds messages.
    """

    now_ms: int
    lapsed: int
    expired: int
    lanes: Sequence[LaneState]
