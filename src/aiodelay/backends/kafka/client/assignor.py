"""`ASSIGNOR`: divides partitions among the members of a group. A change of members moves few partitions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b
from typing import Any

from aiokafka.cluster import ClusterMetadata
from aiokafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

__all__ = ["ASSIGNOR", "shared"]


def shared(topic: str, partitions: Collection[int], members: Collection[str]) -> dict[str, list[int]]:
    """Share a topic's partitions among members by rendezvous hashing. The shares differ by at most one partition."""
    parts: dict[str, list[int]] = {member: [] for member in members}
    least, larger = divmod(len(partitions), len(members))
    left = set(partitions)
    for _, member, number in sorted((_weight(topic, n, member), member, n) for member in members for n in partitions):
        part = parts[member]
        if number not in left or len(part) > least or (len(part) == least and not larger):
            continue
        larger -= len(part) == least
        part.append(number)
        left.remove(number)
    return parts


def _weight(topic: str, number: int, member: str) -> bytes:
    return blake2b(f"{topic}/{number}/{member}".encode(), digest_size=8).digest()


class _Assignor(AbstractPartitionAssignor):  # type: ignore[misc]  # aiokafka has no types
    """Rendezvous hashing for aiokafka's groups. This class keeps no state: all groups of a process share it (K10)."""

    name = "aiodelay"

    @classmethod
    def assign(
        cls, cluster: ClusterMetadata, members: Mapping[str, ConsumerProtocolMemberMetadata]
    ) -> dict[str, ConsumerProtocolMemberAssignment]:
        """Share the partitions of each topic among the members that subscribe to it."""
        found: dict[str, list[tuple[str, list[int]]]] = {member: [] for member in members}
        for topic in sorted({topic for each in members.values() for topic in each.subscription}):
            wanting = [member for member, each in members.items() if topic in each.subscription]
            for member, part in shared(topic, cluster.partitions_for_topic(topic) or (), wanting).items():
                found[member].append((topic, sorted(part)))
        return {member: ConsumerProtocolMemberAssignment(0, parts, b"") for member, parts in found.items()}

    @classmethod
    def metadata(cls, topics: Iterable[str]) -> ConsumerProtocolMemberMetadata:
        """Return the topics to which this member subscribes."""
        return ConsumerProtocolMemberMetadata(0, sorted(topics), b"")

    @classmethod
    def on_assignment(cls, assignment: ConsumerProtocolMemberAssignment) -> None:
        """Do nothing: this assignor has no state."""


ASSIGNOR: Any = _Assignor
"""The value for a consumer's `partition_assignment_strategy`."""
