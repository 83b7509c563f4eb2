"""What a store keeps of a message: its envelope, its record, and the limits of both."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Literal, TypeAlias

from msgspec import Struct

from aiodelay.core.durations import Duration, parse_duration
from aiodelay.errors import ConfigurationError

__all__ = [
    "ATTEMPTED",
    "AWAY_AFTER_MS",
    "CONTINUED",
    "DELIVER",
    "EARLIER_ERRORS",
    "LEASE_MS",
    "MAX_CLAIM_BYTES",
    "MAX_CLAIM_MESSAGES",
    "MAX_LAPSES",
    "MAX_LEASE_MS",
    "NO_HEADERS",
    "NO_TRACE",
    "RETRY_WINDOW_MS",
    "TOMBSTONE_WINDOW_MS",
    "TRACEBACK_BYTES",
    "Envelope",
    "Lane",
    "Late",
    "LateAction",
    "Record",
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
