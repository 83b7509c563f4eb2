"""`RemoteCancels`: asks the owners of partitions to cancel messages, and returns their outcomes."""

from __future__ import annotations

from collections.abc import Sequence

from aiokafka import TopicPartition
from msgspec.structs import replace

from aiodelay.backends.kafka.client import UNAVAILABLE, reason_of
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.store.assignment import Assignment, Lookup
from aiodelay.backends.kafka.topics.writer import Writer
from aiodelay.core.ids import new_op
from aiodelay.core.values import Cancel, Outcome, Refused, Unknown
from aiodelay.errors import StoreUnavailableError

from .cancel_requests import ask_to_cancel
from .user_writes import UserWrites

__all__ = ["RemoteCancels"]


class RemoteCancels:
    """Cancels messages in partitions that other processes own.

    Args:
        cluster: The cluster of the topics.
        assignment: Knows the topics and their partitions.
        lookup: Finds the partition of an id.
        writer: A writer, open while the store is open.
        writes: Knows whether anything may be written.
    """

    def __init__(
        self, cluster: Cluster, assignment: Assignment, lookup: Lookup, writer: Writer, writes: UserWrites
    ) -> None:
        self._cluster, self._assignment, self._lookup = cluster, assignment, lookup
        self._writer, self._writes = writer, writes

    async def ask(self, cancels: Sequence[Cancel]) -> Sequence[Outcome]:
        """Ask the owners to cancel messages. If a message is not in the partition of its key, ask in all partitions."""
        asked = [replace(each, op=new_op()) for each in cancels]
        try:
            if refusal := await self._writes.refusal():
                return [Refused("unavailable", refusal) for _ in cancels]
            places = {each: self._lookup.places(each.id) for each in asked}
            outcomes = await ask_to_cancel(self._cluster, self._writer, places)
            strays = [i for i, each in enumerate(outcomes) if each == Refused("not_found")]
            again = {replace(asked[i], op=new_op()): self._everywhere() for i in strays}
            for i, found in zip(strays, await ask_to_cancel(self._cluster, self._writer, again), strict=True):
                outcomes[i] = found
        except UNAVAILABLE as error:
            return [Unknown(reason_of(error)) for _ in cancels]
        except StoreUnavailableError as error:
            return [Unknown(error.reason) for _ in cancels]
        return outcomes

    def _everywhere(self) -> list[TopicPartition]:
        counts = self._assignment.counts
        return [TopicPartition(topic, number) for topic, n in counts.items() for number in range(n)]
