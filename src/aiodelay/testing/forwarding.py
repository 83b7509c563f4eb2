"""Base classes for test doubles that change some methods of a real store, or of its side that gives out claims."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Self

from aiodelay.core.values import (
    Claimed,
    Command,
    DeadKey,
    DeadLetter,
    Demand,
    Instance,
    JournalEntry,
    Lane,
    LaneCounts,
    LaneLimits,
    LimitedKey,
    LoadBucket,
    Outcome,
    PutBack,
    Query,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    Snapshot,
    SourcePosition,
    Stored,
    Tidied,
    WorkStatus,
)
from aiodelay.errors import UnsupportedByStoreError
from aiodelay.ports import Feed, JournalReader, Limits, Store, StoreTraits, Work

__all__ = ["ForwardingFeed", "ForwardingStore", "ForwardingWork"]


class _ForwardingLimits:
    """The limits of a store that forwards every call to another store."""

    _store: Store

    async def set_limits(self, lane: Lane, limits: LaneLimits, *, is_declared: bool) -> None:
        """Set the limits of a lane.

        Raises:
            UnsupportedByStoreError: The other store has no limits.
        """
        await self._with_limits().set_limits(lane, limits, is_declared=is_declared)

    async def limits(self, *, is_declared: bool = False) -> Mapping[Lane, LaneLimits]:
        """Return the limits of all lanes; none if the other store has no limits."""
        return await self._store.limits(is_declared=is_declared) if isinstance(self._store, Limits) else {}

    async def limited_keys(self, lane: Lane, *, limit: int = 100, key: bytes | None = None) -> Sequence[LimitedKey]:
        """List keys, or only one key, with messages in flight or waiting because of a limit."""
        return await self._with_limits().limited_keys(lane, limit=limit, key=key)

    def _with_limits(self) -> Limits:
        if not isinstance(self._store, Limits):
            raise UnsupportedByStoreError("limits", f"asked for on {self._store.name}", "a store with limits")
        return self._store


class ForwardingStore(_ForwardingLimits):
    """A store that forwards every call to another store. Of the optional abilities, it forwards only limits.

    Args:
        store: The other store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def traits(self) -> StoreTraits:
        """The traits of the other store."""
        return self._store.traits

    @property
    def name(self) -> str:
        """The name of the other store."""
        return self._store.name

    def now_ms(self) -> int:
        """Return the time of the other store, in epoch ms."""
        return self._store.now_ms()

    async def __aenter__(self) -> Self:
        """Connect."""
        await self._store.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect."""
        await self._store.__aexit__(*exc_info)

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        """Carry out commands, in order."""
        return await self._store.apply(commands, source=source)

    def work(self, worker: str, lanes: Collection[Lane]) -> AbstractAsyncContextManager[Work]:
        """Open the dispatching role."""
        return self._store.work(worker, lanes)

    # --- inspection ---------------------------------------------------------------------------------------

    async def get(self, message_id: str) -> Snapshot | None:
        """Return a message."""
        return await self._store.get(message_id)

    async def search(self, query: Query) -> Sequence[Snapshot]:
        """List messages."""
        return await self._store.search(query)

    async def counts(self) -> Mapping[Lane, LaneCounts]:
        """Count messages."""
        return await self._store.counts()

    async def load(self, *, bucket_ms: int, buckets: int) -> Sequence[LoadBucket]:
        """Count messages by due time."""
        return await self._store.load(bucket_ms=bucket_ms, buckets=buckets)

    async def position(self, source: str) -> int | None:
        """Return the stored position of an intake."""
        return await self._store.position(source)

    async def series(self, *, after: str | None = None, limit: int = 100) -> Sequence[Snapshot]:
        """List recurring messages."""
        return await self._store.series(after=after, limit=limit)

    async def instances(self) -> Sequence[Instance]:
        """List the processes that dispatch."""
        return await self._store.instances()

    # --- control ------------------------------------------------------------------------------------------

    async def dead_letters(
        self,
        *,
        lane: Lane | None = None,
        message_id: str | None = None,
        after: tuple[int, str, int] | None = None,
        limit: int = 100,
    ) -> Sequence[DeadLetter]:
        """List dead letters."""
        return await self._store.dead_letters(lane=lane, message_id=message_id, after=after, limit=limit)

    async def redrive(self, keys: Sequence[DeadKey]) -> Sequence[Outcome]:
        """Schedule dead letters again."""
        return await self._store.redrive(keys)

    async def purge(self, keys: Sequence[DeadKey]) -> int:
        """Delete dead letters."""
        return await self._store.purge(keys)

    async def pause(self, lane: Lane, address: str | None = None) -> bool:
        """Pause a lane, or one address in a lane."""
        return await self._store.pause(lane, address)

    async def resume(self, lane: Lane, address: str | None = None) -> bool:
        """Resume a lane, or one address in a lane."""
        return await self._store.resume(lane, address)

    async def paused(self) -> Sequence[tuple[Lane, str | None]]:
        """List the paused lanes and addresses."""
        return await self._store.paused()

    async def put_back(self, messages: Sequence[PutBack]) -> Sequence[Stored]:
        """Store messages under the revisions that they have."""
        return await self._store.put_back(messages)

    # --- journal ------------------------------------------------------------------------------------------

    async def journal(
        self, *, message_id: str | None = None, after: int = 0, limit: int = 100
    ) -> Sequence[JournalEntry]:
        """List entries of the journal."""
        return await self._store.journal(message_id=message_id, after=after, limit=limit)

    def journal_reader(self) -> AbstractAsyncContextManager[JournalReader]:
        """Open the journal for reading."""
        return self._store.journal_reader()


class ForwardingFeed:
    """A `Feed` that forwards every call to another feed.

    Args:
        work: The other feed.
    """

    def __init__(self, work: Feed) -> None:
        self._work = work

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        """Claim messages."""
        return await self._work.claim(demand, request=request, lease_ms=lease_ms)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        """Settle claims."""
        return await self._work.settle(settlements)

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        """Renew leases."""
        return await self._work.renew(renewals)

    def beat(self, ids: Collection[str]) -> None:
        """Pass on the process's sign of life."""
        self._work.beat(ids)

    async def wait(self, *, until_ms: int | None) -> None:
        """Wait for messages."""
        await self._work.wait(until_ms=until_ms)

    def wake(self) -> None:
        """End the current or next wait."""
        self._work.wake()

    def clear(self) -> None:
        """Forget earlier wake-ups."""
        self._work.clear()


class ForwardingWork(ForwardingFeed):
    """A `Work` that forwards every call to another work, except the calls of its pulse.

    Args:
        work: The other work.
    """

    _work: Work

    def __init__(self, work: Work) -> None:
        super().__init__(work)

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        """Do housekeeping."""
        return await self._work.tidy(lanes, limit=limit)

    def status(self) -> WorkStatus:
        """Return whether the store serves claims."""
        return self._work.status()
