"""`Offsets`: decides which offset of a partition may be committed, from the records that were read and have ended."""

from __future__ import annotations

from collections import deque

__all__ = ["Offsets"]


class Offsets:
    """The records of a partition that were read and have not ended, in order.

    Args:
        start: The offset at which reading begins.
    """

    read_to: int
    """Everything below this offset has been read."""

    def __init__(self, start: int) -> None:
        self.read_to = start
        self._open: deque[int] = deque()
        self._ended: set[int] = set()

    def __len__(self) -> int:
        """Return the number of records from the first record that has not ended to the last one that was read."""
        return len(self._open)

    @property
    def ended_to(self) -> int:
        """The offset below which all records have ended. It may be committed."""
        return self._open[0] if self._open else self.read_to

    def read(self, offset: int) -> None:
        """Note that the next record was read."""
        self._open.append(offset)
        self.read_to = offset + 1

    def end(self, offset: int) -> None:
        """Note that a record has ended. Call this once for each record."""
        self._ended.add(offset)
        while self._open and self._open[0] in self._ended:
            self._ended.remove(self._open.popleft())
