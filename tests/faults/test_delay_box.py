"""A delay box is killed, loses partitions or servers: each requested message is still delivered, once."""

from __future__ import annotations

import asyncio
import logging
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing, suppress
from functools import partial
from itertools import product
from pathlib import Path
from signal import SIGKILL, SIGSTOP

import pytest
from aiokafka import TopicPartition
from confluent_kafka import Message

from aiodelay import Scheduler
from aiodelay.backends.kafka.topics import intake
from aiodelay.backends.kafka.topics.intake import DEAD_FROM
from aiodelay.core.values import Query
from aiodelay.delay_box import DelayBox
from aiodelay.errors import StoreUnavailableError
from tests.faults.programs.delay_box import BATCH, Plan, with_short_lease
from tests.support.boxes import Out, headers_of, request, send
from tests.support.kafka import Broker, create_topic, new_name
from tests.support.processes import Crew, Worker
from tests.support.servers import RedisServer, redis_products, start
from tests.support.sessions import shorten_sessions
from tests.support.topics import delete_topic, lasting_producer
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

KINDS = ["sqlite", "redis", "kafka"]
SHARDS = 4
QUIET_S = 1.0
"""Nothing tells that nothing more comes."""


@pytest.fixture(autouse=True)
def _short_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_sessions(monkeypatch)


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    server = start(redis_products()[0].program, "--appendonly", "yes", "--appendfsync", "always")
    yield server
    server.stop()


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    with Crew(tmp_path) as crew:
        yield crew


class Place:
    """Topics, a store, and boxes in processes of their own between them."""

    def __init__(self, kafka: str, store: str, crew: Crew, intake: str, target: str) -> None:
        self.kafka, self.store, self.crew, self.intake, self.target = kafka, store, crew, intake, target
        self.namespace = "default" if store.startswith("kafka:") else intake
        self.url = f"kafka://{kafka}/{intake}?timeout_ms=20000"
        self.sent = 0

    def start(
        self,
        step: str = "",
        when: str = "before",
        nth: int = 1,
        signal: int = SIGKILL,
        *,
        has_short_lease: bool = False,
    ) -> Worker:
        plan = Plan(self.store, self.url, [self.target], self.namespace, step, when, nth, signal, has_short_lease)
        return self.crew.start("delay_box", plan, name=f"{self.intake}-{len(self.crew.workers)}")

    def box(self) -> DelayBox:
        return DelayBox(self.store, self.url, allow=[self.target], namespace=self.namespace)

    async def send(self, n: int, countdown: float, *, bad: int = 0) -> None:
        """Send requests that are told apart by their message, and some that are none."""
        values: list[bytes | None] = [
            request(self.target, f"{number}", countdown) for number in range(self.sent, self.sent + n)
        ]
        self.sent += n
        values += [b"bad"] * bad
        random.shuffle(values)
        await asyncio.to_thread(send, self.kafka, self.intake, values, producer=lasting_producer(self.kafka))

    async def each_came_out(self, *, once: bool = True) -> list[Message]:
        """Return what came out: every request, stored once; and delivered once, or else with the same delivery id."""
        out = Out(self.kafka, self.target, read="committed")
        await out.until_different(self.sent)  # a killed box's leases have to end
        records = await out.quiet(QUIET_S)
        out.close()
        ids = {(record.value(), headers_of(record)["scheduler-key"]) for record in records}
        assert sorted(int(value or b"") for value, _ in ids) == list(range(self.sent))
        assert not once or len(records) == self.sent, Counter(record.value() for record in records).most_common(3)
        return records

    async def each_is_settled(self) -> None:
        """Wait until the store knows that each message has come out: else it comes again once its lease lapses."""
        if self.store.startswith("kafka:"):  # there, one transaction does both
            return

        async def is_empty() -> bool:
            return not await seen.counts()

        async with Scheduler(self.store, namespace=self.namespace, dispatch=False) as seen:
            await until(is_empty, "no message waits or is in flight")

    async def each_is_stored(self, box: DelayBox) -> None:
        """Check that a box which delivers nothing yet has stored every request, once."""
        store = box._store

        async def stored() -> int:
            with suppress(StoreUnavailableError):  # another box's session has not ended yet
                return sum(counts.scheduled for counts in (await store.counts()).values())
            return 0

        async def are_all_stored() -> bool:
            return await stored() >= self.sent

        await until(are_all_stored, "all requests are stored", 60)
        found = await store.search(Query(limit=2 * self.sent))
        assert sorted(int(each.record.envelope.payload) for each in found) == list(range(self.sent))

    async def dead_letters(self, n: int) -> None:
        """Check that so many different records were refused."""
        dead = Out(self.kafka, f"{self.intake}.dead")

        def different() -> int:
            return len({headers_of(record)[DEAD_FROM] for record in dead.records})

        while different() < n:
            await dead.until(len(dead.records) + 1)
        assert different() == n
        dead.close()


def can_be_written(path: Path) -> bool:
    """Say whether nobody is in a transaction that writes."""
    with closing(sqlite3.connect(path, timeout=0)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        return True


def is_stopped(pid: int) -> bool:
    """Say whether a process stands still."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def placed(kafka: str, kind: str, crew: Crew, redis: RedisServer | None = None, partitions: int = 2) -> Place:
    topic = await create_topic(kafka, new_name("TB"), partitions)
    stores = {
        "sqlite": f"sqlite:///{crew.folder / 'delay.db'}",
        "redis": redis.url if redis else "",
        "shards": f"{redis.url}?shards={SHARDS}&journal=10000" if redis else "",
        "kafka": f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=2",
    }
    return Place(kafka, stores[kind], crew, topic, await create_topic(kafka, new_name("T")))


# --- killed -----------------------------------------------------------------------------------------------

STEPS = [("take", "before", 1), ("bury", "before", 1), ("bury", "after", 1), ("apply", "before", 1)]
STEPS += [("apply", "after", 1), ("apply", "before", 3), ("apply", "after", 3)]
IN_KAFKA = [("begin", "before", 3), ("begin", "after", 3), ("commit", "before", 3), ("commit", "after", 3)]


@pytest.mark.parametrize("kind", KINDS)
async def test_f1_killed_at_every_step_of_take_store_and_commit(
    kafka: str, crew: Crew, redis_server: RedisServer, kind: str
) -> None:
    """It dies before anything is due, so that nothing may come twice."""
    few = asyncio.Semaphore(4)  # more boxes at once keep each other from their heartbeats

    async def killed(step: str, when: str, nth: int) -> None:
        async with few:
            place = await placed(kafka, kind, crew, redis_server)
            await place.send(7 * BATCH, 3_600, bad=20)
            first = place.start(step, when, nth)
            assert await asyncio.to_thread(first.wait) == -9, first.errors[-1000:]
            async with place.box() as second:
                await place.each_is_stored(second)
                await place.dead_letters(20)

    async with asyncio.TaskGroup() as tasks:
        for step in [*STEPS, *(IN_KAFKA if kind == "kafka" else [])]:
            tasks.create_task(killed(*step))


FIRST_BATCH = 2 * SHARDS + 1
"""The number of its first call, among the calls to single shards: they are asked and get a position before."""


async def test_f1_killed_between_the_shards_of_a_batch(kafka: str, crew: Crew, redis_server: RedisServer) -> None:
    """Some shards have the batch, and the next box takes larger batches. The journal shows what is stored twice."""

    async def killed(nth: int) -> None:
        place = await placed(kafka, "shards", crew, redis_server, partitions=1)
        await place.send(7 * BATCH, 3_600)
        first = place.start("part", "before", nth)
        assert await asyncio.to_thread(first.wait) == -9, first.errors[-1000:]
        async with place.box() as second:
            await place.each_is_stored(second)
            events = [each.event for each in await second._store.journal(limit=1_000)]
            assert events == ["stored"] * place.sent

    async with asyncio.TaskGroup() as tasks:
        for nth in (FIRST_BATCH - 2, FIRST_BATCH + 2, FIRST_BATCH + SHARDS + 1):
            tasks.create_task(killed(nth))


@pytest.mark.parametrize("kind", KINDS)
async def test_f1_killed_again_and_again_while_it_delivers(
    kafka: str, crew: Crew, redis_server: RedisServer, kind: str
) -> None:
    """What was in flight may come again, as the same message."""
    await killed_again_and_again(await placed(kafka, kind, crew, redis_server, partitions=4), kills=2, n=200)


@pytest.mark.storm
@pytest.mark.parametrize("kind", KINDS)
async def test_f1_killed_more_often_while_it_delivers_more(
    kafka: str, crew: Crew, redis_server: RedisServer, kind: str
) -> None:
    await killed_again_and_again(await placed(kafka, kind, crew, redis_server, partitions=4), kills=8, n=1_000)


async def killed_again_and_again(place: Place, *, kills: int, n: int) -> None:
    """Kill one of two boxes each time when a part of so many messages has come out."""
    boxes = [place.start(has_short_lease=True) for _ in range(2)]
    out = Out(place.kafka, place.target)
    for number in range(kills):
        await place.send(n // 5, 0.5, bad=2)
        await out.until(place.sent)  # all partitions have an owner again
        await place.send(n - n // 5, 0.2, bad=2)
        await out.until(place.sent - n * 7 // 10)
        await asyncio.to_thread(boxes[number % 2].kill)
        boxes[number % 2] = place.start(has_short_lease=True)
    await place.each_came_out(once=place.store.startswith("kafka:"))
    await place.dead_letters(4 * kills)
    out.close()


# --- shared out anew --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["redis", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("kafka", "sqlite", "shards"))]
)
async def test_f3_a_storm_of_rebalances(kafka: str, crew: Crew, redis_server: RedisServer, kind: str) -> None:
    place = await placed(kafka, kind, crew, redis_server, partitions=6)
    await storm_of_rebalances(place, random.Random(7), stays=3, longest_s=1.5, sends=12)


@pytest.mark.storm
@pytest.mark.parametrize("kind", KINDS)
async def test_f3_a_long_storm_of_rebalances(kafka: str, crew: Crew, redis_server: RedisServer, kind: str) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    place = await placed(kafka, kind, crew, redis_server, partitions=6)
    await storm_of_rebalances(place, random.Random(seed), stays=12, longest_s=3, sends=75)


async def storm_of_rebalances(place: Place, rng: random.Random, *, stays: int, longest_s: float, sends: int) -> None:
    """Let three boxes come and go, each so often, while so often some messages are sent."""

    async def come_and_go() -> None:
        for _ in range(stays):
            async with place.box():
                await asyncio.sleep(rng.uniform(0.3, longest_s))  # a storm's pause

    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(come_and_go())
        for _ in range(sends):
            await place.send(60, rng.choice([0, 1, 4]), bad=1)
            await asyncio.sleep(0.2)  # a storm's pause
    async with place.box():
        await place.each_came_out()
    await place.dead_letters(sends)


@pytest.mark.parametrize("kind", [*KINDS, pytest.param("shards", marks=pytest.mark.nightly)])
async def test_f3_a_box_that_stood_still_stores_nothing_twice(
    kafka: str, crew: Crew, redis_server: RedisServer, kind: str
) -> None:
    """It comes back to life with a batch in its hands that another one has stored, and delivered, meanwhile.

    With shards, two of them have this batch from the box itself.
    """
    step, nth = ("part", FIRST_BATCH + SHARDS + 2) if kind == "shards" else ("apply", 3)
    countdown = 6
    while True:
        place = await placed(kafka, kind, crew, redis_server, partitions=1)
        frozen = place.start(step, "before", nth, SIGSTOP)
        await place.send(1, 0)
        await place.each_came_out()
        await place.each_is_settled()
        due_s = time.monotonic() + countdown
        await place.send(4 * BATCH, countdown)
        await until(partial(is_stopped, frozen.pid), "the box stands still")
        is_in_time = time.monotonic() < due_s
        if is_in_time and (kind != "sqlite" or can_be_written(crew.folder / "delay.db")):
            break
        # It was so slow that it may stand still while it delivers, and what it has sent would come again; or another
        # thread of it stood still in a transaction, which holds up everybody.
        frozen.kill()
        countdown *= 2
    async with place.box():
        await place.each_came_out()
        frozen.continue_()
        await place.send(100, 1)
        await place.each_came_out()
    frozen.terminate()


async def test_f3_what_is_assigned_to_a_box_while_it_stops_does_not_keep_it(
    kafka: str, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = await placed(kafka, "sqlite", crew)
    stop = DelayBox._stop

    def stop_as_the_group_is_shared_out(box: DelayBox) -> None:
        stop(box)
        box._groups[place.intake].assign([TopicPartition(place.intake, 0)])

    monkeypatch.setattr(DelayBox, "_stop", stop_as_the_group_is_shared_out)
    async with asyncio.timeout(60), place.box() as box:
        await until(lambda: box._intakes, "it is a member")


# --- another topic of the same name -----------------------------------------------------------------------


async def recreate(kafka: str, topic: str) -> None:
    await asyncio.to_thread(delete_topic, kafka, topic)
    await create_topic(kafka, topic)


async def test_a_topic_that_was_created_anew_while_the_box_stood_still(
    kafka: str, crew: Crew, redis_server: RedisServer
) -> None:
    """It goes on where there are other records now."""
    place = await placed(kafka, "redis", crew, redis_server, partitions=1)
    await place.send(100, 0)
    box = place.start()
    await place.each_came_out()
    await place.each_is_settled()
    box.stop()
    await recreate(kafka, place.intake)
    await place.send(300, 0)
    box.continue_()
    await place.each_came_out()
    box.terminate()


RECREATED = list(product(["sqlite", "kafka"], [True, False], [20, 100, 300]))
OF_THE_GATE = [*RECREATED[:3], *RECREATED[-3:]]


@pytest.mark.parametrize(
    ("kind", "runs", "n"),
    [pytest.param(*each, marks=[] if each in OF_THE_GATE else pytest.mark.nightly) for each in RECREATED],
)
async def test_an_intake_topic_that_was_created_anew_is_read_from_its_beginning(  # noqa: PLR0917 - fixtures
    kafka: str,
    crew: Crew,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    runs: bool,
    n: int,
) -> None:
    """It holds fewer records than the one before, as many, or more."""
    monkeypatch.setattr(intake, "CHECK_S", 0.3)
    caplog.set_level(logging.INFO, "aiodelay")
    place = await placed(kafka, kind, crew, partitions=1)
    await place.send(100, 0)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(place.box())
        await place.each_came_out()
        if not runs:
            await stack.aclose()
        caplog.clear()
        await recreate(kafka, place.intake)
        await place.send(n, 0)
        if not runs:
            await stack.enter_async_context(place.box())
        await place.each_came_out()
    assert "read from its beginning" in caplog.text


# --- servers that end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["redis", "kafka"])
async def test_f21_broker_and_redis_end_and_come_back_while_it_runs(
    own_broker: Broker, crew: Crew, redis_server: RedisServer, kind: str
) -> None:
    place = await placed(own_broker.bootstrap, kind, crew, redis_server)
    async with with_short_lease(place.box()):
        await place.send(300, 5, bad=3)
        own_broker.kill()
        await asyncio.to_thread(own_broker.start)
        await place.send(300, 5, bad=3)
        if kind == "redis":
            redis_server.kill()
            await asyncio.sleep(1)  # so long it is away
            await asyncio.to_thread(redis_server.start)
        await place.each_came_out(once=kind == "kafka")  # else what was in flight may come again, as the same message
        await place.dead_letters(6)


async def test_f11_a_redis_that_has_lost_the_first_position_gets_the_requests_again(
    kafka: str, crew: Crew, redis_server: RedisServer
) -> None:
    """A failover or a crash soon after the first batch loses the position with its messages. The box runs on."""
    place = await placed(kafka, "redis", crew, redis_server, partitions=1)
    async with place.box() as box:
        await place.send(50, 3_600)
        await place.each_is_stored(box)
        redis_server.command("FLUSHALL")
        await place.send(50, 3_600)
        await place.each_is_stored(box)


async def test_a_full_store_holds_up_and_loses_nothing(
    kafka: str, crew: Crew, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    place = await placed(kafka, "redis", crew, redis_server)
    async with place.box():
        redis_server.command("CONFIG", "SET", "maxmemory", "1")
        await place.send(400, 0, bad=5)
        await until(lambda: "nothing is taken in for now" in caplog.text, "the store has refused a batch")
        out = Out(kafka, place.target)
        assert await out.quiet(0.5) == []  # nothing may come
        out.close()
        redis_server.command("CONFIG", "SET", "maxmemory", "0")
        await place.each_came_out()
        await place.dead_letters(5)
