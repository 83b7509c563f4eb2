"""`LogTopics`: reads and trims logs, and registers, moves and lists the consumers of logs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from datetime import datetime

from msgspec import Struct

from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.connections import MOST_MESSAGES, check_integer, milliseconds
from aiodelay.backends.redis.connection.faults import Fault
from aiodelay.backends.redis.connection.options import Options
from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.fanout.topic_scripts import ConsumerKeys, TopicEnd, check_name
from aiodelay.backends.redis.records.keys import DEFAULT_NAMESPACE, Keys, keys_of
from aiodelay.core.durations import Duration, to_epoch_ms
from aiodelay.errors import ConfigurationError, StoreUnavailableError, TargetError, shortened

from .entries import LogEntry, LogStart, read_entry

__all__ = ["LogConsumer", "LogKeys", "LogTopic", "LogTopics", "index_of", "register"]

AT_ONCE, READ_AT_ONCE = 100, 500


class LogKeys:
    """The keys of one log."""

    def __init__(self, keys: Keys, topic: str) -> None:
        self.entries: str = keys.key(f"log:{topic}")
        self.logs: str = keys.key("logs")
        self.consumers: str = f"{self.entries}:consumers"

    def of(self, consumer: str) -> ConsumerKeys:
        """Return the keys of one consumer of the log."""
        return ConsumerKeys(f"{self.entries}@{consumer}:")


class LogConsumer(Struct, frozen=True):
    """The state of a registered consumer at the time of the call.

    Attributes:
        name: The name of the consumer.
        ordered: True if the consumer keeps order: at most one of its messages is in flight.
        seen_ms: The epoch ms at which the consumer last committed or asked for messages, to within 10 s; None = never.
        since_ms: The epoch ms at which the consumer was registered.
        missed: The number of messages that the log dropped before the consumer took them, since its registration.
        waiting: The lag: the number of messages that the consumer has not taken yet.
        in_flight: The number of messages that the consumer's instances have taken and not settled. Only the first 32
            instances count.
        retrying: The number of messages that wait for another attempt.
        memory: The bytes of the consumer's own keys.
        cursor: An index. Every message up to this index has ended or waits for another attempt.
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
    cursor: int


class LogTopic(Struct, frozen=True):
    """The state of a log at the time of the call.

    Attributes:
        name: The name of the log.
        first: The index of the oldest entry. If the log is empty, it is `last` + 1.
        last: The index of the newest entry that was ever appended. It is 0 if there was no such entry.
        consumers: The number of registered consumers.
        memory: The bytes of all entries, as the server estimates them.
    """

    name: str
    first: int
    last: int
    consumers: int
    memory: int


async def register(client: Client, keys: LogKeys, consumer: str, *, start: LogStart, ordered: bool) -> bool:
    """Register a consumer with a log. Return True if the consumer was not registered before.

    Raises:
        ConfigurationError: The log already has the largest number of consumers.
        Fault: The server did not answer, or the script refused. A repetition is safe.
    """
    at = await index_of(client, keys, start)
    answer = await client.run_on("register_log", [keys.entries, keys.logs], ["", consumer, int(ordered), at])
    if answer in (b"new", b"known"):
        return bool(answer == b"new")
    if answer == b"full":
        raise ConfigurationError("the number of consumers of the log", f"2,001 with {shortened(consumer)}", "2,000")
    raise Fault("unavailable", answer.decode("utf-8", "backslashreplace"))


async def index_of(client: Client, keys: LogKeys, start: LogStart) -> Arg:
    """Return the start as an argument for scripts: `oldest`, `now` or an index. Replace a time by an index.

    Raises:
        Fault: The server did not answer.
    """
    if not isinstance(start, datetime):
        return start
    time_ms = to_epoch_ms(start, field="start")
    low: bytes = b""
    high: bytes = b""
    while not low or low != high:
        low, high = await client.run_on("find_log", [keys.entries], ["", time_ms, low, high])
    return low


def _checked_start(start: LogStart) -> LogStart:
    is_index = isinstance(start, int) and not isinstance(start, bool) and 0 < start < 1 << 53
    if not is_index and start not in ("oldest", "now") and not isinstance(start, datetime):
        raise TargetError("start", shortened(start), "'oldest', 'now', an index from 1, or an aware datetime")
    return start


class LogTopics(TopicEnd):
    """Reads and changes the logs of one namespace.

    Args:
        server: A URL in the form of a Redis store's URL.
        namespace: The namespace of the logs. It separates the logs of applications, as a store's namespace does.
    """

    def __init__(self, server: str | Options, *, namespace: str = DEFAULT_NAMESPACE) -> None:
        super().__init__(server)
        self.keys: Keys = keys_of(namespace)

    def _log(self, topic: str) -> LogKeys:
        return LogKeys(self.keys, check_name(topic, field="topic"))

    # --- entries ------------------------------------------------------------------------------------------

    async def read(
        self, topic: str, *, start: LogStart = "oldest", consumer: str | None = None
    ) -> AsyncGenerator[LogEntry, None]:
        """Yield the entries in order. End after the last entry that exists when the reader reaches it.

        The call removes no entries. Indexes are consecutive, so a gap shows how many entries were dropped meanwhile.

        Args:
            topic: The name of the log: 1 to 100 letters, digits and `.`, `_`, `-`, `/`.
            start: The first entry to yield: the oldest entry, the next new entry, an index or a time.
            consumer: The name of a consumer. If it is registered, the reader begins at its next entry, not at `start`.
                The call does not move the consumer; `commit` does.

        Raises:
            TargetError: A name or the start is not allowed.
            RecordFormatError: An entry cannot be read.
            StoreUnavailableError: The server did not answer.
        """
        keys = self._log(topic)
        index = await self._first_index(keys, _checked_start(start), consumer)
        while True:
            entries = await self._command("XRANGE", keys.entries, f"0-{index}", "0", "COUNT", READ_AT_ONCE)
            for each in entries:
                yield read_entry(topic, each)
            if len(entries) < READ_AT_ONCE:
                return
            index = int(entries[-1][0][2:]) + 1

    async def _first_index(self, keys: LogKeys, start: LogStart, consumer: str | None) -> int:
        if consumer is not None:
            state = keys.of(check_name(consumer, field="consumer")).state
            found = await self._command("HGET", state, "next")
            if found is not None:
                return int(found)
        try:
            at = await index_of(self._opened(), keys, start)
        except Fault as fault:
            raise StoreUnavailableError(self.options.name, fault.reason) from fault
        if at == "oldest":
            return 1
        return (await self._found(keys, "")).last + 1 if at == "now" else int(at)

    async def trim(
        self, topic: str, *, max_messages: int = 0, max_age: Duration | None = None, drop_passed: bool = False
    ) -> int:
        """Drop the oldest entries. The log counts the dropped entries for each consumer that has not read them.

        Args:
            topic: A name, as for `read`.
            max_messages: The largest number of entries to keep; 0 = no limit.
            max_age: Entries older than this are dropped; None = no limit.
            drop_passed: If True, entries that all registered consumers have passed are dropped. These are the entries
                up to the lowest cursor.

        Returns:
            The number of entries that were dropped.

        Raises:
            TargetError: The name is not allowed.
            ConfigurationError: A limit is not allowed.
            StoreUnavailableError: The server did not answer. A repetition is safe.
        """
        keys = self._log(topic)
        limits = (check_integer("max_messages", max_messages, MOST_MESSAGES), milliseconds(max_age), int(drop_passed))
        before = (await self._found(keys, topic)).first
        while True:
            first, _, is_over = await self._run("trim_log", [keys.entries], ["", *limits])
            if is_over:
                return int(first) - before

    # --- consumers ----------------------------------------------------------------------------------------

    async def register(self, topic: str, consumer: str, *, start: LogStart = "oldest", ordered: bool = False) -> bool:
        """Register a consumer with a log.

        Args:
            topic: A name, as for `read`.
            consumer: The name of the consumer, by the same rule as for the log.
            start: The first entry for a new consumer. If the consumer is registered, use `seek` to move it.
            ordered: If True, at most one message of the consumer is in flight, over all its instances. The value also
                changes a consumer that is registered already.

        Returns:
            True if the consumer was not registered before.

        Raises:
            TargetError: A name or the start is not allowed.
            ConfigurationError: The log already has 2,000 consumers.
            StoreUnavailableError: The server did not answer. A repetition is safe.
        """
        keys, name = self._log(topic), check_name(consumer, field="consumer")
        try:
            return await register(self._opened(), keys, name, start=_checked_start(start), ordered=ordered)
        except Fault as fault:
            raise StoreUnavailableError(self.options.name, fault.reason) from fault

    async def unregister(self, topic: str, consumer: str) -> bool:
        """Remove a consumer, and the consumer's messages that wait for another attempt.

        Returns:
            True if the consumer was registered.

        Raises:
            TargetError: A name is not allowed.
            StoreUnavailableError: The server did not answer. A repetition is safe.
        """
        keys, name = self._log(topic), check_name(consumer, field="consumer")
        return bool(await self._run("unregister_log", [keys.entries, keys.logs], ["", name]) == b"gone")

    async def seek(self, topic: str, consumer: str, start: LogStart) -> int:
        """Move a consumer to another entry: back to replay entries, or forward to skip entries.

        Messages in flight, and messages that wait for another attempt, stay as they are. So no message is lost. After a
        move back, the consumer may get such a message twice. If the consumer moves back to dropped entries, these
        entries count as missed.

        Returns:
            The index of the consumer's next entry. If the start is beyond the end, this is the index after the last
            entry.

        Raises:
            TargetError: A name or the start is not allowed, or no consumer with that name is registered.
            StoreUnavailableError: The server did not answer. A repetition is safe.
        """
        return await self._seek(topic, consumer, _checked_start(start), is_forward=False)

    async def commit(self, topic: str, consumer: str, index: int) -> None:
        """Record that a consumer without a handler has processed all entries up to an index.

        The cursor never moves back. Entries up to the index that the log has dropped do not count as missed.

        Raises:
            TargetError: A name or the index is not allowed, or no consumer with that name is registered.
            StoreUnavailableError: The server did not answer. A repetition is safe.
        """
        await self._seek(topic, consumer, _checked_start(index + 1), is_forward=True)

    async def _seek(self, topic: str, consumer: str, start: LogStart, *, is_forward: bool) -> int:
        keys, name = self._log(topic), check_name(consumer, field="consumer")
        try:
            at = await index_of(self._opened(), keys, start)
        except Fault as fault:
            raise StoreUnavailableError(self.options.name, fault.reason) from fault
        index = await self._run("seek_log", [keys.entries], ["", name, at, int(is_forward)])
        if not index:
            raise TargetError("consumer", shortened(consumer), f"a consumer that is registered with {topic!r}")
        return int(index)

    async def consumers(self, topic: str) -> Sequence[LogConsumer]:
        """List the consumers of a log in the order of their names, with their cursors and their lag.

        Raises:
            TargetError: The name is not allowed.
            StoreUnavailableError: The server did not answer.
        """
        keys = self._log(topic)
        names = sorted(name.decode() for name in await self._command("ZRANGE", keys.consumers, 0, -1))
        consumers: list[LogConsumer] = []
        for start in range(0, len(names), AT_ONCE):
            part = names[start : start + AT_ONCE]
            found = await self._run("lag_log", [keys.entries], ["", *part])
            for name, (ordered, *numbers, seen) in zip(part, found, strict=True):
                seen_ms = int(seen) if seen else None
                consumers.append(LogConsumer(name, ordered == b"1", seen_ms, *map(int, numbers)))
        return consumers

    async def topics(self) -> Sequence[LogTopic]:
        """List the logs that have entries or consumers, in the order of their names.

        Raises:
            StoreUnavailableError: The server did not answer.
        """
        names = sorted(name.decode() for name in await self._command("SMEMBERS", self.keys.key("logs")))
        return [await self._found(LogKeys(self.keys, name), name) for name in names]

    async def _found(self, keys: LogKeys, name: str) -> LogTopic:
        first, last, _ = await self._run("trim_log", [keys.entries], ["", 0, 0, 0])
        consumers = int(await self._command("ZCARD", keys.consumers))
        memory = int(await self._command("MEMORY", "USAGE", keys.entries) or 0)
        return LogTopic(name, int(first), int(last), consumers, memory)
