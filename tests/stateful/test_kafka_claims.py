"""Claims and answers of one partition owner for a series that changes while its claims are open.

All sequences of a few steps are played with the store's own index, on a log of records: by the owner, by a user who
writes records without asking it, and by another owner that reads the log from its start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count, product

import pytest

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.pending.changes import Change
from aiodelay.backends.kafka.pending.checkpoint import Witness, checkpoint_of
from aiodelay.backends.kafka.pending.pending_index import PendingIndex
from aiodelay.backends.kafka.pending.placement import Placement
from aiodelay.core.dict_table.table import Worker
from aiodelay.core.values import (
    Again,
    At,
    Cancel,
    Claim,
    Demand,
    Done,
    Envelope,
    Outcome,
    Put,
    Record,
    Refused,
    Settlement,
    SettleOutcome,
    Stored,
)
from aiodelay.kafka.records import Read, Wire, encode_cancel, encode_record
from aiodelay.testing.clock import VirtualClock

LANE, LEASE_MS = "work", 15_000
STEPS = (
    *("owner replaces", "owner cancels", "user replaces", "user cancels"),
    *("owner replaces in vain", "reads", "claims", "first fails", "last fails", "last ends", "another owner"),
)
BEGINNINGS = {
    "a retry waits": ("claims", "first fails"),
    "a retry is in flight": ("claims", "first fails", "claims"),
    "of two retries one is in flight": ("claims", "first fails", "claims", "last fails", "claims", "first fails"),
    "a user has replaced it, unread": ("claims", "first fails", "claims", "user replaces"),
    "it was replaced in vain": ("claims", "first fails", "claims", "owner replaces in vain"),
}


class Play:
    """A partition's log, and the owner that reads and writes it."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.log: list[Read] = []
        self.offsets = count()
        self.version = 0  # the newest that was written
        self.known = 0  # the newest that the owner has read
        self.least = 0  # no version below this one begins any more, as far as the owner has read
        self.written: dict[int, tuple[int, int]] = {}  # what these are once the owner has read what a user wrote there
        self.held: list[Claim] = []
        self.ops = count(1)
        self.owner = self.opened()
        self.command(self.put())

    def opened(self) -> PendingIndex:
        index = PendingIndex(clock=self.clock, placement=Placement("t/0"), claims=count(1))
        index.workers.add(Worker("worker", (LANE,), self.clock.now_ms()))
        return index

    def step(self, name: str) -> None:
        self.clock.move(10)
        steps: dict[str, Callable[[], object]] = {
            "owner replaces": lambda: self.command(self.put()),
            "owner replaces in vain": self.replace_in_vain,
            "owner cancels": lambda: self.command(Cancel(self.op(), "s")),
            "user replaces": lambda: self.user_writes(is_put=True),
            "user cancels": lambda: self.user_writes(is_put=False),
            "reads": self.read,
            "claims": self.claim,
            "first fails": lambda: self.settle(0, fails=True),
            "last fails": lambda: self.settle(-1, fails=True),
            "last ends": lambda: self.settle(-1, fails=False),
            "another owner": self.hand_over,
            "cleaner": self.clean,
        }
        steps[name]()

    def repetitions(self) -> Sequence[str]:
        """Return the steps that would now do the same as another step."""
        if not self.held:
            return "last fails", "last ends"
        return ("last fails",) if len(self.held) == 1 else ()

    def op(self) -> bytes:
        return next(self.ops).to_bytes(8)

    def put(self) -> Put:
        self.version += 1
        envelope = Envelope("s", LANE, payload=b"%d" % self.version, rule={"e": 60_000})
        return Put(self.op(), envelope, At(self.clock.now_ms()))

    # --- what the owner does ------------------------------------------------------------------------------

    def read(self) -> None:
        """Read all, and end what that calls for."""
        for each in [read for read in self.log if read.offset >= self.owner.state.read_to]:
            stands = self.owner.knows("s")
            self.owner.reader.read(each)
            known, least = self.written.get(each.offset, (0, 0))
            self.known = max(self.known, known)
            if stands:  # otherwise a new life begins, and a retry of the one before goes on
                self.least = max(self.least, least)
        self.owner.repairs.make()
        self.commit()
        owner, now = self.owner, self.clock.now_ms()
        checkpoint_of(owner.state, owner.table, owner.placement, witness=Witness(-1, 0, 0), now=now, whole_ms=0)
        assert all(map(self.owner.state.stands, self.owner.state.over)), "an end that was read is to be written again"

    def commit(self) -> list[Change]:
        """Write what the owner has decided, and read it back."""
        written = list(self.owner.log.changes)
        self.owner.log.changes.clear()
        for change in written:
            change.offset = [self.append(wire) for wire in change.wires()][-1]
        if written:
            self.read()
        for change in written:
            self.owner.log.written(change)
        return written

    def append(self, wire: Wire) -> int:
        offset = next(self.offsets)
        self.log.append(Read(offset, self.clock.now_ms(), *wire))
        return offset

    def command(self, command: Put | Cancel) -> None:
        while True:
            outcome, change = self.owner.decisions.command(command)
            self.commit()
            if change is None or change.counted or change.is_users:
                break
        self.check(command, outcome)

    def replace_in_vain(self) -> None:
        """Decide to replace, and let the session end before that is written."""
        self.owner.decisions.command(self.put())
        self.owner.log.changes.clear()
        self.owner.give_back()

    def check(self, command: Put | Cancel, outcome: Outcome) -> None:
        in_flight = bool(self.held)
        if isinstance(outcome, Refused):
            assert outcome.reason == "not_found"
            return
        assert isinstance(outcome, Stored)
        if isinstance(command, Cancel):
            assert outcome.answer == ("in_flight" if in_flight else "cancelled")
            self.least = self.known + 1
        else:
            assert outcome.is_older_in_flight is (outcome.answer == "replaced" and in_flight)
            self.known = int(command.envelope.payload)
            self.least = self.known if outcome.answer == "replaced" else self.least

    def claim(self) -> None:
        claimed = self.owner.claiming.claim(
            {LANE: Demand(10)}, LEASE_MS, 1, Worker("worker", (LANE,), 0), self.clock.now_ms()
        )
        self.commit()
        assert all(version_of(claim) >= self.least for claim in claimed.claims), "an old version was given out"
        self.held += claimed.claims

    def settle(self, number: int, *, fails: bool) -> None:
        if not self.held:
            return
        claim = self.held.pop(number)
        key = claim.record.id, claim.record.revision, claim.token
        now = self.clock.now_ms()
        settlement: Settlement = Again(*key, now, 1, "error", now) if fails else Done(*key)
        outcome, _ = self.owner.decisions.settle(settlement)
        self.commit()
        assert outcome is not SettleOutcome.GONE

    def hand_over(self) -> None:
        """Another owner begins: of what is in flight it knows nothing."""
        self.owner, self.held = self.opened(), []
        self.read()

    def clean(self) -> None:
        """Let the cleaner keep the newest record of each key, once the owner has read and mended all."""
        self.read()
        self.log = list({read.key: read for read in self.log}.values())

    # --- what a user does ---------------------------------------------------------------------------------

    def user_writes(self, *, is_put: bool) -> None:
        now = self.clock.now_ms()
        if is_put:
            put = self.put()
            wire = encode_record(Record(put.envelope, now, now, put.op))
        else:
            wire = encode_cancel(records.key_of("s"))
        self.written[self.append(wire)] = self.version, self.version if is_put else self.version + 1


def version_of(claim: Claim) -> int:
    return int(claim.record.envelope.payload)


def play(beginning: Sequence[str], steps: Sequence[str]) -> None:
    played = Play()
    for step in beginning:
        played.step(step)
    for step in steps:
        if step in played.repetitions():
            return
        played.step(step)
    for step in ("reads", "claims", "another owner", "claims", "cleaner", "another owner", "claims"):
        played.step(step)


@pytest.mark.parametrize("number", [2, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS.keys())
def test_s4_s5_no_old_version_begins_and_a_cancel_tells_of_what_is_in_flight(
    beginning: Sequence[str], number: int
) -> None:
    for steps in product(STEPS, repeat=number):
        try:
            play(beginning, steps)
        except AssertionError as error:
            error.add_note(", ".join([*beginning, *steps]))
            raise
