"""The memory store's tables, and the steps on them that everything else is made of."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, count

from msgspec.structs import replace

from aiodelay import transitions as t
from aiodelay.clock import Clock, SystemClock
from aiodelay.model import (
    RETRY_WINDOW_MS,
    TOMBSTONE_WINDOW_MS,
    DeadKey,
    DeadLetter,
    DeadReason,
    JournalEntry,
    Lane,
    LateAction,
    Outcome,
    Record,
)
from aiodelay.wakeup import WakeUp

from .waiting import Entry, LaneQueue, Remembered, Standing, Waiting

__all__ = ["SERVED_WINDOW_MS", "Graves", "Tables", "Trial", "Worker"]

SERVED_WINDOW_MS = 60_000
"""A worker that tidied within this many ms counts as alive."""


class Worker:
    """A dispatching process as the store knows it: its wake-up, what it serves, and since when it was not heard of."""

    name: str
    wakeup: WakeUp
    lanes: frozenset[Lane]
    seen_ms: int

    def __init__(self, name: str, lanes: Collection[Lane], now_ms: int) -> None:
        self.name = name
        self.wakeup = WakeUp()
        self.lanes, self.seen_ms = frozenset(lanes), now_ms


class Trial:
    """A claim on a suspect: who has it, for how long at a time, and when its process last told that it holds it."""

    __slots__ = ("beat_ms", "lease_ms", "worker")

    def __init__(self, worker: Worker, lease_ms: int, beat_ms: int) -> None:
        self.worker: Worker = worker
        self.lease_ms: int = lease_ms
        self.beat_ms: int = beat_ms


class Graves:
    """Dead letters, by message and revision."""

    def __init__(self) -> None:
        self._letters: dict[str, dict[int, DeadLetter]] = {}

    def add(self, letter: DeadLetter) -> None:
        """Keep a letter, in the place of one that has the same key."""
        self._letters.setdefault(letter.key.id, {})[letter.key.revision] = letter

    def get(self, key: DeadKey) -> DeadLetter | None:
        """Return a letter, None if there is none."""
        return self._letters.get(key.id, {}).get(key.revision)

    def remove(self, key: DeadKey) -> bool:
        """Delete a letter; return whether there was one."""
        revisions = self._letters.get(key.id, {})
        was_there = revisions.pop(key.revision, None) is not None
        if was_there and not revisions:
            del self._letters[key.id]
        return was_there

    def of(self, message_id: str) -> Iterable[DeadLetter]:
        """Return a message's letters, in no order."""
        return self._letters.get(message_id, {}).values()

    def __iter__(self) -> Iterator[DeadLetter]:
        return chain.from_iterable(each.values() for each in self._letters.values())


class Tables:
    """All that a memory store holds."""

    def __init__(self, *, clock: Clock | None = None, journal: int = 0) -> None:
        self._clock = clock or SystemClock()
        self._entries: dict[str, Entry] = {}
        self._recurring: dict[str, Entry] = {}
        self._leased: dict[str, Entry] = {}
        self._trials: dict[str, Trial] = {}
        self._search = t.Trials()
        self._occurrences: dict[str, dict[str, None]] = {}  # by series: the ids of those that go on beside it
        self._superseded: dict[str, dict[tuple[str, int], int]] = {}  # by base id: see `_supersede`
        self._lanes: defaultdict[Lane, LaneQueue] = defaultdict(LaneQueue)
        self._expiring = Waiting(lambda entry: entry.standing in (Standing.IN_LANE, Standing.PARKED))
        self._expiring_held: list[Entry] = []
        self._dead = Graves()
        self._answers: Remembered[bytes, Outcome] = Remembered()  # by op
        self._revisions: Remembered[str, int] = Remembered()  # of ids that ended
        self._tombstones: Remembered[str, int] = Remembered()  # versions of ids that ended
        self._positions: dict[str, int] = {}
        self._journal: deque[JournalEntry] | None = deque(maxlen=journal) if journal else None
        self._workers: set[Worker] = set()
        self._sequence, self._numbers, self._claims = count(1), count(1), count(1)
        self._ahead_since = 0

    def now_ms(self) -> int:
        """Return the clock's time."""
        return self._clock.now_ms()

    def seconds_until(self, at_ms: int) -> float:
        """Return the seconds from now until an instant of the store's clock, for a timer."""
        return self._clock.seconds_until(at_ms)

    def _insert(self, record: Record, place_ms: int, sequence: int | None = None) -> None:
        """Put a message into its lane, in the place of what stood under its id; behind others, unless told where."""
        old = self._entries.get(record.id)
        if old is not None:
            self._take_out(old)
        entry = self._entries[record.id] = Entry(
            record, place_ms, next(self._sequence) if sequence is None else sequence
        )
        if record.envelope.rule is not None:
            self._recurring[record.id] = entry
        elif (occurrence := t.occurrence_of(record.id)) is not None:
            self._occurrences.setdefault(occurrence[0], {})[record.id] = None
        lane = self._lanes[record.envelope.lane]
        lane.messages += 1
        lane.add(entry)
        if record.late is not LateAction.DELIVER and record.envelope.rule is None:
            self._expiring.push(max(place_ms, record.expires_ms + 1), entry)
        self._wake()

    def _take_out(self, entry: Entry) -> None:
        """Take a message out of wherever it stands."""
        lane = self._lanes[entry.record.envelope.lane]
        lane.messages -= 1
        if entry.standing is Standing.PARKED:
            lane.unpark(entry)
        entry.standing = Standing.GONE
        message_id = entry.record.id
        self._entries.pop(message_id, None)
        self._recurring.pop(message_id, None)
        self._leased.pop(message_id, None)
        self._trials.pop(message_id, None)
        if (occurrence := t.occurrence_of(message_id)) is not None:
            self._strike(occurrence[0], message_id)

    def _strike(self, series_id: str, occurrence_id: str) -> None:
        occurrences = self._occurrences.get(series_id, {})
        occurrences.pop(occurrence_id, None)
        if not occurrences:
            self._occurrences.pop(series_id, None)

    def _supersede(self, entry: Entry) -> None:
        """Remember the claim on a message that is being replaced until it is settled, or its lease is over.

        A retry of an occurrence is a version of its series' id: it is remembered under that one, by its own.
        """
        if entry.token:
            claims = self._superseded.setdefault(t.base_id(entry.record.id), {})
            claims[entry.record.id, entry.record.revision] = entry.token

    def _has_superseded(self, message_id: str, now: int) -> bool:
        """Say whether a version of this id that was replaced is still in flight."""
        claims = self._superseded.get(t.base_id(message_id), {})
        of_id = [token for (each, _), token in claims.items() if message_id in (each, t.base_id(each))]
        return any(not t.is_lease_over(token, now) for token in of_id)

    def _renew_superseded(self, message_id: str, revision: int, tokens: tuple[int, int]) -> bool:
        """Set the lease of a claim on what was replaced from one token to another; say whether it is held."""
        claims = self._superseded.get(t.base_id(message_id), {})
        is_held = claims.get((message_id, revision)) in tokens
        if is_held:
            claims[message_id, revision] = tokens[1]
        return is_held

    def _is_over(self, token: int, now: int) -> bool:
        """Say whether a lease is over; a lease that is too long, once its holder has had time to set it right."""
        if not t.is_lease_too_long(token, now):
            return t.is_lease_over(token, now)
        self._ahead_since = t.ahead_since(self._ahead_since, now)
        return self._ahead_since + t.RIGHTING_MS <= now

    def _end_superseded(self, message_id: str, revision: int, token: int) -> bool:
        """Forget a claim on what was replaced; say whether it was held."""
        base_id = t.base_id(message_id)
        claims = self._superseded.get(base_id, {})
        if claims.get((message_id, revision)) != token:
            return False
        del claims[message_id, revision]
        if not claims:
            del self._superseded[base_id]
        return True

    def _end(self, entry: Entry, now: int) -> None:
        """Take a message out for good."""
        self._take_out(entry)
        self._forget(entry.record, now)

    def _forget(self, record: Record, now: int) -> None:
        """Remember for a while what is needed of a message that is gone."""
        message_id, version = record.id, record.envelope.version
        if t.occurrence_of(message_id) is not None:
            self._leave_series(message_id)
            return
        self._remember_answer(record, now)
        self._revisions.add(message_id, record.revision, until_ms=now + RETRY_WINDOW_MS)
        if version is not None:
            newest = max(version, self._tombstones.get(message_id, now) or 0)
            self._tombstones.add(message_id, newest, until_ms=now + TOMBSTONE_WINDOW_MS)

    def _remember_answer(self, record: Record, now: int) -> None:
        """Remember what the put that made this record was answered, before the record stops telling it."""
        until = record.revision + RETRY_WINDOW_MS
        if until > now and record.op != t.NO_OP and self._answers.get(record.op, now) is None:
            self._answers.add(record.op, t.first_answer(record), until_ms=until)

    def _series_of(self, message_id: str) -> tuple[Entry | None, int]:
        """Return an occurrence's series, None if there is none any more, and the occurrence's due time."""
        series_id, due_ms = t.occurrence_of(message_id) or ("", 0)
        series = self._entries.get(series_id)
        return (None if series is None or series.record.envelope.rule is None else series), due_ms

    def _leave_series(self, message_id: str) -> None:
        """Strike an occurrence that has ended from its series' list."""
        series, due_ms = self._series_of(message_id)
        if series is not None and due_ms in series.record.live:
            live = tuple(due for due in series.record.live if due != due_ms)
            series.record = replace(series.record, live=live)

    def _bury(self, record: Record, reason: DeadReason, now: int) -> None:
        """Keep a message, or the occurrence at which a series stands, as a dead letter."""
        if record.envelope.rule is not None:
            record = t.as_occurrence(record)
        self._dead.add(DeadLetter(record, reason, now))
        self._note("dead", record, now, reason)

    def _expire(self, entry: Entry, now: int) -> None:
        """End a message that is late, as its policy says."""
        if entry.record.late is LateAction.DEAD_LETTER:
            self._bury(entry.record, "late", now)
        else:
            self._note("dropped", entry.record, now, "late")
        self._end(entry, now)

    def _note(self, event: str, record: Record, now: int, detail: str = "") -> None:
        if self._journal is not None:
            number, lane = next(self._numbers), record.envelope.lane
            entry = (number, now, event, record.id, record.revision, lane, record.due_ms, record.attempt, detail)
            self._journal.append(JournalEntry(*entry))

    def _wake(self) -> None:
        for worker in self._workers:
            worker.wakeup.set()

    def _is_served(self, lane: Lane, now: int) -> bool:
        return any(lane in worker.lanes and worker.seen_ms > now - SERVED_WINDOW_MS for worker in self._workers)
