"""Common code of the imports from Redis keys of other systems."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.faults import Fault
from aiodelay.backends.redis.connection.options import read_url
from aiodelay.backends.redis.records.keys import Keys
from aiodelay.errors import StoreUnavailableError

__all__ = ["opened", "scored"]


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Client]:
    """Connect to the Redis server of another system.

    Raises:
        StoreUnavailableError: The server did not answer.
    """
    options = read_url(url)
    client = Client(options, Keys(""), "")
    try:
        yield client
    except Fault as fault:
        raise StoreUnavailableError(options.name, fault.reason) from fault
    finally:
        await client.aclose()


def scored(reply: Sequence[object]) -> list[tuple[bytes, bytes | float]]:
    """Return the pairs of member and score from a reply in the form of RESP3 or RESP2."""
    if reply and isinstance(reply[0], list):
        return reply  # type: ignore[return-value]
    return list(zip(reply[::2], reply[1::2], strict=True))  # type: ignore[arg-type]
