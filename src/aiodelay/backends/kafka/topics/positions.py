"""Positions of intakes: a record keyed by the source, in the transaction of the puts that were read up to it.

Each source has a transactional id of its own, so that a reader that begins fences off the one before it, and ends what
that one has left open; what it had stored is read back then, through a barrier, since a reader of committed records may
not see the topic's end. All positions stand in the first partition, however many there are.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from aiokafka import TopicPartition
from msgspec import Struct

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client import (
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
"""So long another producer's open transaction may hold up reading: Kafka ends ours after 15 s."""


class PassedError(Exception):
    """The source stands elsewhere; nothing was written."""


class IntakeSession(Struct):
    """One source's transactions, and where it stands, once that was read.

    Attributes:
        transactions: Started; they have fenced off those of the reader before.
        barrier: Offset of what was written to be read through.
        is_new_topic: The topic ended before what had been read of it.
        position: Where the source stands; None: nothing is stored.
        is_read: Whether that is known.
    """

    transactions: Transactions
    barrier: int
    is_new_topic: bool
    position: int | None = None
    is_read: bool = False


class Positions:
    """The positions in a schedules topic, and the writing of them.

    Args:
        cluster: Where it is.
        topic: The schedules topic.
    """

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster, self._place = cluster, TopicPartition(topic, 0)
        self._sessions: dict[str, IntakeSession] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._reading = asyncio.Lock()
        self._found: dict[str, int] = {}
        self._read_to = 0

    async def begin(self, source: str) -> IntakeSession:
        """Begin to take a source in, whoever did before. Not to be cancelled.

        A reader that has begun before may have been fenced off since, by one that has come and gone: it asks for that
        with a transaction.

        Raises:
            AbortedError, InDoubtError, FencedError: As those of transactions.
            KafkaError, TimeoutError, OSError: It could not begin.
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
        """Return where a source stands, None if nothing is stored.

        Raises:
            KafkaError, TimeoutError, OSError: It cannot be read.
        """
        if not session.is_read:
            position = await self._read(source, session)
            session.position, session.is_read = position, True
        return session.position

    async def store(self, outgoing: Sequence[Outgoing], source: SourcePosition) -> list[int]:
        """Write records and a source's position in one transaction; return the records' offsets. Not to be cancelled.

        Raises:
            PassedError: The source stands elsewhere, or another reader of it has begun.
            AbortedError, InDoubtError, FencedError: As those of transactions.
            KafkaError, TimeoutError, OSError: It could not begin; nothing was written.
        """
        async with self._locks[source.source]:
            session = await self._session(source.source)
            if await self.position(source.source, session) not in (None, source.first):
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

    async def _session(self, source: str) -> IntakeSession:
        session = self._sessions.get(source)
        if session is None:
            transactions, read_to = Transactions(self._cluster, f"aiodelay.{self._place.topic}.{source}"), self._read_to
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
        """Return a source's position, once all that stands before its session's barrier has been read."""
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
        """Read on; some records must come, or the end come nearer, in the time for an answer."""
        before = self._read_to
        async with asyncio.timeout(max(self._cluster.timeout_ms / 1000, STALL_S)):
            while self._read_to == before:
                found = await consumer.getmany(self._place, timeout_ms=WAIT_MS, max_records=MOST_RECORDS)
                for each in found.get(self._place, ()):
                    if each.key is not None and (named := records.position_in(each.key, each.value)) is not None:
                        self._found[named[0]] = named[1]
                self._read_to = await consumer.position(self._place)
