"""Questions about a topic that aiokafka does not ask: the id from its creation, and the rights of this user."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from io import BytesIO
from typing import Any
from uuid import UUID

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError, UnknownTopicOrPartitionError, for_code
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    AbstractType,
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Schema,
    TaggedFields,
)

from .client import Client

__all__ = ["NO_TOPIC_IDS", "rights_on", "topic_id"]


class _NoTopicIdsError(KafkaError):  # type: ignore[misc]  # aiokafka has no types
    """The broker gives topics no ids."""


NO_TOPIC_IDS: type[Exception] = _NoTopicIdsError
"""The error for a broker that gives topics no ids."""


class _Id(AbstractType[bytes]):  # type: ignore[misc]  # aiokafka has no types
    """A UUID, as its 16 bytes."""

    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        return data.read(16)


class _Answer(Response):  # type: ignore[misc]
    API_KEY, API_VERSION = 3, 10
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString("utf-8")),
                ("port", Int32),
                ("rack", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", CompactString("utf-8")),
                ("topic_id", _Id),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("topic_authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_authorized_operations", Int32),
        ("tags", TaggedFields),
    )


class _Question(RequestStruct):  # type: ignore[misc]
    FLEXIBLE_VERSION = True
    API_KEY, API_VERSION = 3, 10
    RESPONSE_TYPE = _Answer
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(("topic_id", _Id), ("name", CompactString("utf-8")), ("tags", TaggedFields)),
        ),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class _Metadata(Request[_Question]):  # type: ignore[misc]
    API_KEY = 3

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def build(self, request_struct_class: type[_Question]) -> _Question:
        """Return the request in the form in which it is sent."""
        return request_struct_class([(bytes(16), self._topic, {})], False, False, True, {})  # noqa: FBT003


_OPERATIONS = {"Read": 3, "Write": 4}
"""Kafka's numbers of operations. An answer has one bit for each operation."""


async def topic_id(client: Client, place: TopicPartition, *, timeout_s: float) -> str:
    """Return the id of the topic that has this name now.

    Args:
        client: A connected client.
        place: A partition of the topic. This call asks the leader of the partition, which learns of a new topic first.
            If no leader is known, the call asks any broker.
        timeout_s: Longest wait for the answer.

    Raises:
        UnknownTopicOrPartitionError: There is no such topic now.
        NO_TOPIC_IDS: The broker is older than Kafka 2.8, which gave topics their ids.
        KafkaError: The broker does not answer.
        TimeoutError: The broker does not answer in time.
    """
    leader = client.cluster.leader_for_partition(place)
    node = leader if leader is not None and leader >= 0 else client.get_random_node()
    async with asyncio.timeout(timeout_s):
        topic = await _topic(client, node, place.topic)
    if not any(topic[2]):
        raise UnknownTopicOrPartitionError(place.topic)
    return str(UUID(bytes=topic[2]))


async def rights_on(client: Client, topic: str) -> Collection[str]:
    """Return which of the operations Read and Write this user may carry out on a topic.

    Args:
        client: A connected client.
        topic: The name of the topic.

    Raises:
        UnknownTopicOrPartitionError: There is no such topic.
        NO_TOPIC_IDS: The broker is older than Kafka 2.8.
        KafkaError: The broker does not answer, or the user may not see the topic.
    """
    bits = (await _topic(client, client.get_random_node(), topic))[5]
    return {operation for operation, bit in _OPERATIONS.items() if bits >> bit & 1}


async def _topic(client: Client, node: int | None, name: str) -> tuple[Any, ...]:
    """Return a broker's description of a topic: the fields in the schema of `_Answer`."""
    try:
        answer = await client.send(node, _Metadata(name))
    except NotImplementedError as error:
        raise _NoTopicIdsError("the broker gives topics no ids, because it is older than Kafka 2.8") from error
    (found,) = answer.topics
    if found[0]:
        raise for_code(found[0])(name)
    return tuple(found)
