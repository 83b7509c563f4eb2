"""The history topic: one entry per outcome, in the same transaction. A broken history topic delays nothing."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import AsyncExitStack, suppress

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from aiodelay import CancelOutcome, Scheduler
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Demand, Envelope, JournalEntry, Put
from aiodelay.errors import ConfigurationError, StoreMismatchError, StoreUnavailableError
from aiodelay.kafka import KafkaStore
from tests.support.kafka import create_topic, new_name
from tests.support.topics import delete_topic

pytestmark = pytest.mark.asyncio


def url_of(bootstrap: str, schedules: str, history: str, options: str = "") -> str:
    return f"kafka://{bootstrap}/{schedules}?create_topic=true&partitions=3&history={history}{options}"


async def told(store: Scheduler | KafkaStore, **events: int) -> list[JournalEntry]:
    """Return all entries once so many tell of each event.

    A transaction ends in each partition by itself, so the entries of one partition may be seen before those of another.
    """
    async with asyncio.timeout(120):
        while True:
            entries = list(await store.journal(limit=1000))
            counted = Counter(each.event for each in entries)
            if all(counted[event] >= n for event, n in events.items()):
                return entries
            await asyncio.sleep(0.05)


async def test_it_is_read_by_message_and_in_pages_over_all_partitions(kafka: str) -> None:
    target = await create_topic(kafka, new_name())
    async with Scheduler(url_of(kafka, new_name("schedules"), new_name("history"))) as scheduler:
        for i in range(20):
            await scheduler.schedule(b"", to=f"kafka:{target}", delay="10ms", id=f"m{i}")
        await scheduler.schedule(b"", to=f"kafka:{target}", delay="1h", id="off")
        assert await scheduler.cancel("off") is CancelOutcome.CANCELLED
        entries = await told(scheduler, stored=21, delivered=20, cancelled=1)
        pages, after = list[JournalEntry](), 0
        while page := await scheduler.journal(after=after, limit=7):
            assert [each.number for each in page] == sorted({each.number for each in page})
            pages += page
            after = page[-1].number
        assert pages == entries
        for message_id, events in [("m7", ["stored", "delivered"]), ("off", ["stored", "cancelled"]), ("x", [])]:
            assert [each.event for each in await scheduler.journal(message_id=message_id)] == events
    assert Counter(each.event for each in entries) == {"stored": 21, "delivered": 20, "cancelled": 1}


async def test_s3_owners_that_take_over_from_each_other_tell_of_every_delivery_once(kafka: str) -> None:
    url = url_of(kafka, new_name("schedules"), new_name("history"))
    target, n = await create_topic(kafka, new_name()), 300
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(KafkaStore(url))
        await stack.enter_async_context(first.work("w", []))
        puts = [Put(new_op(), Envelope(f"m{i}", "kafka", target, payload=b"%d" % i), After(0)) for i in range(n)]
        await first.apply(puts)
        moving = asyncio.create_task(deliver(first))
        second = await stack.enter_async_context(KafkaStore(url))
        await stack.enter_async_context(second.work("w", []))
        others = asyncio.create_task(deliver(second))
        entries = await told(second, delivered=n)
        for task in (moving, others):
            task.cancel()
        await asyncio.wait([moving, others])
    options = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
    async with AIOKafkaConsumer(target, bootstrap_servers=kafka, **options) as consumer:
        values = Counter([(await consumer.getone()).value for _ in range(n)])
    assert Counter(each.id for each in entries if each.event == "delivered") == Counter(f"m{i}" for i in range(n))
    assert values == Counter(b"%d" % i for i in range(n))


async def deliver(store: KafkaStore) -> None:
    with store.transferring(store.sinks[0]) as moves:
        while True:
            with suppress(StoreUnavailableError):
                await moves.transfer(Demand(20))
            await asyncio.sleep(0.02)


async def test_what_a_broken_one_is_not_told_it_is_told_later_and_delivery_goes_on(
    kafka: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiodelay.kafka")
    history, target = new_name("history"), await create_topic(kafka, new_name())
    url = url_of(kafka, new_name("schedules"), history, "&timeout_ms=60000")
    async with Scheduler(url, store_timeout="2m") as scheduler:
        await asyncio.to_thread(delete_topic, kafka, history)
        options = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}  # a move may be tried again
        async with AIOKafkaConsumer(target, bootstrap_servers=kafka, **options) as consumer:
            for i in range(5):
                await scheduler.schedule(b"%d" % i, to=f"kafka:{target}", delay="1ms", id=f"m{i}")
            assert Counter([(await consumer.getone()).value for _ in range(5)]) == Counter(b"%d" % i for i in range(5))
        assert await scheduler.blocked() == []
        await create_topic(kafka, history)
        entries = await told(scheduler, stored=5, delivered=5)
    assert Counter(each.event for each in entries) == {"stored": 5, "delivered": 5}
    texts = [each.message for each in caplog.records if each.name == "aiodelay.kafka" and history in each.message]
    assert any("takes no entries now" in text for text in texts)
    assert texts[-1].endswith("takes entries again")


async def test_what_others_write_there_is_skipped(kafka: str) -> None:
    history = new_name("history")
    async with Scheduler(url_of(kafka, new_name("schedules"), history)) as scheduler:
        async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
            for value in (b"garbage", b"", None, b"{}"):
                await producer.send_and_wait(history, value, b"m", partition=0)
        await scheduler.schedule(b"", to="kafka:t", delay="1h", id="m")
        assert [each.event for each in await scheduler.journal()] == ["stored"]


async def test_a_topic_that_cannot_keep_one_is_refused_with_what_to_do(kafka: str) -> None:
    schedules = new_name("schedules")
    compacted = await create_topic(kafka, new_name("history"), cleanup_policy="compact")
    with pytest.raises(StoreMismatchError, match=r"cleanup.policy is compact.*--add-config cleanup.policy=delete"):
        async with KafkaStore(url_of(kafka, schedules, compacted)):
            pass
    missing = url_of(kafka, schedules, new_name("history")).replace("create_topic=true&", "")
    with pytest.raises(StoreMismatchError, match=r"missing.*cleanup.policy=delete"):
        async with KafkaStore(missing):
            pass
    for history in (schedules, "a/b", "__x"):
        with pytest.raises((ConfigurationError, ValueError), match="history"):
            KafkaStore(url_of(kafka, schedules, history))
