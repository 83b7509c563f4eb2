"""aiokafka's producer, which names one more error (K28), and can be ended in time while its cluster is away (K6)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaConnectionError
from aiokafka.producer.sender import Sender, SendProduceReqHandler

from aiodelay.kafka.client.errors import INVALID_RECORD, INVALID_RECORD_CODE

from .client import CLOSE_S, Client
from .rebound import rebound

__all__ = ["RawProducer", "RawSender", "note"]


class _ProduceHandler(SendProduceReqHandler):  # type: ignore[misc]  # aiokafka has no types
    def handle_response(self, response: Any) -> None:  # noqa: ANN401 - aiokafka's
        for topic, partitions in response.topics:
            for partition, code, *_ in partitions:
                batch = self._batches.get(TopicPartition(topic, partition))
                if code == INVALID_RECORD_CODE and batch is not None:
                    batch.failure(
                        INVALID_RECORD()
                    )  # before aiokafka calls it an unknown error: the first failure counts
        super().handle_response(response)


class RawSender(Sender):  # type: ignore[misc]  # aiokafka has no types
    """aiokafka's sender, which reports a refused record by the name of its error (K28)."""

    _send_produce_req = rebound(Sender._send_produce_req, SendProduceReqHandler=_ProduceHandler)


class _Batches(set[Any]):
    """Batches under way. aiokafka takes a failed batch out twice (K21)."""

    remove = set.discard


class RawProducer(AIOKafkaProducer):  # type: ignore[misc]  # aiokafka has no types
    """aiokafka's producer, on a client of ours.

    Args:
        options: aiokafka's.

    Raises:
        ConfigurationError: This version of aiokafka was not tested.
    """

    __init__ = rebound(AIOKafkaProducer.__init__, AIOKafkaClient=Client, Sender=RawSender)

    async def end(self) -> None:
        """Fail the batches that it still holds, cut its connections, and stop it, within twice `CLOSE_S` (K6)."""
        sender, accumulator = self._sender, self._message_accumulator
        if sender.sender_task is not None:
            sender.sender_task.remove_done_callback(sender._fail_all)  # it fails itself without transactions (K17)
        accumulator._pending_batches = _Batches(accumulator._pending_batches)
        accumulator.fail_all(KafkaConnectionError("closed"))
        drains = [batch._drain_waiter for batches in accumulator._batches.values() for batch in batches]
        for _ in range(2):  # the second time it holds nothing any more
            with suppress(TimeoutError, Exception):
                async with asyncio.timeout(CLOSE_S):
                    await self.client.close()
                    await self.stop()
                break
        await asyncio.sleep(0)  # connections' tasks end in the next step of the loop
        for left in (sender.sender_task, getattr(self._txn_manager, "_transaction_waiter", None), *drains):
            if left is not None and left.done():
                note(left)

    def sequence_numbers(self) -> dict[TopicPartition, int]:
        """Return the number that each partition's next record will have."""
        return dict(self._txn_manager._sequence_numbers)

    def number_from(self, place: TopicPartition, number: int, taken: int) -> None:
        """Give a partition's next record the number that comes `taken` records after another one."""
        self._txn_manager._sequence_numbers[place] = number
        self._txn_manager.increment_sequence_number(place, taken)


def note(sent: asyncio.Future[Any]) -> None:
    """Look at the error of a future that nobody may wait for any more, so that asyncio does not log it."""
    if not sent.cancelled():
        sent.exception()
