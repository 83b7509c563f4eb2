"""`Feed`: what gives out claims and takes their settlements. A store's dispatching side is one; a source opens them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from aiodelay.core.values import Claimed, Demand, Lane, Renewal, RenewOutcome, Settlement, SettleOutcome

__all__ = ["Feed"]


class Feed(Protocol):
    """What gives out claims and takes their settlements: a store's dispatching side, or a source.

    `claim`, `settle`, `renew` and `tidy` may be cancelled at any await: what was carried out stands, and repeating a
    claim with the same `request` gives its messages again.
    """

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        """Lease due messages, earliest due first within a lane (S1, S3, S7, S9).

        Lanes get an equal share of `MAX_CLAIM_MESSAGES` and `MAX_CLAIM_BYTES` first, then the rest of them. Messages
        that are suspected of ending processes are given out in trials: a group of them without others, half as large
        after each that ended its process (`transitions.Trials`), one group at a time. `Late` policies are applied on
        the way. Of recurring messages only the caller can work out the next time: late ones and killers
        (`transitions.is_killer`) are given out for it to settle without a run.

        Args:
            demand: Most messages and bytes wanted per lane. Lanes not named are not touched.
            request: Repeating a claim with the same request returns the same messages, as far as still leased.
            lease_ms: Milliseconds until an unsettled claim may be claimed again, with another token.

        Raises:
            StoreUnavailableError: No answer. Nothing is leased, or a repeat returns it: safe to repeat.
        """
        ...

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        """End claims, each in one step with what follows from it (S2, S6).

        Returns:
            One outcome per settlement, in order. Only a claim that is still held is written; one whose lease has ended
            is held as long as nobody else has taken the message.

        Raises:
            StoreUnavailableError: No answer; repeating is safe, and what had been settled then answers `gone`.
        """
        ...

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        """Prolong leases from one token to another (L1).

        Raises:
            StoreUnavailableError: No answer; repeating is safe.
        """
        ...

    def beat(self, ids: Collection[str]) -> None:
        """Tell that this process lives and holds claims on these suspects, though their leases may be over (L5).

        Called from a thread of its own, which may wait here, every third of a lease: also while a handler blocks the
        event loop. The caller ignores an exception.
        """
        ...

    async def wait(self, *, until_ms: int | None) -> None:
        """Return when there may be something new to claim: at `until_ms`, at a wake-up, or at the safety poll (L2).

        Signals that came since the last `clear` end the wait at once.
        """
        ...

    def wake(self) -> None:
        """End this process's current or next `wait`."""
        ...

    def clear(self) -> None:
        """Forget wake-ups so far; call it before looking, so that one in between is not lost."""
        ...
