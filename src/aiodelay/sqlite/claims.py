"""Claiming: looking at the heads of lanes first, then writing what was found there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from .. import transitions as t
from ..errors import RecordFormatError
from ..model import (
    MAX_CLAIM_BYTES,
    MAX_CLAIM_MESSAGES,
    MAX_LEASE_MS,
    Claim,
    Claimed,
    Demand,
    Lane,
    LateAction,
    Record,
)
from .rows import ROW, object_text
from .tables import Entry, Tables

__all__ = ["LeaseCounter", "claim", "expire", "return_lapsed", "still_leased"]

MOST_PASSED = 1_000
"""Most late, held or unreadable messages that one claim moves out of a lane's way; the next one goes on."""
HEAD = f"""
    SELECT {ROW} FROM queue AS q CROSS JOIN messages AS m ON m.n = q.n
    WHERE q.lane = ? AND q.place_ms <= ? ORDER BY q.place_ms, q.n
"""  # noqa: S608 - columns only


class LeaseCounter:
    """Keeps tokens of one instant apart. Processes start anywhere, and a claim is fenced by its number as well."""

    def __init__(self) -> None:
        self._next = int.from_bytes(os.urandom(2), "big")

    def take(self, n: int) -> int:
        """Return the first of `n` counters."""
        first = self._next
        self._next += n
        return first


class _Head:
    """Reads one lane from its head on, and notes what has to leave it; nothing is written before `close`.

    Writing while a SELECT of the same table is being read would leave open what it sees.
    """

    def __init__(self, tables: Tables, lane: int, held: frozenset[str]) -> None:
        self.lane = lane
        self.taken: list[Entry] = []
        self.suspects: list[Entry] = []
        self.late: list[Entry] = []
        self.held: list[Entry] = []
        self.unreadable: list[Entry] = []
        self._tables = tables
        self._held_addresses = held
        self._cursor = tables.execute(HEAD, (lane, tables.now))
        self._rows = self._claimable()
        self.next = next(self._rows, None)

    def _claimable(self) -> Iterator[Entry]:
        now, record_of, held = self._tables.now, self._tables.record_of, self._held_addresses
        passed = 0
        for row in self._cursor:
            try:
                record = record_of(row)
            except RecordFormatError:
                self.unreadable.append(Entry(row[0], row[1], row[2], self._tables.salvaged(row)))
                passed += 1
            else:
                entry = Entry(row[0], row[1], row[2], record)
                if held and record.envelope.address in held:
                    self.held.append(entry)
                    passed += 1
                elif record.late and t.is_late(record, now) and record.envelope.rule is None:
                    self.late.append(entry)
                    passed += 1
                elif record.lapses and t.is_suspect(record):
                    self.suspects.append(entry)
                    passed += 1
                else:
                    yield entry
            if passed >= MOST_PASSED:
                return

    def take(self, entry: Entry) -> None:
        """Count `next` as taken and look at the one behind it."""
        self.taken.append(entry)
        self.next = next(self._rows, None)

    def close(self) -> None:
        """End reading."""
        self._rows.close()  # type: ignore[attr-defined]
        self._cursor.close()


def claim(
    tables: Tables, demand: Mapping[Lane, Demand], *, lease_ms: int, rotation: int, counter: LeaseCounter
) -> tuple[Claimed, list[Entry]]:
    """Lease due messages; the rules are those of `MemoryStore.claim`.

    Returns:
        The answer, and the entries behind its claims, in the same order.
    """
    return_lapsed(tables, MAX_CLAIM_MESSAGES)
    wanted = [(lane, each) for lane, each in demand.items() if each.messages > 0]
    turn = rotation % len(wanted) if wanted else 0
    wanted = wanted[turn:] + wanted[:turn]
    holds = _holds(tables)
    groups: list[list[_Head]] = []
    lanes: list[int] = []
    for lane, each in wanted:
        numbers = [n for name in (lane, *each.aliases) if (n := tables.known_lane(name))]
        lanes += numbers
        groups.append([
            _Head(tables, n, holds.get(n, _NOTHING)) for n in numbers if None not in holds.get(n, _NOTHING)
        ])
    heads = [head for group in groups for head in group]
    suspect = next((head.suspects[0] for head in heads if head.suspects), None)
    taken: list[Entry] = []
    if suspect is None:
        taken = _take(groups, [each for _, each in wanted])
    for head in heads:
        head.close()
        _clear(tables, head)
    claims = [_lease_alone(tables, suspect)] if suspect is not None else taken
    tokens = _lease(tables, claims, t.token_for(tables.now + lease_ms, 0), counter.take(len(claims)))
    answer = [Claim(entry.record, token) for entry, token in zip(claims, tokens, strict=True)]
    return Claimed(answer, tables.now, _next_due(tables, lanes, [head.lane for head in heads])), claims


_NOTHING: frozenset[str | None] = frozenset()


def _holds(tables: Tables) -> dict[int, frozenset[str | None]]:
    found: dict[int, set[str | None]] = {}
    for lane, address in tables.execute("SELECT lane, address FROM holds"):
        found.setdefault(lane, set()).add(address)
    return {lane: frozenset(addresses) for lane, addresses in found.items()}


def _take(groups: Sequence[Sequence[_Head]], limits: Sequence[Demand]) -> list[Entry]:
    """Give every group its share first, then what the others left, in rotation."""
    taken: list[list[Entry]] = [[] for _ in groups]
    sizes = [0] * len(groups)
    for share in (len(groups), 1):
        for i, (group, limit) in enumerate(zip(groups, limits, strict=True)):
            used, used_bytes = (len(taken[i]), sizes[i]) if share > 1 else (sum(map(len, taken)), sum(sizes))
            room = min(limit.messages - len(taken[i]), MAX_CLAIM_MESSAGES // share - used)
            room_bytes = min(limit.max_bytes - sizes[i], MAX_CLAIM_BYTES // share - used_bytes)
            for head in group:
                while room > 0 and (entry := head.next) is not None:
                    size = entry.record.envelope.size
                    if size > room_bytes and any(taken):
                        room = 0
                        break
                    taken[i].append(entry)
                    head.take(entry)
                    sizes[i] += size
                    room, room_bytes = room - 1, room_bytes - size
    return [entry for entries in taken for entry in entries]


# --- writing ----------------------------------------------------------------------------------------------


def _clear(tables: Tables, head: _Head) -> None:
    """Take what was claimed or passed out of the queue, and carry out what passing it means."""
    for entry in head.unreadable:
        tables.unplace(entry)
        tables.bury(entry.record, "undecodable")
        tables.forget(entry)
    for entry in head.late:
        expire(tables, entry)
    if head.held:
        _park(tables, head.held)
    if not head.taken:
        return
    if head.suspects:  # they stay in between
        tables.executemany(
            "DELETE FROM queue WHERE lane = ? AND place_ms = ? AND n = ?",
            [(head.lane, entry.place_ms, entry.n) for entry in head.taken],
        )
    else:
        last = head.taken[-1]
        query = "DELETE FROM queue WHERE lane = ? AND (place_ms, n) <= (?, ?)"
        tables.execute(query, (head.lane, last.place_ms, last.n))


def _park(tables: Tables, held: Sequence[Entry]) -> None:
    for entry in held:
        tables.unplace(entry)
    tables.executemany(
        "INSERT INTO parked (lane, address, place_ms, n) VALUES (?, ?, ?, ?)",
        [(entry.lane, entry.record.envelope.address, entry.place_ms, entry.n) for entry in held],
    )


def _lease_alone(tables: Tables, suspect: Entry) -> Entry:
    tables.unplace(suspect)
    tables.execute("UPDATE messages SET alone = 1 WHERE n = ?", (suspect.n,))
    suspect.record = replace(suspect.record, alone=True)
    return suspect


def _lease(tables: Tables, entries: Sequence[Entry], base: int, first: int) -> list[int]:
    """Write the leases of what left the queue; return a token each.

    One statement per lane: binding 500 rows one by one costs three times as much.
    """
    if not entries:
        return []
    by_lane: dict[int, list[int]] = {}
    for i, entry in enumerate(entries):
        by_lane.setdefault(entry.lane, []).append(i)
    tokens = [0] * len(entries)
    for lane, places in by_lane.items():
        numbers = object_text([entries[i].n for i in places])
        tables.execute(
            "INSERT INTO leases (n, ns, lane, token) SELECT value, ?, ?, ? + (? + key) % 4096 FROM json_each(?)",
            (tables.ns, lane, base, first, numbers),
        )
        for key, i in enumerate(places):
            tokens[i] = base + (first + key) % 4096
        first += len(places)
    if tables.keeps_journal:
        tables.notes([("claimed", entry.record, "") for entry in entries])
    return tokens


def _next_due(tables: Tables, lanes: Sequence[int], free: Sequence[int]) -> int | None:
    """Return the earliest place left in lanes that are not held, or end of a lease in any of the lanes."""
    query = "SELECT place_ms FROM queue WHERE lane = ? ORDER BY place_ms LIMIT 1"
    found = [row[0] for lane in free for row in tables.execute(query, (lane,))]
    if lanes:
        query = "SELECT token, lane FROM leases WHERE ns = ? ORDER BY token"
        served = set(lanes)
        tokens = (token for token, lane in tables.execute(query, (tables.ns,)) if lane in served)
        earliest = next(tokens, None)
        found += [] if earliest is None else [t.token_deadline_ms(earliest)]
    return min(found, default=None)


def still_leased(tables: Tables, claims: Sequence[Claim], entries: Sequence[Entry]) -> Claimed:
    """Answer a repeated claim: what is still held of the first answer."""
    query = "SELECT n, token FROM leases WHERE n IN (SELECT value FROM json_each(?))"
    held = set(tables.execute(query, (object_text([entry.n for entry in entries]),)))
    left = [c for c, entry in zip(claims, entries, strict=True) if (entry.n, c.token) in held]
    return Claimed(left, tables.now, tables.now)


# --- what ends without a settlement -----------------------------------------------------------------------


def return_lapsed(tables: Tables, limit: int) -> int:
    """Return messages to their lanes whose leases are over, at most `limit`; return how many there were."""
    over = t.token_for(tables.now + 1, 0), t.token_for(tables.now + MAX_LEASE_MS + 1, 0)
    query = "SELECT n FROM leases WHERE ns = ? AND token < ? ORDER BY token LIMIT ?"
    numbers = [n for (n,) in tables.execute(query, (tables.ns, over[0], limit))]
    query = "SELECT n FROM leases WHERE ns = ? AND token >= ? ORDER BY token LIMIT ?"
    numbers += [n for (n,) in tables.execute(query, (tables.ns, over[1], limit - len(numbers)))]
    if not numbers:
        return 0
    for entry in tables.entries(numbers):
        _lapse(tables, entry)
    return len(numbers)


def _lapse(tables: Tables, entry: Entry) -> None:
    tables.unplace(entry)
    record: Record | str = t.after_lapse(entry.record)
    if isinstance(record, str):
        tables.bury(replace(entry.record, kills=t.KILLS_TO_DEATH, alone=False), "killed_worker")
        tables.forget(entry)
    elif record.no_retry:
        tables.note("dropped", record, "cancelled in flight")
        tables.forget(entry)
    else:
        tables.move(entry, record, entry.place_ms)
        tables.note("lapsed", record)


def expire(tables: Tables, entry: Entry) -> None:
    """Carry out a late message's policy."""
    tables.unplace(entry)
    if entry.record.late is LateAction.DEAD_LETTER:
        tables.bury(entry.record, "late")
    else:
        tables.note("dropped", entry.record, "late")
    tables.forget(entry)
