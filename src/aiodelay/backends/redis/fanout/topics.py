"""Who is registered with topics, and how far behind: to look at, and to change."""

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
    """A registered consumer, as it was found.

    Attributes:
        name: Its name.
        ordered: Whether it keeps order, one message in flight at a time.
        seen_ms: When it last asked for messages, epoch ms, within 10 s; None = never.
        since_ms: When it was registered, epoch ms.
        missed: How many messages the topic kept no longer before the consumer took them, since it was registered.
        waiting: How many it has not taken: its lag.
        in_flight: How many its instances have taken and not settled; those of the first 32 instances.
        retrying: How many are to be tried again later.
        memory: Bytes that its own keys take: references, inline messages and retries, not the content it shares.
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
    """A topic, as it was found.

    Attributes:
        name: Its name.
        consumers: How many are registered.
        published: How many messages it was given to keep, ever.
        kept: How many some consumer has not settled; those given to consumers themselves are not among them.
        memory: Bytes that these take; as the server estimates.
    """

    name: str
    consumers: int
    published: int
    kept: int
    memory: int


class RedisFanout(TopicEnd):
    """The topics of one namespace. Open it with `async with`; it needs no scheduler.

    Args:
        server: A URL as of a Redis store.
        namespace: As of `RedisFanoutSink`.

    Raises:
        ConfigurationError: The URL or the namespace cannot be used.
    """

    def __init__(self, server: str | Options, *, namespace: str = DEFAULT_NAMESPACE) -> None:
        super().__init__(server)
        self._keys: Keys = keys_of(namespace)

    async def register(self, topic: str, consumer: str, *, start: Start = "now", ordered: bool = False) -> bool:
        """Make a consumer known to a topic: from then on it gets what is published, also while it is away.

        Args:
            topic: 1 to 100 letters, digits and `.`, `_`, `-`, `/`.
            consumer: The same.
            start: `"oldest"`: it also gets what the topic keeps now. Means nothing for one that is known.
            ordered: One message is in flight at a time, over all its instances. Changes one that is known.

        Returns:
            Whether it was not known.

        Raises:
            TargetError: A name cannot be used.
            ConfigurationError: The topic has 2,000 consumers.
            StoreUnavailableError: No answer; repeating is safe.
        """
        keys = self._topic(topic)
        check_name(consumer, field="consumer")
        try:
            return await register(self._opened(), keys, consumer, start=start, ordered=ordered)
        except Fault as fault:
            raise StoreUnavailableError(self.options.name, fault.reason) from fault

    async def unregister(self, topic: str, consumer: str) -> bool:
        """Forget a consumer: it is given nothing more, and what only it had not settled is freed.

        Returns:
            Whether it was known. If the call is cut short, publishing to the topic goes on with the rest.

        Raises:
            TargetError: A name cannot be used.
            StoreUnavailableError: No answer; repeating is safe.
        """
        keys = self._topic(topic)
        check_name(consumer, field="consumer")
        answer = b"more"
        while answer == b"more":
            answer = await self._run("unregister", [keys.content, keys.topics], ["", consumer])
        return answer == b"gone"

    async def topics(self) -> Sequence[Topic]:
        """List the topics that have consumers, by name."""
        names = sorted(name.decode() for name in await self._command("SMEMBERS", self._keys.key("fanout:topics")))
        return [await self._found(name) for name in names]

    async def consumers(self, topic: str) -> Sequence[Consumer]:
        """List a topic's consumers with their lag, by name.

        Raises:
            TargetError: The name cannot be used.
            StoreUnavailableError: No answer.
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
