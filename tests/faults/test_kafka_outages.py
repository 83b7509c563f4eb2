"""A broker dies, stands still or has no disk space, or transactions stay open, while a store works on it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from typing import TypeVar

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaError
from msgspec.structs import replace

from aiodelay import OutcomeUnknownError, Scheduler, StoreBusyError, StoreUnavailableError
from aiodelay.backends.kafka.store.partition import stall_watch
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Envelope, Put, Query, Stored, Unknown
from aiodelay.kafka import KafkaStore
from tests.support.kafka import Broker, create_topic, ids_in, new_name
from tests.support.server_clock import SteppedClock
from tests.support.slow_stores import opened_patiently, stored_patiently
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

BEFORE, AFTER = 20, 100
"""How many messages are stored before an outage, and after it."""
STILL_OPEN_MS = 15_000
"""A transaction that the broker ends after this time is surely open while a command waits for 3 s."""
T = TypeVar("T")


@pytest.fixture
def broker(own_broker: Broker) -> Broker:
    return own_broker


@asynccontextmanager
async def opened(
    broker: Broker, topic: str, timeout_ms: int = 2000, open_timeout: str | None = None
) -> AsyncIterator[Scheduler]:
    before = asyncio.all_tasks()
    url = f"kafka://{broker.bootstrap}/{topic}?create_topic=true&partitions=2&timeout_ms={timeout_ms}"
    async with Scheduler(url, store_timeout="3s", open_timeout=open_timeout) as scheduler:
        yield scheduler
    assert asyncio.all_tasks() <= before


async def arrived(bootstrap: str, topic: str, wanted: Collection[bytes]) -> Counter[bytes]:
    """Return the payloads that were committed to a topic, once all of `wanted` are there."""
    options = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
    found: Counter[bytes] = Counter()
    async with AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, **options) as consumer, asyncio.timeout(150):
        while not found.keys() >= set(wanted):
            for batch in (await consumer.getmany(timeout_ms=200)).values():
                found.update(each.value for each in batch)
        for batch in (await consumer.getmany(timeout_ms=1000)).values():
            found.update(each.value for each in batch)
    return found


async def schedule_all(scheduler: Scheduler, target: str, stored: set[bytes], in_doubt: set[bytes]) -> None:
    """Schedule one message after the other, due at once; note what is said of each. Run until cancelled."""
    for i in count():
        payload = b"%d" % i
        in_doubt.add(payload)  # also if this task is cancelled here
        try:
            await scheduler.schedule(payload, to=f"kafka:{target}", delay="1ms", id=f"m{i}")
        except OutcomeUnknownError:
            pass
        except (StoreUnavailableError, StoreBusyError):
            in_doubt.remove(payload)
        else:
            in_doubt.remove(payload)
            stored.add(payload)
        await asyncio.sleep(0.005)  # a steady load


async def surely(command: Callable[[], Awaitable[T]]) -> T:
    """Give a command that harms nothing when it is repeated, until the store has answered."""
    async with asyncio.timeout(120):
        while True:
            with suppress(StoreUnavailableError, StoreBusyError, OutcomeUnknownError):
                return await command()
            await asyncio.sleep(0.05)


async def more_are_stored(stored: set[bytes], n: int) -> None:
    """Wait until `n` more messages are stored. Each has its own time limit: a slow machine needs long for all."""
    last = len(stored) + n
    while len(stored) < last:
        await another_is_stored(stored)


async def another_is_stored(stored: set[bytes]) -> None:
    before = len(stored)
    await until(lambda: len(stored) > before, "another message is stored", 120)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", ["killed", "frozen", "full"])
async def test_f21_through_an_outage_what_was_acknowledged_arrives_once(broker: Broker, fault: str) -> None:
    target = await create_topic(broker.bootstrap, new_name())
    stored, in_doubt = set[bytes](), set[bytes]()
    async with opened(broker, new_name("schedules")) as scheduler:
        scheduling = asyncio.create_task(schedule_all(scheduler, target, stored, in_doubt))
        await more_are_stored(stored, BEFORE)
        if fault == "killed":
            broker.kill()
            await asyncio.to_thread(broker.start)
        elif fault == "full":
            broker.fill_disk()
            await asyncio.sleep(2)  # so long nothing can be written
            broker.kill()  # it has ended by itself, or will
            await asyncio.to_thread(broker.start)
        else:
            broker.freeze()
            await asyncio.sleep(5)  # longer than any timeout
            broker.thaw()
        await more_are_stored(stored, AFTER)
        scheduling.cancel()
        await asyncio.wait([scheduling])
        assert scheduling.cancelled()
        found = await arrived(broker.bootstrap, target, stored)
    assert stored <= found.keys() <= stored | in_doubt
    assert max(found.values()) == 1


async def test_f22_closing_ends_in_time_while_the_broker_is_away(broker: Broker) -> None:
    target = await create_topic(broker.bootstrap, new_name())
    topic = new_name("schedules")
    try:
        async with opened(broker, topic) as scheduler:
            for i in range(10):
                await surely(partial(scheduler.schedule, b"%d" % i, to=f"kafka:{target}", delay="1h", id=f"m{i}"))
            for i in range(10):
                await surely(partial(scheduler.fire, f"m{i}"))
            broker.kill()
            with pytest.raises((StoreUnavailableError, OutcomeUnknownError)):
                await scheduler.schedule(b"lost", to=f"kafka:{target}", delay="1ms")
            closing = time.monotonic()
        assert time.monotonic() - closing < 40
    finally:
        await asyncio.to_thread(broker.start)
    async with opened(broker, topic):
        found = await arrived(broker.bootstrap, target, [b"%d" % i for i in range(10)])
    assert found - Counter([b"lost"]) == Counter(b"%d" % i for i in range(10))


async def test_f22_opening_fails_in_time_while_the_broker_is_away(broker: Broker) -> None:
    topic = new_name("schedules")
    async with opened(broker, topic):
        pass
    broker.freeze()
    try:
        async with asyncio.timeout(60):
            with pytest.raises(StoreUnavailableError, match=r"no answer in time|Unable to bootstrap"):
                async with opened(broker, topic, open_timeout="0s"):
                    pass
    finally:
        broker.thaw()


async def until_it_waits(scheduler: Scheduler) -> None:
    """Wait until the cluster has not answered to an opening."""
    async with asyncio.timeout(60):
        while "is unavailable" not in scheduler.status().why:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_f22_a_scheduler_that_starts_while_the_broker_is_away_delivers_once_it_is_back(
    broker: Broker, fault: str
) -> None:
    before, target = asyncio.all_tasks(), await create_topic(broker.bootstrap, new_name())
    url = f"kafka://{broker.bootstrap}/{new_name('schedules')}?create_topic=true&partitions=2"
    async with Scheduler(url, dispatch=False) as client:
        await client.schedule(b"x", to=f"kafka:{target}", delay="1ms")
    scheduler = Scheduler(f"{url}&timeout_ms=2000", open_timeout="2m")
    take_away, bring_back = (broker.kill, broker.start) if fault == "killed" else (broker.freeze, broker.thaw)
    take_away()
    opening = asyncio.create_task(scheduler.__aenter__())
    try:
        await until_it_waits(scheduler)
    finally:
        await asyncio.to_thread(bring_back)
    await opening
    assert await arrived(broker.bootstrap, target, [b"x"]) == Counter([b"x"])
    await until(lambda: scheduler.status().phase == "ready", "it has no doubts")
    await scheduler.__aexit__(None, None, None)
    assert asyncio.all_tasks() <= before


async def test_f22_a_start_without_a_broker_ends_at_once_when_it_is_cancelled(broker: Broker) -> None:
    before, topic = asyncio.all_tasks(), new_name("schedules")
    scheduler = Scheduler(f"kafka://{broker.bootstrap}/{topic}?timeout_ms=2000", open_timeout="1h")
    broker.freeze()
    try:
        for pause_s in (0, 0.5, 1, 3):  # within an attempt, and between two
            opening = asyncio.create_task(scheduler.__aenter__())
            await until_it_waits(scheduler)
            await asyncio.sleep(pause_s)
            opening.cancel()
            async with asyncio.timeout(60):
                await asyncio.wait([opening])
            assert opening.cancelled()
            assert asyncio.all_tasks() <= before
    finally:
        broker.thaw()


@asynccontextmanager
async def left_open(
    bootstrap: str, topic: str, timeout_ms: int, partitions: Sequence[int] = (0, 1)
) -> AsyncIterator[AIOKafkaProducer]:
    """Begin a transaction on a topic, which ends by its timeout, or where the block ends it."""
    options = {"transactional_id": new_name("stranger"), "transaction_timeout_ms": timeout_ms}
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, **options)
    await producer.start()
    try:
        await producer.begin_transaction()
        for number in partitions:
            await producer.send_and_wait(topic, b"x", b"stranger", partition=number)
        yield producer
    finally:
        await producer.client.close()  # as if it had been killed: it says nothing to the broker
        with suppress(KafkaError):
            await producer.stop()


async def test_f27_a_strangers_open_transaction_delays_and_harms_nothing(
    broker: Broker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall_watch, "OPEN_S", 1.0)
    target, topic = await create_topic(broker.bootstrap, new_name()), new_name("schedules")
    async with opened(broker, topic, timeout_ms=1000) as scheduler:
        await surely(partial(scheduler.schedule, b"before", to=f"kafka:{target}", delay="1h", id="before"))
        async with left_open(broker.bootstrap, topic, STILL_OPEN_MS):
            with pytest.raises((StoreUnavailableError, OutcomeUnknownError)):
                await scheduler.schedule(b"meanwhile", to=f"kafka:{target}", delay="1ms", id="meanwhile")
        await surely(partial(scheduler.schedule, b"after", to=f"kafka:{target}", delay="1h", id="after"))
        for each in ("before", "after"):
            await surely(partial(scheduler.fire, each))
        found = await arrived(broker.bootstrap, target, [b"before", b"after"])
    assert set(found) - {b"meanwhile"} == {b"before", b"after"}
    assert max(found.values()) == 1
    assert any("a transaction is open at offset" in each.message for each in caplog.records)


async def test_f27_a_partition_in_which_nothing_can_be_read_holds_up_no_other(
    broker: Broker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall_watch, "OPEN_S", 0.5)
    topic = new_name("schedules")
    url, clock = f"kafka://{broker.bootstrap}/{topic}?create_topic=true&partitions=2", SteppedClock()
    scheduler, ran = Scheduler(f"{url}&timeout_ms=2000", store_timeout="3s", clock=clock), Counter[str]()
    patient = Scheduler(f"{url}&timeout_ms=60000", store_timeout="60s", clock=clock, dispatch=False)

    @scheduler.handler(name="orders")
    async def handle(payload: bytes) -> None:
        ran[payload.decode()] += 1

    async def put(by: Scheduler, message_id: str, delay: str) -> object:
        return await by.schedule(message_id.encode(), to="handler:orders", delay=delay, id=message_id)

    async def has_read(n: int) -> bool:
        with suppress(StoreUnavailableError):
            return sum(each.scheduled for each in (await scheduler.counts()).values()) == n
        return False

    soon, again = ([ids_in(number, 2, 40, f"{what}-") for number in (0, 1)] for what in ("soon", "again"))
    async with patient, scheduler:
        await asyncio.gather(*(put(patient, each, "1h") for each in soon[0] + soon[1]))
        await until(lambda: has_read(80), "the owner has read all messages")
        caplog.clear()
        async with left_open(broker.bootstrap, topic, 300_000, [0]) as stranger:
            await until(
                lambda: any("a transaction is open at offset" in each for each in caplog.messages), "it is told"
            )
            clock.offset_ns += 3_600 * 10**9
            refused = await asyncio.gather(*(put(scheduler, each, "1ms") for each in again[0]), return_exceptions=True)
            assert {type(each) for each in refused} == {StoreUnavailableError}
            await asyncio.gather(*(put(patient, each, "1ms") for each in again[1]))
            await until(lambda: ran.keys() >= {*soon[1], *again[1]}, "the other partition's messages have run")
            assert not ran.keys() & {*soon[0]}, "what could not be settled is not begun"
            await stranger.abort_transaction()
        await until(lambda: ran.keys() >= {*soon[0]}, "the partition's messages have run", 90)
    assert ran == Counter(soon[0] + soon[1] + again[1])


async def test_f27_a_command_ends_in_time_although_what_it_wrote_cannot_be_read_back(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall_watch, "OPEN_S", 1000.0)  # it writes, although the transaction has been open for long
    topic = new_name("schedules")
    url = f"kafka://{broker.bootstrap}/{topic}?create_topic=true&partitions=2"
    async with KafkaStore(url):  # which makes the topic, and waits for it longer
        pass
    put = Put(new_op(), Envelope("m", "kafka", "t"), After(3_600_000))
    async with opened_patiently(lambda: KafkaStore(f"{url}&timeout_ms=1000")) as store, store.work("w", []):
        await stored_patiently(store, [replace(put, op=new_op())])  # the store has read the partition
        async with left_open(broker.bootstrap, topic, 300_000) as stranger:

            async def is_in_doubt() -> bool:
                (outcome,) = await store.apply([put])
                assert not isinstance(outcome, Stored)
                return isinstance(outcome, Unknown)

            await until(is_in_doubt, "it is written")  # a broker that stands still takes nothing
            await stranger.abort_transaction()
        await stored_patiently(store, [put])
        assert [each.record.id for each in await surely(lambda: store.search(Query()))] == ["m"]
