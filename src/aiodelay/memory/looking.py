"""What operators see and do: look into the store, hold lanes, handle dead letters, read the journal."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice

from aiodelay import transitions as t
from aiodelay.errors import UnsupportedByStoreError
from aiodelay.model import (
    DeadKey,
    DeadLetter,
    Instance,
    JournalEntry,
    Lane,
    LaneCounts,
    LoadBucket,
    Outcome,
    PutBack,
    Query,
    Refused,
    Snapshot,
    State,
    Stored,
)

from .journal_reader import MemoryTrail
from .tables import SERVED_WINDOW_MS, Tables
from .waiting import Entry

__all__ = ["Looking"]


class Looking(Tables):
    """`Inspectable`, `Instances`, `Holds`, `DeadLetters`, `PutsBack`, `Journal` and `Followed`."""

    # --- messages -----------------------------------------------------------------------------------------

    async def get(self, message_id: str) -> Snapshot | None:
        """Return a message that is pending or in flight."""
        entry = self._entries.get(message_id)
        return None if entry is None else self._snapshot(entry, self.now_ms())

    def _snapshot(self, entry: Entry, now: int) -> Snapshot:
        lane = self._lanes[entry.record.envelope.lane]
        if entry.token:
            state = State.IN_FLIGHT
        elif lane.holds(entry) or lane.parks(entry):
            state = State.HELD
        else:
            state = State.OVERDUE if entry.place_ms <= now else State.SCHEDULED
        return Snapshot(entry.record, state, entry.place_ms)

    async def search(self, query: Query) -> Sequence[Snapshot]:
        """List messages by (next attempt, id)."""
        now = self.now_ms()
        found = (
            entry
            for entry in self._entries.values()
            if (not query.lanes or entry.record.envelope.lane in query.lanes)
            and (query.from_ms is None or entry.place_ms >= query.from_ms)
            and (query.to_ms is None or entry.place_ms < query.to_ms)
            and (query.after is None or _by_place(entry) > query.after)
        )
        return [self._snapshot(entry, now) for entry in heapq.nsmallest(query.limit, found, key=_by_place)]

    async def series(self, *, after: str | None = None, limit: int = 100) -> Sequence[Snapshot]:
        """List recurring messages by id."""
        now = self.now_ms()
        ids = heapq.nsmallest(limit, (each for each in self._recurring if after is None or each > after))
        return [self._snapshot(self._recurring[each], now) for each in ids]

    async def counts(self) -> Mapping[Lane, LaneCounts]:
        """Count messages and dead letters by lane and state."""
        now = self.now_ms()
        found = Counter((e.record.envelope.lane, self._snapshot(e, now).state.value) for e in self._entries.values())
        found.update((letter.record.envelope.lane, "dead") for letter in self._dead)
        return {
            lane: LaneCounts(
                **{state: found[lane, state] for state in ("scheduled", "overdue", "in_flight", "held", "dead")},
                read_by_nobody=not self._is_served(lane, now),
            )
            for lane in sorted({lane for lane, _ in found})
        }

    async def load(self, *, bucket_ms: int, buckets: int) -> Sequence[LoadBucket]:
        """Count what comes due from now on, by span and lane."""
        now = self.now_ms()
        found = Counter(
            ((entry.place_ms - now) // bucket_ms, entry.record.envelope.lane)
            for entry in self._entries.values()
            if not entry.token and now <= entry.place_ms < now + bucket_ms * buckets
        )
        return [LoadBucket(now + bucket * bucket_ms, lane, found[bucket, lane]) for bucket, lane in sorted(found)]

    async def position(self, source: str) -> int | None:
        """Return an intake's position."""
        return self._positions.get(source)

    # --- holds --------------------------------------------------------------------------------------------

    async def hold(self, lane: Lane, address: str | None = None) -> bool:
        """Pause a lane or an address of it."""
        if (lane, address) in await self.holds():
            return False
        self._hold(lane, address)
        return True

    def _hold(self, lane: Lane, address: str | None) -> None:
        if address is None:
            self._lanes[lane].is_held = True
        else:
            self._lanes[lane].held.add(address)

    async def release(self, lane: Lane, address: str | None = None) -> bool:
        """Resume a lane or an address of it."""
        if (lane, address) not in await self.holds():
            return False
        self._release(lane, address)
        return True

    def _release(self, lane: Lane, address: str | None) -> None:
        if address is None:
            self._lanes[lane].is_held = False
        else:
            self._lanes[lane].release(address)
        for entry in self._expiring_held:
            self._expiring.push(max(entry.place_ms, entry.record.expires_ms + 1), entry)
        self._expiring_held.clear()
        self._wake()

    async def holds(self) -> Sequence[tuple[Lane, str | None]]:
        """List what is held."""
        found: list[tuple[Lane, str | None]] = []
        for name, lane in sorted(self._lanes.items()):
            found += [(name, None)] if lane.is_held else []
            found += [(name, address) for address in sorted(lane.held)]
        return found

    async def instances(self) -> Sequence[Instance]:
        """List live workers."""
        alive_ms = self.now_ms() - SERVED_WINDOW_MS
        found = [Instance(each.name, tuple(sorted(each.lanes)), each.seen_ms) for each in self._workers]
        return sorted((each for each in found if each.seen_ms > alive_ms), key=lambda each: each.name)

    # --- dead letters -------------------------------------------------------------------------------------

    async def dead_letters(
        self,
        *,
        lane: Lane | None = None,
        message_id: str | None = None,
        after: tuple[int, str, int] | None = None,
        limit: int = 100,
    ) -> Sequence[DeadLetter]:
        """List dead letters, oldest first."""
        found = (
            letter
            for letter in (self._dead if message_id is None else self._dead.of(message_id))
            if lane in (None, letter.record.envelope.lane) and (after is None or _by_death(letter) > after)
        )
        return heapq.nsmallest(limit, found, key=_by_death)

    async def redrive(self, keys: Sequence[DeadKey]) -> Sequence[Outcome]:
        """Give dead letters a new life."""
        now = self.now_ms()
        return [self._redrive(key, now) for key in keys]

    def _redrive(self, key: DeadKey, now: int) -> Outcome:
        letter = self._dead.get(key)
        if letter is None:
            return Refused("not_found")
        series, due_ms = self._series_of(key.id)
        if key.id in self._entries or (series is not None and series.record.due_ms == due_ms):
            return Refused("exists")
        if series is not None:
            series.record = t.joined(series.record, due_ms)
        last = max(key.revision, self._revisions.get(key.id, now) or 0)
        record = t.redriven(letter.record, t.NO_OP, t.next_revision(now, last), now)
        self._dead.remove(key)
        self._insert(record, now)
        self._note("redriven", record, now)
        return Stored("stored", record.revision, record.due_ms)

    async def purge(self, keys: Sequence[DeadKey]) -> int:
        """Delete dead letters."""
        return sum(self._dead.remove(key) for key in keys)

    # --- what comes back ----------------------------------------------------------------------------------

    async def put_back(self, messages: Sequence[PutBack]) -> Sequence[Stored]:
        """Store messages that had left."""
        now = self.now_ms()
        return [self._put_back(message, now) for message in messages]

    def _put_back(self, message: PutBack, now: int) -> Stored:
        record = message.record
        if message.reason is not None:
            is_new = self._dead.get(DeadKey(record.id, record.revision)) is None
            if is_new:
                self._bury(record, message.reason, now)
            return Stored("stored" if is_new else "kept", record.revision, record.due_ms)
        entry = self._entries.get(record.id)
        if entry is not None:
            return Stored("kept", entry.record.revision, entry.record.due_ms)
        self._insert(record, t.retry_place(record, message.due_ms))
        self._note("again", record, now, record.last_error or "")
        return Stored("stored", record.revision, record.due_ms)

    # --- journal ------------------------------------------------------------------------------------------

    async def journal(
        self, *, message_id: str | None = None, after: int = 0, limit: int = 100
    ) -> Sequence[JournalEntry]:
        """List the trail of outcomes."""
        found = (e for e in self._kept_journal() if e.number > after and message_id in (None, e.id))
        return list(islice(found, limit))

    @asynccontextmanager
    async def trail(self) -> AsyncIterator[MemoryTrail]:
        """Open the journal alone."""
        yield MemoryTrail(self._kept_journal())

    def _kept_journal(self) -> deque[JournalEntry]:
        if self._journal is None:
            raise UnsupportedByStoreError("journal", "off", "MemoryStore(journal=1000) or 'memory://?journal=1000'")
        return self._journal


def _by_place(entry: Entry) -> tuple[int, str]:
    return entry.place_ms, entry.record.id


def _by_death(letter: DeadLetter) -> tuple[int, str, int]:
    return letter.at_ms, letter.record.id, letter.record.revision
