"""`Repairs`: makes the changes that no command asks for, where only a new record can repair the partition.

A key is *hidden* if Kafka's cleaner would drop its standing record. The owner writes that record again in time. Records
that cannot be decoded become dead letters. Users' requests to the owner are carried out.
"""

from __future__ import annotations

import logging

from aiodelay.backends.kafka import records
from aiodelay.core.dict_table.entries import Entry
from aiodelay.core.values import Cancel, Outcome, PutBack, Refused, Stored

from .changes import Change, ChangeLog
from .decisions import Decisions
from .read_state import Asked
from .salvage import salvaged

__all__ = ["Repairs"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")


class Repairs:
    """Makes the repairs of one partition.

    Args:
        decisions: Carries out requests.
        changes: Takes the changes, and has the table of messages.
        name: The topic and partition, for logs.
    """

    def __init__(self, decisions: Decisions, changes: ChangeLog, *, name: str) -> None:
        self._decisions, self._log, self._name = decisions, changes, name
        self._table, self._state = changes.table, changes.state

    def make(self) -> None:
        """Make changes for hidden keys, for records that cannot be decoded, for messages to end, and for requests."""
        state = self._state
        for key in [*state.hidden, *state.bad, *state.over]:
            if key not in self._log.held_back and state.far.find(key) is None:
                self._make(key)
        for key, (asked, *_) in state.asked.items():
            if not asked.is_decided and asked.is_over:
                asked.is_decided = True
                change = Change(b"", state.read_to, None, asked=(key, asked.offset))
                self._log.under_way[change] = None
                # First in the queue: otherwise another owner may find the request without the record that voids it.
                self._log.changes.appendleft(change)
            elif not asked.is_decided and key not in self._log.held_back and state.far.find(key) is None:
                asked.is_decided = True
                self._decide_asked(key, asked)

    def _make(self, key: bytes) -> None:
        state, entry = self._state, self._table.find(records.id_of(key))
        change = Change(key, state.read_to, entry)
        if key in state.bad:
            change.entry = None
            self._decisions.bury(change, salvaged(*state.bad[key]), "undecodable")
        elif key in state.over:
            change.is_users = entry is not None and entry.token != 0
            change.entry = entry if change.is_users else None
        elif entry is not None and entry.token:
            return  # the settlement of its claim writes the key
        elif state.standings[key].seen.is_put and entry is not None:
            change.put = entry.record, entry.place_ms
            self._log.reserve(entry)
        self._log.offer(change)

    def _decide_asked(self, key: bytes, asked: Asked) -> None:
        """Carry out a user's request to the owner. The tombstone of the request contains the answer."""
        what = asked.what
        outcome, change = self._decisions.put_back(what) if isinstance(what, PutBack) else self._decisions.command(what)
        if change is None:
            change = Change(b"", self._state.read_to, None)
            self._log.begin(change)
        change.asked = key, asked.offset
        if isinstance(what, Cancel):
            change.outcome = outcome.answer if isinstance(outcome, Stored) else _reason(outcome)

    @property
    def are_needed(self) -> bool:
        """Whether there are repairs to make, or changes to write."""
        state = self._state
        return bool(state.hidden or state.bad or state.over or state.asked or self._log.changes)

    def quarantine(self) -> None:
        """Make dead letters of messages that had ended and have come back."""
        mark = self._state.mark
        for key, standing in self._state.standings.items():
            entry = self._table.find(records.id_of(key)) if standing.seen.offset < mark.read_to else None
            if entry is not None and mark.covers(standing.seen.offset, entry.place_ms):
                self.set_aside(key, entry)

    def set_aside(self, key: bytes, entry: Entry) -> None:
        """Make a dead letter of a message that had ended and has come back."""
        log.error("%s: message %s had ended, and has come back: it becomes a dead letter", self._name, entry.record.id)
        change = Change(key, self._state.read_to, entry)
        self._decisions.bury(change, entry.record, "resurrected")
        change.outcome = "resurrected"
        self._table.leased.pop(entry.record.id, None)
        self._log.reserve(entry)
        self._log.offer(change)


def _reason(outcome: Outcome) -> str:
    return outcome.reason if isinstance(outcome, Refused) else "unknown"
