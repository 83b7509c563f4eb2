"""`Play`: run steps for one message on the rulebook, and record the calls and the answers that a store must give."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from dataclasses import replace as replace_action
from itertools import count
from typing import TypeAlias

from msgspec.structs import replace

from aiodelay.core import transitions as t
from aiodelay.core.dict_table.claims import DictClaiming, LaneHeads
from aiodelay.core.dict_table.entries import Entry
from aiodelay.core.dict_table.inspection import DictInspection
from aiodelay.core.dict_table.table import DictTable, Worker, Workers
from aiodelay.core.rules import Rules
from aiodelay.core.values import (
    LEASE_MS,
    Again,
    Cancel,
    Claim,
    Claimed,
    Command,
    Dead,
    DeadKey,
    DeadLetter,
    Demand,
    Done,
    Fire,
    JournalEntry,
    Lane,
    Put,
    PutBack,
    Query,
    Renewal,
    Reschedule,
    Settlement,
    Snapshot,
)
from aiodelay.testing.clock import START

__all__ = [
    "LEAP_MS",
    "PARKED",
    "START_MS",
    "WORKER",
    "Action",
    "Asked",
    "Claims",
    "Leap",
    "Play",
    "Purge",
    "Seen",
    "by_id",
    "by_message",
    "is_last",
]

START_MS = int(START.timestamp() * 1000)
LEAP_MS = 25_000
"""The step of the clock that ends leases: longer than each lease, and shorter than the retry window of commands."""
PARKED = "paused"
"""An address that is paused in both lanes of a case."""
WORKER = "worker"
NO_TOKEN = 4_097


# --- what a store is asked, and answers -------------------------------------------------------------------


@dataclass(frozen=True)
class Claims:
    """Claim all due messages in the lanes of the case, until none is left."""


@dataclass(frozen=True)
class Leap:
    """Let all leases end. Then tidy, or not."""

    is_tidied: bool


@dataclass(frozen=True)
class Purge:
    """Delete a dead letter."""

    key: DeadKey


Asked: TypeAlias = Command | Settlement | Renewal | Claims | Leap | DeadKey | Purge | PutBack


@dataclass(frozen=True)
class Action:
    """One step of a case: the call of a store, and the answer of the rulebook.

    Attributes:
        asked: The call, with the tokens of the rulebook.
        slot: The claim of the case that a settlement or renewal is about; None = no claim: keep the token of `asked`.
        off: The number that is added to the token of that claim.
        step: The name of the step.
        answer: The answer; for a claim, the records.
    """

    asked: Asked
    slot: int | None = None
    off: int = 0
    step: str = ""
    answer: object = None


@dataclass(frozen=True)
class Seen:
    """Everything that can be read about one case."""

    snapshots: tuple[Snapshot, ...] = ()
    letters: tuple[DeadLetter, ...] = ()
    journal: tuple[JournalEntry, ...] = ()


@dataclass
class Slot:
    """A claim of a case."""

    id: str
    revision: int
    token: int


# --- one case on the rulebook -----------------------------------------------------------------------------


class Play:
    """The rulebook with one message.

    Args:
        number: The number of the case.
        lanes: The lanes of the case, the usual lane first.
        has_journal: Keep a journal.
    """

    def __init__(self, number: int = 1, lanes: tuple[Lane, Lane] = ("a", "b"), *, has_journal: bool = False) -> None:
        self.id, self.number, self.lanes = f"m{number}", number, lanes
        self.now = START_MS
        workers = Workers()
        self.worker = Worker(WORKER, lanes, self.now)
        workers.add(self.worker)
        self.table = DictTable(workers, journal=1_000 if has_journal else 0)
        self.rules: Rules[Entry] = Rules(self.table)
        self.claiming = DictClaiming(self.table, self.rules, LaneHeads(self.table, self.rules), count(1))
        self.inspection = DictInspection(self.table, self.claiming)
        self.slots: list[Slot] = []
        self.commands: list[Command] = []
        self.first_due_ms = START_MS
        self.actions: list[Action] = []
        self.has_suspects = False

    def hold(self) -> None:
        """Pause the address `PARKED` of both lanes."""
        for lane in self.lanes:
            self.inspection.pause(lane, PARKED)

    def step(self, name: str, make: Callable[[Play], Action]) -> None:
        """Play a step. Record its call and the answer of the rulebook."""
        action = make(self)
        self.actions.append(replace_action(action, step=name, answer=self._answer(action)))

    def op(self) -> bytes:
        """Return the op of the next command."""
        return (self.number << 16 | (len(self.commands) + 1)).to_bytes(8, "big")

    def standing(self) -> Entry | None:
        """Return the stored message with the id of the case."""
        return self.table.find(self.id)

    def key(self, *, oldest: bool = False) -> DeadKey:
        """Return the key of the newest dead letter; if there is no dead letter, a key that does not exist."""
        keys = sorted((letter.key for letter in self.table.letters), key=lambda key: (key.revision, key.id))
        return (keys[0] if oldest else keys[-1]) if keys else DeadKey(self.id, 1)

    def slot(self, at: int) -> tuple[int | None, Slot]:
        """Return a claim by its place among the claims of the case; if the place is empty, a claim never made."""
        if not self.slots:
            return None, Slot(self.id, START_MS, NO_TOKEN)
        number = range(len(self.slots))[at]
        return number, self.slots[number]

    def seen(self) -> Seen:
        """Return everything that can be read."""
        snapshots = self.inspection.search(Query(limit=1000), self.now)
        letters = self.inspection.dead_letters(None, None, None, 1000)
        return Seen(tuple(snapshots), tuple(letters), by_message(self.table.journal or ()))

    # --- carrying out -------------------------------------------------------------------------------------

    def _answer(self, action: Action) -> object:
        """Carry out the call on the rulebook. Return the answer."""
        asked = action.asked
        answer: object = None
        match asked:
            case Put() | Cancel() | Reschedule() | Fire():
                self.commands.append(asked)
                answer = self.rules.apply(asked, self.now)
            case Done() | Again() | Dead():
                answer = self.rules.settle(asked, self.now)
            case Renewal():
                answer = self._renew(asked, action.slot)
            case Claims():
                answer = self._claim()
            case Leap():
                self._leap(asked)
            case DeadKey():
                answer = self.rules.redrive(asked, self.now)
            case Purge():
                self.table.letters.remove(asked.key)
            case PutBack():
                answer = self.rules.put_back(asked, self.now)
        return answer

    def _renew(self, renewal: Renewal, slot: int | None) -> object:
        outcome = self.rules.renew(renewal)
        if outcome != "lost" and slot is not None:
            self.slots[slot].token = renewal.to
        return outcome

    def _claim(self) -> object:
        demand = {lane: Demand(500) for lane in self.lanes}
        claims: list[Claim] = []
        for turn in count(1):
            claimed = self.claiming.claim(demand, LEASE_MS, turn, self.worker, self.now)
            claims += claimed.claims
            if is_last(claimed):
                break
        claims.sort(key=by_id)
        self.slots += [Slot(claim.record.id, claim.record.revision, claim.token) for claim in claims]
        self.has_suspects = self.has_suspects or any(t.is_suspect(each.record) for each in self.table.entries.values())
        return tuple(claim.record for claim in claims)

    def _leap(self, leap: Leap) -> None:
        self.now += LEAP_MS
        if leap.is_tidied:
            self.claiming.tidy(self.worker, self.lanes, 1000, self.now)

    # --- its state ----------------------------------------------------------------------------------------

    def state(self) -> object:
        """Return a value that identifies this state in detail."""
        answers = self.table.answers
        is_remembered = answers.last_revision(self.id, self.now) is not None
        ended = answers.ended_version(self.id, self.now)
        replaced = {t.is_lease_over(token, self.now) for *_, token in self.table.superseded}
        reasons = {letter.reason for letter in self.table.letters}
        entries = sorted(self._of(entry) + self._more_of(entry) for entry in self.table.entries.values())
        return (
            self.outline(),
            tuple(entries),
            is_remembered,
            ended,
            frozenset(replaced),
            frozenset(reasons),
            self._where(0),
        )

    def outline(self) -> object:
        """Return a value that identifies this state roughly."""
        table, main = self.table, self.standing()
        beside = sorted(self._of(entry) for entry in table.entries.values() if entry is not main)
        replaced = frozenset(each == self.id for each, *_ in table.superseded)
        letters = frozenset(letter.record.id == self.id for letter in table.letters)
        has_version = table.answers.ended_version(self.id, self.now) is not None
        of_main = () if main is None else self._of(main)
        return of_main, tuple(beside[:2]), replaced, letters, has_version, self._where(-1)

    def _of(self, entry: Entry) -> tuple[object, ...]:
        record = entry.record
        lease = 0 if not entry.token else 2 if t.is_lease_over(entry.token, self.now) else 1
        kind = record.envelope.rule is not None, record.envelope.version is not None, record.late > 0
        stands = entry.place_ms > self.now, record.no_retry, bool(record.live)
        return lease, *kind, *stands, min(record.lapses, t.SUSPECT_LAPSES), record.appended is not None

    def _more_of(self, entry: Entry) -> tuple[object, ...]:
        record, envelope = entry.record, entry.record.envelope
        written = (envelope.rule or {}).get("e", 0), envelope.version or 0, envelope.lane, envelope.address
        times = entry.place_ms != record.due_ms, record.put_due_ms is not None, len(record.live)
        items = envelope.payload.count(b"\n"), (record.appended or b"").count(b"\n")
        return *written, *times, *items, record.lapses, record.alone, record.attempt > 0, int(record.late)

    def _where(self, at: int) -> str:
        """Return the state of a claim of the case, as text."""
        number, slot = self.slot(at)
        entry = self.table.find(slot.id)
        if number is None:
            return "none"
        if entry is not None and entry.token == slot.token:
            return "held" if slot.id == self.id else "held beside"
        is_replaced = (slot.id, slot.revision, slot.token) in self.table.superseded
        return "replaced" if is_replaced else "over"


def by_message(entries: Iterable[JournalEntry]) -> tuple[JournalEntry, ...]:
    """Return the entries without their numbers, grouped by message: in one step, messages have no common order."""
    return tuple(sorted((replace(entry, number=0) for entry in entries), key=lambda entry: entry.id))


def is_last(claimed: Claimed) -> bool:
    """Return whether no due message is left. If the claim has just returned suspects, there may be more."""
    is_trial = any(t.is_suspect(claim.record) for claim in claimed.claims)
    return not is_trial and (claimed.next_due_ms is None or claimed.next_due_ms > claimed.now_ms)


def by_id(claim: Claim) -> tuple[str, int]:
    """Return a sort key for the claims that a case made at once."""
    return claim.record.id, claim.record.revision
