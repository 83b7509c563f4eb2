"""Logs, to look at and to change: their entries, their consumers, and where these stand."""

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
        """Return the keys of one consumer."""
        return ConsumerKeys(f"{self.entries}@{consumer}:")


class LogConsumer(Struct, frozen=True):
    """A registered consumer, as it was found.

    Attributes:
        name: Its name.
        ordered: Whether it keeps order, one message in flight at a time.
        seen_ms: When it last asked for messages, within 10 s, or committed, epoch ms; None = never.
        since_ms: When it was registered, epoch ms.
        missed: How many messages were dropped before the consumer took them, since it was registered.
        waiting: How many it has not taken: its lag.
        in_flight: How many its instances have taken and not settled; those of the first 32 instances.
        retrying: How many are to be tried again later.
        memory: Bytes that its own keys take.
        cursor: The last index up to which every message has ended, or is to be tried again later.
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
    """A log, as it was found.

    Attributes:
        name: Its name.
        first: The first index that is kept; last + 1 if nothing is.
        last: The last index that was ever appended, 0 = none.
        consumers: How many are registered.
        memory: Bytes that its entries take, as the server estimates.
    """

    name: str
    first: int
    last: int
    consumers: int
    memory: int


async def register(client: Client, keys: LogKeys, consumer: str, *, start: LogStart, ordered: bool) -> bool:
    """Make a consumer known; say whether it was not.

    Raises:
        ConfigurationError: The log has as many consumers as may be, or its key holds something else.
        Fault: The server did not answer; repeating is safe.
    """
    at = await index_of(client, keys, start)
    answer = await client.run_on("register_log", [keys.entries, keys.logs], ["", consumer, int(ordered), at])
    if answer in (b"new", b"known"):
        return bool(answer == b"new")
    if answer == b"full":
        raise ConfigurationError("consumers of a log", f"one more: {shortened(consumer)}", "2,000")
    raise Fault("unavailable", answer.decode("utf-8", "backslashreplace"))


async def index_of(client: Client, keys: LogKeys, start: LogStart) -> Arg:
    """Return what scripts are told of a start: a time is an index for them.

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
    """The logs of one namespace.

    Args:
        server: A URL as of a Redis store.
        namespace: Keeps the logs of several applications apart, as a store's.
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
        """Give entry after entry, up to the last there is when it gets there; takes none away.

        What was dropped meanwhile is not there: indexes are consecutive, so a step in them tells how many those are.

        Args:
            topic: 1 to 100 letters, digits and `.`, `_`, `-`, `/`.
            start: Where to begin.
            consumer: Begin where this one goes on instead, if it is registered; `commit` moves it.

        Raises:
            TargetError: A name or the start cannot be used.
            RecordFormatError: An entry cannot be read.
            StoreUnavailableError: No answer.
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
        """Drop the oldest entries; those who have not had them are told how many they missed.

        Args:
            topic: As of `read`.
            max_messages: Of more than so many, those before; 0 = keep any number.
            max_age: What was appended longer ago; None = however long ago.
            drop_passed: What is before the cursors of all registered consumers.

        Returns:
            How many indexes were dropped.

        Raises:
            TargetError: The name cannot be used.
            ConfigurationError: A limit cannot be used.
            StoreUnavailableError: No answer; repeating is safe.
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
        """Make a consumer known to a log.

        Args:
            topic: As of `read`.
            consumer: Named by the same rule.
            start: Where it begins. Means nothing for one that is known: `seek` moves it.
            ordered: One message is in flight at a time, over all its instances. Changes one that is known.

        Returns:
            Whether it was not known.

        Raises:
            TargetError: A name or the start cannot be used.
            ConfigurationError: The log has 2,000 consumers.
            StoreUnavailableError: No answer; repeating is safe.
        """
        keys, name = self._log(topic), check_name(consumer, field="consumer")
        try:
            return await register(self._opened(), keys, name, start=_checked_start(start), ordered=ordered)
        except Fault as fault:
            raise StoreUnavailableError(self.options.name, fault.reason) from fault

    async def unregister(self, topic: str, consumer: str) -> bool:
        """Forget a consumer, with what it was to try again.

        Returns:
            Whether it was known.

        Raises:
            TargetError: A name cannot be used.
            StoreUnavailableError: No answer; repeating is safe.
        """
        keys, name = self._log(topic), check_name(consumer, field="consumer")
        return bool(await self._run("unregister_log", [keys.entries, keys.logs], ["", name]) == b"gone")

    async def seek(self, topic: str, consumer: str, start: LogStart) -> int:
        """Have a consumer go on elsewhere, back to replay or forward to skip.

        What its instances have in flight, and what waits to be tried again, goes on beside that: nothing is lost, and
        going back gives it such messages twice.

        Returns:
            The index with which it goes on; one that is asked for beyond the end is that after the last.

        Raises:
            TargetError: A name or the start cannot be used, or nobody of that name is registered.
            StoreUnavailableError: No answer; repeating is safe.
        """
        return await self._seek(topic, consumer, _checked_start(start), is_forward=False)

    async def commit(self, topic: str, consumer: str, index: int) -> None:
        """Note that a consumer without a handler is done with all up to an index; never moves it back.

        Raises:
            TargetError: A name or the index cannot be used, or nobody of that name is registered.
            StoreUnavailableError: No answer; repeating is safe.
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
            raise TargetError("consumer", shortened(consumer), f"one that is registered with {topic!r}")
        return int(index)

    async def consumers(self, topic: str) -> Sequence[LogConsumer]:
        """List a log's consumers with their cursor and lag, by name.

        Raises:
            TargetError: The name cannot be used.
            StoreUnavailableError: No answer.
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
        """List the logs that have entries or consumers, by name.

        Raises:
            StoreUnavailableError: No answer.
        """
        names = sorted(name.decode() for name in await self._command("SMEMBERS", self.keys.key("logs")))
        return [await self._found(LogKeys(self.keys, name), name) for name in names]

    async def _found(self, keys: LogKeys, name: str) -> LogTopic:
        first, last, _ = await self._run("trim_log", [keys.entries], ["", 0, 0, 0])
        consumers = int(await self._command("ZCARD", keys.consumers))
        memory = int(await self._command("MEMORY", "USAGE", keys.entries) or 0)
        return LogTopic(name, int(first), int(last), consumers, memory)
