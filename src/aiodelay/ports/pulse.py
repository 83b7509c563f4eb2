"""`Pulse`: the sign of life of a process in a store, by which other processes notice that the process has ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct

from aiodelay.core.values import Renewal, RenewOutcome, Settlement, SettleOutcome

__all__ = ["Pulse", "Pulsing", "Step"]


class Step(Struct, frozen=True):
    """The result of `Pulse.step`.

    Attributes:
        wait_ms: The time until the next step.
        is_refused: Whether the process needs a new incarnation, because it was declared dead or may have been.
        has_resumed: Whether this step was the first after a time without answers. Runs may begin again, and a renewal
            records the claims of that time under the incarnation.
    """

    wait_ms: int
    is_refused: bool = False
    has_resumed: bool = False


class Pulse(Protocol):
    """The sign of life of one process (B2). `aiodelay.core.pulse` has the rules.

    While the process holds claims, its number in the store grows. If the number stands still, another process declares
    the process dead, and the store returns its claimed messages before their leases end (B2). The claims of a process
    without a number end by their leases alone (L1).
    """

    @property
    def is_calling(self) -> bool:
        """Whether a claim or renewal is on its way that names the present incarnation."""
        ...

    def may_begin(self) -> bool:
        """Return whether a run may begin now: nobody can have declared this process dead. Any thread may call this."""
        ...

    def step(self, tokens: Collection[int]) -> Step:
        """Increase the number, read the numbers of others, and declare processes dead whose numbers stand still.

        A thread without an event loop calls this method. It blocks, for about a second at most, and raises no error of
        the store.

        Args:
            tokens: The tokens of all claims that this process holds.
        """
        ...

    def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        """Extend leases as `Feed.renew` does, while the event loop is blocked (L1).

        The thread that calls `step` calls this method. It blocks. A call of `Feed.renew` or `Feed.settle` may be under
        way, also with the same renewals.

        Args:
            renewals: At most `MAX_CLAIM_MESSAGES`.

        Returns:
            One outcome for each renewal, in order.

        Raises:
            StoreUnavailableError: The store did not answer within about a second. Repeating is safe.
        """
        ...

    def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        """End claims as `Feed.settle` does, while the event loop is blocked (B1).

        The thread that calls `step` calls this method. It blocks. A call of `Feed.renew` or `Feed.settle` may be under
        way, also with the same settlements.

        Args:
            settlements: At most `MAX_CLAIM_MESSAGES`.

        Returns:
            One outcome for each settlement, in order.

        Raises:
            StoreUnavailableError: The store did not answer within about a second. Repeating is safe: settlements that
                the store has already written answer `gone`.
        """
        ...

    def wait(self, ms: int) -> None:
        """Wait for the next step, at most `ms`. A claim or `wake` may end the wait. The thread calls this method."""
        ...

    def wake(self) -> None:
        """End the current or the next `wait`. Any thread may call this."""
        ...

    def restart(self) -> None:
        """Take a new incarnation after a refusal. Call this once no message waits that the old one had claimed."""
        ...

    def leave(self) -> None:
        """Delete the number, and close the connection. The thread that calls `step` calls this last."""
        ...


@runtime_checkable
class Pulsing(Protocol):
    """The dispatching side of a store that may notice the end of a process by its pulse."""

    @property
    def pulse(self) -> Pulse | None:
        """The pulse of this process; None if only leases end the claims of a process."""
        ...
