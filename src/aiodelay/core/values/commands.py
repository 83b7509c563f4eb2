"""Commands that change a store, and the store's answers."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, TypeAlias

from msgspec import Struct

from aiodelay.errors import ConfigurationError, shortened

from .record import DELIVER, Envelope, Late

__all__ = [
    "After",
    "At",
    "Cancel",
    "CancelOutcome",
    "Command",
    "Conflict",
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


class Conflict(Struct, frozen=True):
    """The rule for scheduling an id that is already pending or in flight. Use the class methods.

    docs/guarantees.md, "The same id again", has the whole table.
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
        """The higher version wins, even over a message that ended within the last 24 h.

        Args:
            version: Your version number, 0 to 2**63-1. It is compared with the version of the stored message or of its
                tombstone.

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
            revision: From `Scheduled.revision` or `Record.revision`, 0 to 2**48-1.

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


_REPLACE, _KEEP, _ERROR = Conflict("replace"), Conflict("keep"), Conflict("error")


class At(Struct, frozen=True, gc=False):
    """Due at an instant, epoch ms. A message with a past instant is due now."""

    ms: int


class After(Struct, frozen=True, gc=False):
    """Due this many ms from now, on the store's clock."""

    ms: int


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
        """The message id; for a retried occurrence of a series, the occurrence's own id."""
        return self.envelope.id


class Cancel(Struct, frozen=True, gc=False):
    """End a message and, if it recurs, its series.

    Attributes:
        op: The op id.
        id: The message id.
        only: The revision and the due time that the message must still have. If the due time is None, only the revision
            must be the same. If they differ, the store does not touch the message and answers `outdated`.
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
        answer: What the command did.
        revision: The revision of the message that is stored now, or that was stored last.
        due_ms: The due time of that message.
        is_older_in_flight: For `replaced`: an older version is still claimed. A retry of a replaced series counts too.
    """

    answer: Literal["stored", "replaced", "kept", "in_flight", "cancelled", "recorded", "rescheduled", "fired"]
    revision: int
    due_ms: int
    is_older_in_flight: bool = False


class Refused(Struct, frozen=True, gc=False):
    """The command was not carried out, and certainly nothing was written.

    Attributes:
        reason: The reason. `undecodable`: the record of a dead letter cannot be read, so its payload and its
            destination are unknown.
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
    """What `schedule()` did."""

    STORED = "stored"
    REPLACED = "replaced"
    KEPT = "kept"
    IN_FLIGHT = "in_flight"
    OUTDATED = "outdated"


class CancelOutcome(StrEnum):
    """What `cancel()` did.

    `IN_FLIGHT`: the attempt that is under way goes on, perhaps with a replaced version. No other attempt follows.
    `RECORDED`: the message is cancelled, unless its delivery has begun. This process does not own all partitions, so it
    does not know.
    `OUTDATED`: the message has another revision than `if_revision`, and stays.
    """

    CANCELLED = "cancelled"
    RECORDED = "recorded"
    IN_FLIGHT = "in_flight"
    NOT_FOUND = "not_found"
    OUTDATED = "outdated"


class RescheduleOutcome(StrEnum):
    """What `reschedule()` did. `TOO_LATE`: the delivery at the old due time has begun; no other delivery follows."""

    RESCHEDULED = "rescheduled"
    TOO_LATE = "too_late"
    NOT_FOUND = "not_found"


class FireOutcome(StrEnum):
    """What `fire()` did. `IN_FLIGHT`: the delivery has already begun."""

    FIRED = "fired"
    IN_FLIGHT = "in_flight"
    NOT_FOUND = "not_found"


class SourcePosition(Struct, frozen=True):
    """The position of an intake. The store writes it in the step that stores the messages read up to it.

    A store carries the commands out only if its stored position is `first`, or if it has none. Otherwise it refuses
    them all as `passed`. So if two readers read the same records, only one of them stores the messages. And if a store
    has lost its last seconds, no gap remains: the refused reader asks for the stored position and reads on from there.

    Attributes:
        source: The name of one ordered stream, such as a topic's partition.
        first: The position from which the commands were read.
        position: The next position to read.
    """

    source: str
    first: int
    position: int
