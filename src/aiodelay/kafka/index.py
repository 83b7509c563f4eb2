"""What is pending in one partition: the reference store's tables, fed by the partition's records alone.

Claims, leases, fairness and `Late` policies are those of the memory store. What differs is who may change a message:
nothing here does until the change has been written to the partition and read back. A settlement, or a message that has
become late, makes a `Change`; the message stays out of everyone's reach until its record comes back, or the session
ends without it.

Nothing here waits or touches the network.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple, cast

from msgspec import Struct
from msgspec.structs import replace

from aiodelay.clock import Clock
from aiodelay.errors import RecordFormatError, TargetNotAllowedError
from aiodelay.memory.claims import Claims
from aiodelay.memory.commands import Commands
from aiodelay.memory.looking import Looking
from aiodelay.memory.tables import Worker
from aiodelay.memory.waiting import Entry, Waiting
from aiodelay.memory.waiting import Standing as Place
from aiodelay.model import (
    MAX_CLAIM_MESSAGES,
    RETRY_WINDOW_MS,
    TOMBSTONE_WINDOW_MS,
    Cancel,
    Command,
    DeadKey,
    DeadLetter,
    DeadReason,
    Demand,
    Envelope,
    Fire,
    JournalEntry,
    Lane,
    LaneCounts,
    LaneState,
    Outcome,
    Put,
    PutBack,
    Query,
    Record,
    Refused,
    Reschedule,
    Settlement,
    SettleOutcome,
    Snapshot,
    Stored,
    Tidied,
)
from aiodelay.transitions import NO_OP, as_occurrence, first_answer, occurrence_of, record_of

from . import records
from .checkpoint import Checkpoint
from .client import Outgoing
from .far import Far
from .mark import Mark
from .pace import OVERDUE_MS, PAUSE_MS, Pace
from .records import Glance, Headers, Kind, Memory, Wire
from .standing import Seen, Standing, after, is_forgettable, is_unread

__all__ = ["Change", "Due", "Index", "Read"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")


MOST_NOTES = 10_000
"""Most entries of the history that wait while its topic takes nothing."""
EVERYTHING = Query(limit=1000)
STRAY_SAMPLE = 64
"""Of what is far, one key in so many is looked at, whether it stands in its own partition: that takes long."""


class Read(NamedTuple):
    """A record as it was read; aiokafka's own stands for one as well."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class Due(NamedTuple):
    """What is due in a lane.

    Attributes:
        entries: Messages to move, by key.
        size: Their bytes.
        series: Recurring ones.
        unknown: Addresses of which nothing is known.
    """

    entries: list[tuple[bytes, Entry]]
    size: int
    series: list[Record]
    unknown: set[str]


class Change(Struct, eq=False, gc=False):
    """What is to be written of one key, decided when everything below `read_to` had been read.

    Attributes:
        put: The message as it goes on, and its place; None: it ends.
        letters: Dead letters that are written with it.
        others: Further messages that are put with it: an occurrence beside its series, or the reverse.
        memory: What is to be remembered although its record is gone.
        targets: Records for other topics, in the same transaction.
        purged: A dead letter that ends with it.
        asked: The key of what was left to the owner, which ends with it.
        entry: What it is about, held back meanwhile; None: nothing in the tables.
        is_users: It ends as if a user had cancelled it, and counts whatever was written meanwhile.
        offset: Of its last record, once it is written.
        counted: It was read, and counted.
        refusal: Why Kafka does not take it.
        is_too_large: Since the partition has no room for a record of it.
        notes: What the history is told of it.
        is_written: True once it was read, False once it is known not to have been written.
        waiter: Who waits for that.
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
        """Return what is to be remembered, to add to it."""
        if self.memory is None:
            self.memory = Memory()
        return self.memory

    @property
    def is_end(self) -> bool:
        """Whether all that it writes of its key's partition is a tombstone."""
        is_end = self.put is None and not self.is_users and bool(self.key)
        return is_end and not (self.letters or self.others or self.purged or self.asked)

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


class _Asked(Struct, gc=False):
    """What a user has left to the owner: a put that counts unless a message stands, a cancel of what stands so.

    Attributes:
        offset: Where it was read.
        what: It asks for.
        is_over: A user has put or cancelled the message since, and wins.
        change: What was decided of it.
    """

    offset: int
    what: Put | PutBack | Cancel
    is_over: bool = False
    change: Change | None = None


class Index(Commands, Claims, Looking):
    """One partition's messages.

    Args:
        clock: Where the time is read.
        name: The topic and partition, for logs.
        claims: Numbers for claims.
        pace: How fast what is overdue leaves, shared by all partitions of a store.
        keeps_history: Note what becomes of messages.
        far: What is far already.
    """

    read_to: int = 0
    """Everything below this offset has been read."""
    partitions: int | None = None
    """How many the topic had when its first owner looked."""
    mark: Mark = Mark()
    """What an owner has told that is finished."""
    _ended_at: int = -1
    place: tuple[int, int] = 0, 1
    """The partition's number, and how many the topic has."""
    schedules: Collection[str] = ()
    """The topics that hold the store's schedules: a message to one of them would come back."""
    guard: Callable[[str], object] | None = None
    """Refuses a destination that what others write may not go to."""
    is_mixed: bool = False
    """Keys stand here that should stand in another partition."""
    near_until_ms: int = 1 << 62
    """What is due later is only noted, in `far`."""
    edge_ms: int = 0
    """Nothing that is far is due before this."""

    def __init__(
        self,
        *,
        clock: Clock,
        name: str,
        claims: count[int],
        pace: Pace | None = None,
        keeps_history: bool = False,
        far: Far | None = None,
    ) -> None:
        super().__init__(clock=clock)
        self._pace = pace or Pace(0)
        self.name: str = name
        self._claims, self._keeps_history = claims, keeps_history
        self.notes: deque[JournalEntry] = deque(maxlen=MOST_NOTES)  # of what changes nothing; or that wait
        self.changes: deque[Change] = deque()
        self._standings: dict[bytes, Standing] = {}
        self._cancels: deque[tuple[bytes, int]] = deque()
        self._hidden: dict[bytes, None] = {}
        self._bad: dict[bytes, tuple[Read, str]] = {}
        self._over: dict[bytes, None] = {}  # what stands, and is to be ended by its owner
        self._asked: dict[bytes, _Asked] = {}
        self._kept_at: dict[bytes, int] = {}  # where holds and dead letters stand
        self._checkpoint: Checkpoint | None = None  # while it is taken up
        self._change: Change | None = None
        self._held_back: dict[bytes, Change] = {}
        self._under_way: dict[Change, None] = {}
        self._graves: list[DeadLetter] = []  # of a message that the tables are about to end
        self.far: Far = Far() if far is None else far
        self._backlog: defaultdict[Lane, Waiting] = defaultdict(lambda: Waiting(_is_in_lane))
        self._released: set[Entry] = set()
        self._raised: set[str] = set()  # ids of messages whose revision is not what their record says
        self._without_traceback: set[DeadKey] = set()  # dead letters that were too large with it

    def emptied(self, far: Far) -> Index:
        """Return one that has read nothing but what is far, for the same workers."""
        index = Index(
            clock=self._clock,
            name=self.name,
            claims=self._claims,
            pace=self._pace,
            keeps_history=self._keeps_history,
            far=far,
        )
        index._workers, index.notes = self._workers, self.notes
        index._without_traceback = self._without_traceback
        index.place, index.schedules, index.guard = self.place, self.schedules, self.guard
        return index

    # --- reading ------------------------------------------------------------------------------------------

    def read(self, read: Read) -> None:
        """Take in the partition's next record."""
        self.read_to = read.offset + 1
        if read.value is None and read.key is not None and self._read_own_end(read.key, read.offset):
            return
        glance = records.glance(read.key, read.value, read.headers)
        if glance.lane and glance.place_ms > self.near_until_ms and self._read_far(read, glance):
            return
        if read.key is None or not records.is_plain(read.key):
            self._read_special(read, read.key, glance)
        else:
            self._read_message(read, read.key, glance)

    def _read_special(self, read: Read, key: bytes | None, glance: Glance) -> None:
        """Take in what has no key, or one that no message of a user's can have."""
        if key is None or glance.kind is Kind.BAD:
            log.warning("%s, offset %d: %s; skipped", self.name, read.offset, glance.problem)
        elif glance.kind is Kind.DEAD:
            self._keep_at(key, read)
            self._read_dead(read, key)
        elif glance.kind is Kind.BARRIER:
            self._forget_cancels(read.offset)
        elif glance.kind is Kind.INTAKE:
            pass  # `Positions` reads it, for whoever takes in
        elif glance.kind is Kind.PARTITIONS:
            self.partitions = records.partitions_in(read.value)
        elif glance.kind is Kind.MARK:
            self._read_mark(records.mark_of(read.value))
        elif glance.kind is Kind.HOLD:
            self._keep_at(key, read)
            change_hold = self._release if read.value is None else self._hold
            change_hold(*cast("tuple[Lane, str | None]", records.held_in(key)))
        elif key.startswith(records.KEEP):
            self._read_asked(read, key.removeprefix(records.KEEP), glance)
        else:
            self._read_message(read, key, glance)

    def read_own(self, changes: Iterable[Change]) -> None:
        """Take in what was decided here and committed, without reading it, as far as nothing else is to be read first.

        Args:
            changes: A transaction's, in their order.
        """
        for change in changes:
            if change.offset != self.read_to or not change.is_end or not self._read_own_end(change.key, change.offset):
                return
            self.read_to += 1

    def _keep_at(self, key: bytes, read: Read) -> None:
        if read.value is None:
            self._kept_at.pop(key, None)
        else:
            self._kept_at[key] = read.offset

    def _read_asked(self, read: Read, key: bytes, glance: Glance) -> None:
        """Take in what is left to the owner, or its end; an owner's puts back what had left."""
        read_to = glance.read_to
        if read.value is None:
            if key in self._asked and (read_to is None or self._asked[key].offset < read_to):
                del self._asked[key]
            return
        try:
            what: Put | PutBack | Cancel | None
            if read_to is not None:
                what = records.asked_back(key, read.value, read.headers, place_ms=glance.place_ms)
            elif (what := records.asked_cancel(key, read.headers)) is None:
                what = records.kept_put(key, read.value, read.headers, written_ms=read.timestamp)
        except RecordFormatError as error:
            log.warning("%s, offset %d: a put unless one stands %s; skipped", self.name, read.offset, error.problem)
        else:
            self._asked[key] = _Asked(read.offset, what)

    def _read_own_end(self, key: bytes, offset: int) -> bool:
        """Take in what this index has decided itself, a message's end, if it counts: all that it says is known."""
        change = self._held_back.get(key)
        if change is None or change.offset != offset or change.is_users or change.entry is None:
            return False
        entry, standing = change.entry, self._standings.get(key)
        if (
            standing is None
            or is_unread(standing.seen, change.read_to)
            or self._entries.get(entry.record.id) is not entry
        ):
            return False
        change.counted = True
        del self._standings[key]  # nothing need be known of what an owner has ended
        self._hidden.pop(key, None)
        super()._take_out(entry)
        self._ended_at = offset
        self._forget_cancels(change.read_to)
        self._remember(entry.record.id, change.memory)  # also if whoever asked for it waits no more
        return True

    def _read_message(self, read: Read, key: bytes, glance: Glance) -> None:
        is_put = glance.kind is not Kind.END
        standing = after(self._standing(key), Seen(read.offset, is_put, glance.read_to))
        counts = standing.seen.offset == read.offset
        self._standings[key] = standing
        if glance.read_to is None and key in self._asked:
            self._asked[key].is_over = True
        self._hidden.pop(key, None)
        if standing.hidden_at is not None:
            self._hidden[key] = None
        if counts:
            if (change := self._held_back.get(key)) is not None and change.offset == read.offset:
                change.counted = True
            self._bad.pop(key, None)
            self._over.pop(key, None)
            self.far.remove(key)
            if is_put:
                self._take_in(read, key, glance)
            else:
                self._ended_at = read.offset
                self._let_go(records.id_of(key), is_users=glance.read_to is None)
                self._cancels.append((key, read.offset))
        if glance.read_to is not None:
            self._forget_cancels(glance.read_to)
        if glance.read_to is not None or not is_put:  # an owner's; it also cancels
            self._remember(records.id_of(key), records.memory_of(read.headers), counts=counts)
        if standing.hidden_at == read.offset:
            self._end_repeated(key)

    def _end_repeated(self, key: bytes) -> None:
        """End what a user has put a second time, unread by an owner that tells that it has ended."""
        entry, seen = self._entries.get(records.id_of(key)), self._standings[key].seen
        if entry is None or entry.token or seen.read_to is not None or not self._has_answered(entry.record.op):
            return
        self._over[key] = None
        super()._take_out(entry)

    def _remember(self, message_id: str, memory: Memory | None, *, counts: bool = True) -> None:
        """Remember what a record tells of what is gone; if it does not count, not the answer to its own command."""
        if memory is None:
            return
        now = self.now_ms()
        for op, answer, revision, due_ms, until_ms in memory.answers:
            is_so = counts or answer == "stored"
            if is_so and until_ms > now and self._answers.get(bytes.fromhex(op), now) is None:
                stored = Stored(cast("Any", answer), revision, due_ms)
                self._answers.add(bytes.fromhex(op), stored, until_ms=until_ms)
        if memory.version is not None and memory.version[1] > now:
            newest = max(memory.version[0], self._tombstones.get(message_id, now) or 0)
            self._tombstones.add(message_id, newest, until_ms=memory.version[1])

    def _take_in(self, read: Read, key: bytes, glance: Glance) -> None:
        try:
            if glance.problem:
                raise RecordFormatError(glance.problem)  # noqa: TRY301 - one way for both kinds of bad records
            assert read.value is not None
            record = records.decode(key, read.value, read.headers, written_ms=read.timestamp)
            self._check_address(record.envelope, is_users=glance.read_to is None)
        except RecordFormatError as error:
            log.warning("%s, offset %d: %s; it is kept as a dead letter", self.name, read.offset, error.problem)
            self._let_go(records.id_of(key), is_users=True)
            self._bad[key] = read, error.problem
            return
        self._look_for_strays(key)
        old = self._entries.get(record.id)
        self._raised.discard(record.id)
        if self._checkpoint is not None:
            if read.offset in self._checkpoint.repeated:
                self._over[key] = None
                return
            if (revision := self._checkpoint.revisions.get(read.offset)) is not None:
                record = replace(record, revision=revision)
                self._raised.add(record.id)
        elif glance.read_to is None and record.op != NO_OP:
            if old is not None and old.record.op == record.op:
                self._raised.add(record.id)
                return  # sent again, because its first answer was lost
            if old is None and self._has_answered(record.op):
                self._over[key] = None  # and it has ended since
                return
        if glance.read_to is not None and self._was_written_late(record.id, glance.read_to):
            self._over[key] = None
            return
        if old is not None and glance.read_to is None:
            self._end_retries_of(record.id, is_replaced=True)
            if record.revision <= old.record.revision:  # two of one ms, or of a clock that is behind
                record = replace(record, revision=old.record.revision + 1)
                self._raised.add(record.id)
            self._supersede(old)
        self._insert(record, glance.place_ms)

    def _end_retries_of(self, series_id: str, *, is_replaced: bool) -> None:
        """End the retries of a series that a user has replaced or cancelled, without asking its owner.

        The owner writes their ends. A retry in flight that was cancelled is left to its claim, for the last time.
        """
        for each in list(self._occurrences.get(series_id, ())):
            entry, key = self._entries[each], records.key_of(each)
            if entry.record.no_retry and not is_replaced:
                continue  # that is written already
            self._over[key] = None
            if entry.token and not is_replaced:
                entry.record = replace(entry.record, no_retry=True)
            else:
                self._supersede(entry)
                super()._take_out(entry)

    def _was_written_late(self, message_id: str, read_to: int) -> bool:
        """Say whether this is a retry that its owner wrote before it had read that a user has replaced the series."""
        occurrence = occurrence_of(message_id)
        series = None if occurrence is None else self._standing(records.key_of(occurrence[0]))
        return series is not None and is_unread(series.seen, read_to)

    def _check_address(self, envelope: Envelope, *, is_users: bool) -> None:
        if envelope.lane == records.SINK and envelope.address in self.schedules:
            raise RecordFormatError(f"it goes to {envelope.address}, which holds schedules: there it would come back")
        if self.guard is not None and is_users and envelope.address:
            try:
                self.guard(f"{envelope.lane}:{envelope.address}")
            except TargetNotAllowedError as error:
                raise RecordFormatError(str(error)) from error

    def _let_go(self, message_id: str, *, is_users: bool) -> None:
        """End a message; what a user cancels in flight is delivered this once, and never again."""
        entry = self._entries.get(message_id)
        if entry is None:
            return
        if is_users:
            self._end_retries_of(message_id, is_replaced=False)
        if is_users and entry.token:
            entry.record = replace(entry.record, no_retry=True)
        else:
            self._take_out(entry)

    def _read_dead(self, read: Read, key: bytes) -> None:
        if read.value is None:
            self._dead.remove(records.dead_key_of(key))
            return
        try:
            letter = records.decode_dead(key, read.value, read.headers)
        except RecordFormatError as error:
            log.warning("%s, offset %d: a dead letter %s; skipped", self.name, read.offset, error.problem)
        else:
            self._dead.add(letter)

    def _read_mark(self, mark: Mark) -> None:
        if mark.is_beyond(self.mark):
            self.mark = mark
            self._forget_cancels(mark.read_to)

    def _forget_cancels(self, read_to: int) -> None:
        """Forget keys that have ended, as far as no owner can have missed it."""
        while self._cancels:
            key, offset = self._cancels[0]
            standing = self._standings.get(key)
            if standing is not None and standing.seen.offset == offset:
                if offset >= read_to or not is_forgettable(standing, read_to):
                    return
                del self._standings[key]
            self._cancels.popleft()

    # --- checkpoints --------------------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """Return what this index knows of what has been read, beside what is far."""
        now, standings = self.now_ms(), self._standings
        offsets = [standing.seen.offset for standing in standings.values()]
        offsets += [at for key in self._hidden if (at := standings[key].hidden_at) is not None]
        offsets += [asked.offset for asked in self._asked.values()]
        offsets += self._kept_at.values()
        raised = [(standings.get(records.key_of(each)), self._entries.get(each)) for each in self._raised]
        return Checkpoint(
            sorted(offsets),
            self.edge_ms,
            self.mark,
            self._ended_at,
            self.partitions,
            self.is_mixed,
            {standings[key].seen.offset for key in self._over},
            {
                standing.seen.offset: entry.record.revision
                for standing, entry in raised
                if entry is not None and standing is not None and standing.seen.is_put
            },
            [
                (op.hex(), stored.answer, stored.revision, stored.due_ms, until_ms)
                for op, stored, until_ms in self._answers.items(now)
                if isinstance(stored, Stored)
            ],
            {message_id: (version, until_ms) for message_id, version, until_ms in self._tombstones.items(now)},
        )

    def begin(self, checkpoint: Checkpoint) -> None:
        """Begin to take up a checkpoint, with what is far already: its records are to be read next, in order, whole."""
        self._checkpoint = checkpoint

    def go_on(self) -> None:
        """Go on from the checkpoint, all of whose records have been read that are still there."""
        checkpoint, self._checkpoint = self._checkpoint, None
        assert checkpoint is not None
        self.read_to, self.edge_ms = checkpoint.read_to, checkpoint.edge_ms
        self.mark, self._ended_at = checkpoint.mark, checkpoint.ended_at
        self.partitions, self.is_mixed = checkpoint.partitions, checkpoint.is_mixed
        self._remember("", Memory(checkpoint.answers))
        for message_id, version in checkpoint.versions.items():
            self._remember(message_id, Memory(version=version))

    # --- what is far --------------------------------------------------------------------------------------

    def _read_far(self, read: Read, glance: Glance) -> bool:
        """Note a message that is due later and of which nothing else is known; say whether that is all to be done."""
        key, read_to = read.key, glance.read_to
        assert key is not None
        change = self._held_back.get(key)
        if key in self._standings or (
            change is not None and (change.entry is not None or change.offset != read.offset)
        ):
            return False
        if self._leased and records.id_of(key) in self._leased:
            return False
        if read_to is None and self._answers.is_any and self._has_answered(records.op_of(read.headers)):
            return False
        if read_to is not None:
            standing = after(self._standing(key), Seen(read.offset, is_put=True, read_to=read_to))
            if standing.seen.offset != read.offset:
                return False
        if not read.offset % STRAY_SAMPLE:
            self._look_for_strays(key)
        self.far.put(key, glance.place_ms, read.offset, glance.lane, is_users=read_to is None)
        if change is not None:
            change.counted = True
        if read_to is not None:
            self._forget_cancels(read_to)
            self._remember(records.id_of(key), records.memory_of(read.headers))
        return True

    def _look_for_strays(self, key: bytes) -> None:
        """Take note, once, of a key that stands in a partition that is not its own; it is delivered from here."""
        number, partitions = self.place
        if partitions > 1 and not self.is_mixed and (own := records.partition_of(key, partitions)) != number:
            self.is_mixed = True
            log.warning(
                "%s: message %s stands here, and its own partition is %d: who wrote it has another partitioner than "
                "Java's. What is written of one id must go to one partition, to replace and cancel what was before",
                self.name,
                records.id_of(key),
                own,
            )

    def _has_answered(self, op: bytes) -> bool:
        return self._answers.get(op, self.now_ms()) is not None

    def _standing(self, key: bytes) -> Standing | None:
        standing = self._standings.get(key)
        if standing is None and (row := self.far.find(key)) is not None:
            return Standing(Seen(row.offset, is_put=True, read_to=None if row.is_users else row.offset))
        return standing

    def look_ahead(self, until_ms: int) -> None:
        """Hold whole what is due until then, from now on."""
        self.edge_ms = min(self.edge_ms, until_ms) if self.far else until_ms
        self.near_until_ms = until_ms

    def come_near(self, read: Read) -> None:
        """Take in whole what is far, if it still stands."""
        assert read.key is not None
        row = self.far.find(read.key)
        if row is None or row.offset != read.offset:
            return
        self.far.remove(read.key)
        glance = records.glance(read.key, read.value, read.headers)
        self._standings.setdefault(read.key, Standing(Seen(read.offset, is_put=True, read_to=glance.read_to)))
        self._take_in(read, read.key, glance)
        entry = self._entries.get(records.id_of(read.key))
        if entry is not None and self.mark.covers(read.offset, entry.place_ms):
            self._set_aside(read.key, entry)

    def put_off(self) -> None:
        """Only note what is whole although it is due later."""
        self._raised &= self._entries.keys()
        for entry in list(self._entries.values()):
            record, key = entry.record, records.key_of(entry.record.id)
            standing = self._standings.get(key)
            if (
                entry.standing is Place.IN_LANE
                and entry.place_ms > self.near_until_ms
                and record.envelope.rule is None
                and occurrence_of(record.id) is None
                and record.id not in self._raised
                and key not in self._held_back
                and standing is not None
                and standing.hidden_at is None
            ):
                is_users = standing.seen.read_to is None
                self.far.put(key, entry.place_ms, standing.seen.offset, record.envelope.lane, is_users=is_users)
                del self._standings[key]
                super()._take_out(entry)

    def peek(self, read: Sequence[Read], query: Query = EVERYTHING) -> list[Snapshot]:
        """Return what is far, among records that were read again, and within a query's bounds."""
        found = []
        for each in read:
            assert each.key is not None
            assert each.value is not None
            row = self.far.find(each.key)
            if row is None or row.offset != each.offset:
                continue
            glance = records.glance(each.key, each.value, each.headers)
            try:
                record = records.decode(each.key, each.value, each.headers, written_ms=each.timestamp)
            except RecordFormatError:
                continue  # it becomes a dead letter once it is near
            found.append(self._snapshot(Entry(record, glance.place_ms, 0), self.now_ms()))
        return [each for each in found if _is_in(each, query)]

    def with_far(self, counted: Mapping[Lane, LaneCounts]) -> Mapping[Lane, LaneCounts]:
        """Add what is far to counts of what is near."""
        now, found = self.now_ms(), dict(counted)
        for lane, n in self.far.by_lane.items():
            if n:
                here = found.get(lane) or LaneCounts(read_by_nobody=not self._is_served(lane, now))
                is_held = self._lanes[lane].is_held
                found[lane] = (
                    replace(here, held=here.held + n) if is_held else replace(here, scheduled=here.scheduled + n)
                )
        return found

    # --- looking at all of it -----------------------------------------------------------------------------

    def pending_messages(self) -> Iterator[Snapshot]:
        """Yield what an owner that has read so far would deliver, near and whole; in no order.

        What cannot be read is salvaged, as it becomes a dead letter; what had ended and has come back is left out.
        """
        now = self.now_ms()
        for entry in self._entries.values():
            standing = self._standings.get(records.key_of(entry.record.id))
            if standing is None or not self.mark.covers(standing.seen.offset, entry.place_ms):
                yield self._snapshot(entry, now)
        for read, problem in self._bad.values():
            record = self._unreadable(read, f"cannot be read: {problem}")
            yield self._snapshot(Entry(record, record.due_ms, 0), now)
        for key, asked in self._asked.items():
            message_id = records.id_of(key)
            if not isinstance(asked.what, Cancel) and not asked.is_over and message_id not in self._entries:
                yield self._snapshot(_as_asked(asked.what), now)

    def letters(self) -> Iterator[DeadLetter]:
        """Yield dead letters, in no order."""
        return iter(self._dead)

    def remembered_versions(self) -> dict[str, tuple[int, int]]:
        """Return the versions of what has ended, each with until when it is to be remembered, epoch ms."""
        return {each: (version, until_ms) for each, version, until_ms in self._tombstones.items(self.now_ms())}

    # --- what has come back -------------------------------------------------------------------------------

    def next_mark(self) -> Mark | None:
        """Return what is finished by now; None if that is no more than was told last."""
        if not self.has_ended:
            return None
        waiting = [entry for lane in self._lanes.values() for entry in lane.foremost()]
        waiting += self._leased.values()
        waiting += [] if (overdue := self._overdue()) is None else [overdue]
        waiting += [change.entry for change in self._under_way if change.entry is not None]
        until_ms = min((entry.place_ms - 1 for entry in waiting), default=self.now_ms())
        if self.far:
            until_ms = min(until_ms, self.edge_ms - 1)
        mark = Mark(min(until_ms, self.now_ms()), self.read_to)
        return mark if mark.is_beyond(self.mark) else None

    @property
    def has_ended(self) -> bool:
        """Whether something has ended since the last mark."""
        return self._ended_at >= self.mark.read_to

    def quarantine(self) -> None:
        """Make dead letters of messages that have ended already, but stand in the partition again."""
        for key, standing in self._standings.items():
            entry = self._entries.get(records.id_of(key)) if standing.seen.offset < self.mark.read_to else None
            if entry is not None and self.mark.covers(standing.seen.offset, entry.place_ms):
                self._set_aside(key, entry)

    def _set_aside(self, key: bytes, entry: Entry) -> None:
        log.error("%s: message %s had ended, and has come back: it becomes a dead letter", self.name, entry.record.id)
        change = Change(key, self.read_to, entry)
        self._give_up(change, entry.record, "resurrected")
        change.outcome = "resurrected"
        self._leased.pop(entry.record.id, None)
        self._reserve(entry)
        self._offered(change)

    # --- claims -------------------------------------------------------------------------------------------

    def tidy(self, worker: Worker, lanes: Collection[Lane], limit: int) -> Tidied:
        """Do a step of housekeeping."""
        tidied = super().tidy(worker, lanes, limit)
        listed = {state.lane for state in tidied.lanes}
        far = [lane for lane, n in self.far.by_lane.items() if n and lane not in listed]
        return replace(tidied, lanes=[*tidied.lanes, *(self._lane_state(lane, tidied.now_ms) for lane in far)])

    def add_worker(self, worker: Worker) -> None:
        """Count a worker as alive."""
        self._workers.add(worker)

    def remove_worker(self, worker: Worker) -> None:
        """Forget a worker."""
        self._workers.discard(worker)

    # --- catching up --------------------------------------------------------------------------------------

    def _first_due(self, lanes: Sequence[Lane], now: int) -> Entry | None:
        if not self._pace.rate:
            return super()._first_due(lanes, now)
        self._let_go_overdue(now)
        while (entry := super()._first_due(lanes, now)) is not None and self._is_held_up(entry, now):
            lane = entry.record.envelope.lane
            self._lanes[lane].take_first()
            self._backlog[lane].push(entry.place_ms, entry)
        return entry

    def _is_held_up(self, entry: Entry, now: int) -> bool:
        """Say whether a message is overdue, and its turn has not come."""
        return entry.place_ms < now - OVERDUE_MS and entry not in self._released

    def _let_go_overdue(self, now: int) -> None:
        """Return what is overdue to its lane, oldest first, as many as the pace allows."""
        first = self._overdue()
        if first is None:
            return
        self._released = {entry for entry in self._released if entry.standing is Place.IN_LANE}
        left = self._pace.take(now)
        while left and first is not None:
            lane = first.record.envelope.lane
            self._backlog[lane].pop()
            self._lanes[lane].add(first)
            self._released.add(first)
            left, first = left - 1, self._overdue()
        self._pace.give_back(left)

    def _overdue(self) -> Entry | None:
        found = (entry for backlog in self._backlog.values() if (entry := backlog.first()) is not None)
        return min(found, key=lambda entry: entry.order, default=None)

    def _next_due_ms(self, demand: Mapping[Lane, Demand]) -> int | None:
        due_ms, first = super()._next_due_ms(demand), self._overdue()
        if first is None:
            return due_ms
        again_ms = self.now_ms() + PAUSE_MS
        return again_ms if due_ms is None else min(due_ms, again_ms)

    def _lane_state(self, name: Lane, now: int) -> LaneState:
        state, first = super()._lane_state(name, now), self._backlog[name].first()
        return state if first is None else replace(state, oldest_due_ms=min(state.oldest_due_ms or now, first.place_ms))

    # --- moving -------------------------------------------------------------------------------------------

    def due(self, lane: Lane, demand: Demand, known: Container[str]) -> Due:
        """Look at what is due in a lane; what is to be moved is taken out of it, and the caller ends it.

        Args:
            lane: A sink's.
            demand: Most messages and bytes.
            known: Addresses of which it is known that they take messages; messages for others stay.
        """
        now, queue = self.now_ms(), self._lanes[lane]
        self._return_lapsed(now, MAX_CLAIM_MESSAGES)
        lanes, taken = (lane,), 0
        entries, aside = list[tuple[bytes, Entry]](), list[Entry]()
        series, unknown = list[Record](), set[str]()
        while len(entries) + len(aside) < demand.messages and (entry := self._first_due(lanes, now)) is not None:
            record, envelope = entry.record, entry.record.envelope
            size = envelope.size
            if entries and taken + size > demand.max_bytes:
                break
            queue.take_first()
            key = records.key_of(envelope.id)
            if key in self._held_back:
                aside.append(entry)  # what was written of its id before has not been read yet
            elif envelope.address not in known:
                unknown.add(envelope.address)
                aside.append(entry)
            elif envelope.rule is not None:
                series.append(record)
                aside.append(entry)
            else:
                entries.append((key, entry))
                taken += size
        for entry in aside:
            queue.add(entry)
        return Due(entries, taken, series, unknown)

    def move(self, key: bytes, entry: Entry, target: Outgoing, now: int) -> Change:
        """Decide that a message ends which `due` has just taken out, because it is moved."""
        record = entry.record
        change = self._change = Change(key, self.read_to, entry)
        change.targets = (target,)
        try:
            change.outcome = "delivered"
            self._reserve(entry)
            self._note(change.outcome, record, now)
            self._forget(record, now)
        finally:
            self._change = None
        self._held_back[change.key] = change
        self._begin(change)
        return change

    def series_at(self, settlement: Settlement) -> Entry | None:
        """Return a series that still stands at the due occurrence which a settlement ends."""
        entry = self._entries.get(settlement.id)
        if entry is None or entry.standing is not Place.IN_LANE or entry.record.envelope.rule is None:
            return None
        record, queue = entry.record, self._lanes[entry.record.envelope.lane]
        is_same = (record.revision, record.due_ms) == (settlement.revision, settlement.token)
        return entry if is_same and not queue.holds(entry) and not queue.parks(entry) else None

    def end(self, entry: Entry, settlement: Settlement) -> Change | None:
        """Decide how a message ends that is due and not leased; None: it is changed, or gone, already."""
        if self._entries.get(entry.record.id) is not entry or entry.standing is not Place.IN_LANE:
            return None
        self._reserve(entry)
        return self.settle(settlement)[1]

    def end_instead(self, change: Change, settlement: Settlement) -> Change | None:
        """Decide how a message ends whose move cannot be written, in its place; None: it is changed, or gone, already.

        Args:
            change: The move, which nobody writes any more.
            settlement: How it ends.
        """
        self._let_off(change)
        entry = change.entry
        if entry is None or self._entries.get(entry.record.id) is not entry:
            return None
        return self.settle(settlement)[1]

    def next_due_ms(self, lane: Lane) -> int | None:
        """Return when something of a lane may be moved."""
        return self._next_due_ms({lane: Demand(1)})

    def block(self, lane: Lane, addresses: AbstractSet[str]) -> None:
        """Say which addresses of a lane take nothing now."""
        self._lanes[lane].block(addresses)

    def blocked(self) -> Counter[tuple[Lane, str]]:
        """Count the messages for addresses that take nothing."""
        found: Counter[tuple[Lane, str]] = Counter()
        for name, lane in self._lanes.items():
            if lane.blocked:
                lane.first()  # which sets aside what has been put since
                found.update({(name, address): len(lane.parked(address)) for address in lane.blocked})
        return +found

    def drop_stale(self, change: Change) -> bool:
        """Drop a move of what a user has replaced or cancelled before its transaction began; say whether it was."""
        if not self.is_stale(change):
            return False
        self._let_off(change)
        return True

    @staticmethod
    def is_stale(change: Change) -> bool:
        """Say whether a change moves what a user has replaced or cancelled."""
        return bool(change.targets) and change.entry is not None and change.entry.standing is Place.GONE

    # --- changes ------------------------------------------------------------------------------------------

    def _reserve(self, entry: Entry) -> None:
        """Take an entry out of its lane, or from beside it, while its change is written."""
        if entry.standing is Place.PARKED:
            self._lanes[entry.record.envelope.lane].unpark(entry)
        entry.standing = Place.LEASED

    def knows(self, message_id: str, op: bytes = NO_OP) -> bool:
        """Say whether a message stands here, or a command's answer is remembered here."""
        is_here = message_id in self._entries or self.is_far(message_id)
        return is_here or self._has_answered(op)

    @property
    def pending(self) -> int:
        """How many messages stand here, near and far."""
        return len(self._entries) + len(self.far)

    def is_far(self, message_id: str) -> bool:
        """Say whether a message is only noted."""
        return self.far.find(records.key_of(message_id)) is not None

    def keeps(self, key: DeadKey) -> bool:
        """Say whether a dead letter stands here."""
        return self._dead.get(key) is not None

    def settle(self, settlement: Settlement) -> tuple[SettleOutcome, Change | None]:
        """Decide a settlement; what it changes is to be written, if anything."""
        entry = self._entries.get(settlement.id)
        key = records.key_of(settlement.id)
        if key in self._held_back and self._held_back[key].entry is entry:  # the same settlement is being written
            was_replaced = self._end_superseded(settlement.id, settlement.revision, settlement.token)
            return SettleOutcome.SUPERSEDED if was_replaced else SettleOutcome.GONE, None
        with self._changing(key, entry) as change:
            change.outcome = getattr(settlement, "outcome", "ended")
            outcome = self.settle_one(settlement)
        return outcome, self._offered(change) if outcome is SettleOutcome.SETTLED else None

    def command(self, command: Command) -> tuple[Outcome, Change | None]:
        """Decide a command; what it changes is to be written, if anything."""
        now, entry = self.now_ms(), self._entries.get(command.id)
        known = self._answers.get(command.op, now)
        if known is not None:
            return known, None
        if entry is not None and entry.record.op == command.op:
            return first_answer(entry.record), None
        with self._changing(records.key_of(command.id), entry) as change:
            match command:
                case Put():
                    outcome = self._put(command, entry, now)
                case Cancel():
                    outcome = self._cancel(command, entry, now)
                    if entry is not None and isinstance(outcome, Stored):
                        change.is_users = entry.token != 0
                        self._cancel_in_flight(command.id)
                case Reschedule():
                    outcome = self._reschedule(command, entry, now)
                case Fire():
                    outcome = self._fire(entry, now)
        if (
            not isinstance(outcome, Stored)
            or outcome.answer == "kept"
            or (change.put is None and isinstance(command, Put))
        ):
            self.answered(command, outcome)
            return outcome, None
        if entry is not None and not entry.token:
            self._reserve(entry)
        if outcome.answer != "stored":  # the record itself tells that one
            until_ms = now + RETRY_WINDOW_MS
            change.remembering().answers.append(
                (command.op.hex(), outcome.answer, outcome.revision, outcome.due_ms, until_ms)
            )
        return outcome, self._offered(change)

    def _cancel_in_flight(self, series_id: str) -> None:
        """Write that no retry follows of a series' occurrences that are in flight."""
        for each in self._occurrences.get(series_id, ()):
            entry = self._entries[each]
            if entry.token:
                self._offered(Change(records.key_of(each), self.read_to, entry, is_users=True))

    def redrive_one(self, key: DeadKey) -> tuple[Outcome, Change | None]:
        """Decide to give a dead letter a new life."""
        letter = self._dead.get(key)
        if letter is not None and _is_lost(letter.record.envelope):
            problem = f"{letter.record.last_error}; nothing tells where it goes: schedule it anew, and purge this"
            return Refused("undecodable", problem), None
        with self._changing(records.key_of(key.id), None) as change:
            outcome = self._redrive(key, self.now_ms())
        if letter is None or isinstance(outcome, Refused):
            return outcome, None
        self._dead.add(letter)  # until its tombstone is read
        change.purged = key
        return outcome, self._offered(change)

    def put_back_one(self, message: PutBack) -> tuple[Stored, Change | None]:
        """Decide to take a message back, unless one stands under its id, or it is a dead letter already."""
        is_dead = message.reason is not None
        with self._changing(b"" if is_dead else records.key_of(message.record.id), None) as change:
            stored = self._put_back(message, self.now_ms())
        if stored.answer == "kept":
            return stored, None
        if is_dead:
            self._begin(change)
            return stored, change
        return stored, self._offered(change)

    def purge_one(self, key: DeadKey) -> Change | None:
        """Decide to delete a dead letter, if there is one."""
        if not self.keeps(key):
            return None
        change = Change(b"", self.read_to, None)
        change.purged = key
        self._begin(change)
        return change

    def answered(self, command: Command, outcome: Outcome) -> None:
        """Remember the answer to a command whose change counted, for as long as it may be repeated."""
        if not (isinstance(outcome, Stored) and outcome.answer == "stored"):  # the record itself tells that one
            self._answers.add(command.op, outcome, until_ms=self.now_ms() + RETRY_WINDOW_MS)

    def change_of(self, message_id: str) -> Change | None:
        """Return the change of a message that is being written."""
        return self._held_back.get(records.key_of(message_id))

    def mend(self) -> None:
        """Make changes of what is hidden from the cleaner, and of what cannot be read."""
        for key in [*self._hidden, *self._bad, *self._over]:
            if key in self._held_back or self.far.find(key) is not None:
                continue
            entry = self._entries.get(records.id_of(key))
            if key in self._bad:
                change = Change(key, self.read_to, None)
                self._give_up(change, self._unreadable(*self._bad[key]), "undecodable")
            elif key in self._over:
                is_in_flight = entry is not None and entry.token != 0
                change = Change(key, self.read_to, entry if is_in_flight else None, is_users=is_in_flight)
            elif entry is not None and entry.token:
                continue  # its settlement does the same
            else:
                change = Change(key, self.read_to, entry)
                if self._standings[key].seen.is_put and entry is not None:
                    change.put = entry.record, entry.place_ms
                    self._reserve(entry)
            self._offered(change)
        for key, asked in self._asked.items():
            if asked.change is None and asked.is_over:
                asked.change = Change(b"", self.read_to, None, asked=key)
                self._under_way[asked.change] = None
                self.changes.appendleft(asked.change)  # else another owner may find it, and not who followed
            elif asked.change is None and key not in self._held_back and self.far.find(key) is None:
                asked.change = self._decided(key, asked.what)

    def _decided(self, key: bytes, what: Put | PutBack | Cancel) -> Change:
        """Carry out what was left to the owner; the tombstone of the question is the answer."""
        outcome, change = self.put_back_one(what) if isinstance(what, PutBack) else self.command(what)
        if change is None:
            change = Change(b"", self.read_to, None)
            self._begin(change)
        change.asked = key
        if isinstance(what, Cancel):
            change.outcome = outcome.answer if isinstance(outcome, Stored) else _reason(outcome)
        return change

    def _give_up(self, change: Change, record: Record, reason: DeadReason) -> None:
        self._change = change
        self._bury(record, reason, self.now_ms())
        self._change = None

    def _unreadable(self, read: Read, problem: str) -> Record:
        assert read.key is not None
        headers = dict(records.user_headers(read.headers))
        envelope = Envelope(records.id_of(read.key), records.SINK, payload=read.value or b"", headers=headers)
        written_ms = max(read.timestamp, 0)
        return Record(envelope, written_ms, written_ms, NO_OP, last_error=problem)

    def _offered(self, change: Change) -> Change | None:
        """Hold a message back until its change is read; one that stands nowhere any more needs none."""
        standing = self._standings.get(change.key)
        stands = standing is not None and (standing.seen.is_put or standing.hidden_at is not None)
        if not (stands or change.letters or change.put is not None or change.others):
            if change.entry is not None and not change.is_users:
                super()._take_out(change.entry)
            self.notes += change.notes
            return None
        self._held_back[change.key] = change
        self._begin(change)
        return change

    def _begin(self, change: Change) -> None:
        self._under_way[change] = None
        self.changes.append(change)

    def _let_off(self, change: Change) -> None:
        """Hold nothing back for a change any more, unless another one of its key does."""
        del self._under_way[change]
        if self._held_back.get(change.key) is change:
            del self._held_back[change.key]

    def written(self, change: Change) -> None:
        """Let go of what a change held back, once everything up to its record has been read."""
        self._let_off(change)
        entry = change.entry
        is_left = entry is not None and self._entries.get(entry.record.id) is entry
        if entry is not None and is_left and not change.is_users:  # a user's cancel came before it
            super()._take_out(entry)

    def give_back(self) -> list[Change]:
        """Undo all changes under way: what was leased is so again, what was not stands in its lane; return them."""
        while (overdue := self._overdue()) is not None:
            lane = overdue.record.envelope.lane
            self._lanes[lane].add(self._backlog[lane].pop())
        self._backlog.clear()
        for queue in self._lanes.values():
            queue.sweep()  # of what was to be changed some was taken out, some still stands there
        changes = list(self._under_way)
        self._held_back.clear()
        self._under_way.clear()
        for asked in self._asked.values():
            asked.change = None
        for change in changes:
            entry = change.entry
            if entry is None or self._entries.get(entry.record.id) is not entry:
                continue
            if entry.token:
                self._leased[entry.record.id] = entry
                self._end_superseded(entry.record.id, entry.record.revision, entry.token)
            elif entry.standing is Place.LEASED:
                self._lanes[entry.record.envelope.lane].add(entry)
        return changes

    def shorten(self, change: Change) -> bool:
        """Say whether dead letters that were too large have tracebacks; the next try is made without them."""
        keys = {letter.key for letter in change.letters if letter.traceback is not None}
        self._without_traceback |= keys
        return bool(keys)

    def leave(self, change: Change) -> None:
        """Leave a message where it stands, until it is read again: it can neither be delivered nor be given up."""
        log.error("%s: message %s is left where it stands: %s", self.name, records.id_of(change.key), change.refusal)
        self._bad.pop(change.key, None)
        entry = change.entry
        if entry is not None and self._entries.get(entry.record.id) is entry:
            super()._take_out(entry)

    def has_newer(self, settlement: Settlement) -> bool:
        """Say whether a newer revision of a message stands."""
        entry = self._entries.get(settlement.id)
        return entry is not None and entry.record.revision > settlement.revision

    def hidden_far(self) -> list[str]:
        """Return the messages that must come near, to be written again, or since a put asks for them."""
        return [records.id_of(key) for key in (*self._hidden, *self._asked) if self.far.find(key) is not None]

    @property
    def needs_mending(self) -> bool:
        """Whether there is something that only writing sets right."""
        return bool(self._hidden or self._bad or self._over or self._asked or self.changes)

    @contextmanager
    def _changing(self, key: bytes, entry: Entry | None) -> Iterator[Change]:
        outer, change = self._change, Change(key, self.read_to, entry)
        self._change = change
        try:
            yield change
        finally:
            self._change = outer

    # --- the tables' own steps, turned into changes -------------------------------------------------------

    def _insert(self, record: Record, place_ms: int, sequence: int | None = None) -> None:
        change = self._change
        if change is None:
            super()._insert(record, place_ms, sequence)
        elif records.key_of(record.id) == change.key:
            change.put = record, place_ms
        else:
            change.others = [*change.others, (record, place_ms)]

    def _take_out(self, entry: Entry) -> None:
        if self._change is None:
            super()._take_out(entry)
        else:
            self._leased.pop(entry.record.id, None)  # its lease cannot lapse while its end is being written

    def _supersede(self, entry: Entry) -> None:
        change = self._held_back.get(records.key_of(entry.record.id))
        if change is None or change.entry is not entry or change.is_users:  # otherwise its settlement is being written
            super()._supersede(entry)

    def _end(self, entry: Entry, now: int) -> None:
        key = records.key_of(entry.record.id)
        if self._change is not None and self._change.key == key:
            super()._end(entry, now)
            return
        outer = self._change
        with self._changing(key, entry) as change:  # what the tables end by themselves is a change too
            change.letters, self._graves = self._graves, []
            if outer is None and self.notes:
                change.notes = [self.notes.pop()]  # of this very end
            super()._end(entry, now)
        self._reserve(entry)
        self._offered(change)

    def _forget(self, record: Record, now: int) -> None:
        super()._forget(record, now)
        version = self._tombstones.get(record.id, now) if self._tombstones.is_any else None
        if self._change is not None and version is not None:
            self._change.remembering().version = version, now + TOMBSTONE_WINDOW_MS

    def _remember_answer(self, record: Record, now: int) -> None:
        if record.revision + RETRY_WINDOW_MS <= now:
            return
        super()._remember_answer(record, now)
        answer = self._answers.get(record.op, now)
        if self._change is not None and isinstance(answer, Stored):
            until_ms = now + RETRY_WINDOW_MS
            memory = record.op.hex(), answer.answer, answer.revision, answer.due_ms, until_ms
            self._change.remembering().answers.append(memory)

    def _bury(self, record: Record, reason: DeadReason, now: int) -> None:
        letter = self._letter(record, reason)
        if self._change is None:
            self._graves.append(letter)
        else:
            self._change.letters = [*self._change.letters, letter]
        self._note("dead", letter.record, now, reason)

    def _note(self, event: str, record: Record, now: int, detail: str = "") -> None:
        if not self._keeps_history:
            return
        lane = record.envelope.lane
        entry = JournalEntry(0, now, event, record.id, record.revision, lane, record.due_ms, record.attempt, detail)
        if self._change is None:
            self.notes.append(entry)
        else:
            self._change.notes = [*self._change.notes, entry]

    def _letter(self, record: Record, reason: DeadReason) -> DeadLetter:
        letter = DeadLetter(as_occurrence(record) if record.envelope.rule else record, reason, self.now_ms())
        if letter.key not in self._without_traceback:
            return letter
        self._without_traceback.remove(letter.key)
        return replace(letter, record=replace(letter.record, traceback=None))


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


def _is_in_lane(entry: Entry) -> bool:
    return entry.standing is Place.IN_LANE


def _is_in(found: Snapshot, query: Query) -> bool:
    place_ms = found.next_attempt_ms
    return (
        place_ms >= (query.from_ms or 0)
        and (query.to_ms is None or place_ms < query.to_ms)
        and (query.after is None or (place_ms, found.record.id) > query.after)
    )
