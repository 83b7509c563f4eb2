"""Encodes commands as arguments of `apply.lua`, and decodes the answers of the script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal, TypeAlias

from aiodelay.backends.redis.connection.faults import Fault
from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.records.keys import member_of
from aiodelay.backends.redis.records.layouts import span
from aiodelay.core.appending import OTHER_KIND
from aiodelay.core.conflicts import outdated
from aiodelay.core.record_codec import encode_body
from aiodelay.core.values import (
    MAX_CLAIM_BYTES,
    MAX_CLAIM_MESSAGES,
    After,
    At,
    Cancel,
    Command,
    ConflictMode,
    Outcome,
    Put,
    Refused,
    Reschedule,
    Stored,
    Unknown,
)
from aiodelay.core.version import __version__

__all__ = [
    "BAD_VALUE",
    "CHANGE_COST",
    "MOST_COST",
    "MOST_MS",
    "Answer",
    "Batch",
    "answer_of",
    "arguments_of",
    "former_of",
    "outcome_of",
]


class _TooFarError(Exception):
    """Raised for a time or a duration above `MOST_MS`."""


BAD_VALUE = (_TooFarError, OverflowError, UnicodeError, TypeError)
"""Errors from values that no record can hold.

The store refuses only the command with such a value. If the commands come from an intake, it refuses all of them.
"""

MOST_MS = (1 << 47) - 1
"""The largest time or duration that a command may have, in ms. A record stores a time in 6 bytes."""
_COMMAND_BYTES = 100
MOST_COST, CHANGE_COST = 170, 3
"""The most that the commands of one script call may cost, and the cost of a cancel, reschedule or fire.

The unit is the cost of a put with a new id. The limit bounds the time for which one call blocks the server. Each put
counts as 1 here. If a put finds a stored message, `apply.lua` itself counts it as a change, and may end the call early.
"""
_MODES: Mapping[ConflictMode, bytes] = {
    "replace": b"r",
    "keep": b"k",
    "error": b"e",
    "newer": b"n",
    "if_revision": b"i",
    "earlier": b"b",
    "later": b"a",
    "debounce": b"d",
    "throttle": b"t",
    "throttle_last": b"T",
    "append": b"p",
}

_REVISION, _DUE_MS, _VERSION = (span("ANSWER", part) for part in ("revision", "due", "version"))

Answer: TypeAlias = Literal["stored", "replaced", "kept", "in_flight", "cancelled", "rescheduled", "fired"]
_STORED: dict[bytes, Answer] = {
    b"s": "stored",
    b"r": "replaced",
    b"R": "replaced",
    b"k": "kept",
    b"i": "in_flight",
    b"c": "cancelled",
    b"m": "rescheduled",
    b"f": "fired",
}
_REFUSED = {
    b"D": Refused("duplicate"),
    b"X": Refused("duplicate", OTHER_KIND),
    b"B": Refused("too_large"),
    b"N": Refused("not_found"),
    b"T": Refused("too_late"),
    b"I": Refused("in_flight"),
    b"E": Refused("exists"),
    b"P": Refused("passed"),
    b"L": Refused("unavailable", "the store already has 65,535 lanes, and takes no new lane"),
    b"F": Refused("undecodable", "the stored record has a format that this version cannot read"),
}


def arguments_of(command: Command) -> list[Arg]:
    """Return the eight arguments of `apply.lua` for a command.

    Raises:
        _TooFarError, OverflowError, UnicodeError, TypeError: No record can hold a value of the command.
    """
    if type(command) is Put:
        return _put_arguments(command)
    if type(command) is Reschedule:
        return ["m", member_of(command.id), command.op, "", _due(command.due), "", "", ""]
    if type(command) is Cancel and command.only is not None:
        revision, due_ms = command.only
        return ["c", member_of(command.id), command.op, "", "" if due_ms is None else due_ms, "", "", revision]
    return ["c" if type(command) is Cancel else "f", member_of(command.id), command.op, "", "", "", "", ""]


def _put_arguments(put: Put) -> list[Arg]:
    envelope, late, conflict = put.envelope, put.late, put.conflict
    what = _MODES[conflict.mode] + (b"-" if envelope.rule is None else b"*")
    if conflict.mode == "newer" and conflict.version is not None:
        what += conflict.version.to_bytes(8, "big")
    elif conflict.mode == "if_revision" and conflict.revision is not None:
        what += conflict.revision.to_bytes(6, "big")
    elif conflict.mode == "append":
        what += f"{_digits(conflict.max_items)}:{_digits(conflict.max_bytes)}:{__version__}".encode()
    elif conflict.window_ms is not None or conflict.max_wait_ms is not None:
        what += b"%d" % (conflict.window_ms or conflict.max_wait_ms or 0)
    return [
        what,
        member_of(envelope.id),
        put.op,
        envelope.lane.encode(),
        _due(put.due),
        f"{int(late.action)}:{_checked(late.after_ms)}" if late.action else b"",
        b"" if envelope.version is None else envelope.version.to_bytes(8, "big"),
        encode_body(envelope),
    ]


def _digits(number: int | None) -> str:
    return "" if number is None else str(number)


def _due(due: At | After) -> bytes:
    return b"+%d" % _checked(due.ms) if isinstance(due, After) else b"%d" % _checked(due.ms)


def _checked(ms: int) -> int:
    if ms > MOST_MS:
        raise _TooFarError
    return ms


def answer_of(answer: bytes, command: Command | None) -> Outcome:
    """Return the outcome of one command from the script's answer."""
    letter = answer[:1]
    found = _STORED.get(letter)
    if found is not None:
        revision, due_ms = int.from_bytes(answer[_REVISION], "big"), int.from_bytes(answer[_DUE_MS], "big")
        return Stored(found, revision, due_ms, letter == b"R")
    return _REFUSED[letter] if letter != b"O" else _outdated(answer, command)


def _outdated(answer: bytes, command: Command | None) -> Refused:
    conflict = command.conflict if isinstance(command, Put) else None
    revision, due_ms, known_version = (int.from_bytes(answer[part], "big") for part in (_REVISION, _DUE_MS, _VERSION))
    return outdated(conflict, revision, due_ms, known_version)


def former_of(position: str, *, is_stored: bool) -> str:
    """Return the argument of `apply.lua` for the position before the commands of an intake."""
    return f"={position}" if is_stored else position


def outcome_of(fault: Fault) -> Refused | Unknown:
    """Return the outcome of each command in a script call that failed."""
    return Unknown(fault.reason) if fault.kind == "unknown" else Refused(fault.kind, fault.reason)


class Batch:
    """Commands on their way to the server, and their outcomes so far.

    The calls of one round trip are sent together. Between two calls, the server may serve other clients.

    Args:
        commands: The commands, in order.
        move: The name of an intake, its position before the commands, and its position after them, which the call
            writes in the same step; None = no intake. With an intake, there is only one call.
    """

    def __init__(self, commands: Sequence[Command], move: tuple[Arg, Arg, Arg] | None) -> None:
        self._commands, self._move = commands, move
        self.failure: Refused | Unknown | None = None
        """Why none of the commands of an intake was carried out; `Unknown` if they may have been."""
        self.outcomes: list[Outcome] = [_NOT_SENT] * len(commands)
        self._written: dict[int, list[Arg]] = {}
        for i, command in enumerate(commands):
            try:
                self._written[i] = arguments_of(command)
            except BAD_VALUE as error:
                reason = f"the command holds a value that cannot be stored ({type(error).__name__})"
                self.outcomes[i] = Refused("unavailable", reason)
        self._left = list(self._written)
        self._chunks: list[list[int]] = []
        self._put_cost = 1
        self.is_open: bool = bool(self._left)
        """True while commands have to be sent."""
        if move is not None:
            self.is_open = len(self._left) == len(commands)
            self.failure = None if self.is_open else _NOT_SENT

    def parts(self, name: str) -> list[list[Arg]]:
        """Return the arguments of `apply.lua` for each call of the next round trip.

        Args:
            name: A name for this round trip.
        """
        if self._move is not None:
            self._chunks, head = [self._left], [*self._move]
        else:
            self._chunks = self._cut()
            head = ["", name if len(self._chunks) > 1 else "", ""]
        return [[*head, *chain.from_iterable(self._written[i] for i in chunk)] for chunk in self._chunks]

    def _cut(self) -> list[list[int]]:
        chunks: list[list[int]] = [[]]
        size = cost = 0
        for n, i in enumerate(self._left):
            command = self._commands[i]
            size += _COMMAND_BYTES + (command.envelope.size if isinstance(command, Put) else 0)
            own_cost = self._put_cost if isinstance(command, Put) else CHANGE_COST
            if n == MAX_CLAIM_MESSAGES or (n and size > MAX_CLAIM_BYTES):
                break
            if cost + own_cost > MOST_COST:
                chunks.append([])
                cost = 0
            chunks[-1].append(i)
            cost += own_cost
        return chunks

    def take(self, replies: Sequence[Any]) -> None:
        """Note the outcomes in the replies to the calls of a round trip. A reply may be a `Fault`.

        A script stops early if its commands would block the server for long. It then returns fewer answers.
        """
        for chunk, reply in zip(self._chunks, replies, strict=True):
            if isinstance(reply, Fault):
                self.is_open = False
                self.failure = outcome_of(reply)
                for i in chunk:
                    self.outcomes[i] = self.failure
            else:
                if self._move is not None and reply[1:2] in ([b"P"], [b"L"]):
                    self.failure = _REFUSED[reply[1]]
                for i, answer in zip(chunk, reply[1:], strict=False):
                    self.outcomes[i] = answer_of(answer, self._commands[i])
        sent = sum(map(len, self._chunks))
        unanswered = (
            chunk[len(reply) - 1 :]
            for chunk, reply in zip(self._chunks, replies, strict=True)
            if not isinstance(reply, Fault)
        )
        self._left = [*chain.from_iterable(unanswered), *self._left[sent:]]
        self._put_cost = CHANGE_COST  # A script that stopped early has replaced messages, and the others may too.
        self.is_open = self.is_open and bool(self._left) and self._move is None


_NOT_SENT = Refused("unavailable", "not sent, because another command of the same batch failed")
