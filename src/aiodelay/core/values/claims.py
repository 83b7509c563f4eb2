"""Claims of due messages, and how claims end."""

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
        messages: Most messages wanted; 0 asks for none.
        max_bytes: Most payload bytes wanted; one larger message is still given, alone.
        aliases: Further lanes that share this demand, such as an event's former type names.
        max_lapses: Most lapses in a row that a message may have had: 0 asks for messages that never lapsed, 1 for no
            suspects, which have lapsed twice or more.
    """

    messages: int
    max_bytes: int = MAX_CLAIM_BYTES
    aliases: tuple[Lane, ...] = ()
    max_lapses: int = MAX_LAPSES


class Claim(Struct, frozen=True, gc=False):
    """A leased message; `token` is what settles it, and fences off older claims.

    `queued_ms`: how long it waited where a source took it from; None for a store's, and where that is not known.
    `missed`: how many messages the source kept no longer that came before it, and after the last one given.
    `partition`, `offset`: where the record stands that a source has read from a topic of partitions.
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
        next_due_ms: When to look again in these lanes: the earliest due time or lease end; None = they are empty.
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
    """The occurrence is over; `outcome` says how, for the journal."""

    id: str
    revision: int
    token: int
    then_due_ms: int | None = None
    outcome: Literal["delivered", "dropped", "skipped"] = "delivered"


class Again(Struct, frozen=True, gc=False):
    """Deliver it again at `due_ms`; `attempt` is the number of runs so far, `error` the text of the last failure.

    `trace`: what its envelope's trace is from now on, whole; None = what it was.
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
    """Give it up: keep it as a dead letter; `trace` as of `Again`, `traceback` of the attempt that has just failed."""

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
"""How a claim ends. `then_due_ms` re-arms a recurring record at that time in the same step; None ends the series."""


class SettleOutcome(StrEnum):
    """`SUPERSEDED`: a newer version of the message, or of its series, exists; nothing was written.

    `GONE`: the claim is no longer held.
    """

    SETTLED = "settled"
    SUPERSEDED = "superseded"
    GONE = "gone"


class Renewal(Struct, frozen=True, gc=False):
    """Compare-and-set of a lease: from `token` to `to`; answered yes when it already is `to`.

    `ends_trial`: the message, a suspect, has run for as long as its trial lasts.
    """

    id: str
    revision: int
    token: int
    to: int
    ends_trial: bool = False


class PutBack(Struct, frozen=True, gc=False):
    """A message that had left the store, as it stands after an attempt elsewhere: back it goes.

    Attributes:
        record: With the attempt counted, of the same revision and due time as before.
        due_ms: When it may be claimed; not before its own due time.
        reason: Keep it as a dead letter instead.
    """

    record: Record
    due_ms: int
    reason: DeadReason | None = None


class RenewOutcome(StrEnum):
    """`SUPERSEDED`: renewed, but the message or its series was replaced. `CANCELLED`: renewed, but no retry follows.

    After either, a run that has not begun does not begin. Only `LOST` stops a running handler.
    """

    RENEWED = "renewed"
    SUPERSEDED = "superseded"
    CANCELLED = "cancelled"
    LOST = "lost"


class WorkStatus(Struct, frozen=True):
    """Whether claims are served: `loading` (`done` of `of` read), `ready`, or `ended` with the reason."""

    phase: Literal["loading", "ready", "ended"]
    done: int = 0
    of: int = 0
    why: str = ""


class LaneState(Struct, frozen=True, gc=False):
    """One lane as housekeeping found it.

    `oldest_due_ms`: since when the message that waits longest could have been claimed; None if none is overdue. What is
    held or in flight is not.
    """

    lane: Lane
    oldest_due_ms: int | None
    served: bool


class Tidied(Struct, frozen=True):
    """What one step of housekeeping did and saw, over all lanes that hold messages."""

    now_ms: int
    lapsed: int
    expired: int
    lanes: Sequence[LaneState]
