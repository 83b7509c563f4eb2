"""Which offset of a partition may be committed: a function of what was read and what has ended."""

from __future__ import annotations

from collections import deque

__all__ = ["Offsets"]


class Offsets:
    """What was read of a partition and has not ended, in order.

    Args:
        start: Where reading begins.
    """

    read_to: int
    """Everything below this offset has been read."""

    def __init__(self, start: int) -> None:
        self.read_to = start
        self._open: deque[int] = deque()
        self._ended: set[int] = set()

    def __len__(self) -> int:
        """Return how many records were read from the first one on that has not ended."""
        return len(self._open)

    @property
    def ended_to(self) -> int:
        """Everything below this offset has ended: it may be committed."""
        return self._open[0] if self._open else self.read_to

    def read(self, offset: int) -> None:
        """Take note of the next record."""
        self._open.append(offset)
        self.read_to = offset + 1

    def end(self, offset: int) -> None:
        """Take note that a record has ended, once."""
        self._ended.add(offset)
        while self._open and self._open[0] in self._ended:
            self._ended.remove(self._open.popleft())
