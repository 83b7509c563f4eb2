"""`Batch`: the records of one transaction, and the changes that they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aiodelay.backends.kafka.client import Outgoing
from aiodelay.backends.kafka.pending.changes import Change

__all__ = ["Batch"]


class Batch:
    """The records of one transaction: first the records of changes, then other records."""

    size: int

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.outgoing: list[Outgoing] = []
        self.size = 0
        """Bytes of the changes' values."""
        self._ends: list[int] = []

    def add(self, change: Change, outgoing: Sequence[Outgoing]) -> None:
        """Add a change with its records."""
        self.changes.append(change)
        self.outgoing += outgoing
        for each in outgoing:
            if each.value is not None:
                self.size += len(each.value)
        self._ends.append(len(self.outgoing))

    def add_others(self, outgoing: Iterable[Outgoing]) -> None:
        """Add records that belong to no change. After this, no change may be added."""
        self.outgoing += outgoing

    def note_offsets(self, offsets: Sequence[int]) -> None:
        """Store the offset of each change in the change. This must happen before the reader meets the records."""
        for change, end in zip(self.changes, self._ends, strict=True):
            change.offset = offsets[end - 1]

    def change_of_each_record(self) -> list[Change]:
        """Return the change of each record that has one, in the order of the records. The other records follow."""
        starts = [0, *self._ends]
        return [
            change
            for change, start, end in zip(self.changes, starts, self._ends, strict=False)
            for _ in range(start, end)
        ]
