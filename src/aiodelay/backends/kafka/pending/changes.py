"""`Change`: one decision of an owner, until its records are read back. `ChangeLog`: the changes that are under way."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec import Struct
from msgspec.structs import replace

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client import Outgoing
from aiodelay.backends.kafka.records import Memory, Wire
from aiodelay.core.dict_table.entries import GONE, LEASED, PARKED, Entry
from aiodelay.core.values import DeadKey, DeadLetter, JournalEntry, Record

from .pending_table import PendingTable
from .read_state import ReadState

__all__ = ["MOST_NOTES", "Change", "ChangeLog"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

MOST_NOTES = 10_000
"""Most journal entries that wait while the history topic takes nothing."""


class Change(Struct, eq=False, gc=False):
    """The records to write for one key. They were decided when everything below `read_to` had been read.

    Attributes:
        put: The new state of the message, and the time of its next attempt; None = the message ends.
        letters: Dead letters that the change writes.
        others: More messages that the change puts, such as a retry of an occurrence together with its series.
        outcome: How the message or the request ends, for the tombstone that the change writes.
        memory: Answers and a version that must outlive the message's record.
        targets: Records for other topics. The same transaction writes them.
        purged: A dead letter that this change deletes.
        following: A change to write once this change was read back, if this change counts.
        asked: The key and the offset of a user's request to the owner that this change ends.
        entry: The message in the table that nobody else may claim or change until the change ends; None = no message.
        is_users: Whether the change writes a user's cancel. Such a change counts even if others have written the key
            meanwhile.
        offset: The offset of the change's last record, once this record is written; -1 before.
        counted: Whether the change's record was read back, and counts (see `precedence.py`).
        refusal: The reason why Kafka does not take the change; "" = none known.
        is_too_large: Whether Kafka does not take the change because one of its records is too large.
        notes: The journal entries of the change.
        is_written: True once the change was read back; False once it is known not to be written; None before.
        waiter: A future that is done once `is_written` is known.
    """

    key: bytes
    read_to: int
    entry: Entry | None
    put: tuple[Record, int] | None = None
    letters: Sequence[DeadLetter] = ()
    others: Sequence[tuple[Record, int]] = ()
    outcome: str = "ended"
    purged: DeadKey | None = None
    following: Change | None = None
    asked: tuple[bytes, int] | None = None
    memory: Memory | None = None
    refusal: str = ""
    is_too_large: bool = False
    targets: Sequence[Outgoing] = ()
    is_users: bool = False
    offset: int = -1
    counted: bool = False
    notes: Sequence[JournalEntry] = ()
    is_written: bool | None = None
    waiter: asyncio.Future[None] | None = None

    def remembering(self) -> Memory:
        """Return the memory of the change, for additions."""
        if self.memory is None:
            self.memory = Memory()
        return self.memory

    @property
    def is_end(self) -> bool:
        """Whether the change writes nothing but a tombstone to its partition."""
        is_end = self.put is None and not self.is_users and bool(self.key)
        return is_end and not (self.letters or self.others or self.purged or self.asked)

    @property
    def is_stale(self) -> bool:
        """Whether the change moves a message that a user has replaced or cancelled."""
        return self.entry is not None and self.entry.state is GONE and bool(self.targets)

    def tell(self, *, written: bool) -> None:
        """Note whether the change was written, and wake the task that waits for it."""
        self.is_written = written
        if self.waiter is not None:
            self.waiter.set_result(None)

    async def until_written(self) -> bool:
        """Wait for the outcome of the change. Return True if it was read back, or False if it was not written."""
        if self.is_written is None:
            if self.waiter is None:
                self.waiter = asyncio.get_running_loop().create_future()
            await asyncio.shield(self.waiter)
        return bool(self.is_written)

    def wires(self) -> Iterator[Wire]:
        """Yield the records of the change, in order."""
        for letter in self.letters:
            yield records.encode_dead(letter)
        for record, place_ms in self.others:
            yield records.encode_record(record, read_to=self.read_to, place_ms=place_ms)
        if self.purged is not None:
            yield Wire(records.dead_key(self.purged), None, [])
        if self.asked is not None:
            # A later request of the same key stays, even if the owner has read it: it has a decision of its own.
            key, offset = self.asked
            yield records.encode_end(records.KEEP + key, read_to=offset + 1, outcome=self.outcome)
        if not self.key:
            return
        if self.is_users:
            yield records.encode_cancel(self.key, self.memory)
        elif self.put is None:
            yield records.encode_end(self.key, read_to=self.read_to, outcome=self.outcome, memory=self.memory)
        else:
            record, place_ms = self.put
            yield records.encode_record(record, read_to=self.read_to, place_ms=place_ms, memory=self.memory)


class _Deciding:
    """The context manager of `ChangeLog.deciding`. A generator would take more time than all rules of a move."""

    __slots__ = ("_change", "_log", "_outer")

    def __init__(self, log: ChangeLog, change: Change) -> None:
        self._log, self._change = log, change

    def __enter__(self) -> Change:
        self._outer, self._log.current = self._log.current, self._change
        return self._change

    def __exit__(self, *exc_info: object) -> None:
        self._log.current = self._outer


class ChangeLog:
    """The changes of a partition, from the decision until their records were read back.

    A change reserves its message: nobody else may claim or change the message meanwhile.

    Args:
        table: The messages.
        state: The records that were read from the partition.
        name: The topic and partition, for logs.
        keeps_history: Whether to note the events of messages for the history topic.
        notes: Journal entries that wait to be written.
    """

    table: PendingTable
    state: ReadState
    keeps_history: bool
    notes: deque[JournalEntry]

    def __init__(
        self, table: PendingTable, state: ReadState, *, name: str, keeps_history: bool, notes: deque[JournalEntry]
    ) -> None:
        self.table, self.state, self._name = table, state, name
        self.keeps_history, self.notes = keeps_history, notes
        self.changes: deque[Change] = deque()
        """Changes to write, in order."""
        self.current: Change | None = None
        """The change that is being decided: calls on the table add to it."""
        self.held_back: dict[bytes, Change] = {}
        """For each key, the change that reserves its message."""
        self.under_way: dict[Change, None] = {}
        """All changes that were begun, and were neither read back nor undone."""
        self.without_traceback: set[DeadKey] = set()
        """Dead letters that were too large with their tracebacks."""

    # --- deciding -----------------------------------------------------------------------------------------

    def deciding(self, change: Change) -> _Deciding:
        """Return a context manager that adds all calls on the table in its block to a change."""
        return _Deciding(self, change)

    @contextmanager
    def ending(self, entry: Entry) -> Iterator[None]:
        """Make one change of all calls on the table in a `with` block that ends a message.

        If a change of this message is being decided already, add the calls to that change.
        """
        key = records.key_of(entry.record.id)
        if self.current is not None and self.current.key == key:
            yield
            return
        with self.deciding(Change(key, self.state.read_to, entry)) as change:
            yield
        self.reserve(entry)
        self.offer(change)

    def note(self, note: JournalEntry) -> None:
        """Add a journal entry to the current change, or to the entries that wait."""
        if self.current is None:
            self.notes.append(note)
        else:
            self.current.notes = [*self.current.notes, note]

    def bury(self, letter: DeadLetter) -> None:
        """Add a dead letter to the current change."""
        if letter.key in self.without_traceback:
            self.without_traceback.remove(letter.key)
            letter = replace(letter, record=replace(letter.record, traceback=None))
        assert self.current is not None
        self.current.letters = [*self.current.letters, letter]

    def reserve(self, entry: Entry) -> None:
        """Take an entry out of its lane, so that nobody claims it while its change is written."""
        if entry.state is PARKED:
            self.table.lanes[entry.record.envelope.lane].unpark(entry)
        entry.state = LEASED

    # --- beginning and ending a change --------------------------------------------------------------------

    def offer(self, change: Change) -> Change | None:
        """Begin a change, reserve its message, and return the change.

        If the change only ends a message whose record is gone already, there is nothing to write. Then return None.
        """
        has_news = bool(change.letters or change.put is not None or change.others)
        if not (self.state.stands(change.key) or has_news):
            if change.entry is not None and not change.is_users:
                self.table.remove(change.entry)
            self.notes += change.notes
            return None
        self.hold_back(change)
        return change

    def hold_back(self, change: Change) -> None:
        """Begin a change and reserve its key."""
        self.held_back[change.key] = change
        self.begin(change)

    def begin(self, change: Change) -> None:
        """Queue a change for the writer."""
        self.under_way[change] = None
        self.changes.append(change)

    def holds_back(self, key: bytes, entry: Entry | None) -> bool:
        """Say whether a change of exactly this entry is being written."""
        return key in self.held_back and self.held_back[key].entry is entry

    def release(self, change: Change) -> None:
        """End a change. Also end its reservation, unless a newer change of the same key has taken the reservation."""
        del self.under_way[change]
        if self.held_back.get(change.key) is change:
            del self.held_back[change.key]

    def written(self, change: Change) -> None:
        """End a change, and begin the change that follows it. Call this after the index has read its last record.

        If the table still has the message that the change reserved, remove it, unless the change is a user's cancel.
        """
        self.release(change)
        if change.following is not None and change.counted:
            self.begin(change.following)
        entry = change.entry
        # If the message is still in the table, a user had cancelled it before this change's record was written.
        if entry is not None and not change.is_users and self.is_left(entry):
            self.table.remove(entry)

    def is_left(self, entry: Entry) -> bool:
        """Say whether the table still has exactly this entry."""
        return self.table.entries.get(entry.record.envelope.id) is entry

    def drop_stale(self, change: Change) -> bool:
        """Drop a change if a user has replaced or cancelled the message that it moves. Say whether it was dropped."""
        if not change.is_stale:
            return False
        self.release(change)
        return True

    def give_back(self) -> list[Change]:
        """Undo all changes under way, and return them.

        A message that was leased is leased again. Any other message returns to its lane.
        """
        for queue in self.table.lanes.values():
            queue.sweep()  # some changes have taken their message out of the heap, and others have not
        changes = list(self.under_way)
        self.held_back.clear()
        self.under_way.clear()
        for requests in self.state.asked.values():
            requests[0].is_decided = False
        for change in changes:
            entry = change.entry
            if entry is None or not self.is_left(entry):
                continue
            if entry.token:
                self.table.leased[entry.record.id] = entry
                self.table.superseded.end(entry.record.id, entry.record.revision, entry.token)
            elif entry.state is LEASED:
                self.table.lanes[entry.record.envelope.lane].add(entry)
        self.table.correct_live()
        return changes

    def shorten(self, change: Change) -> bool:
        """Note that the change's dead letters were too large. The next change writes them without tracebacks.

        Return False if they have no tracebacks.
        """
        keys = {letter.key for letter in change.letters if letter.traceback is not None}
        self.without_traceback |= keys
        return bool(keys)

    def leave(self, change: Change) -> None:
        """Remove from the table a message that can neither leave nor become a dead letter.

        The next owner reads the message again, and tries to deliver it.
        """
        name, problem = records.id_of(change.key), change.refusal
        log.error("%s: message %s stays in the partition, undelivered: %s", self._name, name, problem)
        self.state.bad.pop(change.key, None)
        entry = change.entry
        if entry is not None and self.is_left(entry):
            self.table.remove(entry)
            self.state.left[change.key] = entry.place_ms
