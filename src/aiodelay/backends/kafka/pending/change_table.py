"""`ChangeTable`: the table of a partition, which the rules of `core.rules` read and change.

On Kafka, a decision counts only after the owner has read its record back from the partition. While the rules decide a
change, their calls of this table do not move or remove messages: the table notes the calls in the change. Once the
change is decided, nobody can claim or change its message until the owner has read the record back, or the session ends
without it. Outside of a change, calls take effect at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from msgspec.structs import replace

from aiodelay.backends.kafka import records
from aiodelay.core.dict_table.entries import Entry
from aiodelay.core.dict_table.table import DictAnswers, DictClaims, DictLetters, DictTable, DictTrials, journal_entry
from aiodelay.core.transitions import occurrence_of
from aiodelay.core.values import (
    RETRY_WINDOW_MS,
    TOMBSTONE_WINDOW_MS,
    Command,
    DeadKey,
    DeadLetter,
    Outcome,
    Record,
    Stored,
)
from aiodelay.ports.clock import Clock

from .changes import Change, ChangeLog

__all__ = ["ChangeTable", "SupersededChanges"]


class _Answers:
    """`Answers` that outlive the records of their messages.

    If a change removes the record that contains an answer, the change writes the answer into its own record.
    """

    def __init__(self, near: DictAnswers, log: ChangeLog) -> None:
        self._near, self._log = near, log

    def answer(self, command: Command, now: int) -> Outcome | None:
        return self._near.answer(command, now)

    def add(self, op: bytes, outcome: Outcome, *, until_ms: int) -> None:
        self._near.add(op, outcome, until_ms=until_ms)

    def keep(self, record: Record, now: int) -> None:
        if record.revision + RETRY_WINDOW_MS <= now:
            return
        self._near.keep(record, now)
        answer, change = self._near.by_op.get(record.op, now), self._log.current
        if change is not None and isinstance(answer, Stored):
            change.remembering().answers.append(records.remembered(record.op, answer, now + RETRY_WINDOW_MS))

    def last_revision(self, message_id: str, now: int) -> int | None:
        return self._near.last_revision(message_id, now)

    def ended_version(self, message_id: str, now: int) -> int | None:
        return self._near.ended_version(message_id, now)

    def add_version(self, message_id: str, version: int, *, until_ms: int) -> None:
        self._near.add_version(message_id, version, until_ms=until_ms)
        if self._log.current is not None:
            self._log.current.remembering().version = version, until_ms


class SupersededChanges:
    """`SupersededClaims` that leaves out a claim whose settlement is being written: that claim has ended."""

    def __init__(self, near: DictClaims, log: ChangeLog) -> None:
        self._near, self._log = near, log

    def add(self, row: Entry) -> None:
        change = self._log.held_back.get(records.key_of(row.record.id))
        if change is None or change.entry is not row or change.is_users:
            self._near.add(row)

    def tokens(self, message_id: str) -> Sequence[int]:
        return self._near.tokens(message_id)

    def renew(self, message_id: str, revision: int, token: int, to: int) -> bool:
        return self._near.renew(message_id, revision, token, to)

    def end(self, message_id: str, revision: int, token: int) -> bool:
        return self._near.end(message_id, revision, token)


class _Letters:
    """`Letters` whose calls add dead letters to the current change, or have another change delete them.

    That change follows the current change: if the current change does not count, the dead letter stays.
    The table itself changes when the records of the change are read back.
    """

    def __init__(self, near: DictLetters, log: ChangeLog) -> None:
        self._near, self._log = near, log

    def has(self, key: DeadKey) -> bool:
        return self._near.has(key)

    def get(self, key: DeadKey) -> DeadLetter | None:
        return self._near.get(key)

    def add(self, letter: DeadLetter) -> None:
        self._log.bury(letter)

    def remove(self, key: DeadKey) -> bool:
        assert self._log.current is not None
        self._log.current.following = Change(b"", self._log.state.read_to, None, purged=key)
        return self._near.has(key)


class ChangeTable:
    """`Table` of one partition. While a change is decided, the table adds the calls of the rules to that change.

    Args:
        near: The messages that are due within the horizon, as the records that were read define them.
        log: Takes the changes.
        clock: The clock of the store.
    """

    answers: _Answers
    superseded: SupersededChanges
    letters: _Letters

    def __init__(self, near: DictTable, log: ChangeLog, clock: Clock) -> None:
        self._near, self._log, self._clock = near, log, clock
        self.answers = _Answers(near.answers, log)
        self.superseded = SupersededChanges(near.superseded, log)
        self.letters = _Letters(near.letters, log)
        self.trials: DictTrials = near.trials

    def find(self, message_id: str) -> Entry | None:
        return self._near.find(message_id)

    def retries_of(self, series_id: str) -> Sequence[Entry]:
        return self._near.retries_of(series_id)

    def insert(self, record: Record, place_ms: int) -> None:
        change = self._log.current
        if change is None:
            self._near.insert(record, place_ms)
        elif records.key_of(record.id) == change.key:
            change.put = record, place_ms
        else:
            change.others = [*change.others, (record, place_ms)]

    def move(self, row: Entry, record: Record, place_ms: int, *, keeps_turn: bool = False) -> None:
        if self._log.current is None:
            self._near.move(row, record, place_ms, keeps_turn=keeps_turn)
        else:
            self._stop_lease(row)
            self.insert(record, place_ms)

    def _stop_lease(self, row: Entry) -> None:
        """Keep the lease of a message from lapsing while its change is written."""
        self._near.leased.pop(row.record.id, None)

    def update(self, row: Entry, record: Record) -> None:
        # A redrive that adds to `live` may not count. `PendingTable` adds the occurrence when its record is read back.
        live = tuple(due_ms for due_ms in record.live if due_ms in row.record.live)
        self._near.update(row, replace(record, live=live))

    def set_token(self, row: Entry, token: int) -> None:
        # While the replacement of a claimed message is written, the table has the old version, and its claim is
        # already listed as superseded. Both must get the new token.
        self._near.superseded.renew(row.record.id, row.record.revision, row.token, token)
        self._near.set_token(row, token)

    def remove(self, row: Entry) -> None:
        self._leave(row, self._clock.now_ms())

    def retire(self, row: Entry, now: int) -> None:
        self._leave(row, now)
        self.answers.keep(row.record, now)

    def _leave(self, row: Entry, now: int) -> None:
        """End the message of the current change. Outside of a change, remove the message from the table at once.

        The revision is remembered, because a user's tombstone may replace all other records of this id, and contains no
        revision. The change also gets the version with which the id last ended: later records of the id may have
        replaced the record that contained the version.
        """
        change, record, answers = self._log.current, row.record, self._near.answers
        if change is None:
            self._near.remove(row)
            return
        if change.entry is not row:
            return
        message_id = record.envelope.id
        self._near.leased.pop(message_id, None)  # the lease must not lapse while the change is written
        if occurrence_of(message_id) is None:
            answers.revisions.add(message_id, record.revision, until_ms=now + RETRY_WINDOW_MS)
        version = answers.versions.get(message_id, now) if answers.versions.is_any else None
        if version is not None:
            change.remembering().version = version, now + TOMBSTONE_WINDOW_MS

    def changing(self, row: Entry) -> AbstractContextManager[object]:
        return self._log.ending(row)

    def note(self, event: str, record: Record, now: int, detail: str = "") -> None:
        if self._log.keeps_history:
            self._log.note(journal_entry(0, now, event, record, detail))
