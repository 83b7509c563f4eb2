"""`RedisFanout`: registers, removes and lists the consumers of fan-out topics, with their lag."""

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
        ordered: True if the consumer keeps order: one message in flight at a time.
        seen_ms: When the consumer last asked for messages, epoch ms, exact to 10 s; None = never.
        since_ms: When the consumer was registered, epoch ms.
        missed: The number of messages that the topic dropped before the consumer took them, since its registration.
        waiting: The number of messages that the consumer has not taken: its lag.
        in_flight: The number of messages that its instances have taken and not settled. Only the first 32 instances
            count.
        retrying: The number of messages that wait for another attempt.
        memory: Bytes of the consumer's own keys: references, inline messages and retries, without the shared content.
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

    Attributes:
        name: The name of the topic.
        consumers: The number of registered consumers.
        published: The number of messages that the topic has ever stored as shared content.
        kept: The number of stored messages that some consumer has not settled, without inline messages.
        memory: Bytes of the kept messages, as the server estimates.
    """

    name: str
    consumers: int
    published: int
    kept: int
    memory: int


class RedisFanout(TopicEnd):
    """The topics of one namespace. Open it with `async with`; it needs no scheduler.

    Args:
        server: A URL in the form of a Redis store's URL.
        namespace: The namespace of the topics, as for `RedisFanoutSink`.

    Raises:
        ConfigurationError: The URL or the namespace cannot be used.
    """

    def __init__(self, server: str | Options, *, namespace: str = DEFAULT_NAMESPACE) -> None:
        super().__init__(server)
        self._keys: Keys = keys_of(namespace)

    async def register(self, topic: str, consumer: str, *, start: Start = "now", ordered: bool = False) -> bool:
        """Register a consumer with a topic. From then on it gets all published messages, also while it does not run.

        Args:
            topic: 1 to 100 letters, digits and `.`, `_`, `-`, `/`.
            consumer: A name by the same rule.
            start: `"oldest"`: the consumer also gets the messages that the topic keeps now. Ignored if the consumer is
                already registered.
            ordered: True: one message is in flight at a time, over all instances. This changes a registered consumer
                too.

        Returns:
            True if the consumer is new.

        Raises:
            TargetError: A name cannot be used.
            ConfigurationError: The topic has 2,000 consumers.
            StoreUnavailableError: The server did not answer. A repetition is safe.
        """
        keys = self._topic(topic)
        check_name(consumer, field="consumer")
        try:
            return await register(self._opened(), keys, consumer, start=start, ordered=ordered)
        except Fault as fault:
            raise StoreUnavailableError(self.options.name, fault.reason) from fault

    async def unregister(self, topic: str, consumer: str) -> bool:
        """Remove a consumer. It gets no more messages, and the topic deletes messages that no other consumer needs.

        Returns:
            True if the consumer was registered. If the call is interrupted, later publishing to the topic finishes the
            removal.

        Raises:
            TargetError: A name cannot be used.
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
        """List the consumers of a topic with their lag, in the order of their names.

        Raises:
            TargetError: The name cannot be used.
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
