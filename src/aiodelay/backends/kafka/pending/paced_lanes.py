"""`PacedLanes`: the order of lanes. It limits the rate at which long overdue messages leave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from aiodelay.core.dict_table.claims import LaneHeads
from aiodelay.core.dict_table.entries import IN_LANE, Entry, EntryHeap
from aiodelay.core.dict_table.table import DictTable
from aiodelay.core.values import Lane

from .rate_limit import OVERDUE_MS, PAUSE_MS, RateLimit

__all__ = ["PacedLanes"]


class PacedLanes:
    """`LaneOrder` that delays messages which are overdue for longer than `OVERDUE_MS`, to keep to a rate.

    Args:
        table: The messages.
        heads: Gives the order that messages have without a rate.
        pace: The rate, shared by all partitions of a store.
    """

    def __init__(self, table: DictTable, heads: LaneHeads, pace: RateLimit) -> None:
        self._table, self._heads, self._pace = table, heads, pace
        self._backlog: defaultdict[Lane, EntryHeap] = defaultdict(lambda: EntryHeap(IN_LANE))
        self._released: set[Entry] = set()

    def first_due(self, lanes: Sequence[Lane], now: int) -> Entry | None:
        if not self._pace.rate:
            return self._heads.first_due(lanes, now)
        self._release(now)
        while (entry := self._heads.first_due(lanes, now)) is not None and self._is_delayed(entry, now):
            lane = entry.record.envelope.lane
            self._table.lanes[lane].take_first()
            self._backlog[lane].push(entry.place_ms, entry)
        return entry

    def _is_delayed(self, entry: Entry, now: int) -> bool:
        """Say whether a message is long overdue and the rate does not allow it to leave yet."""
        return entry.place_ms < now - OVERDUE_MS and entry not in self._released

    def _release(self, now: int) -> None:
        """Put overdue messages back into their lanes, oldest first, as many as the rate allows."""
        first = self.overdue()
        if first is None:
            return
        self._released = {entry for entry in self._released if entry.state is IN_LANE}
        left = self._pace.take(now)
        while left and first is not None:
            self._put_back(first)
            self._released.add(first)
            left, first = left - 1, self.overdue()
        self._pace.give_back(left)

    def _put_back(self, first: Entry) -> None:
        lane = first.record.envelope.lane
        self._backlog[lane].pop()
        self._table.lanes[lane].add(first)

    def overdue(self) -> Entry | None:
        """Return the first message that the rate delays."""
        found = (entry for backlog in self._backlog.values() if (entry := backlog.first()) is not None)
        return min(found, key=lambda entry: entry.order, default=None)

    def release_all(self) -> None:
        """Put all messages that the rate delays back into their lanes."""
        while (overdue := self.overdue()) is not None:
            self._put_back(overdue)
        self._backlog.clear()

    def next_due_ms(self, lanes: Iterable[Lane], now: int) -> int | None:
        due_ms = self._heads.next_due_ms(lanes, now)
        if self.overdue() is None:
            return due_ms
        again_ms = now + PAUSE_MS
        return again_ms if due_ms is None else min(due_ms, again_ms)

    def oldest_ms(self, lane: Lane, now: int) -> int | None:
        oldest_ms, first = self._heads.oldest_ms(lane, now), self._backlog[lane].first()
        return oldest_ms if first is None else min(oldest_ms or now, first.place_ms)
