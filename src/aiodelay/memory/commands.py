"""What `apply` does: put, cancel, reschedule, fire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from aiodelay import transitions as t
from aiodelay.model import (
    RETRY_WINDOW_MS,
    Cancel,
    Command,
    Fire,
    Outcome,
    Put,
    Record,
    Refused,
    Reschedule,
    SourcePosition,
    Stored,
)

from .tables import Tables
from .waiting import Entry

__all__ = ["Commands"]


class Commands(Tables):
    """The role that every process has."""

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        """Carry out commands in order."""
        now = self.now_ms()
        if source is not None:
            if self._positions.get(source.source, source.first) != source.first:
                return [Refused("passed")] * len(commands)
            self._positions[source.source] = source.position
        return [self._apply(command, now) for command in commands]

    async def bulk_load(self, puts: Sequence[Put]) -> Sequence[Outcome]:
        """Store versioned messages."""
        return await self.apply(t.loads_of(puts))

    def _apply(self, command: Command, now: int) -> Outcome:
        """Carry out a command, or answer its repetition as it was answered first."""
        entry = self._entries.get(command.id)
        is_remembered = command.op != t.NO_OP
        outcome = self._answers.get(command.op, now) if is_remembered else None
        if outcome is not None:
            return outcome
        if entry is not None and is_remembered and entry.record.op == command.op:
            return t.first_answer(entry.record)
        match command:
            case Put():
                outcome = self._put(command, entry, now)
            case Cancel():
                outcome = self._cancel(command, entry, now)
            case Reschedule():
                outcome = self._reschedule(command, entry, now)
            case Fire():
                outcome = self._fire(entry, now)
        # That it was stored, the record itself tells.
        if is_remembered and not (isinstance(outcome, Stored) and outcome.answer == "stored"):
            self._answers.add(command.op, outcome, until_ms=now + RETRY_WINDOW_MS)
        return outcome

    def _put(self, put: Put, entry: Entry | None, now: int) -> Outcome:
        message_id = put.id
        verdict = t.put_verdict(
            put.conflict,
            put.envelope.rule,
            None if entry is None else entry.record,
            in_flight=entry is not None and entry.token != 0,
            ended_version=self._tombstones.get(message_id, now),
        )
        if isinstance(verdict, Refused):
            return verdict
        if entry is not None:
            if verdict in ("kept", "in_flight"):
                return Stored(verdict, entry.record.revision, entry.record.due_ms)
            self._end_retries(message_id, now, is_replaced=True)
            self._supersede(entry)
            self._end(entry, now)
        revision = t.next_revision(now, self._revisions.get(message_id, now))
        record = t.record_of(put, t.due_of(put.due, now), revision)
        self._insert(record, record.due_ms)
        self._note(verdict, record, now)
        is_older_in_flight = verdict == "replaced" and self._has_superseded(message_id, now)
        return Stored(verdict, revision, record.due_ms, is_older_in_flight)

    def _cancel(self, command: Cancel, entry: Entry | None, now: int) -> Outcome:
        refused = t.cancel_refused(command, None if entry is None else entry.record)
        if refused is not None or entry is None:
            return refused or Refused("not_found")
        in_flight = self._end_retries(command.id, now) or self._has_superseded(command.id, now)
        if entry.token:
            entry.record = replace(entry.record, no_retry=True)
        else:
            self._end(entry, now)
        answer: Literal["in_flight", "cancelled"] = "in_flight" if entry.token or in_flight else "cancelled"
        self._note("cancelled", entry.record, now, answer if answer == "in_flight" else "")
        return Stored(answer, entry.record.revision, entry.record.due_ms)

    def _end_retries(self, series_id: str, now: int, *, is_replaced: bool = False) -> bool:
        """End the retries that go on beside a series, also of one that has ended; say whether one is in flight.

        A replacement fences off those in flight; a cancel lets them run for the last time.
        """
        retries = [self._entries[each] for each in self._occurrences.get(series_id, ())]
        for entry in retries:
            if entry.token and not is_replaced:
                entry.record = replace(entry.record, no_retry=True)
            else:
                self._supersede(entry)
                self._end(entry, now)
        return any(entry.token for entry in retries)

    def _reschedule(self, command: Reschedule, entry: Entry | None, now: int) -> Outcome:
        if entry is None:
            return Refused("not_found")
        if entry.token:
            return Refused("too_late")
        record = t.moved(entry.record, t.due_of(command.due, now))
        return self._move(entry, record, record.due_ms, "rescheduled", now)

    def _fire(self, entry: Entry | None, now: int) -> Outcome:
        if entry is None:
            return Refused("not_found")
        if entry.token:
            return Refused("in_flight")
        return self._move(entry, t.fired(entry.record, now), min(entry.place_ms, now), "fired", now)

    def _move(
        self, entry: Entry, record: Record, place_ms: int, answer: Literal["rescheduled", "fired"], now: int
    ) -> Outcome:
        self._remember_answer(entry.record, now)
        self._insert(record, place_ms)
        self._note(answer, record, now)
        return Stored(answer, record.revision, record.due_ms)
