"""`Namespace`: the time, numbers, lanes and journal of one namespace of the file, inside one transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection
from dataclasses import dataclass

from aiodelay.core import transitions as t
from aiodelay.core.features import check_known
from aiodelay.core.values import Lane, Record
from aiodelay.core.version import __version__

from .connection import decoded_anyhow

__all__ = ["Namespace", "Sweep"]


@dataclass(slots=True)
class Sweep:
    """How far this process has checked the ended messages for those to delete (`purge_ended`).

    Attributes:
        number: The number of the last checked message; 0 = the start of a sweep.
        first_ms: The earliest time at which one of the messages of this sweep may be deleted.
        rest_until_ms: No message can be deleted before this time. Set at the end of a sweep.
    """

    number: int = 0
    first_ms: int = 0
    rest_until_ms: int = 0


class Namespace:
    """The numbers, lanes and journal of one namespace. All methods but `forget_caches` need an open transaction.

    Args:
        connection: The writing connection.
        namespace: The name of the namespace. `open` creates the namespace if it does not exist.
        journal: The largest number of journal entries to keep; 0 = keep none.
    """

    execute: Callable[..., sqlite3.Cursor]
    executemany: Callable[..., sqlite3.Cursor]
    ns: int
    now: int
    careful: bool
    has_new: bool
    """True if this transaction has put a message into a lane."""
    new_answers: int
    """The number of answers that this transaction has written."""

    def __init__(self, connection: sqlite3.Connection, namespace: str, journal: int) -> None:
        self.execute, self.executemany = connection.execute, connection.executemany
        self._connection, self._namespace, self._journal = connection, namespace, journal
        self.ns = 0
        self.now = 0
        self.careful = False
        self.has_new = False
        self.new_answers = 0
        self.sweep: Sweep = Sweep()
        self.series_changed: set[int] = set()
        """Numbers of series of which an occurrence ended in this transaction. Earlier reads of them are outdated."""
        self._next_n: int | None = None
        self._notes: list[tuple[int, str, str, int, Lane, int, int, str]] = []
        self._lane_numbers: dict[Lane, int] = {}
        self._lane_names: dict[int, Lane] = {}

    def open(self) -> None:
        """Find the namespace, or create it."""
        self.execute("INSERT OR IGNORE INTO namespaces (name) VALUES (?)", (self._namespace,))
        (self.ns,) = self.execute("SELECT n FROM namespaces WHERE name = ?", (self._namespace,)).fetchone()

    def begin(self, now: int, *, careful: bool) -> None:
        """Start a transaction.

        Args:
            now: The time of the transaction, epoch ms.
            careful: Whether to check every column of each row, because some rows may be unreadable.
        """
        self.now, self.careful, self.has_new, self._next_n = now, careful, False, None
        self.new_answers = 0
        self._notes.clear()
        self.series_changed.clear()
        self._connection.text_factory = decoded_anyhow if careful else str

    def count_answer(self) -> None:
        """Add 1 to `new_answers`."""
        self.new_answers += 1

    def forget_caches(self) -> None:
        """Clear the caches after a rollback."""
        self._lane_numbers.clear()
        self._lane_names.clear()

    # --- features -----------------------------------------------------------------------------------------

    def check_features(self) -> None:
        """Raise an error if the namespace uses a feature that this version does not know.

        Raises:
            StoreTooNewError: The error names the feature.
        """
        found = self.execute("SELECT name, version FROM features WHERE ns = ?", (self.ns,)).fetchall()
        check_known(f"namespace {self._namespace!r}", dict(found))

    def switch_on(self, names: Collection[str]) -> None:
        """Switch features on: record that the namespace uses them from now on."""
        rows = [(self.ns, name, __version__) for name in names]
        self.executemany("INSERT OR IGNORE INTO features (ns, name, version) VALUES (?, ?, ?)", rows)

    # --- numbers ------------------------------------------------------------------------------------------

    def next_n(self, count: int = 1) -> int:
        """Return the first of `count` new numbers, which are higher than the numbers of all messages."""
        if self._next_n is None:
            (self._next_n,) = self.execute("SELECT coalesce(max(n), 0) + 1 FROM messages").fetchone()
        first: int = self._next_n
        self._next_n = first + count
        return first

    def lane_number(self, lane: Lane) -> int:
        """Return the number of a lane. Create the lane if it does not exist."""
        return self.known_lane(lane) or self._new_lane(lane)

    def known_lane(self, lane: Lane) -> int:
        """Return the number of a lane; 0 = the lane does not exist."""
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
        """Return the name of a lane; "" = no lane has this number."""
        name = self._lane_names.get(number)
        if name is None:
            found = self.execute("SELECT name FROM lanes WHERE n = ?", (number,)).fetchone()
            name = self._lane_names[number] = str(found[0]) if found else ""
        return name

    def lanes(self) -> list[tuple[int, Lane]]:
        """Return the numbers and names of all lanes of the namespace."""
        return self.execute("SELECT n, name FROM lanes WHERE ns = ?", (self.ns,)).fetchall()

    # --- leases that are too long -------------------------------------------------------------------------

    def is_righting_over(self) -> bool:
        """Return True if the store may now return the leases that are too long.

        A lease is too long after the clock has stepped back. Its worker has `RIGHTING_MS` to renew it with a right end.
        Call this method only while such a lease exists: it records when it first saw such a lease.
        """
        found = self.execute("SELECT ahead_since_ms FROM clock_steps WHERE ns = ?", (self.ns,)).fetchone()
        before = found[0] if found else 0
        since = t.ahead_since(before, self.now)
        if since != before:
            self.execute("INSERT OR REPLACE INTO clock_steps (ns, ahead_since_ms) VALUES (?, ?)", (self.ns, since))
        return since + t.RIGHTING_MS <= self.now

    # --- journal ------------------------------------------------------------------------------------------

    @property
    def keeps_journal(self) -> bool:
        """True if the store keeps a journal."""
        return self._journal > 0

    def note(self, event: str, record: Record, now: int, detail: str = "") -> None:
        """Add an entry to the journal. `end` writes it. Without a journal, do nothing."""
        if self._journal:
            lane, text = record.envelope.lane, detail.encode("utf-8", "backslashreplace").decode()
            self._notes.append((now, event, record.id, record.revision, lane, record.due_ms, record.attempt, text))

    def end(self) -> None:
        """Do the last writes of a transaction before its commit: write the new journal entries and trim the journal."""
        if not self._notes:
            return
        query = "SELECT coalesce(max(number), 0) FROM journal WHERE ns = ?"
        (last,) = self.execute(query, (self.ns,)).fetchone()
        self.executemany(
            "INSERT INTO journal VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(self.ns, number, *note) for number, note in enumerate(self._notes, last + 1)],
        )
        oldest = last + len(self._notes) - self._journal
        self.execute("DELETE FROM journal WHERE ns = ? AND number <= ?", (self.ns, oldest))
