"""Claiming: looking at the heads of lanes first, then writing what was found there."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from aiodelay import transitions as t
from aiodelay.errors import RecordFormatError
from aiodelay.model import (
    MAX_CLAIM_BYTES,
    MAX_CLAIM_MESSAGES,
    Claim,
    Claimed,
    Demand,
    Lane,
    Record,
)

from .rows import ROW, careful_record_of, object_text, record_of, salvaged
from .tables import Entry, Tables

__all__ = ["ClaimCounter", "claim", "claim_again", "return_lapsed"]

HEAD = f"""
    SELECT {ROW} FROM queue AS q CROSS JOIN messages AS m ON m.n = q.n
    WHERE q.lane = ? AND q.place_ms <= ? ORDER BY q.place_ms, q.n
"""
MOST_PASSED = 10_000
"""Most held messages that a claim moves out of a lane's way, or a tenth as many that it ends; the next one goes on."""


class ClaimCounter:
    """Keeps the tokens of claims made in one instant apart.

    Each process starts anywhere. Should two meet, a claim is still told apart by the message's number, which changes
    whenever a message returns to its lane.
    """

    def __init__(self) -> None:
        self._last = int.from_bytes(os.urandom(2), "big")

    def next(self) -> int:
        """Return the next number."""
        self._last += 1
        return self._last


class _Head:
    """Reads one lane from its head on, and notes what has to leave it; nothing is written before `close`.

    What a SELECT sees of rows that are written while it is read would be left open.
    """

    def __init__(self, tables: Tables, lane: int, held: frozenset[str]) -> None:
        self.lane, self.held = lane, held
        self.taken: list[Entry] = []
        self._aside = False
        self._late: list[Entry] = []
        self._parked: list[Entry] = []
        self._unreadable: list[Entry] = []
        self._tables = tables
        self._rows: Iterator[Entry] | None = None
        self._first: Entry | None = None
        self._is_read = False

    def first(self) -> Entry | None:
        """Return the first message that is due and neither held nor late, left where it is.

        Nothing is read ahead of need: what is late behind it is none of this claim's business.
        """
        if not self._is_read:
            if self._rows is None:
                self._rows = self._due()
            self._first = next(self._rows, None)
            self._is_read = True
        return self._first

    def _due(self) -> Iterator[Entry]:
        now, lane, held = self._tables.now, self._tables.lane_name(self.lane), self.held
        read = careful_record_of if self._tables.careful else record_of
        passed = 0
        for row in self._tables.execute(HEAD, (self.lane, now)):
            try:
                record = read(row, lane)
            except RecordFormatError:
                self._unreadable.append(Entry(row[0], row[1], row[2], salvaged(row, lane)))
                passed += 10
            else:
                entry = Entry(row[0], row[1], row[2], record)
                if held and record.envelope.address in held:
                    self._parked.append(entry)
                    passed += 1
                elif record.late and t.ends_by_itself(record, now):
                    self._late.append(entry)
                    passed += 10
                else:
                    yield entry
            if passed >= MOST_PASSED:
                return

    def take(self) -> None:
        """Take what `first` has returned."""
        if self._first is not None:
            self.taken.append(self._first)
            self._is_read = False

    def step_over(self) -> None:
        """Leave where it is what `first` has returned, and look behind it next."""
        self._aside = True
        self._is_read = False

    def close(self) -> None:
        """End reading; take what was taken or passed out of the queue, and carry out what passing it means."""
        self._rows = iter(())
        tables = self._tables
        for entry in self._unreadable:
            tables.unplace(entry)
            tables.bury(entry.record, "undecodable")
            tables.forget(entry)
        for entry in self._late:
            tables.expire(entry)
        tables.park([(entry.lane, entry.record.envelope.address, entry.place_ms, entry.n) for entry in self._parked])
        if not self.taken:
            return
        if self._aside:
            tables.executemany(
                "DELETE FROM queue WHERE lane = ? AND place_ms = ? AND n = ?",
                [(self.lane, entry.place_ms, entry.n) for entry in self.taken],
            )
        else:
            last = self.taken[-1]
            query = "DELETE FROM queue WHERE lane = ? AND (place_ms, n) <= (?, ?)"
            tables.execute(query, (self.lane, last.place_ms, last.n))


@dataclass(slots=True)
class _Group:
    """What one demand gets of a claim: messages of its lane and of the lane's aliases."""

    demand: Demand
    lanes: list[int]
    heads: list[_Head]
    taken: list[Entry] = field(default_factory=list)
    bytes: int = 0

    def earliest(self) -> _Head | None:
        """Return the head at which the earliest message stands."""
        standing = [(first.place_ms, first.n, i) for i, head in enumerate(self.heads) if (first := head.first())]
        return self.heads[min(standing)[2]] if standing else None


@dataclass(slots=True)
class _Taking:
    """A claim in the making."""

    groups: list[_Group]
    messages: int = 0
    bytes: int = 0
    alone: Entry | None = None

    def take(self) -> list[Entry]:
        """Take every group's equal share first, then what the others left; or one suspect, alone."""
        for parts in (len(self.groups), 1):
            for group in self.groups:
                if self.alone is None:
                    self._fill(group, parts)
        if self.alone is not None:
            return [self.alone]
        return [entry for group in self.groups for entry in group.taken]

    def _fill(self, group: _Group, parts: int) -> None:
        """Take a group's messages, up to one of `parts` equal shares of a claim."""
        most = min(group.demand.messages, max(1, MAX_CLAIM_MESSAGES // parts))
        taken, share = group.taken, MAX_CLAIM_BYTES // parts
        only = group.heads[0] if len(group.heads) == 1 else None
        while len(taken) < most and self.messages < MAX_CLAIM_MESSAGES:
            head = only or group.earliest()
            entry = None if head is None else head.first()
            if head is None or entry is None:
                return
            if entry.record.lapses and t.is_suspect(entry.record):
                if not self.messages:
                    self.alone = entry
                    head.take()
                    return
                head.step_over()
                continue
            size = entry.record.envelope.size
            if self.messages and not self._fits(size, group, share):
                return
            head.take()
            taken.append(entry)
            group.bytes += size
            self.messages += 1
            self.bytes += size

    def _fits(self, size: int, group: _Group, share: int) -> bool:
        """Say whether there is room for one more; a group's first may exceed its demand."""
        if self.bytes + size > MAX_CLAIM_BYTES or group.bytes + size > share:
            return False
        return not group.taken or group.bytes + size <= group.demand.max_bytes


def claim(
    tables: Tables, demand: Mapping[Lane, Demand], *, lease_ms: int, turn: int, number: int
) -> tuple[Claimed, list[int]]:
    """Lease due messages; the rules are those of the memory store.

    Args:
        tables: In a transaction.
        demand: By lane.
        lease_ms: How long.
        turn: Says whose turn it is to be served first.
        number: The claim's, for its token.

    Returns:
        The answer, and the numbers of its messages, in the same order.
    """
    return_lapsed(tables, MAX_CLAIM_MESSAGES)
    holds = tables.holds()
    groups = [_group(tables, lane, each, holds) for lane, each in demand.items() if each.messages > 0]
    first = turn % len(groups) if groups else 0
    entries = _Taking(groups[first:] + groups[:first]).take()
    for head in (head for group in groups for head in group.heads):
        head.close()
    if tables.series_changed:
        read = {entry.n: entry.record for entry in tables.entries(tables.series_changed)}
        for entry in entries:
            entry.record = read.get(entry.n, entry.record)
    token = t.token_for(tables.now + lease_ms, number)
    _lease(tables, entries, token)
    claims = [Claim(entry.record, token) for entry in entries]
    return Claimed(claims, tables.now, _next_due_ms(tables, groups)), [entry.n for entry in entries]


def _group(tables: Tables, lane: Lane, demand: Demand, holds: Mapping[int, Collection[str | None]]) -> _Group:
    numbers = [number for name in (lane, *demand.aliases) if (number := tables.known_lane(name))]
    held = {number: holds.get(number, ()) for number in numbers}
    heads = [
        _Head(tables, number, frozenset(address for address in held[number] if address is not None))
        for number in numbers
        if None not in held[number]
    ]
    return _Group(demand, numbers, heads)


def _lease(tables: Tables, entries: Sequence[Entry], token: int) -> None:
    """Write the leases of what left the queue; one statement per lane, a third of the cost of one per message."""
    by_lane: dict[int, list[int]] = {}
    for entry in entries:
        by_lane.setdefault(entry.lane, []).append(entry.n)
    for lane, numbers in by_lane.items():
        query = "INSERT INTO leases (n, ns, lane, token) SELECT value, ?, ?, ? FROM json_each(?)"
        tables.execute(query, (tables.ns, lane, token, object_text(numbers)))
    if len(entries) == 1 and t.is_suspect(entries[0].record):
        tables.execute("UPDATE messages SET alone = 1 WHERE n = ?", (entries[0].n,))
        entries[0].record = replace(entries[0].record, alone=True)
    if tables.keeps_journal:
        for entry in entries:
            tables.note("claimed", entry.record)


def _next_due_ms(tables: Tables, groups: Sequence[_Group]) -> int | None:
    """Return when something may be claimed in the lanes that were asked for: a due time or the end of a lease."""
    found = [ms for group in groups for head in group.heads if (ms := tables.head_ms(head.lane, head.held)) is not None]
    lanes = {lane for group in groups for lane in group.lanes}
    if lanes:
        leases = tables.execute("SELECT token, lane FROM leases WHERE ns = ? ORDER BY token", (tables.ns,))
        token = next((token for token, lane in leases if lane in lanes), None)
        found += [] if token is None else [t.token_deadline_ms(token)]
    return min(found, default=None)


def claim_again(
    tables: Tables, demand: Mapping[Lane, Demand], claims: Sequence[Claim], numbers: Sequence[int]
) -> Claimed:
    """Answer the repetition of a claim: what it leased, as far as it still is."""
    standing = {entry.n: entry for entry in tables.entries(numbers)}
    held = [
        Claim(standing[n].record, claim.token)
        for claim, n in zip(claims, numbers, strict=True)
        if n in standing and standing[n].token == claim.token
    ]
    holds = tables.holds()
    groups = [_group(tables, lane, each, holds) for lane, each in demand.items() if each.messages > 0]
    return Claimed(held, tables.now, _next_due_ms(tables, groups))


def return_lapsed(tables: Tables, limit: int) -> int:
    """Put back what was claimed and not settled in time, at most `limit`; return how many there were."""
    least, too_long = t.tokens_held(tables.now)
    query = "SELECT n FROM leases WHERE ns = ? AND token < ? ORDER BY token LIMIT ?"
    numbers = [n for (n,) in tables.execute(query, (tables.ns, least, limit))]
    query = "SELECT n FROM leases WHERE ns = ? AND token >= ? ORDER BY token LIMIT ?"
    ahead = [n for (n,) in tables.execute(query, (tables.ns, too_long, limit - len(numbers)))]
    if ahead and tables.is_righting_over():
        numbers += ahead
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
