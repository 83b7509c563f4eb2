"""Changes to a store that are not commands: dead letters, pauses, and messages that a source puts back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from aiodelay.core.values import DeadKey, DeadLetter, Lane, Outcome, PutBack, Stored

__all__ = ["DeadLetters", "Pauses", "PutsBack", "pause_order"]


@runtime_checkable
class DeadLetters(Protocol):
    """The part of a store that keeps dead letters."""

    async def dead_letters(
        self,
        *,
        lane: Lane | None = None,
        message_id: str | None = None,
        after: tuple[int, str, int] | None = None,
        limit: int = 100,
    ) -> Sequence[DeadLetter]:
        """List dead letters, oldest first. With `message_id`, an index finds the letters of that message.

        Args:
            lane: Only letters of this lane; None = of all lanes.
            message_id: Only letters of this message, in all its revisions; None = of all messages.
            after: The (at_ms, id, revision) of the last letter of the previous page.
            limit: Most letters to return, 1 to 1,000.
        """
        ...

    async def redrive(self, keys: Sequence[DeadKey]) -> Sequence[Outcome]:
        """Schedule dead letters again, due now.

        Returns:
            For each key, `Stored`, or `Refused` with the reason `not_found`, `exists` or `undecodable`.
        """
        ...

    async def purge(self, keys: Sequence[DeadKey]) -> int:
        """Delete dead letters; return how many were deleted."""
        ...


@runtime_checkable
class Pauses(Protocol):
    """The part of a store that pauses delivery. A paused message stays stored, and can be cancelled."""

    async def pause(self, lane: Lane, address: str | None = None) -> bool:
        """Pause a lane, or one address of the lane. Return False if this lane or address was paused already."""
        ...

    async def resume(self, lane: Lane, address: str | None = None) -> bool:
        """Resume a lane, or one address of the lane. Return whether this lane or address was paused."""
        ...

    async def paused(self) -> Sequence[tuple[Lane, str | None]]:
        """List the paused lanes and addresses, as pairs, in the order of `pause_order`.

        If the address is None, the whole lane is paused.
        """
        ...


def pause_order(pause: tuple[Lane, str | None]) -> tuple[Lane, bool, str]:
    """Return the sort key of a pause: by lane, and each lane before its addresses."""
    lane, address = pause
    return lane, address is not None, address or ""


@runtime_checkable
class PutsBack(Protocol):
    """The part of a store that takes messages back from a source: their retries and dead letters."""

    async def put_back(self, messages: Sequence[PutBack]) -> Sequence[Stored]:
        """Store messages under the revisions that they already have (S1, S2, S4).

        Repeating is safe as long as the messages are stored. If a message with the same id is pending or in flight, the
        store does not change it (`kept`). The store does not change a dead letter of the same revision either.

        Returns:
            One answer for each message, in order.

        Raises:
            StoreUnavailableError: The store did not answer. Some messages may have been stored.
        """
        ...
