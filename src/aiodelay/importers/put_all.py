"""Common code of the imports from other systems. A repeated import stores each message only once."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from aiodelay.core.values import Put, Refused, Stored
from aiodelay.errors import StoreUnavailableError
from aiodelay.ports import Store

__all__ = ["MOST_ID_BYTES", "PAGE", "VERSION", "Imported", "SkippedError", "put_all"]

PAGE = 500
VERSION = 1
"""The version of every imported message. A store refuses a message if it knows the same version of its id already.

So a repeated import does not store a message again that is pending, or that ended within the last 24 h.
"""
MOST_ID_BYTES = 255


class Imported(Struct, frozen=True):
    """The result of an import.

    Attributes:
        stored: The number of messages that were stored.
        known: The number of messages that the store knew already, as a rule from an earlier import.
        skipped: For each message that could not be imported: its key in the other system, and the reason.
    """

    stored: int
    known: int
    skipped: dict[str, str]


class SkippedError(Exception):
    """The reason why a message cannot be imported."""


async def put_all(store: Store, puts: Sequence[Put]) -> int:
    """Store the messages that the store does not know yet; return their number.

    Raises:
        StoreUnavailableError: The store did not take a message, and perhaps did not take others either.
    """
    stored = 0
    for put, outcome in zip(puts, await store.apply(puts), strict=True):
        if isinstance(outcome, Stored):
            stored += 1
        elif not isinstance(outcome, Refused) or outcome.reason != "outdated":
            raise StoreUnavailableError(store.name, f"message {put.id!r} was not stored: {outcome.detail}")
    return stored
