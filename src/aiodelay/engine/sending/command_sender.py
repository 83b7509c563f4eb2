"""`CommandSender`: sends commands in groups, and repeats each command until its outcome is known or time is up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import overload

from aiodelay.core.values import (
    RETRY_WINDOW_MS,
    Cancel,
    CancelOutcome,
    Command,
    Conflict,
    Fire,
    FireOutcome,
    Outcome,
    Put,
    Refused,
    Reschedule,
    RescheduleOutcome,
    Scheduled,
    ScheduleOutcome,
    Stored,
    Unknown,
)
from aiodelay.errors import (
    AiodelayError,
    ClosedError,
    DuplicateIdError,
    OutcomeUnknownError,
    PayloadTooLargeError,
    StoreBusyError,
    StoreFullError,
    StoreUnavailableError,
)
from aiodelay.ports.clock import Clock

from .group_commit import ACTIONS, GroupCommit

__all__ = ["CommandSender", "answer_of"]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
LAST_REPEAT_MS = RETRY_WINDOW_MS - 5_000
"""A command is sent again at most this many ms after its first sending, while the store still knows its op."""


class CommandSender:
    """Carries commands out.

    Args:
        commit: Sends the commands.
        store: The store's name, for errors.
        clock: Measures intervals.
        timeout_ms: How long to go on trying.
        on_superseded: Called if a command replaced or cancelled a message while an attempt at it was in flight. The
            arguments are the message id, and the oldest revision of which a run may still begin.
    """

    def __init__(
        self,
        commit: GroupCommit,
        store: str,
        clock: Clock,
        timeout_ms: int,
        on_superseded: Callable[[str, int], None],
    ) -> None:
        self._commit, self._store, self._clock, self._timeout_ms = commit, store, clock, timeout_ms
        self._on_superseded = on_superseded

    async def carry_out(self, command: Command, size: int) -> Stored | Refused:
        """Carry out one command.

        Raises:
            AiodelayError: The command's outcome is an error.
        """
        since_ms = self._clock.monotonic_ms()
        outcomes = await self._commit.submit((command,), size)
        if _is_open(outcomes[0]):
            outcomes = await self._repeated((command,), outcomes, size, since_ms, since_ms)
        return self._answered(command, outcomes[0], since_ms)

    def _answered(self, command: Command, outcome: Outcome, since_ms: int) -> Stored | Refused:
        answer = self._judged(command, outcome, since_ms)
        if isinstance(answer, AiodelayError):
            raise answer
        return answer

    async def carry_out_many(
        self, commands: Sequence[Command], size: int
    ) -> Sequence[Stored | Refused | AiodelayError]:
        """Carry out a batch of commands. Return an answer or an error for each command, in order."""
        since_ms = self._clock.monotonic_ms()
        outcomes = await self._sent(commands, size, since_ms)
        return [self._judged(command, outcome, since_ms) for command, outcome in zip(commands, outcomes, strict=True)]

    async def _sent(
        self, commands: Sequence[Command], size: int, since_ms: int, *, latest_ms: int | None = None
    ) -> Sequence[Outcome]:
        """Send commands, and repeat those whose outcome stays open."""
        starts_ms = self._clock.monotonic_ms()
        outcomes = await self._commit.submit(commands, size, latest_ms=latest_ms)
        if not any(map(_is_open, outcomes)):
            return outcomes
        return await self._repeated(commands, outcomes, size, since_ms, starts_ms)

    async def _repeated(
        self, commands: Sequence[Command], answers: Sequence[Outcome], size: int, since_ms: int, starts_ms: int
    ) -> Sequence[Outcome]:
        """Repeat each command whose outcome is unknown or that the store has not carried out."""
        outcomes = list(answers)
        latest_ms = since_ms + LAST_REPEAT_MS
        ends_ms = min(starts_ms + self._timeout_ms, latest_ms)
        pause_s = FIRST_PAUSE_S
        while any(map(_is_open, outcomes)) and (left_ms := ends_ms - self._clock.monotonic_ms()) > 0:
            await asyncio.sleep(min(pause_s * random.uniform(0.5, 1), left_ms / 1000))
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
            still_open = [i for i, outcome in enumerate(outcomes) if _is_open(outcome)]
            try:
                repeated = await self._commit.submit([commands[i] for i in still_open], size, latest_ms=latest_ms)
            except (StoreBusyError, ClosedError):  # only the repetition failed: the earlier outcomes stay valid
                break
            for i, outcome in zip(still_open, repeated, strict=True):
                outcomes[i] = _surer(outcomes[i], outcome)
        return outcomes

    def _judged(self, command: Command, outcome: Outcome, since_ms: int) -> Stored | Refused | AiodelayError:
        """Convert an outcome into an answer or an error."""
        least = _least_to_begin(command, outcome)
        if least:
            self._on_superseded(command.id, least)
        if isinstance(outcome, Unknown):
            return self._unknown(command, outcome, since_ms)
        if isinstance(outcome, Refused):
            action = ACTIONS[type(command)]
            if outcome.reason == "duplicate":
                return DuplicateIdError(command.id, outcome.detail)
            if outcome.reason == "too_large":
                return _too_large(command, outcome.detail)
            if outcome.reason == "unavailable":
                return StoreUnavailableError(self._store, outcome.detail or "no answer", command.id, action)
            if outcome.reason == "full":
                return StoreFullError(self._store, outcome.detail or "no room", command.id, action)
        return outcome

    def _unknown(self, command: Command, outcome: Unknown, since_ms: int) -> OutcomeUnknownError:
        async def again() -> object:
            latest_ms = since_ms + LAST_REPEAT_MS
            if self._clock.monotonic_ms() > latest_ms:
                raise OutcomeUnknownError(
                    command.id,
                    "the call began more than 25 s ago, so the store may have forgotten the command",
                    action=ACTIONS[type(command)],
                )
            size = command.envelope.size if isinstance(command, Put) else 0
            try:
                (repeated,) = await self._sent((command,), size, since_ms, latest_ms=latest_ms)
            except StoreBusyError:
                repeated = outcome
            return answer_of(command, self._answered(command, _surer(outcome, repeated), since_ms))

        return OutcomeUnknownError(command.id, outcome.detail, again, ACTIONS[type(command)])


@overload
def answer_of(command: Put, outcome: Stored | Refused) -> Scheduled: ...
@overload
def answer_of(command: Cancel, outcome: Stored | Refused) -> CancelOutcome: ...
@overload
def answer_of(command: Reschedule, outcome: Stored | Refused) -> RescheduleOutcome: ...
@overload
def answer_of(command: Fire, outcome: Stored | Refused) -> FireOutcome: ...
def answer_of(
    command: Command, outcome: Stored | Refused
) -> Scheduled | CancelOutcome | RescheduleOutcome | FireOutcome:
    """Convert a command's outcome into the return value of its method."""
    word = outcome.answer if isinstance(outcome, Stored) else outcome.reason
    match command:
        case Put():
            older = isinstance(outcome, Stored) and outcome.is_older_in_flight
            return Scheduled(command.id, outcome.due_ms, outcome.revision, ScheduleOutcome(word), older)
        case Cancel():
            return CancelOutcome(word)
        case Reschedule():
            return RescheduleOutcome(word)
        case Fire():
            return FireOutcome(word)


def _is_open(outcome: Outcome) -> bool:
    return isinstance(outcome, Unknown) or (isinstance(outcome, Refused) and outcome.reason == "unavailable")


def _too_large(command: Command, allowed: str) -> PayloadTooLargeError:
    if allowed:
        return PayloadTooLargeError("payload", "too large for the store", allowed, command.id)
    conflict = command.conflict if isinstance(command, Put) else Conflict.append()
    return PayloadTooLargeError(
        "payload",
        "too large to join the items that wait under this id",
        f"at most {conflict.max_bytes} bytes together (setting max_payload)",
        command.id,
    )


def _least_to_begin(command: Command, outcome: Outcome) -> int:
    """Return the oldest revision whose run may still begin after a command; 0 = any revision."""
    if not isinstance(outcome, Stored):
        return 0
    if isinstance(command, Cancel):
        return outcome.revision + 1 if outcome.answer == "in_flight" else 0
    return outcome.revision if outcome.is_older_in_flight else 0


def _surer(before: Outcome, now: Outcome) -> Outcome:
    """Return the outcome of a command that was sent twice, from the outcomes of both sendings.

    If the first outcome is unknown and the second sending was certainly not carried out, the outcome stays unknown: the
    first sending may have been carried out.
    """
    if isinstance(before, Unknown) and isinstance(now, Refused) and now.reason in ("unavailable", "full"):
        return before
    return now
