"""A partition's index on disk: what a restart reads, what a kill leaves, and which files are rejected."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer

from aiodelay.backends.kafka import KafkaStore
from aiodelay.backends.kafka.pending import far_index
from aiodelay.backends.kafka.pending.pending_index import PendingIndex
from aiodelay.backends.kafka.pending.record_reader import RecordReader
from aiodelay.backends.kafka.store.assignment import look_ahead
from aiodelay.backends.kafka.topics.topic import SETTINGS
from aiodelay.core.ids import new_op
from aiodelay.core.values import Cancel, Query, Snapshot, Stored
from aiodelay.errors import ConfigurationError
from aiodelay.kafka.records import Read
from aiodelay.ports.clock import SystemClock
from tests.support.kafka import create_topic, new_name, read
from tests.support.processes import Crew
from tests.support.topics import delete_topic
from tests.support.waiting import until

from .programs.kafka_index import Plan
from .test_kafka_store import ALL, PlainClient, moved, now_ms, put, transfer

pytestmark = pytest.mark.asyncio

NEAR_MS, HORIZON_MS, FAR_MS = 1_800_000, 3_600_000, 7_200_000
"""So far apart that nothing comes near or due while a test runs, on any machine."""
OPTIONS = "members=1&timeout_ms=120000"
FEW = 5
"""A session's own records: barriers, marks and the number of partitions."""


def url_of(kafka: str, schedules: str, folder: Path) -> str:
    return f"kafka://{kafka}/{schedules}?{OPTIONS}&horizon={HORIZON_MS}ms&index={folder}"


@asynccontextmanager
async def opened(
    kafka: str,
    schedules: str,
    folder: Path,
    *,
    partitions: int = 1,
    clock: SystemClock | None = None,
) -> AsyncIterator[KafkaStore]:
    url = f"{url_of(kafka, schedules, folder)}&create_topic=true&partitions={partitions}"
    async with (
        KafkaStore(url, clock=clock) as store,
        store.work("w", ["kafka"]),
    ):
        yield store


def index_of(store: KafkaStore) -> PendingIndex:
    (found,) = store.partitions.values()
    return found.index


@pytest.fixture
def was_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets of the records that indices have read."""
    offsets: list[int] = []
    real = RecordReader.read

    def counting(reader: RecordReader, read: Read) -> None:
        offsets.append(read.offset)
        real(reader, read)

    monkeypatch.setattr(RecordReader, "read", counting)
    return offsets


async def fill(kafka: str, schedules: str, folder: Path, *, n: int = 500) -> list[Snapshot]:
    """Schedule what is far, near, replaced, cancelled and ended; return what stands."""
    target = await create_topic(kafka, new_name())
    async with opened(kafka, schedules, folder) as store:
        far_ahead = now_ms() + FAR_MS
        await store.apply([put(i, target, far_ahead + i) for i in range(n)])
        await store.apply([put(i, target, now_ms() + NEAR_MS) for i in range(n, n + 5)])
        await store.apply([put(i, target, now_ms()) for i in range(n + 5, n + 10)])
        await moved(store, 5)
        await store.apply([Cancel(new_op(), "m1"), put(2, target, far_ahead)])
        await store.pause("kafka", "held")
        return list(await store.search(Query(limit=1000)))


async def test_f38_a_restart_reads_the_tail_alone_and_finds_what_a_whole_read_finds(
    kafka: str, tmp_path: Path, was_read: list[int]
) -> None:
    schedules = new_name("schedules")
    left = await fill(kafka, schedules, tmp_path)
    modes = {name: os.stat(tmp_path / name).st_mode & 0o777 for name in os.listdir(tmp_path)}
    assert set(modes.values()) == {0o600}, modes
    was_read.clear()
    async with opened(kafka, schedules, tmp_path) as store:
        assert len(was_read) <= 5 + 1 + FEW  # what is near, the hold, and what is written at a start
        assert list(await store.search(Query(limit=1000))) == left
        assert await store.paused() == [("kafka", "held")]
        PlainClient(kafka, schedules).cancel(b"m7")
        (cancelled,) = await store.apply([Cancel(new_op(), "m8")])
        assert isinstance(cancelled, Stored)
        after = list(await store.search(Query(limit=1000)))
    (tmp_path / "other").mkdir()
    was_read.clear()
    async with opened(kafka, schedules, tmp_path / "other") as store:
        assert len(was_read) > 500
        assert list(await store.search(Query(limit=1000))) == after
        assert {"m7", "m8"}.isdisjoint(each.record.id for each in after)


async def test_what_comes_near_after_a_restart_is_delivered_once_and_in_time(
    kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look_ahead, "LOOK_AHEAD_S", 0.05)
    schedules, target, clock = new_name("schedules"), await create_topic(kafka, new_name()), StandingClock()
    due = clock.at_ms + FAR_MS
    async with opened(kafka, schedules, tmp_path, clock=clock) as store:
        await store.apply([put(i, target, due) for i in range(200)])
        assert len(index_of(store).state.far) == 200
    async with opened(kafka, schedules, tmp_path, clock=clock) as store:
        assert len(index_of(store).state.far) == 200
        clock.at_ms = due - NEAR_MS
        await until(lambda: not len(index_of(store).state.far), "all have come near")
        clock.at_ms = due - 1
        assert await transfer(store, ALL) == 0
        clock.at_ms = due
        await moved(store, 200)
    async with opened(kafka, schedules, tmp_path, clock=clock) as store:
        assert await transfer(store, ALL) == 0
        assert await store.counts() == {}
    found = await read(kafka, target, 200)
    assert sorted(int(record.value) for record in found) == list(range(200))


async def test_a_partition_that_was_elsewhere_meanwhile_is_as_its_other_owner_left_it(
    kafka: str, tmp_path: Path, was_read: list[int]
) -> None:
    schedules = new_name("schedules")
    await fill(kafka, schedules, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    async with opened(kafka, schedules, elsewhere) as store:
        await store.apply([Cancel(new_op(), "m3"), put(4, "t", now_ms() + 2 * FAR_MS)])
        left = list(await store.search(Query(limit=1000)))
    was_read.clear()
    async with opened(kafka, schedules, tmp_path) as store:
        assert list(await store.search(Query(limit=1000))) == left
        assert len(was_read) < 50


async def test_a_rebalance_leaves_the_index_to_whoever_comes_next(
    kafka: str, tmp_path: Path, was_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes on one directory: a partition's file is waited for until the one before has closed it."""
    monkeypatch.setattr(far_index, "BUSY_S", 60.0)  # a slow machine may need as long to close it
    schedules = new_name("schedules")
    async with opened(kafka, schedules, tmp_path, partitions=2) as store:
        await store.apply([put(i, "t", now_ms() + FAR_MS) for i in range(200)])
        before = dict(store.partitions)
        store.assignment.assign(schedules, [0])
        store.assignment.assign(schedules, [0, 1])
        was_read.clear()
        changed = [each for place, each in store.partitions.items() if before[place] is not each]
        assert [each.number for each in changed] == [1]
        assert await changed[0].until_ready()
        assert len(await store.search(Query(limit=1000))) == 200
        assert len(was_read) <= FEW


# --- what is worth nothing --------------------------------------------------------------------------------


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 0x10
    path.write_bytes(data)


def of_later_version(path: Path) -> None:
    with closing(sqlite3.connect(path)) as table:
        table.execute(f"PRAGMA user_version = {far_index.FORMAT + 1}")


def with_other_rows(path: Path) -> None:
    with closing(sqlite3.connect(path)) as table, table:
        table.execute("UPDATE far SET due = due + 1 WHERE hash = (SELECT max(hash) FROM far)")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no database": lambda path: path.write_bytes(b"x" * 5000),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "its head": lambda path: flipped(path, 30),
    "its middle": lambda path: flipped(path, 3 * 4096 + 1000),
    "a row": with_other_rows,
    "a later version": of_later_version,
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_f38_a_damaged_file_is_found_and_made_anew(
    kafka: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, was_read: list[int], damage: str
) -> None:
    schedules = new_name("schedules")
    left = await fill(kafka, schedules, tmp_path)
    file = tmp_path / f"{schedules}-0.index"
    DAMAGES[damage](file)
    was_read.clear()
    async with opened(kafka, schedules, tmp_path) as store:
        assert len(was_read) > 500
        assert list(await store.search(Query(limit=1000))) == left
    assert "is created again, and its partition is read from its start" in caplog.text
    was_read.clear()
    async with opened(kafka, schedules, tmp_path):
        assert len(was_read) < 20


class StandingClock(SystemClock):
    """A wall clock that only its test moves."""

    def __init__(self) -> None:
        self.at_ms = now_ms()

    def now_ms(self) -> int:
        return self.at_ms

    def seconds_until(self, at_ms: int) -> float:
        return (at_ms - self.at_ms) / 1000


class SteppedClock(SystemClock):
    """This machine's, stepped."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


async def test_f38_an_old_checkpoint_is_not_gone_on_from(
    kafka: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, was_read: list[int]
) -> None:
    schedules, clock = new_name("schedules"), SteppedClock()
    await fill(kafka, schedules, tmp_path)
    for hours, is_gone_on_from in ((23, True), (25, False), (-1, False)):
        clock.ahead_ms += hours * 3_600_000
        was_read.clear()
        async with opened(kafka, schedules, tmp_path, clock=clock):
            assert (len(was_read) < 50) == is_gone_on_from
    assert "min.compaction.lag.ms and half of delete.retention.ms" in caplog.text


async def test_a_topic_that_was_made_anew_is_read_from_its_start(
    kafka: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schedules = new_name("schedules")
    await fill(kafka, schedules, tmp_path)
    await asyncio.to_thread(delete_topic, kafka, schedules)
    await create_topic(kafka, schedules, 1, **{name.replace(".", "_"): value for name, value in SETTINGS.items()})
    far_ahead = [("scheduler-epoch", b"4000000000"), ("scheduler-target-topic", b"t")]
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        for sent in [await producer.send(schedules, b"", b"n%d" % i, headers=far_ahead) for i in range(900)]:
            await sent
    async with opened(kafka, schedules, tmp_path) as store:
        assert {each.record.id for each in await store.search(Query(limit=1000))} == {f"n{i}" for i in range(900)}
    assert "has another record now" in caplog.text


async def test_a_file_that_another_process_has_open_is_left_to_it(
    kafka: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(far_index, "BUSY_S", 0.1)
    schedules = new_name("schedules")
    left = await fill(kafka, schedules, tmp_path)
    file = tmp_path / f"{schedules}-0.index"
    held = far_index.FarIndex(f"{file}")
    async with opened(kafka, schedules, tmp_path) as store:
        assert list(await store.search(Query(limit=1000))) == left
        assert not index_of(store).state.far.is_in_file
    assert "another process has it open" in caplog.text
    held.close()
    async with opened(kafka, schedules, tmp_path) as store:
        assert index_of(store).state.far.is_in_file
        assert list(await store.search(Query(limit=1000))) == left


async def test_a_directory_that_is_missing_is_refused_by_name(kafka: str, tmp_path: Path) -> None:
    async with KafkaStore(f"{url_of(kafka, new_name(), tmp_path / 'none')}&create_topic=true") as store:
        with pytest.raises(ConfigurationError, match=r"index in kafka://.* allowed: a directory in which files can be"):
            async with store.work("w", ["kafka"]):
                pass


# --- processes --------------------------------------------------------------------------------------------

STEPS = {"flush": 300, "INSERT OR REPLACE INTO kept": 300, "COMMIT": 300, "end": 0, "none": 0}
"""Of a checkpoint, and how many messages it has not kept of a process that was killed before each."""


@pytest.mark.parametrize("step", STEPS)
async def test_f38_a_process_killed_at_any_step_of_a_checkpoint_leaves_the_one_before(
    kafka: str, tmp_path: Path, was_read: list[int], step: str
) -> None:
    schedules, folder = new_name("schedules"), tmp_path / "index"
    folder.mkdir()
    left = await fill(kafka, schedules, folder)
    with Crew(tmp_path) as crew:
        owner = crew.start("kafka_index", Plan(store=url_of(kafka, schedules, folder), step=step), name="owner")
        assert owner.line("n ") == f"{len(left) + 300}"
        assert owner.wait() == (0 if step == "none" else -signal.SIGKILL)
    was_read.clear()
    async with opened(kafka, schedules, folder) as store:
        found = list(await store.search(Query(limit=2000)))
        assert index_of(store).state.far.is_in_file
        assert STEPS[step] <= len(was_read) <= STEPS[step] + 30
    assert len(found) == len(left) + 300
    (tmp_path / "other").mkdir()
    async with opened(kafka, schedules, tmp_path / "other") as store:
        again = await store.search(Query(limit=2000))
    places = [[(each.record, each.next_attempt_ms) for each in way] for way in (found, again)]
    assert places[0] == places[1]  # some have become due meanwhile


async def test_f37_on_a_full_disk_the_index_is_held_in_memory(kafka: str, tmp_path: Path) -> None:
    schedules, folder = new_name("schedules"), tmp_path / "index"
    folder.mkdir()
    left = await fill(kafka, schedules, folder)
    with Crew(tmp_path) as crew:
        owner = crew.start("kafka_index", Plan(store=url_of(kafka, schedules, folder), step="full"), name="owner")
        assert owner.line("n ") == f"{len(left) + 300}"
        assert owner.line("in file ") == "False"
        owner.ended_well()
        assert "the index file has failed: " in owner.errors
    async with opened(kafka, schedules, folder) as store:
        assert index_of(store).state.far.is_in_file
        assert len(await store.search(Query(limit=2000))) == len(left) + 300
