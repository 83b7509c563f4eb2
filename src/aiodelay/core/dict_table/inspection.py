"""`DictInspection`: reads a `DictTable` without changing it, and pauses and resumes its lanes."""

from __future__ import annotations

import heapq
from collections import Counter

from aiodelay.core.values import (
    DeadLetter,
    Instance,
    Lane,
    LaneCounts,
    LimitedKey,
    LoadBucket,
    Query,
    Snapshot,
    State,
)

from .claims import DictClaiming
from .entries import IN_LANE, Entry
from .limited_queue import LimitedQueue
from .table import SERVED_WINDOW_MS, DictTable

__all__ = ["DictInspection"]


class DictInspection:
    """Snapshots, counts, dead letters and pauses of a table. `now` is the table's time, epoch ms."""

    def __init__(self, table: DictTable, claiming: DictClaiming) -> None:
        self._table, self._claiming = table, claiming

    # --- messages -----------------------------------------------------------------------------------------

    def get(self, message_id: str, now: int) -> Snapshot | None:
        """Return a message that is pending or in flight."""
        entry = self._table.entries.get(message_id)
        return None if entry is None else self.snapshot(entry, now)

    def snapshot(self, entry: Entry, now: int) -> Snapshot:
        """Return a message with its state."""
        lane = self._table.lanes[entry.record.envelope.lane]
        if entry.token:
            state = State.IN_FLIGHT
        elif lane.is_paused(entry) or lane.parks(entry):
            state = State.HELD
        else:
            state = State.OVERDUE if entry.place_ms <= now else State.SCHEDULED
        return Snapshot(entry.record, state, entry.place_ms)

    def search(self, query: Query, now: int) -> list[Snapshot]:
        """List messages, ordered by (next attempt, id)."""
        found = (
            entry
            for entry in self._table.entries.values()
            if (not query.lanes or entry.record.envelope.lane in query.lanes)
            and (query.from_ms is None or entry.place_ms >= query.from_ms)
            and (query.to_ms is None or entry.place_ms < query.to_ms)
            and (query.after is None or _by_place(entry) > query.after)
        )
        return [self.snapshot(entry, now) for entry in heapq.nsmallest(query.limit, found, key=_by_place)]

    def series(self, after: str | None, limit: int, now: int) -> list[Snapshot]:
        """List recurring messages, ordered by id."""
        recurring = self._table.recurring
        ids = heapq.nsmallest(limit, (each for each in recurring if after is None or each > after))
        return [self.snapshot(recurring[each], now) for each in ids]

    def counts(self, now: int) -> dict[Lane, LaneCounts]:
        """Count messages and dead letters by lane and state."""
        table = self._table
        entries = table.entries.values()
        found = Counter((entry.record.envelope.lane, self.snapshot(entry, now).state.value) for entry in entries)
        found.update((letter.record.envelope.lane, "dead") for letter in table.letters)
        return {
            lane: LaneCounts(
                **{state: found[lane, state] for state in ("scheduled", "overdue", "in_flight", "held", "dead")},
                read_by_nobody=not table.workers.serve(lane, now),
            )
            for lane in sorted({lane for lane, _ in found})
        }

    def load(self, bucket_ms: int, buckets: int, now: int) -> list[LoadBucket]:
        """Count the messages that become due in each span of `bucket_ms` from now on, by lane."""
        found = Counter(
            ((entry.place_ms - now) // bucket_ms, entry.record.envelope.lane)
            for entry in self._table.entries.values()
            if not entry.token and now <= entry.place_ms < now + bucket_ms * buckets
        )
        return [LoadBucket(now + bucket * bucket_ms, lane, found[bucket, lane]) for bucket, lane in sorted(found)]

    def dead_letters(
        self, lane: Lane | None, message_id: str | None, after: tuple[int, str, int] | None, limit: int
    ) -> list[DeadLetter]:
        """List dead letters, oldest first."""
        letters = self._table.letters
        found = (
            letter
            for letter in (letters if message_id is None else letters.of(message_id))
            if lane in (None, letter.record.envelope.lane) and (after is None or _by_death(letter) > after)
        )
        return heapq.nsmallest(limit, found, key=_by_death)

    def instances(self, now: int) -> list[Instance]:
        """List live workers."""
        alive_ms = now - SERVED_WINDOW_MS
        found = [Instance(each.name, tuple(sorted(each.lanes)), each.seen_ms) for each in self._table.workers]
        return sorted((each for each in found if each.seen_ms > alive_ms), key=lambda each: each.name)

    def limited_keys(self, lane: Lane, limit: int, key: bytes | None, now: int) -> list[LimitedKey]:
        """List keys of a limited lane, or only one key, most waiting messages first."""
        queue = self._table.lanes[lane]
        if not isinstance(queue, LimitedQueue):
            return []
        waiting = (entry for entry in self._table.of_lane(lane) if entry.state is IN_LANE)
        found = (each for each in queue.limited_keys(waiting, now) if key in (None, each.key))
        return heapq.nsmallest(limit, found, key=lambda each: (-each.waiting, -each.running, each.key or b""))

    # --- pause and resume ---------------------------------------------------------------------------------

    def paused(self) -> list[tuple[Lane, str | None]]:
        """List paused lanes and addresses."""
        found: list[tuple[Lane, str | None]] = []
        for name, lane in sorted(self._table.lanes.items()):
            found += [(name, None)] if lane.is_held else []
            found += [(name, address) for address in sorted(lane.held)]
        return found

    def pause(self, lane: Lane, address: str | None) -> None:
        """Pause a lane, or one address of the lane."""
        if address is None:
            self._table.lanes[lane].is_held = True
        else:
            self._table.lanes[lane].held.add(address)

    def resume(self, lane: Lane, address: str | None) -> None:
        """Resume a lane, or one address of the lane."""
        if address is None:
            self._table.lanes[lane].is_held = False
        else:
            self._table.lanes[lane].release(address)
        self._claiming.recheck_released()
        self._table.workers.wake()


def _by_place(entry: Entry) -> tuple[int, str]:
    return entry.place_ms, entry.record.id


def _by_death(letter: DeadLetter) -> tuple[int, str, int]:
    return letter.at_ms, letter.record.id, letter.record.revision
