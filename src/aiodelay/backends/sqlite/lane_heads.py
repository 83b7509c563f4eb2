"""`LaneHead`: the messages of one lane for one claim, from the earliest on."""

from __future__ import annotations

from collections.abc import Iterator

from aiodelay.core import transitions as t
from aiodelay.errors import RecordFormatError

from .entry import Entry
from .rows import ROW, Row, careful_record_of, record_of, salvaged
from .tables import Tables

__all__ = ["LaneHead"]

HEAD = f"""
    SELECT {ROW} FROM queue AS q CROSS JOIN messages AS m ON m.n = q.n
    WHERE q.lane = ? AND q.place_ms <= ? ORDER BY q.place_ms, q.n
"""
MOST_PASSED = 10_000
"""The limit at which a claim stops reading a lane, because it has passed so many messages. The next claim continues.

A message that the claim parks counts 1. A message that the claim ends counts 10.
"""


class LaneHead:
    """Reads one lane from its head on, and collects the messages that leave the lane. `close` writes the changes.

    The object does not write while it reads. SQLite does not define whether an open SELECT sees rows that change.

    Args:
        tables: The tables, in a transaction.
        lane: The number of the lane.
        held: The paused addresses.
    """

    def __init__(self, tables: Tables, lane: int, held: frozenset[str]) -> None:
        self.lane: int = lane
        self.taken: list[Entry] = []
        self.has_aside: bool = False
        self._held = held
        self._late: list[Entry] = []
        self._parked: list[Entry] = []
        self._unreadable: list[Entry] = []
        self._passed = 0
        self._tables = tables
        self._read = careful_record_of if tables.careful else record_of
        self._name = tables.lane_name(lane)
        self._rows: Iterator[Entry] | None = None
        self._first: Entry | None = None
        self._is_read = False

    def first(self) -> Entry | None:
        """Return the first message that is due, not paused and not late. The message stays in the lane.

        The method reads only up to this message. Later claims end the late messages behind it.
        """
        if not self._is_read:
            self._first = self._next()
            self._is_read = True
        return self._first

    def _next(self) -> Entry | None:
        if self._rows is None:
            self._rows = self._due()
        return next(self._rows, None)

    def _due(self) -> Iterator[Entry]:
        for row in self._tables.execute(HEAD, (self.lane, self._tables.now)):
            entry = self._deliverable(row)
            if entry is not None:
                yield entry
            if self._passed >= MOST_PASSED:
                return

    def _deliverable(self, row: Row) -> Entry | None:
        """Return the message of a row. If it must not be delivered, note why, and return None."""
        try:
            record = self._read(row, self._name)
        except RecordFormatError:
            self._unreadable.append(Entry(row[0], row[1], row[2], salvaged(row, self._name)))
            self._passed += 10
            return None
        entry = Entry(row[0], row[1], row[2], record)
        if self._held and record.envelope.address in self._held:
            self._parked.append(entry)
            self._passed += 1
        elif record.late and t.ends_by_itself(record, self._tables.now):
            self._late.append(entry)
            self._passed += 10
        else:
            return entry
        return None

    def take(self) -> None:
        """Take the message that `first` returned. `first` then returns the next message."""
        if self._first is not None:
            self.taken.append(self._first)
            self._is_read = False

    def step_over(self) -> None:
        """Leave the message that `first` returned in the lane. `first` then returns the next message."""
        self.has_aside = True
        self._is_read = False

    def behind_ms(self) -> int | None:
        """Return the place of the first message behind the messages that the claim left, or None if there is none."""
        if (first := self.first()) is not None:
            return first.place_ms
        query = "SELECT place_ms FROM queue WHERE lane = ? AND place_ms > ? ORDER BY place_ms LIMIT 1"
        found = self._tables.execute(query, (self.lane, self._tables.now)).fetchone()
        return None if found is None else int(found[0])

    def next_ms(self) -> int | None:
        """Return when the lane has a message to claim, after the claim is written; None if it has none."""
        return self._tables.head_ms(self.lane, self._held)

    def close(self) -> None:
        """End reading.

        Remove taken messages from the queue, park paused messages, and end late and unreadable messages.
        """
        self._rows = iter(())
        tables, now = self._tables, self._tables.now
        for entry in self._unreadable:
            tables.rules.bury(entry.record, "undecodable", now)
            tables.rules.end(entry, now)
        for entry in self._late:
            tables.rules.expire(entry, now)
        tables.park([(entry.lane, entry.record.envelope.address, entry.place_ms, entry.n) for entry in self._parked])
        if self.taken:
            self._remove_taken()

    def _remove_taken(self) -> None:
        if self.has_aside:
            self._remove_each()
        else:
            last = self.taken[-1]
            query = "DELETE FROM queue WHERE lane = ? AND (place_ms, n) <= (?, ?)"
            self._tables.execute(query, (self.lane, last.place_ms, last.n))

    def _remove_each(self) -> None:
        """Remove the taken messages from the queue, and none before them."""
        self._tables.executemany(
            "DELETE FROM queue WHERE lane = ? AND place_ms = ? AND n = ?",
            [(self.lane, entry.place_ms, entry.n) for entry in self.taken],
        )
