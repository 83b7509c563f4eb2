"""`KafkaWork`: the dispatching role of one worker. It claims from all partitions that are owned and ready."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from aiodelay.core.dict_table.table import Worker
from aiodelay.core.transitions import SUSPECT_LAPSES, is_lease_over, is_suspect
from aiodelay.core.values import (
    MAX_CLAIM_MESSAGES,
    Claim,
    Claimed,
    Demand,
    Lane,
    LaneState,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    Tidied,
    WorkStatus,
)

from .assignment import Readiness
from .partition import Partition
from .store_parts import StoreParts
from .transfer import SAFETY_POLL_MS

__all__ = ["KafkaWork"]


class KafkaWork:
    """The dispatching role of one worker.

    Args:
        parts: The parts of the store.
        readiness: Reports how many partitions are ready.
        worker: The name of the worker.
        lanes: The lanes that the worker serves at first.
    """

    def __init__(self, parts: StoreParts, readiness: Readiness, worker: str, lanes: Collection[Lane]) -> None:
        self._parts, self._assignment, self._readiness = parts, parts.assignment, readiness
        self._worker = Worker(worker, lanes, parts.clock.now_ms())
        self._assignment.waiters.workers.add(self._worker)
        self._turn = 0
        self._last = ""
        self._claimed: dict[Partition, Sequence[Claim]] = {}
        self._places: dict[tuple[str, int], Partition] = {}

    def close(self) -> None:
        """Stop serving."""
        self._assignment.waiters.workers.discard(self._worker)

    # --- claims -------------------------------------------------------------------------------------------

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        self._parts.tasks.check_open()
        self._assignment.check_features()
        is_repeated, self._last = request == self._last, request
        if not is_repeated:
            self._turn += 1
            self._claimed = {}
        claims: list[Claim] = []
        next_due: list[int] = []
        for partition in self._in_turn():
            if not partition.is_ready:
                continue  # the partition has become unready while another partition was asked
            if partition.is_stalled and not is_repeated:
                continue  # claims of its messages could not be settled, and would take the places of other messages
            if is_repeated:
                claimed = partition.index.claiming.claim_again(
                    self._claimed.get(partition, ()), demand, self._parts.clock.now_ms()
                )
            else:
                claimed = await partition.commands.claim(_left(demand, claims), lease_ms, self._turn, self._worker)
                self._claimed[partition] = claimed.claims
                self._places |= {(each.record.id, each.token): partition for each in claimed.claims}
            claims += claimed.claims
            next_due += [] if claimed.next_due_ms is None else [claimed.next_due_ms]
            if claimed.claims and is_suspect(claimed.claims[0].record):
                break
        return Claimed(claims, self._parts.clock.now_ms(), min(next_due, default=None))

    def _in_turn(self) -> list[Partition]:
        """Return the partitions that are ready. Each turn begins with another partition."""
        ready = [each for each in self._assignment.partitions.values() if each.is_ready]
        first = self._turn % len(ready) if ready else 0
        return ready[first:] + ready[:first]

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        self._parts.tasks.check_open()
        outcomes: dict[int, SettleOutcome] = {}
        parts: defaultdict[Partition, list[int]] = defaultdict(list)
        for i, settlement in enumerate(settlements):
            partition = self._place_of(settlement)
            if partition is None:
                outcomes[i] = SettleOutcome.GONE
            else:
                parts[partition].append(i)

        async def settle(partition: Partition, indices: Sequence[int]) -> None:
            settled = await partition.commands.settle([settlements[i] for i in indices])
            outcomes.update(zip(indices, settled, strict=True))

        try:
            async with asyncio.TaskGroup() as tasks:
                for partition, indices in parts.items():
                    tasks.create_task(settle(partition, indices))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        for settlement in settlements:
            self._places.pop((settlement.id, settlement.token), None)
        return [outcomes[i] for i in range(len(settlements))]

    def _place_of(self, claim: Settlement | Renewal) -> Partition | None:
        """Return the partition of a claim. None = another process owns the partition now, or the message has ended."""
        found = self._places.get((claim.id, claim.token))
        if found is None:
            found = next(
                (each for each in self._parts.lookup.partitions_of(claim.id) if each.index.knows(claim.id)), None
            )
        return None if found is None or found.is_given_up else found

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        self._parts.tasks.check_open()
        return [self._renew(renewal) for renewal in renewals]

    def _renew(self, renewal: Renewal) -> RenewOutcome:
        partition = self._place_of(renewal)
        self._places.pop((renewal.id, renewal.token), None)
        if partition is None:
            return RenewOutcome.LOST
        was_over = is_lease_over(renewal.token, self._parts.clock.now_ms())
        outcome = partition.index.rules.renew(renewal)
        if outcome is RenewOutcome.RENEWED and was_over:
            # This process was suspended, so another owner may have cancelled the message. An attempt that runs goes
            # on, and its settlement is fenced off. A claim whose attempt has not begun must not begin one.
            outcome = RenewOutcome.SUPERSEDED
        if outcome is not RenewOutcome.LOST:
            self._places[renewal.id, renewal.to] = partition
        return outcome

    # --- waiting ------------------------------------------------------------------------------------------

    async def wait(self, *, until_ms: int | None) -> None:
        seconds = SAFETY_POLL_MS / 1000
        if until_ms is not None:
            seconds = min(seconds, self._parts.clock.seconds_until(until_ms))
        await self._worker.wakeup.wait(seconds)

    def wake(self) -> None:
        self._worker.wakeup.set()

    def clear(self) -> None:
        self._worker.wakeup.clear()

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        self._parts.tasks.check_open()
        self._assignment.check_features()
        self._worker.lanes, self._worker.seen_ms = frozenset(lanes), self._parts.clock.now_ms()
        states: dict[Lane, LaneState] = {}
        lapsed = expired = 0
        for partition in self._assignment.partitions.values():
            if partition.is_ready:
                tidied = await partition.commands.tidy(self._worker, lanes, limit)
                lapsed, expired = lapsed + tidied.lapsed, expired + tidied.expired
                for state in tidied.lanes:
                    states[state.lane] = _oldest(states.get(state.lane), state)
        return Tidied(self._parts.clock.now_ms(), lapsed, expired, list(states.values()))

    def beat(self, ids: Collection[str]) -> None:
        for partition in list(self._assignment.partitions.values()):
            partition.index.claiming.beat(self._worker, ids, self._parts.clock.now_ms())

    def status(self) -> WorkStatus:
        return self._readiness.status()


def _left(demand: Mapping[Lane, Demand], claims: Sequence[Claim]) -> dict[Lane, Demand]:
    """Return the demand that is left after some claims. Suspects are not claimed together with other messages."""
    room = MAX_CLAIM_MESSAGES - len(claims)
    left: dict[Lane, Demand] = {}
    for lane, wanted in demand.items():
        names = {lane, *wanted.aliases}
        given = [claim.record.envelope.size for claim in claims if claim.record.envelope.lane in names]
        messages, size = wanted.messages - len(given), wanted.max_bytes - sum(given)
        left[lane] = replace(
            wanted,
            messages=min(messages, room) if size > 0 or not given else 0,
            max_bytes=max(size, 0),
            max_lapses=min(wanted.max_lapses, SUSPECT_LAPSES - 1) if claims else wanted.max_lapses,
        )
    return left


def _oldest(before: LaneState | None, state: LaneState) -> LaneState:
    if before is None:
        return state
    dues = [each.oldest_due_ms for each in (before, state) if each.oldest_due_ms is not None]
    return LaneState(state.lane, min(dues, default=None), before.served or state.served)
