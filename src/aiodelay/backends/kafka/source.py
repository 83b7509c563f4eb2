"""`KafkaSource`: topics as a source, by `@scheduler.handler(source="kafka:<topic>?group=<name>")`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Self
from urllib.parse import parse_qsl

from aiodelay.core.values import PutBack, Stored
from aiodelay.errors import TargetError, shortened
from aiodelay.ports import Feed

from .client import check_version
from .client.options import Cluster, read_url
from .records import SINK
from .sink import check_topic
from .topics.feed import TopicFeed

__all__ = ["KafkaSource", "open_source", "split_address"]

FORM = "<topic>?group=<name>"
_OURS = "aiodelay."


def split_address(address: str) -> tuple[str, str]:
    """Return the topic and the group in an address.

    Raises:
        TargetError: The address is not `<topic>?group=<name>`, or the group is one of aiodelay's own.
    """
    topic, _, options = address.partition("?")
    match parse_qsl(options, keep_blank_values=True):
        case [("group", group)] if group.strip():
            check_topic(topic, f"address of {SINK}")
            if group.startswith(_OURS):
                raise TargetError(f"group of {SINK}", shortened(group), f"a name that does not begin with {_OURS!r}")
            return topic, group
    raise TargetError(f"address of {SINK}", shortened(address), FORM)


class KafkaSource:
    """Takes records from topics as a member of a consumer group. An address is a topic and the name of the group.

    Records may be settled in any order. The group's offset is committed up to the first record that is not settled.
    Retries and dead letters go into the scheduler's store.

    The group is an ordinary consumer group: Kafka's own tools show its lag and set its offsets. If another client of
    the group has stopped, this source goes on where that client was. A group without offsets begins with the oldest
    record.

    Args:
        cluster: `host:9092`, several hosts with commas between, or a `kafka://` URL (docs/reference.md).

    Raises:
        ConfigurationError: The cluster, or an option in its URL, cannot be used.
    """

    name: str = SINK

    def __init__(self, cluster: str | Cluster) -> None:
        self.cluster: Cluster = read_url(cluster, "KafkaSource") if isinstance(cluster, str) else cluster

    def check(self, address: str) -> None:
        """Refuse an address that is not of the form `<topic>?group=<name>`.

        Raises:
            TargetError: The address has another form. The error says which form is allowed.
        """
        split_address(address)

    async def __aenter__(self) -> Self:
        """Check the version of aiokafka. Nothing is connected here, because each feed has its own connections.

        Raises:
            ConfigurationError: aiodelay was not tested with this version of aiokafka.
        """
        check_version()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        return None

    @asynccontextmanager
    async def feed(
        self,
        address: str,
        consumer: str,
        put_back: Callable[[Sequence[PutBack]], Awaitable[Sequence[Stored]]],
        now_ms: Callable[[], int],
    ) -> AsyncIterator[Feed]:
        """Open a feed of records from a topic, as a member of a group. At its end, the offsets are committed."""
        topic, group = split_address(address)
        feed = TopicFeed(self.cluster, topic, group, store=(put_back, now_ms))
        failure: BaseException | None = None
        async with asyncio.TaskGroup() as tasks:
            working = [
                tasks.create_task(feed.group.run(), name=f"aiodelay kafka group {group}"),
                tasks.create_task(feed.commit_on(), name=f"aiodelay kafka offsets of {group}"),
            ]
            try:
                yield feed
            except BaseException as error:  # noqa: BLE001 - raised below, so that the task group does not wrap it
                failure = error
            try:
                await feed.close()
            finally:
                for task in working:
                    task.cancel()
        if failure is not None:
            raise failure


def open_source(url: str) -> KafkaSource:
    """Return the source for a URL such as `kafka://host:9092`.

    Raises:
        ConfigurationError: The URL has another form, or an option is unknown or out of range.
    """
    return KafkaSource(url)
