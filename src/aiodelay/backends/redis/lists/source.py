"""The source `redis-list:<key>`, which gives the elements of a Redis list to a handler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.connections import Connected
from aiodelay.backends.redis.connection.options import read_options
from aiodelay.backends.redis.connection.wakeup_listener import listening
from aiodelay.backends.redis.records.elements import Element
from aiodelay.core.ids import new_id
from aiodelay.core.transitions import NO_OP
from aiodelay.core.urls import UrlOptions
from aiodelay.core.values import Envelope, Lane, PutBack, Record, Stored
from aiodelay.ports import Feed

from .list_consumer import ListConsumer, Store
from .sink import NAME, ListEnd, split_address

__all__ = ["RedisListSource", "open_list_source"]


class RedisListSource(ListEnd, Connected):
    """Takes messages from the left end of Redis lists. The address is the key of a list, as for `RedisListSink`.

    A process has a lease for the elements that it takes. If the lease lapses, the elements return to the head of the
    list. Retries and dead letters go to the scheduler's store.

    Args:
        server: A URL in the form of a Redis store's URL.

    Raises:
        ConfigurationError: The URL is not allowed.
    """

    @asynccontextmanager
    async def feed(
        self,
        address: str,
        consumer: str,
        put_back: Callable[[Sequence[PutBack]], Awaitable[Sequence[Stored]]],
        now_ms: Callable[[], int],
    ) -> AsyncIterator[Feed]:
        """Open a feed of the messages of a list."""
        assert self._client is not None
        feed = _ListFeed(self._client, self.options.name, address, consumer, store=(put_back, now_ms))
        async with listening(feed.listener, f"aiodelay redis list {address}"):
            yield feed


class _ListFeed(ListConsumer):
    """Takes the elements of one list for one process. Other programs may push to the list too."""

    def __init__(self, client: Client, server: str, address: str, consumer: str, *, store: Store) -> None:
        key, self._is_raw = split_address(address)
        tagged = f"{key}:" if "{" in key else f"{{{key}}}"
        keys = [key, f"{tagged}:aiodelay:consumers", f"{tagged}:aiodelay:taken:{consumer}"]
        super().__init__(client, f"list {key} at {server}", keys, consumer, store=store)
        self._advice = f"; what other programs push needs source='{NAME}:{key}?format=raw'"

    def _judged(self, element: bytes, lane: Lane, now_ms: int) -> Element | PutBack | None:
        if self._is_raw:
            return Element(Record(Envelope(new_id(), lane, payload=element), now_ms, now_ms, NO_OP), None)
        return super()._judged(element, lane, now_ms)


def open_list_source(url: str) -> RedisListSource:
    """Return a source for a URL: `redis-list://host:6379/0`. The scheme with TLS is `rediss-list://`.

    Raises:
        ConfigurationError: The URL has none of these forms, or an option is unknown or out of range.
    """
    given = UrlOptions(url)
    options = read_options(given)
    given.finish()
    return RedisListSource(options)
