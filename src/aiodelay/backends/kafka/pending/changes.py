"""`Change`: one decision of an owner, on its way to the partition; `ChangeLog`: the changes that are under way."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from msgspec import Struct
from msgspec.structs import replace

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client import Outgoing
from aiodelay.backends.kafka.records import Memory, Wire
from aiodelay.core.dict_table.entries import Entry, EntryState
from aiodelay.core.dict_table.table import DictTable
from aiodelay.core.values import DeadKey, DeadLetter, JournalEntry, Record

from .read_state import ReadState

__all__ = ["MOST_NOTES", "Change", "ChangeLog"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

MOST_NOTES = 10_000
"""Most entries of the history that wait while its topic takes nothing."""


class Change(Struct, eq=False, gc=False):
    """The records to write for one key, decided when everything below `read_to` had been read.

    Attributes:
        put: The message as it goes on, and its place; None: it ends.
        letters: Dead letters that are written with it.
        others: Further messages that are put with it: an occurrence beside its series, or the reverse.
        memory: Answers and a version that must outlive the message's record.
        targets: Records for other topics, in the same transaction.
        purged: A dead letter that ends with it.
        asked: The key of a request that was left to the owner, which ends with it.
        entry: The message that is held back meanwhile; None: no message of the table.
        is_users: It writes the cancel of a user, which counts even if others have written the key meanwhile.
        offset: Of its last record, once it is written.
        counted: It was read, and counted.
        refusal: Why Kafka does not take it.
        is_too_large: Kafka does not take it because one of its records is too large.
        notes: Its entries of the history.
        is_written: True once it was read, False once it is known not to have been written.
        waiter: Ends once `is_written` is known.
    """

    key: bytes
    read_to: int
    entry: Entry | None
    put: tuple[Record, int] | None = None
    letters: Sequence[DeadLetter] = ()
    others: Sequence[tuple[Record, int]] = ()
    outcome: str = "ended"
    purged: DeadKey | None = None
    asked: bytes = b""
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
        """Return its memory, to add to it."""
        if self.memory is None:
            self.memory = Memory()
        return self.memory

    @property
    def is_end(self) -> bool:
        """Whether all that it writes of its key's partition is a tombstone."""
        is_end = self.put is None and not self.is_users and bool(self.key)
        return is_end and not (self.letters or self.others or self.purged or self.asked)

    @property
    def is_stale(self) -> bool:
        """Whether it moves a message that a user has replaced or cancelled."""
        return bool(self.targets) and self.entry is not None and self.entry.state is EntryState.GONE

    def tell(self, *, written: bool) -> None:
        """Note if the change was written, and wake the task that waits for that."""
        self.is_written = written
        if self.waiter is not None:
            self.waiter.set_result(None)

    async def until_written(self) -> bool:
        """Wait until the change was read back, or is known not to have been written; say whether it was."""
        if self.is_written is None:
            if self.waiter is None:
                self.waiter = asyncio.get_running_loop().create_future()
            await asyncio.shield(self.waiter)
        return bool(self.is_written)

    def wires(self) -> Iterable[Wire]:
        """Return its records, in order."""
        if self.is_end:
            return (records.encode_end(self.key, read_to=self.read_to, outcome=self.outcome, memory=self.memory),)
        return self._all_wires()

    def _all_wires(self) -> Iterator[Wire]:
        for letter in self.letters:
            yield records.encode_dead(letter)
        for record, place_ms in self.others:
            yield records.encode_record(record, read_to=self.read_to, place_ms=place_ms)
        if self.purged is not None:
            yield Wire(records.dead_key(self.purged), None, [])
        if self.asked:
            yield records.encode_end(records.KEEP + self.asked, read_to=self.read_to, outcome=self.outcome)
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
    """See `ChangeLog.deciding`; a class, since a generator costs a move more than all its rules."""

    __slots__ = ("_change", "_log", "_outer")

    def __init__(self, log: ChangeLog, change: Change) -> None:
        self._log, self._change = log, change

    def __enter__(self) -> Change:
        self._outer, self._log.current = self._log.current, self._change
        return self._change

    def __exit__(self, *exc_info: object) -> None:
        self._log.current = self._outer


class ChangeLog:
    """The changes of a partition, from the decision until their records were read.

    A change holds its message back: nobody else may claim or change the message meanwhile.

    Args:
        table: The messages.
        state: How far the partition was read.
        name: The topic and partition, for logs.
        keeps_history: Note the events of messages for the history topic.
        notes: Entries of the history that wait.
    """

    table: DictTable
    state: ReadState
    keeps_history: bool
    notes: deque[JournalEntry]

    def __init__(
        self, table: DictTable, state: ReadState, *, name: str, keeps_history: bool, notes: deque[JournalEntry]
    ) -> None:
        self.table, self.state, self._name = table, state, name
        self.keeps_history, self.notes = keeps_history, notes
        self.changes: deque[Change] = deque()
        """Changes to write, in order."""
        self.current: Change | None = None
        """The change that is being decided: calls on the table add to it."""
        self.held_back: dict[bytes, Change] = {}
        """The change that holds a key back."""
        self.under_way: dict[Change, None] = {}
        """All changes that were begun, and neither read nor given back."""
        self.without_traceback: set[DeadKey] = set()
        """Dead letters that were too large with their tracebacks."""

    # --- deciding -----------------------------------------------------------------------------------------

    def deciding(self, change: Change) -> _Deciding:
        """Add all calls of a block on the table to a change."""
        return _Deciding(self, change)

    @contextmanager
    def ending(self, entry: Entry) -> Iterator[None]:
        """Make a change of a message's end; within a change of the same message, add to that one."""
        key = records.key_of(entry.record.id)
        if self.current is not None and self.current.key == key:
            yield
            return
        with self.deciding(Change(key, self.state.read_to, entry)) as change:
            yield
        self.reserve(entry)
        self.offer(change)

    def note(self, note: JournalEntry) -> None:
        """Add an entry of the history to the current change, or to the entries that wait."""
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
        """Take an entry out of its lane, or from beside it, while its change is written."""
        if entry.state is EntryState.PARKED:
            self.table.lanes[entry.record.envelope.lane].unpark(entry)
        entry.state = EntryState.LEASED

    # --- the way of a change ------------------------------------------------------------------------------

    def offer(self, change: Change) -> Change | None:
        """Begin a change and hold its message back; drop the end of a message that has no record any more."""
        has_news = bool(change.letters or change.put is not None or change.others)
        if not (self.state.stands(change.key) or has_news):
            if change.entry is not None and not change.is_users:
                self.table.remove(change.entry)
            self.notes += change.notes
            return None
        self.hold_back(change)
        return change

    def hold_back(self, change: Change) -> None:
        """Begin a change that holds its key back."""
        self.held_back[change.key] = change
        self.begin(change)

    def begin(self, change: Change) -> None:
        """Have a change written."""
        self.under_way[change] = None
        self.changes.append(change)

    def holds_back(self, key: bytes, entry: Entry | None) -> bool:
        """Say whether a change of this very entry is being written."""
        return key in self.held_back and self.held_back[key].entry is entry

    def let_off(self, change: Change) -> None:
        """Hold nothing back for a change any more, unless another one of its key does."""
        del self.under_way[change]
        if self.held_back.get(change.key) is change:
            del self.held_back[change.key]

    def written(self, change: Change) -> None:
        """Release the message of a change, once everything up to its record has been read."""
        self.let_off(change)
        entry = change.entry
        if entry is not None and not change.is_users and self.is_left(entry):  # a user's cancel came before it
            self.table.remove(entry)

    def is_left(self, entry: Entry) -> bool:
        """Say whether the table still has this very entry."""
        return self.table.entries.get(entry.record.id) is entry

    def drop_stale(self, change: Change) -> bool:
        """Drop a move of a message that a user has replaced or cancelled in time; say whether it was dropped."""
        if not change.is_stale:
            return False
        self.let_off(change)
        return True

    def give_back(self) -> list[Change]:
        """Undo all changes under way, and return them.

        A message that was leased is leased again. Any other message returns to its lane.
        """
        for queue in self.table.lanes.values():
            queue.sweep()  # some changes have taken their message out of the heap, others have not
        changes = list(self.under_way)
        self.held_back.clear()
        self.under_way.clear()
        for asked in self.state.asked.values():
            asked.is_decided = False
        for change in changes:
            entry = change.entry
            if entry is None or not self.is_left(entry):
                continue
            if entry.token:
                self.table.leased[entry.record.id] = entry
                self.table.superseded.end(entry.record.id, entry.record.revision, entry.token)
            elif entry.state is EntryState.LEASED:
                self.table.lanes[entry.record.envelope.lane].add(entry)
        return changes

    def shorten(self, change: Change) -> bool:
        """Have dead letters that were too large written without tracebacks; say whether they had any."""
        keys = {letter.key for letter in change.letters if letter.traceback is not None}
        self.without_traceback |= keys
        return bool(keys)

    def leave(self, change: Change) -> None:
        """Leave a message where it stands, until it is read again: it can neither be delivered nor be given up."""
        log.error("%s: message %s is left where it stands: %s", self._name, records.id_of(change.key), change.refusal)
        self.state.bad.pop(change.key, None)
        entry = change.entry
        if entry is not None and self.is_left(entry):
            self.table.remove(entry)
