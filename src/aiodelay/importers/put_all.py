"""What imports from other systems have in common: each message is stored once, however often it is repeated."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from aiodelay.core.values import Put, Refused, Stored
from aiodelay.errors import StoreUnavailableError
from aiodelay.ports import Store

__all__ = ["MOST_ID_BYTES", "PAGE", "VERSION", "Imported", "SkippedError", "put_all"]

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
