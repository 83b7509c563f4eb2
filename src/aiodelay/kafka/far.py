"""Messages that are due beyond the horizon: of each, where it stands and about when it is due; less than 40 bytes.

A table of SQLite in memory, by 88 bits of the key's hash, which is this process's own. What there is besides, also the
key, is read again from the partition when it comes near.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from aiodelay.model import Lane

__all__ = ["Far", "Row"]

_BATCH = 4_000
_SLICE = 8_192
_EPOCH_S = 1_735_689_600  # 2025: so due times take 4 bytes until 2093
_ALL = 1 << 64
_COLUMNS = "hash INTEGER, tag INTEGER, due INTEGER, offset INTEGER, kind INTEGER, PRIMARY KEY (hash, tag)"

_Hash: TypeAlias = tuple[int, int]


class Row(NamedTuple):
    """What is known of a message: the offset at which it stands, its lane, and whether a user's record holds it."""

    offset: int
    lane: Lane
    is_users: bool


class Far:
    """Rows by key."""

    def __init__(self) -> None:
        self._size = 0
        self._by_lane: Counter[Lane] = Counter()
        self._lanes: list[Lane] = []
        self._kinds: dict[tuple[Lane, bool], int] = {}
        self._new: dict[_Hash, tuple[int, int, int, int, int]] = {}  # what is not in the table yet
        # One loop uses it, but the garbage collector may close it in any thread.
        self._table = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        for statement in (
            "PRAGMA journal_mode = OFF",
            f"CREATE TABLE far ({_COLUMNS}) WITHOUT ROWID",
            "CREATE TEMP TABLE new (hash INTEGER, tag INTEGER, due INTEGER, offset INTEGER, kind INTEGER)",
        ):
            self._table.execute(statement)

    def __del__(self) -> None:
        self._table.close()

    def __bool__(self) -> bool:
        return bool(self._size or self._new)

    def __len__(self) -> int:
        self._flush()
        return self._size

    @property
    def by_lane(self) -> Counter[Lane]:
        """How many rows there are of each lane."""
        self._flush()
        return self._by_lane

    def find(self, key: bytes) -> Row | None:
        """Return a key's row."""
        if not self:
            return None
        hashed = _hashed(key)
        found = self._new.get(hashed)
        if found is None:
            found = self._table.execute("SELECT * FROM far WHERE hash = ? AND tag = ?", hashed).fetchone()
        return None if found is None else Row(found[3], self._lanes[found[4] >> 1], bool(found[4] & 1))

    def put(self, key: bytes, place_ms: int, offset: int, lane: Lane, *, is_users: bool) -> None:
        """Set a key's row."""
        kind = self._kinds.get((lane, is_users))
        if kind is None:
            kind = self._numbered(lane, is_users=is_users)
        number, tag = hashed = _hashed(key)
        self._new[hashed] = number, tag, place_ms // 1000 - _EPOCH_S, offset, kind
        if len(self._new) >= _BATCH:
            self._flush()

    def remove(self, key: bytes) -> None:
        """Take a key's row out, if it has one."""
        if not self:
            return
        hashed = _hashed(key)
        self._new.pop(hashed, None)
        self._gone(self._table.execute("DELETE FROM far WHERE hash = ? AND tag = ? RETURNING kind", hashed).fetchall())

    def forget(self, offsets: Collection[int]) -> int:
        """Take out the rows of these offsets, which takes long; return how many there were."""
        self._flush()
        before = self._size
        for offset in offsets:
            self._gone(self._table.execute("DELETE FROM far WHERE offset = ? RETURNING kind", (offset,)).fetchall())
        return before - self._size

    def due(
        self, *, from_ms: int = 0, to_ms: int = 1 << 62, lanes: Sequence[Lane] = ()
    ) -> Iterator[list[tuple[int, int, Lane]]]:
        """Return what is due in a span, to the second, as (due, offset, lane) in slices: each takes about 1 ms.

        What changes between two slices may or may not be told.
        """
        n = len(self) // _SLICE + 1
        edges = [-(_ALL // 2) + i * _ALL // n for i in range(n)] + [_ALL // 2]
        for low, high in pairwise(edges):
            rows = self._table.execute(
                "SELECT due, offset, kind FROM far WHERE hash BETWEEN ? AND ? AND due BETWEEN ? AND ?",
                (low, high - 1, from_ms // 1000 - _EPOCH_S, to_ms // 1000 - _EPOCH_S),
            )
            named = [((due + _EPOCH_S) * 1000, offset, self._lanes[kind >> 1]) for due, offset, kind in rows]
            yield [each for each in named if each[2] in lanes] if lanes else named

    def _numbered(self, lane: Lane, *, is_users: bool) -> int:
        if lane not in self._lanes:
            self._lanes.append(lane)
        kind = self._kinds[lane, is_users] = 2 * self._lanes.index(lane) + is_users
        return kind

    def _gone(self, kinds: Sequence[tuple[int]]) -> None:
        for (kind,) in kinds:
            self._size -= 1
            self._by_lane[self._lanes[kind >> 1]] -= 1

    def _flush(self) -> None:
        """Put what is new into the table, many rows at once."""
        if not self._new:
            return
        self._table.execute("BEGIN")
        self._table.executemany("INSERT INTO new VALUES (?, ?, ?, ?, ?)", self._new.values())
        self._gone(self._table.execute("SELECT far.kind FROM new JOIN far USING (hash, tag)").fetchall())
        self._table.execute("INSERT OR REPLACE INTO far SELECT * FROM new ORDER BY hash")
        self._table.execute("DELETE FROM new")
        self._table.execute("COMMIT")
        self._size += len(self._new)
        for kind, n in Counter(kind for *_, kind in self._new.values()).items():
            self._by_lane[self._lanes[kind >> 1]] += n
        self._new.clear()


def _hashed(key: bytes) -> _Hash:
    return hash(key), (hash(b"\0" + key) & 0xFFFFFF) - 0x800000  # which takes 3 bytes
