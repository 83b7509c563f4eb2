"""Records as clients of every kind write them, which aiokafka alone would not read."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy
from confluent_kafka import Producer

from aiodelay import Scheduler
from tests.support.kafka import create_topic, new_name

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


class _Bytes(str):
    """A header's name that is written as other bytes."""

    __slots__ = ()

    def encode(self, *_: str) -> bytes:
        return b"\xff\xfe"


def headers_to(target: str) -> list[tuple[str, str | bytes | None]]:
    return [("scheduler-epoch", b"%d" % time.time()), ("scheduler-target-topic", target.encode())]


async def values_of(bootstrap: str, topic: str, n: int) -> set[bytes]:
    async with (
        asyncio.timeout(20),
        AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest") as consumer,
    ):
        return {(await consumer.getone()).value for _ in range(n)}


@pytest.mark.parametrize("codec", [0, 1], ids=["plain", "gzip"])
async def test_k18_a_header_whose_name_is_no_utf_8_is_a_dead_letter_and_its_batch_is_read(
    kafka: str, codec: int
) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    async with Scheduler(f"kafka://{kafka}/{schedules}?create_topic=true&partitions=1") as scheduler:
        async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
            batch = producer.create_batch()
            batch._builder = _DefaultRecordBatchBuilderPy(2, codec, 0, -1, -1, -1, 1 << 20)
            for name in ("before", "bad", "after"):
                extra = [(_Bytes("xx"), b"1")] if name == "bad" else [("größe", b"1")]
                batch.append(key=name.encode(), value=name.encode(), timestamp=1, headers=headers_to(target) + extra)
            await (await producer.send_batch(batch, schedules, partition=0))
        assert await values_of(kafka, target, 2) == {b"before", b"after"}
        async with asyncio.timeout(10):
            while not (letters := [each async for each in scheduler.dead_letters()]):  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
    (letter,) = letters
    assert (letter.record.id, letter.reason) == ("bad", "undecodable")
    assert "is not UTF-8" in (letter.record.last_error or "")
    assert letter.record.envelope.headers == {"\\xff\\xfe": b"1"}


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_k19_what_a_client_compresses_is_read(kafka: str, codec: str) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    async with Scheduler(f"kafka://{kafka}/{schedules}?create_topic=true&partitions=1"):
        producer = Producer({"bootstrap.servers": kafka, "compression.type": codec})
        producer.produce(schedules, b"1" * 1_000, b"m", headers=headers_to(target))
        assert await asyncio.to_thread(producer.flush, 10) == 0
        assert await values_of(kafka, target, 1) == {b"1" * 1_000}
