"""`OwnAdmin`: aiokafka's administrator client, which can also describe topics without creating missing topics."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.metadata import MetadataRequest

from .client import OwnClient
from .rebound import rebound

__all__ = ["OwnAdmin"]


class OwnAdmin(AIOKafkaAdminClient):  # type: ignore[misc]  # aiokafka has no types
    """aiokafka's administrator client, with an `OwnClient`. `Admin` documents its methods.

    Args:
        options: Options of aiokafka's administrator client.

    Raises:
        ConfigurationError: This version of aiokafka was not tested.
    """

    __init__ = rebound(AIOKafkaAdminClient.__init__, AIOKafkaClient=OwnClient)

    @property
    def client(self) -> OwnClient:
        client: OwnClient = self._client
        return client

    async def find_topics(self, names: Collection[str]) -> Sequence[Mapping[str, Any]]:
        answer = await self._send_request(MetadataRequest(list(names), allow_auto_topic_creation=False))
        topics: Sequence[Mapping[str, Any]] = answer.to_object()["topics"]
        return topics
