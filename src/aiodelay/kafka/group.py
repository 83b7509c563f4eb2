"""A process's place in the group of those that share a topic. It says who should own a partition; the epoch decides.

So nothing is stopped while members are shared out anew: what a member keeps it goes on with, and what it has lost it
gives up when it learns so, fenced by the new owner or not. Reading is not done here, by which it would stop as well.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition

from .assignor import ASSIGNOR
from .client import UNAVAILABLE, log_failure, reason_of, stop, tame
from .options import Cluster

__all__ = ["SESSION_MS", "Group"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

SESSION_MS = 10_000
"""After so long without a heartbeat a member's partitions are given to others."""
HEARTBEAT_MS = 1_000
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    def __init__(self, group: Group) -> None:
        self._group = group

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        self._group.revoke()

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        self._group.assign(assigned)


class Group:
    """This process as a member of a group.

    Args:
        cluster: Where it is.
        topic: What is shared; the group is `aiodelay.<topic>`.
        on_assigned: Called with the topic and this member's partitions, whenever the group has been shared out.
    """

    def __init__(self, cluster: Cluster, topic: str, on_assigned: Callable[[str, Collection[int]], None]) -> None:
        self._cluster, self._topic, self._on_assigned = cluster, topic, on_assigned
        self.was_assigned: asyncio.Event = asyncio.Event()
        self._settled = asyncio.Event()
        self._consumer: AIOKafkaConsumer | None = None
        self.why: str = ""

    async def may_begin(self, is_fenced: bool) -> None:  # noqa: FBT001 - a callback
        """Return when a partition's session may begin: not while the group is being shared out.

        Args:
            is_fenced: Another owner may have taken the partition over, which the group would tell soon.
        """
        if is_fenced:
            await asyncio.sleep(2 * HEARTBEAT_MS / 1000)
        await self._settled.wait()

    async def run(self) -> None:
        """Be a member until cancelled; no error ends this."""
        failures = 0
        while True:
            try:
                await self._be_member()
            except Exception as error:  # noqa: BLE001 - as in `Partition.run`
                failures += 1
                self.why = reason_of(error)
                log_failure(log, f"the group of {self._topic} is left", self.why, error, UNAVAILABLE)
            pause = min(FIRST_PAUSE_S * 2 ** min(failures, 10), LONGEST_PAUSE_S)
            await asyncio.sleep(pause * random.uniform(0.5, 1))

    async def _be_member(self) -> None:
        tame()
        consumer = self._consumer = AIOKafkaConsumer(
            **self._cluster.client,
            group_id=f"aiodelay.{self._topic}",
            partition_assignment_strategy=[ASSIGNOR],
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
            enable_auto_commit=False,
            request_timeout_ms=self._cluster.timeout_ms,
        )
        try:
            consumer.subscribe([self._topic], listener=_Listener(self))
            await consumer.start()
            while True:
                await consumer.getmany(timeout_ms=SESSION_MS)  # nothing, but errors: all partitions are paused
        finally:
            self._settled.clear()
            await stop(consumer)

    def revoke(self) -> None:
        """Begin nothing new until the group has been shared out."""
        self._settled.clear()

    def assign(self, assigned: Collection[TopicPartition]) -> None:
        """Take what is ours, and give up the rest."""
        assert self._consumer is not None
        self._consumer.pause(*assigned)
        self._on_assigned(self._topic, {place.partition for place in assigned})
        self.why = ""
        self.was_assigned.set()
        self._settled.set()
