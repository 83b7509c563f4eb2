"""The values that pass between scheduler, dispatcher, stores and sinks; `record_format` declares a record's fields.

Times are epoch milliseconds on the store's clock unless a name says otherwise. Values on the hot path are frozen
`msgspec.Struct`s; they hold no cycles, so the garbage collector need not look at them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from msgspec import Struct

from .errors import ConfigurationError, shortened
from .record_format import FIELDS, FORMAT_VERSION, Field
from .timeunits import Duration, parse_duration

__all__ = [
    "ATTEMPTED",
    "CONTINUED",
    "EARLIER_ERRORS",
    "FIELDS",
    "FORMAT_VERSION",
    "LEASE_MS",
    "MAX_CLAIM_BYTES",
    "MAX_CLAIM_MESSAGES",
    "MAX_LAPSES",
    "MAX_LEASE_MS",
    "RETRY_WINDOW_MS",
    "TOMBSTONE_WINDOW_MS",
    "TRACEBACK_BYTES",
    "After",
    "Again",
    "At",
    "Blocked",
    "Cancel",
    "CancelOutcome",
    "Claim",
    "Claimed",
    "Command",
    "Conflict",
    "Dead",
    "DeadKey",
    "DeadLetter",
    "DeadReason",
    "Delivery",
    "Demand",
    "Done",
    "Envelope",
    "Failed",
    "Field",
    "Fire",
    "FireOutcome",
    "Instance",
    "JournalEntry",
    "Lane",
    "LaneCounts",
    "LaneState",
    "Late",
    "LateAction",
    "LoadBucket",
    "NotTaken",
    "Outcome",
    "Promise",
    "Put",
    "PutBack",
    "Query",
    "Reach",
    "Record",
    "Refused",
    "Registered",
    "RenewOutcome",
    "Renewal",
    "Reschedule",
    "RescheduleOutcome",
    "ScheduleOutcome",
    "SendOutcome",
    "Sent",
    "SettleOutcome",
    "Settlement",
    "Snapshot",
    "SourcePosition",
    "State",
    "Stored",
    "Tidied",
    "Transferred",
    "Unknown",
    "WorkStatus",
]

Lane: TypeAlias = str
"""The unit of demand: a handler's event type, or a sink's name."""

LEASE_MS = 15_000
"""How long a claim lasts, in ms, unless it is renewed; it is renewed at a third of this."""
MAX_LEASE_MS = 60_000
"""No lease may end further ahead than this; one that does was made by a clock that has since stepped back."""
RETRY_WINDOW_MS = 30_000
AWAY_AFTER_MS = 60_000
"""A consumer that has asked for nothing for so long, and has nothing in flight, is away."""
"""How long a store remembers the op of a command whose record is gone, in ms: repeats within it are safe."""
TOMBSTONE_WINDOW_MS = 86_400_000
"""How long a store remembers the version of an ended message that carried one, in ms."""
MAX_CLAIM_MESSAGES = 500
MAX_CLAIM_BYTES = 1_048_576
MAX_LAPSES = 255
"""Most lapses in a row that a record counts."""
EARLIER_ERRORS = 4
"""Most errors that a message keeps beside its first and its last one."""
TRACEBACK_BYTES = 8_192
"""Most bytes of a traceback, in UTF-8, that a dead letter keeps."""


# --- the same id again, and too late ----------------------------------------------------------------------


class Conflict(Struct, frozen=True):
    """What scheduling an id that is already pending or in flight does; use the class methods.

    The whole table stands in docs/guarantees.md, "The same id again".
    """

    mode: Literal["replace", "keep", "newer", "error", "if_revision"]
    version: int | None = None
    revision: int | None = None

    @classmethod
    def replace(cls) -> Conflict:
        """The newest wins: payload, time and attempts are those of this call (the default)."""
        return _REPLACE

    @classmethod
    def keep(cls) -> Conflict:
        """The first wins, unless both recur and this call's rule differs from the stored one."""
        return _KEEP

    @classmethod
    def newer(cls, version: int) -> Conflict:
        """The higher version wins, also over a message that ended within the last 24 h.

        Args:
            version: Yours, 0 to 2**63-1; compared with the stored message's, or its tombstone's.

        Raises:
            ConfigurationError: The version is not an integer in that range.
        """
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 1 << 63:
            raise ConfigurationError("conflict.version", shortened(version), "an integer from 0 to 2**63-1")
        return cls("newer", version)

    @classmethod
    def if_revision(cls, revision: int) -> Conflict:
        """Replace the message only if it still has this revision; otherwise store nothing, and answer `outdated`.

        Args:
            revision: As `Scheduled.revision` or `Record.revision` told it, 0 to 2**48-1.

        Raises:
            ConfigurationError: The revision is not an integer in that range.
        """
        if isinstance(revision, bool) or not isinstance(revision, int) or not 0 <= revision < 1 << 48:
            raise ConfigurationError("conflict.revision", shortened(revision), "an integer from 0 to 2**48-1")
        return cls("if_revision", revision=revision)

    @classmethod
    def error(cls) -> Conflict:
        """Refuse with `DuplicateIdError`."""
        return _ERROR


_REPLACE, _KEEP, _ERROR = Conflict("replace"), Conflict("keep"), Conflict("error")


class LateAction(IntEnum):
    """What happens to an occurrence claimed later than it may be."""

    DELIVER = 0
    DROP = 1
    DEAD_LETTER = 2


class Late(Struct, frozen=True):
    """What a claim later than `after` past the due time does: first attempts and retries, live and after a restart."""

    action: LateAction = LateAction.DELIVER
    after_ms: int = 0

    @classmethod
    def deliver(cls) -> Late:
        """Deliver however late (the default)."""
        return DELIVER

    @classmethod
    def drop(cls, after: Duration) -> Late:
        """Drop the occurrence, counted, when it is claimed later than `after` past its due time."""
        return cls(LateAction.DROP, parse_duration(after, field="late.after", error=ConfigurationError))

    @classmethod
    def dead_letter(cls, after: Duration) -> Late:
        """Move the occurrence to the dead letters when it is claimed later than `after` past its due time."""
        return cls(LateAction.DEAD_LETTER, parse_duration(after, field="late.after", error=ConfigurationError))


DELIVER = Late()


class At(Struct, frozen=True, gc=False):
    """Due at an instant, epoch ms; in the past it is due now."""

    ms: int


class After(Struct, frozen=True, gc=False):
    """Due this many ms from now, on the store's clock."""

    ms: int


# --- a message as it is stored ----------------------------------------------------------------------------

NO_HEADERS: Mapping[str, bytes] = MappingProxyType({})
NO_TRACE: Mapping[str, str] = MappingProxyType({})
CONTINUED = "aiodelay-continue"
"""In a message's trace context: it is delivered in that trace, and not in one of its own."""
ATTEMPTED = "aiodelay-attempt-"
"""In a message's trace context: with this, names of what the last attempt's span has been carried by."""


class Envelope(Struct, frozen=True, gc=False, omit_defaults=True):
    """What the caller gave: but for `trace`, it never changes while the message lives.

    Attributes:
        id: The message id, text.
        lane: The event's type name, or the sink's name.
        address: Where in the sink; empty for a handler.
        type: The event's stable type name; empty for raw bytes, and where it equals the lane.
        encoding: How the payload is written: `""` (raw bytes), `"json"`, `"msgpack"`, or `"null"`: there is none.
        payload: The bytes to deliver.
        key: The sink's message key, if any.
        headers: The caller's headers, delivered byte for byte.
        trace: The trace context of the span that scheduled it, and of that of its last attempt.
        version: The caller's version (`Conflict.newer`), if any.
        rule: The recurrence rule, as `recurrence.encode_rule` writes it, if it recurs.
    """

    id: str
    lane: Lane
    address: str = ""
    type: str = ""
    encoding: Literal["", "json", "msgpack", "null"] = ""
    payload: bytes = b""
    key: bytes | None = None
    headers: Mapping[str, bytes] = NO_HEADERS
    trace: Mapping[str, str] = NO_TRACE
    version: int | None = None
    rule: Mapping[str, str | int] | None = None

    @property
    def size(self) -> int:
        """Bytes that count against demand and limits: payload, key and headers."""
        size = len(self.payload)
        if self.key is not None:
            size += len(self.key)
        if self.headers:
            size += sum(len(name) + len(value) for name, value in self.headers.items())
        return size


class Record(Struct, frozen=True, gc=False, omit_defaults=True):
    """An envelope and its state; what a store keeps under the id.

    Attributes:
        revision: Store ms at the put, or the last known revision + 1: new at each put, replace and redrive.
        due_ms: When this occurrence may be delivered at the earliest; retries do not move it.
        expires_ms: Claims later than this are `late`; 0 = never.
        attempt: Runs that finished.
        lapses: Leases that ended unsettled, in a row; a lapse in a trial does not count.
        kills: How many processes ended while they tried this message alone.
        alone: The current claim tries this message alone.
        no_retry: Cancelled while in flight: this attempt is the last.
        op: 8 bytes; the command that wrote this revision.
        live: Of a series: due times of earlier occurrences that are still being retried.
        first_error: The error of the first attempt that failed.
        last_error: The error of the last attempt that failed.
        earlier_errors: The errors before the last one, oldest first, at most `EARLIER_ERRORS`; an error that repeats
            the one before it is not kept again.
        traceback: Of a dead letter, the traceback of its last attempt, at most `TRACEBACK_BYTES`.
        put_due_ms: The due time of the put, if the message was rescheduled or fired since: it stays in the delivery id.
    """

    envelope: Envelope
    revision: int
    due_ms: int
    op: bytes
    expires_ms: int = 0
    late: LateAction = LateAction.DELIVER
    attempt: int = 0
    lapses: int = 0
    kills: int = 0
    alone: bool = False
    no_retry: bool = False
    live: tuple[int, ...] = ()
    first_error: str | None = None
    last_error: str | None = None
    earlier_errors: tuple[str, ...] = ()
    traceback: str | None = None
    put_due_ms: int | None = None

    @property
    def id(self) -> str:
        """The message id; of an occurrence that is retried, the occurrence's own."""
        return self.envelope.id


# --- commands and their outcomes --------------------------------------------------------------------------


class Put(Struct, frozen=True, gc=False):
    """Store a message, or a new revision of it."""

    op: bytes
    envelope: Envelope
    due: At | After
    conflict: Conflict = _REPLACE
    late: Late = DELIVER

    @property
    def id(self) -> str:
        """The message id; of an occurrence that is retried, the occurrence's own."""
        return self.envelope.id


class Cancel(Struct, frozen=True, gc=False):
    """End a message and, if it recurs, its series.

    Attributes:
        only: The revision that it must still have, and the due time unless that is None; another one is left alone:
            `outdated`.
    """

    op: bytes
    id: str
    only: tuple[int, int | None] | None = None


class Reschedule(Struct, frozen=True, gc=False):
    """Move a pending message's due time; all else stays."""

    op: bytes
    id: str
    due: At | After


class Fire(Struct, frozen=True, gc=False):
    """Make a pending message due now."""

    op: bytes
    id: str


Command: TypeAlias = Put | Cancel | Reschedule | Fire


class Stored(Struct, frozen=True, gc=False):
    """Done; what the command came to.

    Attributes:
        answer: In a word.
        revision: Of the message that stands now, or stood last.
        due_ms: When that one is due.
        is_older_in_flight: Of `replaced`: an older version is still claimed; a retry of a replaced series is one too.
    """

    answer: Literal["stored", "replaced", "kept", "in_flight", "cancelled", "recorded", "rescheduled", "fired"]
    revision: int
    due_ms: int
    is_older_in_flight: bool = False


class Refused(Struct, frozen=True, gc=False):
    """Not done, surely nothing written.

    Attributes:
        reason: In a word. `undecodable`: of a dead letter whose record cannot be read, so that its payload and its
            destination are unknown.
        detail: For people.
        revision: Of `outdated`: that of the message that stands; 0 where none does.
        due_ms: When that one is due.
    """

    reason: Literal[
        "duplicate",
        "outdated",
        "not_found",
        "too_late",
        "in_flight",
        "exists",
        "passed",
        "unavailable",
        "full",
        "undecodable",
    ]
    detail: str = ""
    revision: int = 0
    due_ms: int = 0


class Unknown(Struct, frozen=True, gc=False):
    """It may or may not have been done; repeating it with the same op is safe for `RETRY_WINDOW_MS`."""

    detail: str


Outcome: TypeAlias = Stored | Refused | Unknown


class ScheduleOutcome(StrEnum):
    """What `schedule()` came to."""

    STORED = "stored"
    REPLACED = "replaced"
    KEPT = "kept"
    IN_FLIGHT = "in_flight"
    OUTDATED = "outdated"


class CancelOutcome(StrEnum):
    """What `cancel()` came to.

    `IN_FLIGHT`: this attempt, or one of a version that was replaced, goes on; nothing follows it. `RECORDED`: it is
    cancelled, unless it is being delivered just now; only a process that owns all could say. `OUTDATED`: it has another
    revision than the one asked for, and stays.
    """

    CANCELLED = "cancelled"
    RECORDED = "recorded"
    IN_FLIGHT = "in_flight"
    NOT_FOUND = "not_found"
    OUTDATED = "outdated"


class RescheduleOutcome(StrEnum):
    """What `reschedule()` came to; `TOO_LATE`: it is being delivered at its old time, and only then."""

    RESCHEDULED = "rescheduled"
    TOO_LATE = "too_late"
    NOT_FOUND = "not_found"


class FireOutcome(StrEnum):
    """What `fire()` came to; `IN_FLIGHT`: it is being delivered already."""

    FIRED = "fired"
    IN_FLIGHT = "in_flight"
    NOT_FOUND = "not_found"


class SourcePosition(Struct, frozen=True):
    """Where an intake stands: stored in the step that stores what was read up to it.

    Commands are carried out only if the stored position is `first`, or none is stored; otherwise all are refused as
    `passed`. So one of two readers of the same records stores them, and a store that has lost its last seconds is not
    left with a gap: whoever is refused reads on from the position that it asks for.

    Attributes:
        source: Names one ordered stream, such as a topic's partition.
        first: The position from which the commands were read.
        position: The next position to read.
    """

    source: str
    first: int
    position: int


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
