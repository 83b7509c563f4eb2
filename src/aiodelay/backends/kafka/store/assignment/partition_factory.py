"""`PartitionFactory`: makes the `Partition` objects for the partitions that an `Assignment` takes over."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from aiokafka import TopicPartition

from aiodelay.backends.kafka.client import ClockCheck
from aiodelay.backends.kafka.pending.rate_limit import RateLimit
from aiodelay.backends.kafka.store.partition import Callbacks, Partition, Place, Shared
from aiodelay.backends.kafka.store.partition.disk import Disk
from aiodelay.backends.kafka.store.partition.horizon import Fetch
from aiodelay.backends.kafka.store.store_options import StoreOptions
from aiodelay.backends.kafka.topics.targets import Targets
from aiodelay.backends.kafka.topics.topic import LEAST_LAG_MS, Topic
from aiodelay.core.dict_table.table import Workers
from aiodelay.errors import ConfigurationError
from aiodelay.ports.clock import Clock

from .fetcher import Fetcher

__all__ = ["PartitionFactory"]

DAY_MS = 86_400_000


class PartitionFactory:
    """Makes partitions that share a clock, workers and limits.

    Args:
        options: The options of the store.
        clock: The clock of the store.
        clock_check: Compares this clock with the clocks of the brokers.
        targets: Knows which topics take messages.
        workers: The dispatching roles that this process has opened.
    """

    fetcher: Fetcher

    def __init__(
        self, options: StoreOptions, clock: Clock, clock_check: ClockCheck, targets: Targets, workers: Workers
    ) -> None:
        self._options, self._clock, self._clock_check = options, clock, clock_check
        self._targets, self._workers = targets, workers
        self._claims, self._pace = count(1), RateLimit(options.catch_up)
        self.fetcher = Fetcher(options.cluster)
        self.guard: Callable[[str], object] | None = None
        """Raises an error for a destination that other programs may not use; None = they may use all destinations."""
        self._topics: dict[str, Topic] = {}

    def use(self, topics: Sequence[Topic]) -> None:
        """Note the topics and their settings, for the partitions that are made from now on."""
        self._topics = {topic.name: topic for topic in topics}

    def check_folder(self, name: str) -> None:
        """Check the directory of the option `index`, if the index is kept on disk.

        Raises:
            ConfigurationError: The directory does not exist, or this process cannot write there.
        """
        folder = self._options.index
        if folder and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
            raise ConfigurationError(f"index in {name}", folder, "a directory in which files can be made")

    def make(self, place: TopicPartition, callbacks: Callbacks) -> Partition:
        """Return a new partition. The caller must run it."""
        fetch = partial(self.fetcher.fetch, place)
        n = self._topics[place.topic].partitions
        return Partition(
            Place(place.topic, place.partition, n, self._options.accept_partitions == n),
            self._shared(),
            callbacks,
            fetch=fetch,
            patience_s=self._patience_s(place.topic),
            disk=self._disk_of(place, fetch),
        )

    def _shared(self) -> Shared:
        options = self._options
        return Shared(
            cluster=options.cluster,
            schedules=options.topics,
            targets=self._targets,
            clock=self._clock,
            clock_check=self._clock_check,
            claims=self._claims,
            workers=self._workers,
            pace=self._pace,
            history=options.history,
            horizon_ms=options.horizon_ms,
            guard=self.guard,
        )

    def most_bytes(self, topic: str) -> int | None:
        """Return the setting `max.message.bytes` of a topic; None = not known."""
        most = self._topics[topic].settings.get("max.message.bytes")
        return None if most is None else int(most)

    def _patience_s(self, topic: str) -> float:
        """Return half of the time for which a topic keeps tombstones, in seconds."""
        return int(self._topics[topic].settings.get("delete.retention.ms", DAY_MS)) / 2000

    def _disk_of(self, place: TopicPartition, fetch: Fetch) -> Disk | None:
        folder = self._options.index
        if not folder:
            return None
        path = os.path.join(folder, f"{place.topic}-{place.partition}.index")
        lag_ms = int(self._topics[place.topic].settings.get("min.compaction.lag.ms", LEAST_LAG_MS))
        max_age_ms = min(int(self._patience_s(place.topic) * 1000), lag_ms)
        return Disk(path, fetch, self._clock, max_age_ms=max_age_ms)
