"""A driver is killed in the middle of every job. The next run delivers each message once, and no ended message."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
from pyspark.sql import SparkSession

from aiodelay.backends.registry import open_store
from aiodelay.core.ids import new_op
from aiodelay.core.values import At, Cancel, Conflict, Envelope, Put, Query
from aiodelay.spark.jobs import archive, engine, migrate
from aiodelay.spark.writing import write_frame
from tests.spark.messages import end_some, frame_of, given, stored
from tests.spark.program import ROWS, follow, migration
from tests.spark.test_engine import Topics, check_none_early, ids, now_ms, until_all
from tests.spark.tiers import NOW, days, moved, put, rows
from tests.support.journals import note
from tests.support.planted import apply
from tests.support.processes import ROOT
from tests.support.servers import RedisServer, redis_products, start

# At night, since a cold JVM with seven jobs takes a tenth of the gate's time. The gate kills a driver in test_sessions,
# and ends jobs at each of their steps in test_promote, test_cold, test_archive, test_migrate_faults, test_write_faults.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

STREAMED, PROMOTED, MIGRATED, NOTED, ASKED = 600, 600, 600, 1_000, 200
"""How much there is to do: at its rate each job would take ten minutes."""
CUTOVER = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
START_S = 300.0


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program with a JVM and workers, and kill all of them; show its log if the block fails."""
    program = [sys.executable, "-m", "tests.spark.program", *arguments]
    with (
        TemporaryFile() as log,
        subprocess.Popen(program, cwd=ROOT, start_new_session=True, stdin=subprocess.PIPE, stderr=log) as process,
    ):
        try:
            yield process
        except AssertionError:
            log.seek(0)
            print(log.read()[-9_000:].decode(errors="replace"))
            raise
        finally:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGKILL)


def wait_until(process: subprocess.Popen[Any], is_so: Callable[[], bool]) -> None:
    """Return once something is so of a program that is still going on."""
    deadline = time.monotonic() + START_S
    while not is_so():
        assert process.poll() is None, "it ended before"
        assert time.monotonic() < deadline
        time.sleep(0.02)  # a poll: files tell nobody that they are there


def wait_for_rows(process: subprocess.Popen[bytes], url: str, namespace: str, rows: int = 1) -> None:
    """Return once a program has written so many."""

    async def wait() -> None:
        async with open_store(url, namespace=namespace, clock=None) as store, store.work("tests", ()) as work:
            while True:
                work.clear()
                if len(await store.search(Query(limit=rows))) == rows:
                    return
                assert process.poll() is None, "it ended before it wrote as many"
                await work.wait(until_ms=None)

    asyncio.run(wait())


@dataclass
class Killed:
    """Stores, a topic and a folder in the middle of every job, all of whose processes are gone.

    Attributes:
        url: Of the Redis server, which has a namespace for each job.
        folder: Of the tier, the archive, and all checkpoints.
        topics: Of the engine.
    """

    url: str
    folder: Path
    topics: Topics

    @property
    def noted(self) -> str:
        """The URL of the store whose events are archived."""
        return f"sqlite:///{self.folder / 'noted.db'}?journal=100000"


@pytest.fixture(scope="module")
def killed(
    spark: SparkSession, kafka: str, redis_of_module: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Killed:
    """Kill one process that has begun every job, once each has done a part of its work."""
    place = Killed(redis_of_module.url, tmp_path_factory.mktemp("killed"), Topics(kafka))
    prepare(spark, place)
    arguments = (place.url, place.topics.url, f"{place.folder}", (NOW + days(9)).isoformat(), CUTOVER.isoformat())
    place.topics.send(place.topics.put("first", 0))
    with running("do_all_slowly", *arguments) as process:
        for name, n in (("written", 1), ("streamed", 2), ("promoted", 3), ("copied-to", 1)):
            wait_for_rows(process, place.url, name, rows=n)
        wait_until(process, lambda: len(stored(place.url, "taken-from")) < MIGRATED)
        wait_until(process, (place.folder / "archive" / "_checkpoint" / "offsets" / "1").exists)
        place.topics.read(place.topics.out, 1, is_going=lambda: process.poll() is None)
        start_ms = now_ms() + 1_000
        place.topics.send(*(place.topics.put(f"m{n}", start_ms + n * 50) for n in range(ASKED)))
        place.topics.read(place.topics.out, 10, is_going=lambda: process.poll() is None)
    return place


@pytest.fixture(scope="module")
def redis_of_module() -> Iterator[RedisServer]:
    """A server whose namespaces are those that the program writes."""
    server = start(redis_products()[0].program)
    yield server
    server.stop()


def prepare(spark: SparkSession, place: Killed) -> None:
    """Make what the jobs read."""
    frame_of(spark, STREAMED, due="2020-01-01", partitions=4).write.parquet(f"{place.folder / 'rows'}")
    put(
        rows(spark, *((f"{n}", 10 + n % 3 / 2, 1) for n in range(PROMOTED)), ("far", 90, 1)), f"{place.folder / 'tier'}"
    )
    due_ms = int(CUTOVER.timestamp() * 1000) + 3_600_000
    for name in ("copied", "taken"):
        envelopes = (Envelope(f"m{n}", "lane", payload=b"%d" % n) for n in range(MIGRATED))
        apply(place.url, f"{name}-from", *(Put(new_op(), each, At(due_ms), Conflict.replace()) for each in envelopes))
    asyncio.run(note(place.noted, 1, NOTED))


def test_a_killed_write_is_completed_by_another(spark: SparkSession, killed: Killed) -> None:
    some = stored(killed.url, "written").keys()
    assert 0 < len(some) < ROWS
    ended = end_some(killed.url, "written", deliver=1)
    counts = write_frame(frame_of(spark, ROWS, due="2020-01-01"), given(killed.url, "written"))
    assert counts.known >= len(some)
    assert counts.rows == ROWS
    assert stored(killed.url, "written").keys() == {f"{n}" for n in range(ROWS)} - ended


def test_a_killed_stream_goes_on_from_its_checkpoint(spark: SparkSession, killed: Killed) -> None:
    some = stored(killed.url, "streamed").keys()
    assert 0 < len(some) < STREAMED
    ended = end_some(killed.url, "streamed", deliver=1, cancel=[min(some)])
    follow(spark, killed.url, "streamed", f"{killed.folder}")
    assert stored(killed.url, "streamed").keys() == {f"{n}" for n in range(STREAMED)} - ended


def test_a_promotion_that_was_killed_while_it_wrote_is_made_up_for_once(spark: SparkSession, killed: Killed) -> None:
    tier, later = f"{killed.folder / 'tier'}", NOW + days(9)
    found = stored(killed.url, "promoted")
    assert 0 < len(found) < PROMOTED
    ended = end_some(killed.url, "promoted", deliver=2, cancel=[max(found)])
    again = moved(spark, tier, killed.url, later, namespace="promoted")
    assert (again.rows, again.counts["known"]) == (PROMOTED, len(found))
    last = moved(spark, tier, killed.url, later, namespace="promoted")
    assert (last.rows, last.facts["days"]) == (0, [])
    assert stored(killed.url, "promoted").keys() == {f"{n}" for n in range(PROMOTED)} - ended


def test_a_migration_that_was_killed_while_it_copied_moves_what_is_wanted_now(
    spark: SparkSession, killed: Killed
) -> None:
    source, target = "copied-from", "copied-to"
    copies = stored(killed.url, target)
    assert 0 < len(copies) < MIGRATED
    assert len(stored(killed.url, source)) == MIGRATED
    uncopied = next(f"m{n}" for n in range(MIGRATED) if f"m{n}" not in copies)
    cancelled, replaced = {min(copies), uncopied}, max(copies)
    if replaced in cancelled:  # there is one copy alone
        replaced = f"m{MIGRATED - 1}"
    apply(killed.url, source, *(Cancel(new_op(), each) for each in sorted(cancelled)))
    due = At(int(CUTOVER.timestamp() * 1000) + 3_600_000)
    apply(killed.url, source, Put(new_op(), Envelope(replaced, "lane", payload=b"new"), due, Conflict.replace()))
    check_moved(spark, killed, "copied", {replaced: b"new"}, cancelled)


def test_a_migration_that_was_killed_while_it_took_out_goes_on(spark: SparkSession, killed: Killed) -> None:
    left, there = stored(killed.url, "taken-from"), stored(killed.url, "taken-to")
    assert 0 < len(left) < MIGRATED
    assert left.keys() | there.keys() == {f"m{n}" for n in range(MIGRATED)}
    check_moved(spark, killed, "taken", {}, set())


def check_moved(
    spark: SparkSession, killed: Killed, name: str, replaced: dict[str, bytes], cancelled: set[str]
) -> None:
    """End a migration; all that is wanted must be where it goes to, and nothing where it came from."""
    places = migration(killed.url, name, CUTOVER.isoformat(), f"{killed.folder}")
    summary = migrate.run(spark, **places, rate=0, concurrency=2, verify=True)
    assert (summary.rejected, summary.facts["resumed"]) == (0, True)
    assert not stored(killed.url, f"{name}-from")
    payloads = {each: record.envelope.payload for each, record in stored(killed.url, f"{name}-to").items()}
    wanted = {f"m{n}": b"%d" % n for n in range(MIGRATED)} | replaced
    assert payloads == {each: payload for each, payload in wanted.items() if each not in cancelled}


def test_an_archive_job_that_was_killed_goes_on_and_every_event_is_archived_once(
    spark: SparkSession, killed: Killed
) -> None:
    folder = f"{killed.folder / 'archive'}"
    before = spark.read.parquet(folder).count()
    assert 0 < before < NOTED
    assert archive.run(spark, store=killed.noted, to=folder).rows <= NOTED - before
    numbers = [row.number for row in spark.read.parquet(folder).select("number").collect()]
    assert sorted(numbers) == [*range(1, NOTED + 1)]


def test_what_waits_when_an_engine_is_killed_comes_once_and_none_early(spark: SparkSession, killed: Killed) -> None:
    given: dict[str, Any] = {"source": killed.topics.url, "checkpoint": f"{killed.folder / 'engine'}", "shards": 2}
    query = engine.start(spark, **given, trigger="2s")
    try:
        found = asyncio.run(until_all(killed.topics, ASKED + 1))
    finally:
        query.stop()
    check_none_early(found)
    times = Counter(dict(each.headers)["aiodelay-delivery-id"] for each in found)
    assert set(ids(found)) == {"first", *(f"m{n}" for n in range(ASKED))}
    assert len(times) == ASKED + 1
    assert max(times.values()) <= 2  # of the one batch that was under way
