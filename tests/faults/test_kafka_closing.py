"""R1: a Kafka client whose closing is cancelled still closes, and keeps no connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka import TopicPartition

from aiodelay.backends.kafka.client import Transactions, consumer_of, stop
from aiodelay.backends.kafka.client.options import read_url
from aiodelay.backends.kafka.store.assignment.fetcher import Fetcher
from tests.support.kafka import create_topic, new_name

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("steps", range(1, 7))
async def test_r1_a_producer_whose_closing_is_cancelled_at_any_step_is_closed(kafka: str, steps: int) -> None:
    producer = Transactions(read_url(kafka, "test"), new_name())
    await producer.start()
    await cancelled_after(steps, asyncio.ensure_future(producer.close()))
    assert producer._client._closed
    assert not is_connected(producer._client.client)


@pytest.mark.parametrize("steps", range(1, 7))
async def test_r1_a_consumer_whose_closing_is_cancelled_at_any_step_is_closed(kafka: str, steps: int) -> None:
    topic = await create_topic(kafka, new_name())
    consumer: Any = consumer_of(read_url(kafka, "test"), topic)
    await consumer.start()
    await cancelled_after(steps, asyncio.ensure_future(stop(consumer)))
    assert consumer._closed
    assert not is_connected(consumer._client)


@pytest.mark.parametrize("steps", range(1, 7))
async def test_r1_a_fetcher_whose_closing_is_cancelled_at_any_step_is_closed(kafka: str, steps: int) -> None:
    topic = await create_topic(kafka, new_name())
    fetcher = Fetcher(read_url(kafka, "test"))
    assert await fetcher.fetch(TopicPartition(topic, 0), [0]) == []
    consumer: Any = fetcher._consumer
    assert consumer is not None
    await cancelled_after(steps, asyncio.ensure_future(fetcher.close()))
    assert consumer._closed
    assert not is_connected(consumer._client)


async def cancelled_after(steps: int, closing: asyncio.Future[None]) -> None:
    for _ in range(steps):
        await asyncio.sleep(0)
    assert closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing


def is_connected(client: Any) -> bool:  # noqa: ANN401 - aiokafka's, without types
    return any(connection.connected() for connection in client._conns.values())
