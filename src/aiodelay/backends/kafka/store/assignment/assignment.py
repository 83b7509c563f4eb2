"""`Assignment`: the partitions that this process owns now. It takes partitions over and gives them up.

The processes that have opened `work` share the partitions by a consumer group for each topic. The group shares them
again whenever a process comes or goes. With the options `member` and `members` there is no group: a process owns every
n-th partition.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial

from aiokafka import TopicPartition

from aiodelay.backends.kafka.client import ClockCheck
from aiodelay.backends.kafka.store.partition import Callbacks, Partition
from aiodelay.backends.kafka.store.store_options import StoreOptions
from aiodelay.backends.kafka.store.store_tasks import StoreTasks
from aiodelay.backends.kafka.topics.group import Group
from aiodelay.backends.kafka.topics.targets import Targets
from aiodelay.backends.kafka.topics.topic import Topic
from aiodelay.backends.kafka.topics.topic_watch import TopicWatch
from aiodelay.errors import StoreMismatchError, StoreTooNewError
from aiodelay.ports.clock import Clock

from .look_ahead import look_ahead
from .partition_factory import PartitionFactory
from .reader import Reader
from .waiters import Waiters

__all__ = ["Assignment"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")


class Assignment:
    """The partitions of one store that this process owns.

    Args:
        options: The options of the store.
        clock: The clock of the store.
        clock_check: Compares this clock with the clocks of the brokers.
        targets: Knows which topics take messages.
        tasks: Runs the reader, the groups and the partitions.
    """

    waiters: Waiters
    factory: PartitionFactory
    reader: Reader
    watch: TopicWatch

    def __init__(
        self, options: StoreOptions, clock: Clock, clock_check: ClockCheck, targets: Targets, tasks: StoreTasks
    ) -> None:
        self._options, self._tasks = options, tasks
        self.waiters = Waiters()
        self.factory = PartitionFactory(options, clock, clock_check, targets, self.waiters.workers)
        self.reader = Reader(options.cluster)
        self.partitions: Mapping[TopicPartition, Partition] = {}
        self.counts: dict[str, int] = {}
        """The number of partitions of each topic. New messages go into the first topic."""
        self.groups: dict[str, Group] = {}
        self.lost: dict[str, StoreMismatchError] = {}
        """The topics that were deleted."""
        self.too_new: StoreTooNewError | None = None
        """The error if a feature is in use that this version does not know; None = all features are known."""
        self.watch = self._new_watch()
        self.told_restored: Callable[[float], None] | None = None
        self._running: dict[object, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None

    def _new_watch(self) -> TopicWatch:
        return TopicWatch(self._options.cluster, self._options.topics, self._lose)

    # --- opening and closing ------------------------------------------------------------------------------

    def open(self, topics: Sequence[Topic]) -> None:
        """Begin to watch the topics. This process owns none of their partitions yet."""
        self.counts = {topic.name: topic.partitions for topic in topics}
        self.factory.use(topics)
        self.watch, self.lost, self.too_new = self._new_watch(), {}, None
        self._watching = self._tasks.start(self.watch.run(), "aiodelay kafka topics")

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in (self._watching, *self._running.values()):
            if task is not None:
                task.cancel()

    def close(self) -> None:
        """Give up all partitions."""
        self._running.clear()
        self.partitions = {}

    # --- owning -------------------------------------------------------------------------------------------

    @property
    def is_owner(self) -> bool:
        """Whether this process owns partitions or waits for some. A process that only schedules does neither."""
        return bool(self._running)

    @property
    def is_whole(self) -> bool:
        """Whether this process owns every partition, and so knows the final outcome of each command."""
        return bool(self.partitions) and len(self.partitions) == sum(self.counts.values())

    def own(self, worker: str) -> None:
        """Begin to own partitions.

        Args:
            worker: The name of this process for other members.

        Raises:
            ConfigurationError: The option `index` names a directory that cannot be used.
        """
        if self.is_owner or not self._tasks.is_open:
            return
        self.factory.check_folder(self._options.cluster.name)
        if not self._options.members:
            self.groups = {topic: self._group(topic, worker) for topic in self.counts}
        self._start(self.reader, self.reader.run(), "aiodelay kafka reader")
        for topic, group in self.groups.items():
            self._start(group, group.run(), f"aiodelay kafka group {topic}")
        self._start(self.factory.fetcher, self._look_ahead(), "aiodelay kafka horizon")
        if not self.groups:
            for topic, n in self.counts.items():
                self.assign(topic, range(self._options.member, n, self._options.members))

    def _group(self, topic: str, worker: str) -> Group:
        name, instance = f"aiodelay.{topic}", self._options.instance
        return Group(self._options.cluster, topic, name, self.assign, member=worker, instance=instance)

    def _start(self, key: object, coroutine: Coroutine[None, None, None], name: str) -> None:
        self._running[key] = self._tasks.start(coroutine, name)

    async def _look_ahead(self) -> None:
        name = self._options.cluster.name
        await look_ahead(name, self._owned, fullness=self.fullness, on_near=self.waiters.wake)

    def _owned(self) -> Collection[Partition]:
        return self.partitions.values()

    def assign(self, topic: str, numbers: Collection[int]) -> None:
        """Own exactly these partitions of a topic from now on. A partition that is owned already is not interrupted."""
        if not self._tasks.is_open:
            return
        if topic in self.lost or self.too_new is not None:
            numbers = ()
        if not numbers:
            self.watch.doubt(topic)
        before, wanted = self.partitions, {TopicPartition(topic, n) for n in numbers if n < self.counts[topic]}
        kept = {place: each for place, each in before.items() if place.topic != topic or place in wanted}
        added = {place: self.factory.make(place, self._callbacks(place)) for place in sorted(wanted - before.keys())}
        self.partitions = kept | added
        for place in before.keys() - kept.keys():
            before[place].give_up()
            self._running.pop(before[place]).cancel()
        for partition in added.values():
            self._start(partition, partition.run(), f"aiodelay kafka partition {partition.index.name}")
        self._read_open()
        self.waiters.wake()

    def _lose(self, topic: str, what: str) -> None:
        """Give up the partitions of a deleted topic, and do not own partitions of a new topic with its name."""
        if topic in self.lost:
            return
        then = "the topic as it was; or restart this process, and schedule the lost messages again"
        problem = StoreMismatchError(f"topic {topic}", f"{what}: its pending messages are gone", then)
        self.lost[topic] = problem
        log.error("%s: nothing more is delivered or changed: %s", topic, problem)
        self._leave(topic)

    def _leave(self, topic: str) -> None:
        """Give up all partitions of a topic, and leave its group."""
        self.assign(topic, ())
        group = self._running.pop(self.groups.get(topic), None)
        if group is not None:
            group.cancel()

    def _give_way(self, error: StoreTooNewError) -> None:
        """Leave all partitions to processes that know the features in use."""
        if self.too_new is None:
            self.too_new = error
            log.error("%s", error)
            # Later, not now: the reader is still iterating over these partitions.
            asyncio.get_running_loop().call_soon(self._leave_all)

    def _leave_all(self) -> None:
        for topic in self.counts:
            self._leave(topic)

    def check_features(self) -> None:
        """Refuse to dispatch while a feature is in use that this version does not know.

        Raises:
            StoreTooNewError: Names the feature.
        """
        if self.too_new is not None:
            raise self.too_new

    def fullness(self) -> str:
        """Return an error text if `max_pending` messages or more are pending; otherwise ""."""
        most, pending = self._options.max_pending, sum(each.index.pending for each in self.partitions.values())
        if not most or pending < most:
            return ""
        return (
            f"{pending} messages are pending, and max_pending={most} allows no more: raise this limit, or add processes"
        )

    # --- callbacks of partitions --------------------------------------------------------------------------

    def _callbacks(self, place: TopicPartition) -> Callbacks:
        return Callbacks(
            may_begin=partial(self._may_begin, place),
            silence=partial(self._silence, place.topic),
            on_change=self.waiters.wake,
            skip=partial(self.reader.skip, place),
            on_open=self._read_open,
            on_restored=self._on_restored,
            on_too_new=self._give_way,
        )

    async def _may_begin(self, place: TopicPartition, is_fenced: bool) -> None:  # noqa: FBT001 - a callback
        """Wait until a session of a partition may begin. With the options `member` and `members`, no group is asked."""
        group = self.groups.get(place.topic)
        if group is not None:
            await group.may_begin(is_fenced)
        await self.watch.until_same(place)

    def _silence(self, topic: str) -> str:
        """Return why the group may have given a topic's partitions away; "" = it has not, or there is no group."""
        group = self.groups.get(topic)
        return "" if group is None else group.silence

    def _read_open(self) -> None:
        """Have the reader read all partitions whose first offset to read is known."""
        self.reader.assign({place: each for place, each in self.partitions.items() if each.is_open})

    def _on_restored(self, seconds: float) -> None:
        if self.told_restored is not None:
            self.told_restored(seconds)
