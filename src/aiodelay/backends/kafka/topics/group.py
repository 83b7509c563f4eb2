"""A process's place in the group of those that share a topic: it says who should own a partition.

Nothing is stopped while partitions are shared out anew: what a member keeps it goes on with, and what it has lost it
gives up when it learns so. What fences it off is another matter: of a store's partitions an epoch, of a source's the
group's generation, without which no offset is committed. Reading is not done here, by which it would stop as well.
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
"""After so long without a heartbeat a member's partitions are given to others."""
HEARTBEAT_MS = 1_000
UUID_LENGTH = 37
"""With the hyphen before it: a broker adds so much to the name of a member, to make the member's id."""
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
        instance: A name by which this member, started again within its session, is the same one, and has its partitions
            at once; "": it is a new member each time.
    """

    problem: StoreMismatchError | None = None
    """Another process has joined under this one's name, and this one has left."""

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
        """Why this member may have lost its partitions; "" while the group has heard of it within its session."""
        if asyncio.get_running_loop().time() - self._heard_s <= SESSION_MS / 1000:
            return ""
        return f"the group has acknowledged no heartbeat for {SESSION_MS / 1000:g} s"

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
        """Be a member until cancelled, or another process takes this one's name; no error ends this."""
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
                await consumer.getmany(timeout_ms=SESSION_MS)  # nothing, but errors: all partitions are paused
        except KafkaError:
            await self._check_name()
            raise
        finally:
            self._settled.clear()
            self._consumer = None
            await stop(consumer)

    def _note_heartbeat(self, sent_s: float) -> None:
        """Note when a heartbeat was sent that the group has acknowledged: its answer may be read much later."""
        self._heard_s = sent_s

    async def _check_name(self) -> None:
        """Leave the group for good if another process has joined it under this one's name."""
        if not self._instance or not self._member_id:
            return
        with suppress(*UNAVAILABLE):
            if self._instance in await self.others():
                then = "a name of its own for each process; start this one again to take its partitions back"
                self.problem = StoreMismatchError(f"instance={self._instance}", "another process's now", then)
                log.error("the group of %s is left, and nothing more is delivered here: %s", self._topic, self.problem)
                self._on_assigned(self._topic, ())

    async def topic_id(self, place: TopicPartition) -> str:
        """Return the id of the topic that bears the name now.

        Raises:
            KafkaError: There is no such topic now, or no answer.
            TimeoutError: Not in time.
        """
        return await topic_id(self._member().client, place, timeout_s=self._cluster.timeout_ms / 1000)

    async def others(self) -> Mapping[str, Collection[TopicPartition]]:
        """Return the other members, and which partitions each has; nothing while this process is no member.

        Raises:
            KafkaError: No answer.
            TimeoutError: Not in time.
        """
        if self._consumer is None:
            return {}
        async with asyncio.timeout(self._cluster.timeout_ms / 1000):
            members = await self._consumer.group_members()
        return {member_id[:-UUID_LENGTH]: part for member_id, part in members.items() if member_id != self._member_id}

    async def committed(self, places: Collection[TopicPartition]) -> Mapping[TopicPartition, OffsetAndMetadata]:
        """Return what the group has committed, where it has.

        Raises:
            KafkaError: They cannot be read.
            TimeoutError: Not in time.
        """
        async with asyncio.timeout(self._cluster.timeout_ms / 1000):
            found = await self._member().committed_offsets(places)
        return {place: each for place, each in found.items() if each.offset >= 0}

    async def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Commit offsets, if this process is a member of the group's generation.

        Raises:
            KafkaError: They were not committed: `CommitFailedError` if it is no member, or will not be.
            TimeoutError: They may have been committed.
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
        """Begin nothing new until the group has been shared out."""
        self._settled.clear()
        if self._before_revoked is not None:
            await self._before_revoked()

    def assign(self, assigned: Collection[TopicPartition]) -> None:
        """Take what is ours, and give up the rest."""
        if self._consumer is None:  # it has left meanwhile
            return
        self._consumer.pause(*assigned)
        self._member_id = self._consumer.member_id
        self._heard_s = asyncio.get_running_loop().time()
        self._on_assigned(self._topic, {place.partition for place in assigned})
        self.why, self._failures = "", 0
        self.was_assigned.set()
        self._settled.set()
