"""`Group`: this process as a member of a consumer group, which decides which member should own a partition.

During a rebalance nothing stops. A member goes on with the partitions that it keeps. It gives up a lost partition when
it learns of the loss.

The group alone does not fence off an earlier owner. In a store, the epoch of the producer fences off an earlier owner
of a partition. In a source, Kafka refuses an offset commit that has an older generation of the group.

`Group` does not read records. If it did, reading would stop at each rebalance.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from aiokafka import ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import CommitFailedError, KafkaError
from aiokafka.structs import OffsetAndMetadata

from aiodelay.backends.kafka.client import (
    ASSIGNOR,
    UNAVAILABLE,
    Consumer,
    log_failure,
    plain_consumer_of,
    reason_of,
    stop,
    topic_id,
)
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.core.backoff import pause_s
from aiodelay.errors import StoreMismatchError

__all__ = ["HEARTBEAT_MS", "METADATA_MS", "SESSION_MS", "Group"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

SESSION_MS = 10_000
"""A member that sends no heartbeat for this long loses its partitions to other members."""
HEARTBEAT_MS = 1_000
UUID_LENGTH = 37
"""Length of the suffix that a broker adds to a member's name to make the member's id: a hyphen and a UUID."""
METADATA_MS = 10_000
"""Greatest age of a client's metadata about topics."""


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
        cluster: The cluster of the group.
        topic: The topic whose partitions the group shares.
        name: The name of the group.
        on_assigned: Called with the topic and this member's partitions after each rebalance.
        assignors: The assignors that this member accepts. If aiodelay's is not the only one, other clients can be
            members too.
        before_revoked: Called before a rebalance, while this member still has its partitions.
        member: The name of this member for other members.
        instance: A name that survives a restart. If this member starts again within `SESSION_MS`, it has its partitions
            at once. "" = it is a new member after each start.
    """

    problem: StoreMismatchError | None = None
    """The error if another process has joined under this member's `instance`. This member has then left for good."""

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
        instance: str = "",
    ) -> None:
        self._cluster, self._topic, self._on_assigned = cluster, topic, on_assigned
        self.name: str = name
        self._client_id, self._instance, self._member_id = member, instance, ""
        self._assignors, self._before_revoked = assignors, before_revoked
        self.was_assigned: asyncio.Event = asyncio.Event()
        self._settled = asyncio.Event()
        self._consumer: Consumer | None = None
        self.why: str = ""
        self._failures = 0
        self._heard_s = 0.0

    @property
    def silence(self) -> str:
        """The reason why this member may have lost its partitions.

        It is "" if a heartbeat was acknowledged within the last `SESSION_MS`.
        """
        if asyncio.get_running_loop().time() - self._heard_s <= SESSION_MS / 1000:
            return ""
        return f"the group has acknowledged no heartbeat for {SESSION_MS / 1000:g} s"

    async def may_begin(self, is_fenced: bool) -> None:  # noqa: FBT001 - a callback
        """Wait until a partition's session may begin. No session begins during a rebalance.

        Args:
            is_fenced: Whether another owner may have taken the partition over. Then first wait for two heartbeats:
                the group reports a rebalance with their answers. Also wait for them if the group was silent for too
                long, for example because this process was suspended.
        """
        if is_fenced or self.silence:
            await asyncio.sleep(2 * HEARTBEAT_MS / 1000)
        await self._settled.wait()

    async def is_settled(self) -> None:
        """Return when no rebalance is going on."""
        await self._settled.wait()

    async def run(self) -> None:
        """Be a member until cancelled, or until another process takes this member's `instance`. Rejoin after errors."""
        while self.problem is None:
            try:
                await self._be_member()
            except Exception as error:  # noqa: BLE001 - as in `SessionRunner.run`
                self._failures += 1
                self.why = reason_of(error)
                log_failure(log, f"the group of {self._topic} is left", self.why, error, UNAVAILABLE)
            await asyncio.sleep(pause_s(self._failures))

    async def _be_member(self) -> None:
        consumer = self._consumer = plain_consumer_of(
            self._cluster,
            client_id=self._client_id,
            group_id=self.name,
            group_instance_id=self._instance or None,
            partition_assignment_strategy=self._assignors,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
            metadata_max_age_ms=METADATA_MS,
        )
        try:
            consumer.subscribe([self._topic], listener=_Listener(self))
            await consumer.start()
            consumer.tell_heartbeats(self._note_heartbeat)
            if self._instance:
                consumer.stay_out_once_forgotten()
            while True:
                await consumer.getmany(timeout_ms=SESSION_MS)  # returns no records (all are paused), but raises errors
        except KafkaError:
            await self._check_name()
            raise
        finally:
            self._settled.clear()
            self._consumer = None
            await stop(consumer)

    def _note_heartbeat(self, sent_s: float) -> None:
        """Note when an acknowledged heartbeat was sent. Its answer may be read much later."""
        self._heard_s = sent_s

    async def _check_name(self) -> None:
        """Leave the group for good if another process has joined it under this member's `instance`."""
        if not self._instance or not self._member_id:
            return
        with suppress(*UNAVAILABLE):
            if self._instance in await self.others():
                then = "a name of its own for each process; start this process again to take its partitions back"
                self.problem = StoreMismatchError(f"instance={self._instance}", "another process's now", then)
                log.error("the group of %s is left, and nothing more is delivered here: %s", self._topic, self.problem)
                self._on_assigned(self._topic, ())

    async def topic_id(self, place: TopicPartition) -> str:
        """Return the id of the topic that has this name now.

        Raises:
            KafkaError: There is no such topic, or the cluster does not answer.
            TimeoutError: The cluster does not answer in time.
        """
        return await topic_id(self._member().client, place, timeout_s=self._cluster.timeout_ms / 1000)

    async def others(self) -> Mapping[str, Collection[TopicPartition]]:
        """Return the other members and their partitions. Empty while this process is not a member.

        Raises:
            KafkaError: The cluster does not answer.
            TimeoutError: The cluster does not answer in time.
        """
        if self._consumer is None:
            return {}
        async with asyncio.timeout(self._cluster.timeout_ms / 1000):
            members = await self._consumer.group_members()
        return {member_id[:-UUID_LENGTH]: part for member_id, part in members.items() if member_id != self._member_id}

    async def committed(self, places: Collection[TopicPartition]) -> Mapping[TopicPartition, OffsetAndMetadata]:
        """Return the group's committed offset of each partition. Partitions without a committed offset are left out.

        Raises:
            KafkaError: The offsets cannot be read.
            TimeoutError: The cluster does not answer in time.
        """
        async with asyncio.timeout(self._cluster.timeout_ms / 1000):
            found = await self._member().committed_offsets(places)
        return {place: each for place, each in found.items() if each.offset >= 0}

    async def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Commit offsets, if this process is a member of the group's current generation.

        Raises:
            KafkaError: The offsets were not committed. `CommitFailedError`: this process is not a member.
            TimeoutError: The offsets may have been committed.
        """
        consumer = self._member()
        if not consumer.is_member:
            raise CommitFailedError
        async with asyncio.timeout(self._cluster.timeout_ms / 1000):
            await consumer.commit(dict(offsets))

    def _member(self) -> Consumer:
        if self._consumer is None or not self._consumer.is_started:
            raise CommitFailedError
        return self._consumer

    async def revoke(self) -> None:
        """Call `before_revoked`. From now on, no session begins until the rebalance has ended."""
        self._settled.clear()
        if self._before_revoked is not None:
            await self._before_revoked()

    def assign(self, assigned: Collection[TopicPartition]) -> None:
        """Take the assigned partitions, and give up all others."""
        if self._consumer is None:  # this process has left the group meanwhile
            return
        self._consumer.pause(*assigned)
        self._member_id = self._consumer.member_id
        self._heard_s = asyncio.get_running_loop().time()
        self._on_assigned(self._topic, {place.partition for place in assigned})
        self.why, self._failures = "", 0
        self.was_assigned.set()
        self._settled.set()
