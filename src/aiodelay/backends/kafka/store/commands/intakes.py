"""`Intakes`: stores commands together with the position of the source that they were read from."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from aiokafka import TopicPartition

from aiodelay.backends.kafka.client import (
    UNAVAILABLE,
    AbortedError,
    FencedError,
    InDoubtError,
    Outgoing,
    log_failure,
    reason_of,
)
from aiodelay.backends.kafka.store.assignment import Assignment
from aiodelay.backends.kafka.store.store_tasks import StoreTasks
from aiodelay.backends.kafka.topics.positions import IntakeSession, PassedError, Positions
from aiodelay.core.values import Command, Outcome, Refused, SourcePosition, Stored, Unknown
from aiodelay.errors import StoreUnavailableError

from .user_writes import UserWrites

__all__ = ["Intakes"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")

READ_S = 2.0
_UNWRITTEN: tuple[type[Exception], ...] = (AbortedError, *UNAVAILABLE)
_TOO_LARGE = Refused("too_large", "the topic takes no record of this size (max.message.bytes)")
_UNBEGUN: tuple[type[Exception], ...] = (FencedError, InDoubtError, *_UNWRITTEN)


class Intakes:
    """Stores the commands of the intakes into one store.

    Args:
        name: The name of the store for error messages.
        assignment: The partitions that this process owns.
        positions: Reads and writes the positions of sources in the schedules topic.
        writes: Makes the records of commands.
        tasks: Runs the transactions, so that the cancellation of a caller does not cut one off (K3).
    """

    def __init__(
        self, name: str, assignment: Assignment, positions: Positions, writes: UserWrites, tasks: StoreTasks
    ) -> None:
        self._name, self._assignment, self._positions = name, assignment, positions
        self._writes, self._tasks = writes, tasks
        self._beginning: dict[str, asyncio.Task[IntakeSession | Exception]] = {}

    async def position(self, source: str) -> int | None:
        """Return the position of a source. From now on, batches of an earlier reader of this source are refused.

        Raises:
            StoreUnavailableError: The cluster does not answer.
        """
        beginning = self._beginning.get(source)
        if beginning is None or beginning.done():
            beginning = self._tasks.start(self._begin(source), "aiodelay kafka intake begins")
            self._beginning[source] = beginning
        try:
            begun = await asyncio.shield(beginning)  # a cancelled caller must not cancel the transaction (K3)
            if isinstance(begun, Exception):
                raise begun
            return await self._positions.position(source, begun)
        except _UNBEGUN as error:
            raise StoreUnavailableError(self._name, reason_of(error)) from error

    async def _begin(self, source: str) -> IntakeSession | Exception:
        """Begin to read a source, and return the session, or the error. Never raises."""
        try:
            return await self._positions.begin(source)
        except Exception as error:  # noqa: BLE001 - `position` raises it to its caller
            return error

    async def store(self, commands: Sequence[Command], source: SourcePosition) -> Sequence[Outcome]:
        """Write commands as requests to the owners, in one transaction with the position of their source.

        Raises:
            UnsupportedByStoreError: Only an owner can carry out one of the commands. Nothing was written.
        """
        storing = self._store(*self._writes.recordable(commands), source)
        # A cancelled caller must not cancel the transaction (K3).
        return await asyncio.shield(self._tasks.start(storing, "aiodelay kafka intake"))

    async def _store(
        self, outgoing: Sequence[Outgoing], answers: Sequence[Stored], source: SourcePosition
    ) -> Sequence[Outcome]:
        """Write records and a position, and return an outcome for each command. Never raises."""
        outcome: Outcome
        try:
            if refusal := self._assignment.fullness():
                return [Refused("full", refusal) for _ in answers]
            if refusal := await self._writes.refusal():
                return [Refused("unavailable", refusal) for _ in answers]
            return await self._written(outgoing, answers, source)
        except (PassedError, FencedError):
            outcome = Refused("passed")
        except InDoubtError as error:
            outcome = Unknown(reason_of(error))
        except _UNWRITTEN as error:
            outcome = Refused("unavailable", reason_of(error))
        except Exception as error:  # noqa: BLE001 - as in `SessionRunner.run`
            log_failure(log, f"{self._name}: a batch of an intake fails", reason_of(error), error, ())
            outcome = Unknown(reason_of(error))
        return [outcome for _ in answers]

    async def _written(
        self, outgoing: Sequence[Outgoing], answers: Sequence[Stored], source: SourcePosition
    ) -> Sequence[Outcome]:
        """Write records and a position. Leave out the records that the topic never takes, and refuse their commands."""
        left = list(range(len(outgoing)))
        while True:
            written = [outgoing[i] for i in left]
            try:
                offsets = await self._positions.store(written, source)
            except AbortedError as error:
                alone = self._positions.learn_from(error)
                if alone is None or len(written) in alone:  # the last record is the position
                    raise
                left = [i for n, i in enumerate(left) if n not in alone]
            else:
                await self._until_read(written, offsets)
                stored = {*left}
                return [each if i in stored else _TOO_LARGE for i, each in enumerate(answers)]

    async def _until_read(self, outgoing: Sequence[Outgoing], offsets: Sequence[int]) -> None:
        """Wait until this process has read the new records of its own partitions, at most `READ_S`."""
        last: dict[TopicPartition, int] = {}
        for record, offset in zip(outgoing, offsets, strict=True):
            assert record.partition is not None
            last[TopicPartition(record.topic, record.partition)] = offset
        with suppress(TimeoutError):
            async with asyncio.timeout(READ_S):
                for place, offset in last.items():
                    if (partition := self._assignment.partitions.get(place)) is not None:
                        await partition.until_read(offset)
