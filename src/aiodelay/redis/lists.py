"""Lists as a sink: `to="redis-list:<key>"`, or `redis-list:<key>?format=raw` for the payload alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Self

from aiodelay.errors import ConfigurationError, SinkUnavailableError, TargetError, shortened
from aiodelay.model import MAX_CLAIM_MESSAGES, Delivery, Demand, NotTaken, SendOutcome, Sent
from aiodelay.urls import UrlOptions

from .client import Client
from .elements import encode_element
from .faults import Fault
from .options import Options, read_options, read_url
from .scripts import Arg

__all__ = ["ListEnd", "RedisListSink", "open_list_sink", "split_address"]

NAME = "redis-list"
MAX_LENGTH, MOST_LENGTH = 10_000, 1 << 40
_FORMATS = {"": False, "?format=raw": True}
_RESERVED = re.compile(r"\{[^}]*:\d\d\}:")
_OURS = ":aiodelay:"


def split_address(address: str) -> tuple[str, bool]:
    """Return an address's key, and whether its elements are payloads alone.

    Raises:
        TargetError: It is not of the form `<key>` or `<key>?format=raw`, or the key is one of aiodelay's own.
    """
    key, mark, options = address.partition("?")
    is_raw = _FORMATS.get(mark + options)
    if not key or is_raw is None:
        raise TargetError(f"address of {NAME}", shortened(address), "<key>, or <key>?format=raw; a key without '?'")
    if _RESERVED.match(key) or _OURS in key:
        raise TargetError(f"key of {NAME}", shortened(key), "a key that is not one of aiodelay's own")
    return key, is_raw


class ListEnd:
    """What the sink and the source of lists stand on: a server, and the form of an address.

    Args:
        server: A URL as of a Redis store.

    Raises:
        ConfigurationError: The URL cannot be used.
    """

    name: str = NAME

    def __init__(self, server: str | Options) -> None:
        self.options: Options = read_url(server) if isinstance(server, str) else server
        self._client: Client | None = None

    def check(self, address: str) -> None:
        """Refuse an address that is not of the form `<key>` or `<key>?format=raw`, and aiodelay's own keys."""
        split_address(address)

    async def __aenter__(self) -> Self:
        self._client = Client(self.options)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


class RedisListSink(ListEnd):
    """Pushes messages to the right end of Redis lists; an address is a list's key.

    A Redis store brings one for its own server along, and moves messages there exactly once. From any other store they
    are claimed, pushed and settled: at least once.

    Args:
        server: A URL as of a Redis store: `redis://user:password@host:6379/0`.
        max_length: A list that holds so many elements takes no more until it is shorter; 0 = any number.

    Raises:
        ConfigurationError: The URL or the number cannot be used.
    """

    limits: Demand = Demand(MAX_CLAIM_MESSAGES)

    def __init__(self, server: str | Options, *, max_length: int = MAX_LENGTH) -> None:
        if isinstance(max_length, bool) or not isinstance(max_length, int) or not 0 <= max_length <= MOST_LENGTH:
            raise ConfigurationError("max_length", shortened(max_length), f"an integer from 0 to {MOST_LENGTH}")
        super().__init__(server)
        self.max_length: int = max_length

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        """Push the messages, those of one list at once.

        Raises:
            SinkUnavailableError: The server does not answer. Some may have been pushed.
        """
        by_address: dict[str, list[int]] = {}
        for i, delivery in enumerate(deliveries):
            by_address.setdefault(delivery.envelope.address, []).append(i)
        outcomes: list[SendOutcome] = [NotTaken("not sent")] * len(deliveries)
        for address, places in by_address.items():
            try:
                sent = await self._push(address, [deliveries[i] for i in places])
            except SinkUnavailableError:
                if not any(isinstance(outcome, Sent) for outcome in outcomes):
                    raise
                break  # what was pushed is not to be sent again
            for i, outcome in zip(places, sent, strict=True):
                outcomes[i] = outcome
        return outcomes

    async def _push(self, address: str, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        assert self._client is not None
        try:
            key, is_raw = split_address(address)
        except TargetError as error:
            return [NotTaken(str(error))] * len(deliveries)
        elements = [each.envelope.payload if is_raw else encode_element(each) for each in deliveries]
        arguments: list[Arg] = [self.max_length, "raw" if is_raw else "", *elements]
        try:
            pushed = int(await self._client.run_on("push", [key], arguments))
        except Fault as fault:
            if fault.is_connection or not (fault.kind == "unknown" or fault.reason.startswith("NOPERM")):
                raise SinkUnavailableError(f"{self.name} at {self.options.name}", fault.reason) from fault
            return [NotTaken(fault.reason)] * len(deliveries)
        full = NotTaken(f"full: {self.max_length} elements")
        return [Sent()] * pushed + [full] * (len(deliveries) - pushed)


def open_list_sink(url: str) -> RedisListSink:
    """Open `redis-list://host:6379/0?max_length=10000`; with TLS `rediss-list://`.

    Raises:
        ConfigurationError: The URL is not of these forms, or an option is unknown or out of range.
    """
    given = UrlOptions(url)
    options = read_options(given)
    max_length = given.integer("max_length", MAX_LENGTH, 0, MOST_LENGTH)
    given.finish()
    return RedisListSink(options, max_length=max_length)
