"""The Kafka sink on a real broker: delivered records, and failing records, topics and brokers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaConnectionError

from aiodelay import Scheduler, SinkUnavailableError
from aiodelay.backends.kafka.client import REQUEST_BYTES, Outgoing, Producer
from aiodelay.backends.kafka.client._overrides.client import OwnClient
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.core.values import Delivery, Envelope, Failed, SendOutcome, Sent
from aiodelay.kafka import KafkaSink
from tests.support.kafka import Broker, create_topic, new_name, read
from tests.support.topics import new_producer

pytestmark = pytest.mark.asyncio


def delivery(topic: str, payload: bytes = b"", key: bytes | None = None, number: int = 0) -> Delivery:
    envelope = Envelope(f"m{number}", "kafka", topic, payload=payload, key=key, headers={"caller": b"\xff"})
    return Delivery(envelope, f"m{number}/1/2", 2, 1, 1, 0)


def all_sent(outcomes: Sequence[SendOutcome]) -> bool:
    return all(isinstance(each, Sent) for each in outcomes)


@asynccontextmanager
async def opened(bootstrap: str, timeout_ms: int = 30_000) -> AsyncIterator[KafkaSink]:
    before = asyncio.all_tasks()
    async with KafkaSink(f"kafka://{bootstrap}?timeout_ms={timeout_ms}") as sink:
        yield sink
    assert asyncio.all_tasks() <= before


# --- what arrives -----------------------------------------------------------------------------------------


async def test_s8_a_message_arrives_as_it_was_scheduled(kafka: str) -> None:
    topic = await create_topic(kafka, new_name())
    async with Scheduler("memory://", sinks=[KafkaSink(kafka)]) as scheduler:
        due = datetime.now(UTC)
        await scheduler.schedule(b"\x00up", to=f"kafka:{topic}", key=b"vid1", at=due, id="m", headers={"a": b"\xff"})
        (record,) = await read(kafka, topic, 1)
    assert (record.key, record.value) == (b"vid1", b"\x00up")
    headers = dict(record.headers)
    assert headers["a"] == b"\xff"
    assert headers["scheduler-key"] == b"m"
    assert headers["aiodelay-attempt"] == b"1"
    assert headers["aiodelay-delivery-id"].startswith(b"m/")
    assert int(headers["scheduler-timestamp"]) >= int(due.timestamp())


async def test_what_is_sent_alone_tells_where_it_stands(kafka: str) -> None:
    topic, key = await create_topic(kafka, new_name(), partitions=7), b"key-1"
    async with opened(kafka) as sink:
        outcomes = [outcome for _ in range(2) for outcome in await sink.send([delivery(topic, b"v", key)])]
    places = [Sent(record.partition, record.offset) for record in await read(kafka, topic, 2)]
    assert outcomes == places


async def test_keys_go_where_java_and_murmur2_clients_send_them(kafka: str) -> None:
    ours, theirs = [await create_topic(kafka, new_name(), partitions=7) for _ in range(2)]
    keys = [b"key-%d" % i for i in range(60)] + [b"", b"x"]
    other = new_producer(kafka, {"partitioner": "murmur2_random"})
    for key in keys:
        other.produce(theirs, b"v", key)
    assert other.flush(30) == 0
    async with opened(kafka) as sink:
        await sink.send([delivery(ours, b"v", key, i) for i, key in enumerate(keys)])
    places = [
        {record.key: record.partition for record in await read(kafka, topic, len(keys))} for topic in (ours, theirs)
    ]
    places = [{key: place for key, place in found.items() if key} for found in places]  # librdkafka scatters empty keys
    assert places[0] == places[1]
    assert len(set(places[0].values())) == 7


async def test_a_record_without_value_and_one_with_an_empty_value(kafka: str) -> None:
    topic = await create_topic(kafka, new_name())
    null = Delivery(Envelope("n", "kafka", topic, encoding="null", key=b"k"), "n/1/2", 2, 1, 1, 0)
    async with opened(kafka) as sink:
        assert await sink.send([null, delivery(topic, b"", b"k")]) == [Sent(), Sent()]
    assert [record.value for record in await read(kafka, topic, 2)] == [None, b""]


async def test_a_delayed_tombstone_from_any_store(kafka: str) -> None:
    topic = await create_topic(kafka, new_name())
    urls = ["memory://", f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=1"]
    for url in urls:
        sinks = [KafkaSink(kafka)] if url == "memory://" else []
        async with Scheduler(url, sinks=sinks) as scheduler:
            await scheduler.schedule(None, to=f"kafka:{topic}", key=url.encode(), delay="1ms")
            await scheduler.schedule(b"", to=f"kafka:{topic}", key=url.encode(), delay="300ms")
            records = await read(kafka, topic, 2 * urls.index(url) + 2)
    assert [(each.key, each.value) for each in records] == [(u.encode(), v) for u in urls for v in (None, b"")]


async def test_many_large_batches_keep_each_partitions_order(kafka: str) -> None:
    topic = await create_topic(kafka, new_name(), partitions=3)
    sent = [delivery(topic, b"%06d" % i + b"x" * 2000, b"k%d" % (i % 9), i) for i in range(1500)]
    async with opened(kafka) as sink:
        assert set(await sink.send(sent)) == {Sent()}
    records = await read(kafka, topic, len(sent))
    assert len(records) == len(sent)
    for partition in range(3):
        numbers = [int(record.value[:6]) for record in records if record.partition == partition]
        assert numbers == sorted(numbers)


# --- what fails, fails alone ------------------------------------------------------------------------------


async def test_k1_k7_a_record_that_is_too_large_fails_alone_and_the_next_ones_are_sent(kafka: str) -> None:
    small = await create_topic(kafka, new_name(), max_message_bytes=3000)
    other = await create_topic(kafka, new_name())
    batch = [delivery(small, b"x" * 200, b"k", i) for i in range(40)]
    batch[17] = delivery(small, b"x" * 4000, b"k", 17)
    batch.insert(3, delivery(other, b"y", b"k", 99))
    async with opened(kafka) as sink:
        outcomes = list(await sink.send(batch))
        refused = outcomes.pop(18)
        assert isinstance(refused, Failed)
        assert not refused.retryable
        assert set(outcomes) == {Sent()}
        assert all_sent(await sink.send([delivery(small, b"after", b"k")]))
    got = [record.value for record in await read(kafka, small, 40)]
    assert len(got) == 40
    assert got[-1] == b"after"


async def test_a_record_that_its_topic_refuses_fails_alone(kafka: str) -> None:
    compacted = await create_topic(kafka, new_name(), cleanup_policy="compact")
    batch = [delivery(compacted, b"%d" % i, None if i in (3, 8) else b"k", i) for i in range(12)]
    async with opened(kafka) as sink:
        outcomes = await sink.send(batch)
    assert [i for i, each in enumerate(outcomes) if isinstance(each, Failed)] == [3, 8]
    assert [int(each.value) for each in await read(kafka, compacted, 10)] == [i for i in range(12) if i not in (3, 8)]


async def test_a_record_larger_than_any_request_fails_before_it_is_sent(kafka: str) -> None:
    topic = await create_topic(kafka, new_name())
    async with opened(kafka) as sink:
        outcomes = await sink.send([delivery(topic, b"x" * REQUEST_BYTES), delivery(topic, b"y")])
    assert isinstance(outcomes[0], Failed)
    assert not outcomes[0].retryable
    assert outcomes[1] == Sent()


async def test_a_topic_that_is_missing_holds_up_nobody_and_may_come(kafka: str) -> None:
    topic, missing = await create_topic(kafka, new_name()), new_name("missing")
    async with opened(kafka) as sink:
        batch = [delivery(missing, b"1"), delivery(topic, b"2"), delivery(missing, b"3")]
        outcomes = await sink.send(batch)
        failed = Failed(f"no topic '{missing}'")
        assert outcomes == [failed, Sent(), failed]
        await create_topic(kafka, missing)
        assert all_sent(await sink.send(batch[:1]))
    assert [record.value for record in await read(kafka, missing, 1)] == [b"1"]


# --- the broker fails -------------------------------------------------------------------------------------


async def test_f22_without_a_broker_opening_fails_at_once() -> None:
    with pytest.raises(SinkUnavailableError, match=r"sink kafka is unavailable: .*127\.0\.0\.1"):
        async with asyncio.timeout(20), opened("127.0.0.1:1"):
            pass


async def test_k6_a_broker_that_does_not_answer_ends_a_send_and_closing_in_time(own_broker: Broker) -> None:
    topic = await create_topic(own_broker.bootstrap, new_name())
    try:
        async with asyncio.timeout(120), opened(own_broker.bootstrap, timeout_ms=5000) as sink:
            assert all_sent(await sent_at_last(sink, [delivery(topic, b"before")]))
            own_broker.freeze()
            with pytest.raises(SinkUnavailableError, match="no answer in time"):
                await sink.send([delivery(topic, b"lost")])
            with pytest.raises(SinkUnavailableError):
                await sink.send([delivery(topic, b"lost too")])
    finally:
        own_broker.thaw()


async def test_k6_a_client_that_hangs_in_its_end_leaves_nothing(kafka: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic, close = await create_topic(kafka, new_name()), OwnClient.close
    hung = list[OwnClient]()

    async def hangs_once(self: OwnClient) -> None:
        if not hung:
            hung.append(self)
            await asyncio.Event().wait()
        await close(self)

    async with opened(kafka) as sink:
        assert all_sent(await sink.send([delivery(topic)]))
        monkeypatch.setattr(OwnClient, "close", hangs_once)
    assert hung


async def test_k21_closing_while_a_batch_waits_to_be_sent_again_ends_its_sending_and_logs_nothing(
    own_broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    topic = await create_topic(own_broker.bootstrap, new_name())
    producer = Producer(Cluster("killed", {"bootstrap_servers": [own_broker.bootstrap]}, 90_000))
    await producer.start()
    assert [each.error for each in await producer.write([Outgoing(topic, None, b"before", [])])] == [None]
    waiting = producer._client._message_accumulator._batches
    own_broker.kill()
    try:
        writing = asyncio.create_task(producer.write([Outgoing(topic, None, b"lost", [])]))
        async with asyncio.timeout(60):  # less than the time for which a batch is sent again
            while not any(batch.retry_count for batches in waiting.values() for batch in batches):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await producer.close()
        (written,) = await writing
        assert isinstance(written.error, KafkaConnectionError)
    finally:
        await asyncio.to_thread(own_broker.start)
    assert [record for record in caplog.records if record.name == "asyncio"] == []


async def test_k22_a_cluster_that_counts_no_broker_is_away(kafka: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AIOKafkaClient, "get_random_node", lambda self: None)
    producer = Producer(Cluster("new", {"bootstrap_servers": [kafka]}, 5_000), transactional_id=new_name())
    with pytest.raises(KafkaConnectionError, match="no broker"):
        await producer.start()


async def test_k27_a_producer_asks_for_the_topics_that_it_was_given_and_no_others(kafka: str) -> None:
    topic, _ = [await create_topic(kafka, new_name()) for _ in range(2)]
    producer = Producer(Cluster("cluster", {"bootstrap_servers": [kafka]}, 30_000), transactional_id=new_name())
    await producer.start()
    try:
        client = producer._client.client
        assert await client.force_metadata_update()  # as aiokafka does every five minutes, and when something fails
        assert client.cluster.topics() == set()
        assert await producer.partitions(topic) == 1
        assert client.cluster.topics() == {topic}
    finally:
        await producer.close()


async def test_f21_after_a_broker_was_killed_the_same_sink_goes_on(own_broker: Broker) -> None:
    topic = await create_topic(own_broker.bootstrap, new_name())
    async with opened(own_broker.bootstrap, timeout_ms=5000) as sink:
        assert all_sent(await sent_at_last(sink, [delivery(topic, b"before")]))
        own_broker.kill()
        with pytest.raises(SinkUnavailableError):
            await sink.send([delivery(topic, b"while it was away")])
        await asyncio.to_thread(own_broker.start)
        assert all_sent(await sent_at_last(sink, [delivery(topic, b"after")]))
    values = [record.value for record in await read(own_broker.bootstrap, topic, 2)]
    assert (values[0], values[-1]) == (b"before", b"after")


async def sent_at_last(sink: KafkaSink, batch: Sequence[Delivery]) -> Sequence[SendOutcome]:
    async with asyncio.timeout(60):
        while True:
            try:
                return await sink.send(batch)
            except SinkUnavailableError:
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("wait_s", [0, 0.001, 0.005])
async def test_k3_a_send_that_is_cancelled_harms_no_other(kafka: str, wait_s: float) -> None:
    topic = await create_topic(kafka, new_name())
    async with opened(kafka) as sink:
        for number in range(10):
            task = asyncio.create_task(sink.send([delivery(topic, b"x" * 5000, number=i) for i in range(200)]))
            await asyncio.sleep(wait_s * number)  # each is cancelled later in its course
            task.cancel()
            assert all_sent(await sink.send([delivery(topic, b"kept", number=number)]))
            await asyncio.wait([task])
    kept = [record for record in await read(kafka, topic, 10) if record.value == b"kept"]
    assert len(kept) == 10


# --- what it keeps to itself ------------------------------------------------------------------------------


async def test_k9_nothing_secret_is_logged_at_debug(kafka: str, caplog: pytest.LogCaptureFixture) -> None:
    topic = await create_topic(kafka, new_name())
    caplog.set_level(logging.DEBUG)
    async with opened(kafka) as sink:
        await sink.send([delivery(topic, b"planted-payload", b"planted-key")])
    assert "planted" not in caplog.text


async def test_k9_whoever_sets_a_level_for_aiokafka_sees_its_requests(
    kafka: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = await create_topic(kafka, new_name())
    caplog.set_level(logging.DEBUG, "aiokafka")
    async with opened(kafka) as sink:
        await sink.send([delivery(topic, b"planted-payload")])
    assert "planted-payload" in caplog.text


async def test_k8_it_asks_for_no_more_than_it_can_hold(kafka: str) -> None:
    sink = KafkaSink(kafka, messages=50, max_bytes=100_000)
    assert (sink.limits.messages, sink.limits.max_bytes) == (50, 100_000)
