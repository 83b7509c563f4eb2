"""`Feed`: gives out claims and takes their settlements. A store's `Work` is a feed, and each source opens feeds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from aiodelay.core.values import Claimed, Demand, Lane, Renewal, RenewOutcome, Settlement, SettleOutcome
from aiodelay.errors import StoreUnavailableError

__all__ = ["Feed", "LocalFeed", "PartialAnswerError"]


class PartialAnswerError(StoreUnavailableError):
    """A part of a store did not answer a batch of settlements or renewals.

    Attributes:
        outcomes: One outcome for each item of the batch, in order. None = no answer; repeating the item is safe.
    """

    outcomes: Sequence[Any]

    def __init__(self, store: str, reason: str, outcomes: Sequence[object]) -> None:
        super().__init__(store, reason)
        self.outcomes = outcomes


class Feed(Protocol):
    """Gives out claims and takes their settlements: the dispatching side of a store, or a source.

    `claim`, `settle` and `renew`, and the `tidy` of a store's `Work`, may be cancelled at any await. A cancellation
    does not undo changes that were already made. A repeated claim with the same `request` returns the same messages.
    """

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        """Lease due messages, earliest due first within a lane (S1, S3, S7, S9).

        First, each lane gets an equal share of `MAX_CLAIM_MESSAGES` and `MAX_CLAIM_BYTES`. If some lanes leave a part
        of their share, the other lanes get this part, one lane after another.

        The feed gives out suspects in trials (`transitions.Trials`). A trial is a group of suspects and no other
        messages. After a group has ended its process, the next group is half as large. One group runs at a time.

        The feed applies `Late` policies during a claim. But only the caller can compute the next due time of a
        recurring message. Therefore the feed gives out late occurrences and killers (`transitions.is_killer`) of
        recurring messages, and the caller settles them without a run.

        Args:
            demand: Most messages and bytes wanted per lane. The feed does not touch other lanes.
            request: A repeated claim with the same request returns the same messages, if their leases have not ended.
            lease_ms: Milliseconds until an unsettled claim may be claimed again, with another token.

        Returns:
            The claims, the store's time, and when to claim again.

        Raises:
            StoreUnavailableError: The store did not answer. It may have leased messages. Repeating is safe: a claim
                with the same request returns these messages.
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
            PartialAnswerError: Only a part of the store has answered. The error has the outcomes of this part.
        """
        ...

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        """Extend leases: replace the token of each claim by a token with a later end (L1).

        Returns:
            One outcome for each renewal, in order.

        Raises:
            StoreUnavailableError: The store did not answer. Repeating is safe.
            PartialAnswerError: Only a part of the store has answered. The error has the outcomes of this part.
        """
        ...

    def beat(self, ids: Collection[str]) -> None:
        """Report that this process lives and holds claims on these suspects, even if their leases are over (L5).

        A separate thread calls this method every third of a lease. So the report goes out even while a handler blocks
        the event loop, and the method may block too. The caller ignores exceptions.
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
        """Forget earlier wake-ups. Call this before a claim: then a wake-up during the claim is not lost."""
        ...


@runtime_checkable
class LocalFeed(Feed, Protocol):
    """A feed that has its next messages in this process. It gives them out, and ends their claims, without a wait.

    The engine calls both methods between two runs: `claim_nowait` only while no `claim` is under way, `settle_nowait`
    only while no `settle` and no `renew` is under way. The feed gives out no suspects.
    """

    def claim_nowait(self, demand: Mapping[Lane, Demand], *, lease_ms: int) -> Claimed:
        """Lease messages that are in this process already, as `claim` does. There may be none."""
        ...

    def settle_nowait(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome] | None:
        """End claims, as `settle` does.

        Returns:
            One outcome for each settlement, in order. None if a settlement has to wait, for example for a store: then
            no claim has ended.
        """
        ...
