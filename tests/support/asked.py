"""Record the requests of clients and their answers for each message, and judge whether the deliveries agree with them.

A payload begins with `<id>/<version>`. Times are epoch ms of one machine.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["LANES", "Delivered", "Fault", "Lane", "State", "Verdict", "Wanted", "judge", "payload_of"]

NEVER = math.inf
AROUND_MS = 2_000
"""The longest time between the first delivery of a duplicate and the fault of its store, sink or process."""


class Lane(NamedTuple):
    """The store and the destination of messages.

    Attributes:
        store: The name of the store in the service.
        to: The destination. `{}` is replaced by a number, so that the lists stay short.
        is_exact: Whether each message is delivered exactly once, whatever happens.
        margin_ms: The store must obey a change that it acknowledged this long before the due time.
    """

    store: str
    to: str
    is_exact: bool
    margin_ms: int


LANES: Mapping[str, Lane] = {
    "redis to kafka": Lane("redis", "kafka:of-redis", is_exact=False, margin_ms=0),
    "redis to list": Lane("redis", "redis-list:of-redis-{}", is_exact=True, margin_ms=0),
    "kafka to kafka": Lane("kafka", "kafka:of-kafka", is_exact=True, margin_ms=3_000),
    "kafka to list": Lane("kafka", "redis-list:of-kafka-{}", is_exact=False, margin_ms=3_000),
    "box": Lane("redis", "kafka:of-box", is_exact=False, margin_ms=0),
}


def payload_of(message_id: str, version: int) -> str:
    """Return the payload of one version of a message."""
    name = f"{message_id}/{version}"
    return f"{name} {name[::-1]}"


@dataclass(slots=True)
class State:
    """The state of a message between two commands.

    Attributes:
        version: The version of its payload.
        due_ms: The due time. `NEVER` means that the message is cancelled.
        since_ms: The time at which the first command was acknowledged.
        until_ms: The time at which the next command was acknowledged.
    """

    version: int
    due_ms: float
    since_ms: int
    until_ms: float = NEVER


@dataclass(slots=True)
class Wanted:
    """The commands about one message and the states that follow from them.

    Attributes:
        lane: One of `LANES`.
        states: All states that the message may have had, in order.
        sent: For each version, how often it may have been stored.
        is_keyed: The request has an idempotency key, so the message must be stored once, despite repetitions.
        is_in_doubt: Nobody knows whether the message must be delivered, because a client did not wait for the answer.
    """

    lane: str
    states: list[State] = field(default_factory=list)
    sent: Counter[int] = field(default_factory=Counter)
    is_keyed: bool = False
    is_in_doubt: bool = False

    def becomes(self, version: int, due_ms: float, acknowledged_ms: int) -> None:
        """Record an acknowledged change."""
        for state in self.states:
            state.until_ms = min(state.until_ms, acknowledged_ms)
        self.states.append(State(version, due_ms, acknowledged_ms))

    @property
    def expected(self) -> int | None:
        """Return the version that must be delivered; None if no version must be."""
        if self.is_in_doubt or not self.states or self.states[-1].due_ms == NEVER:
            return None
        return self.states[-1].version


class Delivered(NamedTuple):
    """One delivery."""

    lane: str
    delivery_id: str
    payload: str
    at_ms: int


class Fault(NamedTuple):
    """A fault of the service, or of a server that it uses."""

    what: str
    begun_ms: int
    ended_ms: float


@dataclass(slots=True)
class Verdict:
    """The result: `wrong` names broken rules, the other attributes are numbers."""

    wrong: list[str] = field(default_factory=list)
    counted: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    late_ms: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The lateness of each message that was due while there was no fault."""

    def __str__(self) -> str:
        lines = [f"{lane}: {dict(counter)}" for lane, counter in sorted(self.counted.items())]
        for lane, all_late in sorted(self.late_ms.items()):
            late = sorted(all_late)
            told = f"{len(late)}: p50 {late[len(late) // 2]}, p99 {late[len(late) * 99 // 100]}, at most {late[-1]} ms"
            lines.append(f"{lane}, late in calm, {told}")
        return "\n".join([*lines, *self.wrong[:50]])


def judge(wanted: Mapping[str, Wanted], delivered: Iterable[Delivered], faults: Iterable[Fault]) -> Verdict:
    """Compare the deliveries with the requests."""
    faults, verdict = list(faults), Verdict()
    by_id: defaultdict[str, list[Delivered]] = defaultdict(list)
    for each in delivered:
        by_id[each.payload.partition("/")[0]].append(each)
    for message_id in by_id.keys() - wanted.keys():
        verdict.wrong.append(f"nobody asked for {by_id[message_id][0]}")
    for message_id, mine in wanted.items():
        found = sorted(by_id.get(message_id, []), key=lambda each: each.at_ms)
        verdict.wrong += _judged(message_id, mine, found, faults)
        _count(verdict, mine, found, faults)
    return verdict


def _judged(message_id: str, mine: Wanted, found: list[Delivered], faults: list[Fault]) -> Iterator[str]:
    versions: defaultdict[int, list[Delivered]] = defaultdict(list)
    for each in found:
        version = int(each.payload.partition("/")[2].partition(" ")[0])
        versions[version].append(each)
        yield from _timely(message_id, mine, version, each)
    if mine.expected is not None and mine.expected not in versions:
        yield f"S2: {message_id} was lost: {mine}"
    for version, deliveries in versions.items():
        yield from _bounded(message_id, mine, version, deliveries, faults)


def _timely(message_id: str, mine: Wanted, version: int, each: Delivered) -> Iterator[str]:
    if each.lane != mine.lane or each.payload != payload_of(message_id, version):
        yield f"S8: {each} is not as it was scheduled: {mine}"
    states = [state for state in mine.states if state.version == version]
    margin_ms = LANES[mine.lane].margin_ms
    if all(each.at_ms < state.due_ms for state in states):
        yield f"S1: {each} is early: {mine}"
    elif not any(state.due_ms <= min(each.at_ms, state.until_ms + margin_ms) for state in states):
        yield f"S4, S5: {each} had been changed in time: {mine}"


def _bounded(
    message_id: str, mine: Wanted, version: int, deliveries: list[Delivered], faults: list[Fault]
) -> Iterator[str]:
    by_delivery: defaultdict[str, list[Delivered]] = defaultdict(list)
    for each in deliveries:
        by_delivery[each.delivery_id].append(each)
    if len(by_delivery) > (1 if mine.is_keyed else mine.sent[version]):
        yield f"S6: {message_id}/{version} was delivered anew: {sorted(by_delivery)}, {mine}"
    for same in by_delivery.values():
        if len(same) > 1 and LANES[mine.lane].is_exact:
            yield f"S3: {same} came {len(same)} times"
        elif len(same) > 1 and not any(_is_around(fault, same[0].at_ms) for fault in faults):
            yield f"B1: {same} came {len(same)} times, without a fault"


def _is_around(fault: Fault, at_ms: int) -> bool:
    return fault.begun_ms - AROUND_MS <= at_ms <= fault.ended_ms + AROUND_MS


def _count(verdict: Verdict, mine: Wanted, found: list[Delivered], faults: list[Fault]) -> None:
    counter = verdict.counted[mine.lane]
    counter["messages"] += 1
    counter["came"] += len(found)
    counter["again"] += len(found) - len({each.delivery_id for each in found})
    counter["in doubt"] += mine.is_in_doubt
    counter["stored again"] += len({each.delivery_id for each in found}) > len({each.payload for each in found})
    counter["changed in time"] += sum(
        state.due_ms != NEVER and state.until_ms + LANES[mine.lane].margin_ms < state.due_ms for state in mine.states
    )
    if found and mine.states and mine.states[-1].due_ms != NEVER:
        due_ms, at_ms = max(int(mine.states[-1].due_ms), mine.states[-1].since_ms), found[-1].at_ms
        if not any(_is_around(fault, due_ms) or _is_around(fault, at_ms) for fault in faults):
            verdict.late_ms[mine.lane].append(max(at_ms - due_ms, 0))
