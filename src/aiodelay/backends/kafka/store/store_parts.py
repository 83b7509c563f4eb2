"""`StoreParts`: the parts of a Kafka store. The classes that implement the ports of the store share them."""

from __future__ import annotations

from typing import NamedTuple

from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.topics.targets import Targets
from aiodelay.backends.kafka.topics.writer import Writer
from aiodelay.ports.clock import Clock

from .assignment import Assignment, Lookup
from .store_options import StoreOptions
from .store_tasks import StoreTasks

__all__ = ["StoreParts", "StorePort"]


class StoreParts(NamedTuple):
    """The parts of one store.

    Attributes:
        options: The options in the URL of the store.
        clock: The clock of the store.
        tasks: The background tasks of the store.
        targets: Knows which topics take messages.
        assignment: The partitions that this process owns.
        lookup: Finds the partition of a message.
        writer: Writes the records that a process may write without owning the partition.
    """

    options: StoreOptions
    clock: Clock
    tasks: StoreTasks
    targets: Targets
    assignment: Assignment
    lookup: Lookup
    writer: Writer

    @property
    def cluster(self) -> Cluster:
        """The cluster of the topics."""
        return self.options.cluster


class StorePort:
    """Base of the classes that implement one port of a store over its parts."""

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts
