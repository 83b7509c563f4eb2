"""The memory store as its users open it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Self

from aiodelay.clock import Clock
from aiodelay.model import (
    Claim,
    Claimed,
    Demand,
    Lane,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    Tidied,
    WorkStatus,
)
from aiodelay.ports import StoreTraits, Work
from aiodelay.urls import UrlOptions

from .claims import Claims
from .commands import Commands
from .looking import Looking
from .tables import Worker

__all__ = ["MemoryStore", "open_store"]

_TRAITS = StoreTraits(
    durable=False,
    conflicts=frozenset({"replace", "keep", "newer", "error", "if_revision"}),
    cancel="verdict",
    lookup="anywhere",
    safety_poll_ms=30_000,
)


class MemoryStore(Commands, Claims, Looking):
    """Keeps messages in this process. Data stays with the object while it is closed and opened again.

    Args:
        clock: Where the store reads the time.
        journal: Most entries of the journal to keep; 0 = keep none.
    """

    traits = _TRAITS
    name = "memory://"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        return None

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        """Open the dispatching role."""
        known = Worker(worker, lanes, self.now_ms())
        self._workers.add(known)
        try:
            yield _MemoryWork(self, known)
        finally:
            self._workers.discard(known)


class _MemoryWork:
    """One worker's side of the store."""

    def __init__(self, store: MemoryStore, worker: Worker) -> None:
        self._store, self._worker = store, worker
        self._turn = 0
        self._last: tuple[str, Sequence[Claim]] = ("", ())

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        await asyncio.sleep(0)  # others run in between, as with a store that must be asked
        last_request, last_claims = self._last
        if request == last_request:
            return self._store.claim_again(last_claims, demand)
        self._turn += 1
        claimed = self._store.claim(demand, lease_ms, self._turn, self._worker)
        self._last = (request, claimed.claims)
        return claimed

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        return [self._store.settle_one(settlement) for settlement in settlements]

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        return [self._store.renew(renewal) for renewal in renewals]

    async def wait(self, *, until_ms: int | None) -> None:
        seconds = _TRAITS.safety_poll_ms / 1000
        if until_ms is not None:
            seconds = min(seconds, self._store.seconds_until(until_ms))
        await self._worker.wakeup.wait(seconds)

    def wake(self) -> None:
        self._worker.wakeup.set()

    def clear(self) -> None:
        self._worker.wakeup.clear()

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        return self._store.tidy(self._worker, lanes, limit)

    def beat(self, ids: Collection[str]) -> None:
        self._store.beat(self._worker, ids)

    def status(self) -> WorkStatus:
        return WorkStatus("ready")


def open_store(url: str, *, namespace: str, clock: Clock | None) -> MemoryStore:
    """Open `memory://`, or `memory://?journal=1000`; each call makes a store of its own."""
    options = UrlOptions(url)
    journal = options.integer("journal", 0, 0, 10_000_000)
    options.finish(bare=True)
    return MemoryStore(clock=clock, journal=journal)
