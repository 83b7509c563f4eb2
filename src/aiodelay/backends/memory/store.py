"""`MemoryStore`: the store of `memory://`, which keeps messages in this process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Self

from aiodelay.core import transitions as t
from aiodelay.core.dict_table.claims import DictClaiming
from aiodelay.core.dict_table.entries import Entry
from aiodelay.core.dict_table.table import Worker
from aiodelay.core.rules import Rules
from aiodelay.core.urls import UrlOptions
from aiodelay.core.values import (
    CONFLICT_MODES,
    Claim,
    Claimed,
    Command,
    DeadKey,
    DeadLetter,
    Demand,
    Instance,
    JournalEntry,
    Lane,
    LaneCounts,
    LoadBucket,
    Outcome,
    Put,
    PutBack,
    Query,
    Refused,
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
from aiodelay.ports import StoreTraits, Work
from aiodelay.ports.clock import Clock

from .controls import MemoryControls
from .journal_reader import MemoryJournalReader

__all__ = ["MemoryStore", "open_store"]

RENEWING_TURNS = 20
"""The turns of the event loop in which holders may renew or settle leases that are over, before these lapse."""
BLOCKED_MS = 1_000
"""If these turns take this long, a task has blocked the event loop meanwhile."""
_TRAITS = StoreTraits(
    durable=False,
    conflicts=CONFLICT_MODES,
    cancel="verdict",
    lookup="anywhere",
    safety_poll_ms=30_000,
)


class MemoryStore(MemoryControls):
    """Keeps messages in this process. If the object is closed and opened again, it still has its messages.

    Args:
        clock: The clock of the store. With None, the store uses the system clock.
        journal: The largest number of journal entries to keep. With 0, the store keeps no journal.
    """

    traits = _TRAITS
    name = "memory://"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        return None

    # --- commands -----------------------------------------------------------------------------------------

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        """Carry out commands in order. Return one outcome for each command."""
        now = self.now_ms()
        if source is not None:
            if not source.continues(self._positions.get(source.source)):
                return [Refused("passed")] * len(commands)
            self._positions[source.source] = source.position
        return [self._rules.apply(command, now) for command in commands]

    async def bulk_load(self, puts: Sequence[Put]) -> Sequence[Outcome]:
        """Store versioned messages. Return one outcome for each message, in order."""
        return await self.apply(t.loads_of(puts))

    async def put_back(self, messages: Sequence[PutBack]) -> Sequence[Stored]:
        """Store messages that had left the store. Return one outcome for each message, in order."""
        now = self.now_ms()
        return [self._rules.put_back(message, now) for message in messages]

    async def redrive(self, keys: Sequence[DeadKey]) -> Sequence[Outcome]:
        """Schedule dead letters again. Return one outcome for each key, in the order of the keys."""
        now = self.now_ms()
        return [self._rules.redrive(key, now) for key in keys]

    async def purge(self, keys: Sequence[DeadKey]) -> int:
        """Delete dead letters. Return how many of them were deleted."""
        return sum(self._table.letters.remove(key) for key in keys)

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        """Register a worker, and yield the object with which it claims and settles messages."""
        known = Worker(worker, lanes, self.now_ms())
        self._table.workers.add(known)
        try:
            yield _MemoryWork(self._clock, self._rules, self._claiming, known)
        finally:
            self._table.workers.discard(known)

    # --- inspection ---------------------------------------------------------------------------------------

    async def get(self, message_id: str) -> Snapshot | None:
        """Return the pending or in-flight message with this id, or None if no such message is stored."""
        return self._inspection.get(message_id, self.now_ms())

    async def search(self, query: Query) -> Sequence[Snapshot]:
        """List messages in the order of (next attempt, id)."""
        return self._inspection.search(query, self.now_ms())

    async def series(self, *, after: str | None = None, limit: int = 100) -> Sequence[Snapshot]:
        """List recurring messages in the order of their ids."""
        return self._inspection.series(after, limit, self.now_ms())

    async def counts(self) -> Mapping[Lane, LaneCounts]:
        """Count messages and dead letters by lane and state."""
        return self._inspection.counts(self.now_ms())

    async def load(self, *, bucket_ms: int, buckets: int) -> Sequence[LoadBucket]:
        """Count the messages that become due from now on, by lane and by span of `bucket_ms`."""
        return self._inspection.load(bucket_ms, buckets, self.now_ms())

    async def position(self, source: str) -> int | None:
        """Return the last position of an intake, or None if the intake has stored no position."""
        return self._positions.get(source)

    async def instances(self) -> Sequence[Instance]:
        """List the live workers of this store."""
        return self._inspection.instances(self.now_ms())

    async def dead_letters(
        self,
        *,
        lane: Lane | None = None,
        message_id: str | None = None,
        after: tuple[int, str, int] | None = None,
        limit: int = 100,
    ) -> Sequence[DeadLetter]:
        """List dead letters, oldest first."""
        return self._inspection.dead_letters(lane, message_id, after, limit)

    # --- journal ------------------------------------------------------------------------------------------

    async def journal(
        self, *, message_id: str | None = None, after: int = 0, limit: int = 100
    ) -> Sequence[JournalEntry]:
        """List entries of the journal, oldest first."""
        found = (e for e in self._kept_journal() if e.number > after and message_id in (None, e.id))
        return list(islice(found, limit))

    @asynccontextmanager
    async def journal_reader(self) -> AsyncIterator[MemoryJournalReader]:
        """Open a reader of the journal. The reader sees new entries too."""
        yield MemoryJournalReader(self._kept_journal())

    def _kept_journal(self) -> deque[JournalEntry]:
        if self._table.journal is None:
            raise UnsupportedByStoreError("journal", "off", "MemoryStore(journal=1000) or 'memory://?journal=1000'")
        return self._table.journal


class _MemoryWork:
    """The object with which one worker claims and settles."""

    def __init__(self, clock: Clock, rules: Rules[Entry], claiming: DictClaiming, worker: Worker) -> None:
        self._clock, self._rules, self._claiming, self._worker = clock, rules, claiming, worker
        self._turn = 0
        self._last: tuple[str, Sequence[Claim]] = ("", ())

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        await self._let_others_run()
        now = self._clock.now_ms()
        last_request, last_claims = self._last
        if request == last_request:
            return self._claiming.claim_again(last_claims, demand, now)
        self._turn += 1
        claimed = self._claiming.claim(demand, lease_ms, self._turn, self._worker, now)
        self._last = (request, claimed.claims)
        return claimed

    async def _let_others_run(self) -> None:
        """Let other tasks run, as they would with a store behind a network.

        If leases are over, a blocked event loop may be the reason. Let their holders renew or settle them.
        """
        await asyncio.sleep(0)
        while self._claiming.has_over(self._clock.now_ms()):
            asked_ms = self._clock.monotonic_ms()
            for _ in range(RENEWING_TURNS):
                await asyncio.sleep(0)
            if self._clock.monotonic_ms() - asked_ms < BLOCKED_MS:
                return

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        now = self._clock.now_ms()
        return [self._rules.settle(settlement, now) for settlement in settlements]

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        return [self._rules.renew(renewal) for renewal in renewals]

    async def wait(self, *, until_ms: int | None) -> None:
        seconds = _TRAITS.safety_poll_ms / 1000
        if until_ms is not None:
            seconds = min(seconds, self._clock.seconds_until(until_ms))
        await self._worker.wakeup.wait(seconds)

    def wake(self) -> None:
        self._worker.wakeup.set()

    def clear(self) -> None:
        self._worker.wakeup.clear()

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        await self._let_others_run()
        return self._claiming.tidy(self._worker, lanes, limit, self._clock.now_ms())

    def beat(self, ids: Collection[str]) -> None:
        self._claiming.beat(self._worker, ids, self._clock.now_ms())

    def status(self) -> WorkStatus:
        return WorkStatus("ready")


def open_store(url: str, *, namespace: str, clock: Clock | None) -> MemoryStore:
    """Return a new, empty store for the URL `memory://` or `memory://?journal=1000`."""
    options = UrlOptions(url)
    journal = options.integer("journal", 0, 0, 10_000_000)
    options.finish(bare=True)
    return MemoryStore(clock=clock, journal=journal)
