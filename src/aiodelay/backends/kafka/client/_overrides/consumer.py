"""`OwnConsumer`: a consumer that reads any header name (K18), and reports the members and offsets of its group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.admin import DescribeGroupsRequest
from aiokafka.structs import OffsetAndMetadata

from .client import OwnClient
from .rebound import rebound
from .record_batches import Records

__all__ = ["OwnConsumer"]

_COORDINATOR_TASKS = ("_coordination_task", "_heartbeat_task", "_commit_refresh_task", "_reset_committed_task")
"""The attributes of aiokafka's coordinators that hold a task. A consumer without a group has only the last one."""


class _ForgottenError(KafkaError):  # type: ignore[misc]  # aiokafka has no types
    """The broker has forgotten this member of the group."""

    def __str__(self) -> str:
        return "the group does not know this process any more"


class _Fetcher(Fetcher):  # type: ignore[misc]  # aiokafka has no types
    _proc_fetch_request = rebound(Fetcher._proc_fetch_request, MemoryRecords=Records)


class _Coordinator(GroupCoordinator):  # type: ignore[misc]  # aiokafka has no types
    stays_out = False
    """Whether this member raises an error if the broker has forgotten it. aiokafka would join the group again instead.
    Then the group would remove the member that has taken over this member's `instance`.
    """

    on_heartbeat: Callable[[float], None] | None = None
    """Called for each acknowledged heartbeat, with the time in the event loop when it was sent."""

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


class OwnConsumer(AIOKafkaConsumer):  # type: ignore[misc]  # aiokafka has no types
    """aiokafka's consumer, with an `OwnClient`. `Consumer` documents its methods.

    Args:
        topics: The topics to read. Without topics, the caller names partitions later with `assign`.
        options: Options of aiokafka's consumer.

    Raises:
        ConfigurationError: This version of aiokafka was not tested.
    """

    __init__ = rebound(AIOKafkaConsumer.__init__, AIOKafkaClient=OwnClient)
    start = rebound(AIOKafkaConsumer.start, Fetcher=_Fetcher, GroupCoordinator=_Coordinator)

    @property
    def client(self) -> OwnClient:
        client: OwnClient = self._client
        return client

    @property
    def is_started(self) -> bool:
        return self._coordinator is not None

    @property
    def is_member(self) -> bool:
        return self._coordinator is not None and self._coordinator.generation >= 0

    @property
    def member_id(self) -> str:
        member_id: str = self._coordinator.member_id
        return member_id

    def stay_out_once_forgotten(self) -> None:
        self._coordinator.stays_out = True

    def tell_heartbeats(self, told: Callable[[float], None]) -> None:
        self._coordinator.on_heartbeat = told

    async def end(self) -> None:
        await self._client.close()
        tasks = {getattr(self._coordinator, name, None) for name in _COORDINATOR_TASKS}
        if self._fetcher is not None:
            tasks |= {self._fetcher._fetch_task, *self._fetcher._pending_tasks}
        if left := {task for task in tasks if task is not None and not task.done()}:
            for task in left:
                task.cancel()
            await asyncio.wait(left)

    async def committed_offsets(self, places: Iterable[TopicPartition]) -> Mapping[TopicPartition, OffsetAndMetadata]:
        found: Mapping[TopicPartition, OffsetAndMetadata]
        found = await self._coordinator.fetch_committed_offsets(list(places))
        return found

    async def group_members(self) -> Mapping[str, Collection[TopicPartition]]:
        if self._coordinator is None or self._coordinator.coordinator_id is None:
            return {}
        answer = await self._client.send(self._coordinator.coordinator_id, DescribeGroupsRequest([self._group_id]))
        ((code, _, _, _, _, members, *_),) = answer.groups
        if code:
            raise for_code(code)(self._group_id)
        return {member_id: _partitions_of(part) for member_id, _, _, _, part in members}


def _partitions_of(assignment: bytes) -> Collection[TopicPartition]:
    return ConsumerProtocolMemberAssignment.decode(assignment).partitions() if assignment else []
