"""`pending_messages`: lists the pending messages of a partition's index, for a scan that owns no partition."""

from __future__ import annotations

from collections.abc import Iterator

from aiodelay.backends.kafka import records
from aiodelay.core.dict_table.entries import Entry
from aiodelay.core.transitions import record_of
from aiodelay.core.values import Cancel, Put, PutBack, Snapshot

from .pending_index import PendingIndex
from .salvage import salvaged

__all__ = ["pending_messages"]


def pending_messages(index: PendingIndex, now: int) -> Iterator[Snapshot]:
    """Yield the pending messages of an index, decoded and in no order.

    A record that cannot be decoded is included, as the message that its dead letter will have. A message that had ended
    and has come back is left out, because its owner makes a dead letter of it.

    Args:
        index: The index, after it has read the partition as far as the scan wants.
        now: Epoch ms.
    """
    state = index.state
    for entry in index.table.entries.values():
        standing = state.standings.get(records.key_of(entry.record.id))
        if standing is None or not state.mark.covers(standing.seen.offset, entry.place_ms):
            yield index.inspection.snapshot(entry, now)
    for read, problem in state.bad.values():
        record = salvaged(read, f"cannot be read: {problem}")
        yield index.inspection.snapshot(Entry(record, record.due_ms, 0), now)
    for key, requests in state.asked.items():
        puts = (each.what for each in requests if not each.is_over and not isinstance(each.what, Cancel))
        if index.table.find(records.id_of(key)) is None and (put := next(puts, None)) is not None:
            yield index.inspection.snapshot(_as_asked(put), now)


def _as_asked(put: Put | PutBack) -> Entry:
    """Return the entry that a user's request to the owner would make."""
    if isinstance(put, PutBack):
        return Entry(put.record, put.due_ms, 0)
    due_ms = put.due.ms
    return Entry(record_of(put, due_ms, 0), due_ms, 0)
