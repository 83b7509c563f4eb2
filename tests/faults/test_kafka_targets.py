"""Target topics that accept nothing, and transactions that fail for reasons outside their records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord
from aiokafka import TopicPartition as AIOTopicPartition
from aiokafka.protocol.metadata import MetadataRequest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # which names them all
    AdminClient,
    NewTopic,
)

from aiodelay import Scheduler
from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client import Outgoing, Producer, consumer_of, stop
from aiodelay.backends.kafka.client._overrides.connection import OwnConnection
from aiodelay.backends.kafka.client.options import read_url
from aiodelay.backends.kafka.topics import topic
from aiodelay.backends.kafka.topics.writer import Writer
from tests.support.kafka import Broker, create_topic, new_name, started
from tests.support.server_clock import SteppedClock
from tests.support.topics import set_config
from tests.support.waiting import until, until_sync

pytestmark = pytest.mark.asyncio


def url_of(kafka: str, schedules: str, timeout_ms: int = 2_000) -> str:
    return f"kafka://{kafka}/{schedules}?create_topic=true&partitions=1&members=1&timeout_ms={timeout_ms}"


@asynccontextmanager
async def reading(kafka: str, topic: str) -> AsyncIterator[AIOKafkaConsumer]:
    options = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
    async with AIOKafkaConsumer(topic, bootstrap_servers=kafka, **options) as consumer:
        yield consumer


async def next_of(consumer: AIOKafkaConsumer, *, within_s: float) -> ConsumerRecord:
    async with asyncio.timeout(within_s):
        while not (found := await consumer.getmany(timeout_ms=200, max_records=1)):
            pass
    ((record,),) = found.values()
    return record


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Broker, Broker]]:
    """A cluster of two, of which the second is no controller."""
    first = started()
    second = Broker(
        process_roles="broker",
        node_id="2",
        controller_quorum_voters=first.setting("controller.quorum.voters"),
        listeners="PLAINTEXT://127.0.0.1:{port}",
    )
    try:
        second.start()
        yield first, second
    finally:
        second.stop()
        first.stop()


@pytest.fixture
def brokers(cluster: tuple[Broker, Broker]) -> Iterator[tuple[Broker, Broker]]:
    """A cluster of two, of which the second may be killed; it runs again afterwards."""
    yield cluster
    cluster[1].recover()


async def create_at(brokers: tuple[Broker, Broker], name: str, *nodes: int, **settings: str) -> str:
    """Create a topic whose partitions are each at one node; return once both brokers know it."""
    with AdminClient({"bootstrap.servers": brokers[0].bootstrap}) as admin:
        made = NewTopic(name, len(nodes), replica_assignment=[[node] for node in nodes], config=settings)
        await asyncio.to_thread(admin.create_topics([made])[name].result, 10)
    for broker in brokers:
        await asyncio.to_thread(until_sync, lambda broker=broker: knows(broker, name), "a broker knows the topic")
    return name


def knows(broker: Broker, name: str) -> bool:
    """Tell if one broker knows a topic: the first request of a new client goes to the broker that it was given."""
    with AdminClient({"bootstrap.servers": broker.bootstrap}) as admin:
        return name in admin.list_topics(timeout=10).topics


def lost(kafka: str, broker: Broker) -> None:
    """Kill a broker, and return once the cluster knows."""
    broker.kill()
    with AdminClient({"bootstrap.servers": kafka}) as admin:
        until_sync(lambda: len(admin.list_topics(timeout=10).brokers) == 1, "the cluster counts one broker")


async def test_f32_l3_a_topic_without_a_leader_is_held_and_costs_no_attempts(brokers: tuple[Broker, Broker]) -> None:
    kafka, second = brokers[0].bootstrap, brokers[1]
    good, bad = await create_at(brokers, new_name("good"), 1), await create_at(brokers, new_name("bad"), 2)
    schedules = await create_at(brokers, new_name("schedules"), 1, **topic.SETTINGS)
    async with Scheduler(url_of(kafka, schedules)) as scheduler, reading(kafka, good) as found:
        await asyncio.to_thread(lost, kafka, second)
        for i in range(40):
            await scheduler.schedule(b"%d" % i, to=f"kafka:{(good, bad)[i % 2]}", delay="1s")
        arrived = {(await next_of(found, within_s=60)).value for _ in range(20)}
        assert len(arrived) == 20

        async def are_held() -> bool:
            return [(each.address, each.messages) for each in await scheduler.blocked()] == [(bad, 20)]

        await until(are_held, "all messages to the other topic are held")
        await asyncio.to_thread(second.start)
        async with reading(kafka, bad) as held:
            late = [await next_of(held, within_s=60) for _ in range(20)]
        assert {dict(record.headers)[records.ATTEMPT] for record in late} == {b"1"}


MOST_ASKED_PER_S = 20
"""Without a pause, there would be thousands."""


async def test_k26_who_leads_a_partition_is_not_asked_without_a_pause(
    brokers: tuple[Broker, Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, send = 0, OwnConnection.send

    def counted(connection: OwnConnection, request: object, **options: object) -> object:
        nonlocal asked
        asked += isinstance(request, MetadataRequest)
        return send(connection, request, **options)

    monkeypatch.setattr(OwnConnection, "send", counted)
    away = await create_at(brokers, new_name("away"), 2)
    await asyncio.to_thread(lost, brokers[0].bootstrap, brokers[1])
    cluster = read_url(f"{brokers[0].bootstrap}?timeout_ms=3000", "this test")
    consumer, producer = consumer_of(cluster, auto_offset_reset="earliest"), Producer(cluster)
    record = Outgoing(away, b"key", b"value", [])
    try:
        await consumer.start()
        await producer.start()
        consumer.assign([AIOTopicPartition(away, 0)])
        began_s = time.monotonic()
        (written,) = await producer.write([record])
        assert isinstance(written.error, TimeoutError)
        await until(lambda: asked > 4, "the consumer or the producer asks again and again")
        assert asked < MOST_ASKED_PER_S * max(3.0, time.monotonic() - began_s)
        await asyncio.to_thread(brokers[1].start)
        async with Writer(cluster) as writer:
            assert [each.error for each in await writer.write([record])] == [None]
        assert (await next_of(consumer, within_s=60)).value == b"value"
    finally:
        await producer.close()
        await stop(consumer)


async def test_l5_a_partition_without_a_leader_holds_up_no_other(brokers: tuple[Broker, Broker]) -> None:
    kafka, second = brokers[0].bootstrap, brokers[1]
    target = await create_at(brokers, new_name("good"), 1)
    schedules = await create_at(brokers, new_name("schedules"), 1, 2, **topic.SETTINGS)
    ids = [f"m{i}" for i in range(20)]
    here = [each for each in ids if records.partition_of(each.encode(), 2) == 0]
    patient = f"kafka://{kafka}/{schedules}?timeout_ms=60000"
    async with Scheduler(patient, dispatch=False, store_timeout="60s") as producer:  # delivers none, however late it is
        for each in ids:
            await producer.schedule(each.encode(), to=f"kafka:{target}", delay="4s", id=each)
    await asyncio.to_thread(lost, kafka, second)
    async with Scheduler(url_of(kafka, schedules), open_timeout="120s"), reading(kafka, target) as found:
        arrived = {(await next_of(found, within_s=120)).value.decode() for _ in here}
        assert arrived == {*here}
        await asyncio.to_thread(second.start)
        late = {(await next_of(found, within_s=120)).value.decode() for _ in range(len(ids) - len(here))}
    assert late == {*ids} - arrived


async def test_k7_a_producer_that_the_cluster_has_forgotten_is_replaced_and_costs_no_attempt() -> None:
    broker = await asyncio.to_thread(
        started,
        transactional_id_expiration_ms="500",
        transaction_remove_expired_transaction_cleanup_interval_ms="100",
    )
    try:
        kafka, schedules = broker.bootstrap, new_name("schedules")
        target = await create_topic(kafka, new_name())
        async with (
            Scheduler(url_of(kafka, schedules)),
            reading(kafka, target) as found,
            AIOKafkaProducer(bootstrap_servers=kafka) as client,
        ):
            await asyncio.sleep(2)  # until the broker has forgotten it, as one that writes nothing for a week
            headers = [(records.EPOCH, b"0"), (records.TARGET_TOPIC, target.encode())]
            await client.send_and_wait(schedules, b"v", key=b"m", headers=headers)
            record = await next_of(found, within_s=60)
            assert dict(record.headers)[records.ATTEMPT] == b"1"
    finally:
        broker.stop()


@pytest.mark.parametrize("forged", [("aiodelay-lane", b"kafka"), ("aiodelay-from", b"0")])
async def test_l5_an_address_that_is_no_topic_holds_up_nobody(kafka: str, forged: tuple[str, bytes]) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    async with (
        Scheduler(url_of(kafka, schedules)),
        reading(kafka, target) as found,
        AIOKafkaProducer(bootstrap_servers=kafka) as client,
    ):
        bad = [(records.EPOCH, b"0"), (records.TARGET_TOPIC, b"x" * 40_000), ("aiodelay-address", b"x" * 40_000)]
        await client.send_and_wait(schedules, b"bad", key=b"bad", headers=[*bad, forged])
        headers = [(records.EPOCH, b"0"), (records.TARGET_TOPIC, target.encode())]
        await client.send_and_wait(schedules, b"good", key=b"good", headers=headers)
        assert (await next_of(found, within_s=60)).value == b"good"


async def test_what_was_deleted_from_a_partitions_start_is_stepped_over(
    kafka: str, caplog: pytest.LogCaptureFixture
) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    url = url_of(kafka, schedules, 60_000)  # a transaction that ends by its time limit takes offsets, too
    async with Scheduler(url, store_timeout="60s") as scheduler:
        for i in range(5):
            await scheduler.schedule(b"%d" % i, to=f"kafka:{target}", delay="1h")
    await asyncio.to_thread(delete_to, kafka, schedules, 8)  # two of the session, and each put, with their markers
    async with Scheduler(url, clock=SteppedClock(2 * 3_600)), reading(kafka, target) as found:
        assert {(await next_of(found, within_s=60)).value for _ in range(3)} == {b"2", b"3", b"4"}
    (told,) = (each.message for each in caplog.records if "records were deleted" in each.message)
    assert told.startswith(f"{schedules}/0: ")
    assert "reading goes on at 8, not 0" in told


def delete_to(kafka: str, name: str, offset: int) -> None:
    """Delete a topic's first records, which none that is compacted lets one do."""
    set_config(kafka, name, cleanup_policy="delete")
    with AdminClient({"bootstrap.servers": kafka}) as admin:
        place = TopicPartition(name, 0, offset)
        admin.delete_records([place])[place].result(10)
    set_config(kafka, name, cleanup_policy="compact")
