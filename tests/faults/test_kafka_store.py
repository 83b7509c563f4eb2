"""The Kafka store on a real broker: plain clients, owners that take over, bad records, the cleaner."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import cycle

import pytest
from aiokafka import AIOKafkaProducer, ConsumerRecord
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # which names them all
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from aiodelay import Scheduler
from aiodelay.backends.kafka import KafkaStore
from aiodelay.backends.kafka.client import Outgoing, Transactions
from aiodelay.backends.kafka.pending import record_reader
from aiodelay.backends.kafka.pending.changes import Change
from aiodelay.backends.kafka.pending.record_reader import RecordReader
from aiodelay.backends.kafka.store.partition import Partition
from aiodelay.backends.kafka.topics import topic as topics
from aiodelay.core.ids import new_op
from aiodelay.core.transitions import occurrence_id
from aiodelay.core.values import At, Cancel, DeadLetter, Demand, Done, Envelope, Fire, Put, Query, Stored
from aiodelay.errors import StoreUnavailableError
from aiodelay.kafka.records import Read
from tests.support.bad_inputs import KAFKA_RECORDS
from tests.support.kafka import create_topic, new_name, read, started
from tests.support.kafka_rights import grant, revoke
from tests.support.topics import new_producer, set_config
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

ALL = Demand(500)


@asynccontextmanager
async def opened(bootstrap: str, topic: str, partitions: int = 1) -> AsyncIterator[KafkaStore]:
    before = asyncio.all_tasks()
    async with joined(bootstrap, topic, partitions) as store:
        yield store
    assert asyncio.all_tasks() <= before


@asynccontextmanager
async def joined(bootstrap: str, topic: str, partitions: int = 1) -> AsyncIterator[KafkaStore]:
    """One of several owners."""
    url = f"kafka://{bootstrap}/{topic}?create_topic=true&partitions={partitions}&members=1"
    async with KafkaStore(url) as store, store.work("w", ["kafka"]):
        yield store


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class PlainClient:
    """Schedules as a program in any language would: key, value, three headers."""

    def __init__(self, bootstrap: str, schedules: str, partitioner: str = "murmur2_random") -> None:
        self._producer = new_producer(
            bootstrap, {"partitioner": partitioner, "linger.ms": 0, "message.max.bytes": 2_000_000}
        )
        self._schedules = schedules

    def schedule(
        self, key: bytes, value: bytes | None, epoch: int, topic: str, target_key: bytes = b"", **more: bytes | None
    ) -> None:
        headers: dict[str, str | bytes | None]
        headers = {"scheduler-epoch": str(epoch), "scheduler-target-topic": topic, "caller": b"me"}
        headers |= {"scheduler-target-key": target_key} if target_key else {}
        headers |= more
        self._producer.produce(self._schedules, value, key, headers=headers)
        assert self._producer.flush(10) == 0

    def cancel(self, key: bytes) -> None:
        self._producer.produce(self._schedules, None, key)
        assert self._producer.flush(10) == 0


async def transfer(store: KafkaStore, demand: Demand) -> int:
    """Move what is due now; return how many messages were moved."""
    with store.transferring(store.sinks[0]) as moves:
        return (await moves.transfer(demand)).moved


async def moved(store: KafkaStore, n: int) -> None:
    """Move what is due until so many messages have been moved."""
    async with asyncio.timeout(120):
        while n > 0:
            with suppress(StoreUnavailableError):  # between two sessions
                n -= await transfer(store, ALL)
            await asyncio.sleep(0.01)


# --- plain clients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitioner", ["murmur2_random", "consistent_random"])
async def test_a_plain_client_schedules_updates_and_deletes(kafka: str, partitioner: str) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    async with opened(kafka, schedules, partitions=3) as store:
        client = PlainClient(kafka, schedules, partitioner)
        due = now_ms() // 1000 + 3
        client.schedule(b"kept", b"kept", due, target, b"k")
        client.schedule(b"updated", b"old", due - 10, target)
        client.schedule(b"updated", b"new", due, target)
        client.schedule(b"deleted", b"deleted", due, target)
        client.schedule(b"\xff\x00binary", b"", due, target)
        client.cancel(b"deleted")
        got: dict[bytes, ConsumerRecord] = {}
        async with asyncio.timeout(60):
            while len(got) < 3 or await store.counts():
                await transfer(store, ALL)
                got = {record.value: record for record in await read(kafka, target)}
                got.pop(b"old", None)  # may have gone before its update came
                assert not got or now_ms() >= due * 1000
    assert got.keys() == {b"kept", b"new", b""}
    kept = got[b"kept"]
    assert kept.key == b"k"
    headers = dict(kept.headers)
    assert (headers["caller"], headers["scheduler-key"], headers["scheduler-topic"]) == (
        b"me",
        b"kept",
        schedules.encode(),
    )
    assert due <= int(headers["scheduler-timestamp"]) <= due + 30
    assert not {"scheduler-epoch", "scheduler-target-topic", "scheduler-target-key"} & headers.keys()
    assert dict(got[b""].headers)["scheduler-key"] == b"\xff\x00binary"


async def test_a_plain_client_schedules_a_tombstone(kafka: str) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    async with opened(kafka, schedules) as store:
        client = PlainClient(kafka, schedules)
        client.schedule(b"m", b"", 1, target, b"vid1", **{"aiodelay-null": b"1"})
        await moved(store, 1)
    (record,) = await read(kafka, target, 1)
    assert (record.key, record.value) == (b"vid1", None)


@pytest.mark.parametrize("horizon", ["1h", "1s"], ids=["near", "far"])
async def test_what_stands_in_another_partition_than_its_own_is_delivered_and_answers_to_its_id(
    kafka: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, horizon: str
) -> None:
    monkeypatch.setattr(record_reader, "STRAY_SAMPLE", 1)
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    url = f"kafka://{kafka}/{schedules}?create_topic=true&partitions=3&horizon={horizon}"
    async with KafkaStore(url) as store, store.work("w", ["kafka"]):
        client, due = PlainClient(kafka, schedules, "consistent_random"), now_ms() // 1000 + 3000
        for i in range(12):
            client.schedule(b"m%d" % i, b"old", due, target)
        async with asyncio.timeout(60):
            while sum(each.scheduled for each in (await store.counts()).values()) < 12:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        standing = [partition for partition in store.partitions.values() if partition.index.placement.is_mixed]
        assert standing
        assert "has another partitioner than Java's" in caplog.text
        for i in range(12):
            assert (await store.get(f"m{i}")) is not None
        cancelled = await store.apply([Cancel(new_op(), f"m{i}") for i in range(4)])
        replaced = await store.apply([put(i, target, now_ms()) for i in range(4, 8)])
        fired = await store.apply([Fire(new_op(), f"m{i}") for i in range(8, 12)])
        answers = [each.answer for each in (*cancelled, *replaced, *fired) if isinstance(each, Stored)]
        assert answers == ["cancelled"] * 4 + ["replaced"] * 4 + ["fired"] * 4
        await moved(store, 8)
        assert await store.counts() == {}
    async with KafkaStore(url) as store, store.work("w", ["kafka"]):
        assert await store.counts() == {}
    counted = Counter(record.value for record in await read(kafka, target, 8))
    assert counted == {b"old": 4, b"4": 1, b"5": 1, b"6": 1, b"7": 1}


async def test_f33_what_cannot_be_read_becomes_a_dead_letter_and_holds_up_nobody(kafka: str) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    async with opened(kafka, schedules) as store:
        async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
            await producer.send_and_wait(schedules, b"x", b"garbage", headers=[("scheduler-epoch", b"soon")])
            await producer.send_and_wait(schedules, b"x", b"\x00aiodelay/other")
        PlainClient(kafka, schedules).schedule(b"good", b"good", 1, target)
        await moved(store, 1)
        async with asyncio.timeout(60):
            while not (letters := await store.dead_letters()):  # noqa: ASYNC110 - as a user would look
                await asyncio.sleep(0.01)
    (letter,) = letters
    assert (letter.record.id, letter.reason, letter.record.envelope.payload) == ("garbage", "undecodable", b"x")
    assert "scheduler-target-topic" in (letter.record.last_error or "")
    async with opened(kafka, schedules) as store:
        assert await store.dead_letters() == letters
        assert await store.get("garbage") is None


# --- exactly once -----------------------------------------------------------------------------------------


def put(number: int, topic: str, due_ms: int) -> Put:
    return Put(new_op(), Envelope(f"m{number}", "kafka", topic, payload=b"%d" % number), At(due_ms))


async def test_l5_bad_records_of_plain_clients_become_dead_letters_that_say_why(kafka: str) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    async with Scheduler(f"kafka://{kafka}/{schedules}?create_topic=true&partitions=3") as scheduler:
        client = PlainClient(kafka, schedules)
        for i, (name, (bad, _)) in enumerate(KAFKA_RECORDS.items()):
            client.schedule(name.encode(), b"x" * i, 1, target, b"", **bad)
            client.schedule(b"good %d" % i, b"%d" % i, 1, target)
        client.schedule(b"large", b"x" * 1_500_000, 1, target)  # more than the target takes
        async with asyncio.timeout(60):
            while len(letters := await letters_of(scheduler)) <= len(KAFKA_RECORDS) or await taken(scheduler):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for name in KAFKA_RECORDS:
            client.schedule(name.encode(), name.encode(), 1, target)  # the same key, mended
        values = Counter(record.value for record in await read(kafka, target, 2 * len(KAFKA_RECORDS)))
    assert "takes 1048588 bytes (max.message.bytes)" in (letters["large"].record.last_error or "")
    for i, (name, (_, problem)) in enumerate(KAFKA_RECORDS.items()):
        letter = letters[name]
        assert letter.reason == "undecodable"
        assert problem in (letter.record.last_error or ""), name
        assert letter.record.envelope.payload == b"x" * i
        assert letter.record.envelope.headers["caller"] == b"me"
    assert values == Counter([b"%d" % i for i in range(len(KAFKA_RECORDS))] + [name.encode() for name in KAFKA_RECORDS])


async def letters_of(scheduler: Scheduler) -> dict[str, DeadLetter]:
    return {letter.record.id: letter async for letter in scheduler.dead_letters()}


async def taken(scheduler: Scheduler) -> int:
    counts = (await scheduler.counts()).get("kafka")
    return 0 if counts is None else counts.scheduled + counts.overdue + counts.in_flight


async def test_s3_a_thousand_messages_arrive_exactly_once(kafka: str) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name(), partitions=2)
    async with opened(kafka, schedules, partitions=3) as store:
        outcomes = await store.apply([put(i, target, now_ms()) for i in range(1000)])
        assert all(isinstance(each, Stored) for each in outcomes)
        await moved(store, 1000)
    assert Counter(record.value for record in await read(kafka, target, 1000)) == Counter(
        b"%d" % i for i in range(1000)
    )
    async with opened(kafka, schedules, partitions=3) as store:  # S6: nothing comes back
        assert await transfer(store, ALL) == 0
        assert await store.counts() == {}


async def test_f25_owners_that_take_over_from_each_other_deliver_nothing_twice(kafka: str) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    n = 300
    async with opened(kafka, schedules) as store:
        await store.apply([put(i, target, now_ms()) for i in range(n)])

    async def owner(seconds: float) -> None:
        async with joined(kafka, schedules) as store:
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                with suppress(StoreUnavailableError):
                    await transfer(store, Demand(7))
                await asyncio.sleep(0.001)  # a pause between two transfers

    async with asyncio.TaskGroup() as tasks:
        for seconds in (2, 1, 1.5):
            tasks.create_task(owner(seconds))
            await asyncio.sleep(0.3)  # so long each owns alone
    async with opened(kafka, schedules) as store:
        while await transfer(store, ALL):
            pass
    assert Counter(record.value for record in await read(kafka, target, n)) == Counter(b"%d" % i for i in range(n))


async def test_f25_an_owner_that_comes_back_reads_what_it_missed_before_it_dispatches(kafka: str) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    n = 50
    async with joined(kafka, schedules) as stale:
        await stale.apply([put(i, target, now_ms()) for i in range(n)])
        (partition,) = stale.partitions.values()
        missed: list[tuple[Sequence[Read], int]] = []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(partition, "take_in", lambda *read: missed.append(read))
            async with joined(kafka, schedules) as other:
                await moved(other, n)
            ends = time.monotonic() + 1
            while time.monotonic() < ends:  # fenced at first, then with an epoch and a barrier of its own
                with suppress(StoreUnavailableError, TimeoutError):
                    async with asyncio.timeout(0.2):
                        await transfer(stale, ALL)
                await asyncio.sleep(0.01)
        for batch, read_to in missed:
            partition.take_in(batch, read_to)
        assert await partition.until_ready()
        assert await transfer(stale, ALL) == 0
    assert Counter(record.value for record in await read(kafka, target, n)) == Counter(b"%d" % i for i in range(n))


async def test_k1_a_record_that_its_topic_never_takes_is_given_up_and_its_neighbours_are_delivered(kafka: str) -> None:
    schedules = new_name("schedules")
    target = await create_topic(kafka, new_name(), max_message_bytes=2000)
    async with opened(kafka, schedules) as store:
        large = Put(new_op(), Envelope("large", "kafka", target, payload=b"x" * 4000), At(now_ms()))
        await store.apply([large, *[put(i, target, now_ms()) for i in range(20)]])
        await moved(store, 20)
        (letter,) = await until(store.dead_letters, "a dead letter")
        assert (letter.record.id, letter.reason, letter.record.attempt) == ("large", "not_retryable", 1)
        assert await store.get("large") is None
    assert Counter(record.value for record in await read(kafka, target, 20)) == Counter(b"%d" % i for i in range(20))


async def test_k1_an_occurrence_that_its_topic_never_takes_is_given_up_beside_its_series(kafka: str) -> None:
    target = await create_topic(kafka, new_name(), max_message_bytes=2000)
    async with opened(kafka, new_name("schedules")) as store:
        envelope = Envelope("s", "kafka", target, payload=b"x" * 4000, rule={"e": 3_600_000})
        await store.apply([Put(new_op(), envelope, At(now_ms()))])
        with store.transferring(store.sinks[0]) as moves:
            (series,) = (await moves.transfer(ALL)).series
            then = now_ms() + 3_600_000
            settlement = Done(series.id, series.revision, series.due_ms, then)
            assert (await moves.transfer(ALL, [settlement])).moved == 0
        (letter,) = await until(store.dead_letters, "a dead letter")
        assert letter.record.id == occurrence_id("s", series.due_ms)
        assert (letter.reason, letter.record.attempt, letter.record.envelope.rule) == ("not_retryable", 1, None)
        rearmed = await store.get("s")
        assert rearmed is not None
        assert (rearmed.record.due_ms, rearmed.record.live) == (then, ())
    assert await read(kafka, target) == []


# --- users and owners at once -----------------------------------------------------------------------------


async def test_f28_a_change_that_races_with_its_delivery_is_never_lost(kafka: str) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    n = 60
    async with opened(kafka, schedules) as store, AIOKafkaProducer(bootstrap_servers=kafka) as producer:

        async def write(key: bytes, value: bytes) -> int:
            headers = [("scheduler-epoch", b"1"), ("scheduler-target-topic", target.encode())]
            offset: int = (await producer.send_and_wait(schedules, value, key, headers=headers)).offset
            return offset

        async def user() -> int:
            for i in range(n):
                await write(b"%d" % i, b"%d old" % i)
                await asyncio.sleep(0.002 * (i % 5))  # the owner delivers the old version, or does not, meanwhile
                last = await write(b"%d" % i, b"%d new" % i)
            return last

        task = asyncio.create_task(user())
        while not task.done():
            await transfer(store, ALL)
            await asyncio.sleep(0.001)  # the user writes meanwhile
        (partition,) = store.partitions.values()
        async with asyncio.timeout(60):
            while partition.index.state.read_to <= await task or await store.counts():
                await transfer(store, ALL)
                await asyncio.sleep(0.01)
    counted = Counter(record.value for record in await read(kafka, target))
    assert all(counted[b"%d new" % i] == 1 for i in range(n)), counted
    assert all(counted[b"%d old" % i] <= 1 for i in range(n)), counted


async def test_f28_what_is_cancelled_before_its_transaction_has_begun_is_not_delivered(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    begun, may_go_on = asyncio.Event(), asyncio.Event()
    begin = Transactions.begin

    async def slowly(self: Transactions, records: Sequence[Outgoing]) -> list[int]:
        if any(record.topic == target for record in records):
            begun.set()
            await may_go_on.wait()
        return await begin(self, records)

    monkeypatch.setattr(Transactions, "begin", slowly)
    async with opened(kafka, schedules) as store:
        await store.apply([put(i, target, now_ms()) for i in (1, 2)])
        first = asyncio.create_task(transfer(store, Demand(1)))
        await begun.wait()
        second = asyncio.create_task(transfer(store, Demand(1)))
        PlainClient(kafka, schedules).cancel(b"m2")
        async with asyncio.timeout(60):
            while await store.get("m2") is not None:  # noqa: ASYNC110 - as a user would look
                await asyncio.sleep(0.01)
        may_go_on.set()
        assert [await first, await second] == [1, 0]
    assert [record.value for record in await read(kafka, target, 1)] == [b"1"]


class LateReader:
    """While it is held up, a partition takes in nothing of what is read; it does so afterwards."""

    def __init__(self, partition: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_held_up = False
        self.all: list[Sequence[Read]] = []
        self._late: list[tuple[Sequence[Read], int]] = []
        self._take_in = partition.take_in
        monkeypatch.setattr(partition, "take_in", self.take_in)

    def take_in(self, read: Sequence[Read], read_to: int) -> None:
        self.all.append(read)
        self._late.append((read, read_to))
        self._go_on()

    def let_go(self) -> None:
        self.is_held_up = False
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        while self._late and not self.is_held_up:
            self._take_in(*self._late.pop(0))

    def read_again(self) -> None:
        for each in self.all:
            self._take_in(each, 0)


async def test_f28_an_owner_reads_what_users_write_around_its_own_ends(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own it takes in without reading them, and the marker of the transaction before; nothing else."""
    monkeypatch.setattr("aiodelay.backends.kafka.store.partition.unread_changes.MANY_OWN", 1)
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    begin, commit, read_own = Transactions.begin, Transactions.commit, RecordReader.read_own
    turns = cycle([(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0), (0, 0, 0)])
    written, unread = list[bytes](), list[int]()
    between = after = 0

    async with opened(kafka, schedules) as store, KafkaStore(f"kafka://{kafka}/{schedules}") as user:
        (partition,) = store.partitions.values()

        async def puts(n: int) -> None:
            for _ in range(n):
                await user.apply([put(len(written), target, now_ms())])
                written.append(b"%d" % len(written))

        async def begun(self: Transactions, records: Sequence[Outgoing]) -> list[int]:
            nonlocal between, after
            if all(each.topic != target for each in records):  # a watermark, as there is one every five seconds
                between = after = 0
                return await begin(self, records)
            before, between, after = next(turns)
            if before:
                await until(lambda: partition.index.state.read_to > partition._unread.written_to, "the marker was read")
            reader.is_held_up = True
            await puts(before)
            offsets = await begin(self, records)
            await puts(between)
            return offsets

        async def committed(self: Transactions) -> None:
            await commit(self)
            await puts(after)

        def noted(own: RecordReader, changes: Sequence[Change]) -> None:
            before = own._state.read_to
            read_own(own, changes)
            unread.append(own._state.read_to - before)
            reader.let_go()

        await puts(30)
        reader = LateReader(partition, monkeypatch)
        monkeypatch.setattr(Transactions, "begin", begun)
        monkeypatch.setattr(Transactions, "commit", committed)
        monkeypatch.setattr(RecordReader, "read_own", noted)
        n = 0
        async with asyncio.timeout(120):
            while n < len(written):
                n += await transfer(store, Demand(2))
        assert await store.counts() == {}
        reader.read_again()
        assert not partition.index.repairs.are_needed, "nothing is read twice"
    assert Counter(record.value for record in await read(kafka, target, len(written))) == Counter(written)
    assert len(written) > 30
    assert {0, 2} <= set(unread), "some were read, as others' were, and some were not"


async def test_s5_what_a_user_cancels_does_not_come_back_after_a_restart(kafka: str) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    far = now_ms() + 3_600_000
    async with opened(kafka, schedules) as store:
        await store.apply([put(1, target, far), put(2, target, far)])
        await store.apply([Cancel(new_op(), "m1")])
        PlainClient(kafka, schedules).cancel(b"m2")
    async with opened(kafka, schedules) as store:
        assert [await store.get("m1"), await store.get("m2")] == [None, None]


# --- the cleaner ------------------------------------------------------------------------------------------


async def test_f29_while_the_cleaner_runs_nothing_is_lost_doubled_or_brought_back(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "check", lambda topic, bootstrap: None)  # which would refuse so short a lag
    target = await create_topic(kafka, new_name())
    schedules = await create_topic(
        kafka,
        new_name("schedules"),
        cleanup_policy="compact",
        segment_ms=500,
        min_cleanable_dirty_ratio=0.001,
        min_compaction_lag_ms=3000,
        delete_retention_ms=3000,
        message_timestamp_type="LogAppendTime",
    )
    written = 0
    rounds: Counter[int] = Counter()

    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:

        async def write(key: int, value: bytes | None) -> None:
            nonlocal written
            headers = [("scheduler-epoch", b"1"), ("scheduler-target-topic", target.encode())]
            await producer.send_and_wait(schedules, value, b"%d" % key, headers=headers if value else [])
            written += 1

        async def user() -> None:
            """Put each key again and again, with a new version each time; some are cancelled in between."""
            ends = time.monotonic() + 12
            while time.monotonic() < ends:
                for key in range(20):
                    rounds[key] += 1
                    await write(key, b"%d/%d" % (key, rounds[key]))
                    if key % 3 == 0:
                        await write(key, None)
                await asyncio.sleep(0.05)  # the owners deliver between two rounds
            for key in range(20):
                rounds[key] += 1
                await write(key, b"%d/%d" % (key, rounds[key]))

        writing = asyncio.create_task(user())
        while not writing.done():  # owners come and go
            async with joined(kafka, schedules) as store:
                ends = time.monotonic() + 2
                while time.monotonic() < ends:
                    with suppress(StoreUnavailableError):
                        await transfer(store, ALL)
                    await asyncio.sleep(0.005)  # a pause between two transfers
        await writing
    async with opened(kafka, schedules) as store:
        async with asyncio.timeout(60):
            while await store.counts():
                await transfer(store, ALL)
                await asyncio.sleep(0.01)
    async with asyncio.timeout(120):
        while len(await read(kafka, schedules)) > written / 2:  # the cleaner has not been there
            continue
    counted = Counter(record.value for record in await read(kafka, target))
    assert max(counted.values()) == 1
    assert all(counted[b"%d/%d" % (key, rounds[key])] for key in range(20))  # the last version of each


async def has_been_written_again(kafka: str, schedules: str) -> bool:
    return any(record.offset >= 3 and record.key == b"m" for record in await read(kafka, schedules))


@pytest.mark.parametrize("what", ["put", "cancel"])
async def test_f29_what_an_owners_record_hides_from_the_cleaner_is_written_again(
    kafka: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(topics, "check", lambda topic, bootstrap: None)  # which would refuse so short a lag
    schedules = await create_topic(
        kafka, new_name("schedules"), cleanup_policy="compact", message_timestamp_type="LogAppendTime"
    )
    far = [("scheduler-epoch", b"4000000000"), ("scheduler-target-topic", b"t")]
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        await producer.send_and_wait(schedules, b"old", b"m", headers=far)
        await producer.send_and_wait(schedules, b"new" if what == "put" else None, b"m", headers=far)
        # An owner that had read the first of them only ends it, or puts it again:
        late = [("aiodelay-from", b"1")]
        await producer.send_and_wait(schedules, None if what == "put" else b"old", b"m", headers=[*far, *late])
        async with opened(kafka, schedules):
            await until(lambda: has_been_written_again(kafka, schedules), "it is written again, without being asked")
        await asyncio.to_thread(set_config, kafka, schedules, segment_ms=500, min_cleanable_dirty_ratio=0.001)
        async with asyncio.timeout(120):
            while any(record.offset < 3 and record.key == b"m" for record in await read(kafka, schedules)):
                await producer.send_and_wait(schedules, b"", b"traffic", headers=far)
                await asyncio.sleep(0.2)
    async with opened(kafka, schedules) as store:
        found = await store.get("m")
    assert (None if found is None else found.record.envelope.payload) == (b"new" if what == "put" else None)


# --- targets that take nothing ----------------------------------------------------------------------------


async def test_k2_f32_a_topic_that_may_not_be_written_is_held_by_itself() -> None:
    broker = await asyncio.to_thread(
        started,
        authorizer_class_name="org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        allow_everyone_if_no_acl_found="true",
        super_users="User:nobody",
    )
    try:
        kafka = broker.bootstrap
        schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
        forbidden = await create_topic(kafka, new_name("forbidden"))
        admin = AdminClient({"bootstrap.servers": kafka})
        who = (ResourceType.TOPIC, forbidden, ResourcePatternType.LITERAL, "User:ANONYMOUS", "*")
        denied = AclBinding(*who, AclOperation.WRITE, AclPermissionType.DENY)
        everything = AclBinding(*who, AclOperation.ALL, AclPermissionType.ALLOW)
        await asyncio.to_thread(grant, admin, denied, everything)
        async with opened(kafka, schedules) as store:
            await store.apply([put(i, target if i % 2 else forbidden, now_ms()) for i in range(20)])
            await moved(store, 10)
            (blocked,) = await store.blocked()
            assert (blocked.address, blocked.messages) == (forbidden, 10)
            assert blocked.reason == f"the right Write on Topic {forbidden} is missing"
            assert {each.record.attempt for each in await store.search(Query())} == {0}
            await asyncio.to_thread(revoke, admin, denied)
            await moved(store, 10)
            assert list(await store.blocked()) == []
        for topic in (target, forbidden):
            assert max(Counter(record.value for record in await read(kafka, topic)).values()) == 1
    finally:
        broker.stop()
