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
]

# --- claims and settlements -------------------------------------------------------------------------------


class Demand(Struct, frozen=True, gc=False):
    """How much a subscriber can take of a lane now.

    Attributes:
        messages: Most messages wanted; 0 requests none.
        max_bytes: Most payload bytes wanted. One larger message is still given, alone.
        aliases: Further lanes that share this demand, such as an event's former type names.
        max_lapses: Most lapses in a row that a message may have. 0 requests messages that have never lapsed. 1 excludes
            suspects, which have lapsed twice or more.
    """

    messages: int
    max_bytes: int = MAX_CLAIM_BYTES
    aliases: tuple[Lane, ...] = ()
    max_lapses: int = MAX_LAPSES


class Claim(Struct, frozen=True, gc=False):
    """A leased message. Its `token` is needed to settle it, and fences off older claims.

    Attributes:
        record: The message.
        token: The number of this claim.
        queued_ms: How long the message waited in the list from which a source took it. None if a store gave it out, or
            if the time is not known.
        missed: How many messages of the source's topic expired between this message and the one given before it.
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
        claims: Earliest due first within a lane.
        now_ms: The store's time of the answer.
        next_due_ms: The earliest due time or lease end in these lanes: claim again then. None = the lanes are empty.
    """

    claims: Sequence[Claim]
    now_ms: int
    next_due_ms: int | None


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
    """End the occurrence. `outcome` says how it ended, for the journal."""

    id: str
    revision: int
    token: int
    then_due_ms: int | None = None
    outcome: Literal["delivered", "dropped", "skipped"] = "delivered"


class Again(Struct, frozen=True, gc=False):
    """Deliver the message again at `due_ms`.

    Attributes:
        id: The message id.
        revision: Its revision.
        token: The token of the claim.
        due_ms: The time of the next attempt.
        attempt: The number of attempts so far.
        error: The error text of the last failed attempt.
        then_due_ms: The next due time of a series.
        trace: The whole new trace of its envelope; None = the trace does not change.
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
    """Give the message up, and keep it as a dead letter. `trace`: as in `Again`. `traceback`: of the last attempt."""

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

    `SUPERSEDED`: a newer version of the message, or of its series, exists. Nothing was written.
    `GONE`: the claim is no longer held.
    """

    SETTLED = "settled"
    SUPERSEDED = "superseded"
    GONE = "gone"


class Renewal(Struct, frozen=True, gc=False):
    """Compare-and-set of a lease from `token` to `to`. It also succeeds if the token already is `to`.

    `ends_trial`: the message is a suspect, and its trial is over.
    """

    id: str
    revision: int
    token: int
    to: int
    ends_trial: bool = False


class PutBack(Struct, frozen=True, gc=False):
    """A message that a source returns to the store after an attempt.

    Attributes:
        record: The message with the attempt counted. Revision and due time are unchanged.
        due_ms: When it may be claimed; not before its own due time.
        reason: If given, keep it as a dead letter with this reason.
    """

    record: Record
    due_ms: int
    reason: DeadReason | None = None


class RenewOutcome(StrEnum):
    """The answer to a renewal.

    `SUPERSEDED`: renewed, but the message or its series was replaced. `CANCELLED`: renewed, but no retry follows. After
    either, a run that has not begun must not begin. Only `LOST` stops a running handler.
    """

    RENEWED = "renewed"
    SUPERSEDED = "superseded"
    CANCELLED = "cancelled"
    LOST = "lost"


class WorkStatus(Struct, frozen=True):
    """Whether claims are served: `loading` (`done` of `of` parts are read), `ready`, or `ended` with the reason."""

    phase: Literal["loading", "ready", "ended"]
    done: int = 0
    of: int = 0
    why: str = ""


class LaneState(Struct, frozen=True, gc=False):
    """The state of one lane at a step of housekeeping.

    `oldest_due_ms`: since when the oldest overdue message could have been claimed; None if no message is overdue.
    Paused messages and messages in flight are not overdue.
    """

    lane: Lane
    oldest_due_ms: int | None
    served: bool


class Tidied(Struct, frozen=True):
    """The report of one step of housekeeping, with the state of all lanes that hold messages."""

    now_ms: int
    lapsed: int
    expired: int
    lanes: Sequence[LaneState]
