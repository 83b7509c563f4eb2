"""Ended messages whose tombstones the real cleaner has removed: their records are in the partition again."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from aiodelay.backends.kafka import KafkaStore, records
from aiodelay.backends.kafka.client import Transactions
from aiodelay.backends.kafka.store.assignment.partition_factory import PartitionFactory
from aiodelay.backends.kafka.store.assignment.reader import Reader
from aiodelay.backends.kafka.store.partition import Partition, change_writer
from aiodelay.backends.kafka.topics import topic as topics
from aiodelay.backends.kafka.watermark import Watermark
from aiodelay.core.ids import new_op
from aiodelay.core.values import Cancel, Query
from tests.support.kafka import create_topic, new_name, read
from tests.support.waiting import until

from .test_kafka_store import ALL, joined, moved, now_ms, opened, put, transfer

pytestmark = pytest.mark.asyncio

FAR_MS = 3_600_000
Partitions = Mapping[TopicPartition, Partition]


@pytest.fixture(autouse=True)
def _marks_are_written_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_writer, "MARK_MS", 50)


async def cleaned_topic(kafka: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A topic whose cleaner removes what was replaced after a second, and tombstones after two."""
    monkeypatch.setattr(topics, "check", lambda topic, bootstrap: None)  # which would refuse so short a lag
    return await create_topic(
        kafka,
        new_name("schedules"),
        cleanup_policy="compact",
        segment_ms=300,
        min_cleanable_dirty_ratio=0.001,
        min_compaction_lag_ms=500,
        delete_retention_ms=1000,
        message_timestamp_type="LogAppendTime",
    )


class SlowReader:
    """Holds up whoever opens the store from now on, once it has read a message, until it is let go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.holds, self.may_go_on = asyncio.Event(), asyncio.Event()
        start, read_some = Transactions.start, Reader._read_some
        known = set[Reader]()
        self.is_on = False

        async def slow_start(transactions: Transactions) -> None:
            if self.is_on:
                await self.may_go_on.wait()
            await start(transactions)

        async def slow_read(reader: Reader, consumer: AIOKafkaConsumer, partitions: Partitions) -> None:
            if not self.is_on:
                known.add(reader)
            is_held = reader not in known and not self.may_go_on.is_set()
            if is_held and any(each.index.table.entries for each in partitions.values()):
                consumer.pause(*consumer.assignment())
                fetcher = consumer._fetcher
                await until(lambda: not fetcher._in_flight, "what it has asked for already has come, and is nothing")
                self.holds.set()
                await self.may_go_on.wait()
                consumer.resume(*consumer.assignment())
            await read_some(reader, consumer, partitions)

        monkeypatch.setattr(Transactions, "start", slow_start)
        monkeypatch.setattr(Reader, "_read_some", slow_read)


async def until_only_the_mark_is_left(kafka: str, schedules: str) -> None:
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer, asyncio.timeout(60):
        while any(record.key.startswith(b"m") for record in await read(kafka, schedules)):
            far = [("scheduler-epoch", b"4000000000"), ("scheduler-target-topic", b"t")]
            await producer.send_and_wait(schedules, b"", b"traffic", headers=far)
            await asyncio.sleep(0.1)
    assert any(record.key == records.MARK for record in await read(kafka, schedules))


async def mark_of(kafka: str, schedules: str) -> Watermark:
    marks = [records.mark_of(record.value) for record in await read(kafka, schedules) if record.key == records.MARK]
    return marks[-1] if marks else Watermark()


@asynccontextmanager
async def not_yet_ready(kafka: str, schedules: str, slow: SlowReader) -> AsyncIterator[KafkaStore]:
    """An owner that has begun to read, and does not go on."""
    async with KafkaStore(f"kafka://{kafka}/{schedules}?members=1") as store:
        store.assignment.own("test")
        await asyncio.wait_for(slow.holds.wait(), 60)
        yield store


async def test_f30_what_was_delivered_while_a_reader_stood_still_is_not_delivered_again(
    kafka: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    schedules, target = await cleaned_topic(kafka, monkeypatch), await create_topic(kafka, new_name())
    monkeypatch.setattr(PartitionFactory, "_patience_s", lambda *_: 1000.0)  # so no owner begins at the start
    slow = SlowReader(monkeypatch)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(joined(kafka, schedules))
        await first.apply([put(i, target, now_ms()) for i in range(5)])
        slow.is_on = True
        second = await stack.enter_async_context(not_yet_ready(kafka, schedules, slow))
        await moved(first, 5)
        await until_only_the_mark_is_left(kafka, schedules)
        await first.__aexit__()
        slow.may_go_on.set()
        async with second.work("w", ["kafka"]):
            assert await transfer(second, ALL) == 0
            async with asyncio.timeout(60):
                while await second.search(Query()) != [await second.get("traffic")]:  # noqa: ASYNC110 - as a user looks
                    await asyncio.sleep(0.01)
            letters = await second.dead_letters()
            assert {(each.record.id, each.reason) for each in letters} == {(f"m{i}", "resurrected") for i in range(5)}
            assert "m3 had ended, and has come back" in caplog.text
            await second.redrive([letters[0].key])
            await moved(second, 1)
    counted = Counter(record.value for record in await read(kafka, target))
    again = letters[0].record.envelope.payload
    assert counted == {b"%d" % i: 1 for i in range(5)} | {again: 2}


async def test_f30_a_reader_that_stood_still_for_too_long_begins_at_the_start(
    kafka: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was cancelled long before it was due, no mark tells."""
    schedules = await cleaned_topic(kafka, monkeypatch)
    slow = SlowReader(monkeypatch)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(joined(kafka, schedules))
        await first.apply([put(1, "t", now_ms() + FAR_MS)])
        slow.is_on = True
        second = await stack.enter_async_context(not_yet_ready(kafka, schedules, slow))
        await first.apply([Cancel(new_op(), "m1"), put(2, "t", now_ms() + FAR_MS)])
        async with AIOKafkaProducer(bootstrap_servers=kafka) as producer, asyncio.timeout(60):
            while any(record.key == b"m1" for record in await read(kafka, schedules)):
                await producer.send_and_wait(schedules, b"{}", records.MARK)
                await asyncio.sleep(0.1)
        await first.__aexit__()
        slow.may_go_on.set()
        async with second.work("w", ["kafka"]), asyncio.timeout(60):
            while await second.get("m2") is None:  # noqa: ASYNC110 - as a user would look
                await asyncio.sleep(0.01)
            assert await second.get("m1") is None
    assert "tombstones may be gone" in caplog.text


async def test_f30_the_mark_stops_at_what_waits(kafka: str) -> None:
    schedules, target, missing = new_name("schedules"), await create_topic(kafka, new_name()), new_name("missing")
    due = now_ms() - 1000
    async with opened(kafka, schedules) as store:
        await store.apply([put(0, missing, due)])
        await store.apply([put(i, target, due + i) for i in range(1, 4)])
        await moved(store, 3)
        await asyncio.sleep(0.3)  # the mark may move here, and must not pass what waits
        await store.apply([put(4, target, due)])
        await moved(store, 1)
        await asyncio.sleep(0.3)  # and here
        assert (await mark_of(kafka, schedules)).until_ms < due
    async with opened(kafka, schedules) as store:
        assert [each.record.id for each in await store.search(Query())] == ["m0"]
        await create_topic(kafka, missing)
        await moved(store, 1)
        async with asyncio.timeout(60):
            while (await mark_of(kafka, schedules)).until_ms < due:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.05)
    assert [record.value for record in await read(kafka, missing)] == [b"0"]


async def test_f30_a_log_without_its_tombstones(kafka: str, caplog: pytest.LogCaptureFixture) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    due, far = now_ms() - 60_000, now_ms() + FAR_MS
    async with KafkaStore(f"kafka://{kafka}/{schedules}?create_topic=true&partitions=1") as store:
        await store.apply([put(1, target, due), put(2, target, far)])
        mark = records.encode_mark(Watermark(due, 2))
        async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
            await producer.send_and_wait(schedules, mark.value, mark.key)
            await producer.send_and_wait(schedules, b"not a mark", records.MARK)
        await store.apply([put(3, target, due)])
    with caplog.at_level(logging.ERROR):
        async with opened(kafka, schedules) as store:
            await moved(store, 1)
            assert [(each.record.id, each.reason) for each in await store.dead_letters()] == [("m1", "resurrected")]
            assert [each.record.id for each in await store.search(Query())] == ["m2"]
    async with opened(kafka, schedules) as store:
        assert await transfer(store, ALL) == 0
    assert [record.value for record in await read(kafka, target)] == [b"3"]
