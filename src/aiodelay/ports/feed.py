"""`Feed`: gives out claims and takes their settlements. A store's `Work` is a feed, and each source opens feeds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from aiodelay.core.values import Claimed, Demand, Lane, Renewal, RenewOutcome, Settlement, SettleOutcome

__all__ = ["Feed"]


class Feed(Protocol):
    """Gives out claims and takes their settlements: the dispatching side of a store, or a source.

    `claim`, `settle`, `renew` and `tidy` may be cancelled at any await. Changes that the store has made by then stay. A
    repeated claim with the same `request` returns the same messages.
    """

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        """Lease due messages, earliest due first within a lane (S1, S3, S7, S9).

        Lanes first get an equal share of `MAX_CLAIM_MESSAGES` and `MAX_CLAIM_BYTES`. Then they share the rest.

        The feed gives out suspects in trials (`transitions.Trials`). A trial is a group of suspects and no other
        messages. After a group has ended its process, the next group is half as large. One group runs at a time.

        The feed applies `Late` policies during a claim. For a recurring message only the caller can compute the next
        due time. Therefore the feed gives out late occurrences and killers (`transitions.is_killer`), and the caller
        settles them without a run.

        Args:
            demand: Most messages and bytes wanted per lane. The feed does not touch other lanes.
            request: A repeated claim with the same request returns the same messages, if their leases have not ended.
            lease_ms: Milliseconds until an unsettled claim may be claimed again, with another token.

        Raises:
            StoreUnavailableError: The store did not answer. It may have leased messages. Repeating is safe: a repeated
                claim returns them.
        """
        ...

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        """End claims. Each settlement and its consequences are one atomic step (S2, S6).

        The feed writes a settlement only if its claim is still held. A claim whose lease has ended is still held until
        another worker has taken the message.

        Returns:
            One outcome for each settlement, in order.

        Raises:
            StoreUnavailableError: The store did not answer. Repeating is safe: settlements that the store has already
                written answer `gone`.
        """
        ...

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        """Extend leases: each from its token to a later one (L1).

        Raises:
            StoreUnavailableError: The store did not answer. Repeating is safe.
        """
        ...

    def beat(self, ids: Collection[str]) -> None:
        """Report that this process lives and holds claims on these suspects, even if their leases are over (L5).

        A thread of its own calls this every third of a lease, and may wait here. So the report goes out even while a
        handler blocks the event loop. The caller ignores exceptions.
        """
        ...

    async def wait(self, *, until_ms: int | None) -> None:
        """Return when there may be messages to claim: at `until_ms`, at a wake-up, or at the safety poll (L2).

        A wake-up since the last `clear` ends the wait at once.
        """
        ...

    def wake(self) -> None:
        """End this process's current or next `wait`."""
        ...

    def clear(self) -> None:
        """Forget wake-ups so far. Call this before a claim: then a wake-up during the claim is not lost."""
        ...
