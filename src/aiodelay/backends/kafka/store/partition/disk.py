"""`Disk`: restores a partition's index from its file, if the file may still be used."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec
from aiokafka.errors import KafkaError

from aiodelay.backends.kafka.client import UNAVAILABLE, log_failure, reason_of
from aiodelay.backends.kafka.pending.checkpoint import Checkpoint, Witness
from aiodelay.backends.kafka.pending.far_index import open_far
from aiodelay.backends.kafka.pending.pending_index import PendingIndex
from aiodelay.backends.kafka.records import Read
from aiodelay.ports.clock import Clock

from .horizon import BATCH, Fetch

__all__ = ["Disk"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

PAUSE_S = 1.0


class Disk:
    """The file in which an index was left.

    Args:
        path: The file.
        fetch: Reads records of the partition by offset.
        clock: The clock of the store.
        max_age_ms: The greatest age of a file that may be used. After this time, tombstones may be gone, and Kafka may
            have removed records that this process had not read.
    """

    def __init__(self, path: str, fetch: Fetch, clock: Clock, *, max_age_ms: int) -> None:
        self._path, self._fetch, self._clock, self._max_age_ms = path, fetch, clock, max_age_ms

    async def restore(self, index: PendingIndex) -> tuple[PendingIndex, Checkpoint | None]:
        """Return the index and its checkpoint from the file.

        If the file cannot be used, return an empty index, in a new file or in memory, and None.
        """
        far, state = await asyncio.to_thread(open_far, self._path)
        try:
            if not state:
                return index.emptied(far), None
            checkpoint, problem = await self._checked(state)
            if checkpoint is not None:
                found = index.emptied(far)
                await self._take_up(found, checkpoint)
                return found, checkpoint
        except Exception as error:  # noqa: BLE001 - after any failure, the partition itself can still be read
            problem = reason_of(error)
        except BaseException:
            far.close()
            raise
        log.error("%s: the index on disk is not used: %s; the partition is read from its start", index.name, problem)
        return index.emptied(far.emptied()), None

    async def _checked(self, state: bytes) -> tuple[Checkpoint | None, str]:
        """Return the checkpoint if it may be used. Otherwise return None and the reason."""
        try:
            checkpoint = msgspec.msgpack.decode(state, type=Checkpoint)
        except msgspec.DecodeError as error:
            return None, str(error)
        age_ms = self._clock.now_ms() - checkpoint.whole_ms
        if not 0 <= age_ms <= self._max_age_ms:
            limit = f"at most {self._max_age_ms / 1000:.0f} s, the smaller of min.compaction.lag.ms and half of "
            return None, f"it is {age_ms / 1000:.0f} s old; allowed: {limit}delete.retention.ms"
        found = [Witness.of(*each[:4]) for each in await self._fetched([checkpoint.witness.offset])]
        if found != [checkpoint.witness]:
            return None, f"offset {checkpoint.witness.offset} has another record now"
        return checkpoint, ""

    async def _take_up(self, index: PendingIndex, checkpoint: Checkpoint) -> None:
        index.reader.begin(checkpoint)
        for i in range(0, len(checkpoint.offsets), BATCH):
            for read in await self._fetched(checkpoint.offsets[i : i + BATCH]):
                index.reader.read(read)
            await asyncio.sleep(0)
        index.reader.go_on()

    async def _fetched(self, offsets: Sequence[int]) -> list[Read]:
        while True:
            try:
                return await self._fetch(offsets)
            except (KafkaError, TimeoutError, OSError) as error:
                log_failure(
                    log,
                    f"{self._path}: the records to which this index points cannot be read",
                    reason_of(error, "Read"),
                    error,
                    UNAVAILABLE,
                )
            await asyncio.sleep(PAUSE_S)
