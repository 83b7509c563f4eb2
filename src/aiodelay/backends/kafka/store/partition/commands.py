"""`OwnerCommands`: claims, settlements, commands and housekeeping of a partition's owner.

A call decides at once, in memory. It returns when the records of its decision were read back, or when its time is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.pending.changes import Change
from aiodelay.core.dict_table.table import Worker
from aiodelay.core.values import (
    Claimed,
    Command,
    DeadKey,
    Demand,
    Lane,
    Outcome,
    PutBack,
    Refused,
    Settlement,
    SettleOutcome,
    Stored,
    Tidied,
    Unknown,
)
from aiodelay.core.wakeup import WakeUp
from aiodelay.errors import StoreUnavailableError

from .change_writer import STALL_S
from .horizon import Horizon
from .ownership import Ownership
from .read_progress import ReadProgress
from .settings import Shared
from .stall_watch import StallWatch

__all__ = ["OwnerCommands"]

LATE = "a change was not written, or not read back, in time"


class OwnerCommands:
    """Carries out the commands for one partition as its owner.

    Args:
        shared: The settings of all partitions of the store.
        progress: The partition's index.
        ownership: Knows whether the partition serves.
        horizon: Brings a far message near before a command changes it.
        stalls: Knows whether the partition can be read.
        to_write: Wakes the writer.
    """

    def __init__(
        self,
        shared: Shared,
        *,
        progress: ReadProgress,
        ownership: Ownership,
        horizon: Horizon,
        stalls: StallWatch,
        to_write: WakeUp,
    ) -> None:
        self._clock, self._cluster_name = shared.clock, shared.cluster.name
        self._answer_s = shared.cluster.timeout_ms / 1000
        self._progress, self._ownership = progress, ownership
        self._horizon, self._stalls, self._to_write = horizon, stalls, to_write

    # --- claims -------------------------------------------------------------------------------------------

    async def claim(self, demand: Mapping[Lane, Demand], lease_ms: int, turn: int, worker: Worker) -> Claimed:
        """Lease due messages, and end messages that are too late. Return when these ends were read back.

        Return no claims if the session ends before the far messages that are due have come near.
        """
        if self._horizon.is_behind:
            await self._horizon.follow()
            # During the wait, another owner may have taken the partition over, and delivered these messages.
            if not self._ownership.is_ready:
                return Claimed([], self._clock.now_ms(), None)
        index = self._progress.index
        before = len(index.log.changes)
        claimed = index.claiming.claim(demand, lease_ms, turn, worker, self._clock.now_ms())
        await self._written_since(before)
        return claimed

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleOutcome]:
        """Settle claims. Return the outcomes once the settlements were read back.

        Raises:
            StoreUnavailableError: The session has ended, or reading takes too long. Some claims may be settled.
        """
        try:
            async with asyncio.timeout(STALL_S):
                return await self._settled(settlements)
        except TimeoutError:
            raise self._ownership.unavailable(LATE) from None

    async def _settled(self, settlements: Sequence[Settlement]) -> list[SettleOutcome]:
        for settlement in settlements:
            await self._until_free(settlement.id)
        self._ownership.check_ready()
        decided = [self._progress.index.decisions.settle(settlement) for settlement in settlements]
        self._to_write.set()
        outcomes: list[SettleOutcome] = []
        for (outcome, change), settlement in zip(decided, settlements, strict=True):
            if change is not None and not await change.until_written():
                raise StoreUnavailableError(self._cluster_name, "the session has ended")
            is_void = change is not None and not change.counted and self._progress.index.decisions.has_newer(settlement)
            outcomes.append(SettleOutcome.SUPERSEDED if is_void else outcome)
        return outcomes

    async def tidy(self, worker: Worker, lanes: Collection[Lane], limit: int) -> Tidied:
        """Do one step of housekeeping."""
        before = len(self._progress.index.log.changes)
        tidied = self._progress.index.tidy(worker, lanes, limit)
        await self._written_since(before)
        return tidied

    async def _written_since(self, before: int) -> None:
        """Wait at most `STALL_S` until the changes that the index has just made were read back.

        Args:
            before: The number of changes that waited before the index made these changes.
        """
        changes = list(self._progress.index.log.changes)[before:]
        if changes:
            self._to_write.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(STALL_S):
                    await asyncio.gather(*(change.until_written() for change in changes))

    # --- commands -----------------------------------------------------------------------------------------

    async def command(self, command: Command) -> Outcome:
        """Carry out a command as the owner. The outcome is final, or `Unknown` if the store's timeout ends first."""
        if self._stalls.is_stalled or not await self._ownership.until_ready():
            return self._being_read()
        try:
            async with asyncio.timeout(self._answer_s):
                return await self._commanded(command)
        except TimeoutError:
            return self._unknown()

    async def _commanded(self, command: Command) -> Outcome:
        while True:
            if not await self._ownership.until_ready():
                return self._being_read()
            try:
                await self._until_at_hand(command.id)
            except StoreUnavailableError as error:
                return Refused("unavailable", str(error))
            if not self._ownership.is_ready:
                continue
            outcome, change = self._progress.index.decisions.command(command)
            if change is None:
                return outcome
            self._to_write.set()
            if not await change.until_written():
                refusal = change.refusal
                return Refused("unavailable", refusal) if refusal else Unknown("the session has ended")
            if change.counted or change.is_users:
                assert isinstance(outcome, Stored)
                self._progress.index.decisions.answered(command, outcome)
                return outcome

    def _being_read(self) -> Refused:
        return Refused("unavailable", self._ownership.why or "the partition is being read")

    def _unknown(self) -> Unknown:
        return Unknown(self._ownership.why or LATE)

    # --- dead letters and put-backs -----------------------------------------------------------------------

    async def put_back(self, message: PutBack) -> Stored:
        """Take a message back as the owner. A message that is already stored under its id stays.

        Raises:
            StoreUnavailableError: The message was not written, or not read back, in time.
        """
        try:
            async with asyncio.timeout(self._answer_s):
                while True:
                    await self._ownership.until_ready()
                    await self._until_at_hand(message.record.id)
                    self._ownership.check_ready()
                    stored, change = self._progress.index.decisions.put_back(message)
                    if change is None:
                        return stored
                    self._to_write.set()
                    if not await change.until_written():
                        if change.refusal:
                            raise StoreUnavailableError(self._cluster_name, change.refusal)
                        continue  # if the record was committed after all, the next turn finds the message and keeps it
                    is_shadowed = message.reason is None and not change.counted
                    return replace(stored, answer="kept") if is_shadowed else stored
        except TimeoutError:
            raise self._ownership.unavailable(LATE) from None

    async def redrive(self, key: DeadKey) -> Outcome:
        """Schedule a dead letter again. Return when the message was read back and the dead letter is deleted.

        If the session ends between the two, the dead letter stays beside its message.

        Raises:
            StoreUnavailableError: The session has ended, or the message under its id cannot be read. Nothing was
                written.
        """
        await self._until_at_hand(key.id)
        self._ownership.check_ready()
        outcome, change = self._progress.index.decisions.redrive(key)
        if change is None:
            return outcome
        self._to_write.set()
        if not await self._written_in_time(change):
            return self._unknown()
        if not change.counted:
            return Refused("exists")
        if change.following is not None:
            await self._written_in_time(change.following)
        return outcome

    async def purge(self, key: DeadKey) -> bool:
        """Delete a dead letter. Return False if there is no such dead letter.

        Raises:
            StoreUnavailableError: The session has ended.
        """
        self._ownership.check_ready()
        change = self._progress.index.decisions.purge(key)
        if change is None:
            return False
        self._to_write.set()
        if not await self._written_in_time(change):
            raise self._ownership.unavailable(LATE)
        return True

    async def _written_in_time(self, change: Change) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._answer_s):
                return await change.until_written()
        return False

    # --- waiting ------------------------------------------------------------------------------------------

    async def _until_free(self, message_id: str) -> None:
        """Wait until no change of a message is being written."""
        key = records.key_of(message_id)
        while (change := self._progress.index.log.held_back.get(key)) is not None:
            await change.until_written()

    async def _until_at_hand(self, message_id: str) -> None:
        """Wait until a message is near and no change of the message is being written.

        Raises:
            StoreUnavailableError: The message cannot be read.
        """
        await self._until_free(message_id)
        while self._progress.index.far.has(message_id):
            await self._horizon.bring([message_id])
            await self._until_free(message_id)
