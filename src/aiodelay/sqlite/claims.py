"""Claiming: looking at the heads of lanes first, then writing what was found there."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

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
MOST_ASIDE = 2_000
"""Most messages that a claim steps over: suspects that others try, or others among suspects."""
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
        self.has_aside = False
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
        self.has_aside = True
        self._is_read = False

    def next_ms(self) -> int | None:
        """Return the place of the first message behind those that were stepped over."""
        if (first := self.first()) is not None:
            return first.place_ms
        query = "SELECT place_ms FROM queue WHERE lane = ? AND place_ms > ? ORDER BY place_ms LIMIT 1"
        found = self._tables.execute(query, (self.lane, self._tables.now)).fetchone()
        return None if found is None else int(found[0])

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
        if self.has_aside:
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
    """A claim in the making: of a group of suspects, or of other messages.

    `max_lapses`: Most lapses of a message that it may take, if it does not begin with a suspect.
    `most_tried`: Gives the most suspects that it may take, if it begins with one.
    """

    groups: list[_Group]
    max_lapses: int
    most_tried: Callable[[], int]
    messages: int = 0
    bytes: int = 0
    is_trial: bool = False
    _most: int = 0
    _aside: int = 0

    def take(self) -> list[Entry]:
        """Take every group's equal share first, then what the others left."""
        for parts in (len(self.groups), 1):
            for group in self.groups:
                self._fill(group, parts)
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
            if not self._takes(entry.record):
                self._aside += 1
                if self._aside > MOST_ASIDE or (self.is_trial and self.messages == self._most > 0):
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

    def _takes(self, record: Record) -> bool:
        """Say whether a message may join: a message that has ended a process on its own is tried alone again."""
        is_suspect = t.is_suspect(record)
        if not self.messages:
            self.is_trial = is_suspect
            self._most = min(self.most_tried(), 1 if record.kills else MAX_CLAIM_MESSAGES) if is_suspect else 0
        if not self.is_trial:
            return record.lapses <= self.max_lapses and not is_suspect
        return is_suspect and self.messages < self._most and not (self.messages and record.kills)

    def _fits(self, size: int, group: _Group, share: int) -> bool:
        """Say whether there is room for one more; a group's first may exceed its demand."""
        if self.bytes + size > MAX_CLAIM_BYTES or group.bytes + size > share:
            return False
        return not group.taken or group.bytes + size <= group.demand.max_bytes


def claim(
    tables: Tables, demand: Mapping[Lane, Demand], *, worker: str, lease_ms: int, turn: int, number: int
) -> tuple[Claimed, list[int]]:
    """Lease due messages; the rules are those of the memory store.

    Args:
        tables: In a transaction.
        demand: By lane.
        worker: Who claims.
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
    max_lapses = min((each.max_lapses for each in demand.values()), default=0)
    taking = _Taking(groups[first:] + groups[:first], max_lapses, cache(lambda: _most_tried(tables, max_lapses)))
    entries = taking.take()
    heads = [head for group in groups for head in group.heads]
    has_tried = taking.is_trial and bool(entries)
    behind = {} if has_tried else {head.lane: head.next_ms() for head in heads if head.has_aside}
    for head in heads:
        head.close()
    if tables.series_changed:
        read = {entry.n: entry.record for entry in tables.entries(tables.series_changed)}
        for entry in entries:
            entry.record = read.get(entry.n, entry.record)
    token = t.token_for(tables.now + lease_ms, number)
    _lease(tables, entries, token)
    if has_tried:
        tables.begin_trial(entries, worker, lease_ms)
    claims = [Claim(entry.record, token) for entry in entries]
    return Claimed(claims, tables.now, _next_due_ms(tables, groups, behind)), [entry.n for entry in entries]


def _most_tried(tables: Tables, max_lapses: int) -> int:
    may_try = max_lapses >= t.SUSPECT_LAPSES and not tables.is_trying()
    return tables.search().most if may_try else 0


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
    if tables.keeps_journal:
        for entry in entries:
            tables.note("claimed", entry.record)


def _next_due_ms(tables: Tables, groups: Sequence[_Group], behind: Mapping[int, int | None]) -> int | None:
    """Return when something may be claimed in the lanes that were asked for: a due time or the end of a lease.

    Args:
        tables: In a transaction.
        groups: The lanes with their demand.
        behind: By lane, the place of the first message behind those that were stepped over, which are looked for once a
            second.
    """
    heads = [head for group in groups for head in group.heads]
    places = [behind[head.lane] if head.lane in behind else tables.head_ms(head.lane, head.held) for head in heads]
    found = [ms for ms in places if ms is not None] + [tables.now + t.TRIAL_MS] * bool(behind)
    lanes = {lane for group in groups for lane in group.lanes}
    if lanes:
        in_doubt, (least, _) = tables.in_doubt(), t.tokens_held(tables.now)
        leases = tables.execute("SELECT token, lane, n FROM leases WHERE ns = ? ORDER BY token", (tables.ns,))
        token = next(
            (token for token, lane, n in leases if lane in lanes and not (token < least and n in in_doubt)), None
        )
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
    return Claimed(held, tables.now, _next_due_ms(tables, groups, {}))


def return_lapsed(tables: Tables, limit: int) -> int:
    """Put back what was claimed and not settled in time, at most `limit`; return how many there were."""
    least, too_long = t.tokens_held(tables.now)
    in_doubt = tables.in_doubt()
    query = "SELECT n FROM leases WHERE ns = ? AND token < ? ORDER BY token LIMIT ?"
    over = tables.execute(query, (tables.ns, least, limit + len(in_doubt)))
    numbers = [n for (n,) in over if n not in in_doubt][:limit]
    query = "SELECT n FROM leases WHERE ns = ? AND token >= ? ORDER BY token LIMIT ?"
    ahead = [n for (n,) in tables.execute(query, (tables.ns, too_long, limit - len(numbers)))]
    if ahead and tables.is_righting_over():
        numbers += ahead
    for entry in tables.entries(numbers):
        _lapse(tables, entry)
    return len(numbers)


def _lapse(tables: Tables, entry: Entry) -> None:
    is_tried = tables.is_tried(entry)
    record: Record | str = t.after_lapse(entry.record, is_tried=is_tried, has_died=tables.has_died(entry))
    if is_tried and not entry.record.alone:
        tables.note_death()
    if isinstance(record, Record):
        tables.note_lapse(entry, record)
    tables.unplace(entry)
    if isinstance(record, str):
        tables.bury(replace(entry.record, kills=t.KILLS_TO_DEATH, alone=False), "killed_worker")
        tables.forget(entry)
    elif record.no_retry:
        tables.note("dropped", record, "cancelled in flight")
        tables.forget(entry)
    else:
        tables.move(entry, record, entry.place_ms, n=entry.n if is_tried else None)
        tables.note("lapsed", record)
