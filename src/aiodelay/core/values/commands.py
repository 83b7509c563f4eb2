"""Commands that change a store, and the store's answers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal, TypeAlias, get_args

from msgspec import Struct

from aiodelay.core.durations import Duration, parse_duration
from aiodelay.errors import ConfigurationError, shortened

from .record import DELIVER, TOMBSTONE_WINDOW_MS, Envelope, Late

__all__ = [
    "CONFLICT_MODES",
    "OPERANDS",
    "OPTIONAL",
    "After",
    "At",
    "Cancel",
    "CancelOutcome",
    "Command",
    "Conflict",
    "ConflictMode",
    "Fire",
    "FireOutcome",
    "Outcome",
    "Put",
    "Refused",
    "Reschedule",
    "RescheduleOutcome",
    "ScheduleOutcome",
    "SourcePosition",
    "Stored",
    "Unknown",
]

# --- conflicts and due times ------------------------------------------------------------------------------


ConflictMode: TypeAlias = Literal[
    "replace",
    "keep",
    "newer",
    "error",
    "if_revision",
    "earlier",
    "later",
    "debounce",
    "throttle",
    "throttle_last",
    "append",
]
"""The modes of `Conflict`. `throttle_last` is `Conflict.throttle(..., last=True)`."""
CONFLICT_MODES: frozenset[ConflictMode] = frozenset(get_args(ConflictMode))
MOST_ITEMS = 1_000_000
"""The largest `max_items`."""


class Conflict(Struct, frozen=True):
    """The rule for scheduling an id that is already pending or in flight. Use the class methods.

    docs/guarantees.md, "The same id again", has the whole table. The scheduler itself sets `max_bytes`, the most bytes
    of a joined payload.
    """

    mode: ConflictMode
    version: int | None = None
    revision: int | None = None
    quiet_ms: int | None = None
    max_wait_ms: int | None = None
    window_ms: int | None = None
    max_items: int | None = None
    max_bytes: int | None = None

    @classmethod
    def replace(cls) -> Conflict:
        """Replace the earlier message: payload, due time and attempts are those of this call. This is the default."""
        return _REPLACE

    @classmethod
    def keep(cls) -> Conflict:
        """Keep the earlier message. Replace it only if both messages recur and their rules differ."""
        return _KEEP

    @classmethod
    def newer(cls, version: int) -> Conflict:
        """Replace the earlier message only if this version is higher. Otherwise store nothing, and answer `outdated`.

        A message that ended within the last 24 h counts as an earlier message too.

        Args:
            version: Your version number, 0 to 2**63-1.

        Raises:
            ConfigurationError: The version is not an integer in that range.
        """
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 1 << 63:
            raise ConfigurationError("conflict.version", shortened(version), "an integer from 0 to 2**63-1")
        return cls("newer", version)

    @classmethod
    def if_revision(cls, revision: int) -> Conflict:
        """Replace the message only if it still has this revision. Otherwise store nothing, and answer `outdated`.

        Args:
            revision: The value of `Scheduled.revision` or `Record.revision`, 0 to 2**48-1.

        Raises:
            ConfigurationError: The revision is not an integer in that range.
        """
        if isinstance(revision, bool) or not isinstance(revision, int) or not 0 <= revision < 1 << 48:
            raise ConfigurationError("conflict.revision", shortened(revision), "an integer from 0 to 2**48-1")
        return cls("if_revision", revision=revision)

    @classmethod
    def error(cls) -> Conflict:
        """Refuse the new message with `DuplicateIdError`."""
        return _ERROR

    @classmethod
    def earlier(cls) -> Conflict:
        """Replace the earlier message only if this message is due before it. Otherwise keep the earlier message."""
        return _EARLIER

    @classmethod
    def later(cls) -> Conflict:
        """Replace the earlier message only if this message is due after it. Otherwise keep the earlier message."""
        return _LATER

    @classmethod
    def debounce(cls, quiet: Duration, max_wait: Duration | None = None) -> Conflict:
        """Deliver the newest message of a burst, once no call has come for the time `quiet`.

        Each call replaces the pending message. The message is due `quiet` after the last call, and at most `max_wait`
        after the first call of the burst. A burst ends when the delivery of its message begins. `schedule()` gets no
        other due time.

        Args:
            quiet: The time without a call, at least 1 ms: a `timedelta`, or text such as "5s".
            max_wait: The longest time from the first call to the due time, at least `quiet`. None = there is no limit.

        Raises:
            ConfigurationError: One of the durations is wrong.
        """
        quiet_ms = parse_duration(quiet, field="conflict.quiet", error=ConfigurationError, least_ms=1)
        if max_wait is None:
            return cls("debounce", quiet_ms=quiet_ms)
        max_wait_ms = parse_duration(max_wait, field="conflict.max_wait", error=ConfigurationError)
        if max_wait_ms < quiet_ms:
            raise ConfigurationError("conflict.max_wait", shortened(max_wait), "at least as long as quiet")
        return cls("debounce", quiet_ms=quiet_ms, max_wait_ms=max_wait_ms)

    @classmethod
    def throttle(cls, window: Duration, *, last: bool = False) -> Conflict:
        """Store the first message of a time window, and keep it: the calls in the rest of the window store nothing.

        The window begins with the call that stores a message. The window does not end when the message is delivered.

        Args:
            window: The length of the window, 1 ms to 24 h: a `timedelta`, or text such as "1h".
            last: Whether the newest message of the window is delivered too, at the end of the window. While the first
                message waits for its first attempt, a newer message replaces it instead, and has the first message's
                due time.

        Raises:
            ConfigurationError: The window is not a duration of that length.
        """
        window_ms = parse_duration(window, field="conflict.window", error=ConfigurationError, least_ms=1)
        if window_ms > TOMBSTONE_WINDOW_MS:
            raise ConfigurationError("conflict.window", shortened(window), "at most 24 h")
        return cls("throttle_last" if last else "throttle", window_ms=window_ms)

    @classmethod
    def append(cls, max_items: int | None = None) -> Conflict:
        """Join this message to the earlier message, as one more line of its payload. Nothing is replaced.

        The joined message keeps its due time. If the earlier message is in flight, this message waits for the next
        delivery. A handler with `gathered=True` gets all items as a list.

        Args:
            max_items: The message is due at once when it has this number of items, 1 to 1,000,000. It may get more
                items before its delivery begins. None = only the due time counts.

        Raises:
            ConfigurationError: The number is not an integer in that range.
        """
        if max_items is not None and (type(max_items) is not int or not 1 <= max_items <= MOST_ITEMS):
            raise ConfigurationError("conflict.max_items", shortened(max_items), f"an integer from 1 to {MOST_ITEMS}")
        return cls("append", max_items=max_items)


_REPLACE, _KEEP, _ERROR = Conflict("replace"), Conflict("keep"), Conflict("error")
_EARLIER, _LATER = Conflict("earlier"), Conflict("later")
OPERANDS: Mapping[ConflictMode, frozenset[str]] = {
    "newer": frozenset({"version"}),
    "if_revision": frozenset({"revision"}),
    "debounce": frozenset({"quiet_ms", "max_wait_ms"}),
    "throttle": frozenset({"window_ms"}),
    "throttle_last": frozenset({"window_ms"}),
    "append": frozenset({"max_items"}),
}
"""The attributes of `Conflict` that a mode uses. The others are None. Attributes in `OPTIONAL` may be None too."""
OPTIONAL = frozenset({"max_wait_ms", "max_items"})
"""The attributes of `OPERANDS` that may be None. `max_bytes` is not among them: the scheduler sets it."""


class At(Struct, frozen=True, gc=False):
    """A due time given as an instant, epoch ms. A message with a past instant is due now."""

    ms: int


class After(Struct, frozen=True, gc=False):
    """A due time given as a number of ms from now, on the store's clock."""

    ms: int


# --- commands and their outcomes --------------------------------------------------------------------------


class Put(Struct, frozen=True, gc=False):
    """Store a message, or a new revision of a message.

    Attributes:
        op: The op of the command.
        envelope: The message.
        due: When the message is due.
        conflict: The rule for an id that is already stored.
        late: The policy for a late claim.
    """

    op: bytes
    envelope: Envelope
    due: At | After
    conflict: Conflict = _REPLACE
    late: Late = DELIVER

    @property
    def id(self) -> str:
        """The message id; for a retried occurrence of a series, the occurrence's own id."""
        return self.envelope.id


class Cancel(Struct, frozen=True, gc=False):
    """End a message and, if it recurs, its series.

    Attributes:
        op: The op of the command.
        id: The message id.
        only: The revision and the due time that the message must still have. If the due time is None, only the revision
            counts. If the message differs, the store leaves it unchanged and answers `outdated`.
    """

    op: bytes
    id: str
    only: tuple[int, int | None] | None = None


class Reschedule(Struct, frozen=True, gc=False):
    """Move a pending message to another due time, and change nothing else."""

    op: bytes
    id: str
    due: At | After


class Fire(Struct, frozen=True, gc=False):
    """Make a pending message due now."""

    op: bytes
    id: str


Command: TypeAlias = Put | Cancel | Reschedule | Fire


class Stored(Struct, frozen=True, gc=False):
    """The command was carried out.

    Attributes:
        answer: The effect of the command. `recorded`: the effect is not known yet, or not any more. The latter is so if
            an earlier reader of the same source has stored the command.
        revision: The revision of the message that is stored now, or that was stored last; 0 for `recorded`.
        due_ms: The due time of that message; 0 for `recorded`.
        is_older_in_flight: For `replaced`: whether an older version is still claimed. A retry of a replaced series
            counts too.
    """

    answer: Literal["stored", "replaced", "kept", "in_flight", "cancelled", "recorded", "rescheduled", "fired"]
    revision: int
    due_ms: int
    is_older_in_flight: bool = False


class Refused(Struct, frozen=True, gc=False):
    """The command was not carried out, and certainly nothing was written.

    Attributes:
        reason: The reason. `too_large`: the payload joined by `Conflict.append()` is too large. `undecodable`: the
            record of a dead letter cannot be read, so its payload and its destination are unknown.
        detail: The reason as text for people.
        revision: For `outdated`: the revision of the stored message; 0 if there is none.
        due_ms: The due time of that message.
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
        "too_large",
        "undecodable",
    ]
    detail: str = ""
    revision: int = 0
    due_ms: int = 0


class Unknown(Struct, frozen=True, gc=False):
    """The command may or may not have been carried out. A repeat with the same op is safe for `RETRY_WINDOW_MS`."""

    detail: str


Outcome: TypeAlias = Stored | Refused | Unknown


class ScheduleOutcome(StrEnum):
    """The effect of `schedule()`.

    `STORED`: the message is new.
    `REPLACED`: the message replaced an earlier message with the same id. With `Conflict.append()`: it joined it.
    `KEPT`: an earlier message with the same id stays, and this message was not stored.
    `IN_FLIGHT`: as `KEPT`, and the earlier message is in flight.
    `OUTDATED`: the conflict rule names another version or revision. This message was not stored.
    """

    STORED = "stored"
    REPLACED = "replaced"
    KEPT = "kept"
    IN_FLIGHT = "in_flight"
    OUTDATED = "outdated"


class CancelOutcome(StrEnum):
    """The effect of `cancel()`.

    `CANCELLED`: the message has ended, and was not in flight.
    `RECORDED`: the message is cancelled, unless its delivery has begun. This process does not own all partitions, so it
    does not know whether the delivery has begun.
    `IN_FLIGHT`: the attempt that is under way goes on, perhaps with a replaced version. No other attempt follows.
    `NOT_FOUND`: no message with this id is pending.
    `OUTDATED`: the message has another revision than `if_revision`, and stays.
    """

    CANCELLED = "cancelled"
    RECORDED = "recorded"
    IN_FLIGHT = "in_flight"
    NOT_FOUND = "not_found"
    OUTDATED = "outdated"


class RescheduleOutcome(StrEnum):
    """The effect of `reschedule()`.

    `TOO_LATE`: the delivery at the old due time has begun. No delivery at the new due time follows.
    """

    RESCHEDULED = "rescheduled"
    TOO_LATE = "too_late"
    NOT_FOUND = "not_found"


class FireOutcome(StrEnum):
    """The effect of `fire()`. `IN_FLIGHT`: the delivery has already begun."""

    FIRED = "fired"
    IN_FLIGHT = "in_flight"
    NOT_FOUND = "not_found"


class SourcePosition(Struct, frozen=True):
    """The position up to which an intake has read a stream.

    The store writes the position in the same step as the messages that were read up to it. A store carries out the
    commands only if its stored position is `first`, or if it has no position and `is_stored` is false. Otherwise it
    refuses all of them as `passed`. So if two readers read the same records, only one of them stores the messages. If a
    store has lost the writes of its last seconds, it refuses the reader too. The refused reader asks for the stored
    position and reads on from there, so no gap remains.

    Attributes:
        source: The name of one ordered stream, such as a topic's partition.
        first: The position from which the commands were read.
        position: The next position to read.
        positions: The position after each command, in ascending order, or (). A store of several parts needs them if
            some of its parts are ahead of others: a part carries out no command that it has already.
        is_stored: Whether the reader knows that `first` is stored. A store that has no position then has lost it.
    """

    source: str
    first: int
    position: int
    positions: tuple[int, ...] = ()
    is_stored: bool = False

    def continues(self, stored: int | None) -> bool:
        """Return whether the commands may follow the stored position; None = no position is stored."""
        return not self.is_stored if stored is None else stored == self.first
