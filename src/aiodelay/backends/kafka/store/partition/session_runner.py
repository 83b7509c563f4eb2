"""`SessionRunner`: runs the sessions of a partition, one after the other. Each session begins with a barrier record."""

from __future__ import annotations

import asyncio
import logging

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client import (
    UNAVAILABLE,
    AbortedError,
    FencedError,
    InDoubtError,
    Outgoing,
    Transactions,
    log_failure,
    reason_of,
)
from aiodelay.core.backoff import pause_s
from aiodelay.errors import StoreMismatchError, StoreUnavailableError

from .change_writer import ChangeWriter
from .index_checkpoints import IndexCheckpoints
from .mismatches import cut_off, moved_keys
from .ownership import Ownership
from .read_progress import ReadProgress
from .settings import Callbacks, Place, Shared

__all__ = ["SessionRunner"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

FIRST_PAUSE_S = 0.02
STABLE_MS = 10_000
"""After a session that has lasted this long, the next session begins without a pause."""
_ENDS = (FencedError, AbortedError, InDoubtError, StoreUnavailableError, *UNAVAILABLE)


class SessionRunner:
    """Runs the sessions of one partition.

    Args:
        place: The partition.
        shared: The settings of all partitions of the store.
        callbacks: The functions that the partition calls.
        progress: The partition's index.
        ownership: The state that the sessions change.
        writer: Writes the changes of a session.
        checkpoints: Restores the first index from disk.
    """

    def __init__(
        self,
        place: Place,
        shared: Shared,
        callbacks: Callbacks,
        *,
        progress: ReadProgress,
        ownership: Ownership,
        writer: ChangeWriter,
        checkpoints: IndexCheckpoints,
    ) -> None:
        self._place, self._callbacks = place, callbacks
        self._cluster, self._clock, self._targets = shared.cluster, shared.clock, shared.targets
        self._clock_check = shared.clock_check
        self._progress, self._ownership, self._writer, self._checkpoints = progress, ownership, writer, checkpoints
        self._owned_s: float | None = asyncio.get_running_loop().time()  # None once the partition has served claims

    async def run(self) -> None:
        """Run sessions until cancelled, or until a `StoreMismatchError` stops the partition for good."""
        failures, is_fenced = 0, False
        await self._checkpoints.restore()
        while True:
            await self._callbacks.may_begin(is_fenced)
            started_ms = self._clock.monotonic_ms()
            try:
                await self._one_session()
            except StoreMismatchError as error:
                self._ownership.refuse(error)
                return
            except Exception as error:  # noqa: BLE001 - a loop that ends unnoticed would stop the partition for good
                is_fenced = isinstance(error, FencedError)
                why = "another owner has taken over, or may have taken over" if is_fenced else reason_of(error)
                self._ownership.why = why
                log_failure(log, f"{self._place.name}: the session ends", why, error, _ENDS)
                is_refusal = isinstance(error, AbortedError) and self._ownership.is_ready
            finally:
                self._end()
            # The growing pause keeps two owners from taking over from each other without end. A refused record alone
            # costs no pause.
            lasted_ms = self._clock.monotonic_ms() - started_ms
            failures = 0 if is_refusal or lasted_ms > STABLE_MS else failures + 1
            await asyncio.sleep(pause_s(failures, first_s=FIRST_PAUSE_S))

    def end(self, why: FencedError | InDoubtError) -> None:
        """End the session now, and undo the changes that it has not committed."""
        self._end()
        self._ownership.end_at_once(why)

    def _end(self) -> None:
        self._ownership.end()
        self._writer.give_back()

    async def _one_session(self) -> None:
        name = f"aiodelay.{self._place.topic}.{self._place.number}"
        transactions = Transactions(
            self._cluster, name, batch_bytes=self._targets.batch_bytes, clock_check=self._clock_check
        )
        self._ownership.begin()
        try:
            await transactions.start()
            await self._write_barrier(transactions)
            await self._until_read()
            await self._check_partitions(transactions)
            self._serve()
            while True:
                await self._writer.write(transactions)
        finally:
            await transactions.close()

    async def _write_barrier(self, transactions: Transactions) -> None:
        """Write the session's barrier. Another owner that reads this barrier ends its own session.

        Raises:
            StoreMismatchError: The partition now ends before an offset up to which it was read.
        """
        read_to = self._progress.index.state.read_to
        (offset,) = await transactions.begin([self._own_record(records.BARRIER, b"")])
        if offset < read_to:
            raise cut_off(self._place, offset, read_to)
        await transactions.commit()
        self._ownership.has_barrier(offset)

    def _own_record(self, key: bytes, value: bytes) -> Outgoing:
        return Outgoing(self._place.topic, key, value, [], self._place.number)

    async def _until_read(self) -> None:
        """Wait until the index has read the barrier, and so all records of earlier owners."""
        while not self._ownership.session.is_ready:
            self._progress.was_read.clear()
            await self._progress.was_read.wait(self._cluster.timeout_ms / 1000)
            self._ownership.check_over()

    async def _check_partitions(self, transactions: Transactions) -> None:
        """Compare the topic's number of partitions with the number that its first owner has recorded.

        Raises:
            StoreMismatchError: The two numbers differ.
        """
        before, now = self._progress.index.state.partitions, self._place.partitions
        if before == now:
            return
        if before is not None and not self._place.is_accepted:
            raise moved_keys(self._place.topic, before, now)
        await transactions.begin([self._own_record(records.PARTITIONS, b"%d" % now)])
        await transactions.commit()

    def _serve(self) -> None:
        self._ownership.why = ""
        self._progress.index.repairs.quarantine()
        self._ownership.serve()
        if self._owned_s is not None:
            self._callbacks.on_restored(asyncio.get_running_loop().time() - self._owned_s)
            self._owned_s = None
        self._callbacks.on_change()
