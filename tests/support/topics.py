"""Write into topics and inspect consumer groups with librdkafka, a client that aiodelay does not use."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # which names them all
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    OffsetSpec,
)

from tests.support.waiting import PATIENCE_S, until_sync

__all__ = [
    "CLEANED",
    "LEAST",
    "Group",
    "committed",
    "delete_topic",
    "fill",
    "is_committed",
    "lasting_producer",
    "new_producer",
    "producing",
    "set_config",
    "set_offsets",
    "shared_out",
]

# The errors of a broker that has just started or was busy. librdkafka does not repeat such a request.
NO_COORDINATOR_YET = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
)
CLEANED: Mapping[str, str | float] = {
    "cleanup_policy": "compact",
    "segment_ms": 1_000,
    "segment_bytes": 1_048_576,
    "min_cleanable_dirty_ratio": 0.001,
    "min_compaction_lag_ms": 30_000,
    "delete_retention_ms": 60_000,
    "message_timestamp_type": "LogAppendTime",
}
"""The settings of a topic whose cleaner runs all the time, as close behind its owners as they can bear here."""
LEAST: Mapping[str, str | float] = {
    **CLEANED,
    "min_compaction_lag_ms": 86_400_000,
    "delete_retention_ms": 604_800_000,
    "max_message_bytes": 327_680,
}
"""The settings of a schedules topic that takes the smallest records which a check of the topic calls good."""
Headers = Sequence[tuple[str, bytes | None]]


def new_producer(bootstrap: str, options: Mapping[str, str | int] | None = None) -> Producer:
    """Return librdkafka's producer. Its `poll` and `flush` raise AssertionError if the broker refused a record.

    The producer is idempotent. Otherwise a slow broker could change the result: it would write a refused batch again
    after later batches, and a batch with a late answer twice.
    """
    return Producer(
        {"bootstrap.servers": bootstrap, "enable.idempotence": True, "on_delivery": _must_be_stored, **(options or {})}
    )


def _must_be_stored(error: KafkaError | None, record: Message) -> None:
    assert error is None, f"a record for topic {record.topic()} was not stored: {error}"


@contextmanager
def producing(bootstrap: str, **options: str) -> Iterator[Producer]:
    """Open `new_producer`. At the end, all records are written, once and in order, or the test fails."""
    producer = new_producer(bootstrap, options)
    yield producer
    assert producer.flush(PATIENCE_S) == 0


@cache
def lasting_producer(bootstrap: str) -> Producer:
    """Return the producer that this process shares, for a broker that no test stops.

    Sharing saves time: an idempotent producer of librdkafka needs half a second before its first record only.
    """
    return new_producer(bootstrap, {"linger.ms": 5, "log_level": 0})


def fill(
    bootstrap: str,
    topic: str,
    values: Sequence[bytes | None],
    *,
    partition: int = 0,
    producer: Producer | None = None,
    **options: str,
) -> None:
    """Write records without key or headers into a partition, each once, in order.

    Args:
        bootstrap: The address of the cluster.
        topic: The name of the topic.
        values: The values of the records.
        partition: The number of the partition.
        producer: The producer that writes the records; None = a new producer with `options`.
        options: More settings of a new producer.
    """
    if producer is None:
        with producing(bootstrap, **options) as own:
            fill(bootstrap, topic, values, partition=partition, producer=own)
        return
    for value in values:
        producer.produce(topic, value, partition=partition)
        producer.poll(0)
    assert producer.flush(PATIENCE_S) == 0


class Group:
    """A consumer group, as a client sees the group without being a member."""

    def __init__(self, bootstrap: str, name: str) -> None:
        options = {"bootstrap.servers": bootstrap, "group.id": name, "enable.auto.commit": False}
        self._consumer = Consumer(options | {"log_level": 0})

    def close(self) -> None:
        self._consumer.close()

    def committed(self, topic: str, partitions: int = 1) -> list[int]:
        """Return the committed offsets of the group, by partition; -1001 for no offset."""
        places, ends = [TopicPartition(topic, number) for number in range(partitions)], time.monotonic() + PATIENCE_S
        while True:
            try:
                return [place.offset for place in self._consumer.committed(places, timeout=30)]
            except KafkaException as error:
                if error.args[0].code() not in NO_COORDINATOR_YET or time.monotonic() > ends:
                    raise
                time.sleep(0.1)


def committed(bootstrap: str, group: str, topic: str, partitions: int = 1) -> list[int]:
    """Return the committed offsets of a group, by partition; -1001 for no offset."""
    with closing(Group(bootstrap, group)) as seen:
        return seen.committed(topic, partitions)


def is_committed(bootstrap: str, topic: str, partitions: int) -> bool:
    """Return whether readers of committed records can read every record of the topic.

    A broker confirms a transaction first, and then ends it in each partition.
    """
    latest = {TopicPartition(topic, number): OffsetSpec.latest() for number in range(partitions)}  # type: ignore[no-untyped-call]
    levels = (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)
    with AdminClient({"bootstrap.servers": bootstrap}) as admin:
        ends = [
            [found.result().offset for found in admin.list_offsets(latest, isolation_level=level).values()]
            for level in levels
        ]
    return ends[0] == ends[1]


def shared_out(bootstrap: str, group: str) -> dict[str, set[int]]:
    """Return the partitions of each member of a group, by the name of its client."""
    with AdminClient({"bootstrap.servers": bootstrap}) as admin:
        (described,) = admin.describe_consumer_groups([group]).values()
        members = described.result(30).members
    return {each.client_id: {place.partition for place in each.assignment.topic_partitions} for each in members}


def set_offsets(bootstrap: str, group: str, topic: str, offsets: Sequence[int], note: str = "") -> None:
    """Commit offsets for a group that has no members."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    places = [TopicPartition(topic, number, offset, metadata=note) for number, offset in enumerate(offsets)]
    (altered,) = admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, places)]).values()
    assert [place.error for place in altered.result(30).topic_partitions] == [None] * len(places)


def delete_topic(bootstrap: str, topic: str) -> None:
    """Delete a topic, and wait until the broker no longer takes records for it."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    (deleted,) = admin.delete_topics([topic]).values()
    deleted.result(PATIENCE_S)
    until_sync(lambda: topic not in admin.list_topics(timeout=PATIENCE_S).topics, f"the broker has deleted {topic}")


def set_config(kafka: str, topic: str, **settings: object) -> None:
    """Change settings of a topic, and wait until the broker applies them.

    Names of settings have `_` instead of `.`, as in `create_topic`.
    """
    wanted = {name.replace("_", "."): str(value) for name, value in settings.items()}
    entries = [ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in wanted.items()]
    where = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
    asked = ConfigResource(ConfigResource.Type.TOPIC, topic)
    with AdminClient({"bootstrap.servers": kafka}) as admin:
        admin.incremental_alter_configs([where])[where].result(PATIENCE_S)

        def applies() -> bool:
            told = admin.describe_configs([asked])[asked].result(PATIENCE_S)
            return all(told[name].value == value for name, value in wanted.items())

        until_sync(applies, f"topic {topic} has the settings {wanted}")
