"""The client that asks for topics and their settings, and creates them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.metadata import MetadataRequest

from aiodelay.kafka.options import Cluster

from ._overrides.client import Client
from ._overrides.rebound import rebound

__all__ = ["Admin", "admin_of"]


class Admin(AIOKafkaAdminClient):  # type: ignore[misc]  # aiokafka has no types
    """aiokafka's administrator, on a client of ours.

    Args:
        options: aiokafka's.

    Raises:
        ConfigurationError: This version of aiokafka was not tested.
    """

    __init__ = rebound(AIOKafkaAdminClient.__init__, AIOKafkaClient=Client)

    @property
    def client(self) -> Client:
        """The client of its cluster."""
        client: Client = self._client
        return client

    async def find_topics(self, names: Collection[str]) -> Sequence[Mapping[str, Any]]:
        """Return what a broker knows of topics, and create none by asking.

        Raises:
            KafkaError: No answer.
        """
        answer = await self._send_request(MetadataRequest(list(names), allow_auto_topic_creation=False))
        topics: Sequence[Mapping[str, Any]] = answer.to_object()["topics"]
        return topics


def admin_of(cluster: Cluster) -> Admin:
    """Return an administrator, not started yet.

    Args:
        cluster: Where it is.
    """
    admin: Admin = Admin(**cluster.client, request_timeout_ms=cluster.timeout_ms)
    return admin
