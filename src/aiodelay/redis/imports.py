"""What imports from other systems' keys have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from msgspec import Struct

from aiodelay.errors import StoreUnavailableError
from aiodelay.model import Put, Refused, Stored
from aiodelay.ports import Store

from .client import Client
from .faults import Fault
from .keys import Keys
from .options import read_url

__all__ = ["MOST_ID_BYTES", "PAGE", "VERSION", "Imported", "SkippedError", "opened", "put_all", "scored"]

PAGE = 500
VERSION = 1
"""Of all that is imported: what is known is not imported again, nor within 24 h of its end."""
MOST_ID_BYTES = 255


class Imported(Struct, frozen=True):
    """What an import came to.

    Attributes:
        stored: Messages that were stored.
        known: Messages that had been imported before.
        skipped: What could not be taken over: its key there, and why.
    """

    stored: int
    known: int
    skipped: dict[str, str]


class SkippedError(Exception):
    """Why something cannot be taken over."""


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Client]:
    """Connect to the server that another system uses.

    Raises:
        StoreUnavailableError: It does not answer.
    """
    options = read_url(url)
    client = Client(options, Keys(""), "")
    try:
        yield client
    except Fault as fault:
        raise StoreUnavailableError(options.name, fault.reason) from fault
    finally:
        await client.aclose()


async def put_all(store: Store, puts: Sequence[Put]) -> int:
    """Store what is not known yet; return how many that were.

    Raises:
        StoreUnavailableError: Some may not be stored.
    """
    stored = 0
    for put, outcome in zip(puts, await store.apply(puts), strict=True):
        if isinstance(outcome, Stored):
            stored += 1
        elif not isinstance(outcome, Refused) or outcome.reason != "outdated":
            raise StoreUnavailableError(store.name, f"{put.id} was not stored: {outcome.detail}")
    return stored


def scored(reply: Sequence[object]) -> list[tuple[bytes, bytes | float]]:
    """Return members and scores, as RESP3 and RESP2 give them."""
    if reply and isinstance(reply[0], list):
        return reply  # type: ignore[return-value]
    return list(zip(reply[::2], reply[1::2], strict=True))  # type: ignore[arg-type]
