"""`Positions`: the positions of intakes in a schedules topic. A position is a record whose key names the source.

One transaction writes a batch of puts and the new position. Each source has its own transactional id. So a new reader
of the source fences off the earlier reader and aborts that reader's open transaction. To find the stored position, the
new reader writes a record, called the barrier, and reads the topic up to this record. Without the barrier, a reader of
committed records could not know whether it has seen all earlier records.

All positions are in the first partition.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from aiokafka import TopicPartition
from msgspec import Struct

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client import (
    BATCH_BYTES,
    TOO_LARGE,
    AbortedError,
    Consumer,
    FencedError,
    InDoubtError,
    Outgoing,
    Transactions,
    consumer_of,
    stop,
)
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.core.values import SourcePosition

__all__ = ["IntakeSession", "PassedError", "Positions"]

WAIT_MS = 200
MOST_RECORDS = 5_000
FETCH_BYTES = 4 << 20
STALL_S = 20.0
"""Longest time for which another producer's open transaction may delay reading.

Kafka aborts a transaction of aiodelay after 15 s.
"""


class PassedError(Exception):
    """The stored position of the source is not the expected position. Nothing was written."""


class IntakeSession(Struct):
    """The transactions of one source, and its position once that was read.

    Attributes:
        transactions: Started transactions. Their start has fenced off the earlier reader.
        barrier: The offset of this session's barrier, up to which the positions are read.
        is_new_topic: Whether the topic ended before an offset up to which it had been read.
        position: The position of the source; None = no position is stored.
        is_read: Whether the position is known.
    """

    transactions: Transactions
    barrier: int
    is_new_topic: bool
    position: int | None = None
    is_read: bool = False


class Positions:
    """Reads and writes the positions in a schedules topic.

    Args:
        cluster: The cluster of the topic.
        topic: The schedules topic.
    """

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster, self._place = cluster, TopicPartition(topic, 0)
        self._sessions: dict[str, IntakeSession] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._reading = asyncio.Lock()
        self._found: dict[str, int] = {}
        self._read_to = 0
        self._batch_bytes = BATCH_BYTES

    async def begin(self, source: str) -> IntakeSession:
        """Begin to take a source in, and fence off the earlier reader. The caller must not be cancelled.

        If this process already has a session, another reader may have read the source since. A transaction finds out
        whether that reader has fenced off this process.

        Raises:
            AbortedError, InDoubtError, FencedError: A transaction has failed.
            KafkaError, TimeoutError, OSError: No transaction could begin.
        """
        async with self._locks[source]:
            if (session := self._sessions.get(source)) is not None:
                try:
                    await self._write_barrier(session.transactions)
                except (AbortedError, InDoubtError, FencedError):
                    await self._end(source)
                except BaseException:
                    await self._end(source)
                    raise
            return await self._session(source)

    async def position(self, source: str, session: IntakeSession) -> int | None:
        """Return the position of a source, or None if no position is stored.

        Raises:
            KafkaError, TimeoutError, OSError: The position cannot be read.
        """
        if not session.is_read:
            position = await self._read(source, session)
            session.position, session.is_read = position, True
        return session.position

    async def store(self, outgoing: Sequence[Outgoing], source: SourcePosition) -> list[int]:
        """Write records and a source's position in one transaction, and return the records' offsets.

        The caller must not be cancelled.

        Raises:
            PassedError: The stored position is not the expected position, or another reader of the source has begun.
            AbortedError, InDoubtError, FencedError: The transaction has failed.
            KafkaError, TimeoutError, OSError: The transaction could not begin. Nothing was written.
        """
        async with self._locks[source.source]:
            session = await self._session(source.source)
            if not source.continues(await self.position(source.source, session)):
                raise PassedError
            wire = records.encode_position(source.source, source.position)
            position = Outgoing(self._place.topic, *wire, self._place.partition)
            try:
                offsets = await session.transactions.begin([*outgoing, position])
                await session.transactions.commit()
            except BaseException:
                await self._end(source.source)
                raise
            session.position = source.position
            return offsets[:-1]

    def learn_from(self, error: AbortedError) -> set[int] | None:
        """Make later batches smaller if the topic has refused a batch of several records as too large.

        Return the indexes of the records that were refused as too large, each alone in its batch. None: the transaction
        failed for another reason.
        """
        refused = [each.indices for each in error.written if isinstance(each.error, TOO_LARGE)]
        if any(len(indices) > 1 for indices in refused):
            self._batch_bytes //= 2
        return {indices[0] for indices in refused if len(indices) == 1} if refused else None

    async def _session(self, source: str) -> IntakeSession:
        session = self._sessions.get(source)
        if session is None:
            name, read_to = f"aiodelay.{self._place.topic}.{source}", self._read_to
            transactions = Transactions(self._cluster, name, batch_bytes=lambda _: self._batch_bytes)
            try:
                await transactions.start()
                barrier = await self._write_barrier(transactions)
            except BaseException:
                await transactions.close()
                raise
            session = self._sessions[source] = IntakeSession(transactions, barrier, is_new_topic=barrier < read_to)
        return session

    async def _write_barrier(self, transactions: Transactions) -> int:
        (offset,) = await transactions.begin([Outgoing(self._place.topic, records.INTAKE, b"", [], 0)])
        await transactions.commit()
        return offset

    async def _end(self, source: str) -> None:
        await self._sessions.pop(source).transactions.close()

    async def close(self) -> None:
        """End all transactions."""
        async with asyncio.TaskGroup() as tasks:
            for source in list(self._sessions):
                tasks.create_task(self._end(source))

    async def _read(self, source: str, session: IntakeSession) -> int | None:
        """Read the topic up to the session's barrier, and return the position of the source."""
        async with self._reading:
            if session.is_new_topic and session.barrier < self._read_to:
                self._read_to = 0
                self._found.clear()
            if session.barrier >= self._read_to:
                await self._read_through(session.barrier)
            return self._found.get(source)

    async def _read_through(self, barrier: int) -> None:
        consumer = consumer_of(self._cluster, max_partition_fetch_bytes=FETCH_BYTES)
        try:
            async with asyncio.timeout(self._cluster.timeout_ms / 1000):
                await consumer.start()
                consumer.assign([self._place])
                first = (await consumer.beginning_offsets([self._place]))[self._place]
            consumer.seek(self._place, max(first, self._read_to))
            while self._read_to <= barrier:
                await self._read_some(consumer)
        finally:
            await stop(consumer)

    async def _read_some(self, consumer: Consumer) -> None:
        """Read the next records. Raises `TimeoutError` if reading makes no progress within the time for an answer."""
        before = self._read_to
        async with asyncio.timeout(max(self._cluster.timeout_ms / 1000, STALL_S)):
            while self._read_to == before:
                found = await consumer.getmany(self._place, timeout_ms=WAIT_MS, max_records=MOST_RECORDS)
                for each in found.get(self._place, ()):
                    if each.key is not None and (named := records.position_in(each.key, each.value)) is not None:
                        self._found[named[0]] = named[1]
                self._read_to = await consumer.position(self._place)
