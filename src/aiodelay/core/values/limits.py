"""`Limit` and `LaneLimits`: how many messages of a lane, or of each of its keys, are delivered at once and per time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from msgspec import Struct

from aiodelay.core.rates import parse_rate
from aiodelay.errors import ConfigurationError, shortened

from .record import Envelope, Lane

__all__ = ["ADDRESS", "NO_LIMITS", "LaneLimits", "Limit", "LimitedKey", "lane_limits"]

MAX_CONCURRENCY = 100_000
ADDRESS = "address"
"""The name of the key by which a sink's messages are limited: their address."""


class Limit(Struct, frozen=True):
    """A limit for the messages of a lane, over all processes. A lane is a handler's event type, or a sink.

    Attributes:
        key: What the limit counts. None: all messages of the lane together. For a handler: the name of the event's
            field whose value is the key of a message; each value has the limit for itself. For a sink: "address".
        concurrency: Most messages in flight at once, 1 to 100,000; None = no limit.
        rate: Most messages that begin within any span of a time, such as "5/min", "1000/s" or "10/5m"; None = no limit.

    Raises:
        ConfigurationError: An attribute is wrong, or neither `concurrency` nor `rate` is given.
    """

    key: str | None = None
    concurrency: int | None = None
    rate: str | None = None

    def __post_init__(self) -> None:
        """Check the attributes."""
        if self.key is not None and (not isinstance(self.key, str) or not self.key.isidentifier()):
            raise ConfigurationError("limit.key", shortened(self.key), "the name of a field of the event, or no key")
        if self.concurrency is None and self.rate is None:
            raise ConfigurationError("limit", "without a number", "a concurrency, a rate, or both")
        if self.concurrency is not None:
            is_number = type(self.concurrency) is int and 1 <= self.concurrency <= MAX_CONCURRENCY
            if not is_number:
                allowed = f"an integer from 1 to {MAX_CONCURRENCY}"
                raise ConfigurationError("limit.concurrency", shortened(self.concurrency), allowed)
        if self.rate is not None:
            parse_rate(self.rate, field="limit.rate")

    @property
    def window(self) -> tuple[int, int] | None:
        """The rate as (most messages, ms); None = there is no rate."""
        return None if self.rate is None else _window_of(self.rate)


@lru_cache(maxsize=1024)
def _window_of(rate: str) -> tuple[int, int]:
    """Return a rate as (most messages, ms). Claims ask several times for each message, so the text is read once."""
    return parse_rate(rate, field="limit.rate")


class LaneLimits(Struct, frozen=True):
    """The limits of one lane.

    Attributes:
        whole: The limit of all messages of the lane together.
        each: The limit of each key.
    """

    whole: Limit | None = None
    each: Limit | None = None

    def __bool__(self) -> bool:
        """Whether the lane has any limit."""
        return self.whole is not None or self.each is not None

    @property
    def all(self) -> tuple[Limit, ...]:
        """The limits, the limit of the whole lane first."""
        return tuple(limit for limit in (self.whole, self.each) if limit is not None)

    def key_of(self, envelope: Envelope) -> bytes:
        """Return the key under which a message counts: its own key, or for a sink with a limit by address its address.

        Messages without a key count under one common key.
        """
        if self.each is not None and self.each.key == ADDRESS and envelope.address:
            return envelope.address.encode()
        return envelope.key or b""


NO_LIMITS = LaneLimits()


class LimitedKey(Struct, frozen=True):
    """A key of a limited lane that has messages in flight, or due messages that wait because of a limit.

    Attributes:
        lane: The lane.
        key: The key; None if the lane has no limit by key.
        running: The messages in flight.
        waiting: The due messages that wait.
        why: The limit that makes them wait: `concurrency` or `rate` of the key, `lane` for a limit of the whole lane;
            "" if none waits.
        until_ms: When the rate lets the next message begin, epoch ms; None if a message in flight has to end first.
        since_ms: When the first of the waiting messages was due, epoch ms; None if none waits.
    """

    lane: Lane
    key: bytes | None
    running: int
    waiting: int
    why: Literal["concurrency", "rate", "lane", ""]
    until_ms: int | None = None
    since_ms: int | None = None


def lane_limits(limits: Sequence[Limit]) -> LaneLimits:
    """Return the limits of a lane from a list with at most one limit of the lane, and at most one by key.

    Raises:
        ConfigurationError: An element is no `Limit`, or two limits are of the same kind.
    """
    whole: Limit | None = None
    each: Limit | None = None
    for limit in limits:
        if not isinstance(limit, Limit):
            raise ConfigurationError("limit", shortened(limit), "Limit(...) or a list of them")
        if (whole if limit.key is None else each) is not None:
            kind = "without a key" if limit.key is None else "with a key"
            raise ConfigurationError("limit", f"two limits {kind}", "at most one limit with a key and one without")
        if limit.key is None:
            whole = limit
        else:
            each = limit
    return LaneLimits(whole, each)
