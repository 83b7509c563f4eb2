"""The tables of one namespace inside one transaction: where a message stands, and the steps from there to elsewhere.

What should happen is decided in `transitions` and by the callers here beside; this module carries it out. It is used
by the writer's thread alone.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from .. import transitions as t
from ..codecs import encode_record
from ..errors import RecordFormatError
from ..model import RETRY_WINDOW_MS, TOMBSTONE_WINDOW_MS, DeadReason, Lane, Outcome, Record, Refused, Stored
from .connection import decoded_anyhow
from .rows import INSERT, MOVE, ROW, Row, insert_values, is_sound, move_values, object_text, record_of, salvaged

__all__ = ["Entry", "Tables"]

LARGE_BYTES = 1_000
"""An ended message that must be remembered gives up a payload larger than this at once."""
MAX_LANE_NUMBER = 65_535
MAX_MS = (1 << 48) - 1
FIND = f"""
    SELECT {ROW}, l.token, (SELECT 1 FROM ended AS e WHERE e.ns = m.ns AND e.n = m.n)
    FROM messages AS m LEFT JOIN leases AS l ON l.n = m.n
"""  # noqa: S608 - columns only
TOKEN, ENDED = -2, -1


class Entry:
    """A row of `messages`: its record, its number and place, and the token of its claim (0 = none).

    `is_over`: it has ended and is only remembered.
    """

    __slots__ = ("is_over", "lane", "n", "place_ms", "record", "token")

    def __init__(self, n: int, place_ms: int, lane: int, record: Record, token: int = 0, *, is_over: bool = False) -> None:
        self.n, self.place_ms, self.lane, self.record = n, place_ms, lane, record
        self.token, self.is_over = token, is_over


class Tables:
    """See the module.

    Args:
        connection: In a transaction whenever a method but `forget_caches` is called.
        namespace: Created by `open` if need be.
        journal: Most entries to keep; 0 = keep none.
    """

    def __init__(self, connection: sqlite3.Connection, namespace: str, journal: int) -> None:
        self.execute, self.executemany = connection.execute, connection.executemany
        self._connection, self._namespace, self._journal = connection, namespace, journal
        self.ns = 0
        self.now = 0
        self.careful = False
        self._next_n: int | None = None
        self._lane_numbers: dict[Lane, int] = {}
        self._lane_names: dict[int, Lane] = {}

    def open(self) -> None:
        """Find or make the namespace."""
        self.execute("INSERT OR IGNORE INTO namespaces (name) VALUES (?)", (self._namespace,))
        (self.ns,) = self.execute("SELECT n FROM namespaces WHERE name = ?", (self._namespace,)).fetchone()

    def begin(self, now: int, *, careful: bool) -> None:
        """Start a transaction.

        Args:
            now: The time of everything in it.
            careful: Expect rows that cannot be read: look at every column of each.
        """
        self.now, self.careful, self._next_n = now, careful, None
        self._connection.text_factory = decoded_anyhow if careful else str

    def forget_caches(self) -> None:
        """Forget what was rolled back."""
        self._lane_numbers.clear()
        self._lane_names.clear()

    # --- numbers ------------------------------------------------------------------------------------------

    def next_n(self, count: int = 1) -> int:
        """Return the first of `count` numbers above those of all messages."""
        if self._next_n is None:
            (self._next_n,) = self.execute("SELECT coalesce(max(n), 0) + 1 FROM messages").fetchone()
        first: int = self._next_n
        self._next_n = first + count
        return first

    def lane_number(self, lane: Lane) -> int:
        """Return a lane's number; make one for a new lane."""
        return self.known_lane(lane) or self._new_lane(lane)

    def known_lane(self, lane: Lane) -> int:
        """Return a lane's number, 0 for a lane that has never held a message."""
        number = self._lane_numbers.get(lane, 0)
        if not number:
            found = self.execute("SELECT n FROM lanes WHERE ns = ? AND name = ?", (self.ns, lane)).fetchone()
            number = found[0] if found else 0
            if number:
                self._lane_numbers[lane], self._lane_names[number] = number, lane
        return number

    def _new_lane(self, lane: Lane) -> int:
        self.execute("INSERT INTO lanes (ns, name) VALUES (?, ?)", (self.ns, lane))
        return self.known_lane(lane)

    def lane_name(self, number: int) -> Lane:
        """Return the name of a lane that exists."""
        name = self._lane_names.get(number)
        if name is None:
            found = self.execute("SELECT name FROM lanes WHERE n = ?", (number,)).fetchone()
            name = self._lane_names[number] = str(found[0]) if found else ""
        return name

    def lanes(self) -> list[tuple[int, Lane]]:
        """Return all lanes of the namespace."""
        return self.execute("SELECT n, name FROM lanes WHERE ns = ?", (self.ns,)).fetchall()

    # --- finding ------------------------------------------------------------------------------------------

    def record_of(self, row: Row) -> Record:
        """Read a row of `ROW`.

        Raises:
            RecordFormatError: It cannot be read.
        """
        if self.careful and not is_sound(row):
            raise RecordFormatError("a column of table messages")
        return record_of(row, self.lane_name(row[2]))

    def salvaged(self, row: Row) -> Record:
        """Make a record of a row that cannot be read."""
        return salvaged(row, self.lane_name(row[2]))

    def find(self, message_id: str) -> Entry | None:
        """Return the message of this id, also one that is over and remembered."""
        found = self._found(f"{FIND} WHERE m.ns = ? AND m.id = ?", (self.ns, message_id))
        return found[0] if found else None

    def entries(self, numbers: Iterable[int]) -> list[Entry]:
        """Return messages by number, in the order of numbers."""
        wanted = object_text(list(numbers))
        return self._found(f"{FIND} WHERE m.n IN (SELECT value FROM json_each(?)) ORDER BY m.n", (wanted,))

    def _found(self, query: str, parameters: Sequence[Any]) -> list[Entry]:
        return [self._entry(row) for row in self.execute(query, parameters).fetchall()]

    def _entry(self, row: Row) -> Entry:
        try:
            record = self.record_of(row)
        except RecordFormatError:
            record = self.salvaged(row)
        return Entry(row[0], row[1], row[2], record, row[TOKEN] or 0, is_over=row[ENDED] is not None)

    # --- placing ------------------------------------------------------------------------------------------

    def unplace(self, entry: Entry) -> None:
        """Take a message out of wherever it stands; its row stays."""
        if entry.token:
            self.execute("DELETE FROM leases WHERE n = ?", (entry.n,))
            return
        place = (entry.lane, entry.place_ms, entry.n)
        if not self.execute("DELETE FROM queue WHERE lane = ? AND place_ms = ? AND n = ?", place).rowcount:
            address = entry.record.envelope.address
            query = "DELETE FROM parked WHERE lane = ? AND address = ? AND place_ms = ? AND n = ?"
            self.execute(query, (entry.lane, address, entry.place_ms, entry.n))

    def move(self, entry: Entry, record: Record, place_ms: int) -> None:
        """Put a message that was taken out back into its lane, behind those of the same place."""
        n = self.next_n()
        self.execute(MOVE, (*move_values(n, place_ms, record), entry.n))
        self.execute("INSERT INTO queue (lane, place_ms, n) VALUES (?, ?, ?)", (entry.lane, place_ms, n))

    def insert(self, record: Record, place_ms: int, n: int | None = None) -> None:
        """Store a record under an id that nobody has (`displace`)."""
        lane = self.lane_number(record.envelope.lane)
        n = self.next_n() if n is None else n
        self.execute(INSERT, (self.ns, *insert_values(n, place_ms, lane, record)))
        self.execute("INSERT INTO queue (lane, place_ms, n) VALUES (?, ?, ?)", (lane, place_ms, n))

    def displace(self, entry: Entry | None) -> None:
        """Make an id free, remembering the op that was there."""
        if entry is None:
            return
        record = entry.record
        if entry.is_over:
            self.execute("DELETE FROM ended WHERE ns = ? AND n = ?", (self.ns, entry.n))
        else:
            self.unplace(entry)
            self._note_end(record)
        if self._is_young(record):
            self.remember(record.op, Stored("stored", record.revision, record.due_ms))
        self.execute("DELETE FROM messages WHERE n = ?", (entry.n,))

    # --- ending -------------------------------------------------------------------------------------------

    def forget(self, entry: Entry) -> None:
        """End a message that was taken out; remember for a while what is needed of it."""
        record = entry.record
        self._note_end(record)
        if not self._is_young(record):
            self.execute("DELETE FROM messages WHERE n = ?", (entry.n,))
            return
        until = self.now + RETRY_WINDOW_MS
        self.execute("INSERT INTO ended (ns, n, until_ms) VALUES (?, ?, ?)", (self.ns, entry.n, until))
        if len(record.envelope.payload) > LARGE_BYTES:
            self.execute("UPDATE messages SET payload = x'' WHERE n = ?", (entry.n,))

    def _is_young(self, record: Record) -> bool:
        """Say whether the op that wrote it may still be repeated."""
        return self.now - record.revision < RETRY_WINDOW_MS

    def _note_end(self, record: Record) -> None:
        envelope = record.envelope
        if envelope.version is not None:
            self.execute(
                "INSERT OR REPLACE INTO tombstones (ns, id, version, until_ms) VALUES (?, ?, ?, ?)",
                (self.ns, envelope.id, envelope.version, self.now + TOMBSTONE_WINDOW_MS),
            )
        if "~" in envelope.id and (occurrence := t.occurrence_of(envelope.id)) is not None:
            series = self.find(occurrence[0])
            if series is not None and not series.is_over and occurrence[1] in series.record.live:
                live = tuple(due for due in series.record.live if due != occurrence[1])
                text = object_text(live) if live else None
                self.execute("UPDATE messages SET live = ? WHERE n = ?", (text, series.n))

    def remember(self, op: bytes, outcome: Outcome) -> None:
        """Keep the answer to a command for as long as it may be repeated."""
        if isinstance(outcome, Stored):
            answer: Row = (outcome.answer, "", outcome.revision, outcome.due_ms)
        elif isinstance(outcome, Refused):
            answer = (outcome.reason, outcome.detail, None, None)
        else:
            return
        self.execute(
            "INSERT INTO ops (ns, op, answer, detail, revision, due_ms, until_ms) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (self.ns, op, *answer, self.now + RETRY_WINDOW_MS),
        )

    def remembered(self, op: bytes) -> Outcome | None:
        """Return the answer that a command had before."""
        query = "SELECT answer, detail, revision, due_ms FROM ops WHERE ns = ? AND op = ? ORDER BY n DESC LIMIT 1"
        found = self.execute(query, (self.ns, op)).fetchone()
        if found is None:
            return None
        answer, detail, revision, due_ms = found
        return Refused(answer, detail) if revision is None else Stored(answer, revision, due_ms)

    def bury(self, record: Record, reason: DeadReason) -> None:
        """Keep a dead letter."""
        if record.envelope.rule is not None:
            record = t.as_occurrence(record)
        lane = self.lane_number(record.envelope.lane)
        self.execute(
            "INSERT OR REPLACE INTO dead (ns, id, revision, lane, reason, at_ms, record) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                self.ns,
                record.id,
                record.revision,
                lane,
                reason,
                self.now,
                encode_record(_encodable(record), lane if lane <= MAX_LANE_NUMBER else 0),
            ),
        )
        self.note("dead", record, reason)

    def end_occurrences(self, series: Record) -> bool:
        """End the retries that go on beside a series; say whether one of them is in flight."""
        in_flight = False
        for due_ms in series.live:
            entry = self.find(t.occurrence_id(series.id, due_ms))
            if entry is None or entry.is_over:
                continue
            if entry.token:
                self.execute("UPDATE messages SET no_retry = 1 WHERE n = ?", (entry.n,))
                in_flight = True
            else:
                self.unplace(entry)
                self.forget(entry)
        return in_flight

    # --- journal ------------------------------------------------------------------------------------------

    @property
    def keeps_journal(self) -> bool:
        """Whether `note` writes anything."""
        return self._journal > 0

    def note(self, event: str, record: Record, detail: str = "") -> None:
        """Write to the journal."""
        if self._journal:
            self.notes([(event, record, detail)])

    def notes(self, entries: Sequence[tuple[str, Record, str]]) -> None:
        """Write several entries to the journal and trim it."""
        if not self._journal or not entries:
            return
        query = "SELECT coalesce(max(number), 0) FROM journal WHERE ns = ?"
        (last,) = self.execute(query, (self.ns,)).fetchone()
        self.executemany(
            "INSERT INTO journal VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    self.ns,
                    last + i,
                    self.now,
                    event,
                    record.id,
                    record.revision,
                    record.envelope.lane,
                    record.due_ms,
                    record.attempt,
                    detail.encode("utf-8", "backslashreplace").decode(),
                )
                for i, (event, record, detail) in enumerate(entries, 1)
            ],
        )
        self.execute(
            "DELETE FROM journal WHERE ns = ? AND number <= ?", (self.ns, last + len(entries) - self._journal)
        )


def _encodable(record: Record) -> Record:
    """Return the record with its times in the range that format 1 can write: u48."""
    times = {"revision": record.revision, "due_ms": record.due_ms, "expires_ms": record.expires_ms}
    wrong = {name: min(max(ms, 0), MAX_MS) for name, ms in times.items() if not 0 <= ms <= MAX_MS}
    return replace(record, **wrong) if wrong else record
