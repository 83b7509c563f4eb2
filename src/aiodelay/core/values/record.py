"""The envelope and the record of a message, as a store keeps them, with their limits."""

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
"""How long a claim lasts, in ms, unless it is renewed. It is renewed after a third of this time."""
MAX_LEASE_MS = 60_000
"""No lease may end further ahead than this. A lease with a later end was made before the clock stepped back."""
RETRY_WINDOW_MS = 30_000
"""How long a store remembers the op of a command at least, in ms. Repeats within this time are safe."""
AWAY_AFTER_MS = 60_000
"""A consumer is away if it has claimed nothing for this many ms, and has nothing in flight."""
TOMBSTONE_WINDOW_MS = 86_400_000
"""How long a store remembers the caller's version of an ended message, in ms."""
MAX_CLAIM_MESSAGES = 500
MAX_CLAIM_BYTES = 1_048_576
MAX_LAPSES = 255
"""Most lapses in a row that a record counts."""
EARLIER_ERRORS = 4
"""Most errors that a message keeps in addition to its first and its last error."""
TRACEBACK_BYTES = 8_192
"""Most bytes of a traceback, in UTF-8, that a dead letter keeps."""


class LateAction(IntEnum):
    """The action for an occurrence that is claimed too late."""

    DELIVER = 0
    DROP = 1
    DEAD_LETTER = 2


class Late(Struct, frozen=True):
    """The policy for a message that is claimed late: more than `after` past its due time.

    The policy applies to first attempts and to retries.
    """

    action: LateAction = LateAction.DELIVER
    after_ms: int = 0

    @classmethod
    def deliver(cls) -> Late:
        """Deliver the message however late it is (the default)."""
        return DELIVER

    @classmethod
    def drop(cls, after: Duration) -> Late:
        """Drop the occurrence if it is claimed later than `after` past its due time. Dropped messages are counted."""
        return cls(LateAction.DROP, parse_duration(after, field="late.after", error=ConfigurationError))

    @classmethod
    def dead_letter(cls, after: Duration) -> Late:
        """Make a dead letter of the occurrence if it is claimed later than `after` past its due time."""
        return cls(LateAction.DEAD_LETTER, parse_duration(after, field="late.after", error=ConfigurationError))


DELIVER = Late()


# --- the stored message -----------------------------------------------------------------------------------

NO_HEADERS: Mapping[str, bytes] = MappingProxyType({})
NO_TRACE: Mapping[str, str] = MappingProxyType({})
CONTINUED = "aiodelay-continue"
"""A key in a message's trace context. With this key, the delivery continues that trace and begins no other trace."""
ATTEMPTED = "aiodelay-attempt-"
"""The prefix of the keys in a message's trace context that hold the trace of the last attempt."""


class Envelope(Struct, frozen=True, gc=False, omit_defaults=True):
    """The caller's part of a message. Except for `trace`, it never changes while the message lives.

    Attributes:
        id: The message id, text.
        lane: The event's type name, or the sink's name.
        address: The address in the sink; empty for a handler.
        type: The event's stable type name; empty for raw bytes, and if it equals the lane.
        encoding: The encoding of the payload: `""` (raw bytes), `"json"`, `"msgpack"`, or `"null"` (no payload).
        payload: The bytes to deliver.
        key: The sink's message key, if any.
        headers: The caller's headers, delivered byte for byte.
        trace: The trace contexts of the span that scheduled the message and of its last attempt's span.
        version: The caller's version (`Conflict.newer`), if any.
        rule: The recurrence rule, as `recurrence.encode_rule` writes it; None if the message does not recur.
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
        """The bytes that count against demand and limits: payload, key and headers."""
        size = len(self.payload)
        if self.key is not None:
            size += len(self.key)
        for name, value in self.headers.items():
            size += len(name) + len(value)
        return size


class Record(Struct, frozen=True, gc=False, omit_defaults=True):
    """An envelope and its state, as a store keeps them under the id.

    Attributes:
        envelope: The caller's part.
        revision: The version number under the id: the store's epoch ms at the put, or the last known revision + 1 if
            that is higher. Each put, replacement and redrive sets a new revision.
        due_ms: The earliest instant at which this occurrence may be delivered. Retries do not move it.
        op: The 8 bytes that identify the command that wrote this revision.
        expires_ms: A claim after this time is late; 0 = never.
        late: What happens to a late claim.
        attempt: The number of attempts that finished.
        lapses: The number of leases that ended unsettled, in a row. A lapse in a trial does not count.
        kills: The number of processes that ended while they tried this message alone.
        alone: Whether the current claim tries this message alone.
        no_retry: Whether the message was cancelled while in flight. The current attempt is then the last.
        live: For a series: the due times of earlier occurrences that are still being retried.
        first_error: The error of the first attempt that failed.
        last_error: The error of the last attempt that failed.
        earlier_errors: The errors before the last error, oldest first, at most `EARLIER_ERRORS`. If an error repeats
            the previous error, it is not kept again.
        traceback: For a dead letter: the traceback of its last attempt, at most `TRACEBACK_BYTES`.
        put_due_ms: The due time of the put, if the message was rescheduled or fired since. The delivery id needs it.
        debounced_ms: For a message of `Conflict.debounce`: when the first call of its burst came, epoch ms.
        appended: For a message in flight: the items that `Conflict.append()` added since its claim, joined by newlines.
        appended_due_ms: The due time of these items, if they become a message of their own.
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
    debounced_ms: int | None = None
    appended: bytes | None = None
    appended_due_ms: int | None = None

    @property
    def id(self) -> str:
        """The message id; for a retried occurrence of a series, the occurrence's own id."""
        return self.envelope.id
