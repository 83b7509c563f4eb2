"""Inspection of a store: its messages, and the processes that serve it. Nothing here changes the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from aiodelay.core.values import Instance, Lane, LaneCounts, LoadBucket, Query, Snapshot

__all__ = ["Inspectable", "Instances", "Recurring"]


@runtime_checkable
class Inspectable(Protocol):
    """The part of a store that returns messages, counts and positions."""

    async def get(self, message_id: str) -> Snapshot | None:
        """Return the current state of a message; None if it is neither pending nor in flight."""
        ...

    async def search(self, query: Query) -> Sequence[Snapshot]:
        """List messages, ordered by (next attempt, id)."""
        ...

    async def counts(self) -> Mapping[Lane, LaneCounts]:
        """Count messages by lane and state."""
        ...

    async def load(self, *, bucket_ms: int, buckets: int) -> Sequence[LoadBucket]:
        """Count the messages due in each of the next `buckets` spans of `bucket_ms`, from now on; omit empty spans."""
        ...

    async def position(self, source: str) -> int | None:
        """Return an intake's stored position; None if there is none.

        After this call, a store may refuse earlier readers of this source.
        """
        ...


@runtime_checkable
class Recurring(Protocol):
    """The part of a store that lists recurring messages by an index."""

    async def series(self, *, after: str | None = None, limit: int = 100) -> Sequence[Snapshot]:
        """List recurring messages that are pending or in flight, in a stable order that the store chooses.

        Args:
            after: The id of the last message of the previous page.
            limit: Most messages to return, 1 to 1,000.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        ...


@runtime_checkable
class Instances(Protocol):
    """The part of a store that lists the processes that dispatch from it."""

    async def instances(self) -> Sequence[Instance]:
        """List the processes that reported to the store within the last minute, ordered by name.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        ...
