"""The limits of lanes: set, filled and checked in SQL. Triggers in `limits.sql` count.

The queue of a limited lane has a second form, the table `limited`, which orders the messages by key. The triggers keep
it up to date. Messages that were in the lane before its limits are *filled* in, in steps.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from sqlite3 import Cursor

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from aiodelay.core.limits import Marks, Use
from aiodelay.core.values import ADDRESS, NO_LIMITS, Envelope, Lane, LaneLimits

from .connection import LIMITS_SCRIPT, made_by
from .namespace import Namespace
from .rows import Row, object_text

__all__ = [
    "FEATURE",
    "WHOLE",
    "LimitedLane",
    "count_ended",
    "fill",
    "in_bulk",
    "limits_of",
    "marks_of",
    "marks_text",
    "prepare",
    "read_limits",
    "set_limits",
    "tidy_limits",
    "whole_use",
]

log: logging.Logger = logging.getLogger("aiodelay.sqlite")

FEATURE = "limits"
WHOLE = "lane"
"""The key of the row that counts the messages of the whole lane. The other keys are bytes."""
FILLED_AT_ONCE = 2_000
CHECKED_AT_ONCE = 10_000
STEP_BACK_MS = 1_000
"""If the last claim of a lane lies further ahead, the clock has stepped back."""
_NO_MOST = 1 << 31
_read = msgspec.json.Decoder(LaneLimits).decode
_read_marks = msgspec.json.Decoder(tuple[tuple[int, int], ...]).decode


class LimitedLane(Struct, frozen=True):
    """A lane that has limits.

    Attributes:
        lane: The number of the lane.
        limits: Its limits.
        queue: The number of its queue by key.
        most: The most messages of a key in flight.
        version: The number of the last change of the limits.
        filled: Messages up to this place and number are in the queue by key; None = all messages are.
        claimed_ms: When a claim last took a message, epoch ms.
        turn: A number above the turns that claims have given.
    """

    lane: int
    limits: LaneLimits
    queue: int
    most: int
    version: int
    filled: tuple[int, int] | None
    claimed_ms: int
    turn: int


def limits_of(text: str | None) -> LaneLimits:
    """Return the limits in a column of the table `limits`."""
    return NO_LIMITS if text is None else _read(text)


def marks_of(text: str | None) -> Marks:
    """Return the marks in a column of the table `limited_keys`."""
    return () if text is None else _read_marks(text)


def marks_text(marks: Marks) -> str | None:
    """Encode marks for their column."""
    return object_text(marks) if marks else None


def whole_use(execute: Callable[..., Cursor], queue: int) -> Use:
    """Return what the limit of a whole lane counts."""
    query = "SELECT running, marks FROM limited_keys WHERE queue = ? AND key = ?"
    running, marks = execute(query, (queue, WHOLE)).fetchone() or (0, None)
    return Use(running, marks_of(marks))


def read_limits(tables: Namespace) -> dict[int, LimitedLane]:
    """Return the lanes of the namespace that have limits, by number."""
    query = """
        SELECT lane, limits, queue, most, version, filled_ms, filled_n, claimed_ms, turn
        FROM limits WHERE ns = ? AND limits IS NOT NULL
    """
    return {row[0]: _lane_of(row) for row in tables.execute(query, (tables.ns,))}


def _lane_of(row: Row) -> LimitedLane:
    lane, limits, queue, most, version, filled_ms, filled_n, *claimed = row
    filled = None if filled_ms is None else (filled_ms, filled_n)
    return LimitedLane(lane, limits_of(limits), queue, most, version, filled, *claimed)


# --- counting in bulk -------------------------------------------------------------------------------------


@contextmanager
def in_bulk(tables: Namespace) -> Iterator[None]:
    """Within this block, no trigger counts the messages that leave a lane or end. The caller counts them."""
    query = "UPDATE limits SET in_bulk = ? WHERE ns = ? AND limits IS NOT NULL"
    tables.execute(query, (True, tables.ns))
    yield
    tables.execute(query, (False, tables.ns))  # A failure undoes the transaction.


def count_ended(tables: Namespace, limited: LimitedLane, ended: Sequence[Envelope]) -> None:
    """Count ended claims of a limited lane."""
    limits = limited.limits
    counts: Counter[bytes | str] = Counter([b""] * len(ended) if limits.each is None else map(limits.key_of, ended))
    if limits.whole is not None:
        counts[WHOLE] = len(ended)
    query = "UPDATE limited_keys SET running = max(running - ?, 0) WHERE queue = ? AND key = ?"
    tables.executemany(query, [(number, limited.queue, key) for key, number in counts.items()])


# --- changes ----------------------------------------------------------------------------------------------


def set_limits(tables: Namespace, lane: Lane, limits: LaneLimits, *, is_declared: bool) -> None:
    """Set the limits of a lane; see `Limits.set_limits`. The caller then calls `fill` until nothing is left."""
    query = "SELECT limits, declared, queue, counts, version FROM limits WHERE lane = ?"
    found = tables.execute(query, (tables.known_lane(lane),)).fetchone()
    before_text, declared, queue, counts, version = found or (None, None, 0, "", 0)
    if is_declared and limits_of(declared) == limits:
        return
    before, text = limits_of(before_text), object_text(limits) if limits else None
    declared = text if is_declared else declared
    if before == limits:
        tables.execute("UPDATE limits SET declared = ? WHERE lane = ?", (declared, tables.known_lane(lane)))
        return
    number, now_counts = tables.lane_number(lane), _counts(limits)
    whole = whole_use(tables.execute, queue)
    is_same_queue = bool(before) and bool(limits) and counts == now_counts
    if not is_same_queue:
        (queue,) = tables.execute("SELECT coalesce(max(queue), 0) + 1 FROM limits").fetchone()
    most = _NO_MOST if limits.each is None else limits.each.concurrency or _NO_MOST
    tables.execute(
        """
        INSERT INTO limits (lane, ns, limits, declared, queue, counts, most, version, filled_ms, filled_n)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, -1, 0)
        ON CONFLICT (lane) DO UPDATE SET
            limits = excluded.limits, declared = excluded.declared, queue = excluded.queue, counts = excluded.counts,
            most = excluded.most, version = excluded.version, filled_ms = -1, filled_n = 0
        """,
        (number, tables.ns, text, declared, queue, now_counts, most, version + 1),
    )
    tables.has_new = True
    if limits:
        tables.switch_on([FEATURE])
        _create_triggers(tables)
        _count_anew(tables, read_limits(tables)[number], whole.marks, is_new_queue=not is_same_queue)


def _counts(limits: LaneLimits) -> str:
    """Return what the limit of each key counts, as the column `counts` has it."""
    if limits.each is None:
        return ""
    return ADDRESS if limits.each.key == ADDRESS else "key"


def _create_triggers(tables: Namespace) -> None:
    """Create the triggers that count, unless the file has them.

    From then on, the file has the keys of superseded claims. An older claim gets the key of the newest version of its
    message.
    """
    known = {name for (name,) in tables.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")}
    triggers = made_by(LIMITS_SCRIPT)
    if triggers.keys() <= known:
        return
    for statement in triggers.values():
        tables.execute(statement)
    tables.execute("""
        INSERT INTO superseded_keys (ns, id, revision, lane, address, key)
        SELECT s.ns, s.id, s.revision, m.lane, m.address, m.key FROM superseded AS s JOIN messages AS m USING (ns, id)
    """)


def _count_anew(tables: Namespace, limited: LimitedLane, marks: Marks, *, is_new_queue: bool) -> None:
    """Count the messages in flight of a lane whose limits have changed."""
    running = _running(tables, limited)
    if is_new_queue:
        _set_running(tables, limited, running.items())
    if limited.limits.whole is None:
        tables.execute("DELETE FROM limited_keys WHERE queue = ? AND key = ?", (limited.queue, WHOLE))
    else:
        _set_running(tables, limited, [(WHOLE, running.total())])
        query = "UPDATE limited_keys SET marks = ? WHERE queue = ? AND key = ?"
        tables.execute(query, (marks_text(marks), limited.queue, WHOLE))


def _running(tables: Namespace, limited: LimitedLane) -> Counter[bytes]:
    """Count the messages in flight of each key."""
    query = """
        SELECT c.key FROM leases AS l CROSS JOIN counted AS c ON c.n = l.n WHERE l.ns = ?1 AND l.lane = ?2
        UNION ALL
        SELECT c.key FROM superseded AS s CROSS JOIN counted_superseded AS c USING (ns, id, revision)
        WHERE s.ns = ?1 AND c.queue = ?3
    """
    return Counter(key for (key,) in tables.execute(query, (tables.ns, limited.lane, limited.queue)))


def _set_running(tables: Namespace, limited: LimitedLane, running: Iterable[tuple[bytes | str, int]]) -> int:
    """Set the numbers of messages in flight of keys. Return how many were different."""
    query = """
        INSERT INTO limited_keys (queue, key, running, most, version, turn) VALUES (?, ?, ?, ?, ?, 0)
        ON CONFLICT (queue, key) DO UPDATE SET running = excluded.running WHERE running <> excluded.running
    """
    rows = [(limited.queue, key, number, limited.most, limited.version) for key, number in running]
    return tables.executemany(query, rows).rowcount if rows else 0


# --- steps ------------------------------------------------------------------------------------------------


def fill(tables: Namespace, limited: LimitedLane) -> LimitedLane:
    """Bring up to `FILLED_AT_ONCE` messages of the lane into the queue by key. Return the lane after that."""
    if limited.filled is None:
        return limited
    query = "SELECT lane, place_ms, n FROM queue WHERE lane = ? AND (place_ms, n) > (?, ?) ORDER BY place_ms, n LIMIT ?"
    rows = tables.execute(query, (limited.lane, *limited.filled, FILLED_AT_ONCE)).fetchall()
    # The trigger of an insert fills the row in. It also gives a new ticket to the key.
    tables.executemany("INSERT OR REPLACE INTO queue (lane, place_ms, n) VALUES (?, ?, ?)", rows)
    filled = rows[-1][1:] if len(rows) == FILLED_AT_ONCE else None
    query = "UPDATE limits SET filled_ms = ?, filled_n = ? WHERE lane = ?"
    tables.execute(query, (*(filled or (None, None)), limited.lane))
    return replace(limited, filled=filled)


def prepare(tables: Namespace, limited: LimitedLane) -> LimitedLane:
    """Prepare a lane for a claim. Return the lane after that."""
    if limited.claimed_ms > tables.now + STEP_BACK_MS:
        query = """
            UPDATE limited_keys SET served_ms = min(served_ms, ?1), free_ms = 0
            WHERE queue = ?2 AND (served_ms > ?1 OR free_ms > ?1)
        """
        tables.execute(query, (tables.now, limited.queue))
        tables.execute("UPDATE limits SET claimed_ms = ? WHERE lane = ?", (tables.now, limited.lane))
    return fill(tables, limited)


# --- housekeeping -----------------------------------------------------------------------------------------


def tidy_limits(tables: Namespace) -> None:
    """Do a bounded step of housekeeping: check the counts of some keys, and forget unused keys and old queues."""
    for limited in read_limits(tables).values():
        _check_counts(tables, limited)
    for table, columns in (("limited", "queue, key, place_ms, n"), ("limited_keys", "queue, key")):
        for queue in _old_queues(tables, table):
            of_queue = f"SELECT {columns} FROM {table} WHERE queue = ? LIMIT ?"
            tables.execute(f"DELETE FROM {table} WHERE ({columns}) IN ({of_queue})", (queue, CHECKED_AT_ONCE))


def _check_counts(tables: Namespace, limited: LimitedLane) -> None:
    """Compare the counts of the lane with its claims, and correct them. Forget unused keys.

    A step looks at all keys with claims, and at the next `CHECKED_AT_ONCE` of all keys.
    """
    running, after = _running(tables, limited), tables.checked_keys.pop(limited.queue, WHOLE)
    query = "SELECT key, running FROM limited_keys WHERE queue = ? AND key > ? ORDER BY key LIMIT ?"
    rows = tables.execute(query, (limited.queue, after, CHECKED_AT_ONCE)).fetchall()
    counts = [*running.items(), *((key, 0) for key, count in rows if count and key not in running)]
    if limited.limits.whole is not None:
        counts.append((WHOLE, running.total()))
    if _set_running(tables, limited, counts):
        tables.has_new = True  # there may be room
        lane = tables.lane_name(limited.lane)
        log.warning("the counts of messages in flight of the limited lane %s were wrong and are corrected", lane)
    if not rows:
        return
    last, span_ms = rows[-1][0], _span_ms(limited.limits)
    if len(rows) == CHECKED_AT_ONCE:
        tables.checked_keys[limited.queue] = last
    query = """
        DELETE FROM limited_keys
        WHERE queue = ? AND key > ? AND key <= ? AND running = 0 AND served_ms <= ? AND NOT EXISTS (
            SELECT 1 FROM limited AS w WHERE w.queue = limited_keys.queue AND w.key = limited_keys.key
        )
    """
    tables.execute(query, (limited.queue, after, last, tables.now - span_ms))


def _span_ms(limits: LaneLimits) -> int:
    """Return for how long the rate of a key counts a beginning."""
    window = None if limits.each is None else limits.each.window
    return 0 if window is None else window[1]


def _old_queues(tables: Namespace, table: str) -> Iterator[int]:
    """Return the queues in a table that no lane has any more."""
    used = {queue for (queue,) in tables.execute("SELECT queue FROM limits")}
    query = f"SELECT queue FROM {table} WHERE queue > ? ORDER BY queue LIMIT 1"
    found = tables.execute(query, (0,)).fetchone()
    while found is not None:
        if found[0] not in used:
            yield found[0]
        found = tables.execute(query, found).fetchone()
