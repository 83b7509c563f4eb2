"""Reading of Kafka URLs in the options of streams and of the engine."""

from __future__ import annotations

from typing import Final

from aiodelay.backends.kafka.client.options import Cluster, read_cluster, read_topics
from aiodelay.core.urls import UrlOptions
from aiodelay.errors import ConfigurationError

from .options import store_url

__all__ = ["FORM", "read_cluster_of", "read_topic"]

FORM: Final = "kafka://host:9092/topic"


def read_topic(url: str, field: str) -> tuple[Cluster, str]:
    """Return the cluster and the topic of a URL.

    Args:
        url: `kafka://host:9092/topic`, with options of the cluster; or `env:NAME`, or `file:PATH`.
        field: The name of the option for errors.

    Raises:
        ConfigurationError: The URL has another form, or names several topics.
    """
    given = UrlOptions(store_url(url))
    topics = read_topics(given, field, FORM)
    if len(topics) > 1:
        raise ConfigurationError(field, given.masked, FORM)
    return _cluster(given), topics[0]


def read_cluster_of(url: str, field: str) -> Cluster:
    """Return the cluster of a URL, and ignore a topic in it.

    Raises:
        ConfigurationError: The URL does not begin with `kafka://`, or an option of the cluster is wrong.
    """
    given = UrlOptions(store_url(url))
    if given.parts.scheme != "kafka" or given.parts.fragment:
        raise ConfigurationError(field, given.masked, "kafka://host:9092")
    return _cluster(given)


def _cluster(given: UrlOptions) -> Cluster:
    cluster = read_cluster(given)
    given.finish()
    return cluster
