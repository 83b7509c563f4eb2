"""`LimitedHead`: the messages of a lane with limits for one claim. The keys of the lane take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import groupby
from operator import itemgetter

from aiodelay.core import limits as rules
from aiodelay.core.limits import Use
from aiodelay.core.values import Limit

from .entry import Entry
from .lane_heads import MOST_PASSED, LaneHead
from .limits import WHOLE, LimitedLane, in_bulk, marks_of, marks_text, whole_use
from .rows import ROW, Row
from .tables import Tables

__all__ = ["LimitedHead"]

TICKETS = f"""
    SELECT k.ticket_ms, k.turn, k.key, k.running, k.marks, k.served_ms, {ROW}
    FROM limited_keys AS k LEFT JOIN messages AS m ON m.n IN (
        SELECT w.n FROM limited AS w WHERE w.queue = k.queue AND w.key = k.key ORDER BY w.place_ms, w.n LIMIT ?
    )
    WHERE k.queue = ? AND k.ticket_ms <= ? ORDER BY k.ticket_ms, k.turn
"""
WAITING = f"""
    SELECT {ROW} FROM limited AS w CROSS JOIN messages AS m ON m.n = w.n
    WHERE w.queue = ? AND w.key = ? AND (w.place_ms, w.n) > (?, ?) AND w.place_ms <= ?
    ORDER BY w.place_ms, w.n LIMIT ?
"""
SERVED = """
    UPDATE limited_keys SET
        running = running + ?, marks = ?, served_ms = ?, free_ms = ?, turn = ?, most = ?, version = ?,
        place_ms = (
            SELECT w.place_ms FROM limited AS w
            WHERE w.queue = limited_keys.queue AND w.key = limited_keys.key ORDER BY w.place_ms LIMIT 1
        )
    WHERE queue = ? AND key = ?
"""
MOST_AT_ONCE = 128
LARGE, IN_TURN = 200, 4
"""A claim of `LARGE` messages or more takes up to `IN_TURN` messages of a key in its turn.

A key costs more than a message, and messages of the same key are on the same pages of the file.
"""
_NO_LIMIT = 1 << 31
_place = itemgetter(1, 0)


class _Key:
    """A key of the lane, as one claim sees it.

    Args:
        rows: Rows of `TICKETS`: the key, with its first messages in any order.
        at_once: The most messages that `rows` may have.
        each: The limit of each key.
        now: The time of the claim, epoch ms.
    """

    __slots__ = (
        "_at_once",
        "_last",
        "_rows",
        "is_early",
        "last",
        "name",
        "room",
        "served_ms",
        "taken",
        "ticket_ms",
        "turn",
        "use",
    )

    def __init__(self, rows: Sequence[Row], at_once: int, each: Limit | None, now: int) -> None:
        self.ticket_ms, self.turn, self.name, running, marks, self.served_ms = rows[0][:6]
        self.use = Use(running, marks_of(marks))
        self.room = _room(each, self.use, now)
        self.taken = 0
        self.last: Entry | None = None
        due = [row[6:] for row in rows if row[6] is not None and row[7] <= now]
        if len(due) > 1:
            due.sort(key=_place)
        self.is_early = bool(due) and due[0][1] > self.ticket_ms
        if self.is_early:
            self.ticket_ms = due[0][1]
        self._rows = deque(due)
        self._last: Row | None = None
        self._at_once = at_once if len(due) == at_once else 0

    def __lt__(self, other: _Key) -> bool:
        """Return whether the key has its turn before another key."""
        return (self.ticket_ms, self.turn) < (other.ticket_ms, other.turn)

    def next_rows(self, tables: Tables, queue: int) -> Iterator[Row]:
        """Return the next due messages of the key. Read twice as many as before when none is in memory."""
        while True:
            if not self._rows and self._at_once and self._last is not None:
                size = self._at_once = min(2 * self._at_once, MOST_AT_ONCE)
                place = self._last[1], self._last[0]
                found = tables.execute(WAITING, (queue, self.name, *place, tables.now, size)).fetchall()
                self._rows.extend(found)
                if len(found) < size:
                    self._at_once = 0
            if not self._rows:
                return
            self._last = row = self._rows.popleft()
            yield row


class LimitedHead(LaneHead):
    """Reads one lane with limits, key by key, in the order of their tickets.

    Each turn of a key gives one message, or a few if the claim is large. A key that has had its turn comes behind all
    other keys.

    Args:
        tables: The tables, in a transaction.
        limited: The limits of the lane.
        held: The paused addresses.
        messages: The most messages that the claim takes from the lane.
    """

    def __init__(self, tables: Tables, limited: LimitedLane, held: frozenset[str], messages: int) -> None:
        super().__init__(tables, limited.lane, held)
        self._limited, self._limits = limited, limited.limits
        self._in_turn = IN_TURN if messages >= LARGE else 1
        self._whole = whole_use(tables.execute, limited.queue)
        self._room = _room(self._limits.whole, self._whole, tables.now)
        """The number of messages that the limit of the whole lane lets begin."""
        self._tickets: Iterator[_Key] | None = None
        self._ahead: _Key | None = None
        """The next key of `_tickets`."""
        self._early: list[_Key] = []
        """A heap of keys whose tickets in the table are too early."""
        self._behind: deque[_Key] = deque()
        """Keys that have had a turn in this claim."""
        self._first_turn = max(tables.next_n(0), limited.turn)
        self._turns: list[tuple[_Key, int]] = []
        """The turns of keys in this claim: the key, and how many messages the claim had taken before."""
        self._seen: dict[bytes, _Key] = {}
        """The keys whose rows change."""

    def _due(self) -> Iterator[Entry]:
        tables, queue, deliverable = self._tables, self._limited.queue, self._deliverable
        taken, turns = self.taken, self._turns
        while len(taken) < self._room and self._passed < MOST_PASSED and (key := self._next_key()) is not None:
            before = len(taken)
            left = most = min(self._in_turn, key.room, self._room - before)
            for row in key.next_rows(tables, queue) if left else ():
                if (entry := deliverable(row)) is None:
                    continue
                if left == most:
                    turns.append((key, before))
                left -= 1
                yield entry
                if not left:
                    break
            if left == most:
                self._seen[key.name] = key
                self._passed += 1
            else:
                key.room -= len(taken) - before
                self._behind.append(key)

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
            self._tickets = self._read_keys()
        while self._ahead is None and (key := next(self._tickets, None)) is not None:
            if key.is_early:
                self._seen[key.name] = key
                heappush(self._early, key)
            else:
                self._ahead = key

    def _read_keys(self) -> Iterator[_Key]:
        now, each, at_once = self._tables.now, self._limits.each, self._in_turn
        rows = self._tables.execute(TICKETS, (at_once, self._limited.queue, now))
        for _, found in groupby(rows, itemgetter(2)):
            yield _Key(list(found), at_once, each, now)

    def behind_ms(self) -> int | None:
        if (first := self.first()) is not None:
            return first.place_ms
        return self._ticket_after(self._tables.now)

    def next_ms(self) -> int | None:
        whole, now = self._limits.whole, self._tables.now
        if self._limited.filled is not None:
            return now
        if len(self.taken) >= self._room:
            return rules.next_ms(whole, self._whole, now)
        return self._ticket_after(-1)

    def _ticket_after(self, after_ms: int) -> int | None:
        query = "SELECT ticket_ms FROM limited_keys WHERE queue = ? AND ticket_ms > ? ORDER BY ticket_ms LIMIT 1"
        found = self._tables.execute(query, (self._limited.queue, after_ms)).fetchone()
        return None if found is None else int(found[0])

    def close(self) -> None:
        self._tickets = None
        self._count_turns()
        super().close()
        limited, now, each, execute = self._limited, self._tables.now, self._limits.each, self._tables.execute
        rows: list[Row] = []
        for key in self._seen.values():
            if key.taken:
                key.use, key.served_ms = rules.began(each, key.use, key.taken, now), now
            free_ms = rules.next_ms(each, key.use, now) or 0
            counts = key.taken, marks_text(key.use.marks), key.served_ms, free_ms, key.turn
            rows.append((*counts, limited.most, limited.version, limited.queue, key.name))
        self._tables.executemany(SERVED, rows)
        if self.taken:
            if self._limits.whole is not None:
                self._whole = rules.began(self._limits.whole, self._whole, len(self.taken), now)
            query = "UPDATE limited_keys SET running = running + ?, marks = ? WHERE queue = ? AND key = ?"
            execute(query, (len(self.taken), marks_text(self._whole.marks), limited.queue, WHOLE))
            query = "UPDATE limits SET claimed_ms = ?, turn = ? WHERE lane = ?"
            execute(query, (now, self._first_turn + len(self._turns), limited.lane))

    def _count_turns(self) -> None:
        """Count the messages that the keys have got in their turns. The last turn may have no message."""
        ends = [*(before for _, before in self._turns[1:]), len(self.taken)]
        for turn, ((key, before), end) in enumerate(zip(self._turns, ends, strict=False), self._first_turn):
            if end > before or turn < self._first_turn + len(ends) - 1:
                key.turn = turn
            if end > before:
                key.taken += end - before
                key.last = self.taken[end - 1]
                self._seen[key.name] = key

    def _remove_taken(self) -> None:
        if self.has_aside or self._late or self._unreadable or self._parked:
            self._remove_each()  # the triggers remove the messages from the queues of their keys
            return
        queue = self._limited.queue
        places = [(queue, key.name, last.place_ms, last.n) for key in self._seen.values() if (last := key.last)]
        with in_bulk(self._tables):
            self._remove_each()
            query = "DELETE FROM limited WHERE queue = ? AND key = ? AND (place_ms, n) <= (?, ?)"
            self._tables.executemany(query, places)


def _room(limit: Limit | None, use: Use, now_ms: int) -> int:
    room = rules.room(limit, use, now_ms)
    return _NO_LIMIT if room is None else room
