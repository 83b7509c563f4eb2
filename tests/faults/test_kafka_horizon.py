"""Messages beyond the horizon, of which an owner keeps little in memory, are loaded in time, changed or not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiokafka import AIOKafkaProducer
from msgspec.structs import replace

from aiodelay.backends.kafka import KafkaStore
from aiodelay.backends.kafka.pending import paced_lanes
from aiodelay.backends.kafka.pending.pending_index import PendingIndex
from aiodelay.backends.kafka.pending.rate_limit import RateLimit
from aiodelay.backends.kafka.store.assignment import look_ahead
from aiodelay.backends.kafka.store.partition.horizon import Horizon
from aiodelay.core.ids import new_op
from aiodelay.core.values import At, Cancel, Conflict, Fire, Late, Query, Refused, Reschedule, State, Stored
from aiodelay.ports.clock import SystemClock
from tests.support.kafka import create_topic, new_name, read
from tests.support.waiting import until

from .test_kafka_index import StandingClock
from .test_kafka_store import ALL, PlainClient, moved, now_ms, put, transfer

pytestmark = pytest.mark.asyncio

FAR_MS = 3_600_000


@pytest.fixture(autouse=True)
def _it_looks_ahead_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_ahead, "LOOK_AHEAD_S", 0.05)


@asynccontextmanager
async def opened(
    kafka: str, schedules: str, options: str = "horizon=2s", clock: SystemClock | None = None
) -> AsyncIterator[KafkaStore]:
    url = f"kafka://{kafka}/{schedules}?create_topic=true&partitions=1&{options}"
    async with KafkaStore(url, clock=clock) as store, store.work("w", ["kafka"]):
        yield store


def index_of(store: KafkaStore) -> PendingIndex:
    (partition,) = store.partitions.values()
    return partition.index


async def test_what_is_far_comes_near_and_is_delivered_in_time_live_and_after_a_restart(kafka: str) -> None:
    schedules, target, clock = new_name("schedules"), await create_topic(kafka, new_name()), StandingClock()
    due = clock.at_ms + 10_000
    async with opened(kafka, schedules, clock=clock) as store:
        await store.apply([put(i, target, due) for i in range(300)])
        assert (len(index_of(store).state.far), index_of(store).table.entries) == (300, {})
    async with opened(kafka, schedules, clock=clock) as store:
        assert (len(index_of(store).state.far), index_of(store).table.entries) == (300, {})
        assert index_of(store).state.standings == {}
        for before_ms in (2_500, 1_500, 1):
            clock.at_ms = due - before_ms
            assert await transfer(store, ALL) == 0
            if before_ms == 1_500:
                await until(lambda: len(index_of(store).table.entries) == 300, "all have come near")
        clock.at_ms = due
        await moved(store, 300)
        assert await store.counts() == {}
    assert sorted(int(record.value) for record in await read(kafka, target, 300)) == list(range(300))


async def test_what_is_far_is_replaced_cancelled_moved_and_fired_as_what_is_near(kafka: str) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    far = now_ms() + FAR_MS
    async with opened(kafka, schedules) as store:
        await store.apply([put(i, target, far) for i in range(8)])
        assert len(index_of(store).state.far) == 8
        client = PlainClient(kafka, schedules)
        client.schedule(b"m0", b"replaced", 1, target)
        client.cancel(b"m1")
        client.schedule(b"m2", b"far again", far // 1000 + 60, target)
        cancelled, moved_, fired = await store.apply(
            [Cancel(new_op(), "m3"), Reschedule(new_op(), "m4", At(now_ms())), Fire(new_op(), "m5")]
        )
        assert isinstance(cancelled, Stored)
        assert [each.answer for each in (cancelled, moved_, fired) if isinstance(each, Stored)] == [
            "cancelled",
            "rescheduled",
            "fired",
        ]
        await moved(store, 3)
        async with asyncio.timeout(60):
            while await store.get("m1") is not None:  # noqa: ASYNC110 - as a user would look
                await asyncio.sleep(0.01)
        assert (await store.counts())["kafka"].scheduled == 3
        left = await store.search(Query())
        assert {each.record.id for each in left} == {"m2", "m6", "m7"}
    async with opened(kafka, schedules) as store:
        assert [each.record for each in await store.search(Query())] == [each.record for each in left]
        assert (found := await store.get("m2")) is not None
        assert (found.record.envelope.payload, found.state) == (b"far again", State.SCHEDULED)
    assert {record.value for record in await read(kafka, target)} == {b"replaced", b"4", b"5"}


async def test_k24_to_look_at_what_is_far_keeps_nobody_waiting(kafka: str) -> None:
    schedules, far = new_name("schedules"), now_ms() + FAR_MS
    async with opened(kafka, schedules, "horizon=2s&timeout_ms=60000") as store:
        await store.apply([put(i, "t", far) for i in range(1000)])
        again = [replace(put(i, "t", far), conflict=Conflict("error")) for i in range(1000)]
        assert len(index_of(store).state.far) == 1000
        assert {each.reason if isinstance(each, Refused) else each for each in await store.apply(again)} == {
            "duplicate"
        }


async def test_what_a_command_needs_is_not_put_off_again_before_the_command_has_seen_it(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All calls that wait for one read go on together, before messages without need are put off."""
    bring, reads = Horizon._bring, 0

    async def brought(self: Horizon, index: PendingIndex, offsets: Sequence[int]) -> None:
        nonlocal reads
        await bring(self, index, offsets)
        reads += 1
        if reads < 20:  # as when every look ahead comes at the worst moment
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, index.far.put_off)

    monkeypatch.setattr(Horizon, "_bring", brought)
    schedules, far = new_name("schedules"), now_ms() + FAR_MS
    async with opened(kafka, schedules) as store:
        await store.apply([put(i, "t", far) for i in range(50)])
        outcomes = await store.apply([replace(put(i, "t", far), conflict=Conflict("error")) for i in range(50)])
        assert {each.reason for each in outcomes if isinstance(each, Refused)} == {"duplicate"}
        assert reads <= 3


async def test_what_is_far_and_cannot_be_decoded_is_asked_for_and_becomes_a_dead_letter(kafka: str) -> None:
    schedules, due_s = new_name("schedules"), (now_ms() + FAR_MS) // 1000
    async with opened(kafka, schedules) as store, AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        headers = [("scheduler-epoch", b"%d" % due_s), ("scheduler-target-topic", b"no topic!")]
        await producer.send_and_wait(schedules, b"x", b"bad", headers=headers)
        async with asyncio.timeout(60):
            while not index_of(store).state.far:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.05)
            assert await store.get("bad") is None
            while not (letters := await store.dead_letters()):  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.05)
        assert [each.record.id for each in letters] == ["bad"]


async def test_what_is_far_is_counted_and_listed_in_order_with_what_is_near(kafka: str) -> None:
    schedules, now = new_name("schedules"), now_ms()
    async with opened(kafka, schedules) as store:
        await store.apply([put(i, "t", now + 60_000 * (i // 3)) for i in range(30)])
        assert 0 < len(index_of(store).table.entries) < 30 > len(index_of(store).state.far) > 0
        assert sum(each.scheduled + each.overdue for each in (await store.counts()).values()) == 30
        ahead = await store.load(bucket_ms=300_000, buckets=2)
        assert [each.messages for each in ahead] == [15, 12]
        expected = sorted((now + 60_000 * (i // 3), f"m{i}") for i in range(30))
        found: list[tuple[int, str]] = []
        while page := await store.search(Query(limit=7, after=found[-1] if found else None)):
            found += [(each.next_attempt_ms, each.record.id) for each in page]
        assert found == expected
        assert [each.record.id for each in await store.search(Query(from_ms=now + 60_000, to_ms=now + 60_001))] == [
            "m3",
            "m4",
            "m5",
        ]
        assert await store.search(Query(lanes=("other",))) == []


async def test_what_is_whole_without_need_is_put_off_and_comes_back(kafka: str) -> None:
    schedules = new_name("schedules")
    async with opened(kafka, schedules) as store:
        await store.apply([put(1, "t", now_ms()), put(2, "t", now_ms() + FAR_MS)])
        (moved_,) = await store.apply([Reschedule(new_op(), "m1", At(now_ms() + FAR_MS))])
        assert isinstance(moved_, Stored)
        whole = await store.get("m1")
        async with asyncio.timeout(60):
            while len(index_of(store).state.far) < 2:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.05)
        assert await store.get("m1") == whole
        assert await store.apply([Cancel(new_op(), "m1"), Cancel(new_op(), "m1")]) != []
        assert await store.get("m1") is None
        assert (await store.counts())["kafka"].scheduled == 1


async def is_last(kafka: str, schedules: str, value: bytes) -> bool:
    return [each.value for each in await read(kafka, schedules) if each.key == b"m"][-1:] == [value]


async def test_f28_what_is_far_and_hidden_from_the_cleaner_is_written_again(kafka: str) -> None:
    schedules = new_name("schedules")
    far = [("scheduler-epoch", b"4000000000"), ("scheduler-target-topic", b"t")]
    async with opened(kafka, schedules), AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        new = await producer.send_and_wait(schedules, b"new", b"m", headers=far)
        await producer.send_and_wait(schedules, None, b"m", headers=[("aiodelay-from", b"%d" % new.offset)])
        await until(lambda: is_last(kafka, schedules, b"new"), "it is written again")
    async with opened(kafka, schedules) as store:
        assert (found := await store.get("m")) is not None
        assert found.record.envelope.payload == b"new"


async def test_what_is_wrong_inside_is_found_when_it_comes_near(kafka: str) -> None:
    schedules = new_name("schedules")
    async with opened(kafka, schedules) as store, AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        due = b"%d" % (now_ms() // 1000 + 4)
        bad = [("scheduler-epoch", due), ("scheduler-target-topic", b"t"), ("aiodelay-encoding", b"?")]
        await producer.send_and_wait(schedules, b"x", b"bad", headers=bad)
        async with asyncio.timeout(60):
            while not (letters := await store.dead_letters()):  # noqa: ASYNC110 - as a user would look
                await asyncio.sleep(0.05)
    assert [(each.record.id, each.reason) for each in letters] == [("bad", "undecodable")]


async def test_r1_more_than_max_pending_is_refused_and_told(kafka: str, caplog: pytest.LogCaptureFixture) -> None:
    schedules, far = new_name("schedules"), now_ms() + FAR_MS
    async with opened(kafka, schedules, "max_pending=3") as store:
        outcomes = await store.apply([put(i, "t", far) for i in range(3)])
        assert all(isinstance(each, Stored) for each in outcomes)
        refused, replaced = await store.apply([put(3, "t", far), put(1, "t", far + 1)])
        assert isinstance(refused, Refused)
        assert refused.reason == "full"
        assert "max_pending=3 allows no more" in refused.detail
        assert isinstance(replaced, Stored)
        await store.apply([Cancel(new_op(), "m0")])
        (stored,) = await store.apply([put(3, "t", far)])
        assert isinstance(stored, Stored)
    with caplog.at_level(logging.ERROR):
        PlainClient(kafka, schedules).schedule(b"m9", b"", far // 1000, "t")
        async with opened(kafka, schedules, "max_pending=3") as store, store.work("w", ["kafka"]) as work:
            assert len(await store.search(Query())) == 4
            assert "max_pending=3" in work.status().why
            async with asyncio.timeout(60):
                while "4 messages are pending, and max_pending=3" not in caplog.text:  # noqa: ASYNC110 - nothing tells
                    await asyncio.sleep(0.05)


@pytest.mark.parametrize("restarts", [False, True], ids=["live", "after a restart"])
async def test_what_is_overdue_leaves_oldest_first_at_its_pace_and_holds_up_nothing_else(
    kafka: str, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    monkeypatch.setattr(paced_lanes, "OVERDUE_MS", 30_000)
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(opened(kafka, schedules, "catch_up=40"))
        since = now_ms() - 60_000
        overdue = [put(i, target, since - 10 * (i * 7 % 100)) for i in range(100)]
        dropped = replace(put(500, target, since), late=Late.drop(after="1s"))
        await store.apply([*overdue, dropped])
        if restarts:
            await stack.aclose()
            store = await stack.enter_async_context(opened(kafka, schedules, "catch_up=40"))
        began = time.monotonic()
        first = await transfer(store, ALL)
        assert first <= 5
        await store.apply([put(1000, target, now_ms())])
        then = await transfer(store, ALL)
        assert then >= 1
        assert any(record.value == b"1000" for record in await read(kafka, target, first + then))
        async with asyncio.timeout(60):
            while await store.counts():
                await transfer(store, ALL)
                await asyncio.sleep(0.02)
        assert time.monotonic() - began > 100 / 40 - 0.2
    found = [int(record.value) for record in await read(kafka, target, 101)]
    found.remove(1000)
    assert found == sorted(range(100), key=lambda i: -(i * 7 % 100))


async def test_a_pace_is_kept_whatever_the_clock_does() -> None:
    pace = RateLimit(1000)
    pace.take(5000)
    assert [pace.take(5000 + 10 * i) for i in range(1, 4)] == [10, 10, 10]
    pace.give_back(4)
    assert pace.take(5030) == 4
    assert pace.take(4000) == 0
    assert pace.take(4010) == 10
    assert pace.take(9_000_000) == 100
    slow = RateLimit(2)
    slow.take(0)
    assert sum(slow.take(10 * i) for i in range(1, 301)) in (6, 7)
