"""The administrator's client, which can ask for topics without creating them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.metadata import MetadataRequest

from .client import OwnClient
from .rebound import rebound

__all__ = ["OwnAdmin"]


class OwnAdmin(AIOKafkaAdminClient):  # type: ignore[misc]  # aiokafka has no types
    """aiokafka's administrator, on a client of ours. `Admin` tells what its methods promise.

    Args:
        options: aiokafka's.

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
