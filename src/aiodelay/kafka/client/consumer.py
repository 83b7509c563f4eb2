"""Consumers: they read any header's name (K18), and tell the members and offsets of their group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.admin import DescribeGroupsRequest
from aiokafka.structs import OffsetAndMetadata

from aiodelay.completion import run_to_completion
from aiodelay.kafka.options import Cluster

from ._overrides.client import CLOSE_S, Client
from ._overrides.rebound import rebound
from ._overrides.record_batches import Records

__all__ = ["Consumer", "consumer_of", "stop"]


class _ForgottenError(KafkaError):  # type: ignore[misc]  # aiokafka has no types
    """The broker does not know this member any more."""

    def __str__(self) -> str:
        return "the group does not know this process any more"


class _Fetcher(Fetcher):  # type: ignore[misc]  # aiokafka has no types
    _proc_fetch_request = rebound(Fetcher._proc_fetch_request, MemoryRecords=Records)


class _Coordinator(GroupCoordinator):  # type: ignore[misc]  # aiokafka has no types
    stays_out = False
    """Fail once the broker has forgotten this member. aiokafka would join again, and push another member out."""

    on_heartbeat: Callable[[float], None] | None = None
    """Called with the loop's time at which a heartbeat was sent that the group has acknowledged."""

    def reset_generation(self) -> None:
        if self.stays_out and not self._closing.done():
            raise _ForgottenError
        super().reset_generation()

    async def _do_heartbeat(self) -> bool:
        sent_s = asyncio.get_running_loop().time()
        is_acknowledged: bool = await super()._do_heartbeat()
        if is_acknowledged and self.on_heartbeat is not None:
            self.on_heartbeat(sent_s)
        return is_acknowledged


class Consumer(AIOKafkaConsumer):  # type: ignore[misc]  # aiokafka has no types
    """aiokafka's consumer, on a client of ours.

    Args:
        topics: The topics to read; none: `assign` names partitions later.
        options: aiokafka's.

    Raises:
        ConfigurationError: This version of aiokafka was not tested.
    """

    __init__ = rebound(AIOKafkaConsumer.__init__, AIOKafkaClient=Client)
    start = rebound(AIOKafkaConsumer.start, Fetcher=_Fetcher, GroupCoordinator=_Coordinator)

    @property
    def client(self) -> Client:
        """The client of its cluster."""
        client: Client = self._client
        return client

    @property
    def is_started(self) -> bool:
        """Whether `start` has connected it."""
        return self._coordinator is not None

    @property
    def is_member(self) -> bool:
        """Whether it belongs to the group's generation."""
        return self._coordinator is not None and self._coordinator.generation >= 0

    @property
    def member_id(self) -> str:
        """The id that the group gave this member; "" before it has joined."""
        member_id: str = self._coordinator.member_id
        return member_id

    def stay_out_once_forgotten(self) -> None:
        """Fail, instead of joining again, once the broker has forgotten this member. Call it after `start`."""
        self._coordinator.stays_out = True

    def tell_heartbeats(self, told: Callable[[float], None]) -> None:
        """Call `told` with the loop's time at which each heartbeat was sent that the group acknowledges.

        Call it after `start`.
        """
        self._coordinator.on_heartbeat = told

    async def committed_offsets(self, places: Iterable[TopicPartition]) -> Mapping[TopicPartition, OffsetAndMetadata]:
        """Return the offsets that the group has committed; -1 for a partition without one.

        Raises:
            KafkaError: The group's coordinator does not answer, or refuses.
        """
        found: Mapping[TopicPartition, OffsetAndMetadata]
        found = await self._coordinator.fetch_committed_offsets(list(places))
        return found

    async def group_members(self) -> Mapping[str, Collection[TopicPartition]]:
        """Return each group member's partitions by its id; no members while the coordinator is unknown.

        Raises:
            KafkaError: The group's coordinator does not answer, or refuses.
        """
        if self._coordinator is None or self._coordinator.coordinator_id is None:
            return {}
        answer = await self._client.send(self._coordinator.coordinator_id, DescribeGroupsRequest([self._group_id]))
        ((code, _, _, _, _, members, *_),) = answer.groups
        if code:
            raise for_code(code)(self._group_id)
        return {member_id: _partitions_of(part) for member_id, _, _, _, part in members}


def _partitions_of(assignment: bytes) -> Collection[TopicPartition]:
    return ConsumerProtocolMemberAssignment.decode(assignment).partitions() if assignment else []


def consumer_of(cluster: Cluster, *topics: str, **options: Any) -> Consumer:  # noqa: ANN401 - aiokafka's
    """Return a consumer that reads committed records, and commits no offsets. The caller starts it.

    Args:
        cluster: The cluster to read from.
        topics: The topics to read; none: `assign` names partitions later.
        options: aiokafka's; they replace ours.
    """
    ours = {
        "isolation_level": "read_committed",
        "auto_offset_reset": "none",
        "enable_auto_commit": False,
        "request_timeout_ms": cluster.timeout_ms,
    }
    consumer: Consumer = Consumer(*topics, **cluster.client, **(ours | options))
    return consumer


async def stop(consumer: Consumer) -> None:
    """Stop a consumer within twice `CLOSE_S`, also while the cluster is away; its connections are closed afterwards.

    A caller that is cancelled meanwhile goes on waiting: a consumer that is half closed keeps its connections.
    """
    await run_to_completion(_stop(consumer), name="aiodelay kafka consumer closes")


async def _stop(consumer: Consumer) -> None:
    async with asyncio.TaskGroup() as tasks:
        leaving = tasks.create_task(_leave(consumer), name="aiodelay kafka consumer leaves")
        await asyncio.wait([leaving], timeout=CLOSE_S)
        await consumer.client.close()
        await asyncio.wait([leaving], timeout=CLOSE_S)
        leaving.cancel()


async def _leave(consumer: Consumer) -> None:
    with suppress(KafkaError, OSError):
        await consumer.stop()
