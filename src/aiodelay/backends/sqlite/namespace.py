"""`Namespace`: the time, numbers, lanes and journal of one namespace, within one transaction."""

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
    """The progress of `purge_ended` through the ended messages. A sweep is one pass through all of them.

    Attributes:
        number: The number of the last message that was checked. 0 at the start of a sweep.
        first_ms: The earliest time at which a message that this sweep has checked may be deleted.
        rest_until_ms: The time of the next sweep, set at the end of a sweep. No message can be deleted before this
            time.
    """

    number: int = 0
    first_ms: int = 0
    rest_until_ms: int = 0


class Namespace:
    """The numbers, lanes and journal of one namespace. All methods but `forget_caches` need an open transaction.

    Args:
        connection: The writing connection.
        namespace: The name of the namespace. `open` creates the namespace if it does not exist.
        journal: The largest number of journal entries to keep. With 0, the store keeps no journal.
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
        self.features: dict[str, str] = {}
        """The features that `check_features` last found, each with the version that switched it on."""
        self.limited: frozenset[Lane] = frozenset()
        """The lanes that had limits at the last claim."""
        self.checked_keys: dict[int, bytes] = {}
        """The last keys of limited queues that housekeeping has checked, by the number of the queue."""
        self.series_changed: set[int] = set()
        """The numbers of the series whose lists of retries have changed in this transaction.

        A record of such a series that was read before the change is outdated.
        """
        self._next_n: int | None = None
        self._notes: list[tuple[int, str, str, int, Lane, int, int, str]] = []
        self._lane_numbers: dict[Lane, int] = {}
        self._lane_names: dict[int, Lane] = {}

    def open(self) -> None:
        """Find the namespace, or create it."""
        self.execute("INSERT OR IGNORE INTO namespaces (name) VALUES (?)", (self._namespace,))
        (self.ns,) = self.execute("SELECT n FROM namespaces WHERE name = ?", (self._namespace,)).fetchone()

    def begin(self, now: int, *, careful: bool) -> None:
        """Prepare this object for a transaction. The caller has just begun the transaction.

        Args:
            now: The time of the transaction, epoch ms.
            careful: True if the transaction checks every column of each row, because a row may be unreadable.
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
        """Clear the caches. The caller does this after a rollback."""
        self._lane_numbers.clear()
        self._lane_names.clear()

    # --- features -----------------------------------------------------------------------------------------

    def check_features(self) -> None:
        """Check that this version knows every feature that the namespace uses.

        Raises:
            StoreTooNewError: The namespace uses a feature that this version does not know. The error names the feature.
        """
        self.features = dict(self.execute("SELECT name, version FROM features WHERE ns = ?", (self.ns,)))
        check_known(f"namespace {self._namespace!r}", self.features)

    def switch_on(self, names: Collection[str]) -> None:
        """Switch features on: record in the namespace that it uses these features from now on."""
        rows = [(self.ns, name, __version__) for name in names]
        self.executemany("INSERT OR IGNORE INTO features (ns, name, version) VALUES (?, ?, ?)", rows)

    # --- numbers ------------------------------------------------------------------------------------------

    def next_n(self, count: int = 1) -> int:
        """Return the first of `count` new, consecutive numbers. They are higher than the numbers of all messages."""
        if self._next_n is None:
            (self._next_n,) = self.execute("SELECT coalesce(max(n), 0) + 1 FROM messages").fetchone()
        first: int = self._next_n
        self._next_n = first + count
        return first

    def lane_number(self, lane: Lane) -> int:
        """Return the number of a lane. Create the lane if it does not exist."""
        return self.known_lane(lane) or self._new_lane(lane)

    def known_lane(self, lane: Lane) -> int:
        """Return the number of a lane, or 0 if the lane does not exist."""
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
        """Return the name of the lane with this number, or "" if there is no such lane."""
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
        """Return True if the store may treat leases that are too long as ended.

        A lease is too long if the clock has stepped back far since the claim. The workers have `RIGHTING_MS` to renew
        such leases with a correct end. This time begins at the first call after the step. So call the method only if a
        lease is too long.
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
        """Add an entry to the journal. `end` writes it. If the store keeps no journal, do nothing."""
        if self._journal:
            lane, text = record.envelope.lane, detail.encode("utf-8", "backslashreplace").decode()
            self._notes.append((now, event, record.id, record.revision, lane, record.due_ms, record.attempt, text))

    def end(self) -> None:
        """Write the new journal entries and trim the journal. The caller commits the transaction afterwards."""
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
