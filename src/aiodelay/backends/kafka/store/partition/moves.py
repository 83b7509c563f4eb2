"""`Moves`: moves due messages of a partition into topics, each in the transaction that ends the message."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client import Outgoing
from aiodelay.backends.kafka.pending.changes import Change
from aiodelay.backends.kafka.pending.due_messages import Due
from aiodelay.core.dict_table.entries import Entry
from aiodelay.core.transitions import delivery_id
from aiodelay.core.values import Again, Dead, Demand, Done, Lane, Record, Settlement
from aiodelay.core.wakeup import WakeUp

from .change_writer import STALL_S
from .ownership import Ownership
from .read_progress import ReadProgress
from .settings import Shared

__all__ = ["Moves"]

MOST_ATTEMPTS = 10
FIRST_RETRY_MS, LONGEST_RETRY_MS = 5_000, 3_600_000


class Moves:
    """Moves the due messages of one partition.

    Args:
        topic: The partition's own topic.
        shared: The settings of all partitions of the store.
        progress: The partition's index.
        ownership: Knows whether the partition serves.
        to_write: Wakes the writer.
    """

    def __init__(
        self, topic: str, shared: Shared, *, progress: ReadProgress, ownership: Ownership, to_write: WakeUp
    ) -> None:
        self._topic, self._clock, self._targets = topic, shared.clock, shared.targets
        self._progress, self._ownership, self._to_write = progress, ownership, to_write

    def begin(self, lane: Lane, demand: Demand) -> tuple[list[Change], Due]:
        """Decide to move due messages, and wake the writer. This does not wait for the writer."""
        now, moves = self._clock.now_ms(), self._progress.index.due
        due = moves.take(lane, demand, self._targets.known(), now)
        changes = [moves.move(key, entry, self._target_of(entry.record, now), now) for key, entry in due.entries]
        self._to_write.set()
        return changes, due

    def settle_occurrence(self, settlement: Settlement) -> Change | None:
        """Decide how an occurrence of a series ends. Return None if the series has changed meanwhile."""
        entry = self._progress.index.due.series_at(settlement) if self._ownership.is_ready else None
        if entry is None:
            return None
        self._to_write.set()
        target = self._target_of(entry.record, self._clock.now_ms())
        change = self._progress.index.decisions.end(entry, replace(settlement, token=entry.token))
        if change is not None and isinstance(settlement, Done) and settlement.outcome == "delivered":
            change.targets = (target,)
        return change

    def _target_of(self, record: Record, now: int) -> Outgoing:
        """Return the record for the target topic."""
        envelope = record.envelope
        wire = records.delivered(envelope, delivery_id(record), record.attempt + 1, now_ms=now, schedules=self._topic)
        return Outgoing(envelope.address, *wire)

    async def finish(self, changes: Sequence[Change]) -> int:
        """Wait until decided moves were read back, at most `STALL_S`, and return the number of moved messages."""
        n, refused = 0, list[Change]()
        with suppress(TimeoutError):
            async with asyncio.timeout(STALL_S):
                for change in changes:
                    if await change.until_written():
                        n += bool(change.targets)
                    elif change.refusal:
                        refused.append(change)
        for change in refused:
            await self._not_moved(change)
        return n

    async def _not_moved(self, change: Change) -> None:
        """Count an attempt of a message whose record its topic has refused."""
        entry = change.entry
        if entry is None or not await self._ownership.until_ready():
            return
        again = self._progress.index.decisions.end(entry, self._after_refusal(change, entry))
        self._to_write.set()
        if again is not None and not await again.until_written() and again.is_too_large:
            self._progress.index.log.leave(again)

    def _after_refusal(self, change: Change, entry: Entry) -> Settlement:
        """Return the settlement of a refused message: another attempt later, or a dead letter."""
        record, attempt = entry.record, entry.record.attempt + 1
        key = record.id, record.revision, entry.token
        then = None if change.put is None else change.put[1]
        if attempt >= MOST_ATTEMPTS:
            return Dead(*key, "attempts_exhausted", attempt, change.refusal, then)
        pause_ms = min(FIRST_RETRY_MS << attempt, LONGEST_RETRY_MS)
        return Again(*key, self._clock.now_ms() + pause_ms, attempt, change.refusal, then)
