"""`Targets`: knows which topics take messages now.

It asks the cluster outside of transactions, so that a blocked topic delays no messages for other topics.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    BrokerResponseError,
    InvalidProducerIdMapping,
    InvalidTopicError,
    KafkaError,
    LeaderNotAvailableError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    for_code,
)
from msgspec import Struct

from aiodelay.backends.kafka.client import BATCH_BYTES, Admin, Outgoing, admin_of, reason_of
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.records import is_topic
from aiodelay.errors import StoreUnavailableError

__all__ = ["Targets", "refused_topics"]

_KNOWN_MS = 60_000
_SURE_MS = 5_000
"""A message is given up as too large only if the limit of its topic was read within this time."""
_LIMIT = "max.message.bytes"
_AROUND_BYTES = 65_536
"""A record has at most this much besides its value: key, headers, and the headers that a delivery adds."""
_FIRST_MS, _LONGEST_MS = 100, 2_000
_FIRST_REFUSED_MS, _LONGEST_REFUSED_MS = 1_000, 60_000
_REFUSALS = (TopicAuthorizationFailedError, InvalidTopicError, InvalidProducerIdMapping)
"""Errors that aiokafka does not retry, although the record is not the cause."""


class _Blocked(Struct):
    """A topic that takes nothing now.

    Attributes:
        reason: Why it takes nothing.
        times: A count of how often in a row it took nothing. The pause before the next check grows with this number.
        until_ms: The time of the next check.
    """

    reason: str
    times: int
    until_ms: int


class _Limit(Struct, frozen=True):
    """The limit of a topic for the size of a batch.

    Attributes:
        bytes: The most bytes of a batch; None = this process may not read the setting.
        at_ms: The time at which the limit was learnt.
    """

    bytes: int | None
    at_ms: int


class Targets:
    """The state of the topics to which messages are addressed.

    Args:
        cluster: The cluster of the topics.
        now_ms: Returns the store's time.
    """

    def __init__(self, cluster: Cluster, now_ms: Callable[[], int]) -> None:
        self._cluster, self._now_ms = cluster, now_ms
        self._known: dict[str, int] = {}
        self._refusals: dict[str, int] = {}
        self._limits: dict[str, _Limit] = {}
        self._admin: Admin | None = None
        self._asking_lock = asyncio.Lock()
        self.blocked: dict[str, _Blocked] = {}

    def known(self) -> set[str]:
        """Return the topics that are known to take messages."""
        now = self._now_ms()
        return {topic for topic, until_ms in self._known.items() if until_ms > now}

    async def close(self) -> None:
        """Disconnect."""
        admin, self._admin = self._admin, None
        if admin is not None:
            await admin.close()

    @property
    def next_ms(self) -> int | None:
        """The time at which to check the next blocked topic again, or None if no topic is blocked."""
        return min((each.until_ms for each in self.blocked.values()), default=None)

    def over(self) -> list[str]:
        """Return the blocked topics that should be checked again now."""
        now = self._now_ms()
        return [topic for topic, each in self.blocked.items() if each.until_ms <= now]

    def forget(self, topic: str) -> None:
        """Forget a topic for which no message waits."""
        self.blocked.pop(topic, None)

    def took(self, topics: Collection[str]) -> None:
        """Note that these topics have taken records."""
        for topic in self._refusals.keys() & topics:
            del self._refusals[topic]

    def refused(self, topic: str, reason: str) -> None:
        """Note that a topic refuses all records, for example because the right to write is missing."""
        times = self._refusals[topic] = self._refusals.get(topic, 0) + 1
        pause_ms = min(_FIRST_REFUSED_MS << min(times - 1, 10), _LONGEST_REFUSED_MS)
        self._known.pop(topic, None)
        self.blocked[topic] = _Blocked(reason, times, self._now_ms() + pause_ms)

    # --- the largest batch that a topic takes -------------------------------------------------------------

    def batch_bytes(self, topic: str) -> int:
        """Return the most bytes of a batch for a topic."""
        limit = self._limits.get(topic)
        return BATCH_BYTES if limit is None or limit.bytes is None else min(limit.bytes, BATCH_BYTES)

    def excess(self, record: Outgoing) -> str:
        """Return why a record is too large for its topic. Return "" if it is not, or if the limit is unknown."""
        limit = self._limits.get(record.topic)
        if limit is None or limit.bytes is None or len(record.value or b"") + _AROUND_BYTES <= limit.bytes:
            return ""
        size = record.batch_size
        if size <= limit.bytes:
            return ""
        return f"topic {record.topic} takes {limit.bytes} bytes ({_LIMIT}), and this message makes a batch of {size}"

    def found_too_large(self, record: Outgoing) -> None:
        """Note that a record was refused as too large although it was alone in its batch."""
        limit = self._limits.get(record.topic)
        if limit is None or limit.bytes is None or limit.bytes >= record.batch_size:
            self._limits[record.topic] = _Limit(record.batch_size - 1, self._now_ms())

    def doubt(self, topic: str) -> None:
        """Forget the known limit of a topic, because the topic takes less than this limit."""
        self._limits.pop(topic, None)

    async def confirm(self, topics: Collection[str]) -> None:
        """Read the limits of topics again, unless they were learnt just now.

        Raises:
            StoreUnavailableError: The cluster does not answer.
        """
        since_ms = self._now_ms() - _SURE_MS
        in_doubt = [each for each in topics if (limit := self._limits.get(each)) is None or limit.at_ms < since_ms]
        if in_doubt:
            async with self._asking() as admin:
                await self._read_limits(admin, in_doubt)

    async def _read_limits(self, admin: Admin, topics: Collection[str]) -> None:
        asked = [ConfigResource(ConfigResourceType.TOPIC, topic, {_LIMIT: None}) for topic in topics]
        (answer,) = await admin.describe_configs(asked)
        now = self._now_ms()
        for code, _, _, topic, entries in answer.resources:
            values = [] if code else [entry[1] for entry in entries if entry[0] == _LIMIT]
            self._limits[topic] = _Limit(int(values[0]) if values and values[0] else None, now)

    # --- whether a topic takes messages -------------------------------------------------------------------

    async def inspect(self, topics: Collection[str]) -> Mapping[str, str]:
        """Check which topics take messages. Return blocked topics with their reasons, and "" for unblocked topics.

        Raises:
            StoreUnavailableError: The cluster does not answer.
        """
        changed: dict[str, str] = {}
        found = await self._described(topics) if topics else {}
        now = self._now_ms()
        for topic, error in found.items():
            if error is None:
                self._known[topic] = now + _KNOWN_MS
                if self.blocked.pop(topic, None) is not None:
                    changed[topic] = ""
            else:
                times = self.blocked[topic].times + 1 if topic in self.blocked else 0
                pause_ms = min(_FIRST_MS << min(times, 10), _LONGEST_MS)
                self.blocked[topic] = _Blocked(_reason(topic, error), times, now + pause_ms)
                changed[topic] = self.blocked[topic].reason
        return changed

    async def _described(self, topics: Collection[str]) -> dict[str, Exception | None]:
        """Ask about topics without creating any. A name that no topic can have counts as blocked."""
        found: dict[str, Exception | None] = dict.fromkeys(topics, InvalidTopicError())
        named = [topic for topic in topics if is_topic(topic)]
        if not named:
            return found
        async with self._asking() as admin:
            found |= {each["topic"]: _problem(each) for each in await admin.find_topics(named)}
            if there := [topic for topic in named if found[topic] is None]:
                await self._read_limits(admin, there)
        return found

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[Admin]:
        """Yield a client for one caller at a time. Close it if the cluster does not answer."""
        try:
            async with self._asking_lock, asyncio.timeout(self._cluster.timeout_ms / 1000):
                yield await self._started()
        except (KafkaError, TimeoutError, OSError) as error:
            await self.close()
            raise StoreUnavailableError(self._cluster.name, reason_of(error)) from error

    async def _started(self) -> Admin:
        if self._admin is None:
            admin = admin_of(self._cluster)
            try:
                await admin.start()
            except BaseException:
                await admin.close()
                raise
            self._admin = admin
        return self._admin


def _reason(topic: str, error: Exception) -> str:
    return f"no topic {topic!r}" if isinstance(error, UnknownTopicOrPartitionError) else reason_of(error)


def _problem(topic: Mapping[str, Any]) -> Exception | None:
    """Return why a topic, or one of its partitions, takes nothing."""
    if code := topic["error_code"]:
        problem: Exception = for_code(code)()
        return problem
    return LeaderNotAvailableError() if any(each["leader"] < 0 for each in topic["partitions"]) else None


def refused_topics(error: Exception, topic: str) -> Collection[str]:
    """Return the topics that take nothing now, as the error of a batch shows. Empty if a record is the cause."""
    named = error.args[0] if isinstance(error, TopicAuthorizationFailedError) and error.args else None
    if isinstance(named, set):  # because of these forbidden topics, batches for other topics fail too
        return named
    is_rejected = isinstance(error, BrokerResponseError) and not error.retriable
    return () if is_rejected and not isinstance(error, _REFUSALS) else {topic}
