"""Reading which features are in use, without owning a partition."""

from __future__ import annotations

from collections.abc import Sequence

from aiokafka import TopicPartition

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client import Consumer
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.topics.observing import answering, next_records, observer

__all__ = ["recorded_features"]


async def recorded_features(cluster: Cluster, topics: Sequence[str]) -> dict[str, str]:
    """Return the features in use in topics, each with the version of aiodelay that switched it on.

    The first partition of each topic is read from its beginning to its end.

    Raises:
        StoreUnavailableError: The cluster does not answer.
    """
    found: dict[str, str] = {}
    async with observer(cluster) as consumer:
        for topic in topics:
            found |= await _read(consumer, TopicPartition(topic, 0), cluster)
    return found


async def _read(consumer: Consumer, place: TopicPartition, cluster: Cluster) -> dict[str, str]:
    consumer.assign([place])
    with answering(cluster):
        at = (await consumer.beginning_offsets([place]))[place]
        end = (await consumer.end_offsets([place]))[place]
    consumer.seek(place, at)
    found: dict[str, str] = {}
    while at < end:
        read, at = await next_records(consumer, place, at, cluster)
        found |= dict(named for each in read if each.key and (named := records.feature_in(each.key, each.value)))
    return found
