"""What operators, sources and imports change in a store without a command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from aiodelay.core.values import DeadKey, DeadLetter, Lane, Outcome, PutBack, Stored

__all__ = ["DeadLetters", "Holds", "PutsBack"]


@runtime_checkable
class DeadLetters(Protocol):
    """The part of a store that keeps messages given up."""

    async def dead_letters(
        self,
        *,
        lane: Lane | None = None,
        message_id: str | None = None,
        after: tuple[int, str, int] | None = None,
        limit: int = 100,
    ) -> Sequence[DeadLetter]:
        """List dead letters, oldest first; those of one message are looked up, whatever else is dead.

        Args:
            lane: Only of this lane.
            message_id: Only of this message, in all its revisions.
            after: The (at_ms, id, revision) of the last one of the page before.
            limit: 1 to 1,000.
        """
        ...

    async def redrive(self, keys: Sequence[DeadKey]) -> Sequence[Outcome]:
        """Give dead letters a new life, due now: `Stored`, or `Refused` as `not_found`, `exists` or `undecodable`."""
        ...

    async def purge(self, keys: Sequence[DeadKey]) -> int:
        """Delete dead letters for good; return how many there were."""
        ...


@runtime_checkable
class Holds(Protocol):
    """The part of a store that pauses delivery; a held message stays stored, and can be cancelled."""

    async def hold(self, lane: Lane, address: str | None = None) -> bool:
        """Pause a lane, or one address of it; return whether it was not held before."""
        ...

    async def release(self, lane: Lane, address: str | None = None) -> bool:
        """Resume; return whether it was held."""
        ...

    async def holds(self) -> Sequence[tuple[Lane, str | None]]:
        """List what is held."""
        ...


@runtime_checkable
class PutsBack(Protocol):
    """The part of a store that takes back messages that had left for a sink: a source's retries and dead letters."""

    async def put_back(self, messages: Sequence[PutBack]) -> Sequence[Stored]:
        """Store messages under the revision that they have (S1, S2, S4); one answer each, in order.

        Repeating is safe as long as they are there: an id that is pending or in flight, and a dead letter of the same
        revision, stay as they are (`kept`).

        Raises:
            StoreUnavailableError: No answer. Some may have been stored.
        """
        ...
