"""A scheduler on a Kafka store: handlers, retries, series, cancels, and topics as destinations."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

import pytest
from aiokafka import AIOKafkaConsumer, ConsumerRecord

from aiodelay import (
    CancelOutcome,
    Conflict,
    Context,
    DuplicateIdError,
    Every,
    Message,
    PayloadTooLargeError,
    Retry,
    Scheduled,
    Scheduler,
)
from aiodelay.backends.kafka.client import Producer
from aiodelay.backends.kafka.topics.writer import Writer
from aiodelay.core.values import Promise
from aiodelay.kafka import KafkaSink
from tests.support.kafka import create_topic, new_name
from tests.support.proxy import proxied
from tests.support.topics import LEAST
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio


@dataclass
class Check:
    number: int


async def test_r1_the_store_and_a_sink_are_entered_again_after_the_sink_did_not_answer(kafka: str) -> None:
    before, target = asyncio.all_tasks(), await create_topic(kafka, new_name())
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=2"
    host, _, port = kafka.partition(":")
    async with proxied(int(port), host) as proxy:
        proxy.mode = "refuse"
        scheduler = Scheduler(url, sinks=[KafkaSink(f"127.0.0.1:{proxy.port}", name="far")])
        opening = asyncio.create_task(scheduler.__aenter__())
        async with asyncio.timeout(60):
            while "sink far is unavailable" not in scheduler.status().why:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.02)
        proxy.mode = "pass"
        await opening
        for sink in ("kafka", "far"):
            await scheduler.schedule(sink.encode(), to=f"{sink}:{target}", delay="1ms")
        async with AIOKafkaConsumer(target, bootstrap_servers=kafka, auto_offset_reset="earliest") as consumer:
            assert {(await consumer.getone()).value for _ in range(2)} == {b"kafka", b"far"}
        await scheduler.__aexit__(None, None, None)
    assert asyncio.all_tasks() <= before


@pytest.mark.parametrize("dispatch", [True, False], ids=["owner", "producer"])
async def test_s2_a_message_that_is_larger_than_the_topic_takes_is_refused_alone(kafka: str, dispatch: bool) -> None:
    topic = await create_topic(kafka, new_name("schedules"), 1, **LEAST)
    most = int(LEAST["max_message_bytes"])
    sizes = [10, most - 1_000, most, 10]
    answers: dict[int, object] = {}
    async with Scheduler(f"kafka://{kafka}/{topic}", dispatch=dispatch, max_payload=1 << 20) as scheduler:
        messages = [Message(b"x" * size, to="kafka:t", delay="1h") for size in sizes]
        assert await scheduler.schedule_many(messages, answered=answers.__setitem__) == 3
        assert [number for number, each in answers.items() if not isinstance(each, Scheduled)] == [2]
        with pytest.raises(
            PayloadTooLargeError,
            match=rf"a record of at most {most} bytes .max.message.bytes of topic {topic}",
        ):
            await scheduler.schedule(b"x" * 500_000, to="kafka:t", delay="1h")


async def test_a_scheduler_delivers_retries_recurs_and_cancels(kafka: str) -> None:
    target = await create_topic(kafka, new_name())
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=3"
    scheduler = Scheduler(url)
    assert scheduler.reaches("kafka").promise is Promise.EXACTLY_ONCE
    runs: list[tuple[int, int]] = []
    three = asyncio.Event()

    @scheduler.handler(retry=Retry(attempts=3, first="50ms"))
    async def check(event: Check, context: Context) -> None:
        runs.append((event.number, context.attempt))
        if [number for number, _ in runs].count(3) == 3:
            three.set()
        if event.number == 1 and context.attempt == 1:
            raise ValueError("once")

    async with scheduler:
        await scheduler.schedule(Check(1), delay="10ms")
        await scheduler.schedule(Check(2), delay="1h", id="cancelled")
        await scheduler.schedule(Check(3), every=Every("100ms"), id="series")
        await scheduler.schedule(b"out", to=f"kafka:{target}", delay="10ms", key=b"k")
        await scheduler.schedule(b"tick", to=f"kafka:{target}", every=Every("200ms"), id="ticks", key=b"t")
        await scheduler.schedule(b"astray", to="kafka:no-such-topic", delay="1ms")
        with pytest.raises(DuplicateIdError):
            await scheduler.schedule(Check(2), delay="1h", id="cancelled", conflict=Conflict.error())
        assert await scheduler.cancel("cancelled") is CancelOutcome.CANCELLED
        assert await scheduler.cancel("cancelled") is CancelOutcome.NOT_FOUND
        await three.wait()
        await scheduler.cancel("series")
        records: list[ConsumerRecord] = []
        async with AIOKafkaConsumer(target, bootstrap_servers=kafka, auto_offset_reset="earliest") as consumer:
            while not Counter({b"out": 1, b"tick": 3}) <= Counter(each.value for each in records):
                records.append(await consumer.getone())
        (blocked,) = await until(scheduler.blocked, "the missing topic is found out")
        await until(lambda: (1, 2) in runs, "the retry")
        await scheduler.cancel("ticks")
    assert {(each.key, each.value) for each in records} == {(b"k", b"out"), (b"t", b"tick")}
    assert len({dict(each.headers)["aiodelay-delivery-id"] for each in records}) == len(records)
    assert (blocked.address, blocked.messages) == ("no-such-topic", 1)
    assert [attempt for number, attempt in runs if number == 1] == [1, 2]
    assert {number for number, _ in runs} == {1, 3}


async def test_what_the_store_moves_by_itself_needs_no_producer_of_its_sink(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = Writer.start, list[Writer]()

    async def noted(self: Writer) -> Producer:
        started.append(self)
        return await start(self)

    monkeypatch.setattr(Writer, "start", noted)
    target, sink = await create_topic(kafka, new_name()), KafkaSink(kafka)
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=1"
    async with Scheduler(url, sinks=[sink]) as scheduler:
        await scheduler.schedule(b"out", to=f"kafka:{target}", delay="10ms")
        await scheduler.run_until_idle()
        assert sink._writer not in started
    async with Scheduler("memory://", sinks=[sink]):
        assert sink._writer in started


async def test_s2_a_series_that_skips_overlaps_runs_with_a_new_owner_after_a_retry_has_ended(kafka: str) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=1"
    runs: list[int] = []

    def opened() -> Scheduler:
        scheduler = Scheduler(url)

        @scheduler.handler(name="tick", retry=Retry(attempts=3, first="50ms"))
        async def tick(payload: bytes, context: Context) -> None:
            runs.append(context.attempt)
            if len(runs) == 1:
                raise ValueError("once")

        return scheduler

    async with opened() as first:
        await first.schedule(b"x", to="handler:tick", id="s", every=Every("1h", overlap="skip"))
        await first.fire("s")
        await until(lambda: len(runs) == 2, "the retry")
    assert runs == [1, 2]
    async with opened() as second:
        await second.fire("s")
        await until(lambda: len(runs) > 2, "the next occurrence")
