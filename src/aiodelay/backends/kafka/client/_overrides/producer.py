"""`OwnProducer`: aiokafka's producer. It knows one more error (K28), and it ends even if no broker answers (K6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.client import ConnectionGroup
from aiokafka.errors import ConcurrentTransactions, KafkaConnectionError, NodeNotReadyError
from aiokafka.producer.message_accumulator import BatchBuilder, MessageAccumulator
from aiokafka.producer.sender import Sender, SendProduceReqHandler
from aiokafka.protocol.transaction import AddPartitionsToTxnRequest, EndTxnRequest, InitProducerIdRequest

from aiodelay.backends.kafka.client.errors import INVALID_RECORD, INVALID_RECORD_CODE

from .client import OwnClient
from .rebound import rebound

__all__ = ["OwnProducer", "OwnTransactions", "note"]

_PAUSE_S = 0.001
_REQUESTS = (AddPartitionsToTxnRequest, EndTxnRequest)


class _ProduceHandler(SendProduceReqHandler):  # type: ignore[misc]  # aiokafka has no types
    def handle_response(self, response: Any) -> None:  # noqa: ANN401 - aiokafka's
        for topic, partitions in response.topics:
            for partition, code, *_ in partitions:
                batch = self._batches.get(TopicPartition(topic, partition))
                if code == INVALID_RECORD_CODE and batch is not None:
                    # aiokafka would report an unknown error. A batch keeps the first error that it gets.
                    batch.failure(INVALID_RECORD())
        super().handle_response(response)


class _Sender(Sender):  # type: ignore[misc]  # aiokafka has no types
    """aiokafka's sender, which reports `INVALID_RECORD` by name (K28)."""

    _send_produce_req = rebound(Sender._send_produce_req, SendProduceReqHandler=_ProduceHandler)


class _Batches(set[Any]):
    """The batches under way. aiokafka removes a failed batch twice (K21), so `remove` must not raise."""

    remove = set.discard


class _Builder(BatchBuilder):  # type: ignore[misc]  # aiokafka has no types
    """aiokafka's builder of a batch, for keys and values that are bytes already."""

    def append(self, *, timestamp: int | None, key: bytes | None, value: bytes | None, headers: Any) -> Any:  # noqa: ANN401
        """Add a record. Return None if the batch is full or closed."""
        if self._closed:
            return None
        added = self._builder.append(self._relative_offset, timestamp, key, value, headers)
        if added is None:
            self.close()
        else:
            self._relative_offset += 1
        return added


class _Accumulator(MessageAccumulator):  # type: ignore[misc]  # aiokafka has no types
    create_builder = rebound(MessageAccumulator.create_builder, BatchBuilder=_Builder)


class OwnProducer(AIOKafkaProducer):  # type: ignore[misc]  # aiokafka has no types
    """aiokafka's producer, with an `OwnClient`.

    Args:
        options: Options of aiokafka's producer.

    Raises:
        ConfigurationError: This version of aiokafka was not tested.
    """

    __init__ = rebound(
        AIOKafkaProducer.__init__, AIOKafkaClient=OwnClient, Sender=_Sender, MessageAccumulator=_Accumulator
    )

    async def end(self, *, within_s: float) -> None:
        """Fail unsent batches, close the connections, and stop the producer, within twice `within_s` (K6)."""
        sender, accumulator = self._sender, self._message_accumulator
        if sender.sender_task is not None:
            sender.sender_task.remove_done_callback(sender._fail_all)  # without transactions, `_fail_all` raises (K17)
        accumulator._pending_batches = _Batches(accumulator._pending_batches)
        accumulator.fail_all(KafkaConnectionError("closed"))
        drains = [batch._drain_waiter for batches in accumulator._batches.values() for batch in batches]
        for _ in range(2):  # the first try may time out; then the second try finds no batch left to wait for
            with suppress(TimeoutError, Exception):
                async with asyncio.timeout(within_s):
                    await self.client.close()
                    await self.stop()
                break
        await asyncio.sleep(0)  # the tasks of the connections end in the next step of the event loop
        for left in (sender.sender_task, getattr(self._txn_manager, "_transaction_waiter", None), *drains):
            if left is not None and left.done():
                note(left)

    def sequence_numbers(self) -> dict[TopicPartition, int]:
        """Return the sequence number of each partition's next record."""
        return dict(self._txn_manager._sequence_numbers)

    def number_from(self, place: TopicPartition, number: int, taken: int) -> None:
        """Set the sequence number of a partition's next record to `number` plus `taken`."""
        self._txn_manager._sequence_numbers[place] = number
        self._txn_manager.increment_sequence_number(place, taken)


class _WatchedClient(OwnClient):
    """The client of a producer of transactions.

    aiokafka repeats a request whose answer is lost, and the repeated request may end a later transaction (K4). So this
    client calls `on_lost`. Kafka refuses some requests while it writes the end markers of the last transaction.
    aiokafka would send such a request again after 20 ms. This client sends it again after 1 ms.
    """

    on_lost: Callable[[], None]
    """Called when a request of a transaction gets no answer."""

    async def coordinator_lookup(self, coordinator_type: Any, coordinator_key: str) -> Any:  # noqa: ANN401 - aiokafka's
        """Find a coordinator. If the connection breaks, raise an error after which aiokafka's sender tries again (K30).

        Raises:
            NodeNotReadyError: The connection broke.
        """
        try:
            return await super().coordinator_lookup(coordinator_type, coordinator_key)
        except KafkaConnectionError as error:
            raise NodeNotReadyError(str(error)) from error

    async def send(self, node_id: int, request: Any, *, group: Any = ConnectionGroup.DEFAULT) -> Any:  # noqa: ANN401
        """Send a request. Repeat it while Kafka is still ending the last transaction."""
        while True:
            try:
                response = await super().send(node_id, request, group=group)
            except BaseException:
                if isinstance(request, _REQUESTS):
                    self.on_lost()
                raise
            if not _is_too_early(request, response):
                return response
            await asyncio.sleep(_PAUSE_S)


class OwnTransactions(OwnProducer):
    """aiokafka's producer of transactions, with a client that reports a lost request."""

    __init__ = rebound(
        AIOKafkaProducer.__init__, AIOKafkaClient=_WatchedClient, Sender=_Sender, MessageAccumulator=_Accumulator
    )


def _is_too_early(request: Any, response: Any) -> bool:  # noqa: ANN401 - aiokafka's
    if isinstance(request, AddPartitionsToTxnRequest):
        codes = [code for _, partitions in response.errors for _, code in partitions]
    elif isinstance(request, InitProducerIdRequest):
        codes = [response.error_code]
    else:
        return False
    return ConcurrentTransactions.errno in codes


def note(sent: asyncio.Future[Any]) -> None:
    """Read the error of a future, so that asyncio does not log it if nobody waits for the future any more."""
    if not sent.cancelled():
        sent.exception()
