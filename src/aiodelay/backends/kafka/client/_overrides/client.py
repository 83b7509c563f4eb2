"""`OwnClient`: the client with the brokers, topics and connections of a cluster, inside all other Kafka clients.

If the last answer named no leader for a partition, the client pauses before it asks again (K26). A producer's client
asks only for the topics that the producer writes to (K27). A closed client makes no new connection (K31).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.conn import CloseReason
from aiokafka.errors import KafkaConnectionError

from aiodelay.backends.kafka.client.versions import check_version
from aiodelay.core.backoff import pause_s

from .connection import Start, connect
from .rebound import rebound

__all__ = ["OwnClient"]

LONGEST_PAUSE_S = 0.5


class _NoTopic(frozenset[str]):
    """An empty collection of topics that counts as true.

    If an empty collection counts as false, as an empty set does, aiokafka asks for all topics of the cluster.
    """

    def __bool__(self) -> bool:
        return True


class OwnClient(AIOKafkaClient):  # type: ignore[misc]  # aiokafka has no types
    """A client of one cluster.

    Args:
        options: Options of aiokafka's client.

    Raises:
        ConfigurationError: This version of aiokafka was not tested.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - aiokafka's
        check_version()
        super().__init__(**options)
        self._is_urgent = asyncio.Event()
        self._asked_in_vain = 0
        """How many requests for metadata in a row got no answer, or an answer without a leader for some partition."""
        self._unnamed: Collection[str] | None = None
        """The topics in a request for metadata, as long as no topic was added to this client. None = all topics."""
        self._is_closed = False

    _found_or_made = rebound(AIOKafkaClient._get_conn, create_conn=connect)

    async def _get_conn(self, node_id: Any, *, group: Any = ConnectionGroup.DEFAULT) -> Any:  # noqa: ANN401 - aiokafka's
        connection = None if self._is_closed else await self._found_or_made(node_id, group=group)
        if connection is not None and self._is_closed:  # `close` ran meanwhile, and did not see this connection
            connection.close(reason=CloseReason.SHUTDOWN)
            return None
        return connection

    def break_connections(self) -> list[asyncio.Future[Any]]:
        """Close all connections. Requests that wait for an answer fail. The next request makes a new connection.

        Returns:
            A future for each connection. It is done once the connection is closed.
        """
        return [connection.close(reason=CloseReason.SHUTDOWN) for connection in self._conns.values()]

    async def close(self) -> None:
        """Close all connections, and make no connection afterwards: tasks of aiokafka may still ask for one (K31)."""
        self._is_closed = True
        ends = self.break_connections()
        if self._sync_task is not None:
            self._sync_task.cancel()
            ends.append(self._sync_task)
        if ends:
            await asyncio.wait(ends)

    async def bootstrap(self) -> None:
        """Connect to the first host that answers.

        Raises:
            KafkaConnectionError: No host answers. The error names each host and its reason.
        """
        start = Start(len(self.hosts))
        try:
            await rebound(AIOKafkaClient.bootstrap, create_conn=start.connect)(self)
        except KafkaConnectionError as error:
            raise KafkaConnectionError("; ".join(start.refusals) or str(error)) from error

    def ask_for_named_topics(self) -> None:
        """Never ask for all topics of the cluster: there may be thousands (K27)."""
        self._unnamed = _NoTopic()

    def ask_metadata_now(self) -> None:
        """End the pause before the next request for metadata."""
        self._is_urgent.set()

    async def partition_count(self, topic: str, *, timeout_s: float) -> int | None:
        """Return the number of partitions of a topic, or None if there is no such topic.

        Raises:
            KafkaError: The cluster does not answer.
            TimeoutError: The cluster does not answer in time.
        """
        known = self.cluster.partitions_for_topic(topic)
        for _ in range(2):
            if known is not None:
                break
            async with asyncio.timeout(timeout_s):
                self.add_topic(topic)
                self.ask_metadata_now()
                await self.force_metadata_update()
            known = self.cluster.partitions_for_topic(topic)
        if known is None:
            self._topics.discard(topic)  # otherwise each answer lacks this topic, and the client asks again
            return None
        return len(known)

    async def _metadata_update(self, cluster: Any, topics: Collection[str] | None) -> Any:  # noqa: ANN401 - aiokafka's
        if self._asked_in_vain:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s(self._asked_in_vain, longest_s=LONGEST_PAUSE_S)):
                    await self._is_urgent.wait()
        self._is_urgent.clear()
        is_updated = await super()._metadata_update(cluster, self._unnamed if topics == set() else topics)
        is_whole = is_updated and all(_has_leaders(cluster, topic) for topic in topics or ())
        self._asked_in_vain = 0 if is_whole else self._asked_in_vain + 1
        if topics is not None and topics != self._topics:  # topics were added during the request
            self._is_urgent.set()
            if not self._md_update_waiter.done():  # otherwise, aiokafka would ask for them only at its next update
                self._md_update_waiter.set_result(None)
        return is_updated


def _has_leaders(cluster: Any, topic: str) -> bool:  # noqa: ANN401 - aiokafka's
    partitions = cluster.partitions_for_topic(topic)
    return partitions is not None and partitions == cluster.available_partitions_for_topic(topic)
