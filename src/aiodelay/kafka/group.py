"""A process's place in the group of those that share a topic: it says who should own a partition.

Nothing is stopped while partitions are shared out anew: what a member keeps it goes on with, and what it has lost it
gives up when it learns so. What fences it off is another matter: of a store's partitions an epoch, of a source's the
group's generation, without which no offset is committed. Reading is not done here, by which it would stop as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from aiokafka.errors import CommitFailedError, for_code
from aiokafka.protocol.admin import DescribeGroupsRequest
from aiokafka.structs import OffsetAndMetadata

from aiodelay.pausing import pause_s

from .assignor import ASSIGNOR
from .client import UNAVAILABLE, log_failure, reason_of, stop, tame
from .incarnation import topic_id
from .options import Cluster

__all__ = ["METADATA_MS", "SESSION_MS", "Group"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

SESSION_MS = 10_000
"""After so long without a heartbeat a member's partitions are given to others."""
HEARTBEAT_MS = 1_000
METADATA_MS = 10_000
"""How old what is known of topics may become."""


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    def __init__(self, group: Group) -> None:
        self._group = group

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        await self._group.revoke()

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        self._group.assign(assigned)


class Group:
    """This process as a member of a group.

    Args:
        cluster: Where it is.
        topic: What is shared.
        name: The group's.
        on_assigned: Called with the topic and this member's partitions, whenever the group has been shared out.
        assignors: How partitions are shared; with more than ours, other clients may be members beside us.
        before_revoked: Called while this member still has what it had, before the group is shared out anew.
        member: What other members know this one by.
    """

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        name: str,
        on_assigned: Callable[[str, Collection[int]], None],
        *,
        assignors: Sequence[Any] = (ASSIGNOR,),
        before_revoked: Callable[[], Awaitable[None]] | None = None,
        member: str = "aiodelay",
    ) -> None:
        self._cluster, self._topic, self._on_assigned = cluster, topic, on_assigned
        self.name: str = name
        self._client_id = member
        self._assignors, self._before_revoked = assignors, before_revoked
        self.was_assigned: asyncio.Event = asyncio.Event()
        self._settled = asyncio.Event()
        self._consumer: AIOKafkaConsumer | None = None
        self.why: str = ""
        self._failures = 0

    async def may_begin(self, is_fenced: bool) -> None:  # noqa: FBT001 - a callback
        """Return when a partition's session may begin: not while the group is being shared out.

        Args:
            is_fenced: Another owner may have taken the partition over, which the group would tell soon.
        """
        if is_fenced:
            await asyncio.sleep(2 * HEARTBEAT_MS / 1000)
        await self._settled.wait()

    async def is_settled(self) -> None:
        """Return when the group is not being shared out."""
        await self._settled.wait()

    async def run(self) -> None:
        """Be a member until cancelled; no error ends this."""
        while True:
            try:
                await self._be_member()
            except Exception as error:  # noqa: BLE001 - as in `Partition.run`
                self._failures += 1
                self.why = reason_of(error)
                log_failure(log, f"the group of {self._topic} is left", self.why, error, UNAVAILABLE)
            await asyncio.sleep(pause_s(self._failures))

    async def _be_member(self) -> None:
        tame()
        consumer = self._consumer = AIOKafkaConsumer(
            **self._cluster.client,
            client_id=self._client_id,
            group_id=self.name,
            partition_assignment_strategy=self._assignors,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
            enable_auto_commit=False,
            request_timeout_ms=self._cluster.timeout_ms,
            metadata_max_age_ms=METADATA_MS,
        )
        try:
            consumer.subscribe([self._topic], listener=_Listener(self))
            await consumer.start()
            while True:
                await consumer.getmany(timeout_ms=SESSION_MS)  # nothing, but errors: all partitions are paused
        finally:
            self._settled.clear()
            self._consumer = None
            await stop(consumer)

    async def topic_id(self, place: TopicPartition) -> str:
        """Return the id of the topic that bears the name now.

        Raises:
            KafkaError: There is no such topic now, or no answer.
            TimeoutError: Not in time.
        """
        return await topic_id(self._member()._client, place, timeout_s=self._cluster.timeout_ms / 1000)

    async def others(self) -> Mapping[str, Collection[TopicPartition]]:
        """Return the other members, and which partitions each has; nothing while this process is no member.

        Raises:
            KafkaError: No answer.
            TimeoutError: Not in time.
        """
        coordinator = None if self._consumer is None else self._consumer._coordinator
        if coordinator is None or coordinator.coordinator_id is None:
            return {}
        async with asyncio.timeout(self._cluster.timeout_ms / 1000):
            request = DescribeGroupsRequest([self.name])
            answer = await self._member()._client.send(coordinator.coordinator_id, request)
        ((code, _, _, _, _, members, *_),) = answer.groups
        if code:
            raise for_code(code)(self.name)
        return {
            name: ConsumerProtocolMemberAssignment.decode(assignment).partitions() if assignment else []
            for member_id, name, _, _, assignment in members
            if member_id != coordinator.member_id
        }

    async def committed(self, places: Collection[TopicPartition]) -> Mapping[TopicPartition, OffsetAndMetadata]:
        """Return what the group has committed, where it has.

        Raises:
            KafkaError: They cannot be read.
            TimeoutError: Not in time.
        """
        async with asyncio.timeout(self._cluster.timeout_ms / 1000):
            found = await self._member()._coordinator.fetch_committed_offsets(list(places))
        return {place: each for place, each in found.items() if each.offset >= 0}

    async def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Commit offsets, if this process is a member of the group's generation.

        Raises:
            KafkaError: They were not committed: `CommitFailedError` if it is no member, or will not be.
            TimeoutError: They may have been committed.
        """
        consumer = self._member()
        if consumer._coordinator.generation < 0:
            raise CommitFailedError
        async with asyncio.timeout(self._cluster.timeout_ms / 1000):
            await consumer.commit(dict(offsets))

    def _member(self) -> AIOKafkaConsumer:
        if self._consumer is None or self._consumer._coordinator is None:
            raise CommitFailedError
        return self._consumer

    async def revoke(self) -> None:
        """Begin nothing new until the group has been shared out."""
        self._settled.clear()
        if self._before_revoked is not None:
            await self._before_revoked()

    def assign(self, assigned: Collection[TopicPartition]) -> None:
        """Take what is ours, and give up the rest."""
        if self._consumer is None:  # it has left meanwhile
            return
        self._consumer.pause(*assigned)
        self._on_assigned(self._topic, {place.partition for place in assigned})
        self.why, self._failures = "", 0
        self.was_assigned.set()
        self._settled.set()
