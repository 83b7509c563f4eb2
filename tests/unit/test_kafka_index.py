"""The pending index of a partition while its changes are being written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count, pairwise, product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client import Outgoing
from aiodelay.backends.kafka.pending.changes import Change
from aiodelay.backends.kafka.pending.far_index import FarIndex
from aiodelay.backends.kafka.pending.pending_index import PendingIndex
from aiodelay.backends.kafka.pending.placement import Placement
from aiodelay.backends.kafka.pending.rate_limit import OVERDUE_MS, RateLimit
from aiodelay.backends.kafka.watermark import Watermark
from aiodelay.core.dict_table.table import Worker
from aiodelay.core.transitions import NO_OP, occurrence_id
from aiodelay.core.values import (
    Again,
    At,
    Cancel,
    Claim,
    Command,
    Dead,
    DeadLetter,
    Demand,
    Done,
    Envelope,
    Fire,
    LateAction,
    Put,
    Query,
    Record,
    Refused,
    Renewal,
    RenewOutcome,
    Reschedule,
    SettleOutcome,
    Stored,
)
from aiodelay.kafka.records import (
    KEEP,
    Memory,
    Read,
    Wire,
    encode_ask_to_cancel,
    encode_cancel,
    encode_dead,
    encode_end,
    encode_keep,
    encode_mark,
    encode_record,
)
from aiodelay.testing.clock import VirtualClock

ALL = Demand(100)
NOW = VirtualClock().now_ms()


def put(offset: int, payload: bytes, *, of: str = "m", due_ms: int = NOW, expires_ms: int = 0) -> Read:
    """A user's record, as it is read."""
    late = LateAction.DROP if expires_ms else LateAction.DELIVER
    record = Record(Envelope(of, "kafka", "t", payload=payload), 0, due_ms, NO_OP, expires_ms, late)
    return Read(offset, NOW, *encode_record(record))


def moving(index: PendingIndex) -> list[bytes]:
    """Decide to move what is due; return the payloads."""
    due = index.due.take("kafka", ALL, {"t"}, index._clock.now_ms())
    for key, entry in due.entries:
        index.due.move(key, entry, Outgoing("t", None, b"", []), index._clock.now_ms())
    return [entry.record.envelope.payload for _, entry in due.entries]


def test_a_new_version_is_moved_only_once_the_end_of_the_one_before_was_read() -> None:
    index = PendingIndex(clock=VirtualClock(), placement=Placement("t/0"), claims=count(1))
    index.reader.read(put(0, b"old"))
    assert moving(index) == [b"old"]
    (ending,) = index.log.changes
    index.reader.read(put(1, b"new"))
    assert moving(index) == []
    (wire,) = ending.wires()
    index.reader.read(Read(2, NOW, *wire))
    index.log.written(ending)
    assert moving(index) == [b"new"]


def test_who_follows_a_put_that_gives_way_wins_and_it_ends_before_anything_else_is_written() -> None:
    for followed_by in (put(1, b"followed"), Read(1, NOW, *encode_cancel(b"m"))):
        index = PendingIndex(clock=VirtualClock(), placement=Placement("t/0"), claims=count(1))
        index.reader.read(Read(0, NOW, *encode_keep(Record(Envelope("m", "kafka", "t"), 0, NOW, NOW.to_bytes(8)))))
        index.reader.read(followed_by)
        moved = moving(index)
        index.repairs.make()
        assert [wire.key for wire in index.log.changes[0].wires()] == [KEEP + b"m"]
        assert len(index.log.changes) == 1 + len(moved)
        index.reader.read(Read(2, NOW, *encode_end(KEEP + b"m", read_to=2, outcome="ended")))
        assert moved == ([] if followed_by.value is None else [b"followed"])


def test_a_session_that_ends_tells_of_every_change_also_of_two_of_one_key() -> None:
    clock = VirtualClock()
    index = PendingIndex(clock=clock, placement=Placement("t/0"), claims=count(1))
    index.reader.read(put(0, b"old"))
    moving(index)
    index.reader.read(put(1, b"new", expires_ms=NOW + 1000))
    clock.move(5000)
    moving(index)  # which ends the new one: it is late
    begun = list(index.log.changes)
    assert len(begun) == 2
    assert index.give_back() == begun
    assert index.give_back() == []


def test_a_partition_that_is_read_anew_is_told_to_hold_keys_of_others_only_if_it_still_does() -> None:
    placement = Placement("t/0", 1 - records.partition_of(b"m", 2), 2)
    placement.guard = str
    index = PendingIndex(clock=VirtualClock(), placement=placement, claims=count(1))
    index.reader.read(put(0, b"astray"))
    assert index.placement.is_mixed
    anew = index.emptied(FarIndex())
    assert (anew.placement.is_mixed, anew.placement.guard, anew.name) == (False, str, "t/0")
    anew.reader.read(put(0, b"astray"))
    assert anew.placement.is_mixed


def claims_of(index: PendingIndex, worker: Worker) -> Sequence[Claim]:
    return index.claiming.claim({"kafka": ALL}, 1_000, 1, worker, index._clock.now_ms()).claims


def taken(index: PendingIndex) -> list[bytes]:
    """Claim what is due; return the payloads."""
    return [
        claim.record.envelope.payload
        for claim in index.claiming.claim(
            {"kafka": ALL}, 1_000, 1, Worker("worker", (), 0), index._clock.now_ms()
        ).claims
    ]


@pytest.mark.parametrize("name", ["put", "cancel", "reschedule", "fire"])
@pytest.mark.parametrize("take", [moving, taken])
@pytest.mark.parametrize("rate", [0, 1_000], ids=["", "overdue"])
def test_s3_what_was_to_be_changed_when_a_session_ended_is_there_once(
    name: str, take: Callable[[PendingIndex], list[bytes]], rate: int
) -> None:
    clock = VirtualClock()
    index = PendingIndex(clock=clock, placement=Placement("t/0"), claims=count(1), pace=RateLimit(rate))
    index.reader.read(put(0, b"old", due_ms=NOW + 1_000))
    clock.move(2 * OVERDUE_MS if rate else 0)
    assert moving(index) == []
    for _ in range(3):
        assert index.decisions.command(COMMANDS[name])[1] is not None
        index.give_back()
        index.log.changes.clear()
    clock.move(5_000)
    assert take(index) + take(index) == [b"old"]


def read_back(index: PendingIndex, change: Change) -> None:
    """Read what a change has written."""
    wires = list(change.wires())
    change.offset = index.state.read_to + len(wires) - 1
    for wire in wires:
        index.reader.read(Read(index.state.read_to, NOW, *wire))
    index.log.written(change)


OP = b"command!"
COMMANDS: dict[str, Command] = {
    "put": Put(OP, Envelope("m", "kafka", "t", payload=b"ours"), At(NOW)),
    "cancel": Cancel(OP, "m"),
    "reschedule": Reschedule(OP, "m", At(NOW + 1)),
    "fire": Fire(OP, "m"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_s4_s5_a_command_that_did_not_count_is_decided_again(name: str) -> None:
    index = PendingIndex(clock=VirtualClock(), placement=Placement("t/0"), claims=count(1))
    index.reader.read(put(0, b"old", due_ms=NOW + FAR_MS))
    change = index.decisions.command(COMMANDS[name])[1]
    assert change is not None
    index.log.changes.clear()
    index.reader.read(put(1, b"acknowledged before the command was given", due_ms=NOW + FAR_MS))
    read_back(index, change)
    assert not change.counted
    assert index.decisions.command(COMMANDS[name])[1] is not None


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_answer_is_remembered_though_nobody_waits_for_it(name: str) -> None:
    index = PendingIndex(clock=VirtualClock(), placement=Placement("t/0"), claims=count(1))
    index.reader.read(put(0, b"old", due_ms=NOW + FAR_MS))
    outcome, change = index.decisions.command(COMMANDS[name])
    assert change is not None
    read_back(index, change)
    again, nothing = index.decisions.command(COMMANDS[name])
    assert isinstance(outcome, Stored)
    assert isinstance(again, Stored)
    assert again.answer in {outcome.answer, "stored"}
    assert nothing is None


def test_a_revision_grows_also_if_a_replacement_was_cancelled_and_the_clock_stepped_back() -> None:
    clock = VirtualClock()
    index = PendingIndex(clock=clock, placement=Placement("t/0"), claims=count(1))
    index.reader.read(put(0, b"first"))
    (first,) = index.inspection.search(Query(), NOW)
    change = index.decisions.command(COMMANDS["put"])[1]
    assert change is not None
    read_back(index, change)
    index.reader.read(Read(index.state.read_to, NOW, *encode_cancel(b"m")))
    clock.step(timedelta(minutes=-1))
    outcome, _ = index.decisions.command(Put(b"another!", Envelope("m", "kafka", "t"), At(NOW)))
    assert isinstance(outcome, Stored)
    assert outcome.revision > first.record.revision


def test_s4_a_claim_renewed_while_its_replacement_is_written_is_renewed_until_it_ends() -> None:
    clock = VirtualClock()
    index = PendingIndex(clock=clock, placement=Placement("t/0"), claims=count(1))
    index.reader.read(put(0, b"old"))
    (claim,) = claims_of(index, Worker("worker", (), 0))
    replacing = index.decisions.command(COMMANDS["put"])[1]
    assert replacing is not None
    tokens = [claim.token + 4096 * 1000 * each for each in range(3)]
    renewals = [Renewal("m", claim.record.revision, token, to) for token, to in pairwise(tokens)]
    assert index.rules.renew(renewals[0]) is RenewOutcome.RENEWED
    read_back(index, replacing)
    assert index.rules.renew(renewals[1]) is RenewOutcome.SUPERSEDED
    assert index.decisions.settle(Done("m", claim.record.revision, tokens[2]))[0] is SettleOutcome.SUPERSEDED


def test_what_was_put_twice_and_ended_in_between_does_not_come_back() -> None:
    clock = VirtualClock()
    for due_ms in DUES:
        index = PendingIndex(clock=clock, placement=Placement("t/0"), claims=count(1))
        index.far.look_ahead(NOW + HORIZON_MS)
        record = Record(Envelope("m", "kafka", "t"), 0, due_ms, b"12345678")
        memory = Memory([(record.op.hex(), "stored", 1, due_ms, NOW + 1000)])
        for offset in (0, 1):  # the second, because its first answer was lost
            index.reader.read(Read(offset, NOW, *encode_record(record)))
        far = index.state.far.find(b"m")
        index.reader.read(Read(2, NOW, *encode_end(b"m", read_to=1, outcome="delivered", memory=memory)))
        if far is not None:
            index.come_near(Read(1, NOW, *encode_record(record)))
        assert moving(index) == []
        index.repairs.make()
        (ending,) = index.log.changes
        assert [wire.value for wire in ending.wires()] == [None]


@pytest.mark.parametrize("user", list(product([None, "put", "cancel"], repeat=4)))
def test_ends_taken_in_unread_leave_what_they_leave_when_they_are_read(user: Sequence[str | None]) -> None:
    """A user writes of the first or second message before what ends them, or between and after."""
    ways = []
    for is_read in (True, False):
        index = PendingIndex(clock=VirtualClock(), placement=Placement("t/0"), claims=count(1))
        log = [put(0, b"0", of="m0"), put(1, b"1", of="m1"), put(2, b"2", of="m2")]
        for read in log:
            index.reader.read(read)
        assert moving(index) == [b"0", b"1", b"2"]
        changes = list(index.log.changes)
        for i, (of, what) in enumerate(zip(("m0", "m1", "m0", "m1"), user, strict=True)):
            if i == 2:
                for change in changes:
                    change.offset = len(log)
                    log += [Read(len(log), NOW, *wire) for wire in change.wires()]
            if what is not None:
                end = Read(len(log), NOW, *encode_cancel(of.encode()))
                log.append(put(len(log), b"new", of=of) if what == "put" else end)
        between = [read for read in log[3:] if read.offset < changes[0].offset]
        for read in between:
            index.reader.read(read)
        if not is_read:
            index.reader.read_own(changes)
            assert index.state.read_to == changes[0].offset + (3 if not between else 0 if user[0] else 1)
        for read in log[index.state.read_to :]:
            index.reader.read(read)
        for change in changes:
            index.log.written(change)
        payloads = {key: entry.record.envelope.payload for key, entry in index.table.entries.items()}
        ways.append(
            (
                payloads,
                index.state.standings,
                index.state.hidden,
                [change.counted for change in changes],
                index.state.read_to,
            )
        )
    assert ways[0] == ways[1]


def test_ends_are_taken_in_unread_only_where_reading_has_come_to() -> None:
    index = PendingIndex(clock=VirtualClock(), placement=Placement("t/0"), claims=count(1))
    index.reader.read(put(0, b"0"))
    moving(index)
    (ending,) = index.log.changes
    ending.offset = 2
    index.reader.read_own([ending])
    assert (index.state.read_to, ending.counted) == (1, False)
    index.reader.read(put(1, b"new"))
    index.reader.read_own([ending])
    assert (index.state.read_to, ending.counted) == (2, False), (
        "the new one stands, and the end hides it from the cleaner"
    )


# --- recurring messages -----------------------------------------------------------------------------------

HOUR_MS = 3_600_000


def recurring(message_id: str, *, due_ms: int = NOW) -> Record:
    return Record(Envelope(message_id, "kafka", "t", rule={"e": HOUR_MS}), 0, due_ms, NO_OP)


def series_in(index: PendingIndex) -> list[tuple[str, int]]:
    """Return the recurring messages by id, each with its due time; a search finds the same ones."""
    series = index.inspection.series(None, 100, NOW)
    standing = [
        each for each in index.inspection.search(Query(limit=1000), NOW) if each.record.envelope.rule is not None
    ]
    assert series == sorted(standing, key=lambda each: each.record.id)
    return [(each.record.id, each.record.due_ms) for each in series]


def test_recurring_messages_are_listed_while_they_stand_through_changes_that_are_written_and_that_are_not() -> None:
    index = PendingIndex(clock=VirtualClock(), placement=Placement("t/0"), claims=count(1))
    for offset, each in enumerate("abcd"):
        index.reader.read(Read(offset, NOW, *encode_record(recurring(each))))
    index.reader.read(put(4, b"once", of="once"))
    whole = [(each, NOW) for each in "abcd"]
    assert series_in(index) == whole

    cancelling = index.decisions.command(Cancel(OP, "a"))[1]
    assert cancelling is not None
    assert series_in(index) == whole, "nothing is written yet"
    assert index.give_back() == [cancelling]
    assert series_in(index) == whole
    index.log.changes.clear()

    cancelling = index.decisions.command(Cancel(OP, "a"))[1]
    assert cancelling is not None
    read_back(index, cancelling)
    assert series_in(index) == whole[1:]

    worker = Worker("worker", (), 0)
    claims = {each.record.id: each for each in claims_of(index, worker)}
    assert series_in(index) == whole[1:]
    claim = claims["b"]
    failed = Again("b", claim.record.revision, claim.token, NOW + 60_000, 1, then_due_ms=NOW + HOUR_MS)
    _, change = index.decisions.settle(failed)
    assert change is not None
    index.give_back()
    assert series_in(index) == whole[1:]
    index.log.changes.clear()
    _, change = index.decisions.settle(failed)
    assert change is not None
    read_back(index, change)
    assert series_in(index) == [("b", NOW + HOUR_MS), *whole[2:]], "its retry stands beside it, and does not recur"

    index.reader.read(put(index.state.read_to, b"new", of="c", due_ms=NOW + FAR_MS))
    assert series_in(index) == [("b", NOW + HOUR_MS), whole[3]]
    claim = claims["d"]
    _, change = index.decisions.settle(Done("d", claim.record.revision, claim.token, then_due_ms=NOW + HOUR_MS))
    assert change is not None
    change.refusal = "too large"
    index.log.leave(change)
    index.log.written(change)
    assert series_in(index) == [("b", NOW + HOUR_MS)], "what is left where it stands is read again by the next owner"


def test_recurring_messages_stay_near_however_far_they_are_due() -> None:
    index = PendingIndex(clock=VirtualClock(), placement=Placement("t/0"), claims=count(1))
    index.reader.read(Read(0, NOW, *encode_record(recurring("before", due_ms=NOW + FAR_MS))))
    index.reader.read(put(1, b"once", of="once", due_ms=NOW + FAR_MS))
    index.far.look_ahead(NOW + HORIZON_MS)
    index.far.put_off()
    index.reader.read(Read(2, NOW, *encode_record(recurring("after", due_ms=NOW + FAR_MS))))
    assert (len(index.state.far), series_in(index)) == (1, [("after", NOW + FAR_MS), ("before", NOW + FAR_MS)])
    index.reader.read(Read(3, NOW, *encode_record(recurring("once", due_ms=NOW + FAR_MS))))
    index.reader.read(put(4, b"far", of="before", due_ms=NOW + 2 * FAR_MS))
    assert series_in(index) == [("after", NOW + FAR_MS), ("once", NOW + FAR_MS)]


def test_a_recurring_message_that_had_ended_and_came_back_is_listed_until_it_is_a_dead_letter() -> None:
    index = PendingIndex(clock=VirtualClock(), placement=Placement("t/0"), claims=count(1))
    index.reader.read(Read(0, NOW, *encode_record(recurring("back"))))
    index.reader.read(Read(1, NOW, *encode_mark(Watermark(NOW, 1))))
    index.repairs.quarantine()
    (change,) = index.log.changes
    assert series_in(index) == [("back", NOW)]
    read_back(index, change)
    assert series_in(index) == []
    assert [letter.reason for letter in index.table.letters] == ["resurrected"]


# --- retries of recurring messages ------------------------------------------------------------------------


class Log:
    """The records of a partition, and an owner that writes and reads them."""

    def __init__(self, *wires: Wire) -> None:
        self.read: list[Read] = []
        self.owner = PendingIndex(clock=VirtualClock(), placement=Placement("t/0"), claims=count(1))
        for wire in wires:
            self.append(wire)

    def append(self, wire: Wire) -> None:
        self.read.append(Read(len(self.read), NOW, *wire))
        self.owner.reader.read(self.read[-1])

    def write(self) -> None:
        """Write the changes of the owner, and read them back."""
        while self.owner.log.changes:
            change = self.owner.log.changes.popleft()
            wires = list(change.wires())
            change.offset = len(self.read) + len(wires) - 1
            for wire in wires:
                self.append(wire)
            self.owner.log.written(change)

    def change_owner(self) -> None:
        """Let another owner read all records."""
        self.owner = PendingIndex(clock=VirtualClock(), placement=Placement("t/0"), claims=count(1))
        for read in self.read:
            self.owner.reader.read(read)

    def live(self) -> tuple[int, ...]:
        """Return the due times of the retried occurrences that the series lists."""
        entry = self.owner.table.find("s")
        assert entry is not None
        return entry.record.live

    def claim(self) -> Claim:
        (claim,) = claims_of(self.owner, Worker("worker", (), 0))
        return claim


RETRY_ID = occurrence_id("s", NOW)


def failed_series() -> Log:
    """Return the log of a series whose occurrence at `NOW` failed, and waits for its retry."""
    log = Log(encode_record(recurring("s")))
    claim = log.claim()
    log.owner.decisions.settle(Again("s", claim.record.revision, claim.token, NOW, 1, "boom", NOW + HOUR_MS))
    log.write()
    return log


def test_a_new_owner_lists_the_retries_that_wait() -> None:
    log = failed_series()
    assert log.live() == (NOW,)
    log.change_owner()
    assert log.live() == (NOW,)


@pytest.mark.parametrize("end", ["done", "dead"])
@pytest.mark.parametrize("is_new", [False, True], ids=["the same owner", "a new owner"])
def test_a_series_does_not_list_a_retry_that_has_ended(end: str, *, is_new: bool) -> None:
    log = failed_series()
    claim = log.claim()
    assert claim.record.id == RETRY_ID
    key = (RETRY_ID, claim.record.revision, claim.token)
    settlement = Done(*key) if end == "done" else Dead(*key, "attempts_exhausted", 2, "boom")
    log.owner.decisions.settle(settlement)
    log.owner.give_back()
    log.owner.log.changes.clear()
    assert log.live() == (NOW,), "the session ended before the write"
    log.owner.decisions.settle(settlement)
    log.write()
    if is_new:
        log.change_owner()
    assert log.live() == ()


def test_a_series_does_not_list_a_retry_that_a_user_has_cancelled() -> None:
    log = failed_series()
    log.append(encode_cancel(records.key_of(RETRY_ID)))
    assert log.live() == ()


def test_a_series_lists_a_cancelled_retry_while_it_runs_for_the_last_time() -> None:
    log = failed_series()
    claim = log.claim()
    log.append(encode_cancel(records.key_of(RETRY_ID)))
    assert log.live() == (NOW,)
    log.owner.decisions.settle(Done(RETRY_ID, claim.record.revision, claim.token))
    log.write()
    assert log.live() == ()


@pytest.mark.parametrize("end", ["cancelled", "ended"])
def test_a_new_series_does_not_list_a_retry_of_an_earlier_series(end: str) -> None:
    log = failed_series()
    if end == "cancelled":
        log.claim()
        log.append(encode_cancel(b"s"))
    else:
        log.append(encode_end(b"s", read_to=len(log.read), outcome="delivered"))
    series = recurring("s", due_ms=NOW + HOUR_MS)
    log.append(encode_record(replace(series, revision=NOW + 1)))
    assert log.live() == ()
    assert log.owner.knows(RETRY_ID), "the retry goes on"
    log.change_owner()
    assert log.live() == ()


def test_a_redriven_occurrence_is_listed_once_it_is_written_also_by_a_new_owner() -> None:
    occurrence = Record(Envelope(RETRY_ID, "kafka", "t"), 0, NOW, NO_OP)
    letter = DeadLetter(occurrence, "attempts_exhausted", NOW)
    log = Log(encode_record(recurring("s", due_ms=NOW + HOUR_MS)), encode_dead(letter))
    log.owner.decisions.redrive(letter.key)
    log.owner.give_back()
    log.owner.log.changes.clear()
    assert log.live() == (), "the session ended before the write"
    log.owner.decisions.redrive(letter.key)
    log.write()
    assert log.live() == (NOW,)
    log.change_owner()
    assert log.live() == (NOW,)


# --- dead letters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_overtaken", [False, True], ids=["alone", "a user's put is first"])
def test_s2_a_redrive_deletes_the_dead_letter_only_if_its_message_counts(*, is_overtaken: bool) -> None:
    letter = DeadLetter(Record(Envelope("m", "kafka", "t", payload=b"dead"), 0, NOW, NO_OP), "attempts_exhausted", NOW)
    log = Log(encode_dead(letter))
    _, change = log.owner.decisions.redrive(letter.key)
    assert change is not None
    if is_overtaken:
        log.append(encode_record(Record(Envelope("m", "kafka", "t", payload=b"user's"), 0, NOW, NO_OP)))
    log.write()
    assert change.counted is not is_overtaken
    log.change_owner()
    assert log.owner.table.letters.has(letter.key) is is_overtaken
    assert taken(log.owner) == [b"user's" if is_overtaken else b"dead"]


def test_s2_a_session_that_ends_before_the_dead_letter_is_deleted_leaves_it_beside_the_message() -> None:
    letter = DeadLetter(Record(Envelope("m", "kafka", "t", payload=b"dead"), 0, NOW, NO_OP), "attempts_exhausted", NOW)
    log = Log(encode_dead(letter))
    log.owner.decisions.redrive(letter.key)
    change = log.owner.log.changes.popleft()
    for wire in change.wires():
        log.append(wire)
    log.change_owner()
    assert log.owner.table.letters.has(letter.key)
    assert log.owner.decisions.redrive(letter.key) == (Refused("exists"), None)
    assert taken(log.owner) == [b"dead"]


# --- requests to the owner --------------------------------------------------------------------------------


def kept(payload: bytes, op: bytes) -> Wire:
    return encode_keep(Record(Envelope("m", "kafka", "t", payload=payload), 0, NOW, op))


def decide_requests(log: Log) -> list[str]:
    """Decide the requests that the owner has read, and write the answers. Return the answers in their order."""
    begin = len(log.read)
    log.owner.repairs.make()
    while log.owner.log.changes:
        log.write()
        log.owner.repairs.make()
    answers = [records.answer_of(read.key, read.value, read.headers) for read in log.read[begin:]]
    return [answer[1] for answer in answers if answer is not None]


@pytest.mark.parametrize("is_new", [False, True], ids=["the same owner", "a new owner"])
def test_s2_of_two_puts_that_keep_a_stored_message_the_first_counts(*, is_new: bool) -> None:
    log = Log(kept(b"first", b"1" * 8), kept(b"second", b"2" * 8))
    if is_new:
        log.owner.repairs.make()
        change = log.owner.log.changes.popleft()
        for wire in change.wires():
            log.append(wire)
        log.change_owner()
    assert len(decide_requests(log)) == (1 if is_new else 2)
    assert taken(log.owner) == [b"first"]
    assert log.owner.state.asked == {}


def test_s2_a_cancel_of_another_revision_voids_no_earlier_put() -> None:
    log = Log(kept(b"first", b"1" * 8), encode_ask_to_cancel(Cancel(OP, "m", (NOW - 9, NOW - 9))))
    assert decide_requests(log)[1] == "outdated"
    assert taken(log.owner) == [b"first"]


@pytest.mark.parametrize("revisions", [(NOW, NOW - 5), (NOW - 5, NOW)], ids=["the stored one first", "last"])
def test_each_request_to_cancel_a_revision_gets_its_own_answer(revisions: tuple[int, int]) -> None:
    log = Log(encode_record(Record(Envelope("m", "kafka", "t"), 0, NOW, NO_OP)))
    for i, revision in enumerate(revisions):
        log.append(encode_ask_to_cancel(Cancel(b"%8d" % i, "m", (revision, NOW))))
    expected = {NOW: "cancelled", NOW - 5: "not_found" if revisions[0] == NOW else "outdated"}
    assert decide_requests(log) == [expected[revision] for revision in revisions]
    assert not log.owner.knows("m")


# --- messages that cannot leave ---------------------------------------------------------------------------


def test_the_next_owner_delivers_a_message_that_could_neither_leave_nor_become_a_dead_letter() -> None:
    large, small = (Envelope(name, "kafka", "t", payload=name.encode()) for name in ("large", "small"))
    log = Log(*(encode_record(Record(envelope, 0, NOW, NO_OP)) for envelope in (large, small)))
    assert moving(log.owner) == [b"large", b"small"]
    refused = log.owner.log.changes.popleft()
    log.owner.log.release(refused)
    log.owner.log.leave(refused)
    log.write()
    mark = log.owner.next_mark()
    if mark is not None:
        log.append(encode_mark(mark))
    log.change_owner()
    log.owner.repairs.quarantine()
    assert list(log.owner.log.changes) == []
    assert moving(log.owner) == [b"large"]


def test_a_message_that_could_not_leave_holds_the_mark_only_while_it_is_stored() -> None:
    log = Log(encode_record(Record(Envelope("large", "kafka", "t"), 0, NOW, NO_OP)))
    moving(log.owner)
    refused = log.owner.log.changes.popleft()
    log.owner.log.release(refused)
    log.owner.log.leave(refused)
    log.append(encode_cancel(b"large"))
    assert log.owner.next_mark() == Watermark(NOW, 2)


# --- what is far ------------------------------------------------------------------------------------------

FAR_MS, HORIZON_MS = 100_000, 10_000
DUES = NOW, NOW + FAR_MS
STEPS = [
    *(("put", due_ms, 0, goes_back) for due_ms in DUES for goes_back in (False, True)),
    *(("put again", due_ms, unread, False) for due_ms in DUES for unread in range(3)),
    ("cancel", NOW, 0, False),
    *(("end", NOW, unread, False) for unread in range(3)),
]
"""What is written; when it is due; of an owner's, how many records it had not read; whether what is far goes back."""


def read_by(steps: Sequence[tuple[str, int, int, bool]], *, ahead_ms: int) -> PendingIndex:
    """Read a log in which users and owners have written; bring near in the end what is far."""
    index = PendingIndex(clock=VirtualClock(), placement=Placement("t/0"), claims=count(1))
    index.far.look_ahead(NOW + ahead_ms)
    log: list[Read] = []
    read_to = 0
    for offset, (what, due_ms, unread, goes_back) in enumerate(steps):
        read_to = max(read_to, offset - unread)
        record = Record(Envelope("m", "kafka", "t", payload=b"%d" % offset), 0, due_ms, NO_OP)
        wire = {
            "put": encode_record(record),
            "put again": encode_record(record, read_to=read_to),
            "cancel": encode_cancel(b"m"),
            "end": encode_end(b"m", read_to=read_to, outcome="delivered"),
        }[what]
        log.append(Read(offset, NOW + offset, *wire))
        index.reader.read(log[-1])
        if goes_back:
            index.far.put_off()
    for each in log:
        if each.value is not None:
            index.come_near(each)
    return index


@pytest.mark.slow
def test_what_stands_does_not_depend_on_what_is_held_whole() -> None:
    for steps in product(STEPS, repeat=3):
        whole, noted = read_by(steps, ahead_ms=FAR_MS), read_by(steps, ahead_ms=HORIZON_MS)
        found = [
            {key: (entry.record.envelope.payload, entry.place_ms) for key, entry in index.table.entries.items()}
            for index in (whole, noted)
        ]
        assert found[0] == found[1], steps
        assert (whole.state.hidden, whole.state.standings) == (noted.state.hidden, noted.state.standings), steps
        assert not noted.state.far


def test_a_put_unless_one_stands_is_decided_at_once_also_if_it_is_due_beyond_the_horizon() -> None:
    index = PendingIndex(clock=VirtualClock(), placement=Placement("t/0"), claims=count(1))
    index.far.look_ahead(NOW + HORIZON_MS)
    record = Record(Envelope("m", "kafka", "t"), 0, NOW + FAR_MS, OP)
    index.reader.read(Read(0, NOW, *encode_keep(record)))
    index.repairs.make()
    change = index.log.changes.popleft()
    read_back(index, change)
    assert index.far.has("m")
    assert not index.repairs.are_needed


def test_the_mark_stops_at_what_is_far() -> None:
    clock = VirtualClock()
    index = PendingIndex(clock=clock, placement=Placement("t/0"), claims=count(1))
    index.far.look_ahead(NOW + HORIZON_MS)
    index.reader.read(put(0, b"far", due_ms=NOW + HORIZON_MS + 1))
    index.reader.read(Read(1, NOW, *encode_cancel(b"other")))
    clock.move(FAR_MS)  # and nobody has looked at what is far
    mark = index.next_mark()
    assert mark is not None
    assert mark.read_to == 2
    assert not mark.covers(0, NOW + HORIZON_MS + 1)


# --- what others write ------------------------------------------------------------------------------------

KEYS = st.lists(
    st.sampled_from(
        [
            records.AGAIN,
            records.DEAD,
            records.HOLD,
            records.KEEP,
            records.RESERVED,
            records.BARRIER,
            records.MARK,
            b"1/",
            b"a",
            b"\xff",
            b"~12345678901",
            b'["a",null]',
        ]
    )
).map(b"".join)
VALUES = st.sampled_from(
    [
        b"",
        b"\xff",
        b"1",
        b"{}",
        b"[]",
        b'{"\xff":1}',
        b"7" * 15,
        b"%d" % (NOW + FAR_MS),
        b"kafka",
        b"drop",
        b"late",
        OP.hex().encode(),
        b'{"answers":[["zz","stored",1,1,%d]]}' % (NOW + FAR_MS),
        b'{"until_ms":1,"read_to":9}',
    ]
)
NAMES = [
    *records.HEADER.values(), records.EPOCH, records.TARGET_TOPIC, records.READ_TO, records.PLACE, records.NULL,
    records.FORMAT_HEADER, records.MEMORY, records.DEAD_REASON, records.DEAD_AT,
]  # fmt: skip
PLAIN = {records.EPOCH: b"%d" % (NOW // 1000), records.TARGET_TOPIC: b"t"}
HEADERS = st.dictionaries(st.sampled_from(NAMES), VALUES).map(lambda found: list((PLAIN | found).items()))
RECORDS = st.tuples(st.integers(-1, NOW + 1), st.none() | KEYS, st.none() | VALUES, HEADERS)


@given(st.lists(RECORDS, min_size=1, max_size=4))
@example([(0, b"\x00aiodelay/again/1/\xff", b"", list(PLAIN.items()))])  # an occurrence of a series with such a key
def test_l5_nothing_that_may_stand_in_a_topic_breaks_its_owner(
    found: list[tuple[int, bytes | None, bytes | None, list[tuple[str, bytes]]]],
) -> None:
    index = PendingIndex(clock=VirtualClock(), placement=Placement("t/0"), claims=count(1))
    index.far.look_ahead(NOW + HORIZON_MS)
    log = [Read(offset, *each) for offset, each in enumerate(found)]
    for read in log:
        index.reader.read(read)
    index.repairs.quarantine()
    for read in log:
        if read.key is not None and read.value is not None:
            index.come_near(read)
    index.repairs.make()
    moving(index)
    while index.log.changes:
        change = index.log.changes.popleft()
        if not index.log.drop_stale(change):
            read_back(index, change)
    index.far.put_off()
    index.next_mark()
