"""`Transfer`: moves due messages inside one server or cluster, in the step that removes them from the store."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from aiodelay.core.values import Blocked, Demand, Reach, Settlement, Transferred

from .sink import Sink

__all__ = ["Transfer", "Transferring"]


@runtime_checkable
class Transfer(Protocol):
    """A store that shares a system with sinks: it moves what is due there by itself, in the step that removes it."""

    def reaches(self, sink: Sink) -> Reach:
        """Say how often a message reaches a sink from here, and why."""
        ...

    def transferring(self, sink: Sink) -> AbstractContextManager[Transferring]:
        """Open the moving of one sink's messages; only for a sink that is reached exactly once."""
        ...

    async def blocked(self) -> Sequence[Blocked]:
        """List destinations that take nothing now, by lane and address.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...


class Transferring(Protocol):
    """One process's moving of one sink's messages; others may move the same sink's beside it."""

    async def transfer(self, demand: Demand, settlements: Sequence[Settlement] = (), *, traces: int = 0) -> Transferred:
        """Move due messages to where they are addressed, earliest due first (S1, S3, S6, S8, S9).

        A message is at its destination and out of the store, or neither. What is addressed to a destination that is
        full, broken or held waits aside and holds up nobody (L3, L5). `Late` policies are applied on the way.

        Of a recurring message only the caller can work out the next time: one that is due is returned, and stays. Its
        occurrence ends by a settlement in a later call, whose `token` is the occurrence's due time: moved by
        `Done("delivered")`, not moved by any other. One that has ended or was changed meanwhile is not touched.

        Args:
            demand: Most messages and bytes to move. No single step of a server or cluster, script or transaction, moves
                more than `MAX_CLAIM_MESSAGES` and `MAX_CLAIM_BYTES`; a call may be one step, or several.
            settlements: How occurrences end, `Done` or `Dead`, each with `then_due_ms`.
            traces: Of how many of the messages moved, at most, to return the trace.

        Raises:
            StoreUnavailableError: No answer. It may have been carried out; a repeat moves what is left.
        """
        ...

    async def wait(self, *, until_ms: int | None) -> None:
        """Return when there may be something new to move: at `until_ms`, at a wake-up, or at the safety poll (L2)."""
        ...

    def wake(self) -> None:
        """End the current or next `wait`."""
        ...

    def clear(self) -> None:
        """Forget wake-ups so far."""
        ...
