"""`History`: the events that several processes have seen. Each appends one JSON line per event to one file.

One `write` call in append mode writes a line, so lines of different processes do not mix. Each line also begins with a
line break, so that a line cut short by a kill does not damage the next line.
Times: `at_ns` is CLOCK_MONOTONIC, which orders the events of all processes of a machine. `wall_ms` is the wall clock,
to compare with due times.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Literal, Self, TypeAlias, TypeVar
from uuid import uuid4

import msgspec
from msgspec import Struct

from aiodelay.errors import ClosedError
from aiodelay.ports.clock import Clock

__all__ = [
    "Blocked",
    "ClaimNote",
    "Claimed",
    "Claiming",
    "Event",
    "Final",
    "History",
    "Invoked",
    "Loss",
    "Moved",
    "Outcome",
    "PendingNote",
    "Process",
    "PuttingBack",
    "Renewed",
    "Renewing",
    "Resources",
    "Returned",
    "RunEnded",
    "RunStarted",
    "Settled",
    "Settling",
    "SettlingNote",
    "digest_of",
    "read",
]

Outcome: TypeAlias = Literal["ok", "fail", "info"]
"""The outcome of a command. `info`: nobody knows whether it took effect, as in Jepsen's histories."""


def digest_of(payload: bytes, key: bytes | None = None, headers: Mapping[str, bytes] | None = None) -> str:
    """Return a digest of a message, to compare the delivered message with the scheduled one (S8)."""
    hashed = hashlib.sha256(repr((payload, key, sorted((headers or {}).items()))).encode())
    return hashed.hexdigest()[:20]


class _Event(Struct, kw_only=True, tag_field="event", omit_defaults=True):
    process: str = ""
    at_ns: int = msgspec.field(default_factory=time.monotonic_ns)
    wall_ms: int = msgspec.field(default_factory=lambda: time.time_ns() // 1_000_000)


class Invoked(_Event, tag="invoked"):
    """A process is about to give a command.

    Attributes:
        call: The number of the call.
        op: The command.
        id: The message id.
        digest: For `schedule`: the digest of the message (`digest_of`).
        lane: For `schedule`: the lane of the message.
        at_ms: The due time in the command, epoch ms, if it has one.
        recurs: For `schedule`: whether the message recurs.
        late_ms: For `schedule`: the message may be dropped when it is late by this number of ms.
        joins: For `schedule`: whether the message joins an earlier message (`Conflict.append`).
        revision: For `redrive` and `purge`: the revision of the dead letter.
    """

    call: int
    op: Literal["schedule", "cancel", "reschedule", "fire", "redrive", "purge"]
    id: str
    digest: str = ""
    lane: str = ""
    at_ms: int | None = None
    recurs: bool = False
    late_ms: int | None = None
    joins: bool = False
    revision: int = 0


class Returned(_Event, tag="returned"):
    """A command was answered. A command without this event has the outcome `info`."""

    call: int
    outcome: Outcome
    answer: str = ""
    revision: int = 0
    due_ms: int = 0


class Claiming(_Event, tag="claiming"):
    """A process is about to ask for claims.

    Attributes:
        call: The number of the call.
        is_of_source: Whether the process asks a source, whose tokens have the time of the request. The tokens of a
            store have the time at which the store carries the request out.
        lease_ms: The requested length of the leases; 0 = not known.
    """

    call: int
    is_of_source: bool = False
    lease_ms: int = 0


class ClaimNote(Struct, array_like=True):
    """One claim, as the store gave it out.

    Attributes:
        id: The message id; for a retried occurrence of a series, the occurrence's own id.
        revision: The revision of the message.
        due_ms: The due time, epoch ms.
        lane: The lane.
        attempt: The number of attempts that have finished.
        token: The token of the claim, which contains the end of its lease.
        alone: Whether the message is tried alone.
        lapses: The number of leases that ended unsettled, in a row.
    """

    id: str
    revision: int
    due_ms: int
    lane: str
    attempt: int
    token: int
    alone: bool = False
    lapses: int = 0


class Claimed(_Event, tag="claimed"):
    """The claims were given out. `now_ms` is the store's time of the answer, epoch ms."""

    call: int
    now_ms: int
    claims: list[ClaimNote]


class SettlingNote(Struct, array_like=True):
    """One settlement.

    Attributes:
        id: The message id.
        revision: The revision of the message.
        token: The token of the claim.
        kind: The requested end of the claim. `again`: another delivery follows.
        next_ms: The next due time of a recurring message, epoch ms. None ends the series.
    """

    id: str
    revision: int
    token: int
    kind: Literal["delivered", "dropped", "skipped", "again", "dead"]
    next_ms: int | None = None


class Settling(_Event, tag="settling"):
    """A process is about to settle claims."""

    call: int
    batch: list[SettlingNote]


class Settled(_Event, tag="settled"):
    """The settlements were answered: `settled`, `superseded` or `gone` for each, in order."""

    call: int
    outcomes: list[str]


class PuttingBack(_Event, tag="putting_back"):
    """A message from a source is about to be put back into the store, then removed from the source: id, revision."""

    batch: list[tuple[str, int]]


class Renewing(_Event, tag="renewing"):
    """A process is about to renew leases. `batch`: id, token, new token."""

    call: int
    batch: list[tuple[str, int, int]]


class Renewed(_Event, tag="renewed"):
    """The renewals were answered: `renewed`, `superseded`, `cancelled` or `lost` for each, in order."""

    call: int
    outcomes: list[str]


class RunStarted(_Event, tag="run"):
    """A handler or a sink has received a message.

    Attributes:
        id: The message id; for an occurrence of a series, the id of the series.
        delivery_id: The delivery id.
        attempt: The number of the attempt, from 1.
        lane: The lane; empty if a handler reads the lane from a list or topic.
        digest: The digest of the message (`digest_of`).
        token: The token that the claim had when the run began; 0 = not known. Then the run counts as a run of the
            latest claim of the message in this process.
    """

    id: str
    delivery_id: str
    attempt: int
    lane: str
    digest: str
    token: int = 0


class RunEnded(_Event, tag="ran"):
    """A run has ended. Only the result `ok` counts as delivered. `token` is the same as in `RunStarted`."""

    delivery_id: str
    attempt: int
    result: Literal["ok", "failed", "cancelled"]
    token: int = 0


class Moved(_Event, tag="moved"):
    """The store itself has moved this number of messages of a lane to their destinations. Their ids are not known."""

    lane: str
    messages: int


class Process(_Event, tag="process"):
    """An event of a process: `ready` to work, about to be `killed` or `stopped`, `continued`, found `ended`.

    `opened` and `closed` are events of its recorded scheduler. A process that has opened a scheduler and has not closed
    it counts as killed after its last event. `code` is the exit code of an ended process: 0 for an orderly end.
    """

    what: Literal["ready", "opened", "closed", "killed", "stopped", "continued", "ended"]
    code: int = 0


class Blocked(_Event, tag="blocked"):
    """A handler is about to block its event loop."""


class Loss(_Event, tag="loss"):
    """A server has replaced another server, and lacks the writes of that server from `since_ns` on.

    Claims, renewals and settlements may be missing. If `commands` is true, acknowledged commands may be missing, too.
    """

    since_ns: int
    commands: bool


class PendingNote(Struct, array_like=True):
    """A message that is pending in the end: its state (`State`), and the time of its next attempt, epoch ms."""

    id: str
    revision: int
    state: str
    next_attempt_ms: int


class Final(_Event, tag="final"):
    """The content of the store at the end. `dead`: id, revision, reason. `leases` counts the open claims."""

    now_ms: int
    pending: list[PendingNote]
    dead: list[tuple[str, int, str]]
    leases: int = 0


class Resources(_Event, tag="resources"):
    """Counters of a process, before and after the work that might leak resources."""

    phase: Literal["baseline", "end"]
    tasks: int
    threads: int
    files: int


Event: TypeAlias = (
    Invoked
    | Returned
    | Claiming
    | Claimed
    | Settling
    | Settled
    | PuttingBack
    | Renewing
    | Renewed
    | RunStarted
    | RunEnded
    | Moved
    | Process
    | Blocked
    | Loss
    | Final
    | Resources
)


E = TypeVar("E", bound=_Event)
_ORDER = count()
"""Orders the events that happen in the same millisecond of a virtual clock."""


class History:
    """The writer of one process to the file.

    Args:
        path: The path of the file, which is created if it does not exist.
        process: The unique name of the process, or of its scheduler; None = a name made from its pid.
        clock: The clock of a test on virtual time, whose processes are all on one event loop. None = the clocks of this
            machine.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: str | Path, process: str | None = None, *, clock: Clock | None = None) -> None:
        self.process: str = process or f"{os.getpid()}-{uuid4().hex[:6]}"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._encode = msgspec.json.Encoder().encode
        self._calls = count(1)  # threads share it
        self._clock = clock

    def stamp(self, event: E) -> E:
        """Give an event that will be written later the present time and the name of this process."""
        event.process = self.process
        if self._clock is not None:
            event.at_ns = self._clock.monotonic_ms() * 1_000_000 + next(_ORDER) % 1_000_000
            event.wall_ms = self._clock.now_ms()
        return event

    def write(self, event: Event) -> None:
        """Append an event. Unless the event names a process, it belongs to this process, and happens now.

        Raises:
            ClosedError: The history is closed.
            OSError: The event cannot be written.
        """
        if self._file < 0:
            raise ClosedError("history", "closed", "close it after the scheduler")
        if not event.process:
            self.stamp(event)
        line = b"\n" + self._encode(event) + b"\n"
        if os.write(self._file, line) != len(line):
            raise OSError("a line of the history was cut short")

    def next_call(self) -> int:
        """Return a number for a call. Its beginning and its end are two events with this number."""
        return next(self._calls)

    def close(self) -> None:
        """Close the file. Repeated calls do nothing."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def __enter__(self) -> Self:
        """Return the history, which the end of the block closes."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the file."""
        self.close()


def read(path: str | Path) -> list[Event]:
    """Return all events in the order in which they happened. Lines that a kill cut short are left out.

    Raises:
        OSError: The file cannot be read.
        msgspec.ValidationError: A line is no event.
    """
    decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
    events: list[Event] = []
    for line in Path(path).read_bytes().splitlines():
        try:
            events += [decoder.decode(line)] if line else []
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        except RecursionError as error:
            raise msgspec.ValidationError("a line is nested too deeply") from error
    return sorted(events, key=lambda event: event.at_ns)
