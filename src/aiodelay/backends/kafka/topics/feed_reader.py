"""`FeedReader`: reads the partitions of a source's topic that a group member owns, and follows each rebalance."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress
from hashlib import blake2b

from aiokafka import TopicPartition
from aiokafka.errors import OffsetOutOfRangeError
from aiokafka.structs import OffsetAndMetadata

from aiodelay.backends.kafka.client import UNAVAILABLE, Consumer, consumer_of, reason_of, stop
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.errors import StoreUnavailableError

from .feed_part import FeedPart
from .group import METADATA_MS, Group

__all__ = ["NOTE", "FeedReader"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

CHECK_S = 30.0
"""Pause between two checks whether the topic was created again."""
NOTE = "aiodelay-topic="
"""Prefix of the topic's id, which is committed with each offset. A topic created again is read from its start."""


class FeedReader:
    """Reads one topic for one member.

    Args:
        cluster: The cluster of the topic.
        topic: The name of the topic.
        group: The group. The feed passes the group's assignments to `assign`.
    """

    topic_id: str
    id_ends: str
    name: str

    def __init__(self, cluster: Cluster, topic: str, group: Group) -> None:
        self._cluster, self._topic, self._group = cluster, topic, group
        self.name = f"topic {topic} at {cluster.name}"
        self.parts: dict[TopicPartition, FeedPart] = {}
        self.topic_id = ""
        self.id_ends = ""
        """The end of message ids. It differs between groups, and between topics that had the same name."""
        self.assigned: Collection[int] = ()
        """The partitions that the group assigned last. Each assignment is a new object, even if it equals the last."""
        self.commits_ended = 0
        """The number of commits that have ended."""
        self._followed: Collection[int] | None = None
        self._check_at = 0.0
        self._consumer: Consumer | None = None

    # --- ownership of partitions --------------------------------------------------------------------------

    def assign(self, numbers: Collection[int]) -> None:
        """Own exactly these partitions from now on. Claims of lost partitions end, and other claims go on."""
        self.assigned = frozenset(numbers)
        self._followed = None  # even for the same partitions: another member may have owned them in between
        for place, part in list(self.parts.items()):
            part.is_checked = False
            if place.partition not in self.assigned:
                part.is_lost = True
                del self.parts[place]

    def find_topic_again(self) -> None:
        """Have the next poll take the partitions over again, because the topic was deleted and created again."""
        self._followed = None
        for part in self.parts.values():
            part.is_checked = False

    @property
    def is_behind(self) -> bool:
        """Whether the next poll must first take partitions over."""
        return self._followed is None

    @property
    def wants_more(self) -> bool:
        """Whether at least one partition wants more records."""
        return any(part.is_wanted for part in self.parts.values())

    async def _follow(self) -> Consumer:
        """Return a consumer that reads the owned partitions.

        Reading of a partition goes on where it ended, or begins at the committed offset.

        Raises:
            KafkaError, TimeoutError, OSError: The cluster does not answer.
        """
        while True:
            consumer = await self._opened()
            await self._check_topic()
            if self._followed is not None:
                return consumer
            assigned, commits = self.assigned, self.commits_ended
            places = [TopicPartition(self._topic, number) for number in sorted(assigned)]
            topic_id = await self._asked_id(places[0]) if places else ""
            committed = await self._group.committed(places) if places else {}
            begins, ends = await consumer.beginning_offsets(places), await consumer.end_offsets(places)
            if assigned is not self.assigned or commits != self.commits_ended:
                # Another assignment, or a commit of this member, has come in between: the answers may be out of date.
                continue
            self.topic_id = topic_id
            self.id_ends = "-" + blake2b(f"{topic_id}/{self._group.name}".encode(), digest_size=8).hexdigest()
            for place in places:
                self._adopt(place, committed.get(place), range(begins[place], ends[place] + 1))
            self._read_from_here(consumer)
            self._followed = assigned

    async def _check_topic(self) -> None:
        """Check every `CHECK_S` whether the topic was created again. If it was, take its partitions over again."""
        if self._followed is None or not self.assigned or asyncio.get_running_loop().time() < self._check_at:
            return
        with suppress(*UNAVAILABLE):  # if the cluster does not answer, reading reports the error
            if await self._asked_id(TopicPartition(self._topic, min(self.assigned))) != self.topic_id:
                self._followed = None

    async def _asked_id(self, place: TopicPartition) -> str:
        self._check_at = asyncio.get_running_loop().time() + CHECK_S
        return await self._group.topic_id(place)

    def _adopt(self, place: TopicPartition, found: OffsetAndMetadata | None, there: range) -> None:
        """Go on with a partition if no other member has owned it. Otherwise begin at its committed offset."""
        part, committed = self.parts.get(place), None if found is None else found.offset
        start = committed
        if part is not None and part.topic_id == self.topic_id:
            if part.is_own(committed) and part.offsets.read_to in there:
                part.committed, part.is_checked = committed, True
                return
            # If no other member has owned it, the partition was cut off. Nobody gets its records that have not ended.
            part.is_lost = not part.is_own(committed)
            start = committed if part.is_lost else part.offsets.read_to
        is_others = found is not None and found.metadata.startswith(NOTE) and found.metadata != NOTE + self.topic_id
        if start is not None and (start not in there or is_others):
            self._tell_out_of_range(place, start, there)
            start = there.start
        self.parts[place] = FeedPart(place, self.topic_id, there.start if start is None else start, committed)

    def _tell_out_of_range(self, place: TopicPartition, offset: int, there: range) -> None:
        text = (
            "%s, group %s: partition %d should be read from offset %d, but holds %d to %d: the topic was deleted, or "
            "cut off; the partition is read from its beginning"
        )
        log.error(text, self.name, self._group.name, place.partition, offset, there.start, there.stop - 1)

    def _read_from_here(self, consumer: Consumer) -> None:
        consumer.assign(list(self.parts))
        for place, part in self.parts.items():  # before the consumer asks for a position of its own
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

    async def poll(self, seconds: float, most: int) -> None:
        """Read more records of partitions that have none left to give out, and do not have too many under way.

        Raises:
            StoreUnavailableError: The cluster does not answer.
        """
        try:
            consumer = await self._follow()
            wanted = [place for place, part in self.parts.items() if part.is_wanted]
            if wanted:
                found = await consumer.getmany(*wanted, timeout_ms=int(seconds * 1000), max_records=most)
                for place, read in found.items():
                    if place in self.parts:
                        self.parts[place].read(read)
        except OffsetOutOfRangeError as error:
            self._followed = None
            raise StoreUnavailableError(self.name, "the next record to read does not exist any more") from error
        except UNAVAILABLE as error:
            await self.disconnect()
            raise StoreUnavailableError(self.name, reason_of(error, "Read")) from error
        except Exception:
            self._followed = None  # the call's records of other partitions are lost, so read them again (K23)
            raise

    async def disconnect(self) -> None:
        """Close the consumer. The next poll makes a new one."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop(consumer)
