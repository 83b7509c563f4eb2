"""`Reader`: reads the tables on a second connection. This connection never writes, so claims continue meanwhile.

Each method runs a few SELECTs. The caller begins a transaction if all of them must see the same state. The time of most
calls depends on the size of the page, not of the table. `search`, `counts` and `load` are exceptions: `search` reads
all messages at one place, and `counts` and `load` read all messages that they count.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from heapq import nsmallest
from typing import Any

import msgspec

from aiodelay.core import limits as rules
from aiodelay.core.limits import Use
from aiodelay.core.record_codec import decode_record
from aiodelay.core.values import (
    DeadLetter,
    Instance,
    JournalEntry,
    Lane,
    LaneCounts,
    LaneLimits,
    LimitedKey,
    LoadBucket,
    Query,
    Record,
    Snapshot,
    State,
)
from aiodelay.errors import RecordFormatError
from aiodelay.ports.control import pause_order

from .limits import WHOLE, limits_of, marks_of, whole_use
from .rows import ROW, Row, careful_record_of, object_text, salvaged
from .upkeep import SERVED_WINDOW_MS

__all__ = ["Reader"]

log: logging.Logger = logging.getLogger("aiodelay.sqlite")

FIRST_MS, LAST_MS = -(1 << 62), (1 << 62)
SNAPSHOT = f"SELECT {ROW}, EXISTS (SELECT 1 FROM leases AS c WHERE c.n = m.n) FROM messages AS m"
_read_lanes = msgspec.json.Decoder(list[str]).decode


class Reader:
    """Reads the data of one namespace.

    Args:
        connection: A connection of this thread. If another program wrote text that is not UTF-8, the connection returns
            this text with surrogates.
        namespace: The name of the namespace. A namespace that does not exist has no data.
    """

    def __init__(self, connection: sqlite3.Connection, namespace: str) -> None:
        self._execute, self._namespace = connection.execute, namespace

    def _ns(self) -> int:
        found = self._execute("SELECT n FROM namespaces WHERE name = ?", (self._namespace,)).fetchone()
        return found[0] if found else 0

    def _lanes(self, names: Collection[Lane] = ()) -> dict[int, Lane]:
        rows = self._execute("SELECT n, name FROM lanes WHERE ns = ?", (self._ns(),))
        return {n: name for n, name in rows if not names or name in names}

    def _paused(self) -> set[tuple[int, str | None]]:
        return set(self._execute("SELECT lane, address FROM holds"))

    def features(self) -> dict[str, str]:
        """Return the features that the namespace uses: a map from each name to the version that switched it on."""
        return dict(self._execute("SELECT name, version FROM features WHERE ns = ?", (self._ns(),)))

    # --- messages -----------------------------------------------------------------------------------------

    def get(self, message_id: str, now: int) -> Snapshot | None:
        """Return the pending or in-flight message with this id, or None if no such message is stored."""
        ended = "SELECT 1 FROM ended AS e WHERE e.ns = m.ns AND e.n = m.n"
        query = f"{SNAPSHOT} WHERE m.ns = ? AND m.id = ? AND NOT EXISTS ({ended})"
        row = self._execute(query, (self._ns(), message_id)).fetchone()
        return None if row is None else self._snapshot(row, self._lanes(), self._paused(), now)

    def _snapshot(
        self, row: Row, lanes: Mapping[int, Lane], paused: Collection[tuple[int, str | None]], now: int
    ) -> Snapshot:
        record = _read(row[:-1], lanes[row[2]])
        if row[-1]:
            state = State.IN_FLIGHT
        elif (row[2], None) in paused or (row[2], record.envelope.address) in paused:
            state = State.HELD
        else:
            state = State.OVERDUE if row[1] <= now else State.SCHEDULED
        return Snapshot(record, state, row[1])

    def search(self, query: Query, now: int) -> list[Snapshot]:
        """List messages in the order of (place, id). The place of a message is the time of its next attempt.

        The tables are in the order of places only. If many messages have the same place, the method reads them all,
        even for a small page.
        """
        lanes = self._lanes(query.lanes)
        after_ms, after_id = query.after or (FIRST_MS, "")
        first = max(after_ms, FIRST_MS if query.from_ms is None else query.from_ms)
        end = LAST_MS if query.to_ms is None else query.to_ms
        beyond = [ms for lane in lanes for ms, _ in self._places(lane, first + 1, end, query.limit)]
        last = max(nsmallest(query.limit, beyond), default=first)
        found = [
            (row[0], row[1], n)
            for lane in lanes
            for ms, n in self._places(lane, first, min(end, last + 1), -1)
            for row in self._execute("SELECT place_ms, id FROM messages WHERE n = ?", (n,))
        ]
        page = nsmallest(
            query.limit, (each for each in found if query.after is None or each[:2] > (after_ms, after_id))
        )
        return self._snapshots([n for _, _, n in page], now)

    def series(self, after: str | None, limit: int, now: int) -> list[Snapshot]:
        """List recurring messages in the order of their ids."""
        ended = "SELECT 1 FROM ended AS e WHERE e.ns = m.ns AND e.n = m.n"
        wanted = "m.ns = ? AND m.rule IS NOT NULL AND m.id > ?"
        query = f"{SNAPSHOT} INDEXED BY messages_series WHERE {wanted} AND NOT EXISTS ({ended}) ORDER BY m.id LIMIT ?"
        rows = self._execute(query, (self._ns(), after or "", limit)).fetchall()
        lanes, paused = self._lanes(), self._paused()
        return [self._snapshot(row, lanes, paused, now) for row in rows]

    def _places(self, lane: int, first: int, end: int, limit: int) -> list[tuple[int, int]]:
        """Return (place, number) of the messages of a lane with first <= place < end, in this order.

        With the limit -1, return all of them.
        """
        wanted = "WHERE lane = ? AND place_ms >= ? AND place_ms < ? ORDER BY place_ms LIMIT ?"
        sources = (
            f"SELECT place_ms, n FROM queue {wanted}",
            f"SELECT place_ms, n FROM parked {wanted}",
            f"SELECT place_ms, n FROM (SELECT m.* FROM leases AS l JOIN messages AS m ON m.n = l.n) {wanted}",
        )
        found = [row for source in sources for row in self._execute(source, (lane, first, end, limit))]
        return found if limit < 0 else nsmallest(limit, found)

    def _snapshots(self, numbers: Sequence[int], now: int) -> list[Snapshot]:
        query = f"{SNAPSHOT} WHERE m.n IN (SELECT value FROM json_each(?))"
        lanes, paused = self._lanes(), self._paused()
        found = {row[0]: row for row in self._execute(query, (object_text(list(numbers)),))}
        return [self._snapshot(found[n], lanes, paused, now) for n in numbers if n in found]

    # --- counts -------------------------------------------------------------------------------------------

    def counts(self, now: int) -> dict[Lane, LaneCounts]:
        """Count messages by lane and state."""
        paused, served = self._paused(), self._served(now)
        counts: dict[Lane, LaneCounts] = {}
        for lane, name in sorted(self._lanes().items(), key=lambda each: each[1]):
            scheduled, overdue = self._pending(lane, now)
            held = self._one("SELECT count(*) FROM parked WHERE lane = ?", lane)
            if (lane, None) in paused:
                scheduled, overdue, held = 0, 0, held + scheduled + overdue
            for address in [address for number, address in paused if number == lane and (lane, None) not in paused]:
                later, now_due = self._pending_of(lane, address, now)
                scheduled, overdue, held = scheduled - later, overdue - now_due, held + later + now_due
            in_flight = self._one("SELECT count(*) FROM leases WHERE lane = ?", lane)
            dead = self._one("SELECT count(*) FROM dead WHERE lane = ?", lane)
            if scheduled or overdue or held or in_flight or dead:
                counts[name] = LaneCounts(scheduled, overdue, in_flight, held, dead, name not in served)
        return counts

    def _one(self, query: str, *parameters: int | str | None) -> int:
        found = self._execute(query, parameters).fetchone()
        return int(found[0])

    def _pending(self, lane: int, now: int) -> tuple[int, int]:
        return (
            self._one("SELECT count(*) FROM queue WHERE lane = ? AND place_ms > ?", lane, now),
            self._one("SELECT count(*) FROM queue WHERE lane = ? AND place_ms <= ?", lane, now),
        )

    def _pending_of(self, lane: int, address: str | None, now: int) -> tuple[int, int]:
        """Count the messages of a paused address that are still in the queue.

        A claim or `tidy` parks such a message when it reaches the head of the lane.
        """
        query = "SELECT count(*) FROM queue AS q JOIN messages AS m ON m.n = q.n WHERE q.lane = ? AND m.address = ?"
        total = self._one(query, lane, address)
        overdue = self._one(f"{query} AND q.place_ms <= ?", lane, address, now)
        return total - overdue, overdue

    def _served(self, now: int) -> set[Lane]:
        query = "SELECT lanes FROM workers WHERE ns = ? AND seen_ms > ?"
        rows = self._execute(query, (self._ns(), now - SERVED_WINDOW_MS))
        return {lane for (lanes,) in rows for lane in _read_lanes(lanes)}

    def instances(self, now: int) -> list[Instance]:
        """List the live workers of the namespace."""
        query = "SELECT worker, lanes, seen_ms FROM workers WHERE ns = ? AND seen_ms > ? ORDER BY worker"
        rows = self._execute(query, (self._ns(), now - SERVED_WINDOW_MS))
        return [Instance(name, tuple(sorted(_read_lanes(lanes))), seen_ms) for name, lanes, seen_ms in rows]

    def load(self, bucket_ms: int, buckets: int, now: int) -> list[LoadBucket]:
        """Count the messages that become due from now on, by lane and by span of `bucket_ms`."""
        found: dict[tuple[int, Lane], int] = {}
        for lane, name in self._lanes().items():
            for table in ("queue", "parked"):
                query = (
                    f"SELECT (place_ms - ?) / ?, count(*) FROM {table}"
                    " WHERE lane = ? AND place_ms >= ? AND place_ms < ? GROUP BY 1"
                )
                for bucket, n in self._execute(query, (now, bucket_ms, lane, now, now + bucket_ms * buckets)):
                    found[bucket, name] = found.get((bucket, name), 0) + n
        return [LoadBucket(now + bucket * bucket_ms, lane, found[bucket, lane]) for bucket, lane in sorted(found)]

    # --- limits -------------------------------------------------------------------------------------------

    def limits(self, column: str) -> dict[Lane, LaneLimits]:
        """Return the limits in a column of the table `limits`, by lane. Lanes without limits are left out."""
        query = f"""
            SELECT a.name, l.{column} FROM limits AS l JOIN lanes AS a ON a.n = l.lane
            WHERE l.ns = ? AND l.{column} IS NOT NULL ORDER BY a.name
        """
        return {lane: limits_of(text) for lane, text in self._execute(query, (self._ns(),))}

    def limited_keys(self, lane: Lane, limit: int, key: bytes | None, now: int) -> list[LimitedKey]:
        """List the keys of a lane, or only one key, that have messages in flight or due, most due messages first."""
        query = "SELECT queue, limits FROM limits WHERE lane = ? AND limits IS NOT NULL"
        found = self._execute(query, (next(iter(self._lanes((lane,))), 0),)).fetchone()
        if found is None:
            return []
        queue, limits = found[0], limits_of(found[1])
        whole, only = whole_use(self._execute, queue), "" if key is None else "AND k.key = ?5"
        query = f"""
            SELECT k.key, k.running, k.marks, coalesce(w.due, 0), w.since_ms FROM limited_keys AS k
            LEFT JOIN (
                SELECT key, count(*) AS due, min(place_ms) AS since_ms FROM limited AS k
                WHERE queue = ?1 AND place_ms <= ?2 {only} GROUP BY key
            ) AS w ON w.key = k.key
            WHERE k.queue = ?1 AND k.key <> ?3 {only} AND (k.running > 0 OR w.due > 0)
            ORDER BY 4 DESC, k.running DESC, k.key LIMIT ?4
        """
        rows = self._execute(query, (queue, now, WHOLE, limit, *([] if key is None else [key])))
        return [_limited_key(lane, limits, whole, row, now) for row in rows]

    # --- the rest -----------------------------------------------------------------------------------------

    def position(self, source: str) -> int | None:
        """Return the last position of an intake, or None if the intake has stored no position."""
        query = "SELECT position FROM positions WHERE ns = ? AND source = ?"
        found = self._execute(query, (self._ns(), source)).fetchone()
        return None if found is None else int(found[0])

    def dead_letters(
        self, lane: Lane | None, message_id: str | None, after: tuple[int, str, int] | None, limit: int
    ) -> list[DeadLetter]:
        """List dead letters, oldest first."""
        lanes = self._lanes(() if lane is None else (lane,))
        wanted: dict[str, int | str] = {"ns": self._ns()} if lane is None else {"lane": next(iter(lanes), 0)}
        index = ""
        if message_id is not None:  # Without this index, SQLite would read all dead letters in the order of time.
            wanted, index = {"ns": self._ns(), "id": message_id, **wanted}, " INDEXED BY dead_key"
        query = (
            f"SELECT lane, id, revision, reason, at_ms, record FROM dead{index}"
            f" WHERE {' AND '.join(f'{name} = ?' for name in wanted)} AND (at_ms, id, revision) > (?, ?, ?)"
            " ORDER BY at_ms, id, revision LIMIT ?"
        )
        rows = self._execute(query, (*wanted.values(), *(after or (FIRST_MS, "", FIRST_MS)), limit)).fetchall()
        return [letter for row in rows if (letter := _letter(row, lanes[row[0]])) is not None]

    def paused(self) -> list[tuple[Lane, str | None]]:
        """List the paused lanes and addresses, in order. The address of a paused lane is None."""
        lanes = self._lanes()
        found = [(lanes[lane], address) for lane, address in self._paused() if lane in lanes]
        return sorted(found, key=pause_order)

    def journal_span(self) -> range:
        """Return the range of the numbers of all journal entries."""
        query = "SELECT min(number), max(number) FROM journal WHERE ns = ?"
        oldest, newest = self._execute(query, (self._ns(),)).fetchone()
        return range(1, 1) if newest is None else range(oldest, newest + 1)

    def journal(self, message_id: str | None, after: int, limit: int) -> list[JournalEntry]:
        """List journal entries in order."""
        columns = "number, at_ms, event, id, revision, lane, due_ms, attempt, detail"
        query = f"SELECT {columns} FROM journal WHERE ns = ? AND number > ? ORDER BY number LIMIT ?"
        parameters: tuple[Any, ...] = (self._ns(), after, limit)
        if message_id is not None:
            query = f"SELECT {columns} FROM journal WHERE ns = ? AND number > ? AND id = ? ORDER BY number LIMIT ?"
            parameters = (self._ns(), after, message_id, limit)
        return [JournalEntry(*row) for row in self._execute(query, parameters)]


def _read(row: Row, lane: Lane) -> Record:
    try:
        return careful_record_of(row, lane)
    except RecordFormatError:
        return salvaged(row, lane)


def _letter(row: Row, lane: Lane) -> DeadLetter | None:
    _, message_id, revision, reason, at_ms, data = row
    try:
        return DeadLetter(decode_record(data, message_id=message_id, lane=lambda _: lane), reason, at_ms)
    except RecordFormatError as error:
        log.warning("dead letter %s/%d cannot be read and is not listed: %s", message_id, revision, error)
        return None


def _limited_key(lane: Lane, limits: LaneLimits, whole: Use, row: Row, now: int) -> LimitedKey:
    key, running, marks, waiting, since_ms = row
    use = Use(running, marks_of(marks))
    why, until_ms = rules.why_waiting(limits, whole, use, now) if waiting else ("", None)
    return LimitedKey(lane, None if limits.each is None else key, running, waiting, why, until_ms, since_ms)
