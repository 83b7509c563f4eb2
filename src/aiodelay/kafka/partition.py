"""A partition that is owned: its session, what is read of it, and what is written, one transaction at a time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import NamedTuple

import msgspec
from aiokafka import TopicPartition
from msgspec.structs import replace

from aiodelay.clock import Clock
from aiodelay.core.dict_table import Worker
from aiodelay.core.entries import Entry
from aiodelay.errors import StoreMismatchError, StoreUnavailableError
from aiodelay.model import (
    MAX_CLAIM_BYTES,
    MAX_CLAIM_MESSAGES,
    Again,
    Claimed,
    Command,
    Dead,
    DeadKey,
    Demand,
    Done,
    Lane,
    Outcome,
    PutBack,
    Record,
    Refused,
    Settlement,
    SettleOutcome,
    Stored,
    Tidied,
    Unknown,
)
from aiodelay.pausing import pause_s
from aiodelay.transitions import delivery_id
from aiodelay.wakeup import WakeUp

from . import records
from .changes import Change
from .checkpoint import Witness
from .client import (
    PERMANENT,
    TOO_LARGE,
    UNAVAILABLE,
    AbortedError,
    FencedError,
    InDoubtError,
    Outgoing,
    Transactions,
    Written,
    log_failure,
    reason_of,
)
from .disk import Disk
from .due_messages import Due
from .group import SESSION_MS
from .horizon import Fetch, Horizon
from .options import Cluster
from .pace import Pace
from .pending_index import PendingIndex
from .placement import Placement
from .records import Read
from .session import Session
from .suspects import Suspects
from .targets import Targets, refused_topics

__all__ = ["Partition", "Place", "moved_keys"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

FIRST_PAUSE_S = 0.02
STABLE_MS = 10_000
MARK_MS = 5_000
"""How often it is written what is finished."""
CHECKPOINT_S, LONGEST_CHECKPOINT_S = 10.0, 60.0
"""How often an index on disk is brought up to date, at most and at least."""
CHECKPOINT_SHARE = 0.01
"""Of the time, at most, that this may take."""
MOST_ATTEMPTS = 10
LATE = "not written, or not read back, in time"
MANY_OWN = 100
"""So many ends are worth taking in without reading them: what is being fetched meanwhile is dropped."""
OPEN_S = 5.0
"""A transaction that is open for so long is said to be."""
STALL_S = 3.0
"""So long it is waited for what is written to be read: who waits has other partitions, and renewals, to see to."""
FIRST_RETRY_MS, LONGEST_RETRY_MS = 5_000, 3_600_000
QUESTION_S, MOST_QUESTIONS = 0.02, 3
"""How old the answer may be that no user has changed a message, when a transaction is committed; most questions."""
MOST_OVERTAKEN = 3
"""Most transactions in a row that are aborted because users have changed their messages."""


class Place(NamedTuple):
    """Which partition.

    Attributes:
        topic: The schedules topic.
        number: Of the partition.
        partitions: How many the topic has.
        is_accepted: So many are right, whatever the partition itself says.
    """

    topic: str
    number: int
    partitions: int
    is_accepted: bool = False


_ENDS = (FencedError, AbortedError, InDoubtError, StoreUnavailableError, *UNAVAILABLE)


class Partition:
    """One partition of a schedules topic, while this process owns it.

    Args:
        cluster: Where it is.
        place: Which one.
        schedules: The topics that hold the store's schedules.
        targets: Which topics take messages.
        clock: Where the time is read.
        claims: Numbers for claims, shared by all partitions of a store.
        may_begin: Returns when a session may begin; told whether another owner may have fenced the last one off.
        silence: Says why the group may have given the partition away; "" while this process surely has it.
        on_change: Called when there may be something new to claim.
        skip: Called with the offset from which on the reader is to go on.
        history: Topic that is told what becomes of messages; "" = none.
        pace: How fast what is overdue leaves, shared likewise.
        fetch: Reads records of the partition again, at offsets.
        horizon_ms: How far ahead messages are held whole.
        patience_s: How long reading may stand still, or take, before it begins anew: tombstones go meanwhile.
        disk: Where the index is kept; None = only in memory.
        on_open: Called when it is known from where on it is to be read.
        on_restored: Called once its messages may be claimed, with how many seconds it has been owned by then.
    """

    def __init__(
        self,
        cluster: Cluster,
        place: Place,
        *,
        schedules: Collection[str],
        targets: Targets,
        clock: Clock,
        claims: count[int],
        may_begin: Callable[[bool], Awaitable[None]],
        silence: Callable[[], str],
        on_change: Callable[[], None],
        skip: Callable[[int], None],
        history: str,
        pace: Pace,
        fetch: Fetch,
        horizon_ms: int,
        patience_s: float,
        disk: Disk | None,
        on_open: Callable[[], None],
        on_restored: Callable[[float], None],
    ) -> None:
        self._cluster, self._place = cluster, place
        self._on_change, self._skip = on_change, skip
        self.topic: str = place.topic
        self.number: int = place.number
        self._clock, self._targets = clock, targets
        self._may_begin, self._silence, self._patience_s = may_begin, silence, patience_s
        self._disk, self._on_open = disk, on_open
        self.is_open: bool = disk is None
        self._last: Read | None = None
        self._witness: Witness | None = None
        self._checkpoint_to, self._checkpoint_s, self._checkpoint_took_s = 0, 0.0, 0.0
        name = f"{place.topic}/{place.number}"
        self.index: PendingIndex = PendingIndex(
            clock=clock,
            placement=Placement(name, place.number, place.partitions, schedules),
            claims=claims,
            pace=pace,
            keeps_history=bool(history),
        )
        self._history, self._is_told = history, True
        self.session: Session = Session()
        self.why: str = ""
        self.problem: StoreMismatchError | None = None
        self.is_given_up: bool = False
        self._looked_s = asyncio.get_running_loop().time()
        self._owned_s: float | None = self._looked_s  # until it serves for the first time
        self._on_restored = on_restored
        self._serves = False
        self._over: FencedError | InDoubtError | None = None
        self._most = MAX_CLAIM_MESSAGES
        self._suspects = Suspects()
        self._overtaken = 0
        self._marked_ms = 0
        self._whole_at: float | None = None
        self._open: tuple[int | None, float] = (None, 0.0)
        self._is_stalled = False
        self._unread: deque[Change] = deque()
        self._written_to = -1
        self._work, self._read = WakeUp(), WakeUp()
        self._writing = asyncio.Lock()
        self.horizon: Horizon = Horizon(
            lambda: self.index, fetch, clock, on_near=self._work.set, ms=horizon_ms, name=cluster.name
        )
        self._became_ready, self._has_read = asyncio.Event(), asyncio.Event()

    @property
    def is_stalled(self) -> bool:
        """Whether nothing of what is written can be read, for longer than a transaction takes."""
        return self._is_stalled

    @property
    def is_ready(self) -> bool:
        """Whether its messages may be claimed and changed."""
        return self._serves and not self._was_away() and not self._silence() and not self.index.state.far.problem

    def _was_away(self) -> bool:
        """Say whether this process stood still for so long that another owner may have taken over."""
        return asyncio.get_running_loop().time() - self._looked_s > SESSION_MS / 1000

    async def finish(self) -> None:
        """Begin no transaction any more; return when the one under way has ended, and what it wrote has been read."""
        await self._writing.acquire()
        while self._unread:
            self._read.clear()
            await self._read.wait()

    def give_up(self) -> None:
        """Own it no longer; whoever runs its sessions cancels that."""
        self.is_given_up = True
        self._end_session()
        self.close()
        self._end_at_once(FencedError())
        self._became_ready.set()

    def close(self) -> None:
        """Leave the index on disk as it is now, if it is kept there."""
        self._write_checkpoint()
        self.index.state.far.close()

    # --- reading, by the reader of the process ------------------------------------------------------------

    def take_in(self, read: Sequence[Read], read_to: int) -> None:
        """Take in what was read, in order, and that there is nothing else below an offset."""
        index = self.index
        if self.is_given_up:
            return
        self.horizon.set()
        try:
            for each in read:
                if each.offset >= index.state.read_to:  # what it has written itself it may have taken in already
                    self._notice_new_owner(each)
                    index.reader.read(each)
        except StoreUnavailableError:  # the file's: what is at hand is worth nothing, as `read_at` will find
            self._end_session()
            self._end_at_once(InDoubtError(index.state.far.problem))
            return
        self._last = read[-1] if read else self._last
        index.state.read_to = max(index.state.read_to, read_to)
        self._has_taken_in()
        if read:
            self._on_change()

    def _notice_new_owner(self, read: Read) -> None:
        """End the session at another owner's barrier: what is claimed after it, the other owner may have cancelled."""
        own = self.session.barrier
        if own is not None and read.offset > own and read.key == records.BARRIER:
            self._end_session()
            self._end_at_once(FencedError())

    def _take_in_own(self, changes: Sequence[Change]) -> None:
        """Take in what was just committed, if it is much, without reading it, unless something else comes before.

        One offset between two transactions of one producer is the marker that ends the first.
        """
        index, before = self.index, self.index.state.read_to
        if len(changes) >= MANY_OWN:
            if index.state.read_to == self._written_to == changes[0].offset - 1:
                index.state.read_to += 1
            index.reader.read_own(changes)
        if changes:
            self._written_to = changes[-1].offset + 1
        if index.state.read_to > before:
            self._skip(index.state.read_to)
            self._has_taken_in()
            self._on_change()

    def _has_taken_in(self) -> None:
        index = self.index
        self.session = self.session.with_read(index.state.read_to)
        self._tell_read()
        self._read.set()
        self._has_read.set()
        self._has_read = asyncio.Event()
        if index.needs_mending or index.state.has_ended:
            self._work.set()

    async def until_read(self, offset: int) -> None:
        """Wait until a record has been read."""
        while self.index.state.read_to <= offset:
            await self._has_read.wait()

    def has_partitions(self, n: int) -> None:
        """Take note of how many partitions the topic has; of another number than before this owns nothing more."""
        if n != self._place.partitions:
            self._refuse(moved_keys(self.topic, self._place.partitions, n))

    def _refuse(self, problem: StoreMismatchError) -> None:
        if self.problem is None:
            self.problem, self.why = problem, str(problem)
            log.error("%s: nothing more is delivered or changed: %s", self.index.name, problem)
        self._work.set()
        self._became_ready.set()

    def open_at(self, offset: int | None, now_s: float) -> None:
        """Note where a transaction is open that nothing can be read beyond; None: nowhere."""
        before, since_s = self._open
        if offset != before:
            if self._is_stalled:
                self.why, self._is_stalled = "", False
            self._open = offset, now_s
        elif offset is not None and now_s - since_s > OPEN_S and not self._is_stalled:
            self._is_stalled = True
            self.why = f"a transaction is open at offset {offset}, and nothing after it can be read"
            log.warning("%s: %s (kafka-transactions.sh tells whose it is)", self.index.name, self.why)

    def read_at(self, now_s: float, *, is_whole: bool) -> bool:
        """Note a look at the partition, which found all that is there or not; say whether reading goes on from there.

        Otherwise it begins at the start, with nothing: it took, or stood still, for so long that tombstones of what was
        read before may be gone. After a shorter pause a new session finds out what another owner did meanwhile.
        """
        if self._was_away() and self.session.barrier is not None:
            self._end_session()
            self._end_at_once(FencedError())
        self._looked_s = now_s
        is_patient = self._whole_at is None or now_s - self._whole_at <= self._patience_s
        if problem := self.index.state.far.problem:
            log.error("%s: index= in the URL: %s; the index is held in memory", self.index.name, problem)
        elif is_patient:
            self._whole_at = now_s if is_whole or self._whole_at is None else self._whole_at
            return True
        else:
            why = "it was not read to its end for half of delete.retention.ms, and tombstones may be gone"
            log.error("%s: read again from its start: %s", self.index.name, why)
        self._whole_at = now_s
        self._end_session()
        self.index, self._last, self._witness = self.index.emptied(self.index.state.far.emptied()), None, None
        self._end_at_once(InDoubtError("the partition is read again from its start"))
        return False

    def keep(self, now_s: float) -> None:
        """Bring the index on disk up to date, now and then."""
        is_new = self.index.state.read_to > self._checkpoint_to
        pause_s = max(CHECKPOINT_S if is_new else LONGEST_CHECKPOINT_S, self._checkpoint_took_s / CHECKPOINT_SHARE)
        if now_s >= self._checkpoint_s + pause_s:
            self._write_checkpoint()
            self._checkpoint_s = now_s
            self._checkpoint_took_s = asyncio.get_running_loop().time() - now_s

    def _write_checkpoint(self) -> None:
        """Write how the index stands, if it is kept on disk and has read anything."""
        index, last, now_s = self.index, self._last, asyncio.get_running_loop().time()
        if not index.state.far.is_in_file or index.state.far.problem or not self.is_open or self._whole_at is None:
            return
        if last is not None:
            self._witness = Witness.of(last.offset, last.timestamp, last.key, last.value)
        if self._witness is None:
            return
        checkpoint = index.reader.checkpoint()
        checkpoint.witness = self._witness
        checkpoint.whole_ms = self._clock.now_ms() - int((now_s - self._whole_at) * 1000)
        self._checkpoint_to = index.state.read_to
        with suppress(StoreUnavailableError):  # the file's, as `read_at` will find
            index.state.far.commit(msgspec.msgpack.encode(checkpoint))

    def _end_at_once(self, why: FencedError | InDoubtError) -> None:
        self._over = why
        self._work.set()
        self._read.set()

    # --- the session --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Own the partition until cancelled, or it cannot be: one session after the other."""
        failures, is_fenced = 0, False
        if self._disk is not None and not self.is_open:
            await self._restore(self._disk)
        while True:
            await self._may_begin(is_fenced)
            started_ms = self._clock.monotonic_ms()
            try:
                await self._one_session()
            except StoreMismatchError as error:
                self._refuse(error)
                return
            except Exception as error:  # noqa: BLE001 - one that stopped and told nobody would be the worst of faults
                is_fenced = isinstance(error, FencedError)
                self.why = "another owner has taken over, or may have" if is_fenced else reason_of(error)
                log_failure(log, f"{self.index.name}: the session ends", self.why, error, _ENDS)
                is_refusal = isinstance(error, AbortedError) and self.is_ready
            finally:
                self._end_session()
            # Two owners take over from each other less and less often; a record that is refused costs no pause.
            lasted_ms = self._clock.monotonic_ms() - started_ms
            failures = 0 if is_refusal or lasted_ms > STABLE_MS else failures + 1
            await asyncio.sleep(pause_s(failures, first_s=FIRST_PAUSE_S))

    async def _restore(self, disk: Disk) -> None:
        """Go on from the index on disk, as far as it may be."""
        index, checkpoint = await disk.restore(self.index)
        self.index, self.is_open = index, True
        if checkpoint is not None:
            self._witness = checkpoint.witness
            age_s = (self._clock.now_ms() - checkpoint.whole_ms) / 1000
            self._whole_at = asyncio.get_running_loop().time() - age_s
        self._on_open()

    async def _one_session(self) -> None:
        name = f"aiodelay.{self.topic}.{self.number}"
        transactions = Transactions(self._cluster, name, batch_bytes=self._targets.batch_bytes)
        self._over = None
        try:
            await transactions.start()
            barrier = Outgoing(self.topic, records.BARRIER, b"", [], self.number)
            read_to = self.index.state.read_to
            (offset,) = await transactions.begin([barrier])
            if offset < read_to:
                raise _cut_off(self._place, offset, read_to)
            await transactions.commit()
            self.session = Session(self.index.state.read_to).with_barrier(offset)
            while not self.session.is_ready:
                self._read.clear()
                await self._read.wait(self._cluster.timeout_ms / 1000)
                self._check_over()
            await self._check_partitions(transactions)
            self.why = ""
            self.index.quarantine()
            self._serves = True
            self._became_ready.set()
            if self._owned_s is not None:
                self._on_restored(asyncio.get_running_loop().time() - self._owned_s)
                self._owned_s = None
            self._on_change()
            while True:
                await self._write(transactions)
        finally:
            await transactions.close()

    async def _check_partitions(self, transactions: Transactions) -> None:
        """Compare how many partitions the topic has with what its first owner has written down.

        Raises:
            StoreMismatchError: It had another number.
        """
        before, now = self.index.state.partitions, self._place.partitions
        if before == now:
            return
        if before is not None and not self._place.is_accepted:
            raise moved_keys(self.topic, before, now)
        await transactions.begin([Outgoing(self.topic, records.PARTITIONS, b"%d" % now, [], self.number)])
        await transactions.commit()

    def _check_over(self) -> None:
        if self._over is not None:
            raise self._over

    async def _write(self, transactions: Transactions) -> None:
        """Write what waits, in the order in which it was decided."""
        if self.problem is not None:
            raise self.problem
        self._work.clear()
        await self.horizon.bring(self.index.far.wanted())
        self._check_over()
        self.index.mend()
        is_told = await self._is_history_open()
        if self._suspects:
            await self._give_up_large()
        if self._was_away():
            raise FencedError
        batch, outgoing = self._batch()
        mark = self._mark()
        outgoing += [] if mark is None else [mark]
        notes = [*self.index.log.notes, *(note for change, _ in batch for note in change.notes)]
        if is_told:
            outgoing += [Outgoing(self._history, *records.encode_history(note)) for note in notes]
        if not outgoing:
            is_waiting = self.index.state.has_ended or self.index.log.notes
            if not (self._suspects or self.index.log.changes):
                await self._work.wait(MARK_MS / 1000 if is_waiting else None)
            return
        try:
            if not await self._commit(transactions, batch, outgoing):
                return
        except AbortedError as error:
            self._aborted(error, transactions, batch, outgoing)
            return
        self.index.log.notes.clear()
        self.index.log.notes += [] if is_told else notes
        self._most = min(2 * self._most, MAX_CLAIM_MESSAGES)
        self._targets.took({each.topic for each in outgoing})
        self._check_over()  # then nobody waits for these any more
        changes = [change for change, _ in batch]
        self._unread += changes
        self._take_in_own(changes)
        self._tell_read()  # the reader may have been faster

    async def _commit(
        self, transactions: Transactions, batch: Sequence[tuple[Change, int]], outgoing: Sequence[Outgoing]
    ) -> bool:
        """Write a transaction; say whether it was committed, or a user has changed one of its messages before."""
        async with self._writing:
            offsets = await transactions.begin(outgoing)
            overtaken_at = await self._asked_in_time(transactions, batch, outgoing, offsets)
            if overtaken_at is None:
                self._note_offsets(batch, offsets)
                await transactions.commit()
                self._overtaken = 0
                return True
            await transactions.abort()
        await self._begin_again(batch, overtaken_at)
        return False

    def _aborted(
        self,
        error: AbortedError,
        transactions: Transactions,
        batch: Sequence[tuple[Change, int]],
        outgoing: Sequence[Outgoing],
    ) -> None:
        """Go on after a target topic has refused records for good.

        Raises:
            AbortedError: Something else was refused; the next session tries less at a time.
            FencedError, InDoubtError: The session has ended meanwhile.
        """
        self._check_over()
        if self._refused(error, outgoing):
            raise error
        if not transactions.is_spent and not self._has_refused_own(error, outgoing):
            self._set_apart(error.written, batch, outgoing)
            return
        self._most = max(1, len(batch) // 2)
        if len(batch) == 1:  # it alone cannot be written; the others have been, or will be
            batch[0][0].refusal, batch[0][0].is_too_large = str(error), self._is_too_large(error, outgoing)
        raise error

    async def _is_history_open(self) -> bool:
        """Say whether the history is told what happens; while its topic takes nothing, that waits."""
        history = self._history
        if not history or history in self._targets.known():
            return bool(history)
        blocked = self._targets.blocked.get(history)
        if blocked is None or blocked.until_ms <= self._clock.now_ms():
            with suppress(StoreUnavailableError):
                await self._targets.look([history])
        is_open = history in self._targets.known()
        if self._is_told != is_open:
            level = logging.INFO if is_open else logging.ERROR
            log.log(
                level,
                "%s: history topic %s %s",
                self.index.name,
                history,
                "works" if is_open else "takes nothing",
            )
        self._is_told = is_open
        return is_open

    def _mark(self) -> Outgoing | None:
        """Return what tells what is finished, now and then."""
        now = self._clock.monotonic_ms()
        if now < self._marked_ms + MARK_MS or (mark := self.index.next_mark()) is None:
            return None
        self._marked_ms = now
        return Outgoing(self.topic, *records.encode_mark(mark), self.number)

    def _refused(self, error: AbortedError, outgoing: Sequence[Outgoing]) -> bool:
        """Say whether topics have refused all that they are given, and note which: then it is no record's fault."""
        failed = [(outgoing[each.indices[0]].topic, each.error) for each in error.written if each.error is not None]
        refused: dict[str, str] = {}
        for topic, why in failed:
            named = [topic] if topic == self._history else refused_topics(why, topic)
            refused |= dict.fromkeys(named, reason_of(why))
        if self.topic not in refused:  # otherwise nothing is known of the others
            for topic, reason in refused.items():
                self._targets.refused(topic, reason)
        return bool(refused)

    def _has_refused_own(self, error: AbortedError, outgoing: Sequence[Outgoing]) -> bool:
        """Say whether the partition itself has refused a record."""
        failed = (each for each in error.written if isinstance(each.error, PERMANENT))
        return any(outgoing[each.indices[0]].topic == self.topic for each in failed)

    def _is_too_large(self, error: AbortedError, outgoing: Sequence[Outgoing]) -> bool:
        """Say whether the partition itself has no room for a record."""
        failed = [each for each in error.written if isinstance(each.error, TOO_LARGE)]
        return any(outgoing[each.indices[0]].topic == self.topic for each in failed)

    # --- what a target topic refuses of one message -------------------------------------------------------

    def _set_apart(
        self, written: Sequence[Written], batch: Sequence[tuple[Change, int]], outgoing: Sequence[Outgoing]
    ) -> None:
        """Give up the message whose record was refused by itself; try apart what was refused together."""
        changes = [change for i, (change, end) in enumerate(batch) for _ in range(batch[i - 1][1] if i else 0, end)]
        left = dict.fromkeys(changes)
        for each in written:
            if not isinstance(each.error, PERMANENT):
                continue
            refused = [changes[i] for i in each.indices]
            for change in refused:
                left.pop(change, None)
            if len(refused) > 1:
                self._targets.doubt(outgoing[each.indices[0]].topic)
                self._suspects.halve(refused)
            else:
                record = outgoing[each.indices[0]]
                if isinstance(each.error, TOO_LARGE):
                    self._targets.found_too_large(record)
                self._give_up(refused[0], f"topic {record.topic} refuses its record: {reason_of(each.error)}")
        self.index.log.changes.extendleft(reversed(left))

    async def _give_up_large(self) -> None:
        """Give up suspects that are larger than what their topics take, as far as that may be read.

        Raises:
            StoreUnavailableError: The cluster does not answer.
        """
        topics = {record.topic for change in self._suspects for record in change.targets}
        await self._targets.confirm(topics)
        large = {change: excess for change in self._suspects if (excess := self._excess(change))}
        self._suspects.discard(large)
        for change, excess in large.items():
            self._give_up(change, excess)

    def _excess(self, change: Change) -> str:
        """Say why a message is too large for its topic; "" if it is not, as far as is known."""
        return next((excess for record in change.targets if (excess := self._targets.excess(record))), "")

    def _give_up(self, change: Change, why: str) -> None:
        """Make a dead letter of a message that its topic does not take, now or later."""
        assert change.entry is not None
        record, then = change.entry.record, None if change.put is None else change.put[1]
        key = record.id, record.revision, change.entry.token
        if self.index.end_instead(change, Dead(*key, "not_retryable", record.attempt + 1, why, then)) is not None:
            log.error("%s: message %s becomes a dead letter: %s", self.index.name, record.id, why)
        _tell(change, written=False)

    # --- what users change while it is written ------------------------------------------------------------

    async def _asked_in_time(
        self,
        transactions: Transactions,
        batch: Sequence[tuple[Change, int]],
        outgoing: Sequence[Outgoing],
        offsets: Sequence[int],
    ) -> int | None:
        """Return `_overtaken_at`, asked again while the answer is too old: what it does not tell goes out."""
        for _ in range(MOST_QUESTIONS):
            asked_s = asyncio.get_running_loop().time()
            found = await self._overtaken_at(transactions, batch, outgoing, offsets)
            if found is not None or asyncio.get_running_loop().time() - asked_s <= QUESTION_S:
                break
        return found

    async def _overtaken_at(
        self,
        transactions: Transactions,
        batch: Sequence[tuple[Change, int]],
        outgoing: Sequence[Outgoing],
        offsets: Sequence[int],
    ) -> int | None:
        """Return where a user has written last of what a transaction moves, which is not committed yet; None: nowhere.

        The broker is asked: the reader may be behind, and sees nothing beyond a transaction that is open.
        """
        keys = {change.key for change, _ in batch if change.targets}
        if not keys or self._overtaken >= MOST_OVERTAKEN:
            return None
        try:
            found = await transactions.keys_since(
                TopicPartition(self.topic, self.number), self._unread_from(outgoing, offsets)
            )
        except UNAVAILABLE:
            found = {}
        if any(change.is_stale for change, _ in batch):  # it has been read since the transaction began
            return self.index.state.read_to - 1
        return max((found[key] for key in keys & found.keys()), default=None)

    def _unread_from(self, outgoing: Sequence[Outgoing], offsets: Sequence[int]) -> int:
        """Return the offset from which on others may have written what this process has not read."""
        own = [offset for record, offset in zip(outgoing, offsets, strict=True) if record.topic == self.topic]
        read_to = self.index.state.read_to
        if own[0] - read_to <= (read_to == self._written_to) and own[-1] - own[0] < len(own):
            return own[-1] + 1  # only the marker of the last transaction is not read
        return read_to

    async def _begin_again(self, batch: Sequence[tuple[Change, int]], offset: int) -> None:
        """Queue an aborted transaction's changes again, once the reader has read what users wrote."""
        self._check_over()
        self._overtaken += 1
        self.index.log.changes.extendleft(reversed([change for change, _ in batch]))
        with suppress(TimeoutError):
            async with asyncio.timeout(STALL_S):
                await self.until_read(offset)

    @staticmethod
    def _note_offsets(batch: Sequence[tuple[Change, int]], offsets: Sequence[int]) -> None:
        """Note where the changes stand, before what is read of them comes in."""
        for change, end in batch:
            change.offset = offsets[end - 1]

    def _tell_read(self) -> None:
        """Let go of the changes that have been read."""
        while self._unread and self._unread[0].offset < self.index.state.read_to:
            change = self._unread.popleft()
            self.index.log.written(change)
            _tell(change, written=True)

    def _batch(self) -> tuple[list[tuple[Change, int]], list[Outgoing]]:
        """Take changes for one transaction, each with the end of its records."""
        batch: list[tuple[Change, int]] = []
        outgoing: list[Outgoing] = []
        size = 0
        waiting = self._suspects.take_turn(self.index.log.changes)
        while waiting and len(batch) < self._most and size < MAX_CLAIM_BYTES:
            change = waiting.popleft()
            if self.index.log.drop_stale(change):
                _tell(change, written=False)
                continue
            if waiting is self.index.log.changes and self._excess(change):
                self._suspects.add([change])
                continue
            before = len(outgoing)
            outgoing += change.targets
            outgoing += [Outgoing(self.topic, *wire, self.number) for wire in change.wires()]
            for i in range(before, len(outgoing)):
                size += len(outgoing[i].value or b"")
            batch.append((change, len(outgoing)))
        if waiting is not self.index.log.changes:
            self._suspects.add(waiting)
        return batch, outgoing

    def _end_session(self) -> None:
        """Undo what was not written, or of which that is not known: the next session reads what was."""
        self.session, self._serves = Session(self.index.state.read_to), False
        if self.problem is None:
            self._became_ready.clear()
        self._unread.clear()
        self._suspects.clear()
        self.index.log.changes.clear()
        for change in self.index.give_back():
            if change.is_too_large and change.letters and not self.index.log.shorten(change):
                self.index.log.leave(change)
            _tell(change, written=False)

    async def until_ready(self) -> bool:
        """Wait for a session that is ready, at most as long as for an answer; say whether there is one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._cluster.timeout_ms / 1000):
                while not (self.is_ready or self.is_given_up or self.problem is not None):
                    self._became_ready.clear()
                    await self._became_ready.wait()
        return self.is_ready

    async def until_known(self) -> None:
        """Wait until all that stands in it is known; one that is refused has been read.

        Raises:
            StoreUnavailableError: Not in time.
        """
        if not await self.until_ready() and self.problem is None:
            self._check_ready()

    # --- what is asked of it ------------------------------------------------------------------------------

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleOutcome]:
        """Settle claims; return once what was written has been read.

        Raises:
            StoreUnavailableError: The session has ended, or nothing can be read just now; some may be settled.
        """
        try:
            async with asyncio.timeout(STALL_S):
                return await self._settled(settlements)
        except TimeoutError:
            raise StoreUnavailableError(self._cluster.name, self.why or LATE) from None

    async def _settled(self, settlements: Sequence[Settlement]) -> list[SettleOutcome]:
        for settlement in settlements:
            await self._until_free(settlement.id)
        self._check_ready()
        decided = [self.index.settle(settlement) for settlement in settlements]
        self._work.set()
        outcomes: list[SettleOutcome] = []
        for (outcome, change), settlement in zip(decided, settlements, strict=True):
            if change is not None and not await _waited(change):
                raise StoreUnavailableError(self._cluster.name, "the session has ended")
            is_void = change is not None and not change.counted and self.index.has_newer(settlement)
            outcomes.append(SettleOutcome.SUPERSEDED if is_void else outcome)
        return outcomes

    def _check_ready(self) -> None:
        if not self.is_ready:
            raise StoreUnavailableError(self._cluster.name, self.why or "the partition is being read")

    def move(self, lane: Lane, demand: Demand) -> tuple[list[Change], Due]:
        """Decide to move what is due, each message in the transaction that ends it; nothing here waits."""
        now = self._clock.now_ms()
        due = self.index.due.take(lane, demand, self._targets.known(), now)
        changes = [
            self.index.due.move(key, entry, self._target_of(entry.record, now), now) for key, entry in due.entries
        ]
        self._work.set()
        return changes, due

    def settle_occurrence(self, settlement: Settlement) -> Change | None:
        """Decide how a series' occurrence ends; None: it has been changed meanwhile."""
        entry = self.index.due.series_at(settlement) if self.is_ready else None
        if entry is None:
            return None
        self._work.set()
        settlement = replace(settlement, token=entry.token)
        if isinstance(settlement, Done) and settlement.outcome == "delivered":
            return self._moved(entry, settlement)
        return self.index.end(entry, settlement)

    def _moved(self, entry: Entry, settlement: Done) -> Change | None:
        target, change = self._target_of(entry.record, self._clock.now_ms()), self.index.end(entry, settlement)
        if change is not None:
            change.targets = (target,)
        return change

    def _target_of(self, record: Record, now: int) -> Outgoing:
        """Return the record that the target topic gets."""
        envelope = record.envelope
        wire = records.delivered(envelope, delivery_id(record), record.attempt + 1, now_ms=now, schedules=self.topic)
        return Outgoing(envelope.address, *wire)

    async def moved(self, changes: Sequence[Change]) -> int:
        """Wait until what was decided is written, unless that takes long; return how many messages were moved."""
        n, refused = 0, list[Change]()
        with suppress(TimeoutError):
            async with asyncio.timeout(STALL_S):
                for change in changes:
                    if await _waited(change):
                        n += bool(change.targets)
                    elif change.refusal:
                        refused.append(change)
        for change in refused:
            await self._not_moved(change)
        return n

    async def _not_moved(self, change: Change) -> None:
        """Count an attempt of a message that its topic refused by itself."""
        entry = change.entry
        if entry is None or not await self.until_ready():
            return
        record, attempt, now = entry.record, entry.record.attempt + 1, self._clock.now_ms()
        key = record.id, record.revision, entry.token
        then = None if change.put is None else change.put[1]
        ended: Settlement = Dead(*key, "attempts_exhausted", attempt, change.refusal, then)
        if attempt < MOST_ATTEMPTS:
            pause_ms = min(FIRST_RETRY_MS << attempt, LONGEST_RETRY_MS)
            ended = Again(*key, now + pause_ms, attempt, change.refusal, then)
        again = self.index.end(entry, ended)
        self._work.set()
        if again is not None and not await _waited(again) and again.is_too_large:
            self.index.log.leave(again)

    async def command(self, command: Command) -> Outcome:
        """Carry out a command as the owner: the answer is final, unless it does not come in time."""
        if self.is_stalled or not await self.until_ready():
            return Refused("unavailable", self.why or "the partition is being read")
        try:
            async with asyncio.timeout(self._cluster.timeout_ms / 1000):
                return await self._commanded(command)
        except TimeoutError:
            return Unknown(self.why or LATE)

    async def _commanded(self, command: Command) -> Outcome:
        while True:
            if not await self.until_ready():
                return Refused("unavailable", self.why or "the partition is being read")
            try:
                await self._until_at_hand(command.id)
            except StoreUnavailableError as error:
                return Refused("unavailable", str(error))
            if not self.is_ready:
                continue
            outcome, change = self.index.command(command)
            if change is None:
                return outcome
            self._work.set()
            if not await _waited(change):
                refusal = change.refusal
                return Refused("unavailable", refusal) if refusal else Unknown("the session has ended")
            if change.counted or change.is_users:
                assert isinstance(outcome, Stored)
                self.index.answered(command, outcome)
                return outcome

    async def put_back(self, message: PutBack) -> Stored:
        """Take a message back as the owner; what stands under its id stays.

        Raises:
            StoreUnavailableError: Not written, or not read back, in time.
        """
        try:
            async with asyncio.timeout(self._cluster.timeout_ms / 1000):
                while True:
                    await self.until_ready()
                    await self._until_at_hand(message.record.id)
                    self._check_ready()
                    stored, change = self.index.put_back(message)
                    if change is None:
                        return stored
                    self._work.set()
                    if not await _waited(change):
                        if change.refusal:
                            raise StoreUnavailableError(self._cluster.name, change.refusal)
                        continue  # what was written after all stands there, and is kept
                    is_shadowed = message.reason is None and not change.counted
                    return replace(stored, answer="kept") if is_shadowed else stored
        except TimeoutError:
            reason = self.why or "not written, or not read back, in time"
            raise StoreUnavailableError(self._cluster.name, reason) from None

    async def claim(self, demand: Mapping[Lane, Demand], lease_ms: int, turn: int, worker: Worker) -> Claimed:
        """Lease what is due; return once what is late on the way has ended."""
        if self.horizon.is_behind:
            await self.horizon.follow()
        before = len(self.index.log.changes)
        claimed = self.index.claiming.claim(demand, lease_ms, turn, worker, self._clock.now_ms())
        await self._written_since(before)
        return claimed

    async def tidy(self, worker: Worker, lanes: Collection[Lane], limit: int) -> Tidied:
        """Do a step of housekeeping."""
        before = len(self.index.log.changes)
        tidied = self.index.tidy(worker, lanes, limit)
        await self._written_since(before)
        return tidied

    async def _written_since(self, before: int) -> None:
        """Wait for the changes that the tables have made by themselves."""
        changes = list(self.index.log.changes)[before:]
        if changes:
            self._work.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(STALL_S):
                    await asyncio.gather(*map(_waited, changes))

    async def _until_free(self, message_id: str) -> None:
        """Wait until no change of a message is being written."""
        while (change := self.index.log.held_back.get(records.key_of(message_id))) is not None:
            await _waited(change)

    async def _until_at_hand(self, message_id: str) -> None:
        """Wait until a message is near, and no change of it is being written.

        Raises:
            StoreUnavailableError: It cannot be read.
        """
        await self._until_free(message_id)
        while self.index.far.has(message_id):
            await self.horizon.bring([message_id])
            await self._until_free(message_id)

    async def redrive(self, key: DeadKey) -> Outcome:
        """Give a dead letter a new life.

        Raises:
            StoreUnavailableError: The session has ended, or what stands under its id cannot be read; nothing was
                written.
        """
        await self._until_at_hand(key.id)
        self._check_ready()
        outcome, change = self.index.redrive(key)
        if change is None:
            return outcome
        self._work.set()
        if not await self._written_in_time(change):
            return Unknown(self.why or LATE)
        return outcome if change.counted else Refused("exists")

    async def purge(self, key: DeadKey) -> bool:
        """Delete a dead letter; say whether there was one.

        Raises:
            StoreUnavailableError: The session has ended.
        """
        self._check_ready()
        change = self.index.purge(key)
        if change is None:
            return False
        self._work.set()
        if not await self._written_in_time(change):
            raise StoreUnavailableError(self._cluster.name, self.why or LATE)
        return True

    async def _written_in_time(self, change: Change) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._cluster.timeout_ms / 1000):
                return await _waited(change)
        return False


def moved_keys(topic: str, before: int, now: int) -> StoreMismatchError:
    """Return what is said of a topic whose number of partitions has changed."""
    what = f"of {now} partitions, and was of {before}: what changes or cancels a schedule no longer reaches it"
    new = f"a new topic with {now} partitions, and this one as the second until it is empty"
    return StoreMismatchError(f"topic {topic}", what, f"{new}; or, to go on all the same, accept_partitions={now}")


def _cut_off(place: Place, end: int, read_to: int) -> StoreMismatchError:
    what = f"deleted, or cut off: partition {place.number} ends at {end}, and has been read to {read_to}"
    return StoreMismatchError(f"topic {place.topic}", what, "the topic as it was; to go on with this one, start again")


async def _waited(change: Change) -> bool:
    """Wait until a change was read, or is known not to have been written."""
    if change.is_written is None:
        if change.waiter is None:
            change.waiter = asyncio.get_running_loop().create_future()
        await asyncio.shield(change.waiter)
    return bool(change.is_written)


def _tell(change: Change, *, written: bool) -> None:
    change.is_written = written
    if change.waiter is not None:
        change.waiter.set_result(None)
