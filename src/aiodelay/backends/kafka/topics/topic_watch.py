"""Whether the schedules topics are still those that were opened: a topic that is created again has another id."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from aiokafka import TopicPartition
from aiokafka.errors import UnknownTopicOrPartitionError

from aiodelay.backends.kafka.client import (
    NO_TOPIC_IDS,
    UNAVAILABLE,
    Client,
    client_of,
    log_failure,
    reason_of,
    topic_id,
)
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.core.backoff import pause_s
from aiodelay.core.wakeup import WakeUp

from .group import METADATA_MS

__all__ = ["TopicWatch"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

CHECK_S = 2.0
"""Pause between two looks at a topic."""
MISSING_S = 3.0
"""So long a topic must be missing until it counts as deleted: a broker that has just started may not know it yet."""


class TopicWatch:
    """Remembers the id that each topic has first, and compares it with the topic's id from then on.

    Args:
        cluster: Where the topics are.
        topics: Their names.
        on_lost: Called with the name of a topic that was deleted, and with what has happened to it.
    """

    def __init__(self, cluster: Cluster, topics: Collection[str], on_lost: Callable[[str, str], None]) -> None:
        self._cluster, self._topics, self._on_lost = cluster, topics, on_lost
        self._timeout_s = cluster.timeout_ms / 1000
        self._client: Client | None = None
        self._connecting = asyncio.Lock()
        self._ids: dict[str, str] = {}
        self._missing_since: dict[str, float] = {}
        self._doubted = WakeUp()
        self.doubts: dict[str, str] = dict.fromkeys(topics, "")
        """The topics that are not known to be the ones they were, and why not, where that is known."""

    def doubt(self, topic: str) -> None:
        """Look at a topic soon, and do not count on it until then."""
        self.doubts[topic] = f"topic {topic} has no partition for this process, and may have been deleted"
        self._doubted.set()

    async def run(self) -> None:
        """Look at all topics every `CHECK_S` until cancelled; no error ends this."""
        while True:
            self._doubted.clear()
            for topic in self._topics:
                try:
                    await self._look(TopicPartition(topic, 0))
                except UNAVAILABLE as error:  # an owner's sessions tell about it
                    log.debug("topic %s cannot be looked at: %s", topic, reason_of(error))
                except Exception as error:  # noqa: BLE001 - as in `SessionRunner.run`
                    log_failure(log, f"topic {topic} cannot be looked at", reason_of(error), error, UNAVAILABLE)
            await self._doubted.wait(CHECK_S)

    async def until_same(self, place: TopicPartition) -> None:
        """Return once a partition's leader has answered that the topic is the one it was."""
        failures = 0
        while not await self._is_same(place):
            failures += 1
            await asyncio.sleep(pause_s(failures))

    async def _is_same(self, place: TopicPartition) -> bool:
        try:
            return await self._look(place)
        except UNAVAILABLE as error:
            reason = self.doubts[place.topic] = reason_of(error, "Describe")
            log_failure(log, f"topic {place.topic} cannot be looked at", reason, error, UNAVAILABLE)
            return False

    async def _look(self, place: TopicPartition) -> bool:
        """Compare a topic's id; say whether it is the one it was.

        Raises:
            KafkaError, TimeoutError, OSError: The cluster does not say.
        """
        topic = place.topic
        try:
            found = await self._asked(place)
        except UnknownTopicOrPartitionError:
            self._miss(topic)
            return False
        self._missing_since.pop(topic, None)
        if found != self._ids.setdefault(topic, found):
            self._on_lost(topic, "deleted, and created again")
            return False
        self.doubts.pop(topic, None)
        return True

    def _miss(self, topic: str) -> None:
        now_s = asyncio.get_running_loop().time()
        self.doubts[topic] = f"topic {topic} is missing"
        if now_s - self._missing_since.setdefault(topic, now_s) >= MISSING_S:
            self._on_lost(topic, "deleted")

    async def _asked(self, place: TopicPartition) -> str:
        """Return a topic's id; "" from a broker that gives topics none."""
        try:
            return await topic_id(await self._connected(), place, timeout_s=self._timeout_s)
        except UnknownTopicOrPartitionError:
            raise
        except NO_TOPIC_IDS as error:
            if place.topic not in self._ids:
                log.warning(
                    "topic %s: %s, so nobody will notice if it is deleted and created again", place.topic, error
                )
            return ""
        except UNAVAILABLE:
            await self.close()
            raise

    async def _connected(self) -> Client:
        async with self._connecting:
            if self._client is None:
                client = client_of(self._cluster, metadata_max_age_ms=METADATA_MS)
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await client.bootstrap()
                        await client.set_topics(self._topics)
                except BaseException:
                    await client.close()
                    raise
                self._client = client
            return self._client

    async def close(self) -> None:
        """Disconnect; the next look connects again."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()
