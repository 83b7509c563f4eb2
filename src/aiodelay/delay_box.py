"""The delay box: takes JSON requests from a Kafka topic, and delivers their messages to topics after a countdown.

The command `aiodelay delay-box` runs a delay box. Begin with docs/delay-box.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import AsyncExitStack
from hashlib import blake2b
from types import TracebackType
from typing import Any, Literal, Self

from .backends import registry
from .core.urls import UrlOptions
from .core.validation import check_count, listed
from .core.values import Put
from .errors import ConfigurationError, UnsupportedByStoreError, kind_of, missing_extra, shortened
from .ports import Store
from .scheduler import MOST_PAYLOAD, Scheduler

try:
    from aiokafka import TopicPartition

    from .backends.kafka.client.options import Cluster, read_cluster, read_topics
    from .backends.kafka.records import SINK
    from .backends.kafka.sink import KafkaSink, check_topic
    from .backends.kafka.store.commands import RECORDED
    from .backends.kafka.store.store import KafkaStore
    from .backends.kafka.topics.group import Group
    from .backends.kafka.topics.intake import Intake
    from .backends.kafka.topics.requests import Rules, read_request
    from .backends.kafka.topics.topic import prepare_intake
    from .backends.kafka.topics.writer import Writer
except ImportError as _error:
    raise missing_extra(_error, "aiodelay.delay_box", "kafka") from _error

__all__ = ["DelayBox"]

FORM = "kafka://host:9092/delays, kafka://host:9092/delays,others"
MAX_PARTITIONS = 1000


class DelayBox:
    """Takes requests from Kafka topics into a store, and delivers their messages to topics of the same cluster.

    A request is a record with the JSON value `{"topic": "T", "message": "...", "countdown": 120}`. Each request is
    stored once: the store keeps the position of each partition, and updates the position in the step that stores the
    messages. Any number of boxes may share a store. They divide the partitions among themselves.

    If a request cannot be read, or names a topic that is not allowed, the box writes the request to a dead topic, with
    the reason. Such a request does not stop other requests.

    Use the box with `async with`, or call `run`.

    Args:
        store: A store or its URL: the box then also delivers the messages. Or a `Scheduler` with a Kafka sink: the
            scheduler then delivers the messages, and must be open before the box is opened.
        source: `kafka://host:9092/topic`; several topics have commas between them. Options: `create_topic=true`,
            `partitions` for a topic that is created, and the options of a Kafka sink (docs/reference.md).
        allow: The topics to which messages may go.
        countdown_from: The start of a countdown: the time of the `record`, or the `arrival` of the record at the box.
        dead_topic: The topic for refused records; None = `<topic>.dead`. It is created if it is missing.
        begin_after: A consumer group of another system. If the store has no position for a partition yet, the box
            begins at the offset that this group has committed, instead of at the topic's beginning.
        namespace: Separates several boxes in one store. Do not give it for a store on Kafka, nor with a `Scheduler`,
            which has a namespace of its own.
        max_payload: Most bytes of a message.

    Raises:
        ConfigurationError: A setting is wrong. The error names the setting, its value and the allowed values.
    """

    def __init__(
        self,
        store: str | Store | Scheduler,
        source: str,
        *,
        allow: Collection[str],
        countdown_from: Literal["record", "arrival"] = "record",
        dead_topic: str | None = None,
        begin_after: str | None = None,
        namespace: str = "default",
        max_payload: int = 262_144,
    ) -> None:
        self._cluster, topics, self._create, self._partitions = _read_url(source)
        if countdown_from not in ("record", "arrival"):
            raise ConfigurationError("countdown_from", shortened(countdown_from), "'record' or 'arrival'")
        allowed = [check_topic(topic, "allow") for topic in listed(allow, "allow", "['orders']")]
        if not allowed:
            raise ConfigurationError("allow", "empty", "the topics to which messages may go")
        self._rules = Rules(
            frozenset(allowed),
            countdown_from == "arrival",
            check_count(max_payload, "max_payload", 1, MOST_PAYLOAD),
        )
        self._dead_topics = {topic: check_topic(dead_topic or f"{topic}.dead", "dead_topic") for topic in topics}
        dead_topics = {*self._dead_topics.values()}
        if both := dead_topics & {*topics}:
            raise ConfigurationError("dead_topic", min(both), "a topic that is not a source of the box")
        if both := {*allowed} & (dead_topics | {*topics}):
            raise ConfigurationError("allow", min(both), "topics that are neither sources nor dead topics of the box")
        self._begin_after = begin_after or ""
        self._own = not isinstance(store, Scheduler)
        self._scheduler = store if isinstance(store, Scheduler) else _scheduler_of(store, self._cluster, namespace)
        self._intakes: dict[TopicPartition, asyncio.Task[None]] = {}
        self._stack = AsyncExitStack()

    def __repr__(self) -> str:
        return f"<DelayBox {self._cluster.name} {self._scheduler!r}>"

    async def run(self) -> None:
        """Open the box, take in requests and deliver messages until cancelled, and close the box."""
        async with self:
            await asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        """Connect, and start to take in requests.

        While the store or the cluster does not answer, opening tries again for the scheduler's `open_timeout`.

        Raises:
            StoreUnavailableError, SinkUnavailableError: The store or the cluster did not answer in time.
            StoreMismatchError: A topic is missing, or this version cannot use the store's data.
            UnsupportedByStoreError: The store keeps no positions.
            UnknownSinkError: The scheduler has no Kafka sink.
            TargetError: The sink cannot deliver to an allowed topic.
        """
        async with AsyncExitStack() as stack:
            if self._own:
                await stack.enter_async_context(self._scheduler)
            store = _checked(self._scheduler.opened_store())
            sink = self._scheduler.sink(SINK)
            for topic in self._rules.allowed:
                sink.check(topic)
            topics = await self._scheduler.until_answered(
                f"opening the intake from {self._cluster.name}",
                lambda: prepare_intake(
                    self._cluster, self._dead_topics, create=self._create, partitions=self._partitions
                ),
            )
            self._dead = await stack.enter_async_context(Writer(self._cluster))
            self._tasks = asyncio.TaskGroup()
            await self._tasks.__aenter__()
            stack.push_async_callback(self._tasks.__aexit__, None, None, None)
            self._store = store
            if store.traits.positions == "recorded":  # the store only records the requests: other processes decide
                self._rules = self._rules._replace(conflicts=RECORDED)
            self._groups = {topic.name: self._group(topic.name) for topic in topics}
            self._running = [
                self._tasks.create_task(group.run(), name=f"aiodelay {group.name}") for group in self._groups.values()
            ]
            stack.callback(self._stop)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop taking in requests. Then close the scheduler, if the box has opened it."""
        await self._stack.__aexit__(exc_type, exc, traceback)

    def _stop(self) -> None:
        for task in (*self._running, *self._intakes.values()):
            task.cancel()
        self._running, self._intakes = [], {}

    def _group(self, topic: str) -> Group:
        """Return the consumer group of the boxes that share this store. Boxes of another store have another group."""
        store = blake2b(f"{self._store.name} {self._scheduler.namespace}".encode(), digest_size=4).hexdigest()
        return Group(self._cluster, topic, f"aiodelay.delay-box.{topic}.{store}", self._assign)

    def _assign(self, topic: str, numbers: Collection[int]) -> None:
        """Take in requests from exactly these partitions of a topic. Intakes that already run for them go on."""
        if not self._running:  # the box is stopping: a new intake would never be cancelled
            return
        wanted = {TopicPartition(topic, n) for n in numbers}
        for place in [each for each in self._intakes if each.topic == topic and each not in wanted]:
            self._intakes.pop(place).cancel()
        for place in sorted(wanted - self._intakes.keys()):
            intake = Intake(
                self._cluster,
                place,
                self._store,
                self._put_of,
                dead=self._dead,
                dead_topic=self._dead_topics[topic],
                begin_after=self._begin_after,
                may_go_on=self._groups[topic].is_settled,
                around=self._scheduler.around_intake(topic, place.partition),
            )
            name = f"aiodelay delay box {topic}/{place.partition}"
            self._intakes[place] = self._tasks.create_task(intake.run(), name=name)

    def _put_of(self, record: Any, own_id: str) -> Put:  # noqa: ANN401 - aiokafka's
        return read_request(
            record.value,
            record.headers,
            self._rules,
            own_id=own_id,
            written_ms=record.timestamp,
            now_ms=self._store.now_ms(),
        )


def _scheduler_of(store: str | Store, cluster: Cluster, namespace: str) -> Scheduler:
    opened = registry.open_store(store, namespace=namespace, clock=None)
    own = isinstance(opened, KafkaStore) and opened.cluster.is_same(cluster)
    return Scheduler(opened, namespace=namespace, sinks=[] if own else [KafkaSink(cluster)])


def _checked(store: Store) -> Store:
    if store.traits.positions == "none":
        raise UnsupportedByStoreError("store", store.name, "a store that keeps positions of intakes")
    return store


def _read_url(url: str) -> tuple[Cluster, list[str], bool, int]:
    """Return the cluster and the topics of a source URL, whether to create the topics, and with how many partitions."""
    if not isinstance(url, str):
        raise ConfigurationError("source", kind_of(url), FORM)
    given = UrlOptions(url)
    cluster = read_cluster(given)
    create = given.flag("create_topic")
    partitions = given.integer("partitions", 6, 1, MAX_PARTITIONS)
    given.finish()
    topics = read_topics(given, "source", FORM)
    return cluster, [check_topic(topic, "topic of source") for topic in topics], create, partitions
