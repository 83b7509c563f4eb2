"""`UnreadChanges`: the committed changes that this process has not read back. `ChangeWriter` adds them.

A change counts only when the index has read past its records, because a user's record may come before these records.
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
"""The index takes in a transaction of this many changes or more without reading it back.

Smaller transactions are read back, because the reader would have to drop the records that it has fetched already.
"""


class UnreadChanges:
    """Keeps the unread changes of one partition.

    Args:
        progress: The partition's index.
        ownership: Tells the session how far the index has read.
        to_write: Wakes the writer.
        skip: Called with the offset from which the reader must go on.
        on_change: Called when workers may find new messages to claim.
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
        self._tell()  # the reader may have read the records before this call

    def _take_in(self, changes: Sequence[Change]) -> None:
        """Take in many changes without reading them, unless another writer's record comes before them.

        Between two transactions of one producer there is one offset: the marker that ends the first transaction.
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
        """Remove the changes that the index has read by now, and wake the tasks that wait for them."""
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
        """Return the first offset at which there may be other writers' records that the index has not read.

        Args:
            own: The offsets of a transaction's records in this partition, in order.
        """
        read_to = self._progress.index.state.read_to
        if own[0] - read_to <= (read_to == self.written_to) and own[-1] - own[0] < len(own):
            return own[-1] + 1  # only the end marker of the last transaction is still unread
        return read_to

    async def until_none(self) -> None:
        """Return when the index has read all changes back."""
        while self._changes:
            self._progress.was_read.clear()
            await self._progress.was_read.wait()

    def clear(self) -> None:
        """Forget the changes. The next session reads all committed records."""
        self._changes.clear()
