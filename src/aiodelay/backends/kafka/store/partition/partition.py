"""`Partition`: one partition of a schedules topic, from its assignment to this process until it is given up.

`PartitionFactory` makes partitions, and `Assignment` runs them. The reader of the process calls `take_in` and
`read_at`. Transfers and workers use `moves` and `commands`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client import FencedError, InDoubtError
from aiodelay.backends.kafka.pending.pending_index import PendingIndex
from aiodelay.backends.kafka.pending.placement import Placement
from aiodelay.backends.kafka.records import Read
from aiodelay.core.features import too_new, unknown
from aiodelay.core.wakeup import WakeUp
from aiodelay.errors import StoreMismatchError, StoreUnavailableError

from .change_writer import ChangeWriter
from .commands import OwnerCommands
from .disk import Disk
from .horizon import Fetch, Horizon
from .index_checkpoints import IndexCheckpoints
from .mismatches import cut_off, moved_keys
from .moves import Moves
from .ownership import Ownership
from .read_progress import ReadProgress
from .session import Session
from .session_runner import SessionRunner
from .settings import Callbacks, Place, Shared
from .stall_watch import StallWatch
from .unread_changes import UnreadChanges

__all__ = ["Partition"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")


class Partition:
    """One partition of a schedules topic, while this process owns it.

    Args:
        place: The partition.
        shared: The settings of all partitions of the store.
        callbacks: The functions that the partition calls.
        fetch: Reads records of the partition again, by offset.
        patience_s: If reading does not reach the end of the partition for this long, tombstones may be gone. Reading
            then starts again from the beginning.
        disk: Keeps the index on disk; None = the index is in memory only.
    """

    def __init__(
        self,
        place: Place,
        shared: Shared,
        callbacks: Callbacks,
        *,
        fetch: Fetch,
        patience_s: float,
        disk: Disk | None,
    ) -> None:
        self._place, self._callbacks = place, callbacks
        to_write, cluster = WakeUp(), shared.cluster
        self._cluster_name = cluster.name
        self._progress = progress = ReadProgress(_new_index(place, shared), patience_s=patience_s)
        self._ownership = ownership = Ownership(place.name, cluster, progress, callbacks.silence, to_write)
        self._stalls = StallWatch(ownership)
        self._checkpoints = IndexCheckpoints(progress, disk, shared.clock, callbacks.on_open)
        self._unread = unread = UnreadChanges(
            progress, ownership, to_write, skip=callbacks.skip, on_change=callbacks.on_change
        )
        self.horizon: Horizon = Horizon(
            lambda: progress.index, fetch, shared.clock, on_near=to_write.set, ms=shared.horizon_ms, name=cluster.name
        )
        self._writer = ChangeWriter(
            place,
            shared,
            progress=progress,
            ownership=ownership,
            unread=unread,
            horizon=self.horizon,
            to_write=to_write,
        )
        self._sessions = SessionRunner(
            place,
            shared,
            callbacks,
            progress=progress,
            ownership=ownership,
            writer=self._writer,
            checkpoints=self._checkpoints,
        )
        self.commands: OwnerCommands = OwnerCommands(
            shared,
            progress=progress,
            ownership=ownership,
            horizon=self.horizon,
            stalls=self._stalls,
            to_write=to_write,
        )
        self.moves: Moves = Moves(place.topic, shared, progress=progress, ownership=ownership, to_write=to_write)

    # --- state --------------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """The partition's number."""
        return self._place.number

    @property
    def index(self) -> PendingIndex:
        """The pending messages. Do not keep a reference: another index may replace this one."""
        return self._progress.index

    @property
    def session(self) -> Session:
        """The state of the current session: its barrier, and how far it has read."""
        return self._ownership.session

    @property
    def is_ready(self) -> bool:
        """Whether the partition's messages may be claimed and changed."""
        return self._ownership.is_ready

    @property
    def is_stalled(self) -> bool:
        """Whether a transaction has been open for so long that reading counts as stalled. Nobody can read beyond it."""
        return self._stalls.is_stalled

    @property
    def is_open(self) -> bool:
        """Whether reading may begin: the index was restored from its file, or it has no file."""
        return self._checkpoints.is_open

    @property
    def is_given_up(self) -> bool:
        """Whether this process has given the partition up."""
        return self._ownership.is_given_up

    @property
    def why(self) -> str:
        """The reason why the partition does not serve; "" if no reason is known."""
        return self._ownership.why

    @property
    def problem(self) -> StoreMismatchError | None:
        """The error that stops the partition until the process starts again; None = no such error."""
        return self._ownership.problem

    # --- running and ending -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run sessions until cancelled, or until the partition cannot be owned."""
        await self._sessions.run()

    async def finish(self) -> None:
        """Begin no new transaction. Return when the open transaction has ended and its records were read back."""
        await self._writer.finish()

    def give_up(self) -> None:
        """Give the partition up. The caller must then cancel `run`."""
        self._sessions.end(FencedError())
        self.close()
        self._ownership.give_up()

    def close(self) -> None:
        """Write a last checkpoint if the index is kept on disk, and close its file."""
        self._checkpoints.write()
        self.index.state.far.close()

    async def until_ready(self) -> bool:
        """Wait until a session is ready, at most for the store's timeout. Return whether a session is ready."""
        return await self._ownership.until_ready()

    async def until_known(self) -> None:
        """Wait until the index knows all messages. Do not wait for a partition with a problem: it serves no more.

        Raises:
            StoreUnavailableError: The partition was not read in time.
        """
        await self._ownership.until_known()

    async def until_read(self, offset: int) -> None:
        """Wait until the index has read the record at an offset."""
        await self._progress.until_read(offset)

    # --- called by the reader of the process --------------------------------------------------------------

    def take_in(self, read: Sequence[Read], read_to: int) -> None:
        """Take in committed records, in order. `read_to` is the offset up to which the partition has now been read."""
        index = self.index
        if self.is_given_up:
            return
        self.horizon.set()
        try:
            for each in read:
                if each.offset >= index.state.read_to:  # the index may have taken in this owner's records already
                    self._notice_new_owner(each)
                    index.reader.read(each)
        except StoreUnavailableError:  # the index file has failed; `read_at` finds it and replaces the index
            self._sessions.end(InDoubtError(index.state.far.problem))
            return
        if read:
            self._checkpoints.note_read(read[-1])
        index.state.read_to = max(index.state.read_to, read_to)
        if self.problem is None and (found := unknown(index.state.features)):
            error = too_new(self._cluster_name, found)
            self._ownership.stop(error)
            self._callbacks.on_too_new(error)
        self._unread.has_read()
        if read:
            self._callbacks.on_change()

    def _notice_new_owner(self, read: Read) -> None:
        """End the session if the record is the barrier with which another owner has begun a later session.

        That owner may have cancelled messages that are claimed here.
        """
        own = self.session.barrier
        if own is not None and read.offset > own and read.key == records.BARRIER:
            self._sessions.end(FencedError())

    def has_partitions(self, n: int) -> None:
        """Note how many partitions the topic has. If the number has changed, stop serving."""
        if n != self._place.partitions:
            self._ownership.refuse(moved_keys(self._place.topic, self._place.partitions, n))

    def is_cut_off(self, end: int) -> None:
        """Note that the partition now ends at an offset before the offset up to which it was read. Stop serving."""
        self._ownership.refuse(cut_off(self._place, end, self.index.state.read_to))

    def open_at(self, offset: int | None, now_s: float) -> None:
        """Note the offset of an open transaction, which nobody can read past; None = no transaction is open."""
        self._stalls.note(offset, now_s)

    def read_at(self, now_s: float, *, is_whole: bool) -> bool:
        """Note that the reader has read, and whether it reached the end. Return False if it must start again.

        If so, the index is empty, and the reader must begin at the start of the partition. There are two causes: the
        index file has failed, or reading has not reached the end for longer than `patience_s`.

        If this process was suspended for so long that another owner may have taken over, the session ends. The next
        session reads the changes that the other owner may have made.
        """
        if self._ownership.was_away() and self.session.barrier is not None:
            self._sessions.end(FencedError())
        self._ownership.note_reading(now_s)
        if problem := self.index.state.far.problem:
            log.error("%s: the index file has failed: %s; the index is held in memory", self.index.name, problem)
        elif self._progress.goes_on(now_s, is_whole=is_whole):
            return True
        else:
            why = "its end was not reached for half of delete.retention.ms, so tombstones may be gone"
            log.error("%s: the partition is read again from its start: %s", self.index.name, why)
        self._sessions.end(InDoubtError("the partition is read again from its start"))
        self._progress.begin_again(now_s)
        self._checkpoints.forget_read()
        return False

    def keep(self, now_s: float) -> None:
        """Write a checkpoint to disk, if it is time for one."""
        self._checkpoints.keep(now_s)


def _new_index(place: Place, shared: Shared) -> PendingIndex:
    placement = Placement(place.name, place.number, place.partitions, shared.schedules)
    placement.guard = shared.guard
    return PendingIndex(
        clock=shared.clock,
        placement=placement,
        claims=shared.claims,
        pace=shared.pace,
        keeps_history=bool(shared.history),
        workers=shared.workers,
    )
