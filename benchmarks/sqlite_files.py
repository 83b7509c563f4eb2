"""The bare side of BF2 and BF3: plain sqlite3 on files with aiodelay's schema and pragmas."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from aiodelay.backends.sqlite.connection import Database

from .harness import Stopwatch, check

__all__ = ["Rows", "count", "delete_in_order", "insert", "new_file", "raw", "read_rows"]

Row: TypeAlias = tuple[Any, ...]

AT_ONCE = 500
WRITTEN = (
    "ns, n, place_ms, lane, id, address, type, encoding, payload, key, headers, trace, version, rule, revision, "
    "due_ms, op, expires_ms, late"
)
"""The columns that a put writes. The other columns have their defaults."""
_INSERT_MESSAGE = f"INSERT INTO messages ({WRITTEN}) VALUES ({', '.join('?' * len(WRITTEN.split(',')))})"
_INSERT_PLACE = "INSERT INTO queue (lane, place_ms, n) VALUES (?, ?, ?)"
_FIRST = """
    SELECT m.n, m.place_ms, m.lane, m.id, m.payload FROM queue AS q CROSS JOIN messages AS m ON m.n = q.n
    WHERE q.lane = ? AND q.place_ms <= ? ORDER BY q.place_ms, q.n LIMIT ?
"""


class Rows(NamedTuple):
    """The rows that aiodelay wrote into `namespaces`, `lanes`, `messages` and `queue`."""

    namespaces: Sequence[Row]
    lanes: Sequence[Row]
    messages: Sequence[Row]
    queue: Sequence[Row]


def read_rows(path: Path) -> Rows:
    """Read a file that aiodelay wrote."""
    with closing(sqlite3.connect(path)) as connection:
        return Rows(
            connection.execute("SELECT n, name FROM namespaces").fetchall(),
            connection.execute("SELECT n, ns, name FROM lanes").fetchall(),
            connection.execute(f"SELECT {WRITTEN} FROM messages ORDER BY n").fetchall(),
            connection.execute("SELECT lane, place_ms, n FROM queue ORDER BY n").fetchall(),
        )


def new_file(file: Path) -> Path:
    """Delete a database, so that the path is free for a new one."""
    for name in (file, file.with_name(f"{file.name}-wal"), file.with_name(f"{file.name}-shm")):
        name.unlink(missing_ok=True)
    return file


def count(path: Path, table: str) -> int:
    """Return the number of rows of a table."""
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


@contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    """Open or create a file as aiodelay does, and yield the plain connection."""
    database = Database(str(path))
    try:
        yield database.connection
    finally:
        database.close()


def insert(path: Path, rows: Rows) -> float:
    """Measure the bare limit of scheduling: the same rows, 500 a transaction, each with its fsync."""
    with raw(path) as connection:
        connection.executemany("INSERT INTO namespaces (n, name) VALUES (?, ?)", rows.namespaces)
        connection.executemany("INSERT INTO lanes (n, ns, name) VALUES (?, ?, ?)", rows.lanes)
        with Stopwatch() as watch:
            for at in range(0, len(rows.messages), AT_ONCE):
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany(_INSERT_MESSAGE, rows.messages[at : at + AT_ONCE])
                connection.executemany(_INSERT_PLACE, rows.queue[at : at + AT_ONCE])
                connection.execute("COMMIT")
    check(read_rows(path) == rows, "the bare side wrote other rows")
    return watch.seconds


def delete_in_order(path: Path, now_ms: int) -> float:
    """Measure the bare limit of a drain: select 500 rows in order, delete them, commit, until the queue is empty."""
    with Stopwatch() as watch, raw(path) as connection:
        (lane,) = connection.execute("SELECT n FROM lanes").fetchone()
        while True:
            connection.execute("BEGIN IMMEDIATE")
            found = connection.execute(_FIRST, (lane, now_ms, AT_ONCE)).fetchall()
            connection.executemany(
                "DELETE FROM queue WHERE lane = ? AND place_ms = ? AND n = ?",
                [(row[2], row[1], row[0]) for row in found],
            )
            connection.executemany("DELETE FROM messages WHERE n = ?", [row[:1] for row in found])
            connection.execute("COMMIT")
            if not found:
                break
    check(count(path, "messages") == 0, "the bare side left rows")
    return watch.seconds
