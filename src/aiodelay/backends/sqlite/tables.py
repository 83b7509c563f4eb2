"""`Tables`: implements the Protocol `Table` of the rules in SQL, for one namespace within one transaction.

`core/rules.py` decides what a command or a settlement changes, and this module makes the changes. Four parts of
`Tables` are in `table_parts.py`. Only the writer's thread uses these two modules.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from typing import Any, TypeAlias

from aiodelay.core import transitions as t
from aiodelay.core.rules import Rules
from aiodelay.core.values import RETRY_WINDOW_MS, Record
from aiodelay.errors import RecordFormatError

from .entry import Entry
from .namespace import Namespace
from .rows import (
    INSERT,
    MOVE,
    ROW,
    Row,
    careful_record_of,
    insert_values,
    move_values,
    object_text,
    record_of,
    salvaged,
)
from .table_parts import Answers, Letters, SupersededClaims, Trials, around_occurrences

__all__ = ["Place", "Tables"]

Place: TypeAlias = tuple[int, str, int, int]
"""A parked message: its lane number, its address, the time of its next attempt, and its number."""

LARGE_BYTES = 1_000
"""A payload with more than this number of bytes is deleted when its message ends. The row stays for a while."""
FIND = f"""
    SELECT {ROW}, l.token, (SELECT 1 FROM ended AS e WHERE e.ns = m.ns AND e.n = m.n)
    FROM messages AS m LEFT JOIN leases AS l ON l.n = m.n
"""
PARKED_AT_ONCE = 1_000
_TOGETHER = nullcontext()


class Tables(Namespace):
    """The messages of one namespace, for the rules. All methods but `forget_caches` need an open transaction."""

    has_new: bool

    def __init__(self, connection: sqlite3.Connection, namespace: str, journal: int) -> None:
        super().__init__(connection, namespace, journal)
        self.answers: Answers = Answers(self)
        self.superseded: SupersededClaims = SupersededClaims(self)
        self.letters: Letters = Letters(self)
        self.trials: Trials = Trials(self)
        self.rules: Rules[Entry] = Rules(self)
        self._reserved_n = 0

    def begin(self, now: int, *, careful: bool) -> None:
        super().begin(now, careful=careful)
        self.answers.ended.clear()
        self._reserved_n = 0

    def forget_caches(self) -> None:
        super().forget_caches()
        self.answers.ended.clear()

    # --- finding ------------------------------------------------------------------------------------------

    def find(self, message_id: str) -> Entry | None:
        """Return the pending message with this id, or None if there is none."""
        found = self._found(f"{FIND} WHERE m.ns = ? AND m.id = ?", (self.ns, message_id))
        row = found[0] if found else None
        if row is not None and row.is_over:
            self.answers.ended[message_id] = row
            return None
        # An earlier call may have purged the ended row within this transaction. Its number may then belong to another
        # message.
        self.answers.ended.pop(message_id, None)
        return row

    def entries(self, numbers: Iterable[int]) -> list[Entry]:
        """Return the messages with these numbers, in ascending order of the numbers."""
        wanted = object_text(list(numbers))
        if wanted == "[]":
            return []
        return self._found(f"{FIND} WHERE m.n IN (SELECT value FROM json_each(?)) ORDER BY m.n", (wanted,))

    def retries_of(self, series_id: str) -> list[Entry]:
        query = f"{FIND} WHERE m.ns = ? AND m.id > ? AND m.id < ?"
        found = self._found(query, (self.ns, *around_occurrences(series_id)))
        return [entry for entry in found if t.base_id(entry.record.id) == series_id and not entry.is_over]

    def _found(self, query: str, parameters: Sequence[Any]) -> list[Entry]:
        return [self._entry(row) for row in self.execute(query, parameters).fetchall()]

    def _entry(self, row: Row) -> Entry:
        *columns, token, over = row
        lane, read = self.lane_name(row[2]), careful_record_of if self.careful else record_of
        try:
            record = read(tuple(columns), lane)
        except RecordFormatError:
            record = salvaged(columns, lane)
        return Entry(row[0], row[1], row[2], record, token or 0, over is not None)

    # --- changing -----------------------------------------------------------------------------------------

    def reserve_n(self, n: int) -> None:
        """Set the number of the next message that is inserted. With 0, it gets a number above all other numbers."""
        self._reserved_n = n

    def insert(self, record: Record, place_ms: int) -> None:
        n, self._reserved_n = self._reserved_n or self.next_n(), 0
        ended = self.answers.ended.pop(record.id, None)
        if ended is not None:
            self.answers.keep(ended.record, self.now)
            self.execute("DELETE FROM ended WHERE ns = ? AND n = ?", (self.ns, ended.n))
            self.execute("DELETE FROM messages WHERE n = ?", (ended.n,))
        lane = self.lane_number(record.envelope.lane)
        self.has_new = True
        self.execute(INSERT, (self.ns, *insert_values(n, place_ms, lane, record)))
        self.execute("INSERT INTO queue (lane, place_ms, n) VALUES (?, ?, ?)", (lane, place_ms, n))

    def move(self, row: Entry, record: Record, place_ms: int, *, keeps_turn: bool = False) -> None:
        self._unplace(row)
        n = row.n if keeps_turn else self.next_n()
        self.has_new = True
        self.execute(MOVE, (*move_values(n, place_ms, record), row.n))
        self.execute("INSERT INTO queue (lane, place_ms, n) VALUES (?, ?, ?)", (row.lane, place_ms, n))

    def update(self, row: Entry, record: Record) -> None:
        query = "UPDATE messages SET no_retry = ?, alone = ?, kills = ?, live = ? WHERE n = ?"
        live = object_text(list(record.live)) if record.live else None
        self.execute(query, (record.no_retry, record.alone, record.kills, live, row.n))
        if record.appended is not row.record.appended:
            query = "UPDATE messages SET appended = ?, appended_due_ms = ? WHERE n = ?"
            self.execute(query, (record.appended, record.appended_due_ms, row.n))
        if record.live != row.record.live:
            self.series_changed.add(row.n)
        row.record = record

    def set_token(self, row: Entry, token: int) -> None:
        self.execute("UPDATE leases SET token = ? WHERE n = ?", (token, row.n))
        row.token = token

    def remove(self, row: Entry) -> None:
        # Read the highest number before the row is deleted. So a message that replaces this one gets a higher number.
        self.next_n(0)
        self._unplace(row)
        self.execute("DELETE FROM messages WHERE n = ?", (row.n,))

    def retire(self, row: Entry, now: int) -> None:
        """End a message. Its row keeps the op, the revision and the due time, until `purge_ended` deletes the row."""
        self._unplace(row)
        self.execute("INSERT INTO ended (ns, n, until_ms) VALUES (?, ?, ?)", (self.ns, row.n, now + RETRY_WINDOW_MS))
        if len(row.record.envelope.payload) > LARGE_BYTES:
            self.execute("UPDATE messages SET payload = x'' WHERE n = ?", (row.n,))

    def changing(self, row: Entry) -> AbstractContextManager[object]:
        del row  # All calls in one transaction are already one step.
        return _TOGETHER

    def _unplace(self, row: Entry) -> None:
        """Remove a message from the table `leases`, `queue` or `parked`. The row in `messages` stays."""
        if row.token:
            self.execute("DELETE FROM leases WHERE n = ?", (row.n,))
            self.trials.end(row)
            return
        place = (row.lane, row.place_ms, row.n)
        if not self.execute("DELETE FROM queue WHERE lane = ? AND place_ms = ? AND n = ?", place).rowcount:
            address = row.record.envelope.address
            query = "DELETE FROM parked WHERE lane = ? AND address = ? AND place_ms = ? AND n = ?"
            self.execute(query, (row.lane, address, row.place_ms, row.n))

    # --- holds --------------------------------------------------------------------------------------------

    def park(self, places: Sequence[Place]) -> None:
        """Move messages of paused addresses from the table `queue` to `parked`. Claims then no longer read them."""
        if places:
            self.executemany(
                "DELETE FROM queue WHERE lane = ? AND place_ms = ? AND n = ?",
                [(lane, place_ms, n) for lane, _, place_ms, n in places],
            )
            self.executemany("INSERT INTO parked (lane, address, place_ms, n) VALUES (?, ?, ?, ?)", places)

    def paused(self) -> dict[int, set[str | None]]:
        """Return the paused addresses for each lane number.

        None among the addresses means that the whole lane is paused.
        """
        found: dict[int, set[str | None]] = {}
        for lane, address in self.execute("SELECT lane, address FROM holds"):
            found.setdefault(lane, set()).add(address)
        return found

    def head_ms(self, lane: int, held: Collection[str]) -> int | None:
        """Return the place of the first message of a lane whose address is not paused. Park all messages before it.

        If the method has parked `PARKED_AT_ONCE` messages, it stops and returns the place of the last of them. The
        caller then soon calls again.
        """
        if not held:
            query = "SELECT place_ms FROM queue WHERE lane = ? ORDER BY place_ms LIMIT 1"
            first = self.execute(query, (lane,)).fetchone()
            return None if first is None else int(first[0])
        query = """
            SELECT q.lane, m.address, q.place_ms, q.n FROM queue AS q CROSS JOIN messages AS m ON m.n = q.n
            WHERE q.lane = ? ORDER BY q.place_ms, q.n LIMIT ?
        """
        places: list[Place] = self.execute(query, (lane, PARKED_AT_ONCE)).fetchall()
        passed = list(takewhile(lambda place: place[1] in held, places))
        self.park(passed)
        if len(passed) < len(places):
            return places[len(passed)][2]
        return passed[-1][2] if len(passed) == PARKED_AT_ONCE else None
