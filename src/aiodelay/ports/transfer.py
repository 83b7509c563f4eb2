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
    """A store that shares a server or cluster with sinks.

    It moves due messages to these sinks, and removes them from the store in the same atomic step.
    """

    def reaches(self, sink: Sink, address: str = "") -> Reach:
        """Return how often a message may reach a sink from this store, and why.

        Args:
            sink: The sink.
            address: An address of the sink. If it is "", the answer is `BY_ADDRESS` if the promise depends on it.
        """
        ...

    def transferring(self, sink: Sink) -> AbstractContextManager[Transferring]:
        """Return a context manager that opens the transfer into one sink.

        `reaches` must say `EXACTLY_ONCE` or `BY_ADDRESS` for the sink. With `BY_ADDRESS`, the transfer moves the
        messages for the addresses that the store reaches exactly once. While it is open, claims of this process leave
        these messages to the transfer.
        """
        ...

    async def blocked(self) -> Sequence[Blocked]:
        """List blocked destinations, by lane and address.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        ...


class Transferring(Protocol):
    """The transfer into one sink by one process. Other processes may transfer into the same sink at the same time."""

    async def transfer(self, demand: Demand, settlements: Sequence[Settlement] = (), *, traces: int = 0) -> Transferred:
        """Move due messages to their destinations, earliest due first (S1, S3, S6, S8, S9).

        Each move is atomic: a message is either in the store or at its destination. If a destination is full, broken or
        paused, its messages wait apart from other messages and delay none of them (L3, L5). `Late` policies apply here
        too.

        Only the caller can compute the next due time of a recurring message. Therefore the store returns a due
        occurrence, and keeps the message. The caller ends the occurrence with a settlement in a later call. The `token`
        of that settlement is the occurrence's due time. `Done("delivered")` moves the occurrence. `Again` keeps the
        occurrence, which then waits until `due_ms`. Any other settlement ends the occurrence without a move. The store
        ignores a settlement if the message has ended or changed meanwhile.

        Args:
            demand: Most messages and bytes to move. A call may take one step (a script or a transaction) or several. No
                step moves more than `MAX_CLAIM_MESSAGES` and `MAX_CLAIM_BYTES`.
            settlements: The settlements of occurrences: `Done` or `Dead`, each with `then_due_ms`; or `Again` without
                `then_due_ms`.
            traces: The largest number of moved messages whose traces are returned.

        Raises:
            StoreUnavailableError: The store did not answer. It may have moved messages. A repeated call moves the other
                messages.
            UnsupportedByStoreError: The store no longer transfers messages into this sink, as `reaches` says. The
                caller must claim and send them.
        """
        ...

    async def wait(self, *, until_ms: int | None) -> None:
        """Return when there may be messages to move: at `until_ms`, at a wake-up, or at the safety poll (L2)."""
        ...

    def wake(self) -> None:
        """End the current or next `wait`."""
        ...

    def clear(self) -> None:
        """Forget earlier wake-ups. Call this before a transfer: then a wake-up during the transfer is not lost."""
        ...
