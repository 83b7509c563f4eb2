"""`Decisions`: decides for the owner what happens to the messages of a partition. Each decision is a `Change` to write.

All stores share the rules. On Kafka, a decision counts only when its records were read back.
"""

from __future__ import annotations

from aiodelay.backends.kafka import records
from aiodelay.core.dict_table.entries import IN_LANE, Entry
from aiodelay.core.rules import Rules, keep_answer, known_answer
from aiodelay.core.values import (
    RETRY_WINDOW_MS,
    Cancel,
    Command,
    DeadKey,
    DeadReason,
    Outcome,
    Put,
    PutBack,
    Record,
    Refused,
    Settlement,
    SettleOutcome,
    Stored,
)
from aiodelay.ports.clock import Clock

from .changes import Change, ChangeLog
from .salvage import is_without_topic

__all__ = ["Decisions"]


class Decisions:
    """Makes the decisions about one partition's messages.

    Args:
        rules: Applies commands and settlements to the table.
        changes: Takes the changes, and has the table of messages.
        clock: The clock of the store.
    """

    def __init__(self, rules: Rules[Entry], changes: ChangeLog, clock: Clock) -> None:
        self._rules, self._log, self._clock = rules, changes, clock
        self._table, self._state = changes.table, changes.state

    # --- commands and settlements -------------------------------------------------------------------------

    def command(self, command: Command) -> tuple[Outcome, Change | None]:
        """Decide a command, and return the change to write, if any."""
        now, entry = self._clock.now_ms(), self._table.find(command.id)
        known = known_answer(self._table.answers, command, entry, now)
        if known is not None:
            return known, None
        with self._log.deciding(self._change(command.id, entry)) as change:
            outcome = self._rules.decide(command, entry, now)
            if isinstance(command, Cancel) and entry is not None and isinstance(outcome, Stored):
                change.is_users = entry.token != 0
                self._cancel_in_flight(command.id)
        is_kept = change.put is None and isinstance(command, Put)
        if not isinstance(outcome, Stored) or outcome.answer == "kept" or is_kept:
            self.answered(command, outcome)
            return outcome, None
        if entry is not None and not entry.token:
            self._log.reserve(entry)
        if outcome.answer != "stored":  # the message's own record contains the answer "stored"
            change.remembering().answers.append(records.remembered(command.op, outcome, now + RETRY_WINDOW_MS))
        return outcome, self._log.offer(change)

    def _change(self, message_id: str, entry: Entry | None) -> Change:
        return Change(records.key_of(message_id), self._state.read_to, entry)

    def _cancel_in_flight(self, series_id: str) -> None:
        """Write cancels for the occurrences of a series that are in flight, so that no retries follow."""
        for entry in self._table.retries_of(series_id):
            if entry.token:
                change = self._change(entry.record.id, entry)
                change.is_users = True
                self._log.offer(change)

    def answered(self, command: Command, outcome: Outcome) -> None:
        """Remember the answer to a command whose change counted, so that a repeat of the command gets this answer."""
        keep_answer(self._table.answers, command, outcome, self._clock.now_ms())

    def settle(self, settlement: Settlement) -> tuple[SettleOutcome, Change | None]:
        """Decide a settlement, and return the change to write, if any."""
        entry = self._table.find(settlement.id)
        if self._log.holds_back(records.key_of(settlement.id), entry):  # the same settlement is being written
            was_replaced = self._table.superseded.end(settlement.id, settlement.revision, settlement.token)
            return SettleOutcome.SUPERSEDED if was_replaced else SettleOutcome.GONE, None
        with self._log.deciding(self._change(settlement.id, entry)) as change:
            change.outcome = getattr(settlement, "outcome", "ended")
            outcome = self._rules.settle(settlement, self._clock.now_ms())
        return outcome, self._log.offer(change) if outcome is SettleOutcome.SETTLED else None

    def end(self, entry: Entry, settlement: Settlement) -> Change | None:
        """Decide how a due, unclaimed message ends. Return None if the message has changed or ended already."""
        if not self._log.is_left(entry) or entry.state is not IN_LANE:
            return None
        self._log.reserve(entry)
        return self.settle(settlement)[1]

    def end_instead(self, change: Change, settlement: Settlement) -> Change | None:
        """Decide the end of a message whose move Kafka does not take.

        Return None if the message has changed or ended already.

        Args:
            change: The move, which must not be written any more.
            settlement: How the message ends.
        """
        self._log.release(change)
        if change.entry is None or not self._log.is_left(change.entry):
            return None
        return self.settle(settlement)[1]

    def has_newer(self, settlement: Settlement) -> bool:
        """Say whether a newer revision of a message is stored."""
        entry = self._table.find(settlement.id)
        return entry is not None and entry.record.revision > settlement.revision

    # --- dead letters and put-backs -------------------------------------------------------------------------

    def redrive(self, key: DeadKey) -> tuple[Outcome, Change | None]:
        """Decide to schedule a dead letter again."""
        letter = self._table.letters.get(key)
        if letter is not None and is_without_topic(letter.record.envelope):
            why = letter.record.last_error
            problem = f"{why}; its destination is unknown: schedule the message again, then purge this dead letter"
            return Refused("undecodable", problem), None
        with self._log.deciding(self._change(key.id, None)) as change:
            outcome = self._rules.redrive(key, self._clock.now_ms())
        return outcome, None if isinstance(outcome, Refused) else self._log.offer(change)

    def put_back(self, message: PutBack) -> tuple[Stored, Change | None]:
        """Decide to store a message that is put back.

        If a message with this id is stored, or the dead letter to put back exists already, nothing changes.
        """
        is_dead = message.reason is not None
        change = Change(b"" if is_dead else records.key_of(message.record.id), self._state.read_to, None)
        with self._log.deciding(change):
            stored = self._rules.put_back(message, self._clock.now_ms())
        if stored.answer == "kept":
            return stored, None
        if is_dead:
            self._log.begin(change)
            return stored, change
        return stored, self._log.offer(change)

    def purge(self, key: DeadKey) -> Change | None:
        """Decide to delete a dead letter. Return None if there is no such dead letter."""
        if not self._table.letters.has(key):
            return None
        change = Change(b"", self._state.read_to, None, purged=key)
        self._log.begin(change)
        return change

    def bury(self, change: Change, record: Record, reason: DeadReason) -> None:
        """Add a dead letter for a message to a change."""
        with self._log.deciding(change):
            self._rules.bury(record, reason, self._clock.now_ms())
