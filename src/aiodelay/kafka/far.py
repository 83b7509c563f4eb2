"""Messages that are due beyond the horizon: of each, where it stands and about when it is due; about 35 bytes.

A table of SQLite in memory, by a hash of the key. What there is besides, also the key, is read again from the partition
when it comes near.
"""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

from aiodelay.model import Lane

__all__ = ["Far", "Row"]

_BATCH = 2_000
_SLICE = 8_192
_EPOCH_S = 1_735_689_600  # 2025: so due times take 4 bytes until 2093
_ALL = 1 << 64


class Row(NamedTuple):
    """What is known of a message: the offset at which it stands, its lane, and whether a user's record holds it."""

    offset: int
    lane: Lane
    is_users: bool


class Far:
    """Rows by key."""

    def __init__(self) -> None:
        self.by_lane: Counter[Lane] = Counter()
        self._size = 0
        self._seed = os.urandom(16)
        self._lanes: list[Lane] = []
        self._new: dict[int, tuple[int, int, int, int]] = {}  # by hash: what is not in the table yet
        self._table = sqlite3.connect(":memory:", isolation_level=None)
        for statement in (
            "PRAGMA journal_mode = OFF",
            "CREATE TABLE far (hash INTEGER PRIMARY KEY, tag INTEGER, due INTEGER, offset INTEGER, kind INTEGER)",
        ):
            self._table.execute(statement)

    def __len__(self) -> int:
        return self._size

    def find(self, key: bytes) -> Row | None:
        """Return a key's row."""
        if not self._size:
            return None
        number, tag = self._hashed(key)
        found = self._at(number)
        return None if found is None or found[0] != tag else self._row(found)

    def add(self, key: bytes, row: Row, place_ms: int) -> bool:
        """Add a key that has no row; False if another one has the same hash, and it must be kept elsewhere."""
        number, tag = self._hashed(key)
        if self._size and self._at(number) is not None:
            return False
        self._new[number] = tag, place_ms // 1000 - _EPOCH_S, row.offset, 2 * self._number(row.lane) + row.is_users
        self._size += 1
        self.by_lane[row.lane] += 1
        if len(self._new) >= _BATCH:
            self._flush()
        return True

    def remove(self, key: bytes) -> Row | None:
        """Take a key's row out, and return it."""
        row = self.find(key)
        if row is not None:
            number = self._hashed(key)[0]
            if self._new.pop(number, None) is None:
                self._table.execute("DELETE FROM far WHERE hash = ?", (number,))
            self._size -= 1
            self.by_lane[row.lane] -= 1
        return row

    def forget(self, offsets: Collection[int]) -> Counter[Lane]:
        """Take out the rows of these offsets, if there are any; return how many there were, by lane."""
        self._flush()
        gone: Counter[Lane] = Counter()
        for offset in offsets:
            rows = self._table.execute("DELETE FROM far WHERE offset = ? RETURNING kind", (offset,)).fetchall()
            gone.update(self._lanes[kind >> 1] for (kind,) in rows)
        self._size -= gone.total()
        self.by_lane -= gone
        return gone

    def due(
        self, *, from_ms: int = 0, to_ms: int = 1 << 62, lanes: Sequence[Lane] = ()
    ) -> Iterator[list[tuple[int, int, Lane]]]:
        """Return what is due in a span, to the second, as (due, offset, lane) in slices: each takes about 1 ms.

        What changes between two slices may or may not be told.
        """
        self._flush()
        n = self._size // _SLICE + 1
        edges = [-(_ALL // 2) + i * _ALL // n for i in range(n)] + [_ALL // 2]
        for low, high in pairwise(edges):
            rows = self._table.execute(
                "SELECT due, offset, kind FROM far WHERE hash BETWEEN ? AND ? AND due BETWEEN ? AND ?",
                (low, high - 1, from_ms // 1000 - _EPOCH_S, to_ms // 1000 - _EPOCH_S),
            )
            named = [((due + _EPOCH_S) * 1000, offset, self._lanes[kind >> 1]) for due, offset, kind in rows]
            yield [each for each in named if each[2] in lanes] if lanes else named

    def _hashed(self, key: bytes) -> tuple[int, int]:
        digest = blake2b(key, digest_size=12, key=self._seed).digest()
        return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)

    def _at(self, number: int) -> tuple[int, int, int, int] | None:
        found = self._new.get(number)
        if found is None:
            query = "SELECT tag, due, offset, kind FROM far WHERE hash = ?"
            found = self._table.execute(query, (number,)).fetchone()
        return found

    def _row(self, found: Sequence[Any]) -> Row:
        _, _, offset, kind = found
        return Row(offset, self._lanes[kind >> 1], bool(kind & 1))

    def _number(self, lane: Lane) -> int:
        if lane not in self._lanes:
            self._lanes.append(lane)
        return self._lanes.index(lane)

    def _flush(self) -> None:
        self._table.execute("BEGIN")
        rows = ((number, *row) for number, row in self._new.items())
        self._table.executemany("INSERT INTO far VALUES (?, ?, ?, ?, ?)", rows)
        self._table.execute("COMMIT")
        self._new.clear()
