"""Reads whole tables of the file in ranges of ids, for `ports.Scannable`. The store need not be open.

The id of a message never changes. So a message that moves during the scan stays in its range.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

from msgspec import Struct

from aiodelay.core.record_codec import decode_record
from aiodelay.core.table_scan import (
    BATCH_BYTES,
    BATCH_ROWS,
    Columns,
    Ended,
    Scan,
    columns_of_ended,
    columns_of_letters,
    columns_of_messages,
    parts_for,
)
from aiodelay.core.transitions import NO_OP
from aiodelay.core.values import DeadLetter, Envelope, Record
from aiodelay.errors import RecordFormatError, StoreUnavailableError

from .connection import LATER_COLUMNS, Database, columns_of, failure_of
from .reading import LAST_MS, SNAPSHOT, Reader
from .rows import Row, object_text

__all__ = ["File", "Part", "scan_part", "scan_parts"]

IDS_AT_ONCE = 1_000
_TABLES = {"messages": "messages", "dead": "dead", "done": "tombstones"}
_NOT_ENDED = "NOT EXISTS (SELECT 1 FROM ended AS e WHERE e.ns = m.ns AND e.n = m.n)"
_DUE_ONLY = frozenset({"id", "due_ms"})
_LETTER_ONLY = frozenset({"id", "revision", "reason", "at_ms"})
_SELECT = {
    "messages": SNAPSHOT,
    "dead": "SELECT m.id, m.revision, m.lane, m.reason, m.at_ms, m.record FROM dead AS m",
    "done": "SELECT m.id, m.version, m.until_ms FROM tombstones AS m",
}
_ORDER = {"messages": "m.id", "dead": "m.id, m.revision", "done": "m.id"}
_AFTER = {
    "messages": "m.id > CAST(? AS TEXT)",
    "dead": "(m.id, m.revision) > (CAST(? AS TEXT), ?)",
    "done": "m.id > CAST(? AS TEXT)",
}
_LAST = (1 << 63) - 1


class Part(Struct, frozen=True):
    """A part of a table: a range of ids, or a list of ids.

    Attributes:
        after: The last id before the range, as bytes. With None, the range begins at the first id of the table.
        up_to: The last id of the range, as bytes. With None, the range ends at the last id of the table.
        ids: The ids to read. With None, the part has all ids of the range.
    """

    after: bytes | None = None
    up_to: bytes | None = None
    ids: tuple[str, ...] | None = None


class File(NamedTuple):
    """The file to scan, with its path, its name in error messages, and the namespace."""

    path: str
    name: str
    namespace: str

    def failed(self, error: sqlite3.Error) -> StoreUnavailableError:
        return StoreUnavailableError(self.name, failure_of(error, self.path).reason)


def scan_parts(file: File, scan: Scan) -> list[Part]:
    """Split a table into parts. `ports.Scannable` has the rules."""
    if scan.ids is not None:
        size = max(-(-len(scan.ids) // parts_for(scan, len(scan.ids))), 1)
        return [Part(ids=scan.ids[at : at + size]) for at in range(0, len(scan.ids), size)]
    with closing(_opened(file)) as database:
        try:
            bounds = _Scanner(database.connection, file.namespace).bounds(scan)
        except sqlite3.Error as error:
            raise file.failed(error) from error
    return [Part(after, up_to) for after, up_to in zip([None, *bounds], [*bounds, None], strict=True)]


def scan_part(file: File, scan: Scan, part: Part, now: int) -> Iterator[Columns]:
    """Yield the rows of a part. `ports.Scannable` has the rules.

    Each batch is a transaction of its own. During a longer transaction, SQLite could not merge the WAL into the file.
    """
    with closing(_opened(file)) as database:
        scanner = _Scanner(database.connection, file.namespace)
        try:
            yield from scanner.batches(scan, part, now)
        except sqlite3.Error as error:
            raise file.failed(error) from error


def _opened(file: File) -> Database:
    database = Database(file.path, query_only=True)
    try:
        database.check_owner(may_be_new=False)
    except sqlite3.Error as error:
        database.close()
        raise file.failed(error) from error
    except BaseException:
        database.close()
        raise
    return database


class _Scanner(Reader):
    def bounds(self, scan: Scan) -> list[bytes]:
        """Return the last id of each part except the last part."""
        table = _TABLES[scan.table]
        (rows,) = self._execute(f"SELECT count(*) FROM {table} WHERE ns = ?", (self._ns(),)).fetchone()
        size = -(-rows // parts_for(scan, rows))
        numbered = f"SELECT id, row_number() OVER (ORDER BY id) AS k FROM {table} WHERE ns = ?"
        query = f"SELECT id FROM ({numbered}) WHERE k % ? = 0 AND k < ? ORDER BY id"
        found = self._execute(query, (self._ns(), size, rows)).fetchall() if size else []
        return [_as_bytes(message_id) for (message_id,) in found]

    def batches(self, scan: Scan, part: Part, now: int) -> Iterator[Columns]:
        """Yield the rows of a part as columns, batch by batch."""
        if part.ids is not None:
            for at in range(0, len(part.ids), IDS_AT_ONCE):
                yield from self._ranges(scan, Part(ids=part.ids[at : at + IDS_AT_ONCE]), now)
        else:
            yield from self._ranges(scan, part, now)

    def _ranges(self, scan: Scan, part: Part, now: int) -> Iterator[Columns]:
        after: tuple[Any, ...] = () if part.after is None else (part.after, _LAST)
        while True:
            self._execute("BEGIN")
            try:
                rows, is_over = self._page(scan, part, after)
                columns = self._columns(scan, rows, now)
            finally:
                self._execute("ROLLBACK")
            yield columns
            if is_over:
                return
            last = rows[-1]
            after = _as_bytes(last[_id_at(scan)]), last[1]

    def _page(self, scan: Scan, part: Part, after: tuple[Any, ...]) -> tuple[list[Row], bool]:
        """Return the next rows, limited by number and bytes. The second value is True if no rows of the part follow."""
        where: dict[str, tuple[Any, ...]] = {"m.ns = ?": (self._ns(),)}
        if after:
            where[_AFTER[scan.table]] = after if scan.table == "dead" else after[:1]
        if part.up_to is not None:
            where["m.id <= CAST(? AS TEXT)"] = (part.up_to,)
        if part.ids is not None:
            where["m.id IN (SELECT value FROM json_each(?))"] = (object_text(list(part.ids)),)
        if scan.lane is not None:
            where["m.lane = ?"] = (next(iter(self._lanes((scan.lane,))), 0),)
        if scan.table == "messages":
            where |= {_NOT_ENDED: (), "m.due_ms >= ?": (scan.from_ms or 0,), "m.due_ms < ?": (scan.to_ms or LAST_MS,)}
        query = f"{self._select(scan)} WHERE {' AND '.join(where)} ORDER BY {_ORDER[scan.table]} LIMIT {BATCH_ROWS}"
        rows: list[Row] = []
        size = 0
        for row in self._execute(query, [value for values in where.values() for value in values]):
            rows.append(row)
            size += sum(len(value) for value in row if isinstance(value, bytes | str))
            if size >= BATCH_BYTES:
                return rows, False
        return rows, len(rows) < BATCH_ROWS

    def _select(self, scan: Scan) -> str:
        if scan.table == "messages" and _DUE_ONLY.issuperset(scan.columns):
            return "SELECT m.id, 0, m.due_ms FROM messages AS m"
        if scan.table == "dead" and _needs_no_record(scan):
            return _SELECT["dead"].replace("m.record", "NULL")
        query = _SELECT[scan.table]
        for name in LATER_COLUMNS.keys() - columns_of(self._execute, "messages"):
            query = re.sub(rf"\bm\.{name}\b", "NULL", query)
        return query

    def _columns(self, scan: Scan, rows: list[Row], now: int) -> Columns:
        if scan.table == "done":
            ended = [Ended(_text(id_), version, until_ms) for id_, version, until_ms in rows if until_ms > now]
            return columns_of_ended(ended, scan.columns)
        if scan.table == "dead":
            return self._dead_columns(scan, rows)
        if _DUE_ONLY.issuperset(scan.columns):
            each = {"id": [_text(row[0]) for row in rows], "due_ms": [row[2] for row in rows]}
            return {name: each[name] for name in scan.columns}
        lanes, paused = self._lanes(), self._paused()
        return columns_of_messages([self._snapshot(row, lanes, paused, now) for row in rows], scan.columns)

    def _dead_columns(self, scan: Scan, rows: list[Row]) -> Columns:
        if _needs_no_record(scan):
            found = {
                "id": [_text(row[0]) for row in rows],
                "revision": [row[1] for row in rows],
                "reason": [row[3] for row in rows],
                "at_ms": [row[4] for row in rows],
            }
            return {name: found[name] for name in scan.columns}
        letters = [self._letter(row) for row in rows]
        taken = [each for each in letters if scan.takes(each.record.envelope.lane, each.record.due_ms)]
        return columns_of_letters(taken, scan.columns)

    def _letter(self, row: Row) -> DeadLetter:
        id_, revision, lane, reason, at_ms, data = row
        name = self._lanes().get(lane, "")
        try:
            record = decode_record(data, message_id=_text(id_), lane=lambda _: name)
        except RecordFormatError as error:
            unread = Envelope(_text(id_), name, payload=data)
            record = Record(unread, revision, 0, NO_OP, last_error=f"cannot be read: {error.problem}")
        return DeadLetter(record, reason, at_ms)


def _needs_no_record(scan: Scan) -> bool:
    """Return True if a scan of dead letters needs no record: its columns and its filter do not use the record."""
    return _LETTER_ONLY.issuperset(scan.columns) and scan.from_ms is scan.to_ms is None


def _id_at(scan: Scan) -> int:
    return 3 if scan.table == "messages" and not _DUE_ONLY.issuperset(scan.columns) else 0


def _as_bytes(message_id: str) -> bytes:
    return message_id.encode(errors="surrogateescape")


def _text(message_id: str) -> str:
    """Return an id as valid Unicode, which Arrow needs. Another program may have written bytes that are not UTF-8."""
    return message_id if message_id.isascii() else message_id.encode(errors="backslashreplace").decode()
