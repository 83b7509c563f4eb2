"""`StoreOptions`: the options in the URL of a store, read and checked."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client.options import Cluster, read_cluster, read_topics
from aiodelay.backends.kafka.sink import NAMES, check_topic
from aiodelay.core.durations import parse_duration
from aiodelay.core.urls import UrlOptions
from aiodelay.errors import ConfigurationError, shortened

__all__ = ["StoreOptions", "read_store_url"]

FORM = "kafka://host:9092/schedules, kafka://host:9092/schedules,others"
MAX_PARTITIONS = 1000


class StoreOptions(Struct, frozen=True):
    """The options of a store; docs/reference.md explains each of them."""

    cluster: Cluster
    topics: Sequence[str]
    create_topic: bool
    partitions: int
    accept_partitions: int
    history: str
    member: int
    members: int
    instance: str
    horizon_ms: int
    max_pending: int
    catch_up: int
    index: str


def read_store_url(url: str) -> StoreOptions:
    """Read the URL of a store.

    Raises:
        ConfigurationError: The URL has another form, or an option is unknown or out of range.
        TargetError: The name of a topic in the URL is not allowed.
    """
    given = UrlOptions(url)
    cluster = read_cluster(given)
    create = given.flag("create_topic")
    partitions = given.integer("partitions", 6, 1, MAX_PARTITIONS)
    accepted = given.integer("accept_partitions", 0, 1, MAX_PARTITIONS)
    members = given.integer("members", 0, 1, MAX_PARTITIONS)
    member = given.integer("member", 0, 0, max(members - 1, 0))
    instance = given.text("instance")
    history = given.text("history")
    horizon_ms = parse_duration(
        given.text("horizon", "1h"), field=f"horizon in {given.masked}", error=ConfigurationError, least_ms=1000
    )
    max_pending = given.integer("max_pending", 10_000_000, 0, 10**12)
    catch_up = given.integer("catch_up", 0, 0, 10**9)
    index = given.text("index")
    given.finish()
    topics = read_topics(given, "url", FORM)
    for topic in topics:
        check_topic(topic, "topic in the store's URL")
    if instance and not records.is_topic(instance):
        raise ConfigurationError(f"instance in {given.masked}", shortened(instance), NAMES)
    if instance and members:
        raise ConfigurationError(f"instance in {given.masked}", "given together with members", "one of them")
    if history:
        check_topic(history, "history in the store's URL")
    if history in topics:
        raise ConfigurationError(f"history in {given.masked}", history, "a topic of its own")
    return StoreOptions(
        cluster,
        topics,
        create,
        partitions,
        accepted,
        history,
        member,
        members,
        instance,
        horizon_ms,
        max_pending,
        catch_up,
        index,
    )
