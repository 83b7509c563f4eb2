"""`ChangeWriter`: writes the owner's changes to the partition and its target topics, one transaction at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from aiokafka import TopicPartition

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client import AbortedError, FencedError, Outgoing, Transactions
from aiodelay.backends.kafka.pending.changes import Change
from aiodelay.core.values import MAX_CLAIM_BYTES, MAX_CLAIM_MESSAGES
from aiodelay.core.wakeup import WakeUp

from .batch import Batch
from .history_topic import HistoryTopic
from .horizon import Horizon
from .ownership import Ownership
from .read_progress import ReadProgress
from .refusals import Refusals
from .settings import Place, Shared
from .unread_changes import UnreadChanges
from .user_changes import UserChanges

__all__ = ["STALL_S", "ChangeWriter"]

MARK_MS = 5_000
"""Pause between two watermarks that are written."""
STALL_S = 3.0
"""Longest wait for written records to be read back. A waiting worker must also serve other partitions and renewals."""


class ChangeWriter:
    """Writes the changes of one partition.

    Args:
        place: The partition.
        shared: The settings of all partitions of the store.
        progress: The partition's index.
        ownership: Knows whether the session is over.
        unread: The committed changes that wait to be read back.
        horizon: Brings far messages near before the writer writes them again.
        to_write: Wakes the writer.
    """

    def __init__(
        self,
        place: Place,
        shared: Shared,
        *,
        progress: ReadProgress,
        ownership: Ownership,
        unread: UnreadChanges,
        horizon: Horizon,
        to_write: WakeUp,
    ) -> None:
        self._place, self._clock, self._targets = place, shared.clock, shared.targets
        self._progress, self._ownership, self._unread = progress, ownership, unread
        self._horizon, self._to_write = horizon, to_write
        self._history = HistoryTopic(shared.history, shared.targets, shared.clock, name=place.name)
        self._refusals = Refusals(place.topic, shared.history, progress, shared.targets)
        self._user_changes = UserChanges(TopicPartition(place.topic, place.number), progress, unread)
        self._writing = asyncio.Lock()
        self._most = MAX_CLAIM_MESSAGES
        """Most changes of the next transaction."""
        self._marked_ms = 0

    async def finish(self) -> None:
        """Begin no new transaction. Return when the open transaction has ended and its records were read back."""
        await self._writing.acquire()
        await self._unread.until_none()

    def give_back(self) -> None:
        """Undo changes that are not known to be committed. The next session reads all committed records."""
        log = self._progress.index.log
        self._unread.clear()
        self._refusals.suspects.clear()
        log.changes.clear()
        for change in self._progress.index.give_back():
            if change.is_too_large and change.letters and not log.shorten(change):
                log.leave(change)
            change.tell(written=False)

    # --- one transaction ----------------------------------------------------------------------------------

    async def write(self, transactions: Transactions) -> None:
        """Write the waiting changes, in the order in which they were decided. Wait if there are none.

        Raises:
            StoreMismatchError: The partition serves nothing more.
            FencedError, AbortedError, InDoubtError, StoreUnavailableError: The session ends.
        """
        if self._ownership.problem is not None:
            raise self._ownership.problem
        self._to_write.clear()  # before looking for changes: a change from here on ends the wait below
        await self._prepare()
        is_told = await self._history.is_open()
        if self._refusals.suspects:
            await self._refusals.give_up_large()
        if self._ownership.was_away():
            raise FencedError
        log, batch = self._progress.index.log, self._batch()
        batch.add_others(self._mark())
        waiting, of_changes = list(log.notes), [note for change in batch.changes for note in change.notes]
        if is_told:
            notes = [*waiting, *of_changes]
            batch.add_others(Outgoing(self._history.topic, *records.encode_history(note)) for note in notes)
        if not batch.outgoing:
            await self._wait()
            return
        try:
            if not await self._commit(transactions, batch):
                return
        except AbortedError as error:
            self._aborted(error, transactions, batch)
            return
        if is_told:
            for _ in waiting[: len(log.notes)]:  # only these: a claim during the transaction may have added entries
                log.notes.popleft()
        else:
            log.notes += of_changes
        self._most = min(2 * self._most, MAX_CLAIM_MESSAGES)
        self._targets.took({each.topic for each in batch.outgoing})
        self._ownership.check_over()  # if the session was ended meanwhile, nobody waits for these changes any more
        self._unread.add(batch.changes)

    async def _prepare(self) -> None:
        """Make the changes that the index itself needs: repairs, and far messages that must be written again."""
        await self._horizon.bring(self._progress.index.far.wanted())
        self._ownership.check_over()
        self._progress.index.repairs.make()

    async def _wait(self) -> None:
        """Wait for a change. If a watermark or journal entries wait, wait at most `MARK_MS`."""
        index = self._progress.index
        is_waiting = index.state.has_ended or index.log.notes
        if not (self._refusals.suspects or index.log.changes):
            await self._to_write.wait(MARK_MS / 1000 if is_waiting else None)

    def _mark(self) -> Sequence[Outgoing]:
        """Return the record of a new watermark, or nothing if it is too early for one."""
        now = self._clock.monotonic_ms()
        if now < self._marked_ms + MARK_MS or (mark := self._progress.index.next_mark()) is None:
            return []
        self._marked_ms = now
        return [Outgoing(self._place.topic, *records.encode_mark(mark), self._place.number)]

    def _batch(self) -> Batch:
        """Take as many waiting changes as one transaction may have."""
        log, suspects = self._progress.index.log, self._refusals.suspects
        batch = Batch()
        waiting = suspects.take_turn(log.changes)
        while waiting and len(batch.changes) < self._most and batch.size < MAX_CLAIM_BYTES:
            change = waiting.popleft()
            if log.drop_stale(change):
                change.tell(written=False)
            elif waiting is log.changes and self._refusals.excess(change):
                suspects.add([change])
            else:
                batch.add(change, self._records(change))
        if waiting is not log.changes:
            suspects.add(waiting)
        return batch

    def _records(self, change: Change) -> list[Outgoing]:
        """Return a change's records: first those for target topics, then those for the partition."""
        topic, number = self._place.topic, self._place.number
        if change.is_end:
            end = records.encode_end(change.key, read_to=change.read_to, outcome=change.outcome, memory=change.memory)
            return [*change.targets, Outgoing(topic, end.key, None, end.headers, number)]
        return [*change.targets, *(Outgoing(topic, *wire, number) for wire in change.wires())]

    async def _commit(self, transactions: Transactions, batch: Batch) -> bool:
        """Write a transaction. Return False if it was aborted because a user has changed one of its messages."""
        async with self._writing:
            offsets = await transactions.begin(batch.outgoing)
            overtaken_at = await self._user_changes.last_offset(transactions, batch, offsets)
            if overtaken_at is None:
                batch.note_offsets(offsets)
                await transactions.commit()
                self._user_changes.note_committed()
                return True
            await transactions.abort()
        await self._begin_again(batch, overtaken_at)
        return False

    async def _begin_again(self, batch: Batch, offset: int) -> None:
        """Queue the changes of an aborted transaction again, and wait for the reader to read the users' records."""
        self._ownership.check_over()
        self._user_changes.note_aborted()
        self._progress.index.log.changes.extendleft(reversed(batch.changes))
        with suppress(TimeoutError):
            async with asyncio.timeout(STALL_S):
                await self._progress.until_read(offset)

    def _aborted(self, error: AbortedError, transactions: Transactions, batch: Batch) -> None:
        """Decide how to go on after a topic has refused records.

        Raises:
            AbortedError: A topic refuses all records, the partition itself refuses a record, or the producer is spent.
                The next session writes the changes again, and fewer at a time if no topic refuses all records.
            FencedError, InDoubtError: The session has ended meanwhile.
        """
        self._ownership.check_over()
        if self._refusals.note_topics(error, batch.outgoing):
            raise error
        if not transactions.is_spent and not self._refusals.is_by_partition(error, batch.outgoing):
            self._refusals.set_apart(error.written, batch)
            return
        self._most = max(1, len(batch.changes) // 2)
        if len(batch.changes) == 1:  # this change itself is refused; the next session writes other changes without it
            (change,) = batch.changes
            change.refusal, change.is_too_large = str(error), self._refusals.is_too_large(error, batch.outgoing)
        raise error
