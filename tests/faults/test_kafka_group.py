"""Kafka processes in a group: members join and leave, and each continues with the claims that it still has."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from aiokafka import AIOKafkaProducer
from msgspec.structs import replace

from aiodelay import Conflict, Context, Every, RescheduleOutcome, Scheduler, event
from aiodelay.backends.kafka import KafkaStore
from aiodelay.backends.kafka.pending.repairs import Repairs
from aiodelay.backends.kafka.store.assignment.readiness import Readiness
from aiodelay.backends.kafka.store.partition import Partition, stall_watch
from aiodelay.backends.kafka.topics import group
from aiodelay.backends.kafka.topics.group import SESSION_MS
from aiodelay.core.ids import new_op
from aiodelay.core.values import (
    After,
    Cancel,
    Demand,
    Done,
    Envelope,
    Put,
    Renewal,
    RenewOutcome,
    SettleOutcome,
    Stored,
)
from aiodelay.errors import ClosedError, StoreUnavailableError, UnsupportedByStoreError
from aiodelay.kafka.records import Read, partition_of
from aiodelay.ports import Work
from tests.faults.test_kafka_members import deliver, values
from tests.support.kafka import create_topic, ids_in, new_name, read
from tests.support.slow_stores import opened_patiently
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio


@event("tick")
class Tick(msgspec.Struct):
    pass


@pytest_asyncio.fixture(autouse=True)
async def _nothing_is_left() -> AsyncIterator[None]:
    yield
    assert asyncio.all_tasks() == {asyncio.current_task()}


@asynccontextmanager
async def member(url: str) -> AsyncIterator[tuple[KafkaStore, Work]]:
    async with opened_patiently(lambda: KafkaStore(url)) as store, store.work("w", []) as work:
        yield store, work


async def shared(*stores: KafkaStore, n: int) -> None:
    """Wait until some processes own so many partitions, each one of them, and all are ready."""
    async with asyncio.timeout(60):
        while True:
            owned = [place.partition for store in stores for place in store.partitions]
            if sorted(owned) == list(range(n)) and all(each.is_ready for s in stores for each in s.partitions.values()):
                return
            await asyncio.sleep(0.02)


async def test_s7_a_group_shares_the_partitions_anew_and_those_that_stay_are_not_disturbed(kafka: str) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=6"
    target = await create_topic(kafka, new_name())
    puts = [Put(new_op(), Envelope(f"m{i}", "kafka", target, payload=b"%d" % i), After(5 * i)) for i in range(600)]
    async with AsyncExitStack() as stack:
        first, _ = await stack.enter_async_context(member(url))
        assert len(first.partitions) == 6
        assert all(isinstance(each, Stored) for each in await first.apply(puts))
        tasks = [asyncio.create_task(deliver(first))]
        before = {place: (each, each.session.barrier) for place, each in first.partitions.items()}
        async with member(url) as (second, _):
            tasks.append(asyncio.create_task(deliver(second)))
            await shared(first, second, n=6)
            assert len(second.partitions) == 3
            stayed = {place: (each, each.session.barrier) for place, each in first.partitions.items()}
            assert stayed.items() <= before.items()
            await asyncio.sleep(0.5)  # so long both deliver
            tasks.pop().cancel()
        await shared(first, n=6)
        kept = {place: each for place, (each, _) in stayed.items()}
        assert kept.items() <= first.partitions.items()
        found = await values(kafka, target, len(puts))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert found == Counter(b"%d" % i for i in range(len(puts)))


async def test_s7_what_a_former_owner_still_has_in_its_hands_is_lost_to_it(kafka: str) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=2"
    async with member(url) as (first, work):
        puts = [Put(new_op(), Envelope(f"m{i}", "h"), After(0)) for i in range(20)]
        await first.apply(puts)
        claims = (await work.claim({"h": Demand(100)}, request="r", lease_ms=60_000)).claims
        assert len(claims) == 20
        async with member(url) as (second, other):
            await shared(first, second, n=2)
            lost = [each for each in claims if second._parts.lookup.partitions_of(each.record.id)]
            kept = [each for each in claims if first._parts.lookup.partitions_of(each.record.id)]
            assert len(lost) + len(kept) == 20
            taken = (await other.claim({"h": Demand(100)}, request="r", lease_ms=60_000)).claims
            assert {each.record.id for each in taken} == {each.record.id for each in lost}
            renewals = [Renewal(each.record.id, each.record.revision, each.token, each.token + 1) for each in claims]
            outcomes = dict(zip(renewals, await work.renew(renewals), strict=True))
            assert {each.id for each, outcome in outcomes.items() if outcome is RenewOutcome.LOST} == {
                each.record.id for each in lost
            }
            done = [Done(each.record.id, each.record.revision, each.token) for each in lost]
            assert await work.settle(done) == [SettleOutcome.GONE] * len(lost)
            assert await other.settle([Done(each.record.id, each.record.revision, each.token) for each in taken]) == [
                SettleOutcome.SETTLED
            ] * len(taken)


async def test_one_of_several_has_no_verdicts_and_the_only_one_has(kafka: str) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=2"
    async with member(url) as (first, _):
        await first.apply([Put(new_op(), Envelope("m", "kafka", "t"), After(3_600_000))])
        assert (first.traits.cancel, first.traits.changes) == ("verdict", True)
        async with member(url) as (second, _):
            await shared(first, second, n=2)
            for store in (first, second):
                assert (store.traits.cancel, store.traits.changes) == ("recorded", False)
            owner, other = (first, second) if first._parts.lookup.partitions_of("m") else (second, first)
            assert await owner.get("m") is not None
            with pytest.raises(UnsupportedByStoreError, match="partition"):
                await other.get("m")
            (answer,) = await other.apply([Cancel(new_op(), "m")])
            assert isinstance(answer, Stored)
            assert answer.answer == "recorded"
            async with asyncio.timeout(60):
                while await owner.get("m") is not None:  # noqa: ASYNC110 - as a user would look
                    await asyncio.sleep(0.01)
        await shared(first, n=2)
        assert first.traits.cancel == "verdict"


def keep(payload: bytes, delay_ms: int = 3_600_000) -> Put:
    return Put(new_op(), Envelope("m", "kafka", "t", payload=payload), After(delay_ms), conflict=Conflict.keep())


async def comes_to_hold(store: KafkaStore, payload: bytes) -> None:
    """Return once `m` has this payload."""
    async with asyncio.timeout(60):
        while (found := await store.get("m")) is None or found.record.envelope.payload != payload:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def has_read_on(owner: KafkaStore, producer: KafkaStore) -> None:
    """Return once the owner of `m` has decided what has been written of it, and has read a later message."""
    later = ids_in(partition_of(b"m", 2), 2, prefix=new_name())[0]
    await producer.apply([Put(new_op(), Envelope(later, "kafka", "t"), After(3_600_000))])
    await until(lambda: owner.get(later), "the owner has read the later message")
    await asyncio.sleep(0.2)  # nothing tells that there was nothing to decide


async def test_what_only_an_owner_may_do_is_refused_for_a_while_until_it_owns(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=2&timeout_ms=60000"
    may_join, be_member, until_ready = asyncio.Event(), group.Group._be_member, Readiness.until_ready

    async def late(self: group.Group) -> None:  # as in a group that waits for a killed member's session to end
        await may_join.wait()
        await be_member(self)

    async def soon(self: Readiness) -> None:  # only here the time limit is short
        self._cluster = replace(self._cluster, timeout_ms=200)
        await until_ready(self)

    monkeypatch.setattr(group.Group, "_be_member", late)
    monkeypatch.setattr(Readiness, "until_ready", soon)
    scheduler = Scheduler(url, store_timeout="60s")
    for command in (scheduler.fire("a"), scheduler.reschedule("a", delay="1h")):
        with pytest.raises(ClosedError):
            await command
    async with Scheduler(url, dispatch=False, store_timeout="60s") as producer:
        await producer.schedule(b"", to="handler:nobody", delay="1h", id="a")
        with pytest.raises(UnsupportedByStoreError):
            await producer.fire("a")
    async with scheduler:
        assert scheduler.status().phase == "loading"
        for command in (scheduler.fire("a"), scheduler.reschedule("a", delay="1h")):
            with pytest.raises(StoreUnavailableError, match="being opened"):
                await command
        may_join.set()
        await until(lambda: scheduler.status().phase != "loading", "it owns the partitions", timeout_s=120)
        assert await scheduler.reschedule("a", delay="2h") is RescheduleOutcome.RESCHEDULED


async def test_a_put_that_gives_way_is_decided_by_the_owner(kafka: str) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=2"
    async with KafkaStore(url) as producer, member(url) as (first, _):
        async with member(url) as (second, _):
            await shared(first, second, n=2)
            owner, other = (first, second) if first._parts.lookup.partitions_of("m") else (second, first)
            assert isinstance((await other.apply([keep(b"1")]))[0], Stored)
            await comes_to_hold(owner, b"1")
            for store in (other, producer, owner):
                assert isinstance((await store.apply([keep(b"2")]))[0], Stored)
            await has_read_on(owner, producer)
            await comes_to_hold(owner, b"1")
            await other.apply([Cancel(new_op(), "m"), keep(b"3")])
            await comes_to_hold(owner, b"3")
        await shared(first, n=2)
        await has_read_on(first, producer)
        await comes_to_hold(first, b"3")
        await first.apply([Cancel(new_op(), "m")])
    async with KafkaStore(url) as producer:
        assert isinstance((await producer.apply([keep(b"4")]))[0], Stored)
    for _ in range(2):  # while nobody owned the partition; and it is not done twice
        async with member(url) as (store, _):
            await comes_to_hold(store, b"4")
    async with member(url) as (store, _):
        assert (await store.apply([Cancel(new_op(), "m")]))[0] != Stored("recorded", 0, 0)
    async with KafkaStore(url) as producer:
        await producer.apply([keep(b"5"), Cancel(new_op(), "m")])
        async with member(url) as (store, _):
            await has_read_on(store, producer)
            assert await store.get("m") is None


async def test_a_handlers_own_series_recurs_whoever_owns_it(kafka: str) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=4"
    dues: list[int] = []

    async def until(n: int) -> None:
        async with asyncio.timeout(60):
            while len(dues) < n:  # noqa: ASYNC110 - as a user would look
                await asyncio.sleep(0.05)

    def scheduler() -> Scheduler:
        made = Scheduler(url)

        async def tick(event: Tick, context: Context) -> None:
            dues.append(round(context.due.timestamp() * 1000))

        made.add_handler(tick, every=Every("300ms"))
        return made

    async with scheduler(), scheduler():
        await until(4)
        async with scheduler():
            pass
    n = len(dues)
    async with scheduler():
        await until(n + 3)
    assert len(dues) - len(set(dues)) <= 4, "at most what was in flight at one of four changes of owner"


async def test_f3_a_process_that_stood_still_delivers_nothing_before_it_knows_what_others_did(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=1&members=1"
    async with member(url) as (stale, work):
        (mine,) = stale.partitions.values()
        await stale.apply([Put(new_op(), Envelope(f"m{i}", "h"), After(0)) for i in range(10)])
        missed: list[tuple[Sequence[Read], int]] = []
        with monkeypatch.context() as patched:
            patched.setattr(mine, "take_in", lambda *read: missed.append(read))
            async with member(url) as (other, others):
                (theirs,) = other.partitions.values()
                assert await theirs.until_ready()
                claims = (await others.claim({"h": Demand(10)}, request="1", lease_ms=60_000)).claims
                done = [Done(each.record.id, each.record.revision, each.token) for each in claims]
                assert await others.settle(done) == [SettleOutcome.SETTLED] * 10
            mine._ownership._last_read_s -= SESSION_MS / 1000 + 1
            assert (await work.claim({"h": Demand(10)}, request="1", lease_ms=60_000)).claims == []
            await asyncio.sleep(0.5)  # the reader has looked again
            assert (await work.claim({"h": Demand(10)}, request="2", lease_ms=60_000)).claims == []
        for batch, read_to in missed:
            mine.take_in(batch, read_to)
        assert await mine.until_ready()
        assert (await work.claim({"h": Demand(10)}, request="3", lease_ms=60_000)).claims == []


async def test_f27_a_transaction_that_was_open_at_the_start_holds_up_its_partition_alone_and_is_told(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall_watch, "OPEN_S", 0.5)
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    url = f"kafka://{kafka}/{schedules}?create_topic=true&partitions=2"
    async with KafkaStore(url) as producer:
        puts = [Put(new_op(), Envelope(f"m{i}", "kafka", target, payload=b"%d" % i), After(0)) for i in range(20)]
        assert all(isinstance(each, Stored) for each in await producer.apply(puts))
    other = AIOKafkaProducer(bootstrap_servers=kafka, transactional_id=new_name(), transaction_timeout_ms=300_000)
    await other.start()
    try:
        await other.begin_transaction()
        await other.send_and_wait(schedules, b"", b"other", partition=0)
        async with member(f"{url}&timeout_ms=2000") as (store, work):
            held = {put.envelope.payload for put in puts if store._parts.lookup.places(put.id)[0].partition == 0}
            async with asyncio.timeout(60):
                while "transaction" not in work.status().why:  # noqa: ASYNC110 - as a user would look
                    await asyncio.sleep(0.01)
            task = asyncio.create_task(deliver(store))
            first = await values(kafka, target, len(puts) - len(held))
            assert not held & first.keys()
            await other.abort_transaction()
            assert await values(kafka, target, len(puts)) == Counter(put.envelope.payload for put in puts)
            await until(lambda: work.status().why == "", "nothing holds the partition up any more")
            task.cancel()
            await asyncio.wait([task])
    finally:
        await other.stop()


async def test_a_fault_of_our_own_ends_no_loop(
    kafka: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=1"
    target = await create_topic(kafka, new_name())
    faults: Counter[str] = Counter()

    def at_first(of: type, name: str) -> None:
        real = getattr(of, name)

        def broken(*args: Any) -> Any:  # noqa: ANN401 - whatever it is
            faults[name] += 1
            if faults[name] == 5:
                raise ZeroDivisionError(name)
            return real(*args)

        monkeypatch.setattr(of, name, broken)

    async with member(url) as (store, _):
        task = asyncio.create_task(deliver(store))
        at_first(Partition, "take_in")
        at_first(Repairs, "make")
        puts = [Put(new_op(), Envelope(f"m{i}", "kafka", target, payload=b"%d" % i), After(0)) for i in range(20)]
        for put in puts:
            async with asyncio.timeout(60):
                while not isinstance((await store.apply([put]))[0], Stored):  # noqa: ASYNC110 - as a caller would
                    await asyncio.sleep(0.05)
        assert await values(kafka, target, len(puts)) == Counter(put.envelope.payload for put in puts)
        assert min(faults["take_in"], faults["make"]) > 5
        task.cancel()
        await asyncio.wait([task])
    assert caplog.text.count("ZeroDivisionError: ") >= 2


async def test_one_too_many_waits_and_takes_over_when_another_goes(kafka: str) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=1"
    async with AsyncExitStack() as stack:
        first, _ = await stack.enter_async_context(member(url))
        async with member(url) as (second, work):
            await shared(first, second, n=1)
            idle = next(store for store in (first, second) if not store.partitions)
            await until(lambda: idle.status().phase == "ready", "it has seen that the topic is there")
            assert (await idle.counts(), idle.traits.cancel) == ({}, "recorded")
            await idle.apply([Put(new_op(), Envelope("m", "h"), After(0))])
            await stack.aclose()
            await shared(second, n=1)
            async with asyncio.timeout(60):
                while not (await work.claim({"h": Demand(1)}, request=new_name(), lease_ms=1000)).claims:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)


@pytest.mark.parametrize(("n", "pause_s"), [(400, 0.7), pytest.param(800, 2, marks=pytest.mark.nightly)])
async def test_f26_members_that_come_and_go_lose_nothing_and_delay_little(
    kafka: str, monkeypatch: pytest.MonkeyPatch, n: int, pause_s: float
) -> None:
    monkeypatch.setattr(group, "SESSION_MS", 150_000)  # which nothing may wait for: none of them goes without a word
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=6"
    target = await create_topic(kafka, new_name())
    async with member(url) as (first, _):
        puts = [Put(new_op(), Envelope(f"m{i}", "kafka", target, payload=b"%d" % i), After(15 * i)) for i in range(n)]
        outcomes = [each for each in await first.apply(puts) if isinstance(each, Stored)]
        dues = {put.envelope.payload: each.due_ms for put, each in zip(puts, outcomes, strict=True)}
        staying = asyncio.create_task(deliver(first))
        for _ in range(3):
            async with member(url) as (second, _):
                coming = asyncio.create_task(deliver(second))
                await asyncio.sleep(pause_s)  # so long it stays
                coming.cancel()
                await asyncio.wait([coming])
            await asyncio.sleep(pause_s)  # so long it is away
        found = await values(kafka, target, len(puts))
        staying.cancel()
        await asyncio.wait([staying])
    assert found == Counter(dues.keys())
    assert all(record.timestamp >= dues[record.value] for record in await read(kafka, target))
