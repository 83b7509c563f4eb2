"""Kafka processes are killed, stopped and replaced while schedules are created, replaced and cancelled.

Judged by what a `read_committed` consumer of the target topic finds, id by id, and by what the handlers wrote down.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord

from aiodelay import Message, Scheduler
from aiodelay.backends.kafka.topics import topic as topics
from aiodelay.errors import StoreError
from aiodelay.kafka.records import BARRIER, encode, partition_of
from tests.faults.programs.kafka_owner import Plan, Run
from tests.support.kafka import Broker, create_topic, new_name, read
from tests.support.processes import Crew, Worker
from tests.support.producing import instant
from tests.support.topics import CLEANED, shared_out
from tests.support.waiting import until

TAKEOVER_MS = 15_000 + 20_000
"""From a process's end to the delivery of what is due of its partitions: as promised, and 20 s for a busy machine."""
SOON_MS, FAR_MS = 6_000, 18_000
SURE_MS = 13_000
"""A change that was acknowledged so long before the due time has been read by every owner that may still deliver."""
CALM = 20
"""How many versions are surely changed in time before the first fault."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    with Crew(tmp_path) as crew:
        yield crew


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of this process takes a topic that is cleaned so soon."""
    monkeypatch.setattr(topics, "check", lambda topic, bootstrap: None)


class Group:
    """The processes of one group, by number; one that has been killed is followed by another."""

    def __init__(self, crew: Crew, store: str, n: int) -> None:
        self._crew, self._store, self._started = crew, store, 0
        self.runs_path = crew.folder / "runs.jsonl"
        self.members = [self._start() for _ in range(n)]
        for member in self.members:
            member.line("ready")

    def _start(self) -> Worker:
        self._started += 1
        name = f"owner-{self._started}"
        plan = Plan(name=name, store=self._store, runs=f"{self.runs_path}")
        return self._crew.start("kafka_owner", plan, name=name)

    def replace(self, i: int) -> None:
        """Put another process in the place of one that has ended; the broker may be away while it starts."""
        self.members[i] = self._start()

    def end(self) -> None:
        """End all in an orderly way."""
        for member in self.members:
            member.terminate()
        for member in self.members:
            has_left(member)

    def runs(self) -> list[Run]:
        """Return what the handlers have written down so far; each line is one call, so none is cut short."""
        return [msgspec.json.decode(line, type=Run) for line in self.runs_path.read_bytes().splitlines()]


def has_left(member: Worker) -> None:
    """Wait for the end of a process that was told to end, perhaps before it listened."""
    code = member.wait()
    assert code in (0, -signal.SIGTERM), f"{member.name} ended with {code}: {member.errors[-2000:]}"


class Wanted(msgspec.Struct):
    """What became of the commands about one id: by version, its due time, and when it was acknowledged."""

    lane: str
    versions: dict[int, int] = {}
    acknowledged: set[int] = set()
    changed_ms: dict[int, int] = {}
    is_cancelled: bool = False
    is_sure: bool = True

    def is_changed_in_time(self, version: int) -> bool:
        """Return whether a version was surely replaced or cancelled long before its due time."""
        changed_ms = self.changed_ms.get(version)
        return self.is_sure and changed_ms is not None and changed_ms + SURE_MS < self.versions[version]


async def use(
    scheduler: Scheduler, target: str, is_over: Callable[[], bool], wanted: dict[str, Wanted], rng: random.Random
) -> None:
    """Schedule, replace and cancel, each id by itself, until the storm is over."""

    async def one(message_id: str) -> None:
        lane = "work" if rng.random() < 0.3 else "kafka"
        mine = wanted[message_id] = Wanted(lane)
        far = rng.random() < 0.2
        for version in range(rng.choice((1, 1, 2, 3))):
            due_ms = now_ms() + (FAR_MS if far else rng.randrange(SOON_MS))
            mine.versions[version] = due_ms
            to = f"kafka:{target}" if lane == "kafka" else "handler:work"
            payload = f"{message_id}/{version}".encode()
            try:
                await scheduler.schedule(payload, at=instant(due_ms), to=to, id=message_id)
            except StoreError:
                mine.is_sure = False
            else:
                mine.acknowledged.add(version)
                mine.changed_ms.update({old: now_ms() for old in range(version) if old not in mine.changed_ms})
            await asyncio.sleep(rng.uniform(0, 4))  # a user's pause before the next version
        if rng.random() < (0.7 if far else 0.2):
            try:
                await scheduler.cancel(message_id)
            except StoreError:
                mine.is_sure = False
            else:
                mine.is_cancelled = True
                mine.changed_ms.update({old: now_ms() for old in mine.versions if old not in mine.changed_ms})

    async with asyncio.TaskGroup() as tasks:
        number = 0
        while not is_over():
            number += 1
            tasks.create_task(one(f"m{number}"))
            await asyncio.sleep(rng.expovariate(60))  # 60 new ids a second


async def befall(
    group: Group, seconds: float, wanted: dict[str, Wanted], rng: random.Random, broker: Broker
) -> Counter[str]:
    """Kill, stop for short and for long, end and start, for some seconds; at the end all run. Return what was done.

    The faults begin once some messages were changed in time: else a slow machine would judge nothing but doubts.
    """
    done: Counter[str] = Counter()

    def are_some_changed() -> bool:
        return sum(mine.is_changed_in_time(version) for mine in wanted.values() for version in mine.versions) >= CALM

    await until(are_some_changed, "some messages were changed in time")
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        await asyncio.sleep(rng.uniform(0.5, 2.5))  # the group runs between two faults
        i = rng.randrange(len(group.members))
        member = group.members[i]
        what = rng.choice(("kill", "stop", "pause", "leave", "kill the broker", "kill both"))
        done[what] += 1
        if what in ("kill the broker", "kill both"):
            broker.kill()
            if what == "kill both":  # the next member starts without a broker
                member.kill()
                group.replace(i)
            await asyncio.sleep(rng.uniform(0, 3))  # so long the broker is away
            await asyncio.to_thread(broker.start)
            continue
        if what in ("stop", "pause"):
            member.stop()
            await asyncio.sleep(12 if what == "stop" else rng.uniform(0.2, 3))  # so long the member stands still
            member.continue_()
            continue
        if what == "kill":
            member.kill()
        else:
            member.terminate()
            await asyncio.to_thread(has_left, member)
        await asyncio.sleep(rng.uniform(0, 3))  # so long the member is missing
        group.replace(i)
    return done


async def read_until(bootstrap: str, topic: str, expected: set[str], patience_s: float) -> list[ConsumerRecord]:
    """Read what was committed until all that is expected is there, and for two seconds more."""
    options = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
    found: list[ConsumerRecord] = []
    missing = set(expected)
    async with AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, **options) as consumer:
        ends = time.monotonic() + patience_s
        while time.monotonic() < ends:
            for batch in (await consumer.getmany(timeout_ms=200)).values():
                found += batch
                missing -= {record.value.decode() for record in batch}
            if not missing:
                ends = min(ends, time.monotonic() + 2)
    assert not missing, f"lost: {len(missing)}, {sorted(missing)[:10]}"
    return found


async def ran_all(group: Group, expected: set[str]) -> None:
    """Wait until the handlers have run all that is expected."""
    ends = time.monotonic() + TAKEOVER_MS / 1000
    while missing := expected - {run.payload for run in group.runs()}:
        assert time.monotonic() < ends, f"lost: {len(missing)}, {sorted(missing)[:10]}"
        await asyncio.sleep(0.5)


def judge(
    wanted: dict[str, Wanted], lane: str, times: dict[str, list[tuple[int, int]]], *, is_exact: bool
) -> Counter[str]:
    """Judge what came out of a lane: per payload, (due time, time of delivery) of each delivery."""
    counted: Counter[str] = Counter()
    for message_id, mine in wanted.items():
        if mine.lane != lane:
            continue
        for version, due_ms in mine.versions.items():
            payload = f"{message_id}/{version}"
            delivered = times.get(payload, [])
            counted["delivered"] += bool(delivered)
            counted["again"] += max(len(delivered) - 1, 0)
            for _, at_ms in delivered:
                assert at_ms >= due_ms, f"S1: {payload} was delivered {due_ms - at_ms} ms early"
            assert not is_exact or len(delivered) <= 1, f"S3: {payload} was delivered {len(delivered)} times"
            if mine.is_changed_in_time(version):
                assert not delivered, f"S4, S5: {payload} was delivered, and had been changed long before"
                counted["changed in time"] += 1
    return counted


def last_versions(wanted: dict[str, Wanted], lane: str) -> set[str]:
    """Return the payloads that must have come out: of messages that nobody cancelled."""
    return {
        f"{message_id}/{max(mine.versions)}"
        for message_id, mine in wanted.items()
        if mine.lane == lane and mine.is_sure and not mine.is_cancelled
    }


async def storm(broker: Broker, crew: Crew, *, n: int, seconds: float, seed: int) -> tuple[int, int]:
    """Judge what becomes of messages in a storm; return how many records were written, and how many are left."""
    print("seed", seed)
    rng, kafka = random.Random(seed), broker.bootstrap
    target = await create_topic(kafka, new_name(), partitions=2)
    schedules = await create_topic(kafka, new_name("schedules"), partitions=5, **CLEANED)
    store = f"kafka://{kafka}/{schedules}"
    wanted: dict[str, Wanted] = {}
    async with Scheduler(store, dispatch=False) as producer:
        group = await asyncio.to_thread(Group, crew, store, n)
        async with asyncio.TaskGroup() as tasks:
            befell = tasks.create_task(befall(group, seconds, wanted, rng, broker))
            tasks.create_task(use(producer, target, befell.done, wanted, rng))
    records = await read_until(kafka, target, last_versions(wanted, "kafka"), (FAR_MS + TAKEOVER_MS) / 1000)
    await ran_all(group, last_versions(wanted, "work"))
    await asyncio.to_thread(group.end)
    moved, ran = defaultdict(list), defaultdict(list)
    for record in records:
        moved[record.value.decode()].append((0, record.timestamp))
    for run in group.runs():
        ran[run.payload].append((run.due_ms, run.started_ms))
    exactly = judge(wanted, "kafka", moved, is_exact=True)
    at_least = judge(wanted, "work", ran, is_exact=False)
    counted = f"moved: {dict(exactly)}; handled: {dict(at_least)}; {len(wanted)} ids"
    counted += f", {sum(not each.is_sure for each in wanted.values())} of them in doubt"
    written, left = await ends_of(kafka, schedules), len(await read(kafka, schedules))
    print(f"{counted}; {dict(befell.result())}; {written} records, of which {left} are left")
    assert exactly["delivered"] > 5 * seconds
    assert exactly["changed in time"] + at_least["changed in time"] > 0
    return written, left


async def ends_of(kafka: str, topic: str) -> int:
    """Return how many records were ever written to a topic, markers of transactions included."""
    async with AIOKafkaConsumer(topic, bootstrap_servers=kafka) as consumer:
        return sum((await consumer.end_offsets(consumer.assignment())).values())


@pytest.mark.nightly  # in the gate, tests/faults/test_nemesis.py has these faults
@pytest.mark.asyncio
@pytest.mark.parametrize(("n", "seconds"), [(3, 30), (2, 30)])
async def test_f3_f21_f26_a_storm_over_a_group(
    own_broker: Broker, unchecked: None, crew: Crew, n: int, seconds: int
) -> None:
    await storm(own_broker, crew, n=n, seconds=seconds, seed=random.randrange(1 << 30))


@pytest.mark.storm
@pytest.mark.asyncio
@pytest.mark.timeout(1200)
async def test_f3_f21_f26_f29_a_long_storm_over_a_group(own_broker: Broker, unchecked: None, crew: Crew) -> None:
    written, left = await storm(own_broker, crew, n=3, seconds=600, seed=random.randrange(1 << 30))
    assert left < written / 4, "the cleaner has not run"


async def share_of(member: Worker, kafka: str, schedules: str, *, partitions: int) -> set[int]:
    """Return a member's partitions, once the group has shared all of them out."""

    async def found() -> set[int]:
        shared = await asyncio.to_thread(shared_out, kafka, f"aiodelay.{schedules}")
        is_whole = len(shared) > 1 and all(shared.values()) and sum(map(len, shared.values())) == partitions
        return next((share for name, share in shared.items() if is_whole and f"-{member.pid}-" in name), set())

    return await until(found, "the group has shared out the partitions")


async def barriers(kafka: str, schedules: str) -> list[tuple[int, int]]:
    """Return the partition and the time of each session that began."""
    return [(each.partition, each.timestamp) for each in await read(kafka, schedules) if each.key == BARRIER]


@pytest.mark.asyncio
async def test_f3_one_that_stood_still_for_too_long_does_not_fight_for_what_it_has_lost(kafka: str, crew: Crew) -> None:
    target, schedules = await create_topic(kafka, new_name()), new_name("schedules")
    store = f"kafka://{kafka}/{schedules}?create_topic=true&partitions=4"
    async with Scheduler(store, dispatch=False) as producer:
        group = await asyncio.to_thread(Group, crew, store, 2)
        lost = await share_of(group.members[0], kafka, schedules, partitions=4)
        expected = {f"m{i}" for i in range(400)}
        await producer.schedule_many(
            Message(name.encode(), delay=f"{80 * i}ms", to=f"kafka:{target}", id=name)
            for i, name in enumerate(sorted(expected))
        )

    async def all_deliver() -> bool:
        return len({partition_of(record.value, 4) for record in await read(kafka, target)}) == 4

    async def were_taken_over() -> bool:
        return lost <= {partition for partition, at_ms in await barriers(kafka, schedules) if at_ms > stopped_ms}

    await until(all_deliver, "messages of all partitions are delivered")
    stopped_ms = now_ms()
    group.members[0].stop()
    await until(were_taken_over, "the other member has taken over", 60)
    continued_ms = now_ms()
    group.members[0].continue_()
    records = await read_until(kafka, target, expected, 90)
    assert max(Counter(record.value for record in records).values()) == 1

    async def begun() -> Counter[int]:
        return Counter(partition for partition, at_ms in await barriers(kafka, schedules) if at_ms > continued_ms)

    back = await share_of(group.members[0], kafka, schedules, partitions=4)

    async def is_served_again() -> bool:
        return back <= (await begun()).keys()

    await until(is_served_again, "it has got some back")
    assert max((await begun()).values()) == 1, "each partition changes hands once"
    await asyncio.to_thread(group.end)


# --- one of two is killed ---------------------------------------------------------------------------------


async def fill(kafka: str, store: str, target: str, dues: dict[str, int]) -> None:
    """Schedule messages, by a client of our own."""
    topic = store.rpartition("/")[2].partition("?")[0]
    async with AIOKafkaProducer(bootstrap_servers=kafka, linger_ms=20, max_batch_size=262_144, acks="all") as producer:
        for message_id, due_ms in dues.items():
            message = Message(message_id.encode() * 20, at=instant(due_ms), to=f"kafka:{target}", id=message_id)
            key, value, headers = encode(message)
            await producer.send(topic, value, key, partition=partition_of(key or b"", 3), headers=headers)
        await producer.flush()


async def one_of_two_is_killed(kafka: str, crew: Crew, *, far: int) -> None:
    target = await create_topic(kafka, new_name())
    store = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=3"
    async with Scheduler(store, dispatch=False):
        pass  # which creates the topic
    group = await asyncio.to_thread(Group, crew, store, 2)
    await fill(kafka, store, target, {f"f{i}": now_ms() + 1_800_000 for i in range(far)})
    from_ms = now_ms() + 5_000
    dues = {f"s{i}": from_ms + 4 * i for i in range(3_000)}
    await fill(kafka, store, target, dues)
    await read(kafka, target, 200)  # so many are delivered before
    killed_ms = now_ms()
    group.members[0].kill()
    records = await read_until(kafka, target, {name * 20 for name in dues}, 90)
    delivered = [(dues[record.value.decode()[: len(record.value) // 20]], record.timestamp) for record in records]
    late_ms = max(at_ms - max(due_ms, killed_ms) for due_ms, at_ms in delivered)
    print(f"latest: {late_ms} ms after the kill, or its due time; {far} pending")
    assert all(at_ms >= due_ms for due_ms, at_ms in delivered)
    assert max(Counter(record.value for record in records).values()) == 1
    assert late_ms <= TAKEOVER_MS
    group.members[1].terminate()
    await asyncio.to_thread(group.members[1].ended_well)


@pytest.mark.asyncio
async def test_f1_when_one_of_two_is_killed_all_that_is_due_is_delivered_once_and_soon(kafka: str, crew: Crew) -> None:
    await one_of_two_is_killed(kafka, crew, far=20_000)


@pytest.mark.storm
@pytest.mark.asyncio
async def test_f1_when_one_of_two_is_killed_with_a_hundred_thousand_pending(kafka: str, crew: Crew) -> None:
    await one_of_two_is_killed(kafka, crew, far=100_000)
