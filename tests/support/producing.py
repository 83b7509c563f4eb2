"""`Producer`: gives commands through a scheduler, and writes them to the history with the outcome for the caller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from aiodelay import Conflict, Message, Scheduler
from aiodelay.core.values import CancelOutcome, DeadLetter, FireOutcome, RescheduleOutcome, Scheduled, Stored
from aiodelay.errors import AiodelayError, OutcomeUnknownError
from aiodelay.testing import history as h

__all__ = ["Producer", "instant"]

T = TypeVar("T")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def instant(ms: int) -> datetime:
    """Return epoch ms as an aware datetime."""
    return EPOCH + timedelta(milliseconds=ms)


class Producer:
    """Gives commands through a scheduler, and writes them to the history.

    Args:
        scheduler: The open scheduler.
        history: The history to which commands are written.
    """

    def __init__(self, scheduler: Scheduler, history: h.History) -> None:
        self._scheduler, self._history = scheduler, history

    async def schedule(
        self,
        message_id: str,
        payload: bytes,
        *,
        at_ms: int | None = None,
        delay_ms: int | None = None,
        lane: str = "work",
        to: str | None = None,
        key: bytes | None = None,
        headers: Mapping[str, bytes] | None = None,
        conflict: Conflict | None = None,
    ) -> Scheduled | None:
        """Schedule bytes for the handler `lane`, or for a sink with `to`. Return None if that failed."""
        call = self._history.next_call()
        digest = h.digest_of(payload, key, headers)
        target = f"handler:{lane}" if to is None else to
        served = lane if to is None else to.split(":", 1)[0]
        self._history.write(h.Invoked(call=call, op="schedule", id=message_id, digest=digest, lane=served, at_ms=at_ms))

        async def send() -> Scheduled:
            return await self._scheduler.schedule(
                payload,
                id=message_id,
                at=None if at_ms is None else instant(at_ms),
                delay=None if delay_ms is None else timedelta(milliseconds=delay_ms),
                to=target,
                key=key,
                headers=headers or {},
                conflict=conflict or Conflict.replace(),
            )

        scheduled = await self._outcome_of(call, send)
        if scheduled is not None:
            self._returned(call, scheduled.outcome, scheduled.revision, scheduled.due_ms)
        return scheduled

    async def schedule_many(self, messages: Mapping[str, bytes], *, at_ms: int, lane: str = "work") -> None:
        """Schedule the payloads of many ids for the handler `lane`, in one call."""
        calls = [self._history.next_call() for _ in messages]
        for call, (message_id, payload) in zip(calls, messages.items(), strict=True):
            invoked = h.Invoked(call=call, op="schedule", id=message_id, digest=h.digest_of(payload), lane=lane)
            invoked.at_ms = at_ms
            self._history.write(invoked)

        def answered(position: int, answer: Scheduled | AiodelayError) -> None:
            if isinstance(answer, Scheduled):
                self._returned(calls[position], answer.outcome, answer.revision, answer.due_ms)
            else:
                self._failed(calls[position], answer)

        to, at = f"handler:{lane}", instant(at_ms)
        prepared = [Message(payload, at=at, to=to, id=message_id) for message_id, payload in messages.items()]
        await self._scheduler.schedule_many(prepared, answered=answered)

    async def dead_letters(self, limit: int) -> list[DeadLetter]:
        """Return up to so many dead letters; none if the store does not answer."""
        try:
            return [letter async for letter in self._scheduler.dead_letters(limit=limit)]
        except AiodelayError:
            return []

    async def redrive(self, letter: DeadLetter) -> None:
        """Redrive a dead letter. In the history, this is a command that schedules the message again.

        An error does not say whether the letter was redriven, so its outcome is `info`.
        """
        call, envelope = self._history.next_call(), letter.record.envelope
        digest = h.digest_of(envelope.payload, envelope.key, envelope.headers)
        self._history.write(h.Invoked(call=call, op="schedule", id=envelope.id, digest=digest, lane=envelope.lane))
        try:
            answers = await self._scheduler.redrive(letter)
        except AiodelayError as error:
            self._history.write(h.Returned(call=call, outcome="info", answer=type(error).__name__))
            return
        for answer in answers:
            if isinstance(answer, Stored):
                self._returned(call, answer.answer, answer.revision, answer.due_ms)
            else:
                self._history.write(h.Returned(call=call, outcome="fail", answer=str(answer)))

    async def fire(self, message_id: str) -> FireOutcome | None:
        """Make a message due now. Return None if that failed."""
        call = self._history.next_call()
        self._history.write(h.Invoked(call=call, op="fire", id=message_id))
        outcome = await self._outcome_of(call, lambda: self._scheduler.fire(message_id))
        if outcome is not None:
            self._returned(call, outcome)
        return outcome

    async def cancel(self, message_id: str) -> CancelOutcome | None:
        """Cancel a message. Return None if that failed."""
        call = self._history.next_call()
        self._history.write(h.Invoked(call=call, op="cancel", id=message_id))
        outcome = await self._outcome_of(call, lambda: self._scheduler.cancel(message_id))
        if outcome is not None:
            self._returned(call, outcome)
        return outcome

    async def reschedule(self, message_id: str, at_ms: int) -> RescheduleOutcome | None:
        """Reschedule a message. Return None if that failed."""
        call = self._history.next_call()
        self._history.write(h.Invoked(call=call, op="reschedule", id=message_id, at_ms=at_ms))
        outcome = await self._outcome_of(call, lambda: self._scheduler.reschedule(message_id, at=instant(at_ms)))
        if outcome is not None:
            self._returned(call, outcome)
        return outcome

    async def _outcome_of(self, call: int, send: Callable[[], Awaitable[T]]) -> T | None:
        """Send a command and record its outcome, unless the caller is cancelled and so never learns the outcome."""
        try:
            return await send()
        except AiodelayError as error:
            self._failed(call, error)
        return None

    def _failed(self, call: int, error: AiodelayError) -> None:
        outcome: h.Outcome = "info" if isinstance(error, OutcomeUnknownError) else "fail"
        self._history.write(h.Returned(call=call, outcome=outcome, answer=type(error).__name__))

    def _returned(self, call: int, answer: str, revision: int = 0, due_ms: int = 0) -> None:
        self._history.write(h.Returned(call=call, outcome="ok", answer=str(answer), revision=revision, due_ms=due_ms))
