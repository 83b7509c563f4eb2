"""`PendingIndex`: the pending messages of one partition, fed by the partition's records alone.

The rules, claims, leases and fairness are those of every store. The difference is who may change a message: nothing
here does until the change has been written to the partition and read back. A settlement, or a message that has become
late, makes a `Change`; the message stays out of everyone's reach until its record comes back, or the session ends
without it.

Nothing here waits or touches the network. The parts: `record_reader.py` takes records in, `change_table.py` turns
decisions into changes, `changes.py` keeps them until they are read back, `due_messages.py` moves due messages to their
topics, `far_messages.py` is the border to messages that are due late.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator
from itertools import count

from msgspec.structs import replace

from aiodelay.clock import Clock
from aiodelay.core.dict_claims import DictClaiming, LaneHeads
from aiodelay.core.dict_inspection import DictInspection
from aiodelay.core.dict_table import DictTable, Worker, Workers
from aiodelay.core.entries import Entry, EntryState
from aiodelay.core.rules import Rules
from aiodelay.model import (
    RETRY_WINDOW_MS,
    Cancel,
    Command,
    DeadKey,
    DeadLetter,
    DeadReason,
    Envelope,
    JournalEntry,
    Lane,
    Outcome,
    Put,
    PutBack,
    Record,
    Refused,
    Settlement,
    SettleOutcome,
    Snapshot,
    Stored,
    Tidied,
)
from aiodelay.transitions import NO_OP, first_answer, record_of

from . import records
from .change_table import ChangeTable
from .changes import MOST_NOTES, Change, ChangeLog
from .due_messages import DueMessages
from .far import Far
from .far_messages import FarMessages
from .mark import Mark
from .pace import Pace
from .paced_lanes import PacedLanes
from .placement import Placement
from .read_state import ReadState
from .record_reader import RecordReader
from .records import Read

__all__ = ["PendingIndex"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")


class PendingIndex:
    """One partition's messages.

    Args:
        clock: Where the time is read.
        placement: Which partition this is.
        claims: Numbers for claims.
        pace: How fast overdue messages leave, shared by all partitions of a store.
        keeps_history: Note what becomes of messages.
        far: Messages that are far already.
        workers: The dispatching processes.
        notes: Entries of the history that wait.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        placement: Placement,
        claims: count[int],
        pace: Pace | None = None,
        keeps_history: bool = False,
        far: Far | None = None,
        workers: Workers | None = None,
        notes: deque[JournalEntry] | None = None,
    ) -> None:
        self._clock, self._claims, self._pace = clock, claims, pace or Pace(0)
        self.placement, self.name = placement, placement.name
        self.workers = Workers() if workers is None else workers
        self.state = ReadState(Far() if far is None else far)
        self.table = table = DictTable(self.workers)
        notes = deque(maxlen=MOST_NOTES) if notes is None else notes
        self.log = ChangeLog(table, self.state, name=placement.name, keeps_history=keeps_history, notes=notes)
        self.rules: Rules[Entry] = Rules(ChangeTable(table, self.log, clock))
        self._lanes = PacedLanes(table, LaneHeads(table, self.rules), self._pace)
        self.claiming = DictClaiming(table, self.rules, self._lanes, claims)
        self.inspection = DictInspection(table, self.claiming)
        self.reader = RecordReader(self.log, self.inspection, placement, clock)
        self.far = FarMessages(self.log, self.inspection, clock)
        self.due = DueMessages(self.rules, self.log, self._lanes, self.claiming)

    def emptied(self, far: Far) -> PendingIndex:
        """Return one that has read nothing but far messages, for the same workers."""
        index = PendingIndex(
            clock=self._clock,
            placement=self.placement,
            claims=self._claims,
            pace=self._pace,
            keeps_history=self.log.keeps_history,
            far=far,
            workers=self.workers,
            notes=self.log.notes,
        )
        index.log.without_traceback = self.log.without_traceback
        return index

    # --- commands and settlements -------------------------------------------------------------------------

    def command(self, command: Command) -> tuple[Outcome, Change | None]:
        """Decide a command; return the change to write, if any."""
        now, entry = self._clock.now_ms(), self.table.find(command.id)
        known = self.table.answers.answer(command, now)
        if known is not None:
            return known, None
        if entry is not None and entry.record.op == command.op:
            return first_answer(entry.record), None
        with self.log.deciding(self._change(command.id, entry)) as change:
            outcome = self.rules.decide(command, entry, now)
            if isinstance(command, Cancel) and entry is not None and isinstance(outcome, Stored):
                change.is_users = entry.token != 0
                self._cancel_in_flight(command.id)
        is_kept = change.put is None and isinstance(command, Put)
        if not isinstance(outcome, Stored) or outcome.answer == "kept" or is_kept:
            self.answered(command, outcome)
            return outcome, None
        if entry is not None and not entry.token:
            self.log.reserve(entry)
        if outcome.answer != "stored":  # the record itself tells that one
            answer = command.op.hex(), outcome.answer, outcome.revision, outcome.due_ms, now + RETRY_WINDOW_MS
            change.remembering().answers.append(answer)
        return outcome, self.log.offer(change)

    def _change(self, message_id: str, entry: Entry | None) -> Change:
        return Change(records.key_of(message_id), self.state.read_to, entry)

    def _cancel_in_flight(self, series_id: str) -> None:
        """Write that no retry follows of a series' occurrences that are in flight."""
        for entry in self.table.retries_of(series_id):
            if entry.token:
                change = self._change(entry.record.id, entry)
                change.is_users = True
                self.log.offer(change)

    def answered(self, command: Command, outcome: Outcome) -> None:
        """Remember the answer to a command whose change counted, for as long as it may be repeated."""
        if not (isinstance(outcome, Stored) and outcome.answer == "stored"):  # the record itself tells that one
            self.table.answers.add(command.op, outcome, until_ms=self._clock.now_ms() + RETRY_WINDOW_MS)

    def settle(self, settlement: Settlement) -> tuple[SettleOutcome, Change | None]:
        """Decide a settlement; return the change to write, if any."""
        entry = self.table.find(settlement.id)
        if self.log.holds_back(records.key_of(settlement.id), entry):  # the same settlement is being written
            was_replaced = self.table.superseded.end(settlement.id, settlement.revision, settlement.token)
            return SettleOutcome.SUPERSEDED if was_replaced else SettleOutcome.GONE, None
        with self.log.deciding(self._change(settlement.id, entry)) as change:
            change.outcome = getattr(settlement, "outcome", "ended")
            outcome = self.rules.settle(settlement, self._clock.now_ms())
        return outcome, self.log.offer(change) if outcome is SettleOutcome.SETTLED else None

    def end(self, entry: Entry, settlement: Settlement) -> Change | None:
        """Decide how a message ends that is due and not leased; None: it is changed, or gone, already."""
        if not self.log.is_left(entry) or entry.state is not EntryState.IN_LANE:
            return None
        self.log.reserve(entry)
        return self.settle(settlement)[1]

    def end_instead(self, change: Change, settlement: Settlement) -> Change | None:
        """Decide how a message ends whose move cannot be written, in its place; None: it is changed, or gone, already.

        Args:
            change: The move, which nobody writes any more.
            settlement: How it ends.
        """
        self.log.let_off(change)
        if change.entry is None or not self.log.is_left(change.entry):
            return None
        return self.settle(settlement)[1]

    def has_newer(self, settlement: Settlement) -> bool:
        """Say whether a newer revision of a message stands."""
        entry = self.table.find(settlement.id)
        return entry is not None and entry.record.revision > settlement.revision

    # --- dead letters, and messages that come back ----------------------------------------------------------

    def redrive(self, key: DeadKey) -> tuple[Outcome, Change | None]:
        """Decide to give a dead letter a new life."""
        letter = self.table.letters.get(key)
        if letter is not None and _is_lost(letter.record.envelope):
            problem = f"{letter.record.last_error}; nothing tells where it goes: schedule it anew, and purge this"
            return Refused("undecodable", problem), None
        with self.log.deciding(self._change(key.id, None)) as change:
            outcome = self.rules.redrive(key, self._clock.now_ms())
        return outcome, None if isinstance(outcome, Refused) else self.log.offer(change)

    def put_back(self, message: PutBack) -> tuple[Stored, Change | None]:
        """Decide to take a message back, unless one stands under its id, or it is a dead letter already."""
        is_dead = message.reason is not None
        change = Change(b"" if is_dead else records.key_of(message.record.id), self.state.read_to, None)
        with self.log.deciding(change):
            stored = self.rules.put_back(message, self._clock.now_ms())
        if stored.answer == "kept":
            return stored, None
        if is_dead:
            self.log.begin(change)
            return stored, change
        return stored, self.log.offer(change)

    def purge(self, key: DeadKey) -> Change | None:
        """Decide to delete a dead letter, if there is one."""
        if not self.table.letters.has(key):
            return None
        change = Change(b"", self.state.read_to, None, purged=key)
        self.log.begin(change)
        return change

    # --- what the owner sets right --------------------------------------------------------------------------

    def mend(self) -> None:
        """Make changes of hidden keys, of records that cannot be read, of messages that are over, and of requests."""
        state = self.state
        for key in [*state.hidden, *state.bad, *state.over]:
            if key not in self.log.held_back and state.far.find(key) is None:
                self._mend(key)
        for key, asked in state.asked.items():
            if not asked.is_decided and asked.is_over:
                asked.is_decided = True
                change = Change(b"", state.read_to, None, asked=key)
                self.log.under_way[change] = None
                self.log.changes.appendleft(change)  # else another owner may find it, and not who followed
            elif not asked.is_decided and key not in self.log.held_back and state.far.find(key) is None:
                asked.is_decided = True
                self._decide_asked(key, asked.what)

    def _mend(self, key: bytes) -> None:
        state, entry = self.state, self.table.find(records.id_of(key))
        change = Change(key, state.read_to, entry)
        if key in state.bad:
            change.entry = None
            self._give_up(change, _unreadable(*state.bad[key]), "undecodable")
        elif key in state.over:
            change.is_users = entry is not None and entry.token != 0
            change.entry = entry if change.is_users else None
        elif entry is not None and entry.token:
            return  # its settlement does the same
        elif state.standings[key].seen.is_put and entry is not None:
            change.put = entry.record, entry.place_ms
            self.log.reserve(entry)
        self.log.offer(change)

    def _decide_asked(self, key: bytes, what: Put | PutBack | Cancel) -> None:
        """Carry out a request that was left to the owner; the tombstone of the request is the answer."""
        outcome, change = self.put_back(what) if isinstance(what, PutBack) else self.command(what)
        if change is None:
            change = Change(b"", self.state.read_to, None)
            self.log.begin(change)
        change.asked = key
        if isinstance(what, Cancel):
            change.outcome = outcome.answer if isinstance(outcome, Stored) else _reason(outcome)

    def _give_up(self, change: Change, record: Record, reason: DeadReason) -> None:
        with self.log.deciding(change):
            self.rules.bury(record, reason, self._clock.now_ms())

    @property
    def needs_mending(self) -> bool:
        """Whether there is something that only writing sets right."""
        state = self.state
        return bool(state.hidden or state.bad or state.over or state.asked or self.log.changes)

    def come_near(self, read: Read) -> None:
        """Take in a far message whole, if it still stands."""
        entry = self.reader.come_near(read)
        if entry is not None and self.state.mark.covers(read.offset, entry.place_ms):
            self._set_aside(records.key_of(entry.record.id), entry)

    def quarantine(self) -> None:
        """Make dead letters of messages that have ended already, but stand in the partition again."""
        mark = self.state.mark
        for key, standing in self.state.standings.items():
            entry = self.table.find(records.id_of(key)) if standing.seen.offset < mark.read_to else None
            if entry is not None and mark.covers(standing.seen.offset, entry.place_ms):
                self._set_aside(key, entry)

    def _set_aside(self, key: bytes, entry: Entry) -> None:
        log.error("%s: message %s had ended, and has come back: it becomes a dead letter", self.name, entry.record.id)
        change = Change(key, self.state.read_to, entry)
        self._give_up(change, entry.record, "resurrected")
        change.outcome = "resurrected"
        self.table.leased.pop(entry.record.id, None)
        self.log.reserve(entry)
        self.log.offer(change)

    def next_mark(self) -> Mark | None:
        """Return the watermark of now; None if it is no further than the last one."""
        state, now = self.state, self._clock.now_ms()
        if not state.has_ended:
            return None
        waiting = [entry for lane in self.table.lanes.values() for entry in lane.foremost()]
        waiting += self.table.leased.values()
        waiting += [] if (overdue := self._lanes.overdue()) is None else [overdue]
        waiting += [change.entry for change in self.log.under_way if change.entry is not None]
        until_ms = min((entry.place_ms - 1 for entry in waiting), default=now)
        if state.far:
            until_ms = min(until_ms, state.edge_ms - 1)
        mark = Mark(min(until_ms, now), state.read_to)
        return mark if mark.is_beyond(state.mark) else None

    def give_back(self) -> list[Change]:
        """Undo all changes under way, and return them."""
        self._lanes.release_all()
        return self.log.give_back()

    def tidy(self, worker: Worker, lanes: Collection[Lane], limit: int) -> Tidied:
        """Do a step of housekeeping."""
        tidied = self.claiming.tidy(worker, lanes, limit, self._clock.now_ms())
        listed = {state.lane for state in tidied.lanes}
        far = [lane for lane, n in self.state.far.by_lane.items() if n and lane not in listed]
        states = [self.claiming.lane_state(lane, tidied.now_ms) for lane in far]
        return replace(tidied, lanes=[*tidied.lanes, *states])

    # --- inspection ---------------------------------------------------------------------------------------

    def knows(self, message_id: str, op: bytes = NO_OP) -> bool:
        """Say whether a message stands here, or a command's answer is remembered here."""
        is_here = self.table.find(message_id) is not None or self.far.has(message_id)
        return is_here or self.reader.has_answered(op)

    @property
    def pending(self) -> int:
        """How many messages stand here, near and far."""
        return len(self.table.entries) + len(self.state.far)

    def pending_messages(self) -> Iterator[Snapshot]:
        """Yield the messages that an owner which has read so far would deliver, near and whole; in no order.

        A record that cannot be read is salvaged, as it becomes a dead letter. A message that had ended and has come
        back is left out.
        """
        now, state = self._clock.now_ms(), self.state
        for entry in self.table.entries.values():
            standing = state.standings.get(records.key_of(entry.record.id))
            if standing is None or not state.mark.covers(standing.seen.offset, entry.place_ms):
                yield self.inspection.snapshot(entry, now)
        for read, problem in state.bad.values():
            record = _unreadable(read, f"cannot be read: {problem}")
            yield self.inspection.snapshot(Entry(record, record.due_ms, 0), now)
        for key, asked in state.asked.items():
            is_there = self.table.find(records.id_of(key)) is not None
            if not isinstance(asked.what, Cancel) and not asked.is_over and not is_there:
                yield self.inspection.snapshot(_as_asked(asked.what), now)

    def letters(self) -> Iterator[DeadLetter]:
        """Yield dead letters, in no order."""
        return iter(self.table.letters)

    def remembered_versions(self) -> dict[str, tuple[int, int]]:
        """Return the versions of ended messages, each with the time until which it is remembered, epoch ms."""
        versions = self.table.answers.versions.items(self._clock.now_ms())
        return {each: (version, until_ms) for each, version, until_ms in versions}


def _reason(outcome: Outcome) -> str:
    return outcome.reason if isinstance(outcome, Refused) else "unknown"


def _as_asked(put: Put | PutBack) -> Entry:
    """Return the entry that a put unless one stands would make."""
    if isinstance(put, PutBack):
        return Entry(put.record, put.due_ms, 0)
    due_ms = put.due.ms
    return Entry(record_of(put, due_ms, 0), due_ms, 0)


def _is_lost(envelope: Envelope) -> bool:
    """Say whether it is that of a record that could not be read, which tells no topic."""
    return envelope.lane == records.SINK and not envelope.address


def _unreadable(read: Read, problem: str) -> Record:
    """Return what can be salvaged of a record that cannot be read."""
    assert read.key is not None
    headers = dict(records.user_headers(read.headers))
    envelope = Envelope(records.id_of(read.key), records.SINK, payload=read.value or b"", headers=headers)
    written_ms = max(read.timestamp, 0)
    return Record(envelope, written_ms, written_ms, NO_OP, last_error=problem)
