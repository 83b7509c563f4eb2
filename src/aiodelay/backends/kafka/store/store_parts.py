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
        options: The options in its URL.
        clock: Where the store reads the time.
        tasks: Its background tasks.
        targets: Which topics take messages.
        assignment: The partitions that this process owns.
        lookup: Finds messages in them.
        writer: Writes what any user may write.
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
        """Where the topics are."""
        return self.options.cluster


class StorePort:
    """Implements one port of a store over the store's parts."""

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts
