"""The sink `redis-fanout:<topic>`, which publishes messages to all consumers of a topic.

With the address `<topic>@<consumer>`, the sink publishes a message to one consumer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.connections import MOST_MESSAGES, check_integer, milliseconds
from aiodelay.backends.redis.connection.options import Options, read_options
from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.records.keys import DEFAULT_NAMESPACE, Keys, keys_of
from aiodelay.core.durations import Duration
from aiodelay.core.urls import UrlOptions
from aiodelay.errors import ConfigurationError, TargetError, shortened

from .publishing import PublishingEnd
from .topic_scripts import NAMES, ConsumerKeys

__all__ = ["RedisFanoutSink", "Start", "TopicKeys", "open_fanout_sink", "register", "split_address"]

NAME = "redis-fanout"
Start: TypeAlias = Literal["now", "oldest"]
"""The first message that a new consumer gets: the next published message, or the oldest message in the topic."""
MOST_INLINE = 500
_FORM = "<topic>, or <topic>@<consumer>; names of 1 to 100 letters, digits and . _ - /"


class TopicKeys:
    """The keys of one topic."""

    def __init__(self, keys: Keys, topic: str) -> None:
        self.prefix: str = keys.key(f"fanout:{topic}")
        self.topics: str = keys.key("fanout:topics")
        self.content: str = f"{self.prefix}:content"
        self.consumers: str = f"{self.prefix}:consumers"
        self.meta: str = f"{self.prefix}:meta"

    def of(self, consumer: str) -> ConsumerKeys:
        """Return the keys of one consumer of the topic."""
        return ConsumerKeys(f"{self.prefix}@{consumer}:")


async def register(client: Client, topic: TopicKeys, consumer: str, *, start: Start, ordered: bool) -> bool:
    """Register a consumer with a topic. Return True if the consumer was not registered before.

    Raises:
        ConfigurationError: The topic already has the largest number of consumers.
        Fault: The server did not answer. A repetition is safe.
    """
    is_new = False
    while True:
        answer = await client.run_on("register", [topic.content, topic.topics], ["", consumer, int(ordered), start])
        if answer == b"full":
            raise ConfigurationError(
                "the number of consumers of the topic", f"2,001 with {shortened(consumer)}", "2,000"
            )
        is_new = is_new or answer != b"known"
        if answer != b"more":
            return is_new


def split_address(address: str) -> tuple[str, str]:
    """Return the topic and the consumer in an address. The consumer is "" if the address is for all consumers.

    Raises:
        TargetError: The address is not `<topic>` or `<topic>@<consumer>`.
    """
    topic, at, consumer = address.partition("@")
    if not NAMES.fullmatch(topic) or (at and not NAMES.fullmatch(consumer)):
        raise TargetError(f"address of {NAME}", shortened(address), _FORM)
    return topic, consumer


class RedisFanoutSink(PublishingEnd):
    """Publishes messages to all registered consumers of a topic, or to one consumer.

    A Redis store already has this sink for its own namespace, and moves each message to the topics exactly once. With
    any other store, the scheduler claims, publishes and settles a message, so it may publish a message twice. The topic
    ignores the second message if it comes within 10 minutes of the first.

    Args:
        server: A URL in the form of a Redis store's URL: `redis://user:password@host:6379/0`.
        namespace: The namespace of the topics. It separates the topics of applications, as a store's namespace does.
        max_messages: The largest number of unsettled messages in a topic. If there are more, the topic drops the oldest
            messages. 0 = no limit.
        max_age: The largest age of a message. When a message is published, the topic drops older messages. None = no
            limit.
        resend_unknown: The rule after an attempt whose outcome has been unknown for more than 9 minutes. If True, the
            sink publishes the message again, and consumers may get it twice. If False, the sink gives the message up
            with the reason `outcome_unknown`.
        inline_below: A size in bytes from 0 to 500. A smaller message is copied to each consumer. Any other message is
            stored once for all consumers. The size of a message is its payload and about 100 bytes more.

    Raises:
        ConfigurationError: The URL or an option is not allowed.
    """

    name: str = NAME

    def __init__(
        self,
        server: str | Options,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        max_messages: int = 0,
        max_age: Duration | None = None,
        inline_below: int = 0,
        resend_unknown: bool = False,
    ) -> None:
        super().__init__(server, resend_unknown=resend_unknown)
        self.keys: Keys = keys_of(namespace)
        self.max_messages: int = check_integer("max_messages", max_messages, MOST_MESSAGES)
        self.max_age_ms: int = milliseconds(max_age)
        self.inline_below: int = check_integer("inline_below", inline_below, MOST_INLINE)

    def check(self, address: str) -> None:
        """Check that an address is `<topic>` or `<topic>@<consumer>`. Raise `TargetError` for any other address."""
        split_address(address)

    @property
    def settings(self) -> tuple[int, int, int]:
        """The sink's settings as arguments of the script `publish`: `max_messages`, `max_age` in ms, `inline_below`."""
        return self.max_messages, self.max_age_ms, self.inline_below

    async def _publish(self, client: Client, address: str, elements: Sequence[Arg]) -> int | str:
        topic, consumer = split_address(address)
        content = TopicKeys(self.keys, topic).content
        published = await client.run_on("publish", [content], ["", consumer, *self.settings, *elements])
        return published.decode("utf-8", "backslashreplace") if isinstance(published, bytes) else int(published)


def open_fanout_sink(url: str) -> RedisFanoutSink:
    """Return a sink for a URL: `redis-fanout://host:6379/0?namespace=shop&max_messages=1000000&max_age=7d`.

    The URL scheme with TLS is `rediss-fanout://`.

    Raises:
        ConfigurationError: The URL has none of these forms, or an option is unknown or out of range.
    """
    given = UrlOptions(url)
    options = read_options(given)
    namespace = given.text("namespace", DEFAULT_NAMESPACE)
    max_messages = given.integer("max_messages", 0, 0, MOST_MESSAGES)
    max_age = given.text("max_age")
    inline_below = given.integer("inline_below", 0, 0, MOST_INLINE)
    resend_unknown = given.integer("resend_unknown", 0, 0, 1) == 1
    given.finish()
    return RedisFanoutSink(
        options,
        namespace=namespace,
        max_messages=max_messages,
        max_age=max_age or None,
        inline_below=inline_below,
        resend_unknown=resend_unknown,
    )
