"""Administrator clients: they describe clusters, topics and settings, and create topics."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from aiokafka.admin import NewTopic
from aiokafka.admin.config_resource import ConfigResource

from ._overrides.admin import OwnAdmin
from .client import Client
from .options import Cluster

__all__ = ["Admin", "admin_of"]


class Admin(Protocol):
    """An administrator client. aiokafka documents the methods that have no docstring here."""

    async def start(self) -> None: ...
    async def close(self) -> None: ...

    async def describe_cluster(self) -> Mapping[str, Any]: ...
    async def describe_topics(self, topics: Sequence[str] | None = None) -> Sequence[Mapping[str, Any]]: ...
    async def describe_configs(self, config_resources: Sequence[ConfigResource]) -> Sequence[Any]: ...
    async def create_topics(self, new_topics: Sequence[NewTopic]) -> Any: ...  # noqa: ANN401 - aiokafka's

    @property
    def client(self) -> Client:
        """The client with the connections to the cluster."""

    async def find_topics(self, names: Collection[str]) -> Sequence[Mapping[str, Any]]:
        """Return the descriptions of topics, without creating a topic that is missing.

        Raises:
            KafkaError: The cluster does not answer.
        """


def admin_of(cluster: Cluster) -> Admin:
    """Return an administrator client. The caller must start it.

    Args:
        cluster: The cluster to ask.

    Raises:
        ConfigurationError: This version of aiokafka was not tested.
    """
    admin: Admin = OwnAdmin(**cluster.client, request_timeout_ms=cluster.timeout_ms)
    return admin
