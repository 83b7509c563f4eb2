"""The rules S1 to S9, B1, B2, L1 to L5 and R1 of docs/guarantees.md, as functions of a story.

Every command has one of three outcomes: `ok`, `fail` (surely not done), `info` (unknown). A command with an unknown
outcome may have taken effect at any time from its call until the end of its process. A rule counts as broken only if it
is broken for every such time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias

from aiodelay.core.transitions import base_id, occurrence_id, token_deadline_ms

from .story import NEVER, Attempt, Lease, Operation, Settlement, Story

__all__ = ["RULES", "Cause", "Finding", "Limits", "Rule", "causes", "first_runs"]

Cause: TypeAlias = Literal["fault", "lapse", ""]

LEAST_DEATH_NS = 1_000_000_000
"""The shortest time from the stop of a process until other processes declare it dead.

They do so 3 s after its last sign of life, which was a little earlier. The end of a process may be noticed at once.
"""
LONGEST_NOTE_NS = 500_000_000
"""The longest time from the answer to a renewal until the loop of the process knows the answer."""
CHANGES = ("stored", "replaced", "rescheduled", "fired")
"""The answers to commands that changed the message."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that hold in one test, in addition to the rules that always hold.

    Attributes:
        skew_ms: S1: the largest difference between the clocks of a store, such as the clocks of a cluster's nodes. For
            a run whose claim is not in the history: between the clocks of its process and of the store.
        lateness_ms: L2: the longest time from the moment at which a message could run until its first run.
        lane_lateness_ms: L3: the same limit for single lanes, whatever happens to other lanes.
        p99_ms: B2: the time within which 99 of 100 first runs start, measured as for L2.
        takeover_ms: L1: the longest time from the end of a process until the messages that it had claimed run again.
        poison: L5: ids that must become dead letters, with the reason. All other messages must be delivered.
        lapses: Whether claims may lapse without a fault in the history. On a busy machine they may.
        in_order: S9: lanes whose order is decided between claims too. Such a lane has one order in its store, has no
            limits, and nobody pauses its addresses. A namespace of several shards and a Kafka store have several
            orders for a lane. In other lanes, S9 is decided only within each claim, and only by due time.
        spare: R1: the number of extra tasks, threads and files at the end that do not count as a leak.
    """

    skew_ms: int = 0
    lateness_ms: int | None = None
    lane_lateness_ms: dict[str, int] = field(default_factory=dict)
    p99_ms: int | None = None
    takeover_ms: int | None = None
    poison: dict[str, str] = field(default_factory=dict)
    lapses: bool = True
    in_order: Collection[str] = ()
    spare: int = 0


Finding: TypeAlias = tuple[str, *tuple[str, ...]]
"""A text that says how a rule was broken, then the ids of the messages concerned."""


# --- safety -----------------------------------------------------------------------------------------------


def _s1_never_early(story: Story, limits: Limits) -> Iterator[Finding]:
    """No message is given out before its due time: neither that of its record, nor that of the last certain command.

    The store's clock decides, at the claim. The clock of the process counts only for a run without a known claim.
    """
    by_id = story.by_id()
    for attempt in story.attempts:
        due_ms = max(attempt.due_ms, _due_as_commanded(attempt, by_id.get(attempt.start.id, [])))
        if attempt.begun_ms + limits.skew_ms < due_ms:
            yield f"{attempt} began {due_ms - attempt.begun_ms} ms before it was due", attempt.start.id


def _due_as_commanded(attempt: Attempt, operations: list[Operation]) -> int:
    """Return the due time that the last command before the claim set; 0 if the last command is not certain.

    The retry of an occurrence keeps its due time, also if its series is rescheduled. A message that others join keeps
    it too.
    """
    if attempt.is_retried_occurrence:
        return 0
    last = _last_command(operations, attempt.asked_ns, attempt.start.at_ns)
    return 0 if last is None else _due_ms(last)


def _due_ms(command: Operation) -> int:
    return command.due_ms or command.call.at_ms or 0


def _last_command(operations: list[Operation], claimed_ns: int, begun_ns: int) -> Operation | None:
    """Return the command that set the due time of a claimed message; None if it is not certain."""
    able = [each for each in operations if each.call.op not in ("cancel", "purge") and _took_effect(each)]
    possible = [each for each in able if each.asked_ns < claimed_ns]
    if not possible:
        return None
    last = max(possible, key=lambda each: each.asked_ns)
    if (
        last.outcome != "ok"
        or last.answer not in CHANGES
        or (last.call.joins and last.answer == "replaced")
        or last.answered_ns > claimed_ns
        or any(each.answered_ns > last.asked_ns for each in able if each is not last and each.asked_ns < begun_ns)
    ):
        return None
    return last


def _took_effect(operation: Operation) -> bool:
    """Return whether the command may have changed the message."""
    return operation.outcome == "info" or operation.is_in_doubt or operation.answer in CHANGES


def _s2_nothing_lost(story: Story, limits: Limits) -> Iterator[Finding]:
    """Every acknowledged message is delivered, replaced, cancelled, dropped, a dead letter or still in the store."""
    if story.final is None:
        return
    pending = {(note.id, note.revision) for note in story.final.pending}
    over = _ended(story) | {(message_id, revision) for message_id, revision, _ in story.final.dead}
    over |= {(each.call.id, each.call.revision) for each in story.operations if each.may_have_purged}
    last_pending, last_over, claimed_ns = _last(pending), _last(over), story.claimed_ns()
    by_id = story.by_id()
    for put in story.puts():
        if put.call.lane in story.moved or _may_have_ended(put, by_id[put.id], story.final.now_ms):
            continue
        if put.call.recurs:
            yield from (
                (f"{lost} revision {put.revision}, to be tried again, is nowhere", put.id)
                for lost in _lost_retries(story, put)
            )
        if any(each.call.joins for each in by_id[put.id]):  # the next version has the items that came in flight
            came_in_flight = put.answer == "replaced" and claimed_ns.get((put.id, put.revision), NEVER) < put.asked_ns
            is_there = last_pending[put.id] >= put.revision or last_over[put.id] >= put.revision + came_in_flight
        else:
            is_there = not {(put.call.id, put.revision), (put.id, put.revision)}.isdisjoint(pending | over)
        if not is_there:
            yield f"{put.call.id} revision {put.revision}, stored by {put.call.process}, is nowhere", put.id


def _last(versions: Iterable[tuple[str, int]]) -> defaultdict[str, int]:
    """Return the last of the versions of each id; 0 for an id without versions."""
    last: defaultdict[str, int] = defaultdict(int)
    for message_id, revision in versions:
        last[message_id] = max(revision, last[message_id])
    return last


def _ended(story: Story) -> set[tuple[str, int]]:
    """Return the messages that have ended: delivered, or dropped. A series has ended if nothing follows."""
    series = {(put.id, put.revision) for put in story.puts() if put.call.recurs}
    ended = {(attempt.start.id, attempt.revision) for attempt in story.attempts if attempt.result == "ok"} - series
    for lease in story.leases:
        key = (base_id(lease.note.id), lease.note.revision)
        for each in lease.settlements:
            if each.outcome != "settled":
                continue
            is_last = lease.note.id == key[0] and each.note.next_ms is None
            if is_last if key in series else each.note.kind == "delivered" or _is_dropped_late(each, lease, story):
                ended.add(key)
    return ended


def _is_dropped_late(settlement: Settlement, lease: Lease, story: Story) -> bool:
    """Return whether a message was dropped, and its `Late` policy allowed this at the time of its claim."""
    if settlement.note.kind != "dropped":
        return False
    late_ms = _late_ms(story.by_id().get(base_id(lease.note.id), []), lease.note.revision)
    return late_ms is not None and lease.now_ms >= lease.note.due_ms + late_ms


def _late_ms(operations: list[Operation], revision: int) -> int | None:
    """Return the lateness in ms at which a version may be dropped; None = never.

    A message that was redriven, or that other messages have joined, keeps the policy of an earlier command.
    """
    keeps = any(each.revision == revision and (each.call.joins or each.call.op == "redrive") for each in operations)
    return min(
        (
            each.call.late_ms
            for each in operations
            if each.call.late_ms is not None and (keeps or each.revision == revision)
        ),
        default=None,
    )


def _lost_retries(story: Story, put: Operation) -> Iterator[str]:
    """Yield the occurrences of a series that were to be tried again, and that nobody has seen since."""
    assert story.final is not None
    seen = {(note.id, note.revision) for note in story.final.pending}
    seen |= {(message_id, revision) for message_id, revision, _ in story.final.dead}
    seen |= {(lease.note.id, lease.note.revision) for lease in story.leases}
    for lease in story.leases:
        note = lease.note
        again = any(each.note.kind == "again" and each.outcome == "settled" for each in lease.settlements)
        if not again or lease.is_in_doubt or note.id != put.id or note.revision != put.revision:
            continue
        is_seen = (occurrence_id(note.id, note.due_ms), note.revision) in seen
        if not is_seen and not _is_given_back(story, lease):
            yield occurrence_id(note.id, note.due_ms)


def _is_given_back(story: Story, lease: Lease) -> bool:
    """Return whether a series was given back without a run, so that the same occurrence is still its next one."""
    assert story.final is not None
    note = lease.note
    pending = any(
        each.id == note.id and each.next_attempt_ms <= note.due_ms and each.revision == note.revision
        for each in story.final.pending
    )
    return pending or any(
        each is not lease
        and (each.note.id, each.note.revision, each.note.due_ms) == (note.id, note.revision, note.due_ms)
        for each in story.leases
    )


def _may_have_ended(put: Operation, operations: list[Operation], final_ms: int) -> bool:
    """Return whether a later command may have replaced or cancelled a message, or the store may have dropped it."""
    due_ms = put.due_ms
    for other in operations:
        if other is put or other.answered_ns < put.asked_ns:
            continue
        if other.may_be_put or (other.is_put and other.revision > put.revision):
            return True
        if other.call.op == "cancel" and (
            other.outcome == "info" or other.answer in ("cancelled", "in_flight", "recorded")
        ):
            return True
        if other.call.op == "reschedule":
            due_ms = max(due_ms, other.due_ms, other.call.at_ms or 0)
    late_ms = _late_ms(operations, put.revision)
    return late_ms is not None and final_ms > due_ms + late_ms


def _s3_at_least_once(story: Story, limits: Limits) -> Iterator[Finding]:
    """A message that is settled as delivered has run to its end before."""
    runs: dict[int, list[Attempt]] = defaultdict(list)
    for attempt in story.attempts:
        runs[id(attempt.lease)].append(attempt)
    for lease in story.leases:
        if (lease.note.id, lease.note.revision) in story.doubled:  # it is unknown which of two claims ran
            continue
        for settlement in lease.settlements:
            ends = [attempt.ended_ns for attempt in runs[id(lease)] if attempt.result == "ok"]
            if settlement.note.kind == "delivered" and min(ends, default=NEVER) > settlement.asked_ns:
                text = f"{lease.note.id} was settled as delivered by {lease.process} and had not been run"
                yield text, base_id(lease.note.id)


def _s4_latest_version_wins(story: Story, limits: Limits) -> Iterator[Finding]:
    """After a replacement was acknowledged or claimed, no claim returns the replaced version, or settles it.

    A process that knows of the replacement begins no attempt at the replaced version.
    """
    versions: dict[str, list[_Version]] = defaultdict(list)
    for put in story.puts():
        versions[put.call.id].append(_Version(put.revision, put.answered_ns, "acknowledged", put.answer == "replaced"))
    for lease in story.leases:
        if lease.is_certain:
            versions[lease.note.id].append(_Version(lease.note.revision, lease.answered_ns, "claimed"))
    for attempt in story.attempts:
        if attempt.is_of_source:
            continue
        if _knew(story, attempt, "superseded"):
            yield f"{attempt} began although its process knew of the replacement", attempt.start.id
        for version in versions[attempt.start.id]:
            if version.ends(attempt.revision, attempt.asked_ns, is_retry=attempt.is_retried_occurrence):
                text = f"{attempt} was claimed after revision {version.revision} had been {version.how}"
                yield text, attempt.start.id
                break
    for lease in (each for each in story.leases if each.is_certain):
        note, message_id = lease.note, base_id(lease.note.id)
        settled_ns = max((each.asked_ns for each in lease.settlements if each.outcome == "settled"), default=0)
        for version in versions[message_id]:
            if version.ends(note.revision, settled_ns, is_retry=note.id != message_id):
                text = f"{note.id} revision {note.revision} was settled by {lease.process} after revision"
                yield f"{text} {version.revision} had been {version.how}", message_id
                break


@dataclass(frozen=True, slots=True)
class _Version:
    """A version that the store surely held at a time."""

    revision: int
    known_ns: float
    how: str
    ends_retries: bool = False

    def ends(self, revision: int, asked_ns: int, *, is_retry: bool) -> bool:
        """Return whether this version has replaced a revision before a call was made.

        A series that has ended may leave retries. A new message of the same id does not end them.
        """
        return self.revision > revision and self.known_ns < asked_ns and (self.ends_retries or not is_retry)


def _knew(story: Story, attempt: Attempt, answer: Literal["superseded", "cancelled"]) -> bool:
    """Return whether a renewal of the claim had this answer well before the run began."""
    lease = attempt.lease
    if lease is None:
        return False
    told_ns = min((each.answered_ns for each in lease.renewals if each.outcome == answer), default=NEVER)
    return attempt.start.at_ns - told_ns > LONGEST_NOTE_NS and not any(
        fault.process == lease.process and lease.asked_ns <= fault.at_ns <= attempt.start.at_ns
        for fault in story.faults
    )


def _s5_cancel_honoured(story: Story, limits: Limits) -> Iterator[Finding]:
    """After a cancel was acknowledged, no claim returns a message that was surely stored before the cancel.

    A process that knows of the cancel begins no attempt.
    """
    cancels = defaultdict(list)
    for operation in story.operations:
        if operation.call.op == "cancel" and operation.answer in ("cancelled", "in_flight"):
            cancels[operation.id].append(operation)
    stored_ns = {(put.id, put.revision): put.answered_ns for put in story.puts()}
    claimed_ns = story.claimed_ns()
    for attempt in story.attempts:
        if attempt.is_of_source:
            continue
        if _knew(story, attempt, "cancelled"):
            yield f"{attempt} began although its process knew of the cancel", attempt.start.id
        version = attempt.start.id, attempt.revision
        stored = min(stored_ns.get(version, NEVER), claimed_ns.get(version, NEVER))
        for cancel in cancels[attempt.start.id]:
            if stored < cancel.asked_ns and cancel.answered_ns < attempt.asked_ns:
                text = f"{attempt} was claimed after its cancel had been acknowledged as {cancel.answer}"
                yield text, cancel.id
                break


def _s6_nothing_ended_comes_back(story: Story, limits: Limits) -> Iterator[Finding]:
    """After a settlement that ends a message was acknowledged, no claim returns the message again."""
    over: dict[tuple[str, int, int], float] = {}
    series = story.series()
    for lease in story.leases:
        for settlement in [] if lease.is_in_doubt else lease.settlements:
            if settlement.outcome == "settled" and settlement.note.kind != "again":
                key = _delivered_as(lease, series)
                over[key] = min(settlement.answered_ns, over.get(key, NEVER))
    for lease in story.leases:
        if (lease.note.id, lease.note.revision) in story.doubled:
            continue
        if over.get(_delivered_as(lease, series), NEVER) < lease.asked_ns:
            text = f"{lease.note.id} revision {lease.note.revision} was claimed by {lease.process} after its end"
            yield text, base_id(lease.note.id)


def _delivered_as(lease: Lease, series: Collection[str]) -> tuple[str, int, int]:
    """Return what one end of a message ends: a revision, or one occurrence of a series."""
    note = lease.note
    return note.id, note.revision, note.due_ms if note.id in series else 0


def _s7_one_live_owner(story: Story, limits: Limits) -> Iterator[Finding]:
    """Claims of one message do not overlap, and only the newest claim may settle or renew.

    While a claim is open, a later claim has a later token. After its end, the clock may have stepped back.
    """
    leases: dict[tuple[str, int], list[Lease]] = defaultdict(list)
    for lease in story.leases:
        leases[lease.note.id, lease.note.revision].append(lease)
    for (message_id, revision), owners in leases.items():
        if (message_id, revision) in story.doubled:
            continue
        for older, newer in map(_in_order, pairwise(owners)):
            if not older.is_in_doubt and not _is_passed_on(older, newer):
                is_early_allowed = _may_be_dead(story, older.process, newer.answered_ns)
                for text in _overlap(older, newer, is_early_allowed=is_early_allowed):
                    yield f"{message_id}: {text}", base_id(message_id)


def _may_be_dead(story: Story, process: str, at_ns: int) -> bool:
    """Return whether other processes may have declared a process dead, because it had ended or stood still."""
    least_ns = {"killed": 0, "stopped": LEAST_DEATH_NS}
    faults = (each for each in story.faults if each.process == process and each.what in least_ns)
    return any(at_ns - each.at_ns >= least_ns[each.what] for each in faults)


def _in_order(pair: tuple[Lease, Lease]) -> tuple[Lease, Lease]:
    """Order two overlapping claims by their tokens, because a blocked process learns late of its own claim."""
    first, second = pair
    overlap = second.asked_ns < first.answered_ns
    return (second, first) if overlap and second.note.token < first.note.token else pair


def _is_passed_on(older: Lease, newer: Lease) -> bool:
    """Return whether a source may have carried out two overlapping claims in the other order than their tokens have.

    The process with the later token has then given the message back, before the other claim was answered.
    """
    return older.is_of_source and newer.answered_ns < older.answered_ns and not newer.is_open(older.answered_ns)


def _overlap(older: Lease, newer: Lease, *, is_early_allowed: bool) -> Iterator[str]:
    held_until_ms = older.deadline_ms(newer.asked_ns)
    if not is_early_allowed and older.is_open(newer.answered_ns):
        if token_deadline_ms(newer.note.token) < token_deadline_ms(older.note.token):
            yield f"the token of {newer.process} is older than that of {older.process}, who had it before"
        if newer.now_ms < held_until_ms:
            early_ms = held_until_ms - newer.now_ms
            yield f"claimed by {newer.process} {early_ms} ms before the lease of {older.process} ended"
    for settlement in older.settlements:
        if settlement.outcome == "settled" and settlement.asked_ns > newer.answered_ns:
            yield f"settled by {older.process} although {newer.process} had claimed it since"
    for renewal in older.renewals:
        if renewal.asked_ns > newer.answered_ns:
            yield f"renewed by {older.process} although {newer.process} had claimed it since"


def _s8_bytes_identical(story: Story, limits: Limits) -> Iterator[Finding]:
    """Payload, key and headers arrive as they were scheduled under this id and revision.

    A message that joins another one (`Conflict.append`) has other bytes, and one from a list or topic has another lane.
    """
    known = {(put.id, put.revision): put for put in story.puts()}
    for attempt in story.attempts:
        start = attempt.start
        of_id = story.by_id().get(start.id, [])
        if not start.lane and not of_id:  # another program wrote it into a list or topic
            continue
        schedules = [each for each in of_id if each.call.op == "schedule"]
        put = known.get((start.id, attempt.revision))
        while put is not None and put.call.op == "redrive":  # of a dead letter, which has an earlier revision
            put = known.get((put.id, put.call.revision)) if put.call.revision < put.revision else None
        candidates = _candidates(attempt, put, of_id, schedules)
        if not candidates:
            yield f"{attempt} delivered a message that no command explains", start.id
        elif not any(_is_same(attempt, each) for each in schedules if each.call.joins or each in candidates):
            yield f"{attempt} delivered other bytes, or to another lane, than was scheduled", start.id


def _candidates(
    attempt: Attempt, put: Operation | None, of_id: list[Operation], schedules: list[Operation]
) -> list[Operation]:
    """Return the commands that may have made the delivered version.

    Items that join a message in flight are answered with its revision, and are delivered later with another one.

    Args:
        attempt: The run.
        put: The command that has stored these bytes; None if it is not known.
        of_id: The commands with this id.
        schedules: The commands that schedule, among these commands.
    """
    if put is None:
        is_repeated = attempt.lease is not None and attempt.lease.is_in_doubt  # its server lost it before
        has_redrive = any(each.call.op == "redrive" for each in of_id)
        return (
            schedules
            if is_repeated or has_redrive
            else [each for each in schedules if each.may_be_put or each.call.joins]
        )
    return [put]


def _is_same(attempt: Attempt, scheduled: Operation) -> bool:
    start, call = attempt.start, scheduled.call
    return (call.joins or call.digest == start.digest) and start.lane in ("", call.lane)


def _s9_in_order(story: Story, limits: Limits) -> Iterator[Finding]:
    """Claims return the messages of a lane by due time, then by scheduling order.

    This excludes messages that were claimed before, and messages of a source, which has its own order. The scheduling
    order and the order between claims count only in the lanes of `in_order`.
    """
    last: dict[tuple[str, int, str], Lease] = {}
    known: set[tuple[str, int, int]] = set()
    latest: dict[str, list[Lease]] = defaultdict(list)
    for lease in story.leases:
        note = lease.note
        is_again = note.attempt or note.lapses or (note.id, note.revision, note.due_ms) in known
        known.add((note.id, note.revision, note.due_ms))
        if is_again or lease.is_of_source:
            continue
        key = (lease.process, lease.call, note.lane)
        before, calls = last.get(key), latest[note.lane]
        has_one_order = note.lane in limits.in_order
        if before is not None and _is_later(story, before, lease, by_due_time_alone=not has_one_order):
            text = f"{note.id} was given out behind {before.note.id}, which is due later"
            yield text, base_id(note.id), base_id(before.note.id)
        last[key] = lease
        if not has_one_order or not lease.is_certain:
            continue
        overtaker = _overtaker(story, lease, calls)
        if overtaker is not None:
            text = f"{note.id} was given out after {overtaker.note.id}, which is due later"
            yield text, base_id(note.id), base_id(overtaker.note.id)
        if not calls or (calls[-1].process, calls[-1].call) != (lease.process, lease.call):
            calls.append(lease)
        elif note.due_ms >= calls[-1].note.due_ms:
            calls[-1] = lease


def _overtaker(story: Story, lease: Lease, calls: list[Lease]) -> Lease | None:
    """Return an earlier claim of another message, although this one was surely stored, waiting, and due before.

    Args:
        story: The history.
        lease: A claim.
        calls: For each earlier call that brought messages of this lane, the claim of the message that is due last.
    """
    stored = _stored_by(story, lease)
    if stored is None:
        return None
    for other in reversed(calls):
        if other.now_ms < lease.note.due_ms:
            return None
        if (
            stored.answered_ns < other.asked_ns
            and other.answered_ns < lease.asked_ns
            and _is_later(story, other, lease)
        ):
            return other
    return None


def _is_later(story: Story, one: Lease, other: Lease, *, by_due_time_alone: bool = False) -> bool:
    """Return whether the message of one claim surely belongs behind that of another claim."""
    if by_due_time_alone or one.note.due_ms != other.note.due_ms:
        return one.note.due_ms > other.note.due_ms
    later, earlier = _stored_by(story, one), _stored_by(story, other)
    return later is not None and earlier is not None and earlier.answered_ns < later.asked_ns


def _stored_by(story: Story, lease: Lease) -> Operation | None:
    """Return the command that gave a claimed message its place in its lane; None if it is not certain."""
    note = lease.note
    last = _last_command(story.by_id().get(note.id, []), lease.asked_ns, lease.answered_ns)
    is_this = last is not None and last.revision in (0, note.revision) and _due_ms(last) == note.due_ms
    return last if is_this else None


def _b1_duplicates_bounded(story: Story, limits: Limits) -> Iterator[Finding]:
    """A message runs again only if it was in flight at a fault, or if its lease had ended."""
    for again, earlier in _duplicates(story):
        if not _cause(story, earlier, again, limits):
            yield f"{again} ran again without a cause: {earlier} came before", again.start.id


def causes(story: Story, limits: Limits) -> list[Cause]:
    """Return the cause of each duplicate: a fault of its first process, the end of a lease, or "" for no cause."""
    return [_cause(story, earlier, again, limits) for again, earlier in _duplicates(story)]


def _duplicates(story: Story) -> Iterator[tuple[Attempt, Attempt]]:
    """Yield pairs of a run and its duplicate: the earlier run succeeded, was cut off, or still goes on.

    A run after a failed run is a retry, not a duplicate, also if the run before the failed run was cut off.
    """
    latest: dict[str, Attempt] = {}
    for attempt in story.attempts:
        before = latest.get(attempt.start.delivery_id)
        if before is not None and before.result in ("", "ok"):
            yield attempt, before
        latest[attempt.start.delivery_id] = attempt


def _cause(story: Story, earlier: Attempt, again: Attempt, limits: Limits) -> Cause:
    """Return why a message ran twice: a fault of its first process, the end of its lease, or "" for no cause."""
    if (again.start.id, again.revision) in story.doubled:  # one process may have claimed both copies at once
        return "fault"
    if earlier.lease is None or again.lease is None or earlier.lease is again.lease:
        return ""
    first, second = sorted((earlier.lease, again.lease), key=lambda lease: lease.answered_ns)
    if first.is_in_doubt:
        return "fault"
    for fault in story.faults:
        # A process may work on for a while after the note that it is being killed.
        until_ns = story.ended.get(fault.process, fault.at_ns) if fault.what == "killed" else fault.at_ns
        is_hit = fault.process == first.process and first.asked_ns <= until_ns
        if is_hit and fault.at_ns <= second.answered_ns < first.settled_ns:
            return "fault"
    is_settled = first.settled_ns <= second.asked_ns
    has_lapsed = not is_settled and first.deadline_ms(second.answered_ns) <= second.now_ms
    return "lapse" if limits.lapses and has_lapsed else ""


def _b2_lateness_bounded(story: Story, limits: Limits) -> Iterator[Finding]:
    """99 of 100 first runs start soon."""
    runs = sorted(first_runs(story), key=lambda run: run[1])
    if limits.p99_ms is not None and runs:
        attempt, late_ms = runs[math.ceil(0.99 * len(runs)) - 1]
        if late_ms > limits.p99_ms:
            text = (
                f"1 in 100 first runs was at least as late as {attempt}, {late_ms:.0f} ms after it could have started"
            )
            yield text, attempt.start.id


# --- liveness ---------------------------------------------------------------------------------------------


def _l1_no_stuck_lease(story: Story, limits: Limits) -> Iterator[Finding]:
    """At the end no message is leased. The messages that a process had claimed when it ended run again soon."""
    if story.final is not None:
        stuck = [note.id for note in story.final.pending if note.state == "in_flight"]
        yield from ((f"{message_id} is leased in the end", base_id(message_id)) for message_id in stuck)
        if story.final.leases > len(stuck):
            yield (f"{story.final.leases - len(stuck)} leases without a message are left in the end",)
    if limits.takeover_ms is not None:
        yield from _late_takeovers(story, limits.takeover_ms)


def _late_takeovers(story: Story, takeover_ms: int) -> Iterator[Finding]:
    """Yield a text for each message whose next owner came too late. A message without a next owner concerns S2."""
    leases: dict[tuple[str, int], list[Lease]] = defaultdict(list)
    for lease in story.leases:
        leases[lease.note.id, lease.note.revision].append(lease)
    for (message_id, _), owners in leases.items():
        for older, newer in pairwise(owners):
            served_ns = min((ns for ns in story.ready.values() if ns > older.asked_ns), default=0)
            taken_ms = newer.now_ms - older.deadline_ms(newer.asked_ns)
            since_served_ms = (newer.answered_ns - max(served_ns, older.asked_ns)) / 1e6
            if older.settled_ns == NEVER and min(taken_ms, since_served_ms) > takeover_ms:
                text = f"{message_id}: {newer.process} took over {taken_ms} ms after the lease of {older.process} ended"
                yield text, base_id(message_id)


def _l2_no_lost_wake_up(story: Story, limits: Limits) -> Iterator[Finding]:
    """The first run starts soon after the message could run. No message is left in the end that is due for longer."""
    if limits.lateness_ms is None:
        return
    for attempt, late_ms in first_runs(story):
        if late_ms > limits.lateness_ms:
            yield f"{attempt} started {late_ms:.0f} ms after it could have", attempt.start.id
    for note in () if story.final is None else story.final.pending:
        late_ms = 0 if story.final is None else story.final.now_ms - note.next_attempt_ms
        if note.state == "overdue" and late_ms > limits.lateness_ms:
            yield f"{note.id} revision {note.revision} is due since {late_ms} ms and was left", base_id(note.id)


def _l3_lanes_are_fair(story: Story, limits: Limits) -> Iterator[Finding]:
    """In some lanes, the first run starts soon, too, whatever happens to other lanes."""
    for attempt, late_ms in first_runs(story):
        limit = limits.lane_lateness_ms.get(attempt.start.lane, math.inf)
        if late_ms > limit:
            text = f"{attempt} of lane {attempt.start.lane} started {late_ms:.0f} ms after it could have"
            yield text, attempt.start.id


def first_runs(story: Story) -> Iterator[tuple[Attempt, float]]:
    """Yield the first run of each message, and the time since it was due, stored, and a process was ready."""
    stored_ns = {(put.id, put.revision): put.answered_ns for put in story.puts()}
    seen: set[str] = set()
    for attempt in story.attempts:
        start = attempt.start
        if start.delivery_id in seen:
            continue
        seen.add(start.delivery_id)
        since_ns = max(stored_ns.get((start.id, attempt.revision), 0), story.ready.get(start.process, 0))
        yield attempt, min(start.wall_ms - attempt.due_ms, (start.at_ns - since_ns) / 1e6)


def _l4_converges(story: Story, limits: Limits) -> Iterator[Finding]:
    """At the end no due message is left."""
    if story.final is not None:
        overdue = (note.id for note in story.final.pending if note.state == "overdue")
        yield from ((f"{message_id} is due and was left", base_id(message_id)) for message_id in overdue)


def _l5_poison_stops_nobody(story: Story, limits: Limits) -> Iterator[Finding]:
    """Each poison message becomes a dead letter for the expected reason. Every other message is delivered."""
    if not limits.poison or story.final is None:
        return
    dead = {message_id: reason for message_id, _, reason in story.final.dead}
    for message_id, reason in limits.poison.items():
        if dead.pop(message_id, None) != reason:
            yield f"{message_id} should have become a dead letter as {reason}", message_id
    delivered = {attempt.start.id for attempt in story.attempts if attempt.result == "ok"}
    by_id, final_ms = story.by_id(), story.final.now_ms
    wanted = {put.id for put in story.puts() if not _may_have_ended(put, by_id[put.id], final_ms)}
    neighbours = wanted - set(limits.poison)
    for message_id, reason in dead.items():
        yield f"{message_id}, a neighbour, was given up as {reason}", message_id
    for message_id in sorted(neighbours - delivered):
        yield f"{message_id}, a neighbour, was not delivered", message_id


def _r1_resources_return(story: Story, limits: Limits) -> Iterator[Finding]:
    """The numbers of tasks, threads and files return to their values at the beginning."""
    for process, phases in story.resources.items():
        if "baseline" in phases and "end" in phases:
            before, after = phases["baseline"], phases["end"]
            for what in ("tasks", "threads", "files"):
                grown = getattr(after, what) - getattr(before, what)
                if grown > limits.spare:
                    yield (f"{process} has {grown} {what} more than at the beginning",)


Rule: TypeAlias = Callable[[Story, Limits], Iterable[Finding]]

RULES: dict[str, Rule] = {
    "S1": _s1_never_early,
    "S2": _s2_nothing_lost,
    "S3": _s3_at_least_once,
    "S4": _s4_latest_version_wins,
    "S5": _s5_cancel_honoured,
    "S6": _s6_nothing_ended_comes_back,
    "S7": _s7_one_live_owner,
    "S8": _s8_bytes_identical,
    "S9": _s9_in_order,
    "B1": _b1_duplicates_bounded,
    "B2": _b2_lateness_bounded,
    "L1": _l1_no_stuck_lease,
    "L2": _l2_no_lost_wake_up,
    "L3": _l3_lanes_are_fair,
    "L4": _l4_converges,
    "L5": _l5_poison_stops_nobody,
    "R1": _r1_resources_return,
}
