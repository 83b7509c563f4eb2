"""The test broker: it keeps acknowledged data over a kill, and its log cleaner really runs."""

import asyncio
import time

import pytest
from aiokafka import AIOKafkaProducer

from tests.support.kafka import create_topic, new_name, read, started


@pytest.mark.nightly  # the tests of faults rely on it each time that they kill a broker
@pytest.mark.asyncio
async def test_what_was_acknowledged_is_there_after_a_kill() -> None:
    broker = await asyncio.to_thread(started)
    try:
        topic = await create_topic(broker.bootstrap, new_name())
        await produce(broker.bootstrap, topic, [(b"k", b"v")])
        broker.kill()
        await asyncio.to_thread(broker.start)
        assert [(record.key, record.value) for record in await read(broker.bootstrap, topic)] == [(b"k", b"v")]
    finally:
        broker.stop()


@pytest.mark.asyncio
async def test_the_cleaner_removes_what_was_replaced(kafka: str) -> None:
    topic = await create_topic(
        kafka, new_name(), cleanup_policy="compact", segment_ms=100, min_cleanable_dirty_ratio=0.001
    )
    deadline = time.monotonic() + 60
    produced = kept = 0
    while kept == produced:
        assert time.monotonic() < deadline, f"all {produced} records of one key are still there"
        await produce(kafka, topic, [(b"k", b"%d" % produced)])
        produced += 1
        await asyncio.sleep(0.3)  # the cleaner passes each 0.2 s, over segments of 0.1 s
        kept = len(await read(kafka, topic))


async def produce(bootstrap: str, topic: str, records: list[tuple[bytes, bytes]]) -> None:
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        for key, value in records:
            await producer.send_and_wait(topic, value, key=key)
