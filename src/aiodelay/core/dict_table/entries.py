"""Entries of a `DictTable`, the heaps and lanes that order them, and a dict whose values expire."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from enum import Enum, auto
from itertools import chain, islice, takewhile
from typing import Generic, TypeVar

from msgspec import Struct

from aiodelay.core.values import Record

__all__ = ["GONE", "IN_LANE", "LEASED", "PARKED", "Entry", "EntryHeap", "EntryState", "ExpiringDict", "LaneQueue"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_SWEEP_AT = 1024


class EntryState(Enum):
    """Where an entry is: in its lane, parked (its address is paused or blocked), leased, or removed."""

    IN_LANE = auto()
    PARKED = auto()
    LEASED = auto()
    GONE = auto()


IN_LANE, PARKED, LEASED, GONE = EntryState  # each look-up in the enum takes as long as a call


class Entry(Struct, eq=False, gc=False):
    """A message of a table, from its insertion to its removal.

    Attributes:
        record: The message.
        place_ms: The place of the message in its lane: the time of its next attempt, epoch ms.
        sequence: The position of the message in the order of scheduling.
        state: Where the entry is.
        token: The token of the claim on the message; 0 = not claimed.
    """

    record: Record
    place_ms: int
    sequence: int
    state: EntryState = IN_LANE
    token: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """The sort key: the place, then the order of scheduling."""
        return self.place_ms, self.sequence

    def __lt__(self, other: Entry) -> bool:
        """Return whether this entry comes before `other`.

        The heap holds tuples (time, sequence, entry), so it compares entries only if time and sequence are equal. That
        happens if a removed entry of a message is still in the heap beside the message's new entry.
        """
        return self.order < other.order


class EntryHeap:
    """A heap of entries, ordered by time, then by sequence.

    An entry counts as long as it is in one of the given states. The heap skips entries that do not count. It removes
    them from time to time: when it holds twice as many entries as after the last removal, and more than `_SWEEP_AT`.
    """

    def __init__(self, *states: EntryState) -> None:
        self._states = states
        self._heap: list[tuple[int, int, Entry]] = []
        self._sweep_at = _SWEEP_AT

    def push(self, at_ms: int, entry: Entry) -> None:
        """Add an entry."""
        heapq.heappush(self._heap, (at_ms, entry.sequence, entry))
        if len(self._heap) > self._sweep_at:
            self.sweep()
            self._sweep_at = max(_SWEEP_AT, 2 * len(self._heap))

    def sweep(self) -> None:
        """Remove the entries that do not count.

        Call this before such an entry is pushed again. Otherwise the heap would hold that entry twice.
        """
        self._heap = [item for item in self._heap if item[2].state in self._states]
        heapq.heapify(self._heap)

    def first(self) -> Entry | None:
        """Return the first entry that counts; None if no entry counts."""
        heap, states = self._heap, self._states
        while heap:
            entry = heap[0][2]
            if entry.state in states:
                return entry
            heapq.heappop(heap)
        return None

    def pop(self) -> Entry:
        """Remove the entry that `first` has just returned."""
        return heapq.heappop(self._heap)[2]


class LaneQueue:
    """The messages of one lane, and its paused and blocked addresses.

    A message of a paused or blocked address is *parked*: it is kept apart until the address is free again.
    """

    messages: int
    is_held: bool
    held: set[str]
    blocked: set[str]

    def __init__(self) -> None:
        self.messages, self.is_held = 0, False
        self.held, self.blocked = set(), set()
        self._waiting = EntryHeap(IN_LANE)
        self._parked: dict[str, dict[int, Entry]] = {}

    def begin_with(self, before: LaneQueue, waiting: Iterable[Entry], running: Iterable[Entry], now: int) -> None:
        """Take over the messages and the pauses of another queue of this lane.

        Args:
            before: The other queue.
            waiting: The messages that are not in flight.
            running: The messages in flight, and replaced messages that still are.
            now: The table's time, epoch ms.
        """
        del running, now  # only limits need them
        self.take_pauses(before)
        for entry in waiting:
            self.add(entry)

    def take_pauses(self, before: LaneQueue) -> None:
        """Take over the number of messages and the pauses of another queue of this lane."""
        self.messages, self.is_held = before.messages, before.is_held
        self.held, self.blocked = before.held, before.blocked

    def add(self, entry: Entry) -> None:
        """Add an entry to the lane, at the entry's place."""
        entry.state = IN_LANE
        self._waiting.push(entry.place_ms, entry)

    def sweep(self) -> None:
        """Remove the entries that are not in the lane now. Call this before such an entry is added again."""
        self._waiting.sweep()

    def first(self) -> Entry | None:
        """Return the first message that can be claimed. Park messages of paused or blocked addresses on the way."""
        if self.is_held:
            return None
        if not (self.held or self.blocked):
            return self._waiting.first()
        while (entry := self._waiting.first()) is not None and self.parks(entry):
            self._waiting.pop()
            self.park(entry)
        return entry

    def park(self, entry: Entry) -> None:
        """Keep apart an entry that was taken out of the lane, until its address is free again."""
        entry.state = PARKED
        self._parked.setdefault(entry.record.envelope.address, {})[entry.sequence] = entry

    def first_due(self, now: int) -> Entry | None:
        """Return the first message that can be claimed now."""
        entry = self.first()
        return entry if entry is not None and entry.place_ms <= now else None

    def next_ms(self, now: int) -> int | None:
        """Return when a message can be claimed next; a time that has passed = now; None = the lane waits for a call."""
        first = self.first()
        return None if first is None else first.place_ms

    def oldest_ms(self) -> int | None:
        """Return the first place of the messages that are not paused; None if there is none."""
        waiting = [entry.place_ms for address in self.blocked for entry in self.parked(address)]
        waiting += [] if (first := self.first()) is None else [first.place_ms]
        return min(waiting, default=None)

    def take_first(self) -> None:
        """Remove the entry that `first` or `first_due` has just returned, for a claim."""
        self._waiting.pop()

    def step_over_first(self) -> None:
        """Remove the entry that `first_due` has just returned. The claim does not take it, and adds it again."""
        self._waiting.pop()

    def unpark(self, entry: Entry) -> None:
        """Remove a parked entry that will not return to the lane."""
        del self._parked[entry.record.envelope.address][entry.sequence]

    def is_paused(self, entry: Entry) -> bool:
        """Return whether the entry's lane or address is paused."""
        return self.is_held or entry.record.envelope.address in self.held

    def release(self, address: str) -> None:
        """Put the messages of a resumed address back into the lane, in their old order."""
        self.held.discard(address)
        self._put_back(address)

    def block(self, addresses: AbstractSet[str]) -> None:
        """Set the blocked addresses. Their messages wait like paused messages, but they may become late."""
        freed, self.blocked = self.blocked - addresses, set(addresses)
        for address in freed:
            self._put_back(address)

    def parked(self, address: str) -> Collection[Entry]:
        """Return the messages that are parked for an address."""
        return self._parked.get(address, {}).values()

    def foremost(self) -> Iterable[Entry]:
        """Return the first message of the lane and all parked messages, also while the lane is paused."""
        first = self._waiting.first()
        return chain(() if first is None else (first,), *(parked.values() for parked in self._parked.values()))

    def parks(self, entry: Entry) -> bool:
        """Return whether the entry must be parked because its address is paused or blocked."""
        if not (self.held or self.blocked):
            return False
        address = entry.record.envelope.address
        return address in self.held or address in self.blocked

    def _put_back(self, address: str) -> None:
        for entry in self._parked.pop(address, {}).values():
            self.add(entry)


class ExpiringDict(Generic[K, V]):
    """A dict whose values expire."""

    def __init__(self) -> None:
        self._values: dict[K, tuple[int, V]] = {}  # oldest first

    def add(self, key: K, value: V, *, until_ms: int) -> None:
        """Keep a value until a time. The value replaces an earlier value of the key."""
        self._values.pop(key, None)
        self._values[key] = (until_ms, value)

    def get(self, key: K, now_ms: int) -> V | None:
        """Return the value of a key; None if the dict has no value for the key, or the value has expired."""
        found = self._values.get(key)
        return found[1] if found is not None and found[0] > now_ms else None

    @property
    def is_any(self) -> bool:
        """Whether the dict holds any value. An expired value counts until it is dropped."""
        return bool(self._values)

    def items(self, now_ms: int) -> Iterator[tuple[K, V, int]]:
        """Return (key, value, time of expiry) for all values that have not expired."""
        return ((key, value, until_ms) for key, (until_ms, value) in self._values.items() if until_ms > now_ms)

    def forget(self, now_ms: int, limit: int) -> None:
        """Drop at most `limit` expired values, oldest first."""
        over = takewhile(lambda item: item[1][0] <= now_ms, self._values.items())
        for key in [key for key, _ in islice(over, limit)]:
            del self._values[key]
