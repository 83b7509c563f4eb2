"""What a store tells of its messages and of the processes that serve it; nothing here changes the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from aiodelay.core.values import Instance, Lane, LaneCounts, LoadBucket, Query, Snapshot

__all__ = ["Inspectable", "Instances", "Recurring"]


@runtime_checkable
class Inspectable(Protocol):
    """The part of a store that shows messages, counts and positions."""

    async def get(self, message_id: str) -> Snapshot | None:
        """Return the message as it stands now, None if it is not pending and not in flight."""
        ...

    async def search(self, query: Query) -> Sequence[Snapshot]:
        """List messages by (next attempt, id)."""
        ...

    async def counts(self) -> Mapping[Lane, LaneCounts]:
        """Count messages by lane and state."""
        ...

    async def load(self, *, bucket_ms: int, buckets: int) -> Sequence[LoadBucket]:
        """Count what comes due in each of the next `buckets` spans of `bucket_ms`, from now on; empty ones left out."""
        ...

    async def position(self, source: str) -> int | None:
        """Return an intake's stored position; a store may refuse from then on who has taken the source in before."""
        ...


@runtime_checkable
class Recurring(Protocol):
    """The part of a store that lists recurring messages by an index."""

    async def series(self, *, after: str | None = None, limit: int = 100) -> Sequence[Snapshot]:
        """List recurring messages that are pending or in flight, in an order of the store's own that does not change.

        Args:
            after: The id of the last one of the page before.
            limit: 1 to 1,000.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...


@runtime_checkable
class Instances(Protocol):
    """The part of a store that lists the processes that dispatch from it."""

    async def instances(self) -> Sequence[Instance]:
        """List those that were heard of within the last minute, by name.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...
