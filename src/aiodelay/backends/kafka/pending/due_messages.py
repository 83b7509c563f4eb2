"""`DueMessages`: decides the moves of due messages into topics, each in one transaction with the message's end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client import Outgoing
from aiodelay.core.dict_table.claims import DictClaiming
from aiodelay.core.dict_table.entries import IN_LANE, Entry
from aiodelay.core.rules import Rules
from aiodelay.core.values import MAX_CLAIM_MESSAGES, Demand, Lane, Record, Settlement

from .changes import Change, ChangeLog
from .paced_lanes import PacedLanes

__all__ = ["Due", "DueMessages"]


class Due(NamedTuple):
    """The due messages of a lane.

    Attributes:
        entries: The messages to move, by key.
        size: The bytes of these messages.
        series: Recurring messages. The caller must settle these itself.
        unknown: Addresses that are not known to take messages.
    """

    entries: list[tuple[bytes, Entry]]
    size: int
    series: list[Record]
    unknown: set[str]


class DueMessages:
    """Decides the moves of one partition.

    Args:
        rules: Decides how messages end.
        changes: Takes the moves, and has the table of messages.
        lanes: Gives the due messages of a lane in order.
        claiming: Makes messages of lapsed claims claimable again.
    """

    def __init__(self, rules: Rules[Entry], changes: ChangeLog, lanes: PacedLanes, claiming: DictClaiming) -> None:
        self._rules, self._changes, self._lanes, self._claiming = rules, changes, lanes, claiming
        self._table, self._state = changes.table, changes.state

    def take(self, lane: Lane, demand: Demand, known: Container[str], now: int) -> Due:
        """Take the due messages of a lane that can be moved. The caller must then decide their moves.

        Args:
            lane: The lane of a sink.
            demand: Most messages and bytes.
            known: Addresses that are known to take messages. Messages for other addresses stay.
            now: Epoch ms.
        """
        queue = self._table.lanes[lane]
        self._claiming.return_lapsed(now, MAX_CLAIM_MESSAGES)
        lanes, taken = (lane,), 0
        entries, aside = list[tuple[bytes, Entry]](), list[Entry]()
        series, unknown = list[Record](), set[str]()
        while len(entries) + len(aside) < demand.messages and (entry := self._lanes.first_due(lanes, now)) is not None:
            record, envelope = entry.record, entry.record.envelope
            size = envelope.size
            if entries and taken + size > demand.max_bytes:
                break
            queue.take_first()
            key = records.key_of(envelope.id)
            if key in self._changes.held_back:
                aside.append(entry)  # an earlier change of this id has not been read back yet
            elif envelope.address not in known:
                unknown.add(envelope.address)
                aside.append(entry)
            elif envelope.rule is not None:
                series.append(record)
                aside.append(entry)
            else:
                entries.append((key, entry))
                taken += size
        for entry in aside:
            queue.add(entry)
        return Due(entries, taken, series, unknown)

    def move(self, key: bytes, entry: Entry, target: Outgoing, now: int) -> Change:
        """Decide the move of a message that `take` has just returned. The move ends the message."""
        log = self._changes
        change = Change(key, self._state.read_to, entry, outcome="delivered", targets=(target,))
        outer, log.current = log.current, change  # as `deciding` does, which takes as long as the rules of a move
        try:
            log.reserve(entry)
            if log.keeps_history:
                self._rules.table.note(change.outcome, entry.record, now)
            self._rules.end(entry, now)
        finally:
            log.current = outer
        log.hold_back(change)
        return change

    def series_at(self, settlement: Settlement) -> Entry | None:
        """Return the series whose occurrence a settlement ends, or None if it has changed, is not due, or is held."""
        entry = self._table.find(settlement.id)
        if entry is None or entry.state is not IN_LANE or entry.record.envelope.rule is None:
            return None
        record, queue = entry.record, self._table.lanes[entry.record.envelope.lane]
        is_same = (record.revision, record.due_ms) == (settlement.revision, settlement.token)
        return entry if is_same and not queue.is_paused(entry) and not queue.parks(entry) else None

    def next_due_ms(self, lane: Lane, now: int) -> int | None:
        """Return the next time at which a message of a lane may be moved."""
        return self._claiming.next_due_ms({lane: Demand(1)}, now)

    def block(self, lane: Lane, addresses: AbstractSet[str]) -> None:
        """Set the addresses of a lane that take nothing now."""
        self._table.lanes[lane].block(addresses)

    def blocked(self) -> Counter[tuple[Lane, str]]:
        """Count the messages for addresses that take nothing now."""
        found: Counter[tuple[Lane, str]] = Counter()
        for name, lane in self._table.lanes.items():
            if lane.blocked:
                lane.first()  # parks the messages for blocked addresses that were added since the last call
                found.update({(name, address): len(lane.parked(address)) for address in lane.blocked})
        return +found
