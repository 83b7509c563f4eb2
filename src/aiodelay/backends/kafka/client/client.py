"""Clients of a cluster, for requests that aiokafka's consumers and producers do not send."""

from __future__ import annotations

from collections.abc import Awaitable, Collection
from typing import Any, Protocol

from aiokafka.cluster import ClusterMetadata

from ._overrides.client import OwnClient
from .options import Cluster

__all__ = ["Client", "client_of"]


class Client(Protocol):
    """A client of a cluster. aiokafka documents its methods.

    Attributes:
        cluster: The brokers, topics and leaders that the client knows.
    """

    cluster: ClusterMetadata

    async def bootstrap(self) -> None: ...
    async def close(self) -> None: ...
    def break_connections(self) -> object: ...
    def set_topics(self, topics: Collection[str]) -> Awaitable[object]: ...
    def get_random_node(self) -> int | None: ...
    async def send(self, node_id: int | None, request: Any) -> Any: ...  # noqa: ANN401 - aiokafka's


def client_of(cluster: Cluster, **options: Any) -> Client:  # noqa: ANN401 - aiokafka's
    """Return a client. The caller connects it with `bootstrap`.

    Args:
        cluster: The cluster to connect to.
        options: Options of aiokafka's client.

    Raises:
        ConfigurationError: This version of aiokafka was not tested.
    """
    client: Client = OwnClient(**cluster.client, request_timeout_ms=cluster.timeout_ms, **options)
    return client
