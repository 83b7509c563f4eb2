"""`Horizon`: brings far messages of a partition near, when they are due soon or when a call needs them.

A message due later than the horizon is far: the index knows only its offset, due time and lane. A near message is
decoded and in memory.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from aiokafka.errors import KafkaError

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client import reason_of
from aiodelay.backends.kafka.pending.pending_index import PendingIndex
from aiodelay.backends.kafka.records import Read
from aiodelay.core.values import Lane, LaneCounts, LoadBucket, Query, Snapshot
from aiodelay.errors import StoreUnavailableError
from aiodelay.ports.clock import Clock

__all__ = ["Horizon"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

BATCH = 2_000

Fetch = Callable[[Sequence[int]], Awaitable[list[Read]]]


class Horizon:
    """Brings the far messages of one partition near.

    Args:
        index: Returns the partition's current index.
        fetch: Reads records of the partition by offset.
        clock: The clock of the store.
        on_near: Called when messages have come near. Some may have to be written again.
        ms: The horizon: a message that is due within this many ms from now is near.
        name: The name of the cluster, for errors.
    """

    def __init__(
        self,
        index: Callable[[], PendingIndex],
        fetch: Fetch,
        clock: Clock,
        *,
        on_near: Callable[[], None],
        ms: int,
        name: str,
    ) -> None:
        self._index, self._fetch, self._clock, self._on_near = index, fetch, clock, on_near
        self._ms, self._name = ms, name
        self._lock = asyncio.Lock()
        self._asked = set[bytes]()
        self._was_brought: asyncio.Event | None = None
        """Is set when one call of `bring` ends its read; None = no call reads."""

    def set(self) -> None:
        """Tell the index the due time up to which messages are near from now on."""
        self._index().far.look_ahead(self._clock.now_ms() + self._ms)

    @property
    def is_behind(self) -> bool:
        """Whether far messages may be due already."""
        index = self._index()
        return bool(index.state.far) and index.state.edge_ms <= self._clock.now_ms()

    async def follow(self) -> bool:
        """Bring messages near that are now within the horizon, earliest first. Return False if there were none.

        Do nothing until a quarter of the horizon has passed since the last time.

        Raises:
            StoreUnavailableError: The messages cannot be read.
        """
        if not self._index().state.far or self._index().state.edge_ms > self._clock.now_ms() + self._ms * 3 // 4:
            return False
        async with self._lock:
            index, until_ms = self._index(), self._clock.now_ms() + self._ms
            index.far.look_ahead(until_ms)
            index.far.put_off()
            found: list[tuple[int, int, Lane]] = []
            for rows in index.state.far.due(to_ms=until_ms):
                found += rows
                await asyncio.sleep(0)
            found.sort()
            for i in range(0, len(found), BATCH):
                if index is not self._index():
                    return False
                await self._bring(index, [offset for _, offset, _ in found[i : i + BATCH]])
            index.state.edge_ms = until_ms
            return bool(found)

    async def bring(self, message_ids: Iterable[str]) -> None:
        """Bring these messages near, if they are far. Concurrent calls read their records together.

        The end of a read wakes all calls at once. If they went on one after the other, `follow` could put their
        messages off again before the last of them had seen that its message is near.

        Raises:
            StoreUnavailableError: The messages cannot be read.
        """
        keys = set(map(records.key_of, message_ids))
        while far := {key for key in keys if self._index().state.far.find(key) is not None}:
            self._asked |= far
            if self._was_brought is None:
                await self._bring_asked()
            else:
                await self._was_brought.wait()

    async def _bring_asked(self) -> None:
        """Bring the messages near that calls of `bring` ask for, and wake these calls."""
        was_brought = self._was_brought = asyncio.Event()
        try:
            await asyncio.sleep(0)  # lets the other calls ask that run at the same time
            index, asked, self._asked = self._index(), self._asked, set()
            offsets = [row.offset for key in asked if (row := index.state.far.find(key)) is not None]
            for i in range(0, len(offsets), BATCH):
                await self._bring(index, offsets[i : i + BATCH])
        finally:
            self._was_brought = None
            was_brought.set()

    async def get(self, message_id: str) -> Snapshot | None:
        """Return a message, near or far.

        Raises:
            StoreUnavailableError: The message cannot be read.
        """
        while (row := (index := self._index()).state.far.find(records.key_of(message_id))) is not None:
            read = await self._read([row.offset])
            if found := index.far.peek(read):
                return found[0]
            # The record is gone, replaced, or cannot be decoded. Taking it in corrects the index.
            self._take_in(index, [row.offset], read)
        return self._index().inspection.get(message_id, self._clock.now_ms())

    async def search(self, query: Query) -> Sequence[Snapshot]:
        """List messages, near and far, in the order of their next attempt, then of their id.

        Raises:
            StoreUnavailableError: The far messages cannot be read.
        """
        index = self._index()
        from_ms = max(query.from_ms or 0, query.after[0] if query.after else 0)
        to_ms = (1 << 62) if query.to_ms is None else query.to_ms
        first: list[tuple[int, int, Lane]] = []
        for rows in index.state.far.due(from_ms=from_ms, to_ms=to_ms, lanes=query.lanes):
            first = _earliest(first + rows, query.limit)
            await asyncio.sleep(0)
        found = index.inspection.search(query, self._clock.now_ms())
        for i in range(0, len(first), BATCH):
            read = await self._read([offset for _, offset, _ in first[i : i + BATCH]])
            found = heapq.nsmallest(query.limit, found + index.far.peek(read, query), key=_by_place)
        return found

    def series(self, after: str | None, limit: int) -> Sequence[Snapshot]:
        """List recurring messages in the order of their ids. The index keeps all of them near."""
        return self._index().inspection.series(after, limit, self._clock.now_ms())

    async def counts(self) -> Mapping[Lane, LaneCounts]:
        """Count messages and dead letters by lane and state."""
        index = self._index()
        return index.far.with_far(index.inspection.counts(self._clock.now_ms()))

    async def load(self, *, bucket_ms: int, buckets: int) -> Sequence[LoadBucket]:
        """Count the messages that become due from now on, by span and lane. Far due times are exact to the second."""
        index, now = self._index(), self._clock.now_ms()
        found: Counter[tuple[int, Lane]] = Counter()
        for each in index.inspection.load(bucket_ms, buckets, now):
            found[(each.from_ms - now) // bucket_ms, each.lane] += each.messages
        for rows in index.state.far.due(from_ms=now, to_ms=now + bucket_ms * buckets - 1):
            found.update((max(due - now, 0) // bucket_ms, lane) for due, _, lane in rows)
            await asyncio.sleep(0)
        return [LoadBucket(now + bucket * bucket_ms, lane, n) for (bucket, lane), n in sorted(found.items())]

    async def _bring(self, index: PendingIndex, offsets: Sequence[int]) -> None:
        self._take_in(index, offsets, await self._read(offsets))

    def _take_in(self, index: PendingIndex, offsets: Sequence[int], found: Sequence[Read]) -> None:
        """Let the index decode the found records, and forget the messages whose records no longer exist."""
        for read in found:
            index.come_near(read)
        self._on_near()
        missing = set(offsets) - {read.offset for read in found}
        if missing and (n := index.state.far.forget(missing)):
            log.error("%s: the records of %d messages no longer exist: they were deleted or cut off", index.name, n)

    async def _read(self, offsets: Sequence[int]) -> list[Read]:
        try:
            return await self._fetch(offsets)
        except (KafkaError, TimeoutError, OSError) as error:
            raise StoreUnavailableError(self._name, reason_of(error, "Read")) from error


def _earliest(rows: list[tuple[int, int, Lane]], limit: int) -> list[tuple[int, int, Lane]]:
    """Return the first `limit` rows, and all rows that are due in the same second as the last of them."""
    if len(rows) <= limit:
        return rows
    last = heapq.nsmallest(limit, rows)[-1][0]
    return [row for row in rows if row[0] <= last]


def _by_place(found: Snapshot) -> tuple[int, str]:
    return found.next_attempt_ms, found.record.id
