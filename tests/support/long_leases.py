"""`LongLeases`: a store for tests that need many renewals, and that no slow machine may cost a lease."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from msgspec.structs import replace

from aiodelay.core.values import (
    Claim,
    Claimed,
    Demand,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
)
from aiodelay.ports import Store, Work
from tests.support.passing import PassingStore

__all__ = ["LongLeases"]

LEASE_MS = 15_000
COUNTERS = 4096


class LongLeases(PassingStore):
    """A store whose leases last 15 s, for a scheduler that believes them to be short, and so renews them often.

    On a busy machine such a scheduler renews late, and loses no lease.

    Args:
        store: The real store.
        believed_ms: The time of a lease in the scheduler's options.

    Attributes:
        outcomes: How often each outcome of a settlement or a renewal came, as `settle settled` and `renew renewed`.
    """

    def __init__(self, store: Store, believed_ms: int) -> None:
        super().__init__(store)
        self.believed_ms = believed_ms
        self.outcomes: Counter[str] = Counter()

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[str]) -> AsyncIterator[Work]:
        async with self._store.work(worker, lanes) as work:
            yield cast(Work, _LongWork(work, self.believed_ms, self.outcomes))  # the rest is passed on


class _LongWork:
    def __init__(self, work: Work, believed_ms: int, outcomes: Counter[str]) -> None:
        self._work, self._outcomes = work, outcomes
        self._offset = (LEASE_MS - believed_ms) * COUNTERS  # between the tokens of the scheduler and of the store

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._work, name)

    async def claim(self, demand: Mapping[str, Demand], *, request: str, lease_ms: int) -> Claimed:
        claimed = await self._work.claim(demand, request=request, lease_ms=LEASE_MS)
        return replace(claimed, claims=[Claim(each.record, each.token - self._offset) for each in claimed.claims])

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        found = await self._work.settle([replace(each, token=each.token + self._offset) for each in settlements])
        self._outcomes.update(f"settle {each}" for each in found)
        return found

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        longer = [replace(each, token=each.token + self._offset, to=each.to + self._offset) for each in renewals]
        found = await self._work.renew(longer)
        self._outcomes.update(f"renew {each}" for each in found)
        return found
