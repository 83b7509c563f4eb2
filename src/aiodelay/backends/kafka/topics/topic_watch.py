"""`TopicWatch`: notices that a schedules topic was deleted. A topic that is created again has another id."""

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
"""Pause between two checks of a topic."""
MISSING_S = 3.0
"""A topic must be missing for this long to count as deleted: a broker that has just started may not know it yet."""


class TopicWatch:
    """Remembers the first id of each topic, and compares it with the current id from then on.

    Args:
        cluster: The cluster of the topics.
        topics: The names of the topics.
        on_lost: Called with the name of a lost topic, and with the cause in words, such as "deleted".
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
        """The topics that may have been deleted or created again, each with the reason; "" = not checked yet."""

    def doubt(self, topic: str) -> None:
        """Check a topic soon, and do not rely on it until then."""
        self.doubts[topic] = f"topic {topic} has no partition for this process, and may have been deleted"
        self._doubted.set()

    async def run(self) -> None:
        """Check all topics every `CHECK_S` until cancelled, also after errors."""
        while True:
            self._doubted.clear()  # before the checks: a doubt from here on ends the wait below
            for topic in self._topics:
                try:
                    await self._compare(TopicPartition(topic, 0))
                except UNAVAILABLE as error:  # an owner's sessions report the same failure
                    log.debug("topic %s cannot be checked: %s", topic, reason_of(error))
                except Exception as error:  # noqa: BLE001 - as in `SessionRunner.run`
                    log_failure(log, f"topic {topic} cannot be checked", reason_of(error), error, UNAVAILABLE)
            await self._doubted.wait(CHECK_S)

    async def until_same(self, place: TopicPartition) -> None:
        """Wait until a partition's leader has confirmed that the topic was not created again."""
        failures = 0
        while not await self._is_same(place):
            failures += 1
            await asyncio.sleep(pause_s(failures))

    async def _is_same(self, place: TopicPartition) -> bool:
        try:
            return await self._compare(place)
        except UNAVAILABLE as error:
            reason = self.doubts[place.topic] = reason_of(error, "Describe")
            log_failure(log, f"topic {place.topic} cannot be checked", reason, error, UNAVAILABLE)
            return False

    async def _compare(self, place: TopicPartition) -> bool:
        """Compare the topic's current id with its first id. Say whether they are the same.

        Raises:
            KafkaError, TimeoutError, OSError: The cluster does not answer.
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
        """Return the topic's current id; "" from a broker that gives topics no ids."""
        try:
            return await topic_id(await self._connected(), place, timeout_s=self._timeout_s)
        except UnknownTopicOrPartitionError:
            raise
        except NO_TOPIC_IDS as error:
            if place.topic not in self._ids:
                log.warning(
                    "topic %s: %s; aiodelay cannot notice if the topic is deleted and created again", place.topic, error
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
        """Disconnect. The next check connects again."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()
