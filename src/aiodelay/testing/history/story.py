"""Join the events of a history into operations, leases, runs and faults, which the rules of the checker use."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import msgspec

from aiodelay.core.transitions import base_id, occurrence_id, token_deadline_ms

from .events import (
    Blocked,
    Claimed,
    Claiming,
    ClaimNote,
    Event,
    Final,
    Invoked,
    Loss,
    Moved,
    Outcome,
    Process,
    PuttingBack,
    Renewed,
    Renewing,
    Resources,
    Returned,
    RunEnded,
    RunStarted,
    Settled,
    Settling,
    SettlingNote,
)

__all__ = ["NEVER", "Attempt", "Fault", "Lease", "LeaseRenewal", "Operation", "Settlement", "Story"]

A = TypeVar("A")
NEVER: float = math.inf
MOST = 1 << 63
"""More than any revision or due time."""
_Run: TypeAlias = tuple[str, str, int, int]
"""The process of a run, its delivery id, its attempt and its token."""


@dataclass(slots=True)
class Operation:
    """A command. It may have taken effect from `asked_ns` to `answered_ns`, or at any later time without an answer."""

    call: Invoked
    answered_ns: float = NEVER
    outcome: Outcome = "info"
    answer: str = ""
    revision: int = 0
    due_ms: int = 0
    is_in_doubt: bool = False
    """Whether a lost server may also have carried out the command. The answer tells only what its successor did."""

    @property
    def id(self) -> str:
        """The id that the caller chose; for a retried occurrence of a series, the id of the series."""
        return base_id(self.call.id)

    @property
    def asked_ns(self) -> int:
        """The time at which the command was given."""
        return self.call.at_ns

    @property
    def is_put(self) -> bool:
        """Whether the command surely wrote a new revision."""
        puts = self.call.op in ("schedule", "redrive")
        return puts and self.outcome == "ok" and self.answer in ("stored", "replaced")

    @property
    def may_have_purged(self) -> bool:
        """Whether the command has deleted a dead letter, or may have."""
        return self.call.op == "purge" and (self.outcome == "info" or self.answer == "purged")

    @property
    def may_be_put(self) -> bool:
        """Whether the command may have written a new revision, and nobody knows."""
        return self.call.op in ("schedule", "redrive") and self.outcome == "info"


@dataclass(slots=True)
class Settlement:
    """A settlement. `outcome` is `info` without an answer."""

    note: SettlingNote
    asked_ns: int
    answered_ns: float = NEVER
    outcome: str = "info"


@dataclass(slots=True)
class LeaseRenewal:
    """A renewal that the store has carried out. `outcome` says whether the message was replaced or cancelled."""

    asked_ns: int
    answered_ns: int
    token: int
    outcome: str


@dataclass(slots=True)
class Lease:
    """A claim of one message by one process."""

    process: str
    note: ClaimNote
    call: int
    asked_ns: int
    answered_ns: int
    now_ms: int
    is_of_source: bool
    lease_ms: int
    renewals: list[LeaseRenewal] = field(default_factory=list)
    settlements: list[Settlement] = field(default_factory=list)
    is_in_doubt: bool = False
    """Whether the store may have lost the claim, or its settlement, with a lost server."""
    is_put_back: bool = False
    """Whether the process has tried to put the message back into the store from a source."""

    @property
    def claimed_ms(self) -> int:
        """The store's time at which it carried the request out, epoch ms.

        The token has this time. If the request was repeated, `now_ms` is the time of its last answer. Before that
        answer, the clock may have stepped back.
        """
        token_ms = token_deadline_ms(self.note.token) - self.lease_ms if self.lease_ms else 0
        return max(self.now_ms, token_ms)

    @property
    def is_certain(self) -> bool:
        """Whether the claim shows what the store holds: no server has lost it, and it is of no source."""
        return not self.is_in_doubt and not self.is_of_source

    @property
    def settled_ns(self) -> float:
        """The time of the answer `settled` to the settlement of this claim; `NEVER` without such an answer."""
        return min((each.answered_ns for each in self.settlements if each.outcome == "settled"), default=NEVER)

    def deadline_ms(self, at_ns: float) -> int:
        """Return the deadline of the lease, as the process knew it at `at_ns`."""
        tokens = [self.note.token, *(each.token for each in self.renewals if each.answered_ns <= at_ns)]
        return max(token_deadline_ms(token) for token in tokens)

    def is_open(self, at_ns: float) -> bool:
        """Return whether nobody had tried to settle the claim before `at_ns`."""
        return all(each.asked_ns > at_ns for each in self.settlements)


@dataclass(slots=True)
class Attempt:
    """A run of a handler, or a send."""

    start: RunStarted
    lease: Lease | None
    ended_ns: float = NEVER
    result: str = ""

    @property
    def revision(self) -> int:
        """The revision of the message, from the delivery id."""
        return int(self.start.delivery_id.rsplit("/", 2)[1])

    @property
    def due_ms(self) -> int:
        """The due time of the claim, epoch ms; without a claim, the due time in the delivery id."""
        return int(self.start.delivery_id.rsplit("/", 1)[1]) if self.lease is None else self.lease.note.due_ms

    @property
    def is_retried_occurrence(self) -> bool:
        """Whether this is a retry of an occurrence of a series, which is a message of its own."""
        return self.lease is not None and self.lease.note.id != self.start.id

    @property
    def begun_ms(self) -> int:
        """The store's time of the claim, epoch ms; without a claim, the time of the process at the beginning.

        A message of a source has come there after its due time. A process only estimates the time of a source, so its
        own time counts too.
        """
        if self.lease is None:
            return self.start.wall_ms
        return max(self.lease.claimed_ms, self.start.wall_ms) if self.is_of_source else self.lease.claimed_ms

    @property
    def is_of_source(self) -> bool:
        """Whether the message came from a source, such as a list. Commands to the store do not change it any more."""
        return self.lease is not None and self.lease.is_of_source

    @property
    def asked_ns(self) -> int:
        """The time at which its claim was sent. The claim must respect commands that were acknowledged before."""
        return self.start.at_ns if self.lease is None else self.lease.asked_ns

    def __str__(self) -> str:
        return f"{self.start.delivery_id} attempt {self.start.attempt} in {self.start.process}"


@dataclass(slots=True)
class Fault:
    """An event that may let the leases of a process end unsettled, from `at_ns` on: `killed`, `stopped`, `blocked`."""

    process: str
    at_ns: int
    what: str


def _run_of(event: RunStarted | RunEnded) -> _Run:
    return event.process, event.delivery_id, event.attempt, event.token


class Story:
    """The joined events of a history.

    Attributes:
        operations: In the order in which they were sent.
        attempts: In the order in which they started.
        leases: In the order in which the claims were answered.
        moved: The lanes of which the store itself has moved messages to their destinations.
        doubled: Messages (id, revision) that are in the store and in their source, because a process ended while it
            put them back.

    Raises:
        msgspec.ValidationError: An event does not follow from the events before it, such as an answer without a call.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.operations: list[Operation] = []
        self.leases: list[Lease] = []
        self.attempts: list[Attempt] = []
        self.faults: list[Fault] = []
        self.resources: dict[str, dict[str, Resources]] = defaultdict(dict)
        self.ready: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        self.final: Final | None = None
        self.losses: list[Loss] = []
        self.moved: set[str] = set()
        self._opened: set[str] = set()
        self._last_ns: dict[str, int] = {}
        self._calls: dict[tuple[str, int], Operation | Claiming | list[Settlement] | Renewing] = {}
        self._by_token: dict[tuple[str, str, int], Lease] = {}
        self._latest: dict[tuple[str, str, int], Lease] = {}
        self._running: dict[_Run, list[Attempt]] = defaultdict(list)
        self._ended: dict[_Run, Attempt] = {}
        for event in events:
            try:
                self._tell(event)
            except (KeyError, ValueError) as error:
                text = f"an event of {event.process!r} at {event.at_ns} ns does not follow from the events before it"
                raise msgspec.ValidationError(text) from error
            self._last_ns[event.process] = event.at_ns
        known_ends = dict(self.ended)
        for process in sorted(self._opened):
            self._vanished(process)
        for loss in self.losses:
            self._lose(loss)
        died = {fault.process for fault in self.faults if fault.what == "killed"}
        unfinished = [each for each in self.leases if each.is_put_back and each.settled_ns == NEVER]
        self.doubled: set[tuple[str, int]] = {
            (each.note.id, each.note.revision) for each in unfinished if each.process in died
        }
        self._by_id: dict[str, list[Operation]] = defaultdict(list)
        for operation in self.operations:
            self._by_id[operation.id].append(operation)
        for operation in self.operations:  # a command of an ended process took effect before that end, or never
            if operation.outcome == "info" and operation.answered_ns == NEVER:
                operation.answered_ns = known_ends.get(operation.call.process, NEVER)

    def _tell(self, event: Event) -> None:  # noqa: PLR0912 - one case per event
        match event:
            case Invoked():
                operation = Operation(event)
                self.operations.append(operation)
                self._calls[event.process, event.call] = operation
            case Returned():
                self._returned(event)
            case Claiming() | Renewing():
                self._calls[event.process, event.call] = event
            case Claimed():
                self._claimed(event)
            case Settling():
                self._calls[event.process, event.call] = list(self._settling(event))
            case Settled():
                self._settled(event)
            case PuttingBack():
                self._putting_back(event)
            case Renewed():
                self._renewed(event)
            case RunStarted():
                self._run_started(event)
            case RunEnded():
                self._run_ended(event)
            case Blocked():
                self.faults.append(Fault(event.process, event.at_ns, "blocked"))
            case Process():
                self._process(event)
            case Loss():
                self.losses.append(event)
            case Moved():
                self.moved.add(event.lane)
            case Resources():
                self.resources[event.process][event.phase] = event
            case Final():
                self.final = event

    def _asked(self, answer: Returned | Claimed | Settled | Renewed, kind: type[A]) -> A:
        """Return the call to which an answer belongs."""
        asked = self._calls[answer.process, answer.call]
        if isinstance(asked, kind):
            return asked
        raise ValueError(kind)

    def _run_ended(self, event: RunEnded) -> None:
        key = _run_of(event)
        if running := self._running[key]:
            self._ended[key] = running.pop(0)
        attempt = self._ended[key]  # the run of a message in a batch may end twice: with the batch, and by itself
        attempt.ended_ns, attempt.result = event.at_ns, event.result

    def _returned(self, event: Returned) -> None:
        operation = self._asked(event, Operation)
        operation.outcome, operation.answer = event.outcome, event.answer
        operation.revision, operation.due_ms = event.revision, event.due_ms
        operation.answered_ns = NEVER if event.outcome == "info" else event.at_ns

    def _claimed(self, event: Claimed) -> None:
        asked = self._asked(event, Claiming)
        for note in event.claims:
            if (event.process, note.id, note.token) in self._by_token:
                continue  # a claim that was repeated
            lease = Lease(
                event.process,
                note,
                event.call,
                asked.at_ns,
                event.at_ns,
                event.now_ms,
                asked.is_of_source,
                asked.lease_ms,
            )
            self.leases.append(lease)
            self._by_token[event.process, note.id, note.token] = lease
            self._latest[event.process, base_id(note.id), note.revision] = lease

    def _settling(self, event: Settling) -> Iterator[Settlement]:
        for note in event.batch:
            settlement = Settlement(note, event.at_ns)
            lease = self._by_token.get((event.process, note.id, note.token))
            if lease is not None:
                lease.settlements.append(settlement)
            yield settlement

    def _settled(self, event: Settled) -> None:
        settlements = self._asked(event, list)
        for settlement, outcome in zip(settlements, event.outcomes, strict=True):
            settlement.answered_ns, settlement.outcome = event.at_ns, outcome

    def _putting_back(self, event: PuttingBack) -> None:
        for message_id, revision in event.batch:
            lease = self._latest.get((event.process, base_id(message_id), revision))
            if lease is not None:  # if there is none, the record is unreadable and was never claimed
                lease.is_put_back = True

    def _renewed(self, event: Renewed) -> None:
        renewing = self._asked(event, Renewing)
        for (message_id, token, to), outcome in zip(renewing.batch, event.outcomes, strict=True):
            lease = self._by_token.get((event.process, message_id, token))
            if lease is not None and outcome != "lost":
                lease.renewals.append(LeaseRenewal(renewing.at_ns, event.at_ns, to, outcome))
                self._by_token[event.process, message_id, to] = lease

    def _run_started(self, event: RunStarted) -> None:
        attempt = Attempt(event, self._claim_of(event))
        if not (attempt.revision < MOST and attempt.due_ms < MOST):
            raise ValueError(event.delivery_id)
        self.attempts.append(attempt)
        self._running[_run_of(event)].append(attempt)

    def _claim_of(self, event: RunStarted) -> Lease | None:
        """Return the claim to which a run belongs. A retried occurrence was claimed under an id of its own."""
        _, revision, due_ms = event.delivery_id.rsplit("/", 2)
        if not event.token:
            return self._latest.get((event.process, event.id, int(revision)))
        claims = (
            self._by_token.get((event.process, claimed, event.token))
            for claimed in (occurrence_id(event.id, int(due_ms)), event.id)
        )
        return next(filter(None, claims), None)

    def _process(self, event: Process) -> None:
        match event.what:
            case "ready":
                self.ready[event.process] = event.at_ns
            case "opened":
                self.ready[event.process] = event.at_ns
                self._opened.add(event.process)
            case "closed":
                self._opened.discard(event.process)
            case "stopped":
                self.faults.append(Fault(event.process, event.at_ns, "stopped"))
            case "killed":
                self._killed(event.process, event.at_ns)
            case "ended":
                self.ended[event.process] = event.at_ns
                if event.code:
                    self._killed(event.process, event.at_ns)

    def _killed(self, process: str, at_ns: int) -> None:
        if not any(fault.process == process and fault.what == "killed" for fault in self.faults):
            self.faults.append(Fault(process, at_ns, "killed"))

    def _vanished(self, process: str) -> None:
        """Note the death of a process that has opened its scheduler and not closed it, at its last event."""
        if process not in self.ended:
            self.ended[process] = self._last_ns[process]
            self._killed(process, self._last_ns[process])

    def _lose(self, loss: Loss) -> None:
        """Mark the operations and leases in the lost time as uncertain."""
        for lease in self.leases:
            times: list[tuple[int, float]] = [(lease.asked_ns, lease.answered_ns)]
            times += [(each.answered_ns, each.answered_ns) for each in lease.renewals]
            times += [(each.asked_ns, each.answered_ns) for each in lease.settlements]
            lease.is_in_doubt |= any(asked <= loss.at_ns and answered >= loss.since_ns for asked, answered in times)
        for operation in self.operations:
            if operation.asked_ns <= loss.at_ns and operation.answered_ns >= loss.since_ns:
                operation.is_in_doubt = True
                if loss.commands:
                    operation.outcome, operation.answered_ns = "info", NEVER

    def puts(self) -> Iterator[Operation]:
        """Yield the commands that surely wrote a new revision."""
        return (operation for operation in self.operations if operation.is_put)

    def claimed_ns(self) -> dict[tuple[str, int], int]:
        """Return when each version was claimed for the first time, by id and revision."""
        claimed: dict[tuple[str, int], int] = {}
        for lease in self.leases:
            if lease.is_certain:
                claimed.setdefault((base_id(lease.note.id), lease.note.revision), lease.answered_ns)
        return claimed

    def series(self) -> set[str]:
        """Return the ids of messages that recur, or may recur."""
        ids = {operation.id for operation in self.operations if operation.call.recurs}
        return ids | {
            lease.note.id for lease in self.leases if any(each.note.next_ms is not None for each in lease.settlements)
        }

    def by_id(self) -> dict[str, list[Operation]]:
        """Return the operations by message id."""
        return self._by_id

    def in_flight(self, fault: Fault) -> int:
        """Count the messages that the process had in flight at the fault. A dead process never settles them."""
        at_ns = self.ended.get(fault.process, NEVER) if fault.what == "killed" else fault.at_ns
        return sum(
            lease.process == fault.process and lease.answered_ns <= at_ns and lease.settled_ns > at_ns
            for lease in self.leases
        )
