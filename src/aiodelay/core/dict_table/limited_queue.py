"""`LimitedQueue`: the messages of a lane that has limits, with a queue for each key.

A key that may begin a message has a *ticket* for its first message. Tickets are ordered by the time since which the
key waits: the place of its first message, or the time at which the key was served last, whichever is later. So the keys
take turns. A key whose messages in flight have reached their limit has no ticket. It gets one when a message in flight
ends.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count

from aiodelay.core import limits as rules
from aiodelay.core.limits import Use
from aiodelay.core.values import Lane, LaneLimits, LimitedKey

from .entries import IN_LANE, Entry, EntryHeap, LaneQueue

__all__ = ["LimitedQueue"]

_SWEEP_AT = 1024


class _Key:
    """A key of the lane, with its waiting messages."""

    __slots__ = ("name", "served_ms", "ticket", "ticket_ms", "use", "waiting")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.waiting = EntryHeap(IN_LANE)
        self.use = Use()
        self.served_ms = self.ticket_ms = self.ticket = 0


class LimitedQueue(LaneQueue):
    """Gives out the messages of a lane within its limits, so that the keys take turns.

    Args:
        lane: The lane.
        limits: Its limits.
    """

    def __init__(self, lane: Lane, limits: LaneLimits) -> None:
        super().__init__()
        self.limits: LaneLimits = limits
        self._lane = lane
        self._keys: dict[bytes, _Key] = {}
        self._sweep_at = _SWEEP_AT
        self._tickets: list[tuple[int, int, _Key]] = []
        self._numbers = count(1)
        self._use = Use()
        self._now = 0

    def begin_with(self, before: LaneQueue, waiting: Iterable[Entry], running: Iterable[Entry], now: int) -> None:
        """Take over the messages and the pauses of another queue of this lane."""
        self._now = now
        self.take_pauses(before)
        if isinstance(before, LimitedQueue):
            self._use, uses = before.uses()
            for name, use in uses.items():
                self._key_named(name).use = use
        for entry in running:
            key = self._key_of(entry)
            key.use, self._use = _changed(key.use, 1), _changed(self._use, 1)
        for entry in waiting:
            self.add(entry)

    def uses(self) -> tuple[Use, dict[bytes, Use]]:
        """Return the beginnings that the rates of the lane and of its keys have counted, without messages in flight."""
        return Use(0, self._use.marks), {name: Use(0, key.use.marks) for name, key in self._keys.items()}

    # --- the queue ----------------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        entry.state = IN_LANE
        key = self._key_of(entry)
        key.waiting.push(entry.place_ms, entry)
        self._give_ticket(key)

    def first_due(self, now: int) -> Entry | None:
        if now < self._now:
            self._forget_later_turns(now)
        self._now = now
        if self.is_held or rules.room(self.limits.whole, self._use, now) == 0:
            return None
        while (ticket := self._first_ticket()) is not None and ticket[0] <= now:
            key = ticket[2]
            entry = key.waiting.first()
            is_stale = entry is None or entry.place_ms > ticket[0]  # An earlier message has left the queue.
            if entry is not None and not is_stale:
                if self.parks(entry):
                    key.waiting.pop()
                    self.park(entry)
                elif rules.room(self.limits.each, key.use, now) != 0:
                    return entry
            heapq.heappop(self._tickets)
            key.ticket = 0
            self._give_ticket(key)
        return None

    def _forget_later_turns(self, now: int) -> None:
        """Give all keys new tickets, because the clock has stepped back: no key waits for a time that had passed."""
        self._now = now
        for key in self._keys.values():
            key.served_ms, key.ticket = min(key.served_ms, now), 0
            self._give_ticket(key)

    def next_ms(self, now: int) -> int | None:
        entry = self.first_due(now)
        if entry is not None:
            return entry.place_ms
        if self.is_held:
            return None
        if rules.room(self.limits.whole, self._use, now) == 0:
            return rules.next_ms(self.limits.whole, self._use, now)
        ticket = self._first_ticket()
        return None if ticket is None else ticket[0]

    def oldest_ms(self) -> int | None:
        found = (entry.place_ms for key in self._keys.values() if (entry := key.waiting.first()) is not None)
        return None if self.is_held else min(found, default=None)

    def take_first(self) -> None:
        key = self._take()
        key.use = rules.began(self.limits.each, key.use, 1, self._now)
        self._use = rules.began(self.limits.whole, self._use, 1, self._now)
        self._give_ticket(key)

    def step_over_first(self) -> None:
        self._give_ticket(self._take())

    def _take(self) -> _Key:
        key = heapq.heappop(self._tickets)[2]
        key.ticket, key.served_ms = 0, self._now
        key.waiting.pop()
        return key

    def ended(self, entry: Entry) -> bool:
        """Note that a claim on an entry has ended. Return whether another message can be claimed because of that."""
        key = self._key_of(entry)
        key.use, self._use = _changed(key.use, -1), _changed(self._use, -1)
        self._give_ticket(key)
        self._sweep_keys()
        return self._first_ticket() is not None

    # --- keys and tickets ---------------------------------------------------------------------------------

    def _key_of(self, entry: Entry) -> _Key:
        return self._key_named(b"" if self.limits.each is None else self.limits.key_of(entry.record.envelope))

    def _key_named(self, name: bytes) -> _Key:
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = _Key(name)
        return key

    def _give_ticket(self, key: _Key) -> None:
        """Give the key a ticket for its first message, unless the key has one that is not later."""
        entry, each = key.waiting.first(), self.limits.each
        if entry is None or rules.why_full(each, key.use, self._now) == "concurrency":
            return
        at_ms = max(entry.place_ms, key.served_ms, rules.next_ms(each, key.use, self._now) or 0)
        if not key.ticket or at_ms < key.ticket_ms:
            key.ticket, key.ticket_ms = next(self._numbers), at_ms
            heapq.heappush(self._tickets, (at_ms, key.ticket, key))

    def _first_ticket(self) -> tuple[int, int, _Key] | None:
        while self._tickets and self._tickets[0][1] != self._tickets[0][2].ticket:
            heapq.heappop(self._tickets)
        return self._tickets[0] if self._tickets else None

    def _sweep_keys(self) -> None:
        """Forget keys that have no messages and whose rates count nothing, when there are many keys."""
        if len(self._keys) > self._sweep_at:
            self._keys = {name: key for name, key in self._keys.items() if self._is_used(key)}
            self._sweep_at = max(_SWEEP_AT, 2 * len(self._keys))

    def _is_used(self, key: _Key) -> bool:
        if key.use.running or key.waiting.first() is not None:
            return True
        return bool(rules.counted(self.limits.each, key.use.marks, self._now))

    # --- for operators ------------------------------------------------------------------------------------

    def limited_keys(self, waiting: Iterable[Entry], now: int) -> Iterator[LimitedKey]:
        """Return the keys that have messages in flight, or due messages among the waiting messages of the lane."""
        due = Counter(self._key_of(entry).name for entry in waiting if entry.place_ms <= now)
        for key in self._keys.values():
            number = due[key.name]
            if number or key.use.running:
                first = key.waiting.first() if number else None
                since_ms = None if first is None else first.place_ms
                name = None if self.limits.each is None else key.name
                why, until_ms = rules.why_waiting(self.limits, self._use, key.use, now) if number else ("", None)
                yield LimitedKey(self._lane, name, key.use.running, number, why, until_ms, since_ms)


def _changed(use: Use, by: int) -> Use:
    return Use(use.running + by, use.marks)
