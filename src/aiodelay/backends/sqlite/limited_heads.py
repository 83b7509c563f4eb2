"""`LimitedHead`: the messages of a lane with limits for one claim. The keys of the lane take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush

from aiodelay.core import limits as rules
from aiodelay.core.limits import Use

from .entry import Entry
from .lane_heads import MOST_PASSED, LaneHead
from .limits import WHOLE, LimitedLane, marks_of, marks_text, whole_use
from .rows import ROW, Row
from .tables import Tables

__all__ = ["LimitedHead"]

TICKETS = f"""
    SELECT k.ticket_ms, k.turn, k.key, k.running, k.marks, k.served_ms, {ROW}
    FROM limited_keys AS k LEFT JOIN messages AS m ON m.n = (
        SELECT w.n FROM limited AS w WHERE w.queue = k.queue AND w.key = k.key ORDER BY w.place_ms, w.n LIMIT 1
    )
    WHERE k.queue = ? AND k.ticket_ms <= ? ORDER BY k.ticket_ms, k.turn
"""
WAITING = f"""
    SELECT {ROW} FROM limited AS w CROSS JOIN messages AS m ON m.n = w.n
    WHERE w.queue = ? AND w.key = ? AND (w.place_ms, w.n) > (?, ?) AND w.place_ms <= ?
    ORDER BY w.place_ms, w.n LIMIT ?
"""
MOST_AT_ONCE = 128


class _Key:
    """A key of the lane, as one claim sees it.

    Args:
        row: The columns of `TICKETS`.
        now: The time of the claim, epoch ms.
    """

    def __init__(self, row: Row, now: int) -> None:
        self.ticket_ms, self.turn, self.name, running, marks, self.served_ms, *first = row
        self.use = Use(running, marks_of(marks))
        self.taken = 0
        has_due = first[0] is not None and first[1] <= now
        self.is_early = has_due and first[1] > self.ticket_ms
        if self.is_early:
            self.ticket_ms = first[1]
        self._rows: deque[Row] = deque([tuple(first)] if has_due else [])
        self._last: tuple[int, int] | None = None
        self._at_once = 1 if has_due else 0

    def __lt__(self, other: _Key) -> bool:
        """Return whether the key has its turn before another key."""
        return (self.ticket_ms, self.turn) < (other.ticket_ms, other.turn)

    def next_row(self, tables: Tables, queue: int) -> Row | None:
        """Return the next due message of the key. Read twice as many as before if there is none in memory."""
        if not self._rows and self._last is not None and self._at_once:
            size = self._at_once = min(2 * self._at_once, MOST_AT_ONCE)
            found = tables.execute(WAITING, (queue, self.name, *self._last, tables.now, size)).fetchall()
            self._rows.extend(found)
            if len(found) < size:
                self._at_once = 0
        if not self._rows:
            return None
        row = self._rows.popleft()
        self._last = row[1], row[0]
        return row


class LimitedHead(LaneHead):
    """Reads one lane with limits, key by key, in the order of their tickets.

    Each turn of a key gives one message. A key that has had its turn comes behind all other keys.

    Args:
        tables: The tables, in a transaction.
        limited: The limits of the lane.
        held: The paused addresses.
    """

    def __init__(self, tables: Tables, limited: LimitedLane, held: frozenset[str]) -> None:
        super().__init__(tables, limited.lane, held)
        self._limited, self._limits = limited, limited.limits
        self._whole = whole_use(tables.execute, limited.queue)
        self._tickets: Iterator[Row] | None = None
        self._ahead: _Key | None = None
        """The next key of `_tickets`."""
        self._early: list[_Key] = []
        """A heap of keys whose tickets in the table are too early."""
        self._behind: deque[_Key] = deque()
        """Keys that have had a turn in this claim."""
        self._turn = max(tables.next_n(0), limited.turn)
        self._key: _Key | None = None
        self._seen: dict[bytes, _Key] = {}
        """The keys whose rows change."""

    def _next(self) -> Entry | None:
        now = self._tables.now
        if self._is_full():
            return None
        while self._passed < MOST_PASSED and (key := self._next_key()) is not None:
            if rules.room(self._limits.each, key.use, now) != 0:
                while (row := key.next_row(self._tables, self._limited.queue)) is not None:
                    if (entry := self._deliverable(row)) is not None:
                        self._key = key
                        return entry
            self._seen[key.name] = key
            self._passed += 1
        return None

    def _is_full(self) -> bool:
        """Return whether the limit of the whole lane lets no message begin now."""
        return rules.room(self._limits.whole, self._whole, self._tables.now) == 0

    def _next_key(self) -> _Key | None:
        self._read_ahead()
        if self._early and (self._ahead is None or self._early[0] < self._ahead):
            return heappop(self._early)
        if self._ahead is None:
            return self._behind.popleft() if self._behind else None
        key, self._ahead = self._ahead, None
        return key

    def _read_ahead(self) -> None:
        """Read the next key of the table. If its ticket is too early, put the key where it belongs, and read on."""
        if self._tickets is None:
            self._tickets = self._tables.execute(TICKETS, (self._limited.queue, self._tables.now))
        while self._ahead is None and (row := next(self._tickets, None)) is not None:
            key = _Key(row, self._tables.now)
            if key.is_early:
                self._seen[key.name] = key
                heappush(self._early, key)
            else:
                self._ahead = key

    def take(self) -> None:
        super().take()
        key, now = self._key, self._tables.now
        if key is None:
            return
        key.use = rules.began(self._limits.each, key.use, 1, now)
        if self._limits.whole is not None:
            self._whole = rules.began(self._limits.whole, self._whole, 1, now)
        key.served_ms = now
        key.taken += 1
        self._seen[key.name] = key
        self._put_behind(key)

    def step_over(self) -> None:
        super().step_over()
        if self._key is not None:
            self._put_behind(self._key)

    def _put_behind(self, key: _Key) -> None:
        key.turn, self._turn = self._turn, self._turn + 1
        self._behind.append(key)

    def behind_ms(self) -> int | None:
        if (first := self.first()) is not None:
            return first.place_ms
        return self._ticket_after(self._tables.now)

    def next_ms(self) -> int | None:
        whole, now = self._limits.whole, self._tables.now
        if self._limited.filled is not None:
            return now
        if self._is_full():
            return rules.next_ms(whole, self._whole, now)
        return self._ticket_after(-1)

    def _ticket_after(self, after_ms: int) -> int | None:
        query = "SELECT ticket_ms FROM limited_keys WHERE queue = ? AND ticket_ms > ? ORDER BY ticket_ms LIMIT 1"
        found = self._tables.execute(query, (self._limited.queue, after_ms)).fetchone()
        return None if found is None else int(found[0])

    def close(self) -> None:
        self._tickets = iter(())
        super().close()
        limited, now, execute = self._limited, self._tables.now, self._tables.execute
        self._tables.executemany(
            """
            UPDATE limited_keys SET
                running = running + ?, marks = ?, served_ms = ?, free_ms = ?, turn = ?, most = ?, version = ?,
                place_ms = (
                    SELECT w.place_ms FROM limited AS w
                    WHERE w.queue = limited_keys.queue AND w.key = limited_keys.key ORDER BY w.place_ms LIMIT 1
                )
            WHERE queue = ? AND key = ?
            """,
            [
                (
                    key.taken,
                    marks_text(key.use.marks),
                    key.served_ms,
                    rules.next_ms(self._limits.each, key.use, now) or 0,
                    key.turn,
                    limited.most,
                    limited.version,
                    limited.queue,
                    key.name,
                )
                for key in self._seen.values()
            ],
        )
        if self.taken:
            query = "UPDATE limited_keys SET running = running + ?, marks = ? WHERE queue = ? AND key = ?"
            execute(query, (len(self.taken), marks_text(self._whole.marks), limited.queue, WHOLE))
            query = "UPDATE limits SET claimed_ms = ?, turn = ? WHERE lane = ?"
            execute(query, (now, self._turn, limited.lane))

    def _remove_taken(self) -> None:
        self._remove_each()
