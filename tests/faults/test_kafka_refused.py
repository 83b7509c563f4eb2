"""A record that its topic never accepts becomes a dead letter at once, and affects no other message."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import MessageSizeTooLargeError, OutOfOrderSequenceNumber

from aiodelay import Every, Scheduler
from aiodelay.backends.kafka.client import INVALID_RECORD, AbortedError, FencedError, Outgoing, Transactions
from aiodelay.backends.kafka.client.options import Cluster, read_url
from aiodelay.backends.kafka.topics import targets
from aiodelay.core.values import DeadLetter
from tests.faults.test_kafka_rights import OWNER, rights_on
from tests.support.kafka import Broker, create_topic, new_name
from tests.support.topics import set_config
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

LIMIT = 2_000
LARGE, SMALL = b"x" * 5_000, 20
"""A payload that a topic of this limit never takes, and how many that it takes one by one, not in one batch."""


def scheduler_of(kafka: str, schedules: str) -> Scheduler:
    return Scheduler(f"kafka://{kafka}/{schedules}?create_topic=true&partitions=1&members=1")


async def arrived(kafka: str, topic: str, n: int) -> Counter[bytes]:
    """Return what `read_committed` readers see, once it is so much, and all that is there."""
    options = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
    async with AIOKafkaConsumer(topic, bootstrap_servers=kafka, **options) as consumer, asyncio.timeout(60):
        found: Counter[bytes] = Counter()
        ends = await consumer.end_offsets(consumer.assignment())
        while found.total() < n or any([await consumer.position(each) < end for each, end in ends.items()]):
            for batch in (await consumer.getmany(timeout_ms=100)).values():
                found.update(record.value for record in batch)
    return found


async def written(kafka: str, topic: str) -> int:
    """Return how many records a topic ever got, seen or not."""
    async with AIOKafkaConsumer(bootstrap_servers=kafka) as consumer:
        return sum((await consumer.end_offsets([TopicPartition(topic, 0)])).values())


async def letters(scheduler: Scheduler, n: int) -> dict[str, DeadLetter]:
    async def found() -> dict[str, DeadLetter] | None:
        there = {letter.record.id: letter async for letter in scheduler.dead_letters()}
        return there if len(there) >= n else None

    there = await until(found, f"{n} dead letters")
    assert there is not None
    return there


def told(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [each.getMessage() for each in caplog.records if text in each.getMessage()]


async def test_l5_what_is_larger_than_its_topic_takes_is_a_dead_letter_at_once_and_never_sent(
    kafka: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "_SURE_MS", 0)
    small, other = await create_topic(kafka, new_name(), max_message_bytes=LIMIT), await create_topic(kafka, new_name())
    async with scheduler_of(kafka, new_name("schedules")) as scheduler:
        for i in range(SMALL):
            await scheduler.schedule(LARGE, to=f"kafka:{small}", delay="1s", id=f"large{i}")
            await scheduler.schedule(b"%d" % i, to=f"kafka:{other}", delay="1s")
        found = await letters(scheduler, SMALL)
        assert await arrived(kafka, other, SMALL) == Counter(b"%d" % i for i in range(SMALL))
        assert await written(kafka, small) == 0
        assert {(letter.reason, letter.record.attempt) for letter in found.values()} == {("not_retryable", 1)}
        assert f"topic {small} takes 2000 bytes (max.message.bytes)" in (found["large0"].record.last_error or "")
        for i in range(SMALL):
            assert len(told(caplog, f"message large{i} becomes a dead letter: topic {small} ")) == 1
        await asyncio.to_thread(set_config, kafka, small, max_message_bytes=100_000)
        await scheduler.redrive(found["large0"])
        assert await arrived(kafka, small, 1) == Counter([LARGE])
    assert not told(caplog, "the session ends")


async def test_l5_batches_hold_no_more_than_their_topic_takes(kafka: str, caplog: pytest.LogCaptureFixture) -> None:
    small = await create_topic(kafka, new_name(), max_message_bytes=LIMIT)
    values = [b"%d " % i + b"x" * 500 for i in range(SMALL)]
    async with scheduler_of(kafka, new_name("schedules")) as scheduler:
        for value in values:
            await scheduler.schedule(value, to=f"kafka:{small}", delay="1s")
        assert await arrived(kafka, small, SMALL) == Counter(values)
    assert not told(caplog, "the session ends")


async def test_l5_what_a_topic_refuses_that_takes_less_than_before_is_found_and_its_neighbours_come_once(
    kafka: str, caplog: pytest.LogCaptureFixture
) -> None:
    schedules, other = new_name("schedules"), await create_topic(kafka, new_name())
    small = await create_topic(kafka, new_name())
    async with scheduler_of(kafka, schedules) as scheduler:
        await scheduler.schedule(b"first", to=f"kafka:{small}", delay="1ms")
        assert await arrived(kafka, small, 1) == Counter([b"first"])  # by now it is known how much it takes
        await asyncio.to_thread(set_config, kafka, small, max_message_bytes=LIMIT)
        for i in range(SMALL):
            await scheduler.schedule(LARGE, to=f"kafka:{small}", delay="2s", id=f"large{i}")
            await scheduler.schedule(b"%d" % i, to=f"kafka:{small}", delay="2s")
            await scheduler.schedule(b"%d" % i, to=f"kafka:{other}", delay="2s")
        await letters(scheduler, SMALL)
        expected = Counter(b"%d" % i for i in range(SMALL))
        assert await arrived(kafka, small, SMALL + 1) == expected + Counter([b"first"])
        assert await arrived(kafka, other, SMALL) == expected
    assert not told(caplog, "the session ends")


async def test_l5_a_record_without_key_for_a_compacted_topic_is_a_dead_letter_at_once(
    kafka: str, caplog: pytest.LogCaptureFixture
) -> None:
    compacted = await create_topic(kafka, new_name(), cleanup_policy="compact")
    async with scheduler_of(kafka, new_name("schedules")) as scheduler:
        for i in range(SMALL):
            await scheduler.schedule(b"%d" % i, to=f"kafka:{compacted}", delay="1s", key=b"k")
        await scheduler.schedule(b"no key", to=f"kafka:{compacted}", delay="1s", id="keyless")
        found = await letters(scheduler, 1)
        assert "InvalidRecordError" in (found["keyless"].record.last_error or "")
        assert await arrived(kafka, compacted, SMALL) == Counter(b"%d" % i for i in range(SMALL))
    assert not told(caplog, "the session ends")


async def test_l5_an_occurrence_that_is_too_large_is_a_dead_letter_and_its_series_goes_on(kafka: str) -> None:
    small = await create_topic(kafka, new_name(), max_message_bytes=LIMIT)
    async with scheduler_of(kafka, new_name("schedules")) as scheduler:
        await scheduler.schedule(LARGE, to=f"kafka:{small}", every=Every("2s"), id="series")
        found = await letters(scheduler, 2)
        assert {letter.reason for letter in found.values()} == {"not_retryable"}
        assert await scheduler.get("series") is not None
        assert await written(kafka, small) == 0


async def test_l5_without_the_right_to_read_how_much_a_topic_takes_its_refusal_tells(
    own_broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    async with rights_on(own_broker) as rights:
        await rights.grant("owner", *OWNER.values())
        await rights.revoke("owner", OWNER["DescribeConfigs Topic target"])
        await asyncio.to_thread(set_config, own_broker.bootstrap, rights.name("target"), max_message_bytes=2_000)
        async with Scheduler(rights.url("owner")) as owner:
            for i in range(20):
                await owner.schedule(b"%d" % i, to=f"kafka:{rights.name('target')}", delay="1s")
                await owner.schedule(b"x" * 5_000, to=f"kafka:{rights.name('target')}", delay="1s")
            assert await rights.arrived(20) == Counter(b"%d" % i for i in range(20))
            await until(lambda: has_ended(owner), "all has ended")
            assert (await owner.counts())["kafka"].dead == 20
    ends = told(caplog, "the session ends")  # it may, if the broker stands still
    assert not [text for text in ends if MessageSizeTooLargeError.__name__ in text], ends


async def has_ended(owner: Scheduler) -> bool:
    counts = (await owner.counts())["kafka"]
    return not counts.scheduled + counts.overdue + counts.in_flight


# --- transactions after a refusal -------------------------------------------------------------------------


@asynccontextmanager
async def transactions(cluster: Cluster, name: str) -> AsyncIterator[Transactions]:
    producer = Transactions(cluster, name)
    try:
        await producer.start()
        yield producer
    finally:
        await producer.close()


HUGE = b"x" * 1_500_000
"""More than a topic takes; a batch of it stands between others of its partition."""
FULL = b"y" * 500_000


@pytest.mark.parametrize("at", [0, 1, 2])
async def test_k7_a_producer_goes_on_after_a_refusal_and_writes_each_record_once(kafka: str, at: int) -> None:
    topic = await create_topic(kafka, new_name(), 2)
    async with transactions(read_url(kafka, "test"), new_name()) as producer:
        for turn in range(3):
            values = [FULL[: -turn - 1] + b"%d" % i for i in range(2)]
            mixed = [*values[:at], HUGE, *values[at:]]
            with pytest.raises(AbortedError) as caught:
                await producer.begin([Outgoing(topic, b"k", value, [], 0) for value in mixed])
            assert not producer.is_spent
            (refused,) = [each for each in caught.value.written if isinstance(each.error, MessageSizeTooLargeError)]
            assert refused.indices == [at]
            errors = {type(each.error) for each in caught.value.written}
            assert errors <= {type(None), MessageSizeTooLargeError, OutOfOrderSequenceNumber}
            await producer.begin([Outgoing(topic, b"k", b"%d.%d" % (turn, i), [], i) for i in (0, 0, 1)])
            await producer.commit()
    assert await arrived(kafka, topic, 9) == Counter({b"%d.%d" % (turn, i): 2 - i for turn in range(3) for i in (0, 1)})


async def test_f25_an_owner_that_was_fenced_while_a_record_was_refused_goes_on_no_more(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, name, cluster = await create_topic(kafka, new_name()), new_name(), read_url(kafka, "test")
    async with transactions(cluster, name) as former:
        abort = former._client.abort_transaction

        async def taken_over() -> None:
            async with transactions(cluster, name):
                await abort()

        monkeypatch.setattr(former._client, "abort_transaction", taken_over)
        with pytest.raises(FencedError):
            await former.begin([Outgoing(topic, b"k", HUGE, [])])
        assert former.is_spent
    assert await arrived(kafka, topic, 0) == Counter()


async def test_k28_a_record_that_its_topic_refuses_is_told_by_name(kafka: str) -> None:
    topic = await create_topic(kafka, new_name(), cleanup_policy="compact")
    async with transactions(read_url(kafka, "test"), new_name()) as producer:
        with pytest.raises(AbortedError) as caught:
            await producer.begin([Outgoing(topic, None, b"v", [])])
        assert [type(each.error) for each in caught.value.written] == [INVALID_RECORD]
