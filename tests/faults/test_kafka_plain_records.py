"""Records of many Kafka clients, in formats that aiokafka alone cannot read."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy
from confluent_kafka import Producer

from aiodelay import Retry, Scheduler
from aiodelay.core.values import DeadLetter, LaneCounts
from aiodelay.kafka.records import key_of
from tests.support.bad_inputs import KAFKA_OWN_RECORDS
from tests.support.kafka import create_topic, new_name
from tests.support.topics import new_producer
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio


class _Bytes(str):
    """A header's name that is written as other bytes."""

    __slots__ = ()

    def encode(self, *_: str) -> bytes:
        return b"\xff\xfe"


def headers_to(target: str) -> list[tuple[str, str | bytes | None]]:
    return [("scheduler-epoch", b"%d" % time.time()), ("scheduler-target-topic", target.encode())]


async def values_of(bootstrap: str, topic: str, n: int) -> set[bytes]:
    return {record.value for record in await records_of(bootstrap, topic, n)}


async def records_of(bootstrap: str, topic: str, n: int) -> list[ConsumerRecord]:
    options = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
    async with asyncio.timeout(60), AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, **options) as consumer:
        return [await consumer.getone() for _ in range(n)]


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
        async with asyncio.timeout(60):
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
        producer = new_producer(kafka, {"compression.type": codec})
        producer.produce(schedules, b"1" * 1_000, b"m", headers=headers_to(target))
        assert await asyncio.to_thread(producer.flush, 30) == 0
        assert await values_of(kafka, target, 1) == {b"1" * 1_000}


ODD: dict[bytes, tuple[list[tuple[str, str | bytes | None]], str]] = {
    b"spaces": ([("scheduler-epoch", b" 1 ")], "header scheduler-epoch is ' 1 ', not a whole number"),
    b"1e9": ([("scheduler-epoch", b"1e9")], "header scheduler-epoch is '1e9', not a whole number"),
    b"20 digits": ([("scheduler-epoch", b"0" * 20)], "not a whole number"),
    b"the last counts": ([("scheduler-epoch", b"")], "header scheduler-epoch is '', not a whole number"),
}
"""What a key's record has beside the usual headers, and what is said of it."""


async def test_l5_odd_records_become_dead_letters_that_say_why_and_hold_up_nobody(kafka: str) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    async with Scheduler(f"kafka://{kafka}/{schedules}?create_topic=true&partitions=1") as scheduler:
        producer = new_producer(kafka, {"message.max.bytes": 2_000_000})
        for i, (key, (headers, _)) in enumerate(ODD.items()):
            producer.produce(schedules, b"odd", key, headers=headers_to(target) + headers)
            producer.produce(schedules, b"%d" % i, b"good %d" % i, headers=headers_to(target))
        assert await asyncio.to_thread(producer.flush, 30) == 0
        assert await values_of(kafka, target, len(ODD)) == {b"%d" % i for i in range(len(ODD))}
        letters = await letters_of(scheduler, len(ODD))
    for key, (_, says) in ODD.items():
        letter = next(each for each in letters if key_of(each.record.id) == key)
        assert letter.reason == "undecodable"
        assert says in (letter.record.last_error or "")


async def test_l5_records_that_look_like_aiodelays_own_hold_up_nobody(kafka: str) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    url = f"kafka://{kafka}/{schedules}?create_topic=true&partitions=1"
    rows = len(KAFKA_OWN_RECORDS)
    producer = new_producer(kafka, {"message.max.bytes": 2_000_000})
    async with Scheduler(url):
        for i, (key, value, headers) in enumerate(KAFKA_OWN_RECORDS):
            producer.produce(schedules, value, key, headers=list(headers.items()))
            producer.produce(schedules, b"%d" % i, b"good %d" % i, headers=headers_to(target))
        assert await asyncio.to_thread(producer.flush, 30) == 0
        assert await values_of(kafka, target, rows) == {b"%d" % i for i in range(rows)}
    async with Scheduler(url):  # reads them again, from the beginning
        producer.produce(schedules, b"later", b"later", headers=headers_to(target))
        assert await asyncio.to_thread(producer.flush, 30) == 0
        assert len(await values_of(kafka, target, rows + 1)) == rows + 1


async def letters_of(scheduler: Scheduler, n: int) -> list[DeadLetter]:
    async with asyncio.timeout(60):
        while len(letters := [each async for each in scheduler.dead_letters()]) < n:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
    assert len(letters) == n
    return letters


@pytest.mark.parametrize("delay_s", [0, 4], ids=["near", "far"])
async def test_l5_what_is_addressed_to_a_schedules_topic_does_not_come_back(kafka: str, delay_s: int) -> None:
    first, second = new_name("first"), new_name("second")
    url = f"kafka://{kafka}/{first},{second}?create_topic=true&partitions=1&horizon=1s"
    async with Scheduler(url) as scheduler:
        producer = new_producer(kafka)
        for to in (first, second):
            epoch = ("scheduler-epoch", b"%d" % (time.time() + delay_s))
            producer.produce(first, b"1", to.encode(), headers=[*headers_to(to), epoch])
        assert await asyncio.to_thread(producer.flush, 30) == 0
        letters = await letters_of(scheduler, 2)
        assert await scheduler.counts() == {"kafka": LaneCounts(dead=2)}
    for letter in letters:
        assert letter.reason == "undecodable"
        assert f"it goes to {letter.record.id}, a schedules topic" in (letter.record.last_error or "")


async def test_of_headers_with_one_name_the_last_counts_and_null_is_empty(kafka: str) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    async with Scheduler(f"kafka://{kafka}/{schedules}?create_topic=true&partitions=1"):
        producer = new_producer(kafka)
        twice = [("scheduler-epoch", b"soon"), ("scheduler-target-topic", b"a/b"), ("n", b"1"), *headers_to(target)]
        producer.produce(schedules, b"1", b"m", headers=[*twice, ("n", b"2"), ("null", None)])
        assert await asyncio.to_thread(producer.flush, 30) == 0
        (record,) = await records_of(kafka, target, 1)
    assert [each for each in record.headers if each[0] in ("n", "null")] == [("n", b"2"), ("null", b"")]


async def test_a_cancel_of_what_never_was_changes_nothing(kafka: str) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    async with Scheduler(f"kafka://{kafka}/{schedules}?create_topic=true&partitions=1") as scheduler:
        producer = new_producer(kafka)
        producer.produce(schedules, None, b"never was")
        producer.produce(schedules, None, b"never was either", headers=headers_to(target))
        producer.produce(schedules, b"1", b"m", headers=headers_to(target))
        assert await asyncio.to_thread(producer.flush, 30) == 0
        assert await values_of(kafka, target, 1) == {b"1"}
        async with asyncio.timeout(60):
            while await scheduler.counts():  # noqa: ASYNC110 - its end is there before its owner has read it
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("epoch", [b"0", b"soon"])
async def test_l5_what_is_too_large_to_be_written_again_holds_up_nobody(
    kafka: str, caplog: pytest.LogCaptureFixture, epoch: bytes
) -> None:
    """Compressed, the topic takes more than its `max.message.bytes`; delivered or given up, it is not compressed."""
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    async with Scheduler(f"kafka://{kafka}/{schedules}?create_topic=true&partitions=1") as scheduler:
        producer = new_producer(kafka, {"compression.type": "gzip", "message.max.bytes": 8_000_000})
        producer.produce(
            schedules, b"1" * 5_000_000, b"large", headers=[*headers_to(target), ("scheduler-epoch", epoch)]
        )
        producer.produce(schedules, b"good", b"good", headers=headers_to(target))
        assert await asyncio.to_thread(producer.flush, 30) == 0
        assert await values_of(kafka, target, 1) == {b"good"}
        async with asyncio.timeout(60):
            while await scheduler.counts():  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
        producer.produce(schedules, b"mended", b"large", headers=headers_to(target))
        assert await asyncio.to_thread(producer.flush, 30) == 0
        assert await values_of(kafka, target, 2) == {b"good", b"mended"}
    assert (
        caplog.text.count("message large stays in the partition, undelivered: [Error 10] MessageSizeTooLargeError") == 1
    )


async def test_a_dead_letter_that_is_too_large_with_its_traceback_is_kept_without(kafka: str) -> None:
    payload = b"x" * ((2 << 20) - 3_000)  # nearly all that a topic takes that we make
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=1"
    async with Scheduler(url, max_payload=len(payload)) as scheduler:

        @scheduler.handler(name="work", retry=Retry.never())
        async def work(event: bytes) -> None:
            raise KeyError("a long key, " * 1_000)

        for name, event in (("large", payload), ("small", b"")):
            await scheduler.schedule(event, to="handler:work", delay="0s", id=name)

        async def letters() -> dict[str, DeadLetter]:
            found = {letter.record.id: letter async for letter in scheduler.dead_letters()}
            return found if len(found) == 2 else {}

        found = await until(letters, "both are dead letters")
    assert found["small"].traceback is not None
    assert (found["large"].reason, found["large"].traceback) == ("not_retryable", None)
    assert found["large"].record.envelope.payload == payload
    assert found["large"].errors[0].startswith("KeyError: 'a long key, ")


async def test_l5_a_key_that_no_message_can_have_is_told_and_skipped(
    kafka: str, caplog: pytest.LogCaptureFixture
) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    async with Scheduler(f"kafka://{kafka}/{schedules}?create_topic=true&partitions=1") as scheduler:
        producer = new_producer(kafka, {"message.max.bytes": 2_000_000})
        for key in (b"k" * 900 * 1024, b"k" * 256, b"", b"good"):
            producer.produce(schedules, key, key, headers=headers_to(target))
        producer.produce(schedules, None, b"")
        assert await asyncio.to_thread(producer.flush, 30) == 0
        assert await values_of(kafka, target, 1) == {b"good"}
        async with asyncio.timeout(60):
            while await scheduler.counts():  # noqa: ASYNC110 - until it knows that "good" was committed
                await asyncio.sleep(0.01)
    assert caplog.text.count("the record is skipped: its key has ") == 4
    for size in (921_600, 256, 0):
        assert f"the record is skipped: its key has {size} bytes, not 1 to 255" in caplog.text


async def test_the_broker_itself_refuses_a_record_without_key(kafka: str) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    async with Scheduler(f"kafka://{kafka}/{schedules}?create_topic=true&partitions=1"):
        producer, answers = Producer({"bootstrap.servers": kafka}), list[object]()
        headers = headers_to(target)
        producer.produce(schedules, b"1", headers=headers, on_delivery=lambda error, _: answers.append(error))
        assert await asyncio.to_thread(producer.flush, 30) == 0
    assert "INVALID_RECORD" in str(answers)
