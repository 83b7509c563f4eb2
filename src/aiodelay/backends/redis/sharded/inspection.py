"""`ShardedInspection`: the sharded store's methods for operators. They add up or merge the answers of all shards."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from heapq import merge, nsmallest

from aiodelay.backends.redis.records.keys import member_of
from aiodelay.backends.redis.store.store import RedisStore
from aiodelay.core.values import (
    DeadKey,
    DeadLetter,
    Instance,
    JournalEntry,
    Lane,
    LaneCounts,
    LaneLimits,
    LimitedKey,
    LoadBucket,
    Outcome,
    Query,
    Snapshot,
)
from aiodelay.errors import UnsupportedByStoreError
from aiodelay.ports.control import pause_order

from .base import ShardSet
from .following import following
from .journal import after_of, numbered

__all__ = ["ShardedInspection"]


class ShardedInspection(ShardSet):
    """Implements `Inspectable`, `Recurring`, `Instances`, `DeadLetters`, `Pauses`, `Journal` and `Limits`."""

    # --- messages -----------------------------------------------------------------------------------------

    @following()
    async def get(self, message_id: str) -> Snapshot | None:
        """Return the pending or in-flight message with this id, or None if no such message is stored."""
        return await self._shard_of(message_id).get(message_id)

    @following()
    async def search(self, query: Query) -> Sequence[Snapshot]:
        """List messages in the order of (next attempt, id)."""
        found = await self._of_all(lambda each: each.search(query))
        return nsmallest(
            query.limit,
            (each for part in found for each in part),
            key=lambda each: (each.next_attempt_ms, each.record.id),
        )

    @following()
    async def series(self, *, after: str | None = None, limit: int = 100) -> Sequence[Snapshot]:
        """List recurring messages, in the order of their encoded ids in Redis."""
        found = await self._of_all(lambda each: each.series(after=after, limit=limit))
        return nsmallest(limit, (each for part in found for each in part), key=lambda each: member_of(each.record.id))

    @following()
    async def counts(self) -> Mapping[Lane, LaneCounts]:
        """Count messages and dead letters by lane and state."""
        total: dict[Lane, LaneCounts] = {}
        for counts in await self._of_all(lambda each: each.counts()):
            for lane, own in counts.items():
                total[lane] = _sum(total[lane], own) if lane in total else own
        return dict(sorted(total.items()))

    @following()
    async def load(self, *, bucket_ms: int, buckets: int) -> Sequence[LoadBucket]:
        """Count the messages that become due from now on, by lane and by span of `bucket_ms`."""
        from_ms = self.now_ms()
        found: dict[tuple[int, Lane], int] = {}
        for part in await self._of_all(lambda each: each.load(bucket_ms=bucket_ms, buckets=buckets, from_ms=from_ms)):
            for each in part:
                found[each.from_ms, each.lane] = found.get((each.from_ms, each.lane), 0) + each.messages
        return [LoadBucket(from_ms, lane, found[from_ms, lane]) for from_ms, lane in sorted(found)]

    @following(is_checked=False)
    async def position(self, source: str) -> int | None:
        """Return the last position of an intake, or None if it has none. It is the smallest position of all shards."""
        return await self._intakes.position(source)

    @following()
    async def instances(self) -> Sequence[Instance]:
        """List the live workers of the namespace."""
        found: dict[str, Instance] = {}
        for part in await self._of_all(lambda each: each.instances()):
            for each in part:
                if each.name not in found or each.seen_ms > found[each.name].seen_ms:
                    found[each.name] = each
        return [found[name] for name in sorted(found)]

    # --- pauses -------------------------------------------------------------------------------------------

    @following()
    async def pause(self, lane: Lane, address: str | None = None) -> bool:
        """Pause a lane, or one address of the lane, in all shards. Return True if the call changed the state."""
        return any(await self._of_all(lambda each: each.pause(lane, address)))

    @following()
    async def resume(self, lane: Lane, address: str | None = None) -> bool:
        """Resume a lane, or one address of the lane, in all shards. Return True if the call changed the state."""
        return any(await self._of_all(lambda each: each.resume(lane, address)))

    @following(is_checked=False)
    async def paused(self) -> Sequence[tuple[Lane, str | None]]:
        """List the paused lanes and addresses, in order. The address of a paused lane is None."""
        found = await self._of_all(lambda each: each.paused())
        return sorted({pause for part in found for pause in part}, key=pause_order)

    # --- dead letters -------------------------------------------------------------------------------------

    @following(is_checked=False)
    async def dead_letters(
        self,
        *,
        lane: Lane | None = None,
        message_id: str | None = None,
        after: tuple[int, str, int] | None = None,
        limit: int = 100,
    ) -> Sequence[DeadLetter]:
        """List dead letters, oldest first."""
        if message_id is not None:
            shard = self._shard_of(message_id)
            return await shard.dead_letters(lane=lane, message_id=message_id, after=after, limit=limit)
        found = await self._of_all(lambda each: each.dead_letters(lane=lane, after=after, limit=limit))
        return nsmallest(limit, (each for part in found for each in part), key=lambda each: (each.at_ms, *each.key))

    @following()
    async def redrive(self, keys: Sequence[DeadKey]) -> Sequence[Outcome]:
        """Schedule dead letters again. Return one outcome for each key, in the order of the keys."""
        return await self._by_shard(keys, lambda key: key.id, RedisStore.redrive)

    @following()
    async def purge(self, keys: Sequence[DeadKey]) -> int:
        """Delete dead letters. Return how many of them were deleted."""

        async def purged(shard: RedisStore, part: Sequence[DeadKey]) -> Sequence[int]:
            return [await shard.purge(part), *([0] * (len(part) - 1))]

        return sum(await self._by_shard(keys, lambda key: key.id, purged)) if keys else 0

    # --- journal ------------------------------------------------------------------------------------------

    @following(is_checked=False)
    async def journal(
        self, *, message_id: str | None = None, after: int = 0, limit: int = 100
    ) -> Sequence[JournalEntry]:
        """List entries of the journals of all shards, by their numbers; the entries of one message by their times."""
        shards = self.shards
        count = len(shards)
        if count == 1:
            return await shards[0].journal(message_id=message_id, after=after, limit=limit)
        if message_id is not None:
            return (await self._journal_of(message_id, after))[:limit]
        found: list[JournalEntry] = []
        for shard, store in enumerate(shards):
            own = await store.journal(after=after_of(after, shard, count), limit=limit)
            found += [numbered(each, shard, count) for each in own]
        return nsmallest(limit, found, key=lambda each: each.number)

    async def _journal_of(self, message_id: str, after: int) -> Sequence[JournalEntry]:
        """Return the entries of a message that follow the entry with a number.

        A move to another number of shards leaves earlier entries in their former shards. Their numbers may be larger.
        """
        parts = await self._of_all(lambda each: each.journal(message_id=message_id, limit=sys.maxsize))
        found = [[numbered(each, shard, len(parts)) for each in part] for shard, part in enumerate(parts)]
        entries = list(merge(*found, key=lambda each: each.at_ms))
        numbers = [each.number for each in entries]
        if after in numbers:
            return entries[numbers.index(after) + 1 :]
        return [each for each in entries if each.number > after]  # The server has trimmed that entry, or `after` is 0.

    # --- limits -------------------------------------------------------------------------------------------

    @following()
    async def set_limits(self, lane: Lane, limits: LaneLimits, *, is_declared: bool) -> None:
        """Set the limits of a lane. Limits without any number end them.

        Raises:
            UnsupportedByStoreError: The namespace has several shards, and each shard would count for itself.
        """
        if limits:
            self._needs_one_shard(f"a limit of lane {lane!r}")
        if len(self.shards) == 1:
            await self._first.set_limits(lane, limits, is_declared=is_declared)

    @following(is_checked=False)
    async def limits(self, *, is_declared: bool = False) -> Mapping[Lane, LaneLimits]:
        """Return the limits of all lanes that have any, or that code declared last. In several shards, none has."""
        return await self._first.limits(is_declared=is_declared)

    @following()
    async def limited_keys(self, lane: Lane, *, limit: int = 100, key: bytes | None = None) -> Sequence[LimitedKey]:
        """List keys of a lane that have messages in flight or waiting because of a limit."""
        return await self._first.limited_keys(lane, limit=limit, key=key)

    def _needs_one_shard(self, what: str) -> None:
        if (shards := len(self.shards)) > 1:
            raise UnsupportedByStoreError(
                what, f"not possible in a namespace of {shards} shards", "a namespace of 1 shard (`aiodelay reshard`)"
            )


def _sum(one: LaneCounts, other: LaneCounts) -> LaneCounts:
    return LaneCounts(
        one.scheduled + other.scheduled,
        one.overdue + other.overdue,
        one.in_flight + other.in_flight,
        one.held + other.held,
        one.dead + other.dead,
        read_by_nobody=one.read_by_nobody and other.read_by_nobody,
    )
