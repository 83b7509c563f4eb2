"""`FeedReader`: reads the partitions of a topic that a group's member owns, and follows each change of owner."""

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
"""Pause between two questions whether the topic is still the same one."""
NOTE = "aiodelay-topic="
"""The group commits each offset with the topic's id: a topic that is created again is read from its beginning."""


class FeedReader:
    """The reading of one topic by one member.

    Args:
        cluster: Where the topic is.
        topic: Its name.
        group: The group; the feed passes its assignments to `assign`.
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
        """The end of message ids: other topics of this name, and other groups, have another one."""
        self.assigned: Collection[int] = ()
        """The partitions that the group gave this member last; another collection each time."""
        self.commits_ended = 0
        """How many commits have ended."""
        self._followed: Collection[int] | None = None
        self._check_at = 0.0
        self._consumer: Consumer | None = None

    # --- whose partitions they are ------------------------------------------------------------------------

    def assign(self, numbers: Collection[int]) -> None:
        """Own these partitions from now on. Claims of lost partitions end; claims of partitions that stay go on."""
        self.assigned = frozenset(numbers)
        self._followed = None  # also if they are the same: another may have had them in between
        for place, part in list(self.parts.items()):
            part.is_checked = False
            if place.partition not in self.assigned:
                part.is_lost = True
                del self.parts[place]

    def find_topic_again(self) -> None:
        """Follow the topic that bears the name now: it is another topic than before."""
        self._followed = None
        for part in self.parts.values():
            part.is_checked = False

    @property
    def is_behind(self) -> bool:
        """Whether the next poll takes over partitions first."""
        return self._followed is None

    @property
    def is_thirsty(self) -> bool:
        """Whether the reader may read more of a partition, however much there is of others."""
        return any(part.is_wanted for part in self.parts.values())

    async def _follow(self) -> Consumer:
        """Return a consumer that reads the owned partitions.

        A partition goes on where it was read to, or begins at its committed offset.

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
                continue  # the offsets that were committed meanwhile are our own
            self.topic_id = topic_id
            self.id_ends = "-" + blake2b(f"{topic_id}/{self._group.name}".encode(), digest_size=8).hexdigest()
            for place in places:
                self._adopt(place, committed.get(place), range(begins[place], ends[place] + 1))
            self._read_from_here(consumer)
            self._followed = assigned

    async def _check_topic(self) -> None:
        """Ask, every `CHECK_S`, whether another topic bears the name now; if so, stop following the old one."""
        if self._followed is None or not self.assigned or asyncio.get_running_loop().time() < self._check_at:
            return
        with suppress(*UNAVAILABLE):  # the next poll finds out why
            if await self._asked_id(TopicPartition(self._topic, min(self.assigned))) != self.topic_id:
                self._followed = None

    async def _asked_id(self, place: TopicPartition) -> str:
        self._check_at = asyncio.get_running_loop().time() + CHECK_S
        return await self._group.topic_id(place)

    def _adopt(self, place: TopicPartition, found: OffsetAndMetadata | None, there: range) -> None:
        """Go on with a partition if nobody else has owned it; else begin at its committed offset."""
        part, committed = self.parts.get(place), None if found is None else found.offset
        start = committed
        if part is not None and part.topic_id == self.topic_id:
            if part.is_own(committed) and part.offsets.read_to in there:
                part.committed, part.is_checked = committed, True
                return
            part.is_lost = not part.is_own(
                committed
            )  # else it was cut off: nobody gets the records that have not ended
            start = committed if part.is_lost else part.offsets.read_to
        is_others = found is not None and found.metadata.startswith(NOTE) and found.metadata != NOTE + self.topic_id
        if start is not None and (start not in there or is_others):
            self._tell_out_of_range(place, start, there)
            start = there.start
        self.parts[place] = FeedPart(place, self.topic_id, there.start if start is None else start, committed)

    def _tell_out_of_range(self, place: TopicPartition, offset: int, there: range) -> None:
        text = (
            "%s, group %s: partition %d was to be read from offset %d, and holds %d to %d: the topic was deleted, or "
            "cut off; it is read from its beginning"
        )
        log.error(text, self.name, self._group.name, place.partition, offset, there.start, there.stop - 1)

    def _read_from_here(self, consumer: Consumer) -> None:
        consumer.assign(list(self.parts))
        for place, part in self.parts.items():  # before it can look for a position of its own
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
        """Read some records of each partition that has none left to give out and not too many that have not ended.

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
            raise StoreUnavailableError(self.name, "what was to be read next is not there") from error
        except UNAVAILABLE as error:
            await self.disconnect()
            raise StoreUnavailableError(self.name, reason_of(error, "Read")) from error
        except Exception:
            self._followed = None  # what the call had taken of other partitions by then is lost, and read again (K23)
            raise

    async def disconnect(self) -> None:
        """Close the consumer; the next poll makes another one."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop(consumer)
