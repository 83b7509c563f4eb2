"""Consumers: the methods of aiokafka that aiodelay uses, how consumers are made, and how they are stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from aiokafka import ConsumerRebalanceListener, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.structs import OffsetAndMetadata

from aiodelay.core.completion import run_to_completion

from ._overrides.consumer import OwnConsumer
from .client import Client
from .options import Cluster

__all__ = ["CLOSE_S", "Consumer", "GroupMember", "consumer_of", "plain_consumer_of", "stop"]

CLOSE_S = 2.0


class GroupMember(Protocol):
    """A consumer as a member of a group. aiokafka documents the methods that have no docstring here."""

    def subscribe(self, topics: Collection[str], *, listener: ConsumerRebalanceListener) -> None: ...
    async def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None: ...
    async def committed(self, partition: TopicPartition) -> int | None: ...

    @property
    def is_member(self) -> bool:
        """Whether this consumer belongs to the current generation of the group."""

    @property
    def member_id(self) -> str:
        """The id that the group gave this member. It is "" until this member has joined."""

    def stay_out_once_forgotten(self) -> None:
        """Have this member raise an error when the broker has forgotten it, instead of joining the group again.

        Call this after `start`.
        """

    def tell_heartbeats(self, told: Callable[[float], None]) -> None:
        """Set the function to call for each acknowledged heartbeat. Call this after `start`.

        Args:
            told: Takes the time in the event loop when the heartbeat was sent.
        """

    async def committed_offsets(self, places: Iterable[TopicPartition]) -> Mapping[TopicPartition, OffsetAndMetadata]:
        """Return the offset that the group has committed in each partition, or -1 for a partition without an offset.

        Raises:
            KafkaError: The group's coordinator does not answer, or refuses.
        """

    async def group_members(self) -> Mapping[str, Collection[TopicPartition]]:
        """Return the partitions of each member of the group, by member id. Empty if the coordinator is unknown.

        Raises:
            KafkaError: The group's coordinator does not answer, or refuses.
        """


class Consumer(GroupMember, Protocol):
    """A consumer. aiokafka documents the methods that have no docstring here."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def end(self) -> None:
        """Close the connections for good, and end the tasks that a cancelled `stop` has left."""

    def assign(self, partitions: Collection[TopicPartition]) -> None: ...
    def assignment(self) -> Collection[TopicPartition]: ...
    def partitions_for_topic(self, topic: str) -> Collection[int] | None: ...

    def seek(self, partition: TopicPartition, offset: int) -> None: ...
    async def seek_to_end(self, *partitions: TopicPartition) -> bool: ...
    async def position(self, partition: TopicPartition) -> int: ...
    def pause(self, *partitions: TopicPartition) -> None: ...
    def resume(self, *partitions: TopicPartition) -> None: ...
    async def getmany(
        self, *partitions: TopicPartition, timeout_ms: int, max_records: int | None = None
    ) -> Mapping[TopicPartition, Sequence[ConsumerRecord]]: ...

    async def beginning_offsets(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]: ...
    async def end_offsets(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]: ...
    def highwater(self, partition: TopicPartition) -> int | None: ...
    def last_stable_offset(self, partition: TopicPartition) -> int | None: ...

    @property
    def client(self) -> Client:
        """The client with the connections to the cluster."""

    @property
    def is_started(self) -> bool:
        """Whether `start` has connected the consumer."""


def plain_consumer_of(cluster: Cluster, *topics: str, **options: Any) -> Consumer:  # noqa: ANN401 - aiokafka's
    """Return a consumer with aiokafka's own defaults. The caller must start it.

    Args:
        cluster: The cluster to read from.
        topics: The topics to read. Without topics, the caller names topics or partitions later (`subscribe`, `assign`).
        options: Options of aiokafka's consumer.

    Raises:
        ConfigurationError: This version of aiokafka was not tested.
    """
    ours = {"enable_auto_commit": False, "request_timeout_ms": cluster.timeout_ms}
    consumer: Consumer = OwnConsumer(*topics, **cluster.client, **(ours | options))
    return consumer


def consumer_of(cluster: Cluster, *topics: str, **options: Any) -> Consumer:  # noqa: ANN401 - aiokafka's
    """Return a consumer that reads committed records and commits no offsets. The caller must start it.

    Args:
        cluster: The cluster to read from.
        topics: The topics to read. Without topics, the caller names partitions later with `assign`.
        options: Options of aiokafka's consumer. They override the options of this function.
    """
    ours = {"isolation_level": "read_committed", "auto_offset_reset": "none"}
    return plain_consumer_of(cluster, *topics, **(ours | options))


async def stop(consumer: Consumer) -> None:
    """Stop a consumer within twice `CLOSE_S`, also if the cluster does not answer, and close its connections.

    A caller that is cancelled meanwhile goes on waiting: a consumer that is half closed keeps its connections.
    """
    await run_to_completion(_stop(consumer), name="aiodelay kafka consumer closes")


async def _stop(consumer: Consumer) -> None:
    async with asyncio.TaskGroup() as tasks:
        leaving = tasks.create_task(_leave(consumer), name="aiodelay kafka consumer leaves")
        await asyncio.wait([leaving], timeout=CLOSE_S)
        consumer.client.break_connections()
        await asyncio.wait([leaving], timeout=CLOSE_S)
        leaving.cancel()
    await consumer.end()


async def _leave(consumer: Consumer) -> None:
    with suppress(KafkaError, OSError):
        await consumer.stop()
