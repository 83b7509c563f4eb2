"""`FarMessages`: makes near messages far, and finds the far messages that must come near.

A near message is in the table as a whole. A far message is due beyond the horizon, and the index keeps little more than
the offset of its record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.records import Read
from aiodelay.core.dict_table.entries import IN_LANE, Entry
from aiodelay.core.dict_table.inspection import DictInspection
from aiodelay.core.transitions import occurrence_of
from aiodelay.core.values import Lane, LaneCounts, Query, Snapshot
from aiodelay.errors import RecordFormatError
from aiodelay.ports.clock import Clock

from .changes import ChangeLog

__all__ = ["FarMessages"]

EVERYTHING = Query(limit=1000)


class FarMessages:
    """The border between near messages, in the table, and far messages, in `ReadState.far`.

    Args:
        changes: The changes under way. Their messages stay near.
        inspection: Inspects the table.
        clock: The clock of the store.
    """

    def __init__(self, changes: ChangeLog, inspection: DictInspection, clock: Clock) -> None:
        self._state, self._table, self._changes = changes.state, changes.table, changes
        self._inspection, self._clock = inspection, clock

    def look_ahead(self, until_ms: int) -> None:
        """Set the horizon: messages that are due up to this time are near from now on."""
        state = self._state
        state.edge_ms = min(state.edge_ms, until_ms) if state.far else until_ms
        state.near_until_ms = until_ms

    def put_off(self) -> None:
        """Turn near messages that are due beyond the horizon into far messages."""
        self._state.raised &= self._table.entries.keys()
        for entry in list(self._table.entries.values()):
            if self._may_be_far(entry):
                self._note(entry)

    def _may_be_far(self, entry: Entry) -> bool:
        record, key = entry.record, records.key_of(entry.record.id)
        standing = self._state.standings.get(key)
        return (
            entry.state is IN_LANE
            and entry.place_ms > self._state.near_until_ms
            and record.envelope.rule is None
            and occurrence_of(record.id) is None
            and record.id not in self._state.raised
            and key not in self._changes.held_back
            and standing is not None
            and standing.hidden_at is None
        )

    def _note(self, entry: Entry) -> None:
        key = records.key_of(entry.record.id)
        seen, lane = self._state.standings.pop(key).seen, entry.record.envelope.lane
        self._state.far.put(key, entry.place_ms, seen.offset, lane, is_users=seen.read_to is None)
        self._table.remove(entry)

    def peek(self, read: Sequence[Read], query: Query = EVERYTHING) -> list[Snapshot]:
        """Return the far messages that a query asks for, among records that were read from the partition again."""
        found = []
        for each in read:
            assert each.key is not None
            assert each.value is not None
            row = self._state.far.find(each.key)
            if row is None or row.offset != each.offset:
                continue
            glance = records.glance(each.key, each.value, each.headers)
            try:
                record = records.decode(each.key, each.value, each.headers, written_ms=each.timestamp)
            except RecordFormatError:
                continue  # once the message is near, the owner makes a dead letter of it
            found.append(self._inspection.snapshot(Entry(record, glance.place_ms, 0), self._clock.now_ms()))
        return [each for each in found if _is_in(each, query)]

    def with_far(self, counted: Mapping[Lane, LaneCounts]) -> Mapping[Lane, LaneCounts]:
        """Add the far messages to the counts of near messages."""
        now, found = self._clock.now_ms(), dict(counted)
        for lane, n in self._state.far.by_lane.items():
            if n:
                here = found.get(lane) or LaneCounts(read_by_nobody=not self._table.workers.serve(lane, now))
                is_held = self._table.lanes[lane].is_held
                found[lane] = (
                    replace(here, held=here.held + n) if is_held else replace(here, scheduled=here.scheduled + n)
                )
        return found

    def has(self, message_id: str) -> bool:
        """Say whether a message is far."""
        return self._state.far.find(records.key_of(message_id)) is not None

    def wanted(self) -> list[str]:
        """Return the ids of far messages that must come near: to be written again, or because of a user's request."""
        state = self._state
        return [records.id_of(key) for key in (*state.hidden, *state.asked) if state.far.find(key) is not None]


def _is_in(found: Snapshot, query: Query) -> bool:
    place_ms = found.next_attempt_ms
    return (
        place_ms >= (query.from_ms or 0)
        and (query.to_ms is None or place_ms < query.to_ms)
        and (query.after is None or (place_ms, found.record.id) > query.after)
    )
