"""The sink `redis-list:<key>`, which pushes messages to a Redis list. With `?format=raw`, it pushes payloads only."""

from __future__ import annotations

import re
from collections.abc import Sequence

from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.connections import MOST_MESSAGES, ConnectedSink, check_integer
from aiodelay.backends.redis.connection.options import Options, read_options
from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.records.elements import encode_element
from aiodelay.core.urls import UrlOptions
from aiodelay.core.values import Delivery, NotTaken, SendOutcome, Sent
from aiodelay.errors import TargetError, shortened

__all__ = ["NAME", "ListEnd", "RedisListSink", "open_list_sink", "split_address"]

NAME = "redis-list"
MAX_LENGTH = 10_000
_FORMATS = {"": False, "?format=raw": True}
_RESERVED = re.compile(r"\{[^}]*:\d\d\}:")
_OURS = ":aiodelay:"


def split_address(address: str) -> tuple[str, bool]:
    """Return the key in an address. The second value is True if the elements of the list are payloads only.

    Raises:
        TargetError: The address is not `<key>` or `<key>?format=raw`, or the key is one of aiodelay's own keys.
    """
    key, mark, options = address.partition("?")
    is_raw = _FORMATS.get(mark + options)
    if not key or is_raw is None:
        raise TargetError(
            f"address of {NAME}", shortened(address), "<key> or <key>?format=raw, in which the key has no '?'"
        )
    if _RESERVED.match(key) or _OURS in key:
        raise TargetError(f"key of {NAME}", shortened(key), "a key that does not belong to aiodelay itself")
    return key, is_raw


class ListEnd:
    """The common part of the sink and the source of lists: their name and the check of an address."""

    name: str = NAME

    def check(self, address: str) -> None:
        """Check that an address is `<key>` or `<key>?format=raw`. The key must not belong to aiodelay itself."""
        split_address(address)


class RedisListSink(ListEnd, ConnectedSink):
    """Pushes messages to the right end of Redis lists. The address of a message is the key of a list.

    A Redis store already has this sink for its own server, and moves each message to its list exactly once. On a
    cluster, it does so if the key has the hash tag of the namespace. For other lists, and with any other store, the
    scheduler claims, pushes and settles a message, so the message arrives at least once.

    Args:
        server: A URL in the form of a Redis store's URL: `redis://user:password@host:6379/0`.
        max_length: The number of elements at which a list is full. The sink pushes nothing to a full list. 0 = no
            limit.

    Raises:
        ConfigurationError: The URL or the number is not allowed.
    """

    def __init__(self, server: str | Options, *, max_length: int = MAX_LENGTH) -> None:
        super().__init__(server)
        self.max_length: int = check_integer("max_length", max_length, MOST_MESSAGES)

    async def _pushed(self, client: Client, address: str, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        key, is_raw = split_address(address)
        elements = [each.envelope.payload if is_raw else encode_element(each) for each in deliveries]
        arguments: list[Arg] = [self.max_length, "raw" if is_raw else "", *elements]
        pushed = int(await client.run_on("push", [key], arguments))
        full = NotTaken(f"full: {self.max_length} elements")
        return [Sent()] * pushed + [full] * (len(deliveries) - pushed)


def open_list_sink(url: str) -> RedisListSink:
    """Return a sink for a URL: `redis-list://host:6379/0?max_length=10000`. The scheme with TLS is `rediss-list://`.

    Raises:
        ConfigurationError: The URL has none of these forms, or an option is unknown or out of range.
    """
    given = UrlOptions(url)
    options = read_options(given)
    max_length = given.integer("max_length", MAX_LENGTH, 0, MOST_MESSAGES)
    given.finish()
    return RedisListSink(options, max_length=max_length)
