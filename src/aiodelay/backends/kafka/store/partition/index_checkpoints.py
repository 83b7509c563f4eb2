"""`IndexCheckpoints`: writes a partition's index to disk, so that the next owner reads only new records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from aiodelay.backends.kafka.pending.checkpoint import Witness, checkpoint_of
from aiodelay.backends.kafka.records import Read
from aiodelay.errors import StoreUnavailableError
from aiodelay.ports.clock import Clock

from .disk import Disk
from .read_progress import ReadProgress

__all__ = ["IndexCheckpoints"]

PAUSE_S, LONGEST_PAUSE_S = 10.0, 60.0
"""Pause between two checkpoints: the short one if records were read since the last checkpoint, else the long one."""
MOST_SHARE = 0.01
"""Largest share of the time that writing checkpoints may take."""


class IndexCheckpoints:
    """Writes and restores the checkpoints of one partition.

    Args:
        progress: The partition's index.
        disk: Keeps the index on disk; None = the index is in memory only.
        clock: The clock of the store.
        on_open: Called when the partition knows where reading begins.
    """

    is_open: bool

    def __init__(self, progress: ReadProgress, disk: Disk | None, clock: Clock, on_open: Callable[[], None]) -> None:
        self._progress, self._disk, self._clock, self._on_open = progress, disk, clock, on_open
        self.is_open = disk is None
        """Whether reading may begin: the index was restored from its file, or it has no file."""
        self._last: Read | None = None
        self._witness: Witness | None = None
        self._written_to, self._written_s, self._took_s = 0, 0.0, 0.0

    def note_read(self, last: Read) -> None:
        """Note the last record that the index has read."""
        self._last = last

    def forget_read(self) -> None:
        """Forget the last record, because an empty index has replaced the index that had read the record."""
        self._last = self._witness = None

    async def restore(self) -> None:
        """Restore the index from disk, if the file is fresh enough. Only the first call does anything."""
        if self._disk is None or self.is_open:
            return
        index, checkpoint = await self._disk.restore(self._progress.index)
        self._progress.index, self.is_open = index, True
        if checkpoint is not None:
            self._witness = checkpoint.witness
            age_s = (self._clock.now_ms() - checkpoint.whole_ms) / 1000
            self._progress.whole_s = asyncio.get_running_loop().time() - age_s
        self._on_open()

    def keep(self, now_s: float) -> None:
        """Write a checkpoint if it is time for one."""
        is_new = self._progress.index.state.read_to > self._written_to
        pause_s = max(PAUSE_S if is_new else LONGEST_PAUSE_S, self._took_s / MOST_SHARE)
        if now_s >= self._written_s + pause_s:
            self.write()
            self._written_s = now_s
            self._took_s = asyncio.get_running_loop().time() - now_s

    def write(self) -> None:
        """Write a checkpoint now, if the index is kept on disk and has read anything."""
        index, whole_s = self._progress.index, self._progress.whole_s
        if not index.state.far.is_in_file or index.state.far.problem or not self.is_open or whole_s is None:
            return
        if (last := self._last) is not None:
            self._witness = Witness.of(last.offset, last.timestamp, last.key, last.value)
        if self._witness is None:
            return
        now, whole_age_s = self._clock.now_ms(), asyncio.get_running_loop().time() - whole_s
        checkpoint = checkpoint_of(
            index.state,
            index.table,
            index.placement,
            witness=self._witness,
            now=now,
            whole_ms=now - int(whole_age_s * 1000),
        )
        self._written_to = index.state.read_to
        with suppress(StoreUnavailableError):  # `Partition.read_at` finds and logs the file's problem
            index.state.far.commit(msgspec.msgpack.encode(checkpoint))
