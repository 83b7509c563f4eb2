"""Schedules topics: several topics in one process, and the error when a topic has changed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

from aiodelay import Alarm, CancelOutcome, FireOutcome, Scheduler
from aiodelay.backends.kafka import KafkaStore
from aiodelay.backends.kafka.store.assignment import reader
from aiodelay.backends.kafka.topics import topic_watch
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Cancel, Dead, Demand, Envelope, Put, Refused, Stored, WorkStatus
from aiodelay.engine import data_watch, housekeeping
from aiodelay.engine.sending import command_sender
from aiodelay.errors import (
    AiodelayError,
    StoreMismatchError,
    StoreUnavailableError,
    TargetNotAllowedError,
    UnsupportedByStoreError,
)
from aiodelay.testing.clock import VirtualClock
from tests.support.kafka import create_topic, new_name
from tests.support.slow_stores import opened_patiently
from tests.support.topics import delete_topic
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

HOUR = After(3_600_000)


def url_of(bootstrap: str, *topics: str, options: str = "") -> str:
    return f"kafka://{bootstrap}/{','.join(topics)}?create_topic=true&partitions=2{options}"


def put(message_id: str, payload: bytes, due: After = HOUR, topic: str = "t") -> Put:
    return Put(new_op(), Envelope(message_id, "kafka", topic, payload=payload), due)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[KafkaStore]:
    async with opened_patiently(lambda: KafkaStore(url)) as store, store.work("w", []):
        yield store


@asynccontextmanager
async def admin_of(bootstrap: str) -> AsyncIterator[Any]:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


async def grow(bootstrap: str, topic: str, partitions: int) -> None:
    async with admin_of(bootstrap) as admin:
        await admin.create_partitions({topic: NewPartitions(partitions)})

        async def has_grown() -> bool:
            return len((await admin.describe_topics([topic]))[0]["partitions"]) == partitions

        await until(has_grown, f"{topic} has {partitions} partitions")


async def payload_of(store: KafkaStore, message_id: str) -> bytes | None:
    found = await store.get(message_id)
    return None if found is None else found.record.envelope.payload


async def values(bootstrap: str, topic: str, n: int) -> Counter[bytes]:
    options = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
    async with AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, **options) as consumer:
        return Counter([(await consumer.getone()).value for _ in range(n)])


# --- several ----------------------------------------------------------------------------------------------


async def test_one_process_delivers_the_schedules_of_several_topics(kafka: str) -> None:
    first, second = new_name("first"), new_name("second")
    target = await create_topic(kafka, new_name())
    for topic in (first, second):  # the same ids in both, by processes that know of one topic only
        async with Scheduler(url_of(kafka, topic), dispatch=False) as producer:
            for i in range(20):
                await producer.schedule(f"{topic} {i}".encode(), to=f"kafka:{target}", delay="1s", id=f"m{i}")
    async with Scheduler(url_of(kafka, first, second)):
        found = await values(kafka, target, 40)
    assert found == Counter(f"{topic} {i}".encode() for topic in (first, second) for i in range(20))


async def test_a_message_is_found_in_the_first_topic_that_holds_it(kafka: str) -> None:
    first, second = new_name("first"), new_name("second")
    async with opened(url_of(kafka, second)) as store:
        await store.apply([put("both", b"second"), put("other", b"second")])
    store = KafkaStore(url_of(kafka, first, second))
    async with Scheduler(store) as scheduler:
        await store.apply([put("both", b"first")])
        assert (await payload_of(store, "both"), await payload_of(store, "other")) == (b"first", b"second")
        assert (await store.counts())["kafka"].scheduled == 3
        assert await scheduler.cancel("both") is CancelOutcome.CANCELLED
        assert await payload_of(store, "both") == b"second"
        assert await scheduler.fire("other") is FireOutcome.FIRED
        cancel = Cancel(new_op(), "both")
        answers = [await store.apply([cancel]), await store.apply([cancel])]  # as after a lost answer
        assert answers[0] == answers[1]
        assert isinstance(answers[0][0], Stored)
        assert await scheduler.cancel("both") is CancelOutcome.NOT_FOUND


async def test_claims_and_dead_letters_of_one_id_in_two_topics_are_kept_apart(kafka: str) -> None:
    topics, clock = [new_name("first"), new_name("second")], VirtualClock()
    for topic in topics:
        async with KafkaStore(url_of(kafka, topic), clock=clock) as store, store.work("w", []):
            await store.apply([put("m", topic.encode(), After(0))])
        clock.move(1)
    async with KafkaStore(url_of(kafka, *topics), clock=clock) as store, store.work("w", ["kafka"]) as work:
        claims = (await work.claim({"kafka": Demand(2)}, request="1", lease_ms=15_000)).claims
        assert len({claim.token for claim in claims}) == 2
        ended = [Dead("m", each.record.revision, each.token, "rejected", 1) for each in claims]
        assert [each.value for each in await work.settle(ended)] == ["settled", "settled"]
        letters = await store.dead_letters()
        assert {letter.record.envelope.payload for letter in letters} == {topic.encode() for topic in topics}
        second = next(each for each in letters if each.record.envelope.payload == topics[1].encode())
        (outcome,) = await store.redrive([second.key])
        assert isinstance(outcome, Stored)
        assert await payload_of(store, "m") == topics[1].encode()
        assert [each.record.envelope.payload for each in await store.dead_letters()] == [topics[0].encode()]
        assert await store.purge([letter.key for letter in letters]) == 1


@pytest.mark.parametrize("path", ["a,a", "a,", ",", "a/b", "a,b c", ""])
async def test_topics_that_cannot_be_are_refused(path: str) -> None:
    with pytest.raises(AiodelayError, match=r"kafka://|topic"):
        KafkaStore(f"kafka://localhost/{path}")


async def test_a_message_to_a_schedules_topic_of_its_own_is_refused(kafka: str) -> None:
    first, second = new_name("first"), new_name("second")
    async with Scheduler(url_of(kafka, first, second)) as scheduler:
        for topic in (first, second):
            with pytest.raises(TargetNotAllowedError, match="would become a schedule again"):
                await scheduler.schedule(b"", to=f"kafka:{topic}", delay="1h")


# --- a topic that is not what it was ----------------------------------------------------------------------


async def test_f32_partitions_added_between_runs_are_refused_until_they_are_accepted(kafka: str) -> None:
    topic = new_name("schedules")
    async with opened(url_of(kafka, topic)) as store:
        await store.apply([put(f"m{i}", b"") for i in range(8)])
    await grow(kafka, topic, 3)
    for _ in range(2):  # it is not forgotten
        with pytest.raises(
            StoreMismatchError, match=r"divided into 3 partitions, instead of 2.*accept_partitions=3"
        ) as caught:
            async with opened(url_of(kafka, topic)):
                pass
        assert topic in str(caught.value)
    with pytest.raises(StoreMismatchError):
        async with opened(url_of(kafka, topic, options="&accept_partitions=4")):
            pass
    for options in ("&accept_partitions=3", ""):
        async with opened(url_of(kafka, topic, options=options)) as store:
            assert (await store.counts())["kafka"].scheduled == 8


async def test_f32_partitions_added_while_running_end_delivery_loudly(
    kafka: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reader, "METADATA_MS", 200)
    monkeypatch.setattr("aiodelay.backends.kafka.store.store.METADATA_MS", 200)
    topic = new_name("schedules")
    async with (
        KafkaStore(url_of(kafka, topic)) as store,
        store.work("w", ["kafka"]) as work,
        KafkaStore(url_of(kafka, topic)) as producer,
    ):
        assert isinstance((await producer.apply([put("m", b"")]))[0], Stored)
        await grow(kafka, topic, 3)
        async with asyncio.timeout(60):
            while work.status().phase != "ended":  # noqa: ASYNC110 - as a user would look
                await asyncio.sleep(0.01)
        assert "divided into 3 partitions, instead of 2" in work.status().why
        for each in (store, producer):
            async with asyncio.timeout(60):
                while not isinstance(outcome := (await each.apply([put("n", b"")]))[0], Refused):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert (outcome.reason, "accept_partitions=3" in outcome.detail) == ("unavailable", True)
    assert [each.levelname for each in caplog.records if "accept_partitions=3" in each.message] == ["ERROR", "ERROR"]


@pytest.mark.parametrize("shares", ["", "&members=1"], ids=["group", "by number"])
async def test_f31_a_topic_deleted_under_its_owner_ends_delivery_loudly_whoever_makes_it_anew(
    kafka: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, shares: str
) -> None:
    monkeypatch.setattr(housekeeping, "STEP_S", 0.2)
    topic, target, alarms = new_name("schedules"), await create_topic(kafka, new_name()), list[Alarm]()
    url = url_of(kafka, topic, options=f"{shares}&timeout_ms=3000")
    async with Scheduler(url, on_alarm=alarms.append) as scheduler:
        for i in range(8):
            await scheduler.schedule(b"lost", to=f"kafka:{target}", delay="1h", id=f"m{i}")
        await asyncio.to_thread(delete_topic, kafka, topic)
        found = [scheduler.status()]
        async with asyncio.timeout(60):
            while found[-1].phase != "ended":
                await asyncio.sleep(0.01)  # as a user would look
                found.append(scheduler.status())
        assert WorkStatus("ready", 0, 0) not in found
        why = scheduler.status().why
        assert f"topic {topic} is deleted" in why
        await until(lambda: alarms, "the alarm")
        async with Scheduler(url_of(kafka, topic, options=shares)) as other:  # which finds it missing, and makes it
            assert await other.counts() == {}
            await other.schedule(b"new", to=f"kafka:{target}", delay="1ms")
            assert await values(kafka, target, 1) == Counter([b"new"])
            for refused in (scheduler.schedule(b"m", to=f"kafka:{target}", delay="1h"), scheduler.counts()):
                with pytest.raises(StoreUnavailableError, match=f"topic {topic} is deleted"):
                    await refused
        assert (scheduler.status().phase, scheduler.status().why) == ("ended", why)
    assert alarms == [Alarm("ended", "", 0, reason=why)]
    told = [each for each in caplog.records if each.name == "aiodelay.kafka" and why in each.message]
    assert [each.levelname for each in told] == ["ERROR"]
    assert len([each for each in caplog.records if "the session ends" in each.message]) < 20


async def test_f31_a_process_that_only_schedules_notices_too_and_stores_nothing_in_another_topic(
    kafka: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(data_watch, "CHECK_S", 0.1)
    topic, target, alarms = new_name("schedules"), await create_topic(kafka, new_name()), list[Alarm]()
    url = url_of(kafka, topic, options="&timeout_ms=60000")
    async with Scheduler(url, dispatch=False, on_alarm=alarms.append, store_timeout="60s") as producer:
        await producer.schedule(b"lost", to=f"kafka:{target}", delay="1h")
        await asyncio.to_thread(delete_topic, kafka, topic)
        await until(lambda: alarms, "the alarm")
        assert alarms[0].kind == "vanished"
        assert f"topic {topic} is deleted" in alarms[0].reason
        assert producer.status().why == alarms[0].reason
        monkeypatch.setattr(command_sender, "LAST_REPEAT_MS", 1000)
        async with Scheduler(url, dispatch=False):  # makes another topic of that name
            with pytest.raises(StoreUnavailableError, match=f"topic {topic} is deleted"):
                await producer.schedule(b"m", to=f"kafka:{target}", delay="1h")
    assert next(each.levelname for each in caplog.records if f"topic {topic} is deleted" in each.message) == "ERROR"


async def test_f32_a_topic_deleted_and_made_anew_between_two_looks_is_told_apart(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_watch, "MISSING_S", 1000.0)
    topic = new_name("schedules")
    async with KafkaStore(url_of(kafka, topic)) as store, store.work("w", ["kafka"]) as work:
        await store.apply([put(f"m{i}", b"") for i in range(8)])
        await asyncio.to_thread(delete_topic, kafka, topic)
        async with KafkaStore(url_of(kafka, topic)) as new:
            await new.apply([put(f"n{i}", b"") for i in range(80)])
        await until(lambda: work.status().phase == "ended", "the owner has noticed")
        assert "deleted" in work.status().why

        async def is_refused() -> bool:
            (outcome,) = await store.apply([put("n0", b"")])
            assert not isinstance(outcome, Stored)
            return isinstance(outcome, Refused)

        await until(is_refused, "each partition has noticed")
    async with opened(url_of(kafka, topic)) as store:
        assert (await store.counts())["kafka"].scheduled == 80


async def test_a_process_that_others_leave_no_partition_is_ready_while_the_topic_is_there(kafka: str) -> None:
    topic = new_name("schedules")
    url = f"kafka://{kafka}/{topic}?create_topic=true&partitions=1"
    async with (
        KafkaStore(url) as one,
        one.work("one", []) as first,
        KafkaStore(url) as two,
        two.work("two", []) as second,
    ):

        def found() -> list[WorkStatus]:
            return sorted((first.status(), second.status()), key=lambda each: each.of)

        await until(lambda: found() == [WorkStatus("ready", 0, 0), WorkStatus("ready", 1, 1)], "both are ready")
        await asyncio.to_thread(delete_topic, kafka, topic)
        await until(lambda: [each.phase for each in found()] == ["ended", "ended"], "both have ended")


# --- holds ------------------------------------------------------------------------------------------------


async def test_what_one_process_holds_is_held_by_all_of_every_topic(kafka: str) -> None:
    topics, target = [new_name("first"), new_name("second")], await create_topic(kafka, new_name())
    members = [url_of(kafka, *topics, options=f"&members=2&member={member}") for member in (0, 1)]
    async with opened(members[0]) as one, opened(members[1]) as other:
        assert await one.pause("kafka", target)
        async with asyncio.timeout(60):
            while not await other.paused():  # noqa: ASYNC110 - as a user would look
                await asyncio.sleep(0.01)
        assert not await other.pause("kafka", target)
        for topic in topics:
            async with KafkaStore(url_of(kafka, topic)) as producer:
                await producer.apply([put(f"m{i}", b"%d" % i, After(0), target) for i in range(20)])
        async with asyncio.timeout(60):
            while await held_in(one) + await held_in(other) < 40:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for store in (one, other):
            with store.transferring(store.sinks[0]) as moves:
                assert (await moves.transfer(Demand(500))).moved == 0
    async with Scheduler(url_of(kafka, *topics)) as scheduler:  # as long as nobody releases it
        assert await scheduler.paused() == [f"kafka:{target}"]
        await asyncio.sleep(0.5)  # nothing may be delivered
        assert await scheduler.cancel("m7") is CancelOutcome.CANCELLED
        await scheduler.resume(f"kafka:{target}")
        found = await values(kafka, target, 39)
    assert found == Counter({b"%d" % i: 2 - (i == 7) for i in range(20)})


async def held_in(store: KafkaStore) -> int:
    counts = (await store.counts()).get("kafka")
    return 0 if counts is None else counts.held


async def test_holding_is_said_to_have_failed_where_it_may_have(kafka: str) -> None:
    topic = new_name("schedules")
    async with KafkaStore(url_of(kafka, topic)) as producer:
        with pytest.raises(UnsupportedByStoreError):
            await producer.pause("kafka")
    async with opened(url_of(kafka, topic, options="&timeout_ms=1000")) as store:
        await asyncio.to_thread(delete_topic, kafka, topic)
        with pytest.raises(StoreUnavailableError, match=r"the pause may be missing in some or all|is deleted"):
            await store.pause("kafka")


async def test_an_address_that_was_blocked_does_not_bring_back_what_was_cancelled_meanwhile(kafka: str) -> None:
    target = new_name()
    async with Scheduler(url_of(kafka, new_name("schedules"))) as scheduler:
        for message_id in ("a", "b"):
            await scheduler.schedule(message_id.encode(), to=f"kafka:{target}", delay="1ms", id=message_id)
        async with asyncio.timeout(60):
            while not (blocked := await scheduler.blocked()) or blocked[0].messages < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await scheduler.cancel("a") is CancelOutcome.CANCELLED
        await create_topic(kafka, target)
        assert await values(kafka, target, 1) == Counter([b"b"])
        async with asyncio.timeout(60):
            while await scheduler.counts():  # noqa: ASYNC110 - until its end has been read
                await asyncio.sleep(0.01)
