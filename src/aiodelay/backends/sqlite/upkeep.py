"""The write operations of housekeeping, pauses and dead letters. Each function runs in a transaction of the writer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from aiodelay.core import transitions as t
from aiodelay.core.values import DeadKey, Lane, LaneState, Outcome, PutBack, Stored, Tidied

from .claims import return_lapsed
from .forgetting import purge_answers, purge_ended
from .limits import FEATURE, tidy_limits
from .rows import object_text
from .tables import Tables

__all__ = [
    "SERVED_WINDOW_MS",
    "leave",
    "pause",
    "purge",
    "put_back",
    "redrive",
    "resume",
    "serve",
    "served_lanes",
    "tidy",
    "unpark",
]

SERVED_WINDOW_MS = 60_000
"""The time in ms for which a worker counts as alive after its last housekeeping."""
PURGE_FACTOR = 8
UNPARKED_AT_ONCE = 5_000
_read_lanes = msgspec.json.Decoder(list[str]).decode


# --- housekeeping -----------------------------------------------------------------------------------------


def tidy(tables: Tables, worker: str, lanes: Collection[Lane], limit: int) -> Tidied:
    """Do one bounded step of housekeeping for all lanes. Return how much the step did, and the state of the lanes."""
    serve(tables, worker, lanes)
    lapsed = return_lapsed(tables, limit)
    expired = _expire_late(tables, limit)
    tables.superseded.forget(limit)
    _purge_memory(tables, limit * PURGE_FACTOR)
    _unpark_released(tables)
    if FEATURE in tables.features:
        tidy_limits(tables)
    return Tidied(tables.now, lapsed, expired, _lane_states(tables))


def _lane_states(tables: Tables) -> list[LaneState]:
    """Return the state of every lane that has messages."""
    served, paused = served_lanes(tables), tables.paused()
    leased = {lane for (lane,) in tables.execute("SELECT DISTINCT lane FROM leases WHERE ns = ?", (tables.ns,))}
    states: list[LaneState] = []
    for number, lane in tables.lanes():
        held = paused.get(number, set())
        head_ms = None if None in held else tables.head_ms(number, {address for address in held if address is not None})
        is_empty = head_ms is None and number not in leased and not _has_held(tables, number)
        if not is_empty:
            oldest = head_ms if head_ms is not None and head_ms <= tables.now else None
            states.append(LaneState(lane, oldest, lane in served))
    return states


def _has_held(tables: Tables, lane: int) -> bool:
    query = "SELECT EXISTS (SELECT 1 FROM queue WHERE lane = ?) OR EXISTS (SELECT 1 FROM parked WHERE lane = ?)"
    return bool(tables.execute(query, (lane, lane)).fetchone()[0])


def _expire_late(tables: Tables, limit: int) -> int:
    """End late messages, also in lanes that no worker serves. Return how many messages ended.

    Messages of a paused lane or address stay until the lane or address is resumed.
    """
    query = """
        SELECT m.n FROM messages AS m
        WHERE m.ns = ? AND m.late > 0 AND m.expires_ms < ? AND m.place_ms <= ? AND m.rule IS NULL
        AND NOT EXISTS (SELECT 1 FROM leases AS l WHERE l.n = m.n)
        AND NOT EXISTS (SELECT 1 FROM ended AS e WHERE e.ns = m.ns AND e.n = m.n)
        AND NOT EXISTS (
            SELECT 1 FROM holds AS h WHERE h.lane = m.lane AND (h.address IS NULL OR h.address = m.address)
        ) LIMIT ?
    """
    numbers = [n for (n,) in tables.execute(query, (tables.ns, tables.now, tables.now, limit))]
    late = [entry for entry in tables.entries(numbers) if t.ends_by_itself(entry.record, tables.now)]
    for entry in late:
        tables.rules.expire(entry, tables.now)
    return len(late)


def _purge_memory(tables: Tables, limit: int) -> None:
    """Delete ended messages, answers, tombstones and workers when they need no longer be remembered."""
    purge_ended(tables, limit)
    purge_answers(tables, limit)
    tables.execute(
        "DELETE FROM tombstones WHERE ns = ? AND id IN"
        " (SELECT id FROM tombstones WHERE ns = ? AND until_ms <= ? ORDER BY until_ms LIMIT ?)",
        (tables.ns, tables.ns, tables.now, limit),
    )
    query = "DELETE FROM workers WHERE ns = ? AND seen_ms <= ?"
    tables.execute(query, (tables.ns, tables.now - SERVED_WINDOW_MS))


def serve(tables: Tables, worker: str, lanes: Collection[Lane]) -> None:
    """Record that a worker is alive and serves these lanes."""
    tables.execute(
        "INSERT OR REPLACE INTO workers (ns, worker, lanes, seen_ms) VALUES (?, ?, ?, ?)",
        (tables.ns, worker, object_text(sorted(lanes)), tables.now),
    )


def leave(tables: Tables, worker: str) -> None:
    """Delete the row of a worker that stops."""
    tables.execute("DELETE FROM workers WHERE ns = ? AND worker = ?", (tables.ns, worker))


def served_lanes(tables: Tables) -> set[Lane]:
    """Return the lanes that live workers serve."""
    query = "SELECT lanes FROM workers WHERE ns = ? AND seen_ms > ?"
    rows = tables.execute(query, (tables.ns, tables.now - SERVED_WINDOW_MS))
    return {lane for (lanes,) in rows for lane in _read_lanes(lanes)}


# --- pauses -----------------------------------------------------------------------------------------------


def pause(tables: Tables, lane: Lane, address: str | None) -> bool:
    """Pause a lane, or one address of the lane. Return True if the call changed the state."""
    number = tables.lane_number(lane)
    query = "SELECT 1 FROM holds WHERE lane = ? AND address IS ?"
    if tables.execute(query, (number, address)).fetchone():
        return False
    tables.execute("INSERT INTO holds (lane, address) VALUES (?, ?)", (number, address))
    return True


def resume(tables: Tables, lane: Lane, address: str | None) -> bool:
    """Resume a lane, or one address of the lane. Return True if the call changed the state.

    The call does not return parked messages to the lane. `unpark` returns them.
    """
    tables.has_new = True
    query = "DELETE FROM holds WHERE lane = ? AND address IS ?"
    return tables.execute(query, (tables.known_lane(lane), address)).rowcount > 0


def unpark(tables: Tables, lane: Lane, address: str) -> bool:
    """Return up to `UNPARKED_AT_ONCE` parked messages of an address to the queue. Return True if there may be more."""
    return _unpark(tables, tables.known_lane(lane), address) == UNPARKED_AT_ONCE


def _unpark(tables: Tables, lane: int, address: str) -> int:
    head = "SELECT place_ms, n FROM parked WHERE lane = ? AND address = ? ORDER BY place_ms, n LIMIT ?"
    places = tables.execute(head, (lane, address, UNPARKED_AT_ONCE)).fetchall()
    if places:
        tables.has_new = True
        tables.executemany(
            "INSERT INTO queue (lane, place_ms, n) VALUES (?, ?, ?)", [(lane, *place) for place in places]
        )
        query = "DELETE FROM parked WHERE lane = ? AND address = ? AND (place_ms, n) <= (?, ?)"
        tables.execute(query, (lane, address, *places[-1]))
    return len(places)


def _unpark_released(tables: Tables) -> None:
    """Move parked messages of addresses that are no longer paused back to the queue.

    Such messages are left if a process ended during a resume.
    """
    at: tuple[int, str] | None = (0, "")
    query = "SELECT lane, address FROM parked WHERE (lane, address) > (?, ?) ORDER BY lane, address LIMIT 1"
    held = "SELECT 1 FROM holds WHERE lane = ? AND address = ?"
    while at is not None and (at := tables.execute(query, at).fetchone()) is not None:
        if not tables.execute(held, at).fetchone():
            _unpark(tables, *at)


# --- dead letters -----------------------------------------------------------------------------------------


def redrive(tables: Tables, keys: Sequence[DeadKey]) -> list[Outcome]:
    """Schedule dead letters again. Return one outcome for each key, in the order of the keys."""
    return [tables.rules.redrive(key, tables.now) for key in keys]


def purge(tables: Tables, keys: Sequence[DeadKey]) -> int:
    """Delete dead letters. Return how many of them were deleted."""
    return sum(tables.letters.remove(key) for key in keys)


def put_back(tables: Tables, messages: Sequence[PutBack]) -> list[Stored]:
    """Store messages that had left the store. Return one outcome for each message, in order."""
    return [tables.rules.put_back(message, tables.now) for message in messages]
