"""`RedisFanout`: registers, removes and lists the consumers of fan-out topics."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from aiodelay.backends.redis.connection.faults import Fault
from aiodelay.backends.redis.connection.options import Options
from aiodelay.backends.redis.records.keys import DEFAULT_NAMESPACE, Keys, keys_of
from aiodelay.errors import StoreUnavailableError

from .sink import Start, TopicKeys, register
from .topic_scripts import TopicEnd, check_name

__all__ = ["Consumer", "RedisFanout", "Topic"]

AT_ONCE = 100


class Consumer(Struct, frozen=True):
    """The state of a registered consumer at the time of the call.

    Attributes:
        name: The name of the consumer.
        ordered: True if the consumer keeps order: at most one of its messages is in flight.
        seen_ms: The epoch ms at which the consumer last asked for messages, to within 10 s; None = never.
        since_ms: The epoch ms at which the consumer was registered.
        missed: The number of messages that the topic dropped before the consumer took them, since its registration.
        waiting: The lag: the number of messages that the consumer has not taken yet.
        in_flight: The number of messages that the consumer's instances have taken and not settled. Only the first 32
            instances count.
        retrying: The number of messages that wait for another attempt.
        memory: The bytes of the consumer's own keys: references, inline messages and retries. Shared messages do not
            count.
    """

    name: str
    ordered: bool
    seen_ms: int | None
    since_ms: int
    missed: int
    waiting: int
    in_flight: int
    retrying: int
    memory: int


class Topic(Struct, frozen=True):
    """The state of a topic at the time of the call.

    A topic stores a message once for all consumers, or *inline*: a copy for each consumer.

    Attributes:
        name: The name of the topic.
        consumers: The number of registered consumers.
        published: The number of messages that the topic has ever stored for all consumers. Inline messages do not
            count.
        kept: The number of stored messages that a consumer has still to settle. Inline messages do not count.
        memory: The bytes of the stored messages, as the server estimates them.
    """

    name: str
    consumers: int
    published: int
    kept: int
    memory: int


class RedisFanout(TopicEnd):
    """The topics of one namespace. An object needs no scheduler; open it with `async with`.

    Args:
        server: A URL in the form of a Redis store's URL.
        namespace: The namespace of the topics, as for `RedisFanoutSink`.

    Raises:
        ConfigurationError: The URL or the namespace is not allowed.
    """

    def __init__(self, server: str | Options, *, namespace: str = DEFAULT_NAMESPACE) -> None:
        super().__init__(server)
        self._keys: Keys = keys_of(namespace)

    async def register(self, topic: str, consumer: str, *, start: Start = "now", ordered: bool = False) -> bool:
        """Register a consumer with a topic. From then on, the topic keeps all published messages for the consumer.

        Args:
            topic: The name of the topic: 1 to 100 letters, digits and `.`, `_`, `-`, `/`.
            consumer: The name of the consumer, by the same rule.
            start: With `"oldest"`, a new consumer also gets the messages that the topic keeps now. For a registered
                consumer, `start` has no effect.
            ordered: If True, at most one message of the consumer is in flight, over all its instances. The value also
                changes a consumer that is registered already.

        Returns:
            True if the consumer was not registered before.

        Raises:
            TargetError: A name is not allowed.
            ConfigurationError: The topic already has 2,000 consumers.
            StoreUnavailableError: The server did not answer. A repetition is safe.
        """
        keys = self._topic(topic)
        check_name(consumer, field="consumer")
        try:
            return await register(self._opened(), keys, consumer, start=start, ordered=ordered)
        except Fault as fault:
            raise StoreUnavailableError(self.options.name, fault.reason) from fault

    async def unregister(self, topic: str, consumer: str) -> bool:
        """Remove a consumer. The topic then deletes the messages that no other consumer needs.

        Returns:
            True if the consumer was registered. If the call is interrupted, later publishing to the topic finishes the
            removal.

        Raises:
            TargetError: A name is not allowed.
            StoreUnavailableError: The server did not answer. A repetition is safe.
        """
        keys = self._topic(topic)
        check_name(consumer, field="consumer")
        answer = b"more"
        while answer == b"more":
            answer = await self._run("unregister", [keys.content, keys.topics], ["", consumer])
        return answer == b"gone"

    async def topics(self) -> Sequence[Topic]:
        """List the topics that have consumers, in the order of their names."""
        names = sorted(name.decode() for name in await self._command("SMEMBERS", self._keys.key("fanout:topics")))
        return [await self._found(name) for name in names]

    async def consumers(self, topic: str) -> Sequence[Consumer]:
        """List the consumers of a topic in the order of their names, with their lag.

        Raises:
            TargetError: The name is not allowed.
            StoreUnavailableError: The server did not answer.
        """
        keys = self._topic(topic)
        names = sorted(name.decode() for name in await self._command("SMEMBERS", keys.consumers))
        consumers: list[Consumer] = []
        for start in range(0, len(names), AT_ONCE):
            part = names[start : start + AT_ONCE]
            found = await self._run("lag", [keys.content], ["", *part])
            for name, (ordered, *numbers, _, seen) in zip(part, found, strict=True):
                seen_ms = int(seen) if seen else None
                consumers.append(Consumer(name, ordered == b"1", seen_ms, *map(int, numbers)))
        return consumers

    async def _found(self, name: str) -> Topic:
        keys = TopicKeys(self._keys, name)
        published = await self._command("HGET", keys.meta, "last")
        return Topic(
            name,
            int(await self._command("SCARD", keys.consumers)),
            int(published or 0),
            int(await self._command("HLEN", keys.content)),
            int(await self._command("MEMORY", "USAGE", keys.content) or 0),
        )

    def _topic(self, topic: str) -> TopicKeys:
        return TopicKeys(self._keys, check_name(topic, field="topic"))
