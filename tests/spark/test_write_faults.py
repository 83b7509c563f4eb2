"""Faults while rows are written: failing tasks, silent stores, writers that continue too late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice

import msgspec
import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from aiodelay.errors import StoreFullError, StoreUnavailableError
from aiodelay.spark.errors import clear_error
from aiodelay.spark.loading import Counts, load
from aiodelay.spark.write_settings import WriteSettings, read_settings
from aiodelay.spark.writing import write_frame
from tests.spark.messages import end_some, frame_of, given, stored
from tests.support.processes import ROOT
from tests.support.proxy import proxied_by_thread
from tests.support.servers import RedisServer, redis_products, start

SCHEMA = StructType(
    [StructField("id", StringType()), StructField("due_at", TimestampType()), StructField("payload", StringType())]
)


def failing(spark: SparkSession, url: str, namespace: str, attempts: int) -> DataFrame:
    """Return messages of whose second part so many attempts end when the store has some of its rows."""

    def broken(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        fails = task.partitionId() == 1 and task.attemptNumber() < attempts
        yield from islice(batches, 8) if fails else batches
        if fails:
            while not any(int(message_id) >= 1_000 for message_id in stored(url, namespace)):
                pass
            raise OSError("this attempt is to fail")

    return large_frame(spark).mapInArrow(broken, SCHEMA)


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[None]:
    """Spark hands rows on by hundreds, and not all at the end."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    spark.conf.set(name, "100")
    yield
    spark.conf.unset(name)


def large_frame(spark: SparkSession) -> DataFrame:
    """Return 2,000 messages; of as many bytes that Spark hands on the first ones before it has made the last."""
    return frame_of(spark, 2_000).withColumn("payload", F.expr("repeat(payload, 500)"))


def settings(url: str, namespace: str, **options: str) -> WriteSettings:
    return read_settings(given(url, namespace, **options), SCHEMA)


def batches_of(sizes: list[int]) -> Iterator[pa.RecordBatch]:
    first = 0
    for size in sizes:
        ids = pa.array([f"{n}" for n in range(first, first + size)])
        dues = pa.array([1_000_000] * size, pa.timestamp("us", "UTC"))
        yield pa.record_batch([ids, dues, ids], SCHEMA.names)
        first += size


@pytest.mark.usefixtures("small_batches")
def test_a_task_that_is_run_again_stores_every_message_once(
    spark: SparkSession, redis_server: RedisServer, namespace: str
) -> None:
    url = redis_server.url
    counts = write_frame(failing(spark, url, namespace, 1), given(url, namespace))
    assert len(stored(url, namespace)) == 2_000
    assert counts.rows == 2_000, "the attempt that failed is not counted"
    assert 1 <= counts.known <= 800
    assert counts.replaced == 0


@pytest.mark.usefixtures("small_batches")
def test_a_write_of_which_a_task_fails_for_good_is_completed_by_another(
    spark: SparkSession, redis_server: RedisServer, namespace: str
) -> None:
    url, options = redis_server.url, given(redis_server.url, namespace)
    with pytest.raises(Exception, match="this attempt is to fail"):
        failing(spark, url, namespace, 3).write.format("aiodelay").mode("append").options(**options).save()
    assert 0 < len(stored(url, namespace)) <= 1_800
    large_frame(spark).write.format("aiodelay").mode("append").options(**options).save()
    assert len(stored(url, namespace)) == 2_000


def test_a_finished_load_that_is_run_again_brings_back_nothing_that_has_ended(
    spark: SparkSession, redis_server: RedisServer, namespace: str
) -> None:
    frame, options = frame_of(spark, 1_000, due="2020-01-01"), given(redis_server.url, namespace)
    assert write_frame(frame, options) == Counts(stored=1_000)
    ended = end_some(redis_server.url, namespace, deliver=500, cancel=[f"{n}" for n in range(0, 200, 2)])
    assert len(ended) == 600
    assert write_frame(frame, options) == Counts(known=1_000)
    assert stored(redis_server.url, namespace).keys() == {f"{n}" for n in range(1_000)} - ended


def test_a_store_out_of_an_executors_reach_is_told_by_name_without_its_password(spark: SparkSession) -> None:
    options = given("redis://user:secret@127.0.0.1:1", "default", timeout="300ms")
    with pytest.raises(Exception, match="StoreUnavailableError") as found:
        frame_of(spark, 10).write.format("aiodelay").mode("append").options(**options).save()
    error = clear_error(found.value)
    assert isinstance(error, StoreUnavailableError)
    assert str(error).startswith("redis://user:***@127.0.0.1:1 is unavailable")
    assert "secret" not in f"{found.value}"


def test_rows_whose_answers_are_lost_are_sent_again_until_all_are_there(
    redis_server: RedisServer, namespace: str
) -> None:
    with proxied_by_thread(redis_server.port) as proxy:
        proxy.mode = "lossy"
        url = f"redis://127.0.0.1:{proxy.port}?timeout_ms=500"
        counts = load(settings(url, namespace, batchRows="100"), batches_of([5_000, 5_000]))
    assert counts.rows == 10_000
    assert counts.replaced == 0
    assert len(stored(redis_server.url, namespace)) == 10_000


def test_a_store_without_room_ends_the_write_after_its_patience() -> None:
    server = start(redis_products()[0].program)

    def filling() -> Iterator[pa.RecordBatch]:
        yield from batches_of([10])
        server.command("CONFIG", "SET", "maxmemory", "1")
        yield from batches_of([20])

    try:
        with pytest.raises(StoreFullError, match="rows were sent for 300ms without success"):
            load(settings(server.url, "default", timeout="300ms"), filling())
    finally:
        server.stop()


def test_a_writer_that_was_frozen_brings_back_nothing_when_it_wakes(redis_server: RedisServer, namespace: str) -> None:
    options = settings(redis_server.url, namespace)
    program = [sys.executable, "-m", "tests.spark.frozen_writer", redis_server.url, namespace]
    with subprocess.Popen(program, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        os.kill(writer.pid, signal.SIGSTOP)
        load(options, batches_of([1_000, 1_000]))
        ended = end_some(redis_server.url, namespace, deliver=1_500, cancel=["1", "1999"])
        os.kill(writer.pid, signal.SIGCONT)
        told, _ = writer.communicate("go on\n")
    assert writer.returncode == 0
    assert msgspec.json.decode(told, type=Counts).known >= 1_000
    assert stored(redis_server.url, namespace).keys() == {f"{n}" for n in range(2_000)} - ended


def test_a_part_that_two_tasks_write_at_once_is_stored_once(
    spark: SparkSession, redis_server: RedisServer, namespace: str
) -> None:
    rows = frame_of(spark, 1_000)
    both = rows.withColumn("copy", F.lit(0)).union(rows.withColumn("copy", F.lit(1)))
    halves = both.repartitionByRange(2, "copy").drop("copy")
    counts = write_frame(halves, given(redis_server.url, namespace, rate="0"))
    assert counts == Counts(stored=1_000, known=1_000)
    assert len(stored(redis_server.url, namespace)) == 1_000
