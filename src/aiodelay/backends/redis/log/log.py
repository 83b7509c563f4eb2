"""Logs: topics whose messages stay, each with an index, for consumers that go through them at their own pace."""

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
_FORM = "<topic>, or <topic>?consumer=<name>, with &from=now, an index or a time, and &ordered=true if wanted"


class RedisLog(PublishingEnd, LogTopics):
    """The logs of one namespace: a sink, a source, and to be used by itself, opened with `async with`.

    As a sink, an address is `<topic>`; `<topic>?consumer=<name>` gives a message to that consumer alone. A Redis store
    brings one for its own namespace along, and moves messages there exactly once. From any other store they are
    claimed, appended and settled; a message that is appended again within 10 minutes is there once.

    As a source, an address is `<topic>?consumer=<name>`, or `?group=` as Kafka's addresses say. The consumer is
    registered when it first takes, to begin with the oldest entry, or with `&from=now`, an index or a time. All who
    name the same consumer share its messages, each under a lease; with `&ordered=true` one is in flight at a time.
    Retries return to the consumer, dead letters go to the scheduler's store.

    Args:
        server: A URL as of a Redis store: `redis://user:password@host:6379/0`.
        name: What stands before the colon in `to=` and `source=`: with `"kafka"` it takes the place of Kafka's.
        namespace: Keeps the logs of several applications apart, as a store's.
        max_messages: Of more than so many the oldest are dropped when something is appended; 0 = none are.
        max_age: So is what was appended longer ago than that; None = nothing is.
        drop_passed: So is what all registered consumers have passed.
        resend_unknown: Append a message again also where the outcome of its first try has been unknown for more than 9
            minutes, though it may be doubled; otherwise it is given up as `outcome_unknown`.

    Raises:
        ConfigurationError: The URL or an option cannot be used.
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
        """Refuse an address that is not of the form `<topic>` or `<topic>?consumer=<name>`."""
        self._place(address)

    def _place(self, address: str) -> Place:
        place = read_place(address, self.name, _OPTIONS, start="oldest", form=_FORM)
        read_start(place.start, field=f"from in address of {self.name}")
        return place

    # --- appending ----------------------------------------------------------------------------------------

    async def append(self, topic: str, messages: Iterable[LogMessage | bytes]) -> Sequence[int | None]:
        """Append messages in order, up to 500 and 1 MiB in a step.

        Returns:
            The index of each; None of one whose id was appended within 10 minutes.

        Raises:
            TargetError: The name cannot be used.
            InputError: A message cannot be stored; those before it may have been.
            StoreUnavailableError: No answer, or the server refused. Some may have been appended: repeating is safe for
                messages with an id of the caller's.
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
        """Open the taking of a consumer's messages; it is registered with the first claim.

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
    """Open `redis-log://host:6379/0?namespace=shop&max_messages=1000000&max_age=7d`; with TLS `rediss-log://`.

    Raises:
        ConfigurationError: The URL is not of these forms, or an option is unknown or out of range.
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
