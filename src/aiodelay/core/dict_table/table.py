"""`DictTable`: implements `Table` with dicts, for the memory store and for a Kafka partition's pending messages."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, count

from aiodelay.core import transitions as t
from aiodelay.core.values import (
    RETRY_WINDOW_MS,
    Command,
    DeadKey,
    DeadLetter,
    JournalEntry,
    Lane,
    LaneLimits,
    LateAction,
    Outcome,
    Record,
)
from aiodelay.core.wakeup import WakeUp

from .entries import GONE, IN_LANE, LEASED, PARKED, Entry, EntryHeap, ExpiringDict, LaneQueue
from .limited_queue import LimitedQueue

__all__ = [
    "SERVED_WINDOW_MS",
    "DictAnswers",
    "DictClaims",
    "DictLetters",
    "DictTable",
    "DictTrials",
    "Trial",
    "Worker",
    "Workers",
    "journal_entry",
]

SERVED_WINDOW_MS = 60_000
"""A worker whose last housekeeping is less than this many ms ago counts as alive."""


class Worker:
    """A dispatching process as the store knows it: its wake-up, its lanes, and the time of its last sign of life."""

    name: str
    wakeup: WakeUp
    lanes: frozenset[Lane]
    seen_ms: int

    def __init__(self, name: str, lanes: Collection[Lane], now_ms: int) -> None:
        self.name = name
        self.wakeup = WakeUp()
        self.lanes, self.seen_ms = frozenset(lanes), now_ms


class Workers:
    """The dispatching processes of a store, in the order in which they came."""

    def __init__(self) -> None:
        self._workers: dict[Worker, None] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def __contains__(self, worker: object) -> bool:
        return worker in self._workers

    def add(self, worker: Worker) -> None:
        """Add a process."""
        self._workers[worker] = None

    def discard(self, worker: Worker) -> None:
        """Remove a process that has ended."""
        self._workers.pop(worker, None)

    def wake(self) -> None:
        """End the waits of all workers."""
        for worker in self:
            worker.wakeup.set()

    def serve(self, lane: Lane, now: int) -> bool:
        """Return whether a live worker serves a lane."""
        return any(lane in worker.lanes and worker.seen_ms > now - SERVED_WINDOW_MS for worker in self)


class Trial:
    """The trial of suspects that were claimed together.

    Attributes:
        worker: The worker that claimed the suspects.
        lease_ms: The length of the claims' leases.
        beat_ms: When the worker last confirmed that it holds the claims, epoch ms.
    """

    __slots__ = ("beat_ms", "lease_ms", "worker")

    def __init__(self, worker: Worker, lease_ms: int, beat_ms: int) -> None:
        self.worker: Worker = worker
        self.lease_ms: int = lease_ms
        self.beat_ms: int = beat_ms


class DictAnswers:
    """Answers by op, and the latest revisions and ended versions by message id (implements `Answers` with dicts)."""

    def __init__(self) -> None:
        self.by_op: ExpiringDict[bytes, Outcome] = ExpiringDict()
        self.revisions: ExpiringDict[str, int] = ExpiringDict()
        self.versions: ExpiringDict[str, int] = ExpiringDict()

    def answer(self, command: Command, now: int) -> Outcome | None:
        return self.by_op.get(command.op, now)

    def add(self, op: bytes, outcome: Outcome, *, until_ms: int) -> None:
        self.by_op.add(op, outcome, until_ms=until_ms)

    def keep(self, record: Record, now: int) -> None:
        until_ms = record.revision + RETRY_WINDOW_MS
        if until_ms > now and record.op != t.NO_OP and self.by_op.get(record.op, now) is None:
            self.by_op.add(record.op, t.first_answer(record), until_ms=until_ms)

    def last_revision(self, message_id: str, now: int) -> int | None:
        return self.revisions.get(message_id, now)

    def ended_version(self, message_id: str, now: int) -> int | None:
        return self.versions.get(message_id, now)

    def add_version(self, message_id: str, version: int, *, until_ms: int) -> None:
        self.versions.add(message_id, version, until_ms=until_ms)

    def forget(self, now: int, limit: int) -> None:
        """Drop expired values, at most `limit` of each kind."""
        for values in (self.by_op, self.revisions, self.versions):
            values.forget(now, limit)


class DictClaims:
    """Claims on replaced messages, in dicts (implements `SupersededClaims`).

    The claims are kept under the id that the caller chose (`base_id`), because each retry of a series has another id.

    Args:
        ended: Called with the replaced message when its claim ends.
    """

    def __init__(self, ended: Callable[[Entry], None]) -> None:
        self._ended = ended
        self._claims: dict[str, dict[tuple[str, int], int]] = {}
        self._rows: dict[tuple[str, int], Entry] = {}

    def add(self, row: Entry) -> None:
        if row.token:
            claims = self._claims.setdefault(t.base_id(row.record.id), {})
            claims[row.record.id, row.record.revision] = row.token
            self._rows[row.record.id, row.record.revision] = row

    def has(self, row: Entry) -> bool:
        """Return whether the claim on this row is kept here."""
        return self._rows.get((row.record.id, row.record.revision)) is row

    def rows(self, lane: Lane) -> list[Entry]:
        """Return the replaced messages of a lane whose claims are kept here."""
        return [row for row in self._rows.values() if row.record.envelope.lane == lane]

    def tokens(self, message_id: str) -> Sequence[int]:
        claims = self._claims.get(t.base_id(message_id), {})
        return [token for (each, _), token in claims.items() if message_id in (each, t.base_id(each))]

    def renew(self, message_id: str, revision: int, token: int, to: int) -> bool:
        claims = self._claims.get(t.base_id(message_id), {})
        is_kept = claims.get((message_id, revision)) in (token, to)
        if is_kept:
            claims[message_id, revision] = to
        return is_kept

    def end(self, message_id: str, revision: int, token: int) -> bool:
        base_id = t.base_id(message_id)
        claims = self._claims.get(base_id, {})
        if claims.get((message_id, revision)) != token:
            return False
        del claims[message_id, revision]
        if not claims:
            del self._claims[base_id]
        self._ended(self._rows.pop((message_id, revision)))
        return True

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        """Return (id, revision, token) of every claim. Claims may end during the iteration."""
        return iter([(*key, token) for claims in self._claims.values() for key, token in claims.items()])


class DictLetters:
    """Dead letters in dicts (implements `Letters`)."""

    def __init__(self) -> None:
        self._letters: dict[str, dict[int, DeadLetter]] = {}

    def has(self, key: DeadKey) -> bool:
        return self.get(key) is not None

    def get(self, key: DeadKey) -> DeadLetter | None:
        return self._letters.get(key.id, {}).get(key.revision)

    def add(self, letter: DeadLetter) -> None:
        self._letters.setdefault(letter.key.id, {})[letter.key.revision] = letter

    def remove(self, key: DeadKey) -> bool:
        revisions = self._letters.get(key.id, {})
        was_there = revisions.pop(key.revision, None) is not None
        if was_there and not revisions:
            del self._letters[key.id]
        return was_there

    def of(self, message_id: str) -> Iterable[DeadLetter]:
        """Return a message's letters, in any order."""
        return self._letters.get(message_id, {}).values()

    def __iter__(self) -> Iterator[DeadLetter]:
        return chain.from_iterable(each.values() for each in self._letters.values())


class DictTrials:
    """Trials of suspects, in dicts (implements `TrialTable`).

    Args:
        entries: The stored messages, by id.
        workers: The live workers. Any other worker has ended.
    """

    def __init__(self, entries: dict[str, Entry], workers: Workers) -> None:
        self._entries, self._workers = entries, workers
        self._trials: dict[str, Trial] = {}
        self._search = t.Trials()

    def of(self, row: Entry) -> Trial | None:
        """Return the trial of a row."""
        return self._trials.get(row.record.id)

    def begin(self, rows: Sequence[Entry], trial: Trial) -> None:
        """Note the trial of rows that were claimed together."""
        self._trials |= {row.record.id: trial for row in rows}

    def heard_ms(self, row: Entry) -> int | None:
        trial = self.of(row)
        return None if trial is None else trial.beat_ms

    def has_died(self, row: Entry, now: int) -> bool:
        del now  # a worker belongs to this process, so it lives as long as `_workers` holds it
        trial = self.of(row)
        return trial is None or trial.worker not in self._workers

    def group_size(self) -> int:
        return sum(not entry.record.alone for entry in self.tried())

    def tried(self) -> list[Entry]:
        """Return the suspects in the current trial."""
        found = (self._entries.get(message_id) for message_id in self._trials)
        return [entry for entry in found if entry is not None]

    def is_in_doubt(self, row: Entry, now: int) -> bool:
        """Return whether the worker that tries this suspect alone may still hold it.

        The worker may hold the suspect if it still lives and has confirmed the trial recently.
        """
        trial = self.of(row) if row.record.alone else None
        if trial is None or trial.worker not in self._workers:
            return False
        return not t.is_silent(trial.beat_ms, trial.lease_ms, now)

    def beat(self, worker: Worker, ids: Collection[str]) -> None:
        """Note that a worker holds the claims on these messages. A separate thread may call this method."""
        for message_id in ids:
            trial = self._trials.get(message_id)
            if trial is not None and trial.worker is worker:
                trial.beat_ms = worker.seen_ms

    def search(self) -> t.Trials:
        return self._search

    def set_search(self, search: t.Trials) -> None:
        self._search = search

    def end(self, row: Entry) -> None:
        if self._trials:
            self._trials.pop(row.record.id, None)


class DictTable:
    """The messages of a table, in dicts (implements `Table`).

    Args:
        workers: The workers to wake when a message is inserted.
        journal: The most journal entries to keep; 0 = keep none.
    """

    expiring: EntryHeap
    answers: DictAnswers
    superseded: DictClaims
    letters: DictLetters
    trials: DictTrials

    def __init__(self, workers: Workers, *, journal: int = 0) -> None:
        self.workers = workers
        self.entries: dict[str, Entry] = {}
        self.recurring: dict[str, Entry] = {}
        self.leased: dict[str, Entry] = {}
        self.occurrences: dict[str, dict[str, None]] = {}  # series id -> ids of the series' retried occurrences
        self.lanes: defaultdict[Lane, LaneQueue] = defaultdict(LaneQueue)
        self.expiring = EntryHeap(IN_LANE, PARKED)
        self.answers = DictAnswers()
        self.superseded = DictClaims(self._claim_ended)
        self.letters = DictLetters()
        self.trials = DictTrials(self.entries, workers)
        self.journal: deque[JournalEntry] | None = deque(maxlen=journal) if journal else None
        self.sequence: Iterator[int] = count(1)
        self._numbers = count(1)

    def find(self, message_id: str) -> Entry | None:
        return self.entries.get(message_id)

    def retries_of(self, series_id: str) -> Sequence[Entry]:
        return [self.entries[each] for each in self.occurrences.get(series_id, ())]

    def insert(self, record: Record, place_ms: int) -> None:
        self.place(record, place_ms, next(self.sequence))

    def move(self, row: Entry, record: Record, place_ms: int, *, keeps_turn: bool = False) -> None:
        self.remove(row)
        self.place(record, place_ms, row.sequence if keeps_turn else next(self.sequence))

    def place(self, record: Record, place_ms: int, sequence: int) -> None:
        """Add a message whose id is free to its lane. It precedes messages of the same place and a higher sequence."""
        entry = self.entries[record.id] = Entry(record, place_ms, sequence)
        if record.envelope.rule is not None:
            self.recurring[record.id] = entry
        elif (occurrence := t.occurrence_of(record.id)) is not None:
            self.occurrences.setdefault(occurrence[0], {})[record.id] = None
        lane = self.lanes[record.envelope.lane]
        lane.messages += 1
        lane.add(entry)
        if record.late is not LateAction.DELIVER and record.envelope.rule is None:
            self.expiring.push(max(place_ms, record.expires_ms + 1), entry)
        self.workers.wake()

    def update(self, row: Entry, record: Record) -> None:
        row.record = record

    def set_token(self, row: Entry, token: int) -> None:
        row.token = token

    def remove(self, row: Entry) -> None:
        lane = self.lanes[row.record.envelope.lane]
        lane.messages -= 1
        was_leased = row.state is LEASED
        if row.state is PARKED:
            lane.unpark(row)
        row.state = GONE
        if was_leased and isinstance(lane, LimitedQueue) and not self.superseded.has(row):
            self._claim_ended(row)
        message_id = row.record.envelope.id
        self.entries.pop(message_id, None)
        self.recurring.pop(message_id, None)
        self.leased.pop(message_id, None)
        self.trials.end(row)
        if (occurrence := t.occurrence_of(message_id)) is not None:
            self._leave_occurrences(occurrence[0], message_id)

    def _claim_ended(self, row: Entry) -> None:
        lane = self.lanes[row.record.envelope.lane]
        if isinstance(lane, LimitedQueue) and lane.ended(row):
            self.workers.wake()

    def is_limited(self, lane: Lane) -> bool:
        """Return whether a lane has limits."""
        return isinstance(self.lanes[lane], LimitedQueue)

    def set_limits(self, lane: Lane, limits: LaneLimits, now: int) -> None:
        """Set the limits of a lane."""
        queue = LimitedQueue(lane, limits) if limits else LaneQueue()
        entries = self.of_lane(lane)
        waiting = [entry for entry in entries if entry.state is not LEASED]
        running = [entry for entry in entries if entry.state is LEASED] + self.superseded.rows(lane)
        queue.begin_with(self.lanes[lane], waiting, running, now)
        self.lanes[lane] = queue
        self.workers.wake()

    def of_lane(self, lane: Lane) -> list[Entry]:
        """Return the messages of a lane."""
        return [entry for entry in self.entries.values() if entry.record.envelope.lane == lane]

    def _leave_occurrences(self, series_id: str, occurrence_id: str) -> None:
        occurrences = self.occurrences.get(series_id, {})
        occurrences.pop(occurrence_id, None)
        if not occurrences:
            self.occurrences.pop(series_id, None)

    def retire(self, row: Entry, now: int) -> None:
        self.remove(row)
        self.answers.keep(row.record, now)
        self.answers.revisions.add(row.record.id, row.record.revision, until_ms=now + RETRY_WINDOW_MS)

    def changing(self, row: Entry) -> AbstractContextManager[object]:
        del row  # every call takes effect at once
        return _TOGETHER

    def note(self, event: str, record: Record, now: int, detail: str = "") -> None:
        if self.journal is not None:
            self.journal.append(journal_entry(next(self._numbers), now, event, record, detail))


def journal_entry(number: int, now: int, event: str, record: Record, detail: str) -> JournalEntry:
    """Make a journal entry about a message."""
    lane, due_ms = record.envelope.lane, record.due_ms
    return JournalEntry(number, now, event, record.id, record.revision, lane, due_ms, record.attempt, detail)


_TOGETHER = nullcontext()
