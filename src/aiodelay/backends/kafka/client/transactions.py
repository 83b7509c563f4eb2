"""`Transactions`: a producer that commits each batch whole or not at all.

If the outcome of a batch is in doubt, the producer is spent (see `producer.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError, OutOfOrderSequenceNumber, ProducerFenced

from ._overrides.producer import OwnTransactions
from .clock_check import ClockCheck
from .errors import PERMANENT, reason_of
from .options import Cluster
from .outgoing import Outgoing, Written
from .producer import Producer
from .tail import keys_since

__all__ = ["AbortedError", "FencedError", "InDoubtError", "Transactions"]

TIMEOUT_MS = 15_000
"""Kafka itself aborts a transaction that nobody has ended after this time."""


class AbortedError(Exception):
    """The batch was not committed: `read_committed` readers will never see any of its records.

    `written` says which records were refused. If the producer is not spent, the transaction has been aborted, and the
    next one may begin.
    """

    def __init__(self, written: Sequence[Written]) -> None:
        super().__init__(written)
        self.written = written

    def __str__(self) -> str:
        return "; ".join(sorted({reason_of(each.error) for each in self.written if each.error is not None}))


class FencedError(Exception):
    """Another owner has taken over. `read_committed` readers will never see any record of the batch."""


class InDoubtError(Exception):
    """The outcome is unknown: the batch may have been committed or not. Only reading the topic gives the answer."""


class Transactions(Producer):
    """A producer of transactions. Its start fences off every earlier producer with the same transactional id.

    Args:
        cluster: The cluster to write to.
        transactional_id: The id of an owned partition or of an intake's source. Every process uses the same id for it.
        batch_bytes, clock_check: As in `Producer`.
    """

    is_spent: bool = False
    _made_of = OwnTransactions

    def __init__(
        self,
        cluster: Cluster,
        transactional_id: str,
        *,
        batch_bytes: Callable[[str], int] | None = None,
        clock_check: ClockCheck | None = None,
    ) -> None:
        options = {"transactional_id": transactional_id, "transaction_timeout_ms": TIMEOUT_MS}
        super().__init__(cluster, batch_bytes=batch_bytes, clock_check=clock_check, **options)
        self._is_lost = False
        self._client.client.on_lost = self._lose

    def _lose(self) -> None:
        self._is_lost = self.is_spent = True

    async def begin(self, records: Sequence[Outgoing]) -> list[int]:
        """Write records in a transaction, and return their offsets. Nobody can read the records yet.

        The caller must not be cancelled (K3).

        Raises:
            AbortedError: A record was refused (K1). If every error is a permanent refusal, the transaction has been
                aborted. Otherwise the producer is spent, and the next producer with this id aborts the transaction.
            FencedError: Another producer with this id has been started.
            InDoubtError: The cluster did not answer.
        """
        sequences = self._client.sequence_numbers()
        await self._client.begin_transaction()
        written = await self.write(records)
        errors = [each.error for each in written if each.error is not None]
        if errors:
            self.is_spent = True
            if any(isinstance(error, ProducerFenced) for error in errors):
                raise FencedError
            if not self._is_lost and _are_records_at_fault(errors):
                self._count_again(sequences, records, written)
                self.is_spent = False
                await self.abort()
            raise AbortedError(written)
        if self.is_spent:
            raise InDoubtError("a request of the transaction was lost")
        return _offsets(written, len(records))

    async def commit(self) -> None:
        """Commit the records that `begin` has written. The caller must not be cancelled (K3).

        Raises:
            FencedError: Another producer with this id has been started.
            InDoubtError: The cluster did not answer.
        """
        await self._end(self._client.commit_transaction)

    async def abort(self) -> None:
        """Abort the transaction, so that the next transaction may begin. The caller must not be cancelled (K3).

        Raises:
            FencedError: Another producer with this id has been started.
            InDoubtError: The cluster did not answer. Even so, `read_committed` readers will never see the records.
        """
        await self._end(self._client.abort_transaction)

    async def keys_since(self, place: TopicPartition, offset: int) -> Mapping[bytes, int]:
        """Return the last offset of each key that other writers have written to a partition from an offset on.

        Raises:
            KafkaError, TimeoutError, OSError: The partition cannot be read.
        """
        async with asyncio.timeout(self._timeout_s):
            return await keys_since(self._client.client, place, offset)

    async def _end(self, end: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s * 0.8):  # ends before aiokafka repeats EndTxn (K4)
                await end()
        except ProducerFenced:
            self.is_spent = True
            raise FencedError from None
        except (KafkaError, TimeoutError) as error:
            self.is_spent = True
            raise InDoubtError(reason_of(error)) from error
        if self.is_spent:
            raise InDoubtError("a request of the transaction was lost")

    def _count_again(
        self, before: Mapping[TopicPartition, int], records: Sequence[Outgoing], written: Sequence[Written]
    ) -> None:
        """Continue each partition's sequence numbers after the last batch that the broker took (K7)."""
        sent, taken = dict[TopicPartition, int](), dict[TopicPartition, int]()
        for each in written:
            if each.partition >= 0:
                place = TopicPartition(records[each.indices[0]].topic, each.partition)
                sent[place] = sent.get(place, 0) + len(each.indices)
                if each.error is None:
                    taken[place] = sent[place]
        for place in sent:
            self._client.number_from(place, before.get(place, 0), taken.get(place, 0))


def _offsets(written: Sequence[Written], n: int) -> list[int]:
    """Return the offset of each record."""
    offsets = [-1] * n
    for each in written:
        for i, index in enumerate(each.indices, each.offset):
            offsets[index] = i
    return offsets


def _are_records_at_fault(errors: Sequence[Exception]) -> bool:
    """Say whether topics refused records for good, and nothing else failed.

    Batches that the broker then refused as out of order do not count (K7).
    """
    is_all_told = all(isinstance(error, (*PERMANENT, OutOfOrderSequenceNumber)) for error in errors)
    return is_all_told and any(isinstance(error, PERMANENT) for error in errors)
