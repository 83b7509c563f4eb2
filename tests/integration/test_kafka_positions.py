"""Several processes take one source into a Kafka store, one after the other. None of them stays behind."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from aiokafka import AIOKafkaProducer

from aiodelay.backends.kafka import KafkaStore, records
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Envelope, Put, Refused, SourcePosition, Stored
from tests.support.kafka import create_topic, new_name
from tests.support.topics import LEAST

pytestmark = pytest.mark.asyncio

SOURCE = "kafka:orders/1/0"


async def take_in(store: KafkaStore, first: int, position: int) -> str:
    """Return how a put ends that was read from here to there."""
    put = Put(new_op(), Envelope(f"m{first}", "lane"), After(0))
    (outcome,) = await store.apply([put], source=SourcePosition(SOURCE, first, position))
    assert isinstance(outcome, Stored | Refused)
    return outcome.answer if isinstance(outcome, Stored) else outcome.reason


async def test_s3_who_had_a_source_before_another_one_goes_on_where_that_one_stopped(kafka: str) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=1"
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(KafkaStore(url)) for _ in range(2)]
        for store, begin, end in [(first, 0, 5), (second, 5, 8), (first, 8, 9), (first, 9, 12), (second, 12, 13)]:
            assert await store.position(SOURCE) == (begin or None)
            assert await take_in(store, begin, end) == "stored"
        assert await take_in(first, 12, 13) == "passed"
        assert await first.position(SOURCE) == 13
        assert await take_in(second, 13, 14) == "passed", "the first one has begun since"


async def test_sources_that_are_begun_together_are_read_once(kafka: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, position_in = 0, records.position_in

    def counted(key: bytes, value: bytes | None) -> tuple[str, int] | None:
        nonlocal read
        read += 1
        return position_in(key, value)

    monkeypatch.setattr(records, "position_in", counted)
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=1"
    async with KafkaStore(url) as store:
        for i in range(6):
            puts = [Put(new_op(), Envelope(f"{i}-{j}", "lane"), After(0)) for j in range(100)]
            await store.apply(puts, source=SourcePosition(f"source {i}", 0, i))
    read = 0
    async with KafkaStore(url) as store:
        assert await asyncio.gather(*(store.position(f"source {i}") for i in range(6))) == list(range(6))
    assert 600 < read < 700


async def test_s3_who_takes_a_source_over_ends_what_the_one_before_left_open(kafka: str) -> None:
    """Nothing after it can be read, by whoever owns the partition, until Kafka itself would end it."""
    schedules = new_name("schedules")
    async with KafkaStore(f"kafka://{kafka}/{schedules}?create_topic=true&partitions=1&timeout_ms=60000") as store:
        options = {"transactional_id": f"aiodelay.{schedules}.{SOURCE}", "transaction_timeout_ms": 600_000}
        async with AIOKafkaProducer(bootstrap_servers=kafka, **options) as killed:
            await killed.begin_transaction()
            await killed.send_and_wait(schedules, b"never", key=b"k", partition=0)
            assert await store.position(SOURCE) is None
            assert await take_in(store, 0, 5) == "stored"
            assert await store.position(SOURCE) == 5


async def test_s2_a_batch_that_is_larger_than_the_topic_takes_is_stored(kafka: str) -> None:
    """A refused batch would come again and again, so its partition of the source would stand still."""
    topic = await create_topic(kafka, new_name("schedules"), 1, **LEAST)
    puts = [Put(new_op(), Envelope(f"m{n}", "lane", payload=b"x" * 2_500), After(0)) for n in range(200)]
    async with KafkaStore(f"kafka://{kafka}/{topic}") as store:
        outcomes = await store.apply(puts, source=SourcePosition(SOURCE, 0, 200))
        assert {type(each) for each in outcomes} == {Stored}, outcomes[0]
        assert await store.position(SOURCE) == 200


async def test_s2_a_message_that_the_topic_never_takes_is_refused_alone(kafka: str) -> None:
    topic = await create_topic(kafka, new_name("schedules"), 1, **LEAST)
    sizes = [2_500] * 150 + [400_000] + [2_500] * 50
    puts = [Put(new_op(), Envelope(f"m{n}", "lane", payload=b"x" * size), After(0)) for n, size in enumerate(sizes)]
    async with KafkaStore(f"kafka://{kafka}/{topic}") as store:
        outcomes = await store.apply(puts, source=SourcePosition(SOURCE, 0, 201))
        assert [n for n, each in enumerate(outcomes) if not isinstance(each, Stored)] == [150], outcomes[0]
        refused = outcomes[150]
        assert isinstance(refused, Refused)
        assert refused.reason == "too_large"
        assert await store.position(SOURCE) == 201
        (outcome,) = await store.apply([puts[150]], source=SourcePosition(SOURCE, 201, 202))
        assert isinstance(outcome, Refused)
        assert (outcome.reason, await store.position(SOURCE)) == ("too_large", 202)
