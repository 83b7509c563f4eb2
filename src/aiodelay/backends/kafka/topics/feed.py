"""`TopicFeed`: gives a handler the records of a topic, as one member of a consumer group.

`FeedReader` reads the partitions. `OffsetCommits` commits the offsets of ended records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from msgspec import Struct

from aiodelay.backends.kafka.client import ASSIGNOR
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.records import received
from aiodelay.core.transitions import NO_OP, is_release, returned, token_counter, token_for
from aiodelay.core.values import (
    MAX_CLAIM_MESSAGES,
    Claim,
    Claimed,
    Demand,
    Done,
    PutBack,
    Record,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    Stored,
)
from aiodelay.core.wakeup import WakeUp

from .feed_part import FeedPart, FeedRecord
from .feed_reader import FeedReader
from .group import Group
from .offset_commits import OffsetCommits

__all__ = ["TopicFeed"]

LONGEST_WAIT_S = 10.0

_Key: TypeAlias = tuple[str, int]
"""The id of a message, and the counter in the token. A record that is given out again has a new counter."""


class _Taken(Struct, frozen=True, gc=False):
    """A record with a claim that is neither settled nor lost."""

    key: _Key
    part: FeedPart
    read: FeedRecord
    record: Record


class TopicFeed:
    """Claims, settles and waits for the records of one topic in one process.

    Args:
        cluster: The cluster of the topic.
        topic: The name of the topic.
        group: The name of the group.
        store: Two functions: the first puts retries and dead letters into the store, the second returns its time.
    """

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        group: str,
        *,
        store: tuple[Callable[[Sequence[PutBack]], Awaitable[Sequence[Stored]]], Callable[[], int]],
    ) -> None:
        self._put_back, self._now_ms = store
        self.group: Group = Group(
            cluster,
            topic,
            group,
            self._assign,
            assignors=(ASSIGNOR, RangePartitionAssignor),
            before_revoked=self._before_revoked,
        )
        self._reader = FeedReader(cluster, topic, self.group)
        self._commits = OffsetCommits(self._reader, self.group, self.wake)
        self._taken: dict[_Key, _Taken] = {}
        self._turn = self._number = 0
        self._wakeup = WakeUp()
        self._patience: asyncio.Timeout | None = None

    def _assign(self, topic: str, numbers: Collection[int]) -> None:
        self._reader.assign(numbers)
        self._commits.may_commit = True
        self.wake()

    async def _before_revoked(self) -> None:
        await self._commits.commit()
        self._commits.may_commit = False

    async def commit_on(self) -> None:
        """Commit the offsets of ended records at intervals, until cancelled, also after errors."""
        await self._commits.run()

    async def close(self) -> None:
        """Commit the offsets of ended records, and disconnect. To leave the group, the caller cancels `group.run`."""
        try:
            await self._commits.finish()
        finally:
            await self._reader.disconnect()

    # --- claims -------------------------------------------------------------------------------------------

    async def claim(self, demand: Mapping[str, Demand], *, request: str, lease_ms: int) -> Claimed:
        """Take records for the handler of one lane. Records that a failed claim has read go to the next claim."""
        ((lane, wanted),) = demand.items()
        asked_ms = self._now_ms()
        missing = min(wanted.messages, MAX_CLAIM_MESSAGES) - sum(part.ready for part in self._reader.parts.values())
        if missing > 0 or self._reader.is_behind:
            await self._reader.poll(0, MAX_CLAIM_MESSAGES)
        now_ms = self._now_ms()
        claims = self._give_out(lane, wanted, asked_ms + lease_ms, now_ms)
        return Claimed(claims, now_ms, now_ms if claims else None)

    def claim_nowait(self, demand: Mapping[str, Demand], *, lease_ms: int) -> Claimed:
        """Take records that were read before. None after a rebalance: `claim` must first take the partitions over."""
        ((lane, wanted),) = demand.items()
        now_ms = self._now_ms()
        claims = [] if self._reader.is_behind else self._give_out(lane, wanted, now_ms + lease_ms, now_ms)
        return Claimed(claims, now_ms, now_ms if claims else None)

    def _give_out(self, lane: str, wanted: Demand, ends_ms: int, now_ms: int) -> list[Claim]:
        """Give out records that were read: first an equal share from each partition, then more from any partition."""
        claims: list[Claim] = []
        self._turn += 1
        parts = [part for part in self._reader.parts.values() if part.ready]
        first = self._turn % len(parts) if parts else 0
        parts = parts[first:] + parts[:first]
        left, size, token = min(wanted.messages, MAX_CLAIM_MESSAGES), 0, token_for(ends_ms, 0)
        for share in (-(-left // max(len(parts), 1)), left):
            for part in parts:
                room = self._room(part, wanted.messages - len(claims))
                for _ in range(min(share, left - len(claims), part.ready, room)):
                    read = part.take()
                    size += len(read.value or b"")
                    if claims and size > wanted.max_bytes:
                        part.take_back(read)
                        return claims
                    claims.append(self._claim(part, read, lane, token, now_ms))
        return claims

    def _room(self, part: FeedPart, free: int) -> int:
        """Return the number of attempts that a partition may begin now.

        A partition with slow records must not delay other partitions. Room for one attempt is therefore kept for each
        other partition that has no attempt, up to half of all room.
        """
        parts = self._reader.parts.values()
        idle = sum(not each.in_flight for each in parts if each is not part)
        total = free + sum(each.in_flight for each in parts)
        return max(free - min(idle, total // 2), int(not part.in_flight))

    def _claim(self, part: FeedPart, read: FeedRecord, lane: str, token: int, now_ms: int) -> Claim:
        """Return a claim of a record. `token` is the lease's token with counter 0; the claim adds its own counter."""
        written_ms = max(read.timestamp, 0)
        message_id = part.id_of(read.offset) + self._reader.id_ends
        envelope = received(message_id, lane, read.key, read.value, read.headers)
        record = Record(envelope, written_ms, min(written_ms, now_ms), NO_OP)
        self._number += 1
        counter = token_counter(self._number)
        key = message_id, counter
        self._taken[key] = _Taken(key, part, read, record)
        queued_ms = max(now_ms - written_ms, 0)
        return Claim(record, token + counter, queued_ms, 0, part.place.partition, read.offset)

    # --- settling -----------------------------------------------------------------------------------------

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        """End claims, after the store has taken retries and dead letters. For claims of lost partitions, do nothing."""
        found, leaving = self._found(settlements)
        if leaving:
            await self._put_back(leaving)
        return self._ended(settlements, found)

    def settle_nowait(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome] | None:
        """End claims, unless the store must first take a retry or a dead letter."""
        found, leaving = self._found(settlements)
        return None if leaving else self._ended(settlements, found)

    def _found(self, settlements: Sequence[Settlement]) -> tuple[list[_Taken | None], list[PutBack]]:
        """Return the records of the claims, and the messages that the store must take first."""
        found: list[_Taken | None] = []
        leaving: list[PutBack] = []
        for settlement in settlements:
            taken = self._taken_by(settlement)
            found.append(taken)
            if taken is None or isinstance(settlement, Done) or is_release(taken.record, settlement):
                continue
            leaving.append(returned(taken.record, settlement))
        return found, leaving

    def _ended(self, settlements: Sequence[Settlement], found: Sequence[_Taken | None]) -> list[SettleOutcome]:
        for settlement, taken in zip(settlements, found, strict=True):
            if taken is None or self._taken.pop(taken.key, None) is None:
                continue
            if isinstance(settlement, Done) or not is_release(taken.record, settlement):
                taken.part.end(taken.read)
            else:
                taken.part.take_back(taken.read)
        self._commits.note_end()
        return [SettleOutcome.GONE if taken is None else SettleOutcome.SETTLED for taken in found]

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        """Renew leases. A lease lasts until the claim is settled, or this process loses the partition."""
        owned = [self._taken_by(renewal) is not None for renewal in renewals]
        return [RenewOutcome.RENEWED if each else RenewOutcome.LOST for each in owned]

    def beat(self, ids: Collection[str]) -> None:
        """Do nothing: a source's record has no lapses, so it is never a suspect."""

    def _taken_by(self, claim: Settlement | Renewal) -> _Taken | None:
        """Return the record of a claim, or None if this process does not own the record's partition any more."""
        key = _key(claim)
        taken = self._taken.get(key)
        if taken is not None and taken.part.is_lost:
            del self._taken[key]
            return None
        return taken

    # --- waiting ------------------------------------------------------------------------------------------

    async def wait(self, *, until_ms: int | None) -> None:
        """Return when there may be new records to give out. While it waits, this call reads the next records."""
        if self._wakeup.is_set:
            return
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_WAIT_S) as self._patience:
                    if self._reader.is_behind or self._reader.wants_more:
                        await self._reader.poll(LONGEST_WAIT_S, MAX_CLAIM_MESSAGES)
                    else:
                        await self._wakeup.wait()
        finally:
            self._patience = None

    def wake(self) -> None:
        """End the current or next `wait`."""
        self._wakeup.set()
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(asyncio.get_running_loop().time())

    def clear(self) -> None:
        """Forget the wake-ups so far."""
        self._wakeup.clear()


def _key(claim: Settlement | Renewal) -> _Key:
    return claim.id, token_counter(claim.token)
