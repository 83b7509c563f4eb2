"""`RedisLog`: the sink and source `redis-log`.

A log keeps its messages, and each consumer reads them at its own pace.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.connections import MOST_MESSAGES, check_integer, milliseconds
from aiodelay.backends.redis.connection.options import Options, read_options
from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.connection.wakeup_listener import listening
from aiodelay.backends.redis.fanout.publishing import PublishingEnd
from aiodelay.backends.redis.fanout.topic_scripts import Place, check_name, read_place
from aiodelay.backends.redis.records.keys import DEFAULT_NAMESPACE, Keys, keys_of
from aiodelay.core.durations import Duration
from aiodelay.core.urls import UrlOptions
from aiodelay.core.values import PutBack, Stored
from aiodelay.errors import StoreUnavailableError
from aiodelay.ports import Feed
from aiodelay.ports.clock import SystemClock

from .entries import LogMessage, chunks, read_start, written
from .feed import LogFeed
from .topics import LogKeys, LogTopics

__all__ = ["RedisLog", "open_log"]

NAME = "redis-log"
_OPTIONS = {"consumer": "consumer", "group": "consumer", "from": "from", "ordered": "ordered"}
_FORM = "<topic>, or <topic>?consumer=<name>, which may end with &from=<now, an index or a time> and &ordered=true"


class RedisLog(PublishingEnd, LogTopics):
    """The logs of one namespace: a sink, a source, and a class to use without a scheduler. Open it with `async with`.

    **As a sink.** The address `<topic>` appends a message to the log. The address `<topic>?consumer=<name>` gives a
    message to one consumer only. A Redis store already has this sink for its own namespace, and moves each message to
    its log exactly once. With any other store, the scheduler claims, appends and settles a message, so it may append a
    message twice. The log ignores the second message if it comes within 10 minutes of the first.

    **As a source.** The address is `<topic>?consumer=<name>`. In place of `consumer`, the address may say `group`, as
    in Kafka's addresses. The first claim registers the consumer. The consumer starts at the oldest entry. With
    `&from=`, it starts at `now`, an index or a time. All processes that name the same consumer share its messages, each
    message under a lease. With `&ordered=true`, at most one message is in flight. Retries return to the consumer, and
    dead letters go to the scheduler's store.

    Args:
        server: A URL in the form of a Redis store's URL: `redis://user:password@host:6379/0`.
        name: The name before the colon in `to=` and `source=`. With `"kafka"`, the log replaces the Kafka sink and
            source.
        namespace: The namespace of the logs. It separates the logs of applications, as a store's namespace does.
        max_messages: The largest number of entries in a log. If there are more, an append drops the oldest entries. 0 =
            no limit.
        max_age: The largest age of an entry. An append drops older entries. None = no limit.
        drop_passed: If True, an append drops the entries that all registered consumers have passed.
        resend_unknown: The rule after an attempt whose outcome has been unknown for more than 9 minutes. If True, the
            sink appends the message again, and consumers may get it twice. If False, the sink gives the message up with
            the reason `outcome_unknown`.

    Raises:
        ConfigurationError: The URL or an option is not allowed.
    """

    name: str

    def __init__(
        self,
        server: str | Options,
        *,
        name: str = NAME,
        namespace: str = DEFAULT_NAMESPACE,
        max_messages: int = 0,
        max_age: Duration | None = None,
        drop_passed: bool = False,
        resend_unknown: bool = False,
    ) -> None:
        super().__init__(server, resend_unknown=resend_unknown)
        self.name: str = name
        self.keys: Keys = keys_of(namespace)
        self.settings: tuple[int, int, int] = (
            check_integer("max_messages", max_messages, MOST_MESSAGES),
            milliseconds(max_age),
            int(drop_passed),
        )

    def check(self, address: str) -> None:
        """Check that an address is `<topic>` or `<topic>?consumer=<name>`.

        Raise `TargetError` for any other address.
        """
        self._place(address)

    def _place(self, address: str) -> Place:
        place = read_place(address, self.name, _OPTIONS, start="oldest", form=_FORM)
        read_start(place.start, field=f"from= in an address of {self.name}")
        return place

    # --- appending ----------------------------------------------------------------------------------------

    async def append(self, topic: str, messages: Iterable[LogMessage | bytes]) -> Sequence[int | None]:
        """Append messages in order. One call to the server appends up to 500 messages and 1 MiB.

        Returns:
            The index of each message, in order. None for a message whose id was already appended within the last 10
            minutes.

        Raises:
            TargetError: The name of the topic is not allowed.
            InputError: A message cannot be stored. Earlier messages may have been appended.
            StoreUnavailableError: The server did not answer, or it refused the call. Some messages may have been
                appended. If the caller gave the ids of the messages, a repetition is safe.
        """
        keys, now_ms = self._log(topic), SystemClock().now_ms()
        indexes: list[int | None] = []
        for part in chunks(written(each, self.name, topic, now_ms) for each in messages):
            arguments: list[Arg] = ["", "", *self.settings, *(value for pair in part for value in pair)]
            answer = await self._run("append", [keys.entries, keys.logs], arguments)
            if isinstance(answer, bytes):
                raise StoreUnavailableError(self.options.name, answer.decode("utf-8", "backslashreplace"))
            last = int(answer[0])
            for letter in answer[1]:
                last += letter == ord("n")
                indexes.append(last if letter == ord("n") else None)
        return indexes

    async def _publish(self, client: Client, address: str, elements: Sequence[Arg]) -> int | str:
        place = self._place(address)
        keys = LogKeys(self.keys, place.topic)
        arguments: list[Arg] = ["", place.consumer, *self.settings, *elements]
        answer = await client.run_on("append", [keys.entries, keys.logs], arguments)
        return answer.decode("utf-8", "backslashreplace") if isinstance(answer, bytes) else len(answer[1])

    # --- taking -------------------------------------------------------------------------------------------

    def feed(
        self,
        address: str,
        consumer: str,
        put_back: Callable[[Sequence[PutBack]], Awaitable[Sequence[Stored]]],
        now_ms: Callable[[], int],
    ) -> AbstractAsyncContextManager[Feed]:
        """Open a feed of the messages of a consumer. The first claim of the feed registers the consumer.

        Raises:
            TargetError: The address names no consumer.
        """
        place = self._place(address)
        check_name(place.consumer, field=f"consumer in address of {self.name}")
        assert self._client is not None
        feed = LogFeed(
            self._client, self.options.name, self.keys, place, consumer, sink=self.name, store=(put_back, now_ms)
        )
        return self._feeding(feed, address)

    @asynccontextmanager
    async def _feeding(self, feed: LogFeed, address: str) -> AsyncIterator[Feed]:
        async with (
            listening(feed.listener, f"aiodelay redis log {address}, given back"),
            listening(feed.ahead, f"aiodelay redis log {address}"),
        ):
            yield feed


def open_log(url: str) -> RedisLog:
    """Return a log for a URL: `redis-log://host:6379/0?namespace=shop&max_messages=1000000&max_age=7d`.

    The URL scheme with TLS is `rediss-log://`.

    Raises:
        ConfigurationError: The URL has none of these forms, or an option is unknown or out of range.
    """
    given = UrlOptions(url)
    options = read_options(given)
    namespace = given.text("namespace", DEFAULT_NAMESPACE)
    max_messages = given.integer("max_messages", 0, 0, MOST_MESSAGES)
    max_age = given.text("max_age")
    drop_passed = given.integer("drop_passed", 0, 0, 1) == 1
    resend_unknown = given.integer("resend_unknown", 0, 0, 1) == 1
    given.finish()
    return RedisLog(
        options,
        namespace=namespace,
        max_messages=max_messages,
        max_age=max_age or None,
        drop_passed=drop_passed,
        resend_unknown=resend_unknown,
    )
