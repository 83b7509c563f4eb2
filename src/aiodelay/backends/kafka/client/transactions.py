"""Transactions of one producer: all of a batch, or nothing, or it is not known which, and then the producer ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError, OutOfOrderSequenceNumber, ProducerFenced

from ._overrides.producer import OwnTransactions
from .errors import PERMANENT, reason_of
from .options import Cluster
from .outgoing import Outgoing, Written
from .producer import Producer
from .tail import keys_since

__all__ = ["AbortedError", "FencedError", "InDoubtError", "Transactions"]

TIMEOUT_MS = 15_000
"""After so long Kafka itself aborts a transaction that nobody ends."""


class AbortedError(Exception):
    """Nothing of the batch will ever be seen by `read_committed` readers; `written` says which records were refused.

    If the producer is not spent, the transaction has been aborted, and the next one may begin.
    """

    def __init__(self, written: Sequence[Written]) -> None:
        super().__init__(written)
        self.written = written

    def __str__(self) -> str:
        return "; ".join(sorted({reason_of(each.error) for each in self.written if each.error is not None}))


class FencedError(Exception):
    """Another owner has taken over; nothing of the batch will be seen."""


class InDoubtError(Exception):
    """The batch may have been committed, or not: the log will tell."""


class Transactions(Producer):
    """A producer of transactions; to start it fences off every earlier one of its id.

    Args:
        cluster: Where to.
        transactional_id: One per partition that is owned, the same for every owner.
        batch_bytes: As of `Producer`.
    """

    is_spent: bool = False
    _made_of = OwnTransactions

    def __init__(
        self, cluster: Cluster, transactional_id: str, *, batch_bytes: Callable[[str], int] | None = None
    ) -> None:
        options = {"transactional_id": transactional_id, "transaction_timeout_ms": TIMEOUT_MS}
        super().__init__(cluster, batch_bytes=batch_bytes, **options)
        self._is_lost = False
        self._client.client.on_lost = self._lose

    def _lose(self) -> None:
        self._is_lost = self.is_spent = True

    async def begin(self, records: Sequence[Outgoing]) -> list[int]:
        """Write records in a transaction; return their offsets, before anybody can read them. Not to be cancelled (K3).

        Raises:
            AbortedError: A record was refused (K1). If only records were, for good, the transaction has been aborted;
                else the producer is spent, and its next owner aborts the rest.
            FencedError: Another producer of this id has been started.
            InDoubtError: No answer.
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
        """Commit what `begin` has written. Not to be cancelled (K3).

        Raises:
            FencedError: Another producer of this id has been started.
            InDoubtError: No answer.
        """
        await self._end(self._client.commit_transaction)

    async def abort(self) -> None:
        """Have nobody ever see what `begin` has written; the next transaction may begin. Not to be cancelled (K3).

        Raises:
            FencedError: Another producer of this id has been started.
            InDoubtError: No answer; nothing will be seen all the same.
        """
        await self._end(self._client.abort_transaction)

    async def keys_since(self, place: TopicPartition, offset: int) -> Mapping[bytes, int]:
        """Return the last offset of each key that others have written to a partition from an offset on.

        Raises:
            KafkaError, TimeoutError, OSError: It cannot be read.
        """
        async with asyncio.timeout(self._timeout_s):
            return await keys_since(self._client.client, place, offset)

    async def _end(self, end: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s * 0.8):  # before aiokafka repeats EndTxn by itself (K4)
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
        """Go on numbering each partition's records where the broker does: at the last batch that it took (K7)."""
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
    """Return each record's offset."""
    offsets = [-1] * n
    for each in written:
        for i, index in enumerate(each.indices, each.offset):
            offsets[index] = i
    return offsets


def _are_records_at_fault(errors: Sequence[Exception]) -> bool:
    """Say whether topics have refused records for what these are, and nothing else failed but what came after (K7)."""
    is_all_told = all(isinstance(error, (*PERMANENT, OutOfOrderSequenceNumber)) for error in errors)
    return is_all_told and any(isinstance(error, PERMANENT) for error in errors)
