"""`VersionedStore`: a memory store that records features, like a store that processes of several versions share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager

from aiodelay import __version__
from aiodelay.backends.memory.store import _MemoryWork
from aiodelay.core import features
from aiodelay.core.dict_table.table import Worker
from aiodelay.core.values import Claimed, Demand, Lane, Renewal, RenewOutcome, Tidied, WorkStatus
from aiodelay.memory import MemoryStore
from aiodelay.ports import Work
from aiodelay.testing.clock import VirtualClock

__all__ = ["VersionedStore"]


class VersionedStore(MemoryStore):
    """A memory store that records features. Subclasses choose the steps that check them."""

    def __init__(self, *, clock: VirtualClock, journal: int = 0) -> None:
        super().__init__(clock=clock, journal=journal)
        self.recorded: dict[str, str] = {}

    async def features(self) -> Mapping[str, str]:
        return self.recorded

    async def switch_on(self, names: Collection[str]) -> None:
        self.recorded |= dict.fromkeys(names, __version__)

    def check(self, step: str) -> None:
        """Check the recorded features before `open`, `claim`, `tidy` or `renew`."""
        features.check_known(self.name, self.recorded)

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        self.check("open")
        known = Worker(worker, lanes, self.now_ms())
        self._table.workers.add(known)
        yield _Work(self, known)


class _Work(_MemoryWork):
    def __init__(self, store: VersionedStore, worker: Worker) -> None:
        super().__init__(store._clock, store._rules, store._claiming, worker)
        self._check, self._version = store.check, features.VersionCheck()

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        with self._version.noted():
            self._check("claim")
        return await super().claim(demand, request=request, lease_ms=lease_ms)

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        with self._version.noted():
            self._check("tidy")
        return await super().tidy(lanes, limit=limit)

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        self._check("renew")
        return await super().renew(renewals)

    def status(self) -> WorkStatus:
        return self._version.status()
