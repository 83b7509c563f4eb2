"""`Lookup`: finds the partition of a message or a dead letter, if this process owns the partition."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from aiokafka import TopicPartition

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.pending.pending_index import PendingIndex
from aiodelay.backends.kafka.store.partition import Partition
from aiodelay.backends.kafka.store.store_tasks import StoreTasks
from aiodelay.core.values import DeadKey
from aiodelay.errors import StoreUnavailableError, UnsupportedByStoreError

from .assignment import Assignment

__all__ = ["Lookup"]


class Lookup:
    """Finds the partitions of messages.

    Args:
        name: The name of the store for error messages.
        assignment: The partitions that this process owns.
        tasks: Knows whether the store is open.
    """

    def __init__(self, name: str, assignment: Assignment, tasks: StoreTasks) -> None:
        self._name, self._assignment, self._tasks = name, assignment, tasks

    def owned(self) -> Collection[Partition]:
        """Return the partitions that users may inspect.

        Raises:
            ClosedError: The store is not open.
            UnsupportedByStoreError: This process only schedules.
            StoreUnavailableError: A topic was deleted, or this version does not know a feature in use.
        """
        self._tasks.check_open()
        for problem in filter(None, [*self._assignment.lost.values(), self._assignment.too_new]):
            raise StoreUnavailableError(self._name, str(problem))
        if not self._assignment.is_owner:
            raise UnsupportedByStoreError(
                "lookup", "impossible in a process that only schedules", "a lookup in a process that dispatches"
            )
        return self._assignment.partitions.values()

    # --- one partition ------------------------------------------------------------------------------------

    def partition_of(self, message_id: str) -> Partition:
        """Return the partition that has a message of this id, or would get it.

        Raises:
            UnsupportedByStoreError: Another process owns the partition.
        """
        return self.where(self.places(message_id), lambda index: index.knows(message_id))

    def partition_of_letter(self, key: DeadKey) -> Partition:
        """Return the partition that has a dead letter, or would get it.

        Raises:
            UnsupportedByStoreError: Another process owns the partition.
        """
        return self.where(self.places(key.id), lambda index: index.table.letters.has(key))

    def where(self, places: Sequence[TopicPartition], is_there: Callable[[PendingIndex], bool]) -> Partition:
        """Return the partition that has a message, in the first topic that has it.

        If no topic has the message, return the partition into which it would be put.

        Raises:
            UnsupportedByStoreError: Another process owns a partition that may have the message.
        """
        for place in places:
            found = next((each for each in self._at(place) if is_there(each.index)), None)
            if found is not None:
                return found
            self._check_owned(place)
        return self._assignment.partitions[places[0]]

    def owner_of(self, message_id: str) -> Partition | None:
        """Return the partition into which a new message of this id goes, if this process owns the partition."""
        return self._assignment.partitions.get(self.places(message_id)[0])

    # --- all partitions of a message ----------------------------------------------------------------------

    def partitions_of(self, message_id: str) -> Sequence[Partition]:
        """Return the owned partitions that may have messages of this id, in the order of the topics."""
        return [each for place in self.places(message_id) for each in self._at(place)]

    def all_partitions_of(self, message_id: str) -> Sequence[Partition]:
        """Return all partitions that may have messages of this id.

        Raises:
            UnsupportedByStoreError: Another process owns one of these partitions.
        """
        self.owned()
        for place in self.places(message_id):
            self._check_owned(place)
        return self.partitions_of(message_id)

    def places(self, message_id: str) -> list[TopicPartition]:
        """Return the partition in each topic to which the key of an id belongs."""
        key = records.key_of(message_id)
        return [TopicPartition(topic, records.partition_of(key, n)) for topic, n in self._assignment.counts.items()]

    def _check_owned(self, place: TopicPartition) -> None:
        if place not in self._assignment.partitions:
            raise UnsupportedByStoreError(
                "lookup",
                f"impossible here: another process owns partition {place.partition}",
                "a lookup in the process that owns the partition",
            )

    def _at(self, own: TopicPartition) -> Iterator[Partition]:
        """Yield the owned partitions that may have a key: the key's own, and those of its topic with misplaced keys."""
        partitions = self._assignment.partitions
        if own in partitions:
            yield partitions[own]
        for place, partition in partitions.items():
            if partition.index.placement.is_mixed and place.topic == own.topic and place != own:
                yield partition
