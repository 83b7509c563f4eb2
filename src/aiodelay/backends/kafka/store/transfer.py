"""`KafkaTransfer`: moves due messages into topics of the store's own cluster.

One transaction writes the record into the topic and ends the message.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice

from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.pending.changes import Change
from aiodelay.backends.kafka.sink import KafkaSink
from aiodelay.backends.kafka.source import KafkaSource
from aiodelay.core.values import (
    MAX_CLAIM_BYTES,
    MAX_CLAIM_MESSAGES,
    Blocked,
    Demand,
    Promise,
    Reach,
    Record,
    Settlement,
    Transferred,
)
from aiodelay.core.wakeup import WakeUp
from aiodelay.errors import StoreUnavailableError, TargetNotAllowedError, shortened
from aiodelay.ports import Sink, Source, Transferring

from .assignment import Assignment
from .partition import Partition
from .store_parts import StoreParts, StorePort

__all__ = ["SAFETY_POLL_MS", "KafkaTransfer", "Transfers"]

SAFETY_POLL_MS = 2_000
MOST_MESSAGES = 10_000
"""Most messages of one call, unless the user's own sink for these topics sets another limit."""
STEP = Demand(MAX_CLAIM_MESSAGES, MAX_CLAIM_BYTES)
UNDER_WAY = 2
"""Transactions of a partition under way at a time: while a transaction is being committed, the next is prepared."""


class Transfers(StorePort):
    """The ports `Endpoints` and `Transfer`, for the topics of the store's cluster and the messages that go to them."""

    @property
    def sinks(self) -> Sequence[Sink]:
        """The sink that comes with this store: the topics of its cluster."""
        return [_OwnTopics(self._parts.cluster, self._parts.options.topics)]

    @property
    def sources(self) -> Sequence[Source]:
        """The source that comes with this store: the topics of its cluster."""
        return [KafkaSource(self._parts.cluster)]

    def reaches(self, sink: Sink, address: str = "") -> Reach:
        """Return the promise for messages from this store to a sink, and the reason. It is the same for all topics."""
        del address
        cluster = self._parts.cluster
        if not isinstance(sink, KafkaSink):
            return Reach(
                Promise.AT_LEAST_ONCE, f"{sink.name} is not on a Kafka cluster: messages are claimed, sent and settled"
            )
        if not sink.is_at(cluster):
            reason = (
                f"{sink.cluster.name} may be another cluster than {cluster.name}, or have another login: "
                "messages are claimed, sent and settled"
            )
            return Reach(Promise.AT_LEAST_ONCE, reason)
        reason = f"one transaction on {cluster.name} writes a record and ends its message, for read_committed readers"
        return Reach(Promise.EXACTLY_ONCE, reason)

    @contextmanager
    def transferring(self, sink: Sink) -> Iterator[Transferring]:
        """Open the transfer of one sink's messages."""
        transfer, waiters = KafkaTransfer(self._parts, sink), self._parts.assignment.waiters
        waiters.transfers.add(transfer.wakeup)
        try:
            yield transfer
        finally:
            waiters.transfers.discard(transfer.wakeup)

    async def blocked(self) -> Sequence[Blocked]:
        """List the topics that take nothing now, with the number of messages that wait for each."""
        blocked = self._parts.targets.blocked
        return [
            Blocked(lane, address, blocked[address].reason, n)
            for (lane, address), n in sorted(_waiting(self._parts.assignment).items())
            if address in blocked
        ]


def _waiting(assignment: Assignment) -> Counter[tuple[str, str]]:
    """Count the messages for addresses that take nothing now, by lane and address."""
    return sum((partition.index.due.blocked() for partition in assignment.partitions.values()), Counter())


class _Taking:
    """The state of one transfer call: its remaining demand, and the series and unknown topics that it has met."""

    def __init__(self, demand: Demand) -> None:
        self.messages, self.bytes = demand.messages, demand.max_bytes
        self.series: list[Record] = []
        self.unknown: set[str] = set()

    def take(self, partition: Partition, lane: str, most: Demand) -> list[Change]:
        """Decide to move due messages of a partition, at most as many as one transaction takes."""
        messages = min(most.messages, self.messages, MAX_CLAIM_MESSAGES)
        changes, due = partition.moves.begin(lane, Demand(messages, min(most.max_bytes, MAX_CLAIM_BYTES)))
        self.messages -= len(changes)
        self.bytes -= due.size
        self.series += due.series
        self.unknown |= due.unknown
        return changes

    def goes_on(self, partition: Partition) -> bool:
        """Say whether to take more messages. False after series or unknown topics: the caller handles these first."""
        has_room = self.messages > 0 and self.bytes >= MAX_CLAIM_BYTES
        return has_room and partition.is_ready and not self.series and not self.unknown


class _Told:
    """Traces of the moved messages, up to the wanted number."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.traces: list[tuple[str, Mapping[str, str]]] = []

    def add(self, changes: Sequence[Change]) -> None:
        """Add the traces of the changes that were written."""
        if len(self.traces) >= self._most:
            return
        moved = (each.entry.record for each in changes if each.is_written and each.targets and each.entry)
        found = ((each.id, each.envelope.trace) for each in moved if each.envelope.trace)
        self.traces += islice(found, self._most - len(self.traces))


class _OwnTopics(KafkaSink):
    """The topics of a store's own cluster, except its schedules topics."""

    def __init__(self, cluster: Cluster, schedules: Sequence[str]) -> None:
        super().__init__(cluster, messages=MOST_MESSAGES)
        self._schedules = schedules

    def check(self, address: str) -> None:
        super().check(address)
        if address in self._schedules:
            allowed = "another topic: in a schedules topic of this store, the message would become a schedule again"
            raise TargetNotAllowedError("the topic in to=", shortened(address), allowed)


class KafkaTransfer:
    """`Transferring` into topics. Each partition that is ready runs one transaction after the other.

    While one transaction is being committed, the next one is prepared, until the demand is used up or nothing is due.
    """

    def __init__(self, parts: StoreParts, sink: Sink) -> None:
        self._parts, self._sink = parts, sink
        self._assignment, self._targets = parts.assignment, parts.targets
        self._turn = 0
        self.wakeup: WakeUp = WakeUp()

    @property
    def lane(self) -> str:
        """The lane whose messages are moved."""
        return self._sink.name

    async def transfer(self, demand: Demand, settlements: Sequence[Settlement] = (), *, traces: int = 0) -> Transferred:
        self._parts.tasks.check_open()
        for partition in list(self._assignment.partitions.values()):
            if partition.is_ready and partition.horizon.is_behind:
                await partition.horizon.follow()
        changed = await self._try_blocked_again()
        changes = self._settled(settlements)
        taking = self._taken(demand, changes)
        if taking.unknown:
            changed.update(await self._targets.inspect(taking.unknown))
            taking = self._taken(demand, changes)
        told = _Told(traces)
        moving = (self._moved(partition, each, taking, told) for partition, each in changes.items())
        blocked = set(self._targets.blocked)
        moved = sum(await asyncio.gather(*moving))
        for topic in self._targets.blocked.keys() - blocked:
            changed[topic] = self._targets.blocked[topic].reason
        self._block()
        return Transferred(moved, taking.series, changed, self._parts.clock.now_ms(), self._next_due_ms(), told.traces)

    async def _try_blocked_again(self) -> dict[str, str]:
        """Check blocked topics again after their pause. Unblock a topic if no message waits for it."""
        over = set(self._targets.over())
        if not over:
            return {}
        idle = over - {address for _, address in _waiting(self._assignment)}
        for topic in idle:
            self._targets.forget(topic)
        return {**dict.fromkeys(idle, ""), **await self._targets.inspect(over - idle)}

    def _settled(self, settlements: Sequence[Settlement]) -> dict[Partition, list[Change]]:
        changes: dict[Partition, list[Change]] = {}
        for settlement in settlements:
            for partition in self._parts.lookup.partitions_of(settlement.id):
                change = partition.moves.settle_occurrence(settlement)
                if change is not None:
                    changes.setdefault(partition, []).append(change)
                    break
        return changes

    def _taken(self, demand: Demand, changes: dict[Partition, list[Change]]) -> _Taking:
        """Decide to move due messages. Each call begins with another partition, so that no partition is always last."""
        self._block()
        ready = self._ready()
        if not ready and self._assignment.partitions:
            why = next((each.why for each in self._assignment.partitions.values() if each.why), "")
            raise StoreUnavailableError(self._parts.cluster.name, why or "the partitions are being read")
        self._turn += 1
        first = self._turn % len(ready) if ready else 0
        left = demand.messages - sum(len(each) for each in changes.values())
        taking = _Taking(Demand(left, demand.max_bytes))
        for i, partition in enumerate(ready[first:] + ready[:first]):
            share = Demand(-(-taking.messages // (len(ready) - i)), demand.max_bytes // len(ready))
            changes.setdefault(partition, []).extend(taking.take(partition, self.lane, share))
        return taking

    async def _moved(self, partition: Partition, changes: list[Change], taking: _Taking, told: _Told) -> int:
        """Move the messages taken from a partition, and take more meanwhile. Return the number of moved messages."""
        under_way, moved = deque([changes]), 0
        while under_way:
            await asyncio.sleep(0)  # lets the writer begin with the messages taken so far
            if len(under_way) < UNDER_WAY and taking.goes_on(partition):
                more = taking.take(partition, self.lane, STEP)
                under_way += [more] if more else []
            first = under_way.popleft()
            moved += await partition.moves.finish(first)
            told.add(first)
        return moved

    def _block(self) -> None:
        for partition in self._assignment.partitions.values():
            partition.index.due.block(self.lane, self._targets.blocked.keys())

    def _ready(self) -> list[Partition]:
        return [each for each in self._assignment.partitions.values() if each.is_ready and not each.is_stalled]

    def _next_due_ms(self) -> int | None:
        dues = [each.index.due.next_due_ms(self.lane, self._parts.clock.now_ms()) for each in self._ready()]
        return min((due for due in (*dues, self._targets.next_ms) if due is not None), default=None)

    async def wait(self, *, until_ms: int | None) -> None:
        seconds = SAFETY_POLL_MS / 1000
        if until_ms is not None:
            seconds = min(seconds, self._parts.clock.seconds_until(until_ms))
        await self.wakeup.wait(seconds)

    def wake(self) -> None:
        self.wakeup.set()

    def clear(self) -> None:
        self.wakeup.clear()
