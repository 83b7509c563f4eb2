"""`Rules`: the effects of every command, settlement, lapse and redrive on a table.

`transitions.py` holds the decisions about one record, as pure functions. This module applies them to the messages of a
table. The memory store, SQLite and the pending messages of a Kafka partition use it unchanged. Redis has the same rules
in Lua, and tests run the same cases against both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

from msgspec.structs import replace

from aiodelay.errors import RecordFormatError

from . import transitions as t
from .appending import append_refused, next_message, with_appended, with_item, with_item_in_flight, without_appended
from .conflicts import VERSIONED, Verdict, put_verdict, timed
from .table import Answers, Row, Table
from .values import (
    RETRY_WINDOW_MS,
    TOMBSTONE_WINDOW_MS,
    Again,
    Cancel,
    Command,
    Dead,
    DeadKey,
    DeadLetter,
    DeadReason,
    Done,
    Fire,
    LateAction,
    Outcome,
    Put,
    PutBack,
    Record,
    Refused,
    Renewal,
    RenewOutcome,
    Reschedule,
    Settlement,
    SettleOutcome,
    Stored,
)

__all__ = ["Rules", "keep_answer", "known_answer"]

R = TypeVar("R", bound=Row)


class Rules(Generic[R]):
    """The rules of one table.

    Args:
        table: The table that the rules change. `now` of every method is the table's time, epoch ms.
    """

    def __init__(self, table: Table[R]) -> None:
        self.table: Table[R] = table

    # --- commands -----------------------------------------------------------------------------------------

    def apply(self, command: Command, now: int) -> Outcome:
        """Carry out a command and return the answer. If the command is a repetition, only return the first answer."""
        row, answers = self.table.find(command.id), self.table.answers
        known = known_answer(answers, command, row, now)
        if known is not None:
            return known
        outcome = self.decide(command, row, now)
        keep_answer(answers, command, outcome, now)
        return outcome

    def decide(self, command: Command, row: R | None, now: int) -> Outcome:
        """Carry out a command that has no answer yet.

        Args:
            command: The command.
            row: The message that is stored under the command's id; None if there is none.
            now: Epoch ms.
        """
        match command:
            case Put():
                return self.put(command, row, now)
            case Cancel():
                return self.cancel(command, row, now)
            case Reschedule() | Fire():
                return self._move(command, row, now)

    def put(self, put: Put, row: R | None, now: int) -> Outcome:
        """Carry out a put."""
        table, message_id, conflict = self.table, put.id, put.conflict
        if conflict.mode == "append" and row is not None:
            return self._append(put, row, now)
        current, in_flight = None if row is None else row.record, row is not None and row.token != 0
        ended_version = table.answers.ended_version(message_id, now) if conflict.mode in VERSIONED else None
        due_ms = t.due_of(put.due, now)
        verdict = put_verdict(
            conflict,
            put.envelope.rule,
            current,
            in_flight=in_flight,
            ended_version=ended_version,
            due_ms=due_ms,
            now_ms=now,
        )
        if isinstance(verdict, Refused):
            return verdict
        if verdict in ("kept", "in_flight"):
            return _kept(verdict, current, ended_version)
        last = table.answers.last_revision(message_id, now) if row is None else row.record.revision
        record = t.record_of(put, due_ms, t.next_revision(now, last))
        record = timed(conflict, record, current, in_flight=in_flight, ended_version=ended_version, now_ms=now)
        if row is not None:
            self.end_retries(message_id, now, is_replaced=True)
            self._make_room(row, now)
        if conflict.window_ms is not None:
            _forget_later_window(table, record, now)
        table.insert(record, record.due_ms)
        table.note(verdict, record, now)
        is_older_in_flight = verdict == "replaced" and self._has_superseded(message_id, now)
        return Stored(verdict, record.revision, record.due_ms, is_older_in_flight)

    def _append(self, put: Put, row: R, now: int) -> Outcome:
        """Add an item to a stored message. A claim on the message goes on."""
        table, current = self.table, row.record
        refused = append_refused(put, current)
        if refused is not None:
            return refused
        if row.token:
            record = with_item_in_flight(put, current, t.due_of(put.due, now), now)
            table.update(row, record)
            due_ms = record.appended_due_ms or 0
        else:
            record = with_item(put, current, t.next_revision(now, current.revision), now)
            due_ms = record.due_ms
            self._make_room(row, now)
            table.insert(record, row.place_ms if due_ms == current.due_ms else due_ms)
        table.note("replaced", record, now)
        is_older_in_flight = row.token != 0 or self._has_superseded(record.id, now)
        return Stored("replaced", record.revision, due_ms, is_older_in_flight)

    def _make_room(self, row: R, now: int) -> None:
        """Remove a message, to free its id for another record; keep its answer and version."""
        table, record = self.table, row.record
        table.superseded.add(row)
        table.remove(row)
        if t.occurrence_of(record.id) is not None:
            self._leave_series(record.id)
            return
        table.answers.keep(record, now)
        self._keep_version(record, now)

    def cancel(self, command: Cancel, row: R | None, now: int) -> Outcome:
        """Carry out a cancel."""
        refused = t.cancel_refused(command, None if row is None else row.record)
        if refused is not None or row is None:
            return refused or Refused("not_found")
        record, is_claimed = row.record, row.token != 0
        if is_claimed:  # before `end_retries`, which may change `live` of the stored series, and so make `row` stale
            self.table.update(row, replace(without_appended(record), no_retry=True))
        in_flight = self.end_retries(command.id, now) or self._has_superseded(command.id, now) or is_claimed
        if not is_claimed:
            self.end(row, now)
        answer: Literal["in_flight", "cancelled"] = "in_flight" if in_flight else "cancelled"
        self.table.note("cancelled", record, now, answer if in_flight else "")
        return Stored(answer, record.revision, record.due_ms)

    def _move(self, command: Reschedule | Fire, row: R | None, now: int) -> Outcome:
        """Carry out a reschedule or a fire."""
        is_fired = isinstance(command, Fire)
        if row is None:
            return Refused("not_found")
        if row.token:
            return Refused("in_flight" if is_fired else "too_late")
        self.table.answers.keep(row.record, now)
        if isinstance(command, Fire):
            record = t.fired(row.record, now)
            place_ms = min(row.place_ms, now)
        else:
            record = t.moved(row.record, t.due_of(command.due, now))
            place_ms = record.due_ms
        answer: Literal["fired", "rescheduled"] = "fired" if is_fired else "rescheduled"
        self.table.move(row, record, place_ms)
        self.table.note(answer, record, now)
        return Stored(answer, record.revision, record.due_ms)

    def _has_superseded(self, message_id: str, now: int) -> bool:
        """Return whether a replaced version of this id is still in flight."""
        return any(not t.is_lease_over(token, now) for token in self.table.superseded.tokens(message_id))

    # --- series and their retries -------------------------------------------------------------------------

    def end_retries(self, series_id: str, now: int, *, is_replaced: bool = False) -> bool:
        """End the retries of a series, also if the series itself has ended. Return whether a retry is in flight.

        If the series is replaced, the claims on the retries in flight are fenced off. If the series is cancelled, the
        retries in flight run for the last time.
        """
        table, has_claimed = self.table, False
        for row in table.retries_of(series_id):
            has_claimed = has_claimed or row.token != 0
            if row.token and not is_replaced:
                table.update(row, replace(row.record, no_retry=True))
            else:
                with table.changing(row):
                    table.superseded.add(row)
                    self.end(row, now)
        return has_claimed

    def _series_of(self, message_id: str) -> tuple[R | None, int]:
        """Return an occurrence's series (None if the series has ended) and the occurrence's due time."""
        series_id, due_ms = t.occurrence_of(message_id) or ("", 0)
        series = self.table.find(series_id) if series_id else None
        return (None if series is None or series.record.envelope.rule is None else series), due_ms

    def _leave_series(self, message_id: str) -> None:
        """Remove an ended occurrence from the list of retried occurrences (`live`) of its series."""
        series, due_ms = self._series_of(message_id)
        if series is not None and due_ms in series.record.live:
            live = tuple(due for due in series.record.live if due != due_ms)
            self.table.update(series, replace(series.record, live=live))

    # --- ends ---------------------------------------------------------------------------------------------

    def _end_claimed(self, row: R, now: int) -> None:
        """End a message after its last attempt. If it got items meanwhile, they become the next message of its id."""
        if row.record.appended is None:
            self.end(row, now)
        else:
            following = next_message(row.record, now)
            _put_in_place(self.table, row, following, following.due_ms, now)

    def end(self, row: R, now: int) -> None:
        """End a message, and keep its answer, revision and version for repeated commands."""
        record = row.record
        if t.occurrence_of(record.id) is not None:
            self.table.remove(row)
            self._leave_series(record.id)
            return
        self.table.retire(row, now)
        self._keep_version(record, now)

    def _keep_version(self, record: Record, now: int) -> None:
        version, answers = record.envelope.version, self.table.answers
        if version is not None:
            newest = max(version, answers.ended_version(record.id, now) or 0)
            answers.add_version(record.id, newest, until_ms=now + TOMBSTONE_WINDOW_MS)

    def bury(self, record: Record, reason: DeadReason, now: int) -> None:
        """Keep a message, or the current occurrence of a series, as a dead letter."""
        if record.envelope.rule is not None:
            record = t.as_occurrence(record)
        self.table.letters.add(DeadLetter(record, reason, now))
        self.table.note("dead", record, now, reason)

    def expire(self, row: R, now: int) -> None:
        """End a late message, as its policy says."""
        with self.table.changing(row):
            if row.record.late is LateAction.DEAD_LETTER:
                self.bury(row.record, "late", now)
            else:
                self.table.note("dropped", row.record, now, "late")
            self.end(row, now)

    # --- claims -------------------------------------------------------------------------------------------

    def begin_trial(self, rows: Sequence[R]) -> None:
        """Prepare the trial of suspects that were claimed together. The caller stores which worker tries them."""
        trials, first = self.table.trials, rows[0].record
        search = trials.search()
        if not first.kills:
            trials.set_search(search.begun(len(rows)))
        if len(rows) == 1:
            self.table.update(rows[0], replace(first, alone=True, kills=search.kills_of(first)))

    def settle(self, settlement: Settlement, now: int) -> SettleOutcome:
        """End a claim that is still held. In the same step, store the retry, the dead letter or the next occurrence."""
        table, row = self.table, self.table.find(settlement.id)
        if row is None or row.token != settlement.token:
            was_replaced = table.superseded.end(settlement.id, settlement.revision, settlement.token)
            is_newer = row is not None and row.record.revision > settlement.revision
            return SettleOutcome.SUPERSEDED if was_replaced or is_newer else SettleOutcome.GONE
        record = row.record
        recurs = record.envelope.rule is not None and not record.no_retry
        then_due_ms = settlement.then_due_ms if recurs else None
        retry = settlement if isinstance(settlement, Again) and not record.no_retry else None
        if retry is None:
            self._note_end(record, settlement, now)
        if then_due_ms is not None:
            if retry is not None:
                self._retry_beside(record, retry, now)
            table.answers.keep(record, now)
            series = t.rearmed(record, then_due_ms, retrying=retry is not None)
            table.move(row, series, series.due_ms)
        elif retry is not None:
            failed = t.after_failure(record, retry)
            failed = _return(table, row, failed, t.retry_place(failed, retry.due_ms), now)
            table.note("again", failed, now, retry.error or "")
        else:
            self._end_claimed(row, now)
        return SettleOutcome.SETTLED

    def _retry_beside(self, record: Record, settlement: Again, now: int) -> None:
        """Schedule a retry of an occurrence as a message of its own, beside its series."""
        failed = t.as_occurrence(t.after_failure(record, settlement))
        there = self.table.find(failed.id)
        if there is not None:
            self._make_room(there, now)
        self.table.insert(failed, t.retry_place(failed, settlement.due_ms))
        self.table.note("again", failed, now, settlement.error or "")

    def _note_end(self, record: Record, settlement: Settlement, now: int) -> None:
        """Write a dead letter or a journal entry for a message that gets no further attempt."""
        match settlement:
            case Again():
                self.table.note("dropped", record, now, "cancelled in flight")
            case Dead():
                self.bury(t.after_failure(without_appended(record), settlement), settlement.reason, now)
            case Done():
                self.table.note(settlement.outcome, record, now)

    def renew(self, renewal: Renewal) -> RenewOutcome:
        """Extend a lease by giving the claim another token, unless another worker has taken the message."""
        table, row = self.table, self.table.find(renewal.id)
        if row is None or row.token not in (renewal.token, renewal.to):
            is_kept = table.superseded.renew(renewal.id, renewal.revision, renewal.token, renewal.to)
            return RenewOutcome.SUPERSEDED if is_kept else RenewOutcome.LOST
        table.set_token(row, renewal.to)
        if renewal.ends_trial:
            table.update(row, t.after_trial(row.record))
            table.trials.end(row)
        return RenewOutcome.CANCELLED if row.record.no_retry else RenewOutcome.RENEWED

    def lapse(self, row: R, now: int) -> None:
        """Put a message back into its lane after its lease has ended. End a message that must not be tried again."""
        table, trials, before = self.table, self.table.trials, row.record
        heard_ms, search = trials.heard_ms(row), trials.search()
        is_tried, after = heard_ms is not None, search
        has_died = before.alone and trials.has_died(row, now)
        record = t.after_lapse(before, is_tried=is_tried, has_died=has_died)
        if is_tried and not before.alone:
            after = after.died(trials.group_size())
        if record != "killed_worker":
            after = after.lapsed(before, record, beat_ms=now if heard_ms is None else heard_ms, now_ms=now)
        if after != search:
            trials.set_search(after)
        if record != "killed_worker" and not record.no_retry:
            record = _return(table, row, record, row.place_ms, now, keeps_turn=is_tried)
            table.note("lapsed", record, now)
            return
        with table.changing(row):
            if record == "killed_worker":
                killer = replace(without_appended(before), kills=t.KILLS_TO_DEATH, alone=False)
                self.bury(killer, "killed_worker", now)
            else:
                table.note("dropped", record, now, "cancelled in flight")
            self._end_claimed(row, now)

    # --- dead letters, and messages that a source puts back -----------------------------------------------

    def redrive(self, key: DeadKey, now: int) -> Outcome:
        """Schedule a dead letter again."""
        table = self.table
        if not table.letters.has(key):
            return Refused("not_found")
        series, due_ms = self._series_of(key.id)
        if table.find(key.id) is not None or (series is not None and series.record.due_ms == due_ms):
            return Refused("exists")
        try:
            letter = table.letters.get(key)
        except RecordFormatError as error:
            return Refused("undecodable", str(error))
        if letter is None:
            return Refused("not_found")
        last = max(key.revision, table.answers.last_revision(key.id, now) or 0)
        record = t.redriven(letter.record, t.NO_OP, t.next_revision(now, last), now)
        table.letters.remove(key)
        table.insert(record, now)
        if series is not None:
            table.update(series, t.joined(series.record, due_ms))
        table.note("redriven", record, now)
        return Stored("stored", record.revision, record.due_ms)

    def put_back(self, message: PutBack, now: int) -> Stored:
        """Store a message that a source puts back, unless the message has a newer version, stored or ended (S4)."""
        table, record = self.table, message.record
        if message.reason is not None:
            is_new = not table.letters.has(DeadKey(record.id, record.revision))
            if is_new:
                self.bury(record, message.reason, now)
            return Stored("stored" if is_new else "kept", record.revision, record.due_ms)
        row = table.find(record.id)
        if row is not None:
            return Stored("kept", row.record.revision, row.record.due_ms)
        if _has_ended_newer(table, record, now):
            return Stored("kept", record.revision, record.due_ms)
        table.insert(record, t.retry_place(record, message.due_ms))
        table.note("again", record, now, record.last_error or "")
        return Stored("stored", record.revision, record.due_ms)


def _forget_later_window(table: Table[R], record: Record, now: int) -> None:
    """Forget a window of this id that begins after the window of the record: the clock has stepped back."""
    version, ended = record.envelope.version, table.answers.ended_version(record.id, now)
    if version is not None and ended is not None and ended > version:
        table.answers.add_version(record.id, version, until_ms=now + TOMBSTONE_WINDOW_MS)


def _has_ended_newer(table: Table[R], record: Record, now: int) -> bool:
    """Return whether a newer version of a record's message has ended, as far as the table remembers."""
    answers, version = table.answers, record.envelope.version
    if (answers.last_revision(record.id, now) or 0) > record.revision:
        return True
    return version is not None and (answers.ended_version(record.id, now) or 0) > version


def _return(table: Table[R], row: R, record: Record, place_ms: int, now: int, *, keeps_turn: bool = False) -> Record:
    """Put a claimed message back into its lane, with the items that it got meanwhile. Return its new record."""
    if record.appended is None:
        table.move(row, record, place_ms, keeps_turn=keeps_turn)
        return record
    joined = with_appended(record, now)
    _put_in_place(table, row, joined, place_ms, now)
    return joined


def _put_in_place(table: Table[R], row: R, record: Record, place_ms: int, now: int) -> None:
    """Put a message with another payload and revision in the place of a claimed message."""
    with table.changing(row):
        table.answers.keep(row.record, now)
        table.remove(row)
        table.insert(record, place_ms)


def _kept(verdict: Verdict, current: Record | None, ended_version: int | None) -> Stored:
    """Return the answer to a put that is not stored.

    If the message has ended, the revision is 0, and the due time is the beginning of the message's window.
    """
    if current is None:
        return Stored(verdict, 0, ended_version or 0)
    return Stored(verdict, current.revision, current.due_ms)


def known_answer(answers: Answers, command: Command, row: Row | None, now: int) -> Outcome | None:
    """Return the first answer to a repeated command; None if the command is not a repetition.

    Args:
        answers: The table's answers.
        command: The command. A command without an op is never a repetition.
        row: The message that is stored under the command's id; None if there is none.
        now: Epoch ms.
    """
    if command.op == t.NO_OP:
        return None
    known = answers.answer(command, now)
    if known is None and row is not None and row.record.op == command.op:
        return t.first_answer(row.record)
    return known


def keep_answer(answers: Answers, command: Command, outcome: Outcome, now: int) -> None:
    """Keep the answer to a command for `RETRY_WINDOW_MS`, for a repetition of the command.

    The answer `stored` is not kept, because the stored record implies it.
    """
    is_told = isinstance(outcome, Stored) and outcome.answer == "stored"
    if command.op != t.NO_OP and not is_told:
        answers.add(command.op, outcome, until_ms=now + RETRY_WINDOW_MS)
