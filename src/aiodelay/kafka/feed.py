"""One process's taking from a topic, as a member of a group: what was read, given out, ended, and committed.

Offsets are committed up to the first record that has not ended, and only by a member of the group's generation for
partitions whose committed offset is known to be its own: what was another's meanwhile is read again from there.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import insort
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from operator import attrgetter
from typing import Any, TypeAlias

from aiokafka import TopicPartition
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import CommitFailedError, OffsetOutOfRangeError
from aiokafka.structs import OffsetAndMetadata
from msgspec import Struct

from aiodelay.errors import StoreUnavailableError
from aiodelay.model import (
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
from aiodelay.transitions import NO_OP, is_release, returned, token_counter, token_for
from aiodelay.wakeup import WakeUp

from .client import ASSIGNOR, CLOSE_S, UNAVAILABLE, Consumer, consumer_of, log_failure, reason_of, stop
from .group import METADATA_MS, Group
from .offsets import Offsets
from .options import Cluster
from .records import received

__all__ = ["TopicFeed"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

LONGEST_WAIT_S = 10.0
COMMIT_S = 0.1
"""Pause between commits."""
CHECK_S = 30.0
"""Pause between two questions whether the topic is still the same one."""
MOST_AHEAD = 2_000
"""A partition is read no further while so many records were read from the first one on that has not ended."""
NOTE = "aiodelay-topic="
"""What is committed says of which topic: one that is created anew is read from its beginning."""
MOST_IN_ID = 100

_Read: TypeAlias = Any
"""aiokafka's `ConsumerRecord`."""
_Key: TypeAlias = tuple[str, int]
"""Id, and the token's counter: what was lost, and taken again, is another claim."""
_OFFSET = attrgetter("offset")


class _Part:
    """A partition that is owned.

    Args:
        place: Which one.
        topic_id: Of the topic as it was then.
        start: Where it is read from.
        committed: What the group has committed.
    """

    is_lost: bool = False
    """It is another member's, who is given what has not ended."""
    is_checked: bool = True
    """What is committed is known to be ours."""

    def __init__(self, place: TopicPartition, topic_id: str, start: int, committed: int | None) -> None:
        self.place, self.topic_id, self.offsets = place, topic_id, Offsets(start)
        self.committed, self.committing = committed, committed
        self.returned: list[_Read] = []
        self.unclaimed: deque[_Read] = deque()
        self.in_flight = 0
        self.id_begins = f"{place.topic[:MOST_IN_ID]}/{place.partition}/"
        self._begun_at = start

    @property
    def ready(self) -> int:
        """How many records may be given out."""
        return len(self.returned) + len(self.unclaimed)

    @property
    def is_wanted(self) -> bool:
        """Whether more is to be read of it."""
        return not self.unclaimed and len(self.offsets) < MOST_AHEAD

    @property
    def to_commit(self) -> int | None:
        """The offset that is to be committed, if any."""
        ended_to = self.offsets.ended_to
        return ended_to if ended_to != self.committed and ended_to > self._begun_at else None

    def read(self, found: Sequence[_Read]) -> None:
        """Take in what was read."""
        for each in found:
            self.offsets.read(each.offset)
        self.unclaimed += found

    def take(self) -> _Read:
        """Give out the first record."""
        self.in_flight += 1
        return self.returned.pop(0) if self.returned else self.unclaimed.popleft()

    def take_back(self, read: _Read) -> None:
        """Have a record among those to be given out again."""
        self.in_flight -= 1
        insort(self.returned, read, key=_OFFSET)

    def end(self, read: _Read) -> None:
        """A record has ended."""
        self.in_flight -= 1
        self.offsets.end(read.offset)

    def is_own(self, committed: int | None) -> bool:
        """Say whether nobody else can have had it since, by what is committed."""
        return committed in (self.committed, self.committing)


class _Taken(Struct, frozen=True, gc=False):
    """A record that was given out, and neither settled nor lost."""

    key: _Key
    part: _Part
    read: _Read
    record: Record


class TopicFeed:
    """One process's taking from one topic.

    Args:
        cluster: Where it is.
        topic: Which one.
        group: The group's name.
        store: Takes retries and dead letters; and tells the store's time.
    """

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        group: str,
        *,
        store: tuple[Callable[[Sequence[PutBack]], Awaitable[Sequence[Stored]]], Callable[[], int]],
    ) -> None:
        self._cluster, self._topic, self._name = cluster, topic, f"topic {topic} at {cluster.name}"
        self._put_back, self._now_ms = store
        self._group_name, self._topic_id, self._id_ends = group, "", ""
        self.group: Group = Group(
            cluster,
            topic,
            group,
            self._assign,
            assignors=(ASSIGNOR, RangePartitionAssignor),
            before_revoked=self._before_revoked,
        )
        self._consumer: Consumer | None = None
        self._assigned: Collection[int] = ()
        self._followed: Collection[int] | None = None
        self._check_at = 0.0
        self._parts: dict[TopicPartition, _Part] = {}
        self._taken: dict[_Key, _Taken] = {}
        self._turn = self._number = 0
        self._wakeup, self._moved = WakeUp(), WakeUp()
        self._patience: asyncio.Timeout | None = None
        self._commits, self._may_commit = asyncio.Lock(), False
        self._commits_ended = 0

    # --- whose it is --------------------------------------------------------------------------------------

    def _assign(self, topic: str, numbers: Collection[int]) -> None:
        """Own these partitions from now on: claims of others end, those of what stays go on."""
        self._assigned = frozenset(numbers)
        self._followed = None  # also if they are the same: another may have had them in between
        for place, part in list(self._parts.items()):
            part.is_checked = False
            if place.partition not in self._assigned:
                part.is_lost = True
                del self._parts[place]
        self._may_commit = True
        self.wake()

    async def _before_revoked(self) -> None:
        await self._commit()
        self._may_commit = False

    async def _follow(self) -> Consumer:
        """Read what is owned now, each partition from where it was read to, or from what is committed.

        Raises:
            KafkaError, TimeoutError, OSError: The cluster does not answer.
        """
        while True:
            consumer = await self._opened()
            await self._check_topic()
            if self._followed is not None:
                return consumer
            assigned, commits = self._assigned, self._commits_ended
            places = [TopicPartition(self._topic, number) for number in sorted(assigned)]
            topic_id = await self._asked_id(places[0]) if places else ""
            committed = await self.group.committed(places) if places else {}
            begins, ends = await consumer.beginning_offsets(places), await consumer.end_offsets(places)
            if assigned is not self._assigned or commits != self._commits_ended:
                continue  # what was committed meanwhile is our own
            self._topic_id = topic_id
            self._id_ends = "-" + blake2b(f"{topic_id}/{self._group_name}".encode(), digest_size=8).hexdigest()
            for place in places:
                self._adopt(place, committed.get(place), range(begins[place], ends[place] + 1))
            self._read_from_here(consumer)
            self._followed = assigned

    async def _check_topic(self) -> None:
        """Ask, every `CHECK_S`, whether another topic bears the name now; if so, stop following the old one."""
        if self._followed is None or not self._assigned or asyncio.get_running_loop().time() < self._check_at:
            return
        with suppress(*UNAVAILABLE):  # the next poll finds out why
            if await self._asked_id(TopicPartition(self._topic, min(self._assigned))) != self._topic_id:
                self._followed = None

    async def _asked_id(self, place: TopicPartition) -> str:
        self._check_at = asyncio.get_running_loop().time() + CHECK_S
        return await self.group.topic_id(place)

    def _adopt(self, place: TopicPartition, found: OffsetAndMetadata | None, there: range) -> None:
        """Go on with a partition, if nobody else has had it, else begin with what is committed."""
        part, committed = self._parts.get(place), None if found is None else found.offset
        start = committed
        if part is not None and part.topic_id == self._topic_id:
            if part.is_own(committed) and part.offsets.read_to in there:
                part.committed, part.is_checked = committed, True
                return
            part.is_lost = not part.is_own(committed)  # else it was cut off: nobody is given what has not ended
            start = committed if part.is_lost else part.offsets.read_to
        is_others = found is not None and found.metadata.startswith(NOTE) and found.metadata != NOTE + self._topic_id
        if start is not None and (start not in there or is_others):
            self._tell_out_of_range(place, start, there)
            start = there.start
        self._parts[place] = _Part(place, self._topic_id, there.start if start is None else start, committed)

    def _tell_out_of_range(self, place: TopicPartition, offset: int, there: range) -> None:
        text = (
            "%s, group %s: partition %d was to be read from offset %d, and holds %d to %d: the topic was deleted, or "
            "cut off; it is read from its beginning"
        )
        log.error(text, self._name, self._group_name, place.partition, offset, there.start, there.stop - 1)

    def _read_from_here(self, consumer: Consumer) -> None:
        consumer.assign(list(self._parts))
        for place, part in self._parts.items():  # before it can look for a position of its own
            consumer.seek(place, part.offsets.read_to)

    async def _opened(self) -> Consumer:
        if self._consumer is None:
            self._followed = None
            consumer = consumer_of(self._cluster, metadata_max_age_ms=METADATA_MS)
            try:
                await consumer.start()
            except BaseException:
                await stop(consumer)
                raise
            self._consumer = consumer
        return self._consumer

    # --- reading ------------------------------------------------------------------------------------------

    async def _poll(self, seconds: float, most: int) -> None:
        """Read some records of the partitions that have none left, or fewer than may be open at once.

        Raises:
            StoreUnavailableError: The cluster does not answer.
        """
        try:
            consumer = await self._follow()
            wanted = [place for place, part in self._parts.items() if part.is_wanted]
            if wanted:
                found = await consumer.getmany(*wanted, timeout_ms=int(seconds * 1000), max_records=most)
                for place, read in found.items():
                    if place in self._parts:
                        self._parts[place].read(read)
        except OffsetOutOfRangeError as error:
            self._followed = None
            raise StoreUnavailableError(self._name, "what was to be read next is not there") from error
        except UNAVAILABLE as error:
            await self._disconnect()
            raise StoreUnavailableError(self._name, reason_of(error, "Read")) from error
        except Exception:
            self._followed = None  # what the call had taken of other partitions by then is lost, and read again (K23)
            raise

    async def _disconnect(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop(consumer)

    # --- claims -------------------------------------------------------------------------------------------

    async def claim(self, demand: Mapping[str, Demand], *, request: str, lease_ms: int) -> Claimed:
        """Take records for one lane's handler. What a failed claim has read is given out by the next one."""
        ((lane, wanted),) = demand.items()
        asked_ms = self._now_ms()
        missing = min(wanted.messages, MAX_CLAIM_MESSAGES) - sum(part.ready for part in self._parts.values())
        if missing > 0 or self._followed is None:
            await self._poll(0, max(missing, 1))
        now_ms = self._now_ms()
        claims = self._give_out(lane, wanted, asked_ms + lease_ms, now_ms)
        return Claimed(claims, now_ms, now_ms if claims else None)

    def _give_out(self, lane: str, wanted: Demand, ends_ms: int, now_ms: int) -> list[Claim]:
        """Give out what was read, an equal share of each partition first, then what others left."""
        claims: list[Claim] = []
        self._turn += 1
        parts = [part for part in self._parts.values() if part.ready]
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

    def _room(self, part: _Part, free: int) -> int:
        """Return how many runs a partition may take: a place is kept for each other that has none, up to half of all.

        So one partition whose records take long does not hold up the rest.
        """
        parts = self._parts.values()
        idle = sum(not each.in_flight for each in parts if each is not part)
        total = free + sum(each.in_flight for each in parts)
        return max(free - min(idle, total // 2), int(not part.in_flight))

    def _claim(self, part: _Part, read: _Read, lane: str, token: int, now_ms: int) -> Claim:
        """Give out a record; `token` is that of a lease with counter 0."""
        written_ms = max(read.timestamp, 0)
        message_id = f"{part.id_begins}{read.offset}{self._id_ends}"
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
        """End claims; what goes back to the store is there first. Of a lost partition's nothing is written."""
        found: list[_Taken | None] = []
        leaving: list[PutBack] = []
        for settlement in settlements:
            taken = self._held(settlement)
            found.append(taken)
            if taken is None or isinstance(settlement, Done) or is_release(taken.record, settlement):
                continue
            leaving.append(returned(taken.record, settlement))
        if leaving:
            await self._put_back(leaving)
        for settlement, taken in zip(settlements, found, strict=True):
            if taken is None or self._taken.pop(taken.key, None) is None:
                continue
            if isinstance(settlement, Done) or not is_release(taken.record, settlement):
                taken.part.end(taken.read)
            else:
                taken.part.take_back(taken.read)
        self._moved.set()
        return [SettleOutcome.GONE if taken is None else SettleOutcome.SETTLED for taken in found]

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        """Prolong leases: a record is held as long as its partition is."""
        held = [self._held(renewal) is not None for renewal in renewals]
        return [RenewOutcome.RENEWED if each else RenewOutcome.LOST for each in held]

    def beat(self, ids: Collection[str]) -> None:
        """Do nothing: a record carries no lapses, so that it is never a suspect."""

    def _held(self, claim: Settlement | Renewal) -> _Taken | None:
        """Return what is settled or renewed, None if it is not held any more."""
        key = _key(claim)
        taken = self._taken.get(key)
        if taken is not None and taken.part.is_lost:
            del self._taken[key]
            return None
        return taken

    # --- offsets ------------------------------------------------------------------------------------------

    async def commit_on(self) -> None:
        """Commit what has ended, again and again, until cancelled; no error ends this."""
        while True:
            await self._moved.wait()
            self._moved.clear()
            await self._commit()
            await asyncio.sleep(COMMIT_S)

    async def _commit(self) -> None:
        """Commit offsets up to the first record that has not ended; what fails is tried again."""
        async with self._commits:
            if not (self._may_commit and self._has_to_commit):
                return
            place, parts = next(iter(self._parts)), dict[_Part, int]()
            try:
                await self._check_parts()
                if not await self._is_same_topic(place):
                    return
                for part in self._parts.values():
                    if part.is_checked and (offset := part.to_commit) is not None:
                        parts[part] = part.committing = offset
                if not parts:
                    return
                note = NOTE + self._topic_id
                try:
                    await self.group.commit({part.place: OffsetAndMetadata(to, note) for part, to in parts.items()})
                finally:
                    self._commits_ended += 1
            except CommitFailedError:
                self._moved.set()  # the group is being shared out
            except Exception as error:  # noqa: BLE001 - one that stopped and told nobody would be the worst of faults
                self._moved.set()
                what = f"{self._name}, group {self._group_name}: offsets are not committed"
                log_failure(log, what, reason_of(error), error, UNAVAILABLE)
            else:
                for part, offset in parts.items():
                    part.committed = offset

    @property
    def _has_to_commit(self) -> bool:
        return any(part.to_commit is not None for part in self._parts.values())

    async def _check_parts(self) -> None:
        """Find out of which partitions that stayed nobody else has committed anything since."""
        assigned, parts = self._assigned, [part for part in self._parts.values() if not part.is_checked]
        if not parts:
            return
        found = await self.group.committed([part.place for part in parts])
        if assigned is self._assigned:
            for part in parts:
                part.is_checked = part.is_own(found[part.place].offset if part.place in found else None)

    async def _is_same_topic(self, place: TopicPartition) -> bool:
        """Say whether what is committed is of the topic that was read; if not, the new one is read."""
        if await self.group.topic_id(place) == self._topic_id:
            return True
        self._followed = None
        for part in self._parts.values():
            part.is_checked = False
        self.wake()
        return False

    async def close(self) -> None:
        """Commit what has ended, also if the group is just being shared out, and disconnect; others leave the group."""
        try:
            await self._commit()
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    while self._has_to_commit:
                        await asyncio.sleep(COMMIT_S)
                        await self._commit()
        finally:
            await self._disconnect()

    # --- waiting ------------------------------------------------------------------------------------------

    async def wait(self, *, until_ms: int | None) -> None:
        """Return when there may be something new to give out; meanwhile the next records are read."""
        if self._wakeup.is_set:
            return
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_WAIT_S) as self._patience:
                    if self._followed is None or self._is_thirsty:
                        await self._poll(LONGEST_WAIT_S, MAX_CLAIM_MESSAGES)
                    else:
                        await self._wakeup.wait()
        finally:
            self._patience = None

    @property
    def _is_thirsty(self) -> bool:
        """Whether more may be read of a partition, whatever there is of others."""
        return any(part.is_wanted for part in self._parts.values())

    def wake(self) -> None:
        """End the current or next `wait`."""
        self._wakeup.set()
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(asyncio.get_running_loop().time())

    def clear(self) -> None:
        """Forget wake-ups so far."""
        self._wakeup.clear()


def _key(claim: Settlement | Renewal) -> _Key:
    return claim.id, token_counter(claim.token)
