"""The source `redis-fanout:<topic>?consumer=<name>`. It gives the messages of one consumer of a topic to a handler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.connections import Connected
from aiodelay.backends.redis.connection.options import Options, read_options
from aiodelay.backends.redis.connection.wakeup_listener import listening
from aiodelay.backends.redis.lists.list_consumer import Store
from aiodelay.backends.redis.records.keys import DEFAULT_NAMESPACE, Keys, keys_of
from aiodelay.core.urls import UrlOptions
from aiodelay.core.values import PutBack, Stored
from aiodelay.errors import TargetError, shortened
from aiodelay.ports import Feed

from .sink import NAME, Start, TopicKeys, register
from .topic_consumer import ConsumerFeed
from .topic_scripts import Place, check_name, place_of, read_place

__all__ = ["RedisFanoutSource", "open_fanout_source"]

_OPTIONS = {"consumer": "consumer", "from": "from", "ordered": "ordered"}
_STARTS: Mapping[str, Start] = {"now": "now", "oldest": "oldest"}
_FORM = "<topic>?consumer=<name>, with &from=oldest or &ordered=true if wanted"


def _read_place(address: str) -> Place:
    place = read_place(address, NAME, _OPTIONS, start="now", form=_FORM)
    if place.start not in _STARTS:
        raise TargetError(f"address of {NAME}", shortened(address), _FORM)
    check_name(place.consumer, field=f"consumer of {NAME}")
    return place


class RedisFanoutSource(Connected):
    """Takes the messages of one consumer of a topic. All processes that name the same consumer share its messages.

    The address is `<topic>?consumer=<name>`. The first claim registers the consumer. The consumer gets the messages
    that are published from then on. With `&from=oldest`, it also gets the messages that the topic keeps. With
    `&ordered=true`, at most one message is in flight over all processes. The next message waits until this message and
    its retries have ended.

    A process has a lease for the messages that it takes. If the lease lapses, the messages return to the head of the
    consumer's list. Retries return to the consumer, and dead letters go to the scheduler's store.

    Args:
        server: A URL in the form of a Redis store's URL.
        namespace: The namespace of the topics, as for `RedisFanoutSink`.

    Raises:
        ConfigurationError: The URL or the namespace is not allowed.
    """

    name: str = NAME

    def __init__(self, server: str | Options, *, namespace: str = DEFAULT_NAMESPACE) -> None:
        super().__init__(server)
        self.keys: Keys = keys_of(namespace)

    @property
    def place(self) -> str:
        """The server and the namespace of the topics."""
        return place_of(self.options, self.keys)

    def check(self, address: str) -> None:
        """Check that an address is `<topic>?consumer=<name>`. Raise `TargetError` for any other address."""
        _read_place(address)

    @asynccontextmanager
    async def feed(
        self,
        address: str,
        consumer: str,
        put_back: Callable[[Sequence[PutBack]], Awaitable[Sequence[Stored]]],
        now_ms: Callable[[], int],
    ) -> AsyncIterator[Feed]:
        """Open a feed of the messages of a consumer. The first claim of the feed registers the consumer."""
        assert self._client is not None
        feed = _FanoutFeed(
            self._client, self.options.name, self.keys, _read_place(address), consumer, store=(put_back, now_ms)
        )
        async with listening(feed.listener, f"aiodelay redis fan-out {address}"):
            yield feed


class _FanoutFeed(ConsumerFeed):
    """Takes the messages of one consumer for one process."""

    def __init__(self, client: Client, server: str, keys: Keys, place: Place, instance: str, *, store: Store) -> None:
        self._topic = TopicKeys(keys, place.topic)
        scripted = [*self._topic.of(place.consumer).of_instance(instance), self._topic.content]
        super().__init__(client, server, place, scripted, instance, sink=NAME, store=store)

    async def _register(self) -> None:
        place = self._place
        start = _STARTS[place.start]
        await register(self._client, self._topic, place.consumer, start=start, ordered=place.is_ordered)

    def _own_address(self) -> str:
        return f"{self._place.topic}@{self._place.consumer}"


def open_fanout_source(url: str) -> RedisFanoutSource:
    """Return a source for a URL: `redis-fanout://host:6379/0?namespace=shop`.

    The scheme with TLS is `rediss-fanout://`.

    Raises:
        ConfigurationError: The URL has none of these forms, or an option is unknown or out of range.
    """
    given = UrlOptions(url)
    options = read_options(given)
    namespace = given.text("namespace", DEFAULT_NAMESPACE)
    given.finish()
    return RedisFanoutSource(options, namespace=namespace)
