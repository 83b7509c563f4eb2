"""Check a recorded history against the promises of docs/guarantees.md.

Every command has one of three outcomes: `ok`, `fail` (surely not done), `info` (unknown). A command with an unknown
outcome may have taken effect at any time from its call until the end of its process. A rule counts as broken only if it
is broken for every such time.
Known limits: these histories have no recurring messages, and no message is dropped because it is late.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias

from aiodelay.core.transitions import token_deadline_ms

from .events import Event
from .story import NEVER, Attempt, Lease, Operation, Story

__all__ = ["RULES", "Limits", "Report", "Rule", "Violation", "check"]

LEAST_DEATH_NS = 1_000_000_000
"""The shortest time from the stop of a process until other processes declare it dead.

They do so 3 s after its last sign of life, which was a little earlier. The end of a process may be noticed at once.
"""


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule, and a text that says how it was broken."""

    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that hold in one test, in addition to the rules that always hold.

    Attributes:
        lateness_ms: L2: the longest time from the moment at which a message could run until its first run.
        lane_lateness_ms: L3: the same limit for single lanes, whatever happens to other lanes.
        takeover_ms: L1: the longest time from the end of a process until the messages that it had claimed run again.
        poison: L5: ids that must become dead letters, with the reason. All other messages must be delivered.
        lapses: Whether claims may lapse without a fault in the history. On a busy machine they may.
        spare: R1: the number of extra tasks, threads and files at the end that do not count as a leak.
    """

    lateness_ms: int | None = None
    lane_lateness_ms: dict[str, int] = field(default_factory=dict)
    takeover_ms: int | None = None
    poison: dict[str, str] = field(default_factory=dict)
    lapses: bool = True
    spare: int = 0


@dataclass(slots=True)
class Report:
    """The result of a check.

    Attributes:
        delivered: The number of successful runs.
        duplicates: The number of runs of a message that had run already, or was running.
        lapses: The number of duplicates that only a lapse explains: the process was slow, but there was no fault.
        in_flight_at_faults: The number of claims that processes had when they were killed, stopped or blocked.
    """

    violations: list[Violation]
    operations: Counter[str]
    delivered: int
    duplicates: int
    lapses: int
    in_flight_at_faults: int

    def __str__(self) -> str:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.operations.items()))
        return (
            f"{self.delivered} delivered, {self.duplicates} run again ({self.lapses} after a lapse), "
            f"{self.in_flight_at_faults} in flight at faults; commands: {outcomes or 'none'}; "
            f"{len(self.violations)} violations"
        )

    def verify(self) -> None:
        """Raise AssertionError if a rule is broken."""
        assert self.duplicates - self.lapses <= self.in_flight_at_faults or self.violations, str(self)
        if self.violations:
            shown = "\n".join(f"  {violation}" for violation in self.violations[:20])
            raise AssertionError(f"{self}\n{shown}")


def check(events: Iterable[Event], limits: Limits | None = None) -> Report:
    """Check a history against all rules."""
    story = Story(events)
    limits = limits or Limits()
    found = [Violation(rule, text) for rule, holds in RULES.items() for text in holds(story, limits)]
    causes = [_cause(story, earlier, again, limits) for again, earlier in _duplicates(story)]
    in_flight = sum(story.in_flight(fault) for fault in story.faults) + sum(each.is_in_doubt for each in story.leases)
    in_flight += len(story.doubled)
    return Report(
        found,
        Counter(operation.outcome for operation in story.operations),
        sum(attempt.result == "ok" for attempt in story.attempts),
        len(causes),
        causes.count("lapse"),
        in_flight,
    )


# --- safety -----------------------------------------------------------------------------------------------


def _s1_never_early(story: Story, limits: Limits) -> Iterator[str]:
    """No run starts before the due time of its record, or before the due time that the last certain command set."""
    by_id = story.by_id()
    for attempt in story.attempts:
        due_ms = max(attempt.due_ms, _due_as_commanded(attempt, by_id.get(attempt.start.id, [])))
        if attempt.start.wall_ms < due_ms:
            yield f"{attempt} started {due_ms - attempt.start.wall_ms} ms before it was due"


def _due_as_commanded(attempt: Attempt, operations: list[Operation]) -> int:
    """Return the due time that the last command before the claim set; 0 if the last command is not certain."""
    able = [each for each in operations if each.call.op in ("schedule", "reschedule", "fire") and _took_effect(each)]
    possible = [each for each in able if each.asked_ns < attempt.asked_ns]
    if not possible:
        return 0
    last = max(possible, key=lambda each: each.asked_ns)
    if (
        last.outcome != "ok"
        or last.answered_ns > attempt.asked_ns
        or any(
            each.answered_ns > last.asked_ns
            for each in able
            if each is not last and each.asked_ns < attempt.start.at_ns
        )
    ):
        return 0
    return last.due_ms or last.call.at_ms or 0


def _took_effect(operation: Operation) -> bool:
    """Return whether the command may have changed the message."""
    return operation.outcome == "info" or operation.answer in ("stored", "replaced", "rescheduled", "fired")


def _s2_nothing_lost(story: Story, limits: Limits) -> Iterator[str]:
    """Every acknowledged message is delivered, replaced, cancelled, a dead letter or still in the store."""
    if story.final is None:
        yield "the history does not say what the store holds in the end"
        return
    accounted = {(attempt.start.id, attempt.revision) for attempt in story.attempts if attempt.result == "ok"}
    accounted |= {(lease.note.id, lease.note.revision) for lease in story.leases if _is_known_delivered(lease)}
    accounted |= {(note.id, note.revision) for note in story.final.pending}
    accounted |= {(message_id, revision) for message_id, revision, _ in story.final.dead}
    by_id = story.by_id()
    for put in story.puts():
        if (put.id, put.revision) not in accounted and not _may_have_ended(put, by_id[put.id]):
            yield f"{put.id} revision {put.revision}, stored by {put.call.process}, is nowhere"


def _is_known_delivered(lease: Lease) -> bool:
    return any(each.note.kind == "delivered" and each.outcome == "settled" for each in lease.settlements)


def _may_have_ended(put: Operation, operations: list[Operation]) -> bool:
    """Return whether a later command may have replaced or cancelled the message that `put` stored."""
    for other in operations:
        if other is put or other.answered_ns < put.asked_ns:
            continue
        if other.may_be_put or (other.is_put and other.revision > put.revision):
            return True
        if other.call.op == "cancel" and (other.outcome == "info" or other.answer in ("cancelled", "in_flight")):
            return True
    return False


def _s3_at_least_once(story: Story, limits: Limits) -> Iterator[str]:
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
                yield f"{lease.note.id} was settled as delivered by {lease.process} and had not been run"


def _s4_latest_version_wins(story: Story, limits: Limits) -> Iterator[str]:
    """After a replacement was acknowledged, no claim returns the replaced version."""
    puts = defaultdict(list)
    for put in story.puts():
        puts[put.id].append(put)
    for attempt in story.attempts:
        for put in puts[attempt.start.id]:
            if put.revision > attempt.revision and put.answered_ns < attempt.asked_ns:
                yield f"{attempt} was claimed after revision {put.revision} had been acknowledged"
                break


def _s5_cancel_honoured(story: Story, limits: Limits) -> Iterator[str]:
    """After a cancel was acknowledged, no claim returns a message that was surely stored before the cancel."""
    cancels = defaultdict(list)
    for operation in story.operations:
        if operation.call.op == "cancel" and operation.answer in ("cancelled", "in_flight"):
            cancels[operation.id].append(operation)
    stored_ns = {(put.id, put.revision): put.answered_ns for put in story.puts()}
    for attempt in story.attempts:
        stored = stored_ns.get((attempt.start.id, attempt.revision), NEVER)
        for cancel in cancels[attempt.start.id]:
            if stored < cancel.asked_ns and cancel.answered_ns < attempt.asked_ns:
                yield f"{attempt} was claimed after its cancel had been acknowledged as {cancel.answer}"
                break


def _s6_nothing_ended_comes_back(story: Story, limits: Limits) -> Iterator[str]:
    """After a settlement that ends a message was acknowledged, no claim returns the message again."""
    over: dict[tuple[str, int, int], float] = {}
    for lease in story.leases:
        for settlement in [] if lease.is_in_doubt else lease.settlements:
            if settlement.outcome == "settled" and settlement.note.kind != "again":
                key = (lease.note.id, lease.note.revision, lease.note.due_ms)
                over[key] = min(settlement.answered_ns, over.get(key, NEVER))
    for lease in story.leases:
        if (lease.note.id, lease.note.revision) in story.doubled:
            continue
        if over.get((lease.note.id, lease.note.revision, lease.note.due_ms), NEVER) < lease.asked_ns:
            yield f"{lease.note.id} revision {lease.note.revision} was claimed by {lease.process} after its end"


def _s7_one_live_owner(story: Story, limits: Limits) -> Iterator[str]:
    """Claims of one message do not overlap, their tokens grow, and only the newest claim may settle."""
    leases: dict[tuple[str, int], list[Lease]] = defaultdict(list)
    for lease in story.leases:
        leases[lease.note.id, lease.note.revision].append(lease)
    for (message_id, revision), owners in leases.items():
        if (message_id, revision) in story.doubled:
            continue
        for older, newer in map(_in_order, pairwise(owners)):
            if not older.is_in_doubt:
                is_early_allowed = _may_be_dead(story, older.process, newer.answered_ns)
                yield from (
                    f"{message_id}: {text}" for text in _overlap(older, newer, is_early_allowed=is_early_allowed)
                )


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


def _overlap(older: Lease, newer: Lease, *, is_early_allowed: bool) -> Iterator[str]:
    held_until_ms = older.deadline_ms(newer.asked_ns)
    if token_deadline_ms(newer.note.token) < token_deadline_ms(older.note.token):
        yield f"the token of {newer.process} is older than that of {older.process}, who had it before"
    if not is_early_allowed and older.is_open(newer.answered_ns) and newer.now_ms < held_until_ms:
        early_ms = held_until_ms - newer.now_ms
        yield f"claimed by {newer.process} {early_ms} ms before the lease of {older.process} ended"
    for settlement in older.settlements:
        if settlement.outcome == "settled" and settlement.asked_ns > newer.answered_ns:
            yield f"settled by {older.process} although {newer.process} had claimed it since"


def _s8_bytes_identical(story: Story, limits: Limits) -> Iterator[str]:
    """Payload, key and headers arrive as they were scheduled under this id and revision."""
    known = {(put.id, put.revision): put for put in story.puts()}
    doubtful: dict[str, list[Operation]] = defaultdict(list)
    schedules: dict[str, list[Operation]] = defaultdict(list)
    for operation in story.operations:
        if operation.may_be_put:
            doubtful[operation.id].append(operation)
        if operation.call.op == "schedule":
            schedules[operation.id].append(operation)
    for attempt in story.attempts:
        start = attempt.start
        put = known.get((start.id, attempt.revision))
        candidates = doubtful[start.id] if put is None else [put]
        if put is None and attempt.lease is not None and attempt.lease.is_in_doubt:
            candidates = schedules[start.id]  # its server lost it, and a repeated command stored it again
        if not candidates:
            yield f"{attempt} delivered what nobody scheduled"
        elif all((each.call.digest, each.call.lane) != (start.digest, start.lane) for each in candidates):
            yield f"{attempt} delivered other bytes, or to another lane, than was scheduled"


def _s9_in_order(story: Story, limits: Limits) -> Iterator[str]:
    """One claim returns the messages of a lane by due time. This excludes retries and messages whose claim lapsed."""
    last: dict[tuple[str, int, str], Lease] = {}
    for lease in story.leases:
        if lease.note.attempt or lease.note.lapses:
            continue
        key = (lease.process, lease.answered_ns, lease.note.lane)
        before = last.get(key)
        if before is not None and before.note.due_ms > lease.note.due_ms:
            yield f"{lease.note.id} was given out behind {before.note.id}, which is due later"
        last[key] = lease


def _b1_duplicates_bounded(story: Story, limits: Limits) -> Iterator[str]:
    """A message runs again only if it was in flight at a fault, or if its lease had ended."""
    for again, earlier in _duplicates(story):
        if not _cause(story, earlier, again, limits):
            yield f"{again} ran again without a cause: {earlier} came before"


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


def _cause(story: Story, earlier: Attempt, again: Attempt, limits: Limits) -> Literal["fault", "lapse", ""]:
    """Return why a message ran twice: a fault of its first process, the end of its lease, or "" for no cause."""
    if (again.start.id, again.revision) in story.doubled:  # one process may have claimed both copies at once
        return "fault"
    if earlier.lease is None or again.lease is None or earlier.lease is again.lease:
        return ""
    first, second = sorted((earlier.lease, again.lease), key=lambda lease: lease.answered_ns)
    if first.is_in_doubt:
        return "fault"
    for fault in story.faults:
        if fault.process == first.process and first.asked_ns <= fault.at_ns <= second.answered_ns < first.settled_ns:
            return "fault"
    has_lapsed = first.deadline_ms(second.answered_ns) <= second.now_ms
    return "lapse" if limits.lapses and has_lapsed else ""


# --- liveness ---------------------------------------------------------------------------------------------


def _l1_no_stuck_lease(story: Story, limits: Limits) -> Iterator[str]:
    """At the end no message is leased. The messages that a process had claimed when it ended run again soon."""
    if story.final is not None:
        stuck = [note.id for note in story.final.pending if note.state == "in_flight"]
        if stuck or story.final.leases:
            yield f"{max(len(stuck), story.final.leases)} leases are left in the end: {', '.join(stuck[:5])}"
    if limits.takeover_ms is not None:
        yield from _late_takeovers(story, limits.takeover_ms)


def _late_takeovers(story: Story, takeover_ms: int) -> Iterator[str]:
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
                yield f"{message_id}: {newer.process} took over {taken_ms} ms after the lease of {older.process} ended"


def _l2_no_lost_wake_up(story: Story, limits: Limits) -> Iterator[str]:
    """The first run starts soon after the message could run."""
    if limits.lateness_ms is not None:
        for attempt, late_ms in _first_runs(story):
            if late_ms > limits.lateness_ms:
                yield f"{attempt} started {late_ms:.0f} ms after it could have"


def _l3_lanes_are_fair(story: Story, limits: Limits) -> Iterator[str]:
    """In some lanes, the first run starts soon, too, whatever happens to other lanes."""
    for attempt, late_ms in _first_runs(story):
        limit = limits.lane_lateness_ms.get(attempt.start.lane, math.inf)
        if late_ms > limit:
            yield f"{attempt} of lane {attempt.start.lane} started {late_ms:.0f} ms after it could have"


def _first_runs(story: Story) -> Iterator[tuple[Attempt, float]]:
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


def _l4_converges(story: Story, limits: Limits) -> Iterator[str]:
    """At the end no due message is left."""
    if story.final is not None:
        overdue = [note.id for note in story.final.pending if note.state == "overdue"]
        if overdue:
            yield f"{len(overdue)} messages are due and were left: {', '.join(overdue[:5])}"


def _l5_poison_stops_nobody(story: Story, limits: Limits) -> Iterator[str]:
    """Each poison message becomes a dead letter for the expected reason. Every other message is delivered."""
    if not limits.poison or story.final is None:
        return
    dead = {message_id: reason for message_id, _, reason in story.final.dead}
    for message_id, reason in limits.poison.items():
        if dead.pop(message_id, None) != reason:
            yield f"{message_id} should have become a dead letter as {reason}"
    delivered = {attempt.start.id for attempt in story.attempts if attempt.result == "ok"}
    neighbours = {put.id for put in story.puts()} - set(limits.poison)
    yield from (f"{message_id}, a neighbour, was given up as {reason}" for message_id, reason in dead.items())
    yield from (f"{message_id}, a neighbour, was not delivered" for message_id in sorted(neighbours - delivered))


def _r1_resources_return(story: Story, limits: Limits) -> Iterator[str]:
    """The numbers of tasks, threads and files return to their values at the beginning."""
    for process, phases in story.resources.items():
        if "baseline" in phases and "end" in phases:
            before, after = phases["baseline"], phases["end"]
            for what in ("tasks", "threads", "files"):
                grown = getattr(after, what) - getattr(before, what)
                if grown > limits.spare:
                    yield f"{process} has {grown} {what} more than at the beginning"


Rule: TypeAlias = Callable[[Story, Limits], Iterable[str]]

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
    "L1": _l1_no_stuck_lease,
    "L2": _l2_no_lost_wake_up,
    "L3": _l3_lanes_are_fair,
    "L4": _l4_converges,
    "L5": _l5_poison_stops_nobody,
    "R1": _r1_resources_return,
}
