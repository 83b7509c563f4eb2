"""`Inspection`: inspects the partitions that this process owns, and redrives or purges their dead letters."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from aiodelay.core.values import DeadKey, DeadLetter, Lane, LaneCounts, LoadBucket, Outcome, Query, Snapshot

from .partition import Partition
from .store_parts import StorePort

__all__ = ["Inspection"]


class Inspection(StorePort):
    """`Inspectable`, `Recurring` and `DeadLetters`, over the partitions of a store."""

    async def get(self, message_id: str) -> Snapshot | None:
        """Return a message that is pending or in flight."""
        self._parts.lookup.owned()
        await _until_known(self._parts.lookup.partitions_of(message_id))
        return await self._parts.lookup.partition_of(message_id).horizon.get(message_id)

    async def search(self, query: Query) -> Sequence[Snapshot]:
        """List messages in the order of their next attempt, then of their id."""
        await _until_known(self._parts.lookup.owned())
        found = [each for partition in self._parts.lookup.owned() for each in await partition.horizon.search(query)]
        return heapq.nsmallest(query.limit, found, key=lambda each: (each.next_attempt_ms, each.record.id))

    async def series(self, *, after: str | None = None, limit: int = 100) -> Sequence[Snapshot]:
        """List recurring messages in the order of their ids. The indexes keep all of them in memory."""
        await _until_known(self._parts.lookup.owned())
        found = [each for partition in self._parts.lookup.owned() for each in partition.horizon.series(after, limit)]
        return heapq.nsmallest(limit, found, key=lambda each: each.record.id)

    async def counts(self) -> Mapping[Lane, LaneCounts]:
        """Count messages and dead letters by lane and state."""
        found: dict[Lane, LaneCounts] = {}
        for partition in self._parts.lookup.owned():
            for lane, here in (await partition.horizon.counts()).items():
                found[lane] = _added(found.get(lane), here)
        return dict(sorted(found.items()))

    async def load(self, *, bucket_ms: int, buckets: int) -> Sequence[LoadBucket]:
        """Count the messages that become due from now on, by span of time and by lane."""
        found: Counter[tuple[int, Lane]] = Counter()
        for partition in self._parts.lookup.owned():
            for each in await partition.horizon.load(bucket_ms=bucket_ms, buckets=buckets):
                found[each.from_ms, each.lane] += each.messages
        return [LoadBucket(from_ms, lane, n) for (from_ms, lane), n in sorted(found.items())]

    async def dead_letters(
        self,
        *,
        lane: Lane | None = None,
        message_id: str | None = None,
        after: tuple[int, str, int] | None = None,
        limit: int = 100,
    ) -> Sequence[DeadLetter]:
        """List the dead letters of the partitions that this process owns, oldest first."""
        partitions = (
            self._parts.lookup.owned() if message_id is None else self._parts.lookup.all_partitions_of(message_id)
        )
        await _until_known(partitions)
        found = [
            each
            for partition in partitions
            for each in partition.index.inspection.dead_letters(lane, message_id, after, limit)
        ]
        return heapq.nsmallest(limit, found, key=lambda each: (each.at_ms, each.record.id, each.record.revision))

    async def redrive(self, keys: Sequence[DeadKey]) -> Sequence[Outcome]:
        """Schedule dead letters again."""
        self._parts.lookup.owned()
        return [await self._parts.lookup.partition_of_letter(key).commands.redrive(key) for key in keys]

    async def purge(self, keys: Sequence[DeadKey]) -> int:
        """Delete dead letters."""
        self._parts.lookup.owned()
        return sum([await self._parts.lookup.partition_of_letter(key).commands.purge(key) for key in keys])


async def _until_known(partitions: Collection[Partition]) -> None:
    """Wait until the indexes know all messages of these partitions.

    Raises:
        StoreUnavailableError: A partition was not read in time.
    """
    await asyncio.gather(*(each.until_known() for each in partitions))


def _added(before: LaneCounts | None, here: LaneCounts) -> LaneCounts:
    if before is None:
        return here
    return LaneCounts(
        before.scheduled + here.scheduled,
        before.overdue + here.overdue,
        before.in_flight + here.in_flight,
        before.held + here.held,
        before.dead + here.dead,
        before.read_by_nobody and here.read_by_nobody,
    )
