"""What another client than ours writes into topics, and what it sees of a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

__all__ = ["committed", "delete_topic", "fill", "producing", "set_offsets"]

Headers = Sequence[tuple[str, bytes | None]]


@contextmanager
def producing(bootstrap: str, **options: str) -> Iterator[Producer]:
    """Open librdkafka's producer; at the end all is written, once and in order, or the test fails.

    It is idempotent: a slow broker names the leader of a new partition before that one is at hand, and a batch that it
    refuses would be tried again behind those after it, and one whose answer came late be written twice.
    """
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, **options})
    yield producer
    assert producer.flush(30) == 0


def fill(bootstrap: str, topic: str, values: Sequence[bytes | None], *, partition: int = 0, **options: str) -> None:
    """Write records without key or headers into a partition, each once, in order."""
    with producing(bootstrap, **options) as producer:
        for value in values:
            producer.produce(topic, value, partition=partition)
            producer.poll(0)


def committed(bootstrap: str, group: str, topic: str, partitions: int = 1) -> list[int]:
    """Return the offsets that a group has committed, by partition; -1001 where there is none."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, "enable.auto.commit": False})
    try:
        places = [TopicPartition(topic, number) for number in range(partitions)]
        return [place.offset for place in consumer.committed(places, timeout=30)]
    finally:
        consumer.close()


def set_offsets(bootstrap: str, group: str, topic: str, offsets: Sequence[int], note: str = "") -> None:
    """Commit offsets for a group that has no members."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    places = [TopicPartition(topic, number, offset, metadata=note) for number, offset in enumerate(offsets)]
    (altered,) = admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, places)]).values()
    assert [place.error for place in altered.result(30).topic_partitions] == [None] * len(places)


def delete_topic(bootstrap: str, topic: str) -> None:
    """Delete a topic."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    (deleted,) = admin.delete_topics([topic]).values()
    deleted.result(30)
