"""`RecordReader`: takes the records of a partition into its table, in their order."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from typing import Any, cast

from msgspec.structs import replace

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.records import Glance, Kind, Memory, Read
from aiodelay.backends.kafka.watermark import Watermark
from aiodelay.core.dict_table.entries import Entry
from aiodelay.core.dict_table.inspection import DictInspection
from aiodelay.core.transitions import NO_OP, occurrence_of
from aiodelay.core.values import Cancel, Lane, Put, PutBack, Stored
from aiodelay.errors import RecordFormatError
from aiodelay.ports.clock import Clock

from .change_table import SupersededChanges
from .changes import Change, ChangeLog
from .checkpoint import Checkpoint
from .placement import Placement
from .precedence import Precedence, Seen, after, is_forgettable, is_unread
from .read_state import Asked

__all__ = ["RecordReader"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

STRAY_SAMPLE = 64
"""One in this many far records is checked: does its key belong to this partition? To check every record is too slow."""


class RecordReader:
    """Decides whether each record counts, and applies the records that count to the table.

    Args:
        changes: The owner's changes that wait to be read back, and the table of messages.
        inspection: Sets pauses.
        placement: The number of the partition, and checks of its messages.
        clock: The clock of the store.
        superseded: Claims on versions that were replaced.
    """

    def __init__(
        self,
        changes: ChangeLog,
        inspection: DictInspection,
        placement: Placement,
        clock: Clock,
        *,
        superseded: SupersededChanges,
    ) -> None:
        self._changes, self._inspection, self._superseded = changes, inspection, superseded
        self._state, self._table = changes.state, changes.table
        self._placement, self._clock = placement, clock
        self._cancels: deque[tuple[bytes, int]] = deque()
        self._checkpoint: Checkpoint | None = None  # set only while a checkpoint is being restored

    def read(self, read: Read) -> None:
        """Take in the partition's next record."""
        state = self._state
        state.read_to = read.offset + 1
        if read.value is None and read.key is not None and self._read_own_end(read.key, read.offset):
            return
        glance = records.glance(read.key, read.value, read.headers)
        if glance.lane and glance.place_ms > state.near_until_ms and self._read_far(read, glance):
            return
        if read.key is None or not records.is_plain(read.key):
            self._read_special(read, read.key, glance)
        else:
            self._read_message(read, read.key, glance)

    def _read_special(self, read: Read, key: bytes | None, glance: Glance) -> None:
        """Take in a record without a key, or with a key that no user's message can have."""
        if key is None or glance.kind is Kind.BAD:
            log.warning("%s, offset %d: the record is skipped: %s", self._placement.name, read.offset, glance.problem)
        elif glance.kind is Kind.DEAD:
            self._keep_at(key, read)
            self._read_dead(read, key)
        elif glance.kind is Kind.BARRIER:
            self._forget_cancels(read.offset)
        elif glance.kind is Kind.INTAKE:
            pass  # `Positions` reads the positions of intakes
        elif glance.kind is Kind.PARTITIONS:
            self._state.partitions = records.partitions_in(read.value)
        elif glance.kind is Kind.FEATURE:
            self._keep_at(key, read)
            self._read_feature(key, read.value)
        elif glance.kind is Kind.MARK:
            self._read_mark(records.mark_of(read.value))
        elif glance.kind is Kind.HOLD:
            self._keep_at(key, read)
            change_pause = self._inspection.resume if read.value is None else self._inspection.pause
            change_pause(*cast("tuple[Lane, str | None]", records.held_in(key)))
        elif key.startswith(records.KEEP):
            self._read_asked(read, key.removeprefix(records.KEEP), glance)
        else:
            self._read_message(read, key, glance)

    def _read_feature(self, key: bytes, value: bytes | None) -> None:
        feature = records.feature_in(key, value)
        if feature is not None:
            name, version = feature
            self._state.features = {**self._state.features, name: version}

    def read_own(self, changes: Iterable[Change]) -> None:
        """Take in this owner's committed changes without reading them, up to the first change that must be read.

        Args:
            changes: The changes of one transaction, in their order.
        """
        state = self._state
        for change in changes:
            is_next = change.offset == state.read_to and change.is_end
            if not is_next or not self._read_own_end(change.key, change.offset):
                return
            state.read_to += 1

    def _keep_at(self, key: bytes, read: Read) -> None:
        if read.value is None:
            self._state.kept_at.pop(key, None)
        else:
            self._state.kept_at[key] = read.offset

    def _read_asked(self, read: Read, key: bytes, glance: Glance) -> None:
        """Take in a request to the owner, or the end of a request. A request with `read_to` puts a message back."""
        read_to, all_asked = glance.read_to, self._state.asked
        if read.value is None:
            left = [each for each in all_asked.pop(key, ()) if read_to is not None and each.offset >= read_to]
            if left:
                all_asked[key] = left
            return
        try:
            what: Put | PutBack | Cancel | None
            if read_to is not None:
                what = records.asked_back(key, read.value, read.headers, place_ms=glance.place_ms)
            elif (what := records.asked_cancel(key, read.headers)) is None:
                what = records.kept_put(key, read.value, read.headers, written_ms=read.timestamp)
        except RecordFormatError as error:
            where = self._placement.name, read.offset
            log.warning("%s, offset %d: a request to the owner is skipped: %s", *where, error.problem)
        else:
            all_asked.setdefault(key, []).append(Asked(read.offset, what))

    def _read_own_end(self, key: bytes, offset: int) -> bool:
        """Take in a tombstone by which this owner ends a message.

        Return False if the record is not such a tombstone: the caller must then read it in the usual way.
        """
        change, state = self._changes.held_back.get(key), self._state
        if change is None or change.offset != offset or change.is_users or change.entry is None:
            return False
        entry, standing = change.entry, state.standings.get(key)
        message_id = entry.record.envelope.id
        if self._table.entries.get(message_id) is not entry:
            return False
        if standing is None or is_unread(standing.seen, change.read_to):
            return False
        change.counted = True
        del state.standings[key]  # nothing needs to be known of a message that an owner has ended
        state.hidden.pop(key, None)
        state.over.pop(key, None)
        self._table.remove(entry)
        state.ended_at = offset
        if self._cancels:
            self._forget_cancels(change.read_to)
        if change.memory is not None:
            self._remember(message_id, change.memory)  # not in the command: its caller may have stopped waiting
        return True

    def _read_message(self, read: Read, key: bytes, glance: Glance) -> None:
        state, is_put = self._state, glance.kind is not Kind.END
        standing = after(state.standing(key), Seen(read.offset, is_put, glance.read_to))
        counts = standing.seen.offset == read.offset
        state.standings[key] = standing
        if glance.read_to is None:
            for asked in state.asked.get(key, ()):
                asked.is_over = True
        state.hidden.pop(key, None)
        if standing.hidden_at is not None:
            state.hidden[key] = None
        if counts:
            self._read_standing(read, key, glance, is_put=is_put)
        if glance.read_to is not None:
            self._forget_cancels(glance.read_to)
        # Only an owner's record has a memory. An owner may also write a user's cancel, which has no `read_to`.
        if glance.read_to is not None or not is_put:
            self._remember(records.id_of(key), records.memory_of(read.headers), counts=counts)
        if standing.hidden_at == read.offset:
            self._end_repeated(key)

    def _read_standing(self, read: Read, key: bytes, glance: Glance, *, is_put: bool) -> None:
        """Take in a record that is the standing record of its key from now on."""
        state = self._state
        if (change := self._changes.held_back.get(key)) is not None and change.offset == read.offset:
            change.counted = True
        state.bad.pop(key, None)
        state.left.pop(key, None)
        state.over.pop(key, None)
        state.far.remove(key)
        if is_put:
            self.take_in(read, key, glance)
        else:
            state.ended_at = read.offset
            self._let_go(records.id_of(key), is_users=glance.read_to is None)
            self._cancels.append((key, read.offset))

    def _end_repeated(self, key: bytes) -> None:
        """End a message again, because a user has put the ended message again with the same op.

        The owner had not read the second put when it wrote the end of the message.
        """
        entry, seen = self._table.find(records.id_of(key)), self._state.standings[key].seen
        if entry is None or entry.token or seen.read_to is not None or not self.has_answered(entry.record.op):
            return
        self._state.over[key] = None
        self._table.remove(entry)

    def has_answered(self, op: bytes) -> bool:
        """Say whether the answer to a command is remembered."""
        return self._table.answers.by_op.get(op, self._clock.now_ms()) is not None

    def _remember(self, message_id: str, memory: Memory | None, *, counts: bool = True) -> None:
        """Remember the answers and the version in a record.

        From a record that does not count, take only "stored" answers, which earlier commands got. The record's own
        command was not carried out, so its answer does not hold.
        """
        if memory is None:
            return
        now, answers = self._clock.now_ms(), self._table.answers
        for op, answer, revision, due_ms, until_ms in memory.answers:
            is_so = counts or answer == "stored"
            if is_so and until_ms > now and answers.by_op.get(bytes.fromhex(op), now) is None:
                stored = Stored(cast("Any", answer), revision, due_ms)
                answers.add(bytes.fromhex(op), stored, until_ms=until_ms)
        if memory.version is not None and memory.version[1] > now:
            newest = max(memory.version[0], answers.ended_version(message_id, now) or 0)
            answers.add_version(message_id, newest, until_ms=memory.version[1])

    def take_in(self, read: Read, key: bytes, glance: Glance) -> None:
        """Decode a message and put it into the table."""
        state = self._state
        try:
            if glance.problem:
                raise RecordFormatError(glance.problem)  # noqa: TRY301 - both kinds of bad records are handled below
            assert read.value is not None
            record = records.decode(key, read.value, read.headers, written_ms=read.timestamp)
            self._placement.check_address(record.envelope, is_users=glance.read_to is None)
        except RecordFormatError as error:
            where = self._placement.name, read.offset
            log.warning("%s, offset %d: the record becomes a dead letter: %s", *where, error.problem)
            self._let_go(records.id_of(key), is_users=True)
            state.bad[key] = read, error.problem
            return
        self._placement.note_stray(key)
        old = self._table.find(record.id)
        state.raised.discard(record.id)
        if self._checkpoint is not None:
            if read.offset in self._checkpoint.repeated:
                state.over[key] = None
                return
            if (revision := self._checkpoint.revisions.get(read.offset)) is not None:
                record = replace(record, revision=revision)
                state.raised.add(record.id)
        elif glance.read_to is None and record.op != NO_OP:
            if old is not None and old.record.op == record.op:
                state.raised.add(record.id)
                return  # the producer has sent the put again, because its first answer was lost
            if old is None and self.has_answered(record.op):
                state.over[key] = None  # the producer has sent the put again, and its message has ended since
                return
        if glance.read_to is not None and self._was_written_late(record.id, glance.read_to):
            state.over[key] = None
            return
        if old is not None and glance.read_to is None:
            self._end_retries(record.id, is_replaced=True)
            # A put in the same millisecond, or from a producer whose clock is behind, still gets a higher revision.
            if record.revision <= old.record.revision:
                record = replace(record, revision=old.record.revision + 1)
                state.raised.add(record.id)
            self._superseded.add(old)
        if old is not None:
            self._table.remove(old)
        self._table.insert(record, glance.place_ms)

    def _end_retries(self, series_id: str, *, is_replaced: bool) -> None:
        """End the retries of a series that a user has replaced or cancelled without asking the owner.

        The owner writes the ends of these retries later. If the series was cancelled, the attempt of a retry in flight
        goes on, and no other attempt follows.
        """
        for entry in self._table.retries_of(series_id):
            if entry.record.no_retry and not is_replaced:
                continue  # its cancel is written already
            key = records.key_of(entry.record.id)
            if self._state.stands(key):  # otherwise its end was read already, and its last attempt goes on
                self._state.over[key] = None
            if entry.token and not is_replaced:
                self._table.update(entry, replace(entry.record, no_retry=True))
            else:
                self._superseded.add(entry)
                self._table.remove(entry)

    def _was_written_late(self, message_id: str, read_to: int) -> bool:
        """Say whether an owner wrote a retry before it had read that a user replaced the series."""
        occurrence = occurrence_of(message_id)
        series = None if occurrence is None else self._state.standing(records.key_of(occurrence[0]))
        return series is not None and is_unread(series.seen, read_to)

    def _let_go(self, message_id: str, *, is_users: bool) -> None:
        """Remove a message. If a user has cancelled it in flight, its attempt goes on, and no other attempt follows."""
        entry = self._table.find(message_id)
        if entry is None:
            return
        if is_users:
            self._end_retries(message_id, is_replaced=False)
        if is_users and entry.token:
            self._table.update(entry, replace(entry.record, no_retry=True))
        else:
            self._table.remove(entry)

    def _read_dead(self, read: Read, key: bytes) -> None:
        if read.value is None:
            self._table.letters.remove(records.dead_key_of(key))
            return
        try:
            letter = records.decode_dead(key, read.value, read.headers)
        except RecordFormatError as error:
            where = self._placement.name, read.offset
            log.warning("%s, offset %d: a dead letter is skipped: %s", *where, error.problem)
        else:
            self._table.letters.add(letter)

    def _read_mark(self, mark: Watermark) -> None:
        if mark.is_beyond(self._state.mark):
            self._state.mark = mark
            self._forget_cancels(mark.read_to)

    def _forget_cancels(self, read_to: int) -> None:
        """Forget keys that have ended, if no owner can have missed the end."""
        standings = self._state.standings
        while self._cancels:
            key, offset = self._cancels[0]
            standing = standings.get(key)
            if standing is not None and standing.seen.offset == offset:
                if offset >= read_to or not is_forgettable(standing, read_to):
                    return
                del standings[key]
            self._cancels.popleft()

    # --- from a checkpoint --------------------------------------------------------------------------------

    def begin(self, checkpoint: Checkpoint) -> None:
        """Begin to restore a checkpoint, whose far messages are restored already.

        The caller must then read the records at the offsets of the checkpoint, in order.
        """
        self._checkpoint = checkpoint

    def go_on(self) -> None:
        """Finish restoring a checkpoint, after all of its records that still exist have been read."""
        checkpoint, self._checkpoint = self._checkpoint, None
        assert checkpoint is not None
        state = self._state
        state.read_to, state.edge_ms = checkpoint.read_to, checkpoint.edge_ms
        state.mark, state.ended_at = checkpoint.mark, checkpoint.ended_at
        state.partitions, self._placement.is_mixed = checkpoint.partitions, checkpoint.is_mixed
        self._remember("", Memory(checkpoint.answers))
        for message_id, version in checkpoint.versions.items():
            self._remember(message_id, Memory(version=version))

    # --- far messages -------------------------------------------------------------------------------------

    def _read_far(self, read: Read, glance: Glance) -> bool:
        """Note a far message without decoding it. Return False if the caller must read the record in the usual way."""
        key, read_to, state = read.key, glance.read_to, self._state
        assert key is not None
        change = self._changes.held_back.get(key)
        if key in state.standings or (
            change is not None and (change.entry is not None or change.offset != read.offset)
        ):
            return False
        if self._table.leased and records.id_of(key) in self._table.leased:
            return False
        if read_to is None and self._table.answers.by_op.is_any and self.has_answered(records.op_of(read.headers)):
            return False
        if read_to is not None:
            standing = after(state.standing(key), Seen(read.offset, is_put=True, read_to=read_to))
            if standing.seen.offset != read.offset:
                return False
        if not read.offset % STRAY_SAMPLE:
            self._placement.note_stray(key)
        state.far.put(key, glance.place_ms, read.offset, glance.lane, is_users=read_to is None)
        if change is not None:
            change.counted = True
        if read_to is not None:
            self._forget_cancels(read_to)
            self._remember(records.id_of(key), records.memory_of(read.headers))
        return True

    def come_near(self, read: Read) -> Entry | None:
        """Decode a far message, put it into the table, and return its entry.

        Return None if its record is not the standing record of its key any more, or cannot be decoded.
        """
        assert read.key is not None
        row = self._state.far.find(read.key)
        if row is None or row.offset != read.offset:
            return None
        self._state.far.remove(read.key)
        glance = records.glance(read.key, read.value, read.headers)
        seen = Seen(read.offset, is_put=True, read_to=glance.read_to)
        self._state.standings.setdefault(read.key, Precedence(seen))
        self.take_in(read, read.key, glance)
        return self._table.find(records.id_of(read.key))
