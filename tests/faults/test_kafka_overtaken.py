"""S4, S5 on Kafka: a change before the commit stops the delivery, although its transaction has begun."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import pytest
from aiokafka import AIOKafkaProducer

from aiodelay import Scheduler
from aiodelay.backends.kafka import KafkaStore, records
from aiodelay.backends.kafka.client import Outgoing, Transactions
from aiodelay.backends.kafka.store.partition.user_changes import MOST_OVERTAKEN
from tests.faults.test_kafka_refused import arrived
from tests.support.kafka import create_topic, new_name
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

Change = Callable[[], Awaitable[object]]


def once_begun(
    monkeypatch: pytest.MonkeyPatch,
    topic: str,
    value: bytes,
    *,
    before: Change | None = None,
    after: Change | None = None,
) -> list[int]:
    """Have something done before or after each writing of a record of this value, which is not committed then."""
    begin, times = Transactions.begin, list[int]()

    async def begun(self: Transactions, outgoing: Sequence[Outgoing]) -> list[int]:
        is_awaited = any((each.topic, each.value) == (topic, value) for each in outgoing)
        times.extend([len(outgoing)] * is_awaited)
        if is_awaited and before is not None:
            await before()
        offsets = await begin(self, outgoing)
        if is_awaited and after is not None:
            await after()
        return offsets

    monkeypatch.setattr(Transactions, "begin", begun)
    return times


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["replaced", "cancelled"])
@pytest.mark.parametrize("is_read", [False, True], ids=["unread", "read"])
async def test_s4_s5_what_was_changed_before_the_commit_does_not_go_out(
    kafka: str, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool, is_read: bool
) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    headers = [(records.EPOCH, b"0"), (records.TARGET_TOPIC, target.encode())]
    store = KafkaStore(f"kafka://{kafka}/{schedules}?create_topic=true&partitions=1")
    async with Scheduler(store) as scheduler, AIOKafkaProducer(bootstrap_servers=kafka) as user:

        async def change() -> None:
            value = None if is_cancelled else b"new"
            sent = await user.send_and_wait(schedules, value, key=b"m", headers=headers)
            if is_read:
                await next(iter(store.partitions.values())).until_read(sent.offset)

        times = once_begun(monkeypatch, target, b"old", **{"before" if is_read else "after": change})
        for i in range(20):
            await scheduler.schedule(b"%d" % i, to=f"kafka:{target}", delay="1s")
        await scheduler.schedule(b"old", to=f"kafka:{target}", delay="1s", id="m")
        expected = Counter(b"%d" % i for i in range(20)) + Counter([] if is_cancelled else [b"new"])
        assert await arrived(kafka, target, expected.total()) == expected
        await until(lambda: is_empty(scheduler), "nothing waits")
    assert len(times) == 1
    assert await arrived(kafka, target, expected.total()) == expected


async def test_l5_a_message_that_is_changed_each_time_holds_up_nobody(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change that changes nothing of when it is due is read, and the newest version begins a transaction again."""
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    headers = [(records.EPOCH, b"0"), (records.TARGET_TOPIC, target.encode())]
    async with (
        Scheduler(f"kafka://{kafka}/{schedules}?create_topic=true&partitions=1") as scheduler,
        AIOKafkaProducer(bootstrap_servers=kafka) as user,
    ):

        async def change() -> None:
            if len(times) < 10:
                await user.send_and_wait(schedules, b"hot", key=b"m", headers=headers)

        times = once_begun(monkeypatch, target, b"hot", after=change)
        await scheduler.schedule(b"hot", to=f"kafka:{target}", delay="1s", id="m")
        for i in range(20):
            await scheduler.schedule(b"%d" % i, to=f"kafka:{target}", delay="1s")
        await until(lambda: is_empty(scheduler), "nothing waits")
    found = await arrived(kafka, target, 21)
    assert found.pop(b"hot") <= 10 - MOST_OVERTAKEN
    assert found == Counter(b"%d" % i for i in range(20))
    assert await arrived(kafka, target, 21) >= found


async def is_empty(scheduler: Scheduler) -> bool:
    return not await scheduler.counts()
