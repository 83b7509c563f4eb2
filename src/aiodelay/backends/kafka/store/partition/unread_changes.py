"""`UnreadChanges`: committed changes that this process has not read back yet. The writer adds them, reading ends them.

A change counts once the index has read past its records: a user may have written in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from aiodelay.backends.kafka.pending.changes import Change
from aiodelay.core.wakeup import WakeUp

from .ownership import Ownership
from .read_progress import ReadProgress

__all__ = ["UnreadChanges"]

MANY_OWN = 100
"""From so many changes on the index takes them in without reading them: the reader drops what it has fetched."""


class UnreadChanges:
    """The unread changes of one partition.

    Args:
        progress: The partition's index.
        ownership: Tells the session how far the index has read.
        to_write: Wakes the writer.
        skip: Called with the offset at which the reader goes on.
        on_change: Called when workers may find something new to claim.
    """

    written_to: int

    def __init__(
        self,
        progress: ReadProgress,
        ownership: Ownership,
        to_write: WakeUp,
        *,
        skip: Callable[[int], None],
        on_change: Callable[[], None],
    ) -> None:
        self._progress, self._ownership, self._to_write = progress, ownership, to_write
        self._skip, self._on_change = skip, on_change
        self._changes: deque[Change] = deque()
        self.written_to = -1
        """The offset after the last record that this owner has committed."""

    def add(self, changes: Sequence[Change]) -> None:
        """Add changes that were just committed, in their order."""
        self._changes += changes
        self._take_in(changes)
        self._tell()  # the reader may have been faster

    def _take_in(self, changes: Sequence[Change]) -> None:
        """Take in many changes without reading them, unless another record comes before.

        One offset between two transactions of one producer is the marker that ends the first.
        """
        index, before = self._progress.index, self._progress.index.state.read_to
        if len(changes) >= MANY_OWN:
            if index.state.read_to == self.written_to == changes[0].offset - 1:
                index.state.read_to += 1
            index.reader.read_own(changes)
        if changes:
            self.written_to = changes[-1].offset + 1
        if index.state.read_to > before:
            self._skip(index.state.read_to)
            self.has_read()
            self._on_change()

    def has_read(self) -> None:
        """Let go of the changes that the index has read by now, and wake the tasks that wait for them."""
        index = self._progress.index
        self._ownership.has_read()
        self._tell()
        self._progress.tell_read()
        if index.repairs.are_needed or index.state.has_ended:
            self._to_write.set()

    def _tell(self) -> None:
        index = self._progress.index
        while self._changes and self._changes[0].offset < index.state.read_to:
            change = self._changes.popleft()
            index.log.written(change)
            change.tell(written=True)

    def others_from(self, own: Sequence[int]) -> int:
        """Return the offset from which on other writers' records may stand that the index has not read.

        Args:
            own: The offsets of a transaction's records in this partition, in order.
        """
        read_to = self._progress.index.state.read_to
        if own[0] - read_to <= (read_to == self.written_to) and own[-1] - own[0] < len(own):
            return own[-1] + 1  # only the marker of the last transaction is not read
        return read_to

    async def until_none(self) -> None:
        """Return when the index has read all changes back."""
        while self._changes:
            self._progress.was_read.clear()
            await self._progress.was_read.wait()

    def clear(self) -> None:
        """Forget the changes: the next session reads what was committed."""
        self._changes.clear()
