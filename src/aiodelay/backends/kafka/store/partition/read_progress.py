"""`ReadProgress`: a partition's index, and how far and how lately this process has read the partition into it."""

from __future__ import annotations

import asyncio

from aiodelay.backends.kafka.pending.pending_index import PendingIndex
from aiodelay.core.wakeup import WakeUp

__all__ = ["ReadProgress"]


class ReadProgress:
    """The index of a partition. All parts of the partition find it here, since another index may take its place.

    Args:
        index: The first index, which has read nothing.
        patience_s: After so long without the end of the partition, tombstones may be gone that nobody has read.
    """

    was_read: WakeUp
    index: PendingIndex

    def __init__(self, index: PendingIndex, *, patience_s: float) -> None:
        self.index = index
        self.whole_s: float | None = None
        """When reading has last found the end of the partition, in the loop's time; None: never."""
        self.was_read = WakeUp()
        """For the partition's one task that waits for reading."""
        self._patience_s = patience_s
        self._has_read = asyncio.Event()
        self._is_over = False

    def tell_read(self) -> None:
        """Wake all that wait for the partition to be read."""
        self.was_read.set()
        self._has_read.set()
        self._has_read = asyncio.Event()

    async def until_read(self, offset: int) -> None:
        """Wait until the index has taken in the record at an offset, or the partition is another process's."""
        while self.index.state.read_to <= offset and not self._is_over:
            await self._has_read.wait()

    def end(self) -> None:
        """Release all that wait: this process reads the partition no longer."""
        self._is_over = True
        self.tell_read()

    def goes_on(self, now_s: float, *, is_whole: bool) -> bool:
        """Note whether a look has found the end; say whether the last end is recent enough to read on from here."""
        if self.whole_s is not None and now_s - self.whole_s > self._patience_s:
            return False
        if is_whole or self.whole_s is None:
            self.whole_s = now_s
        return True

    def begin_again(self, now_s: float) -> None:
        """Replace the index by one that has read nothing."""
        self.whole_s = now_s
        self.index = self.index.emptied(self.index.state.far.emptied())
