"""Handlers fed by a topic: librdkafka writes the records and reads the offsets of the group."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import cached_property
from typing import Literal

import msgspec
import pytest
from aiokafka.consumer.fetcher import FetchResult
from aiokafka.errors import TopicAlreadyExistsError

from aiodelay import ConfigurationError, Context, Reject, Retry, Scheduler
from aiodelay.backends.kafka import KafkaSink
from aiodelay.backends.kafka.topics import feed_reader
from aiodelay.backends.kafka.topics.feed_part import MOST_AHEAD
from aiodelay.errors import TargetError
from tests.support import waiting
from tests.support.kafka import create_topic, new_name
from tests.support.servers import redis_servers, serving
from tests.support.topics import Group, delete_topic, fill, lasting_producer, producing, set_offsets

pytestmark = pytest.mark.asyncio

NONE = -1001
PATIENCE_S = 150.0
"""A group waits 10 s for each member that has gone without leaving, also where several go one after the other."""
SOON = Retry(attempts=2, first="100ms")


class Paid(msgspec.Struct):
    number: int


@pytest.fixture(scope="module", params=["memory", "sqlite", "redis", "kafka"])
def store(request: pytest.FixtureRequest, kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a store of each kind."""
    if request.param == "redis":
        with serving(redis_servers()[0]) as url:
            yield url
    elif request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('source') / 'store.db'}"
    elif request.param == "memory":
        yield "memory://"
    else:
        yield f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=3"


class Scene:
    """A topic, a group, and what handlers saw of its records."""

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        self.bootstrap, self.topic, self.partitions = bootstrap, topic, partitions
        self.group = new_name("group")
        self.source = f"kafka:{topic}?group={self.group}"
        self.seen: Counter[bytes] = Counter()

    def scheduler(self, store: str = "memory://", **options: object) -> Scheduler:
        return Scheduler(store, sources=[f"kafka://{self.bootstrap}"], **options)  # type: ignore[arg-type]

    def handled_by(self, handle: Callable[[bytes], Awaitable[None]], *, concurrency: int = 16) -> Scheduler:
        """Return a scheduler whose handler counts what it has handled."""
        scheduler = self.scheduler(drain="100ms")

        @scheduler.handler(name="payments", source=self.source, concurrency=concurrency, retry=SOON)
        async def handler(payload: bytes) -> None:
            await handle(payload)
            self.seen[payload] += 1

        return scheduler

    def fill(self, n: int, *, first: int = 0, partition: int = 0) -> None:
        values, producer = [b"%d" % i for i in range(first, first + n)], lasting_producer(self.bootstrap)
        fill(self.bootstrap, self.topic, values, partition=partition, producer=producer)

    @cached_property
    def _seen_group(self) -> Group:
        return Group(self.bootstrap, self.group)

    async def committed(self) -> list[int]:
        return await asyncio.to_thread(self._seen_group.committed, self.topic, self.partitions)

    async def has_committed(self, *offsets: int) -> None:
        async def has() -> bool:
            return await self.committed() == list(offsets)

        await waiting.until(has, f"{self.group} has committed {offsets}", PATIENCE_S)


async def scene(bootstrap: str, partitions: int = 1) -> Scene:
    return Scene(bootstrap, await create_topic(bootstrap, new_name(), partitions), partitions)


async def until(condition: Callable[[], object]) -> None:
    await waiting.until(condition, "the records have been handled", PATIENCE_S)


async def nothing(payload: bytes) -> None:
    """Handle it at once."""


# --- what a handler is given ------------------------------------------------------------------------------


async def test_records_of_any_client_arrive_as_they_were_written(kafka: str) -> None:
    at = await scene(kafka, 3)
    found: list[tuple[bytes, bytes | None, dict[str, bytes]]] = []
    contexts: list[Context] = []
    scheduler = at.scheduler()

    @scheduler.handler(name="payments", source=at.source)
    async def handle(payload: bytes, context: Context) -> None:
        contexts.append(context)
        found.append((payload, context.key, dict(context.headers)))

    with producing(kafka) as producer:
        producer.produce(at.topic, b"\x00\xff", b"\xfe", headers=[("é", b"\xff"), ("twice", b"1"), ("twice", b"2")])
        producer.produce(at.topic, None, b"null", headers=[("none", None)])
        producer.produce(at.topic, b"", None)
    async with scheduler:
        await until(lambda: len(found) == 3)
    assert sorted(found, key=repr) == [
        (b"", None, {}),
        (b"", b"null", {"none": b""}),
        (b"\x00\xff", b"\xfe", {"é": b"\xff", "twice": b"2"}),
    ]
    assert len({each.delivery_id for each in contexts}) == 3
    assert {each.attempt for each in contexts} == {1}
    assert all(0 <= (each.queued_ms or 0) < 60_000 for each in contexts)
    assert sum(max(each, 0) for each in await at.committed()) == 3


@pytest.mark.parametrize("codec", ["json", "msgpack"])
async def test_what_our_own_sink_wrote_reaches_the_handler_of_its_type(
    kafka: str, codec: Literal["json", "msgpack"]
) -> None:
    at = await scene(kafka)
    async with Scheduler("memory://", sinks=[KafkaSink(kafka)], encoding=codec) as sender:
        for i in range(3):
            await sender.schedule(Paid(i), delay="1ms", to=f"kafka:{at.topic}", headers={"caller": b"x"})
        await sender.run_until_idle()
    scheduler, found = at.scheduler(), list[tuple[int, bytes]]()

    @scheduler.handler(source=at.source)
    async def handle(event: Paid, context: Context) -> None:
        found.append((event.number, context.headers["caller"]))

    async with scheduler:
        await until(lambda: len(found) == 3)
    assert sorted(found) == [(0, b"x"), (1, b"x"), (2, b"x")]


async def test_records_of_a_transaction_that_was_aborted_are_not_handled(kafka: str) -> None:
    at = await scene(kafka)
    with producing(kafka, **{"transactional.id": new_name()}) as producer:
        producer.init_transactions(30)
        for value, end in ((b"aborted", producer.abort_transaction), (b"committed", producer.commit_transaction)):
            producer.begin_transaction()
            producer.produce(at.topic, value)
            producer.flush()
            end(30)
    async with at.handled_by(nothing):
        await until(lambda: at.seen)
    assert at.seen == {b"committed": 1}


@pytest.mark.parametrize(
    "address",
    [
        "topic",
        "topic?group=",
        "topic?group=%20",
        "?group=g",
        "topic?group=g&more=1",
        "__x?group=g",
        "t?group=aiodelay.t",
    ],
)
async def test_an_address_without_topic_or_group_is_refused(address: str) -> None:
    scheduler = Scheduler("memory://", sources=["kafka://localhost"])
    with pytest.raises(TargetError):
        scheduler.handler(name="h", source=f"kafka:{address}")(nothing)
    with pytest.raises(ConfigurationError):
        Scheduler("memory://", sources=["kafka://localhost/topic"])


# --- what becomes of them ---------------------------------------------------------------------------------


async def test_retries_and_dead_letters_go_through_the_store(kafka: str, store: str) -> None:
    at = await scene(kafka)
    scheduler = at.scheduler(store)
    attempts: dict[int, list[tuple[int, str]]] = {}

    @scheduler.handler(source=at.source, retry=SOON)
    async def handle(event: Paid, context: Context) -> Reject | None:
        attempts.setdefault(event.number, []).append((context.attempt, context.delivery_id))
        if event.number == 3:
            return Reject("not ours")
        if event.number == 4 or (event.number == 1 and context.attempt == 1):
            raise ValueError("no answer")
        return None

    values = [*(b'{"number":%d}' % i for i in range(5)), b"poison", None]
    fill(kafka, at.topic, values, producer=lasting_producer(kafka))
    async with scheduler:
        await until(lambda: len(attempts.get(4, ())) == 2 and len(attempts.get(1, ())) == 2)
        await at.has_committed(7)
        await scheduler.run_until_idle()
        letters = [each async for each in scheduler.dead_letters()]
    assert {number: [attempt for attempt, _ in found] for number, found in attempts.items()} == {
        0: [1],
        1: [1, 2],
        2: [1],
        3: [1],
        4: [1, 2],
    }
    assert all(len({name for _, name in found}) == 1 for found in attempts.values())
    payloads = sorted((each.reason, each.record.envelope.payload) for each in letters)
    assert payloads == [
        ("attempts_exhausted", b'{"number":4}'),
        ("rejected", b'{"number":3}'),
        ("undecodable", b""),
        ("undecodable", b"poison"),
    ]


async def test_b1_offsets_do_not_pass_what_hangs_and_the_rest_goes_on(kafka: str) -> None:
    at = await scene(kafka)

    async def handle(payload: bytes) -> None:
        if payload == b"3":
            await asyncio.Event().wait()

    at.fill(10)
    async with at.handled_by(handle):
        await until(lambda: len(at.seen) == 9)
        await at.has_committed(3)
        at.fill(5, first=10)
        await until(lambda: len(at.seen) == 14)
        await asyncio.sleep(0.3)  # no offset may be committed meanwhile
        assert await at.committed() == [3]
    assert await at.committed() == [3]
    async with at.handled_by(nothing):
        await at.has_committed(15)
    assert at.seen == {b"%d" % i: 1 if i <= 3 else 2 for i in range(15)}


async def test_l3_one_partition_whose_records_take_long_holds_up_no_other(kafka: str) -> None:
    at = await scene(kafka, 2)
    release, begun = asyncio.Event(), list[bytes]()

    async def handle(payload: bytes) -> None:
        if int(payload) < 100:
            begun.append(payload)
            await release.wait()

    at.fill(50)
    async with at.handled_by(handle, concurrency=4):
        await until(lambda: len(begun) == 3)  # all but the place that is kept for the other partition
        at.fill(60, first=100, partition=1)
        await until(lambda: len(at.seen) == 60)
        await at.has_committed(NONE, 60)
        release.set()
        await at.has_committed(50, 60)
    assert set(at.seen.values()) == {1}


async def test_no_more_is_read_of_a_partition_than_may_be_open(kafka: str) -> None:
    at = await scene(kafka)
    release = asyncio.Event()

    async def handle(payload: bytes) -> None:
        if payload == b"0":
            await release.wait()

    at.fill(MOST_AHEAD + 2_000)
    async with at.handled_by(handle):
        await until(lambda: len(at.seen) >= MOST_AHEAD - 1)
        await asyncio.sleep(0.3)  # no more may be read meanwhile
        assert len(at.seen) < MOST_AHEAD + 500
        release.set()
        await at.has_committed(MOST_AHEAD + 2_000)
    assert set(at.seen.values()) == {1}


# --- where a group begins ---------------------------------------------------------------------------------


async def test_a_group_goes_on_where_another_client_stopped(kafka: str) -> None:
    at = await scene(kafka, 2)
    at.fill(10)
    at.fill(10, first=100, partition=1)
    set_offsets(kafka, at.group, at.topic, [7, 10])
    async with at.handled_by(nothing):
        await at.has_committed(10, 10)
    assert at.seen == {b"7": 1, b"8": 1, b"9": 1}


@pytest.mark.parametrize("offset", [100, 3])
async def test_s2_offsets_out_of_range_are_told_and_all_is_read(
    kafka: str, caplog: pytest.LogCaptureFixture, offset: int
) -> None:
    at = await scene(kafka)
    at.fill(10)
    set_offsets(kafka, at.group, at.topic, [offset])
    async with at.handled_by(nothing):
        await at.has_committed(10)
    if offset == 3:
        assert len(at.seen) == 7
        return
    assert len(at.seen) == 10
    errors = [each for each in caplog.records if each.levelno >= logging.ERROR]
    (told,) = [each.getMessage() for each in errors if not each.name.startswith("aiokafka")]
    assert "partition 0 should be read from offset 100, but holds 0 to 10" in told


@pytest.mark.parametrize(("note", "handled"), [("aiodelay-topic=another", 10), ("another client's", 3)])
async def test_s2_what_was_committed_of_another_topic_of_this_name_does_not_count(
    kafka: str, note: str, handled: int
) -> None:
    at = await scene(kafka)
    at.fill(10)
    set_offsets(kafka, at.group, at.topic, [7], note)
    async with at.handled_by(nothing):
        await at.has_committed(10)
    assert len(at.seen) == handled


@pytest.mark.parametrize("n", [20, 50, 80], ids=["fewer", "as many", "more"])
async def test_s2_a_topic_that_is_created_anew_is_read_from_its_beginning(
    kafka: str, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    monkeypatch.setattr(feed_reader, "CHECK_S", 0.3)
    at = await scene(kafka)
    at.fill(50)
    async with at.handled_by(nothing):
        await at.has_committed(50)
        delete_topic(kafka, at.topic)
        await waiting.until(lambda: is_created(kafka, at.topic), f"{at.topic} is created anew")
        at.fill(n, first=1000)
        await until(lambda: sum(int(each) >= 1000 for each in at.seen) == n)
        await at.has_committed(n)
    assert set(at.seen.values()) <= {1, 2}, "what stands behind the old position may be read before it is found out"
    assert {each for each, times in at.seen.items() if times > 1} <= {b"%d" % number for number in range(1050, 1080)}


async def is_created(bootstrap: str, topic: str) -> bool:
    """Create a topic; return whether the cluster has forgotten the one before of this name."""
    try:
        return bool(await create_topic(bootstrap, topic))
    except TopicAlreadyExistsError:
        return False


async def test_k23_what_was_read_beside_a_batch_that_cannot_be_read_is_read_again(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, getall = await scene(kafka, 2), FetchResult.getall
    taken: list[FetchResult] = []

    def fails_at_the_second(result: FetchResult, max_records: int | None = None) -> object:
        taken.append(result)
        if len(taken) == 2:
            raise MemoryError
        return getall(result, max_records)

    monkeypatch.setattr(FetchResult, "getall", fails_at_the_second)
    for partition in range(2):
        at.fill(5, first=10 * partition, partition=partition)
    async with at.handled_by(nothing):
        await until(lambda: len(taken) > 2)
        for partition in range(2):
            at.fill(1, first=10 * partition + 5, partition=partition)
        await at.has_committed(6, 6)
    assert at.seen == Counter(b"%d" % (10 * partition + i) for partition in range(2) for i in range(6))


async def test_a_topic_that_is_not_there_yet_is_waited_for(kafka: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodelay.backends.kafka.topics.group.METADATA_MS", 200)
    at = Scene(kafka, new_name(), 1)
    async with at.handled_by(nothing):
        await asyncio.sleep(0.5)  # the cluster must have been asked for a topic that is missing
        await create_topic(kafka, at.topic)
        at.fill(3)
        await until(lambda: len(at.seen) == 3)


# --- several processes ------------------------------------------------------------------------------------


async def test_members_that_come_and_go_lose_nothing_and_begin_behind_what_is_committed(kafka: str) -> None:
    at, filled = await scene(kafka, 6), 0
    moves: list[list[int]] = [[0] * 6]
    again: list[int] = []

    async def watch() -> None:
        while True:
            moves.append([max(each, 0) for each in await at.committed()])
            await asyncio.sleep(0.02)  # one sample of many: whichever it finds must hold

    async def slowly(payload: bytes) -> None:
        await asyncio.sleep(0.005)  # so that some are under way at each rebalance

    async def stay(pause_s: float) -> None:
        committed = moves[-1]

        async def handle(payload: bytes) -> None:
            turn, number = divmod(int(payload), 6 * 50)  # as they are filled in below
            partition, offset = number // 50, 50 * turn + number % 50
            if offset < committed[partition]:
                again.append(int(payload))
            await slowly(payload)

        async with at.handled_by(handle):
            await asyncio.sleep(pause_s)  # a member stays for a while

    async def come_and_go(pause_s: float) -> None:
        for _ in range(3):
            await stay(pause_s)

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch())
        async with at.handled_by(slowly):
            coming = [tasks.create_task(come_and_go(0.4 + 0.3 * i)) for i in range(2)]
            while not all(each.done() for each in coming):
                for partition in range(6):
                    at.fill(50, first=6 * filled + 50 * partition, partition=partition)
                filled += 50
                await asyncio.sleep(0.2)  # a stream of records for as long as members come and go
            await at.has_committed(*[filled] * 6)
        watching.cancel()
    assert len(at.seen) == 6 * filled
    assert not again, f"{len(again)} records came again to a member that had started after they were committed"
    for partition in range(6):
        offsets = [each[partition] for each in moves]
        assert offsets == sorted(offsets)


async def test_two_groups_each_get_every_record_and_their_retries_do_not_meet(kafka: str) -> None:
    at = await scene(kafka)
    scheduler, found = at.scheduler(), Counter[tuple[str, bytes, int]]()

    def add(name: str) -> None:
        @scheduler.handler(name=name, source=f"{at.source}-{name}", retry=SOON)
        async def handle(payload: bytes, context: Context) -> None:
            found[name, payload, context.attempt] += 1
            if context.attempt == 1:
                raise ValueError("once")

    add("first")
    add("second")
    at.fill(3)
    async with scheduler:
        await until(lambda: len(found) == 12)
    assert set(found.values()) == {1}
