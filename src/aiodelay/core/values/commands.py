"""Commands that change a store, and what a store answers."""

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


class At(Struct, frozen=True, gc=False):
    """Due at an instant, epoch ms; in the past it is due now."""

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
