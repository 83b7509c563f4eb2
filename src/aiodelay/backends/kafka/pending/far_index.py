"""`FarIndex`: the offset and the approximate due time of each message that is due beyond the horizon.

The rows are in a SQLite table: in memory, where a row takes less than 40 bytes, or in a file. The file also contains
the checkpoint of the near messages, so that the next owner can go on from the file. The index finds a row by 88 bits of
a salted hash of its key. Nobody who does not know the salt can choose keys that collide. When a message comes near, its
key and everything else are read again from the partition.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import pairwise
from struct import Struct as Layout
from typing import Any, NamedTuple, TypeAlias

import msgspec

from aiodelay.backends.private_files import make_private
from aiodelay.core.values import Lane
from aiodelay.errors import StoreUnavailableError

__all__ = ["FORMAT", "FarIndex", "Row", "open_far"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

FORMAT = 1
"""Format of the file (`PRAGMA user_version`). A file of another format is replaced by an empty file."""
BUSY_S = 5.0
"""Longest wait for a file that another process, or an earlier owner in this process, has not closed yet."""
_BATCH = 4_000
_SLICE = 8_192
_EPOCH_S = 1_735_689_600  # 2025-01-01, so that due times fit into 4 bytes until 2093
_ALL = 1 << 64
_COLUMNS = "hash INTEGER, tag INTEGER, due INTEGER, offset INTEGER, kind INTEGER, PRIMARY KEY (hash, tag)"
_CACHE_KIB = 2_048
_CHECK = (
    "(({0}hash & 2147483647) + ({0}hash >> 31) * 3 + {0}tag * 5 + {0}due * 7 + {0}offset * 11 + {0}kind * 13)"
    " % 2147483647"
)
"""Check number of a row. Damage to any one byte of the row changes it."""

_Hash: TypeAlias = tuple[int, int]


class Row(NamedTuple):
    """The offset of a message's record, its lane, and whether a user wrote the record."""

    offset: int
    lane: Lane
    is_users: bool


class _Kept(msgspec.Struct, array_like=True):
    """The contents of a file besides its rows.

    Attributes:
        lanes: The lanes, by number.
        size: The number of rows.
        checks: The sum of the check numbers of all rows.
        state: The encoded checkpoint of the near messages.
    """

    lanes: list[Lane]
    size: int
    checks: int
    state: bytes


class _DamagedError(Exception):
    """The content of a file differs from the content that was written, or has another format."""


class FarIndex:
    """Rows of far messages, by key.

    Args:
        path: The file, which no other process can open before this index is closed; "" = in memory.
        wait_s: Longest wait until another process has closed the file.

    Raises:
        sqlite3.Error: The file cannot be used.
    """

    problem: str = ""
    """The reason why the file cannot be used any more; "" = no problem. After a problem, every call fails."""

    def __init__(self, path: str = "", *, wait_s: float = 0) -> None:
        if path:
            make_private(path)
        self._table = sqlite3.connect(path or ":memory:", timeout=wait_s, isolation_level=None, check_same_thread=False)
        self._start(path)

    def _start(self, path: str) -> None:
        self._path = path
        self.kept: bytes = b""
        self._size = self._checks = 0
        self._by_lane: Counter[Lane] = Counter()
        self._lanes: list[Lane] = []
        self._kinds: dict[tuple[Lane, bool], int] = {}
        self._new: dict[_Hash, tuple[int, int, int, int, int]] = {}  # rows that are not in the table yet
        self._salt = os.urandom(16)
        self._hashed: Callable[[bytes], _Hash] = _keyed(self._salt) if path else _hashed
        pragmas = _FILE if path else ("PRAGMA journal_mode = OFF",)
        for statement in (
            *pragmas,
            "PRAGMA temp_store = MEMORY",
            "CREATE TEMP TABLE new (hash INTEGER, tag INTEGER, due INTEGER, offset INTEGER, kind INTEGER)",
            "BEGIN IMMEDIATE",
            f"CREATE TABLE IF NOT EXISTS far ({_COLUMNS}) WITHOUT ROWID",
            "CREATE TABLE IF NOT EXISTS kept (number INTEGER PRIMARY KEY, salt BLOB, kept BLOB, seal BLOB)",
        ):
            self._table.execute(statement)

    def __del__(self) -> None:
        with suppress(AttributeError):  # opening has failed, so there is no table
            self._table.close()

    def __bool__(self) -> bool:
        return bool(self._size or self._new)

    def __len__(self) -> int:
        self._flush()
        return self._size

    @property
    def by_lane(self) -> Counter[Lane]:
        """The number of rows of each lane."""
        self._flush()
        return self._by_lane

    def find(self, key: bytes) -> Row | None:
        """Return the row of a key."""
        if not self:
            return None
        hashed = self._hashed(key)
        found = self._new.get(hashed)
        if found is None:
            found = self._run("SELECT * FROM far WHERE hash = ? AND tag = ?", hashed).fetchone()
        return None if found is None else Row(found[3], self._lanes[found[4] >> 1], bool(found[4] & 1))

    def put(self, key: bytes, place_ms: int, offset: int, lane: Lane, *, is_users: bool) -> None:
        """Set the row of a key."""
        kind = self._kinds.get((lane, is_users))
        if kind is None:
            kind = self._numbered(lane, is_users=is_users)
        number, tag = hashed = self._hashed(key)
        self._new[hashed] = number, tag, place_ms // 1000 - _EPOCH_S, offset, kind
        if len(self._new) >= _BATCH:
            self._flush()

    def remove(self, key: bytes) -> None:
        """Remove the row of a key, if there is one."""
        if not self:
            return
        hashed = self._hashed(key)
        self._new.pop(hashed, None)
        self._gone(self._run(f"DELETE FROM far WHERE hash = ? AND tag = ? RETURNING {_RETURNED}", hashed).fetchall())

    def forget(self, offsets: Collection[int]) -> int:
        """Remove the rows with these offsets, and return their number. This is slow: it scans the whole table."""
        self._flush()
        before = self._size
        for offset in offsets:
            self._gone(self._run(f"DELETE FROM far WHERE offset = ? RETURNING {_RETURNED}", (offset,)).fetchall())
        return before - self._size

    def due(
        self, *, from_ms: int = 0, to_ms: int = 1 << 62, lanes: Sequence[Lane] = ()
    ) -> Iterator[list[tuple[int, int, Lane]]]:
        """Yield lists of the rows that are due in a span of time, as (due, offset, lane). Times are rounded to seconds.

        Each list that is yielded has the rows of one slice of the table. To read a slice takes about 1 ms. The caller
        may change rows after each list. The lists that follow may include such a change or not.
        """
        for low, high in _slices(len(self)):
            rows = self._run(
                "SELECT due, offset, kind FROM far WHERE hash BETWEEN ? AND ? AND due BETWEEN ? AND ?",
                (low, high, from_ms // 1000 - _EPOCH_S, to_ms // 1000 - _EPOCH_S),
            )
            named = [((due + _EPOCH_S) * 1000, offset, self._lanes[kind >> 1]) for due, offset, kind in rows]
            yield [each for each in named if each[2] in lanes] if lanes else named

    # --- the file -----------------------------------------------------------------------------------------

    @property
    def is_in_file(self) -> bool:
        """Whether the rows are in a file."""
        return bool(self._path)

    def commit(self, state: bytes) -> None:
        """Write all rows and the state in one transaction. A killed process leaves the file as last committed."""
        self._flush()
        kept = msgspec.msgpack.encode(_Kept(self._lanes, self._size, self._checks, state))
        sealed = self._salt, kept, _seal(kept, self._salt)
        self._run("INSERT OR REPLACE INTO kept VALUES (0, ?, ?, ?)", sealed)
        for statement in (f"PRAGMA user_version = {FORMAT}", "COMMIT", "PRAGMA shrink_memory", "BEGIN IMMEDIATE"):
            self._run(statement)

    def load(self) -> bytes:
        """Restore the rows that were committed last, and return their state, or b"" if nothing was committed.

        Raises:
            sqlite3.Error: The file cannot be read.
            _DamagedError: The content of the file differs from the committed content, or has another format.
        """
        (version,) = self._table.execute("PRAGMA user_version").fetchone()
        found = self._table.execute("SELECT salt, kept, seal FROM kept").fetchone()
        if found is None:
            return b""
        if version != FORMAT:
            raise _DamagedError(f"its format is {version}, and this version reads {FORMAT}")
        ((verdict,),) = self._table.execute("PRAGMA quick_check(1)").fetchall()
        self._salt, sealed, seal = found
        if verdict != "ok" or type(self._salt) is not bytes or _seal(sealed, self._salt) != seal:
            raise _DamagedError(verdict if verdict != "ok" else "its checksum is wrong")
        kept = msgspec.msgpack.decode(sealed, type=_Kept)
        counted = self._counted(kept.size)
        if (kept.size, kept.checks) != (sum(n for _, n, _ in counted), sum(checks for *_, checks in counted)):
            raise _DamagedError("its rows differ from the rows that were written")
        self._hashed, self._lanes = _keyed(self._salt), kept.lanes
        self._size, self._checks = kept.size, kept.checks
        for kind, n, _ in counted:
            self._by_lane[self._lanes[kind >> 1]] += n
        return kept.state

    def _counted(self, size: int) -> list[tuple[int, int, int]]:
        """Count the rows of each kind and add up their check numbers, slice by slice.

        SQLite sorts the rows of a GROUP BY in memory, at 65 bytes per row. It must not sort all rows at once.
        """
        groups = f"SELECT kind, count(*), sum({_CHECK.format('')}) FROM far WHERE hash BETWEEN ? AND ? GROUP BY kind"
        return [row for span in _slices(size) for row in self._table.execute(groups, span)]

    def emptied(self) -> FarIndex:
        """Close this index. Return an empty index in a file of the same name, or in memory if no file can be used."""
        path = self._path
        self.close()
        try:
            _remove(path)
            return FarIndex("" if self.problem else path)
        except (sqlite3.Error, OSError) as error:
            _tell_memory(path, error)
            return FarIndex()

    def close(self) -> None:
        """Close the file without committing. The index has no rows from then on."""
        self._table.close()
        self._table = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._start("")

    def _run(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        try:
            return self._table.execute(statement, values)
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _failed(self, error: sqlite3.Error) -> StoreUnavailableError:
        self.problem = str(error)
        return StoreUnavailableError(f"index file {self._path!r}", self.problem)

    # --- rows ---------------------------------------------------------------------------------------------

    def _numbered(self, lane: Lane, *, is_users: bool) -> int:
        if lane not in self._lanes:
            self._lanes.append(lane)
        kind = self._kinds[lane, is_users] = 2 * self._lanes.index(lane) + is_users
        return kind

    def _gone(self, rows: Sequence[tuple[int, int]]) -> None:
        for kind, check in rows:
            self._size -= 1
            self._checks -= check
            self._by_lane[self._lanes[kind >> 1]] -= 1

    def _flush(self) -> None:
        """Write new rows into the table, many at once."""
        if not self._new:
            return
        try:
            self._table.executemany("INSERT INTO new VALUES (?, ?, ?, ?, ?)", self._new.values())
            (checks,) = self._table.execute(f"SELECT sum({_CHECK.format('')}) FROM new").fetchone()
            replaced = f"SELECT far.kind, {_CHECK.format('far.')} FROM new JOIN far USING (hash, tag)"
            self._gone(self._table.execute(replaced).fetchall())
            self._table.execute("INSERT OR REPLACE INTO far SELECT * FROM new ORDER BY hash")
            self._table.execute("DELETE FROM new")
        except sqlite3.Error as error:
            raise self._failed(error) from error
        self._size += len(self._new)
        self._checks += checks
        for kind, n in Counter(kind for *_, kind in self._new.values()).items():
            self._by_lane[self._lanes[kind >> 1]] += n
        self._new.clear()


def _slices(size: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last hash of slices that divide a table into parts of about `_SLICE` rows."""
    n = size // _SLICE + 1
    edges = [-(_ALL // 2) + i * _ALL // n for i in range(n)] + [_ALL // 2]
    for low, high in pairwise(edges):
        yield low, high - 1


_RETURNED = f"kind, {_CHECK.format('')}"
_FILE = (
    "PRAGMA locking_mode = EXCLUSIVE",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = NORMAL",
    f"PRAGMA cache_size = -{_CACHE_KIB}",
)


def open_far(path: str) -> tuple[FarIndex, bytes]:
    """Open a file. Return its index, and the state that was committed with the index.

    A file that is damaged, or has another format, is replaced by an empty file. If the replacement fails, or if the
    file is still open elsewhere, the index is in memory.
    """
    try:
        return _loaded(path)
    except (sqlite3.Error, _DamagedError, msgspec.DecodeError, OSError, TypeError) as error:
        if _is_busy(error):
            _tell_memory(path, error)
            return FarIndex(), b""
        problem = "index file %s is created again, and its partition is read from its start, because of a fault: %s"
        log.error(problem, path, error)  # noqa: TRY400 - no trace
    try:
        _remove(path)
        return _loaded(path)
    except (sqlite3.Error, OSError) as error:
        _tell_memory(path, error)
        return FarIndex(), b""


def _loaded(path: str) -> tuple[FarIndex, bytes]:
    far = FarIndex(path, wait_s=BUSY_S)
    return far, far.load()


def _is_busy(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _tell_memory(path: str, error: Exception) -> None:
    why = "another process has it open" if _is_busy(error) else error
    log.error("index file %s cannot be used: %s; the index is held in memory", path, why)


def _remove(path: str) -> None:
    """Remove a file, its write-ahead log first: SQLite must not apply that log to the next file of this name."""
    for suffix in ("-wal", "-shm", "-journal", "") if path else ():
        with suppress(FileNotFoundError):
            os.remove(path + suffix)


def _hashed(key: bytes) -> _Hash:
    """Return a hash of a key. Python's hash seed makes it unpredictable, and it is valid only in this process."""
    return hash(key), (hash(b"\0" + key) & 0xFFFFFF) - 0x800000  # the tag fits into 3 bytes


_NUMBERS = Layout("<qi").unpack


def _keyed(salt: bytes) -> Callable[[bytes], _Hash]:
    """Return a function that hashes keys with a salt, for a file. Nobody can predict the hash without the file."""
    empty = blake2b(key=salt, digest_size=12)

    def hashed(key: bytes) -> _Hash:
        state = empty.copy()
        state.update(key)
        number, tag = _NUMBERS(state.digest())
        return number, tag >> 8

    return hashed


def _seal(kept: bytes, salt: bytes) -> bytes:
    return blake2b(kept, key=salt, digest_size=16).digest()
