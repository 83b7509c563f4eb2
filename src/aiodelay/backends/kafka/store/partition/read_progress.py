"""`ReadProgress`: a partition's index, how far it has read, and when reading last reached the partition's end."""

from __future__ import annotations

import asyncio

from aiodelay.backends.kafka.pending.pending_index import PendingIndex
from aiodelay.core.wakeup import WakeUp

__all__ = ["ReadProgress"]


class ReadProgress:
    """The index of a partition. All parts of the partition get the index from here: another index may replace it.

    Args:
        index: The first index, which has read nothing.
        patience_s: If reading does not reach the partition's end for this long, unread tombstones may be gone.
    """

    was_read: WakeUp
    index: PendingIndex

    def __init__(self, index: PendingIndex, *, patience_s: float) -> None:
        self.index = index
        self.whole_s: float | None = None
        """The time at which reading last reached the end of the partition, in the event loop; None = never."""
        self.was_read = WakeUp()
        """Wakes the one task of the partition that waits for reading."""
        self._patience_s = patience_s
        self._has_read = asyncio.Event()
        self._is_over = False

    def tell_read(self) -> None:
        """Wake all tasks that wait for the partition to be read."""
        self.was_read.set()
        self._has_read.set()
        self._has_read = asyncio.Event()

    async def until_read(self, offset: int) -> None:
        """Wait until the index has read the record at an offset, or until this process gives the partition up."""
        while self.index.state.read_to <= offset and not self._is_over:
            await self._has_read.wait()

    def end(self) -> None:
        """Release all waiting tasks: this process no longer reads the partition."""
        self._is_over = True
        self.tell_read()

    def goes_on(self, now_s: float, *, is_whole: bool) -> bool:
        """Note whether reading has reached the end. Say whether it was there recently enough to go on from here."""
        if self.whole_s is not None and now_s - self.whole_s > self._patience_s:
            return False
        if is_whole or self.whole_s is None:
            self.whole_s = now_s
        return True

    def begin_again(self, now_s: float) -> None:
        """Replace the index with an empty one."""
        self.whole_s = now_s
        self.index = self.index.emptied(self.index.state.far.emptied())
