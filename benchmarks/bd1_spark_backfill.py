"""BD1: the rate at which Spark stores rows in Redis, compared with bare redis-py in as many processes."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import redis

from aiodelay.backends.redis.connection.scripts import script
from aiodelay.backends.redis.records.keys import Keys
from aiodelay.redis import RedisStore

from .harness import Benchmark, Goal, Plan, Row, Stopwatch, check, in_turn, per_message_us, ratios
from .redis_server import MESSAGES_KEY, empty
from .spark_tables import PROCESSES, session, write_messages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["BENCHMARK"]

ROWS = 1_000_000
GOAL = Goal("at least", 0.8)

AT_ONCE = 500
NO_OP = bytes(8)
VERSION = bytes(8)


def run(plan: Plan) -> list[Row]:
    n, path = plan.size(ROWS), plan.directory / "messages"
    context = multiprocessing.get_context("spawn")
    with session(plan) as spark, ProcessPoolExecutor(PROCESSES, mp_context=context) as processes:
        frame = write_messages(spark, n, path)
        files = sorted(path.glob("*.parquet"))
        parts = [files[number::PROCESSES] for number in range(PROCESSES)]

        def bare() -> float:
            prepare(plan.redis)
            with Stopwatch() as watch:
                list(processes.map(partial(write_part, plan.redis), parts))
            _check_stored(plan.redis, n)
            return watch.seconds

        sides: dict[str, Callable[[], float]] = {
            "bare": bare,
            "job": partial(backfill, frame, plan.redis, n),
            "write": partial(write, frame, plan.redis, n),
        }
        for side in sides.values():
            side()  # warm up Spark
        times = in_turn(plan, sides)
    empty(plan.redis)

    def row(what: str, ours: str, goal: Goal | None) -> Row:
        beside = f"{per_message_us(times[ours], n)} a message, bare {per_message_us(times['bare'], n)}"
        return Row("BD1", what, "x bare speed", ratios(times["bare"], times[ours]), goal, beside)

    return [
        row(f"Redis: backfill of {n:,} rows of Parquet, {PROCESSES} tasks, no rate limit", "job", GOAL),
        row(f"Redis: only the writes of a backfill of {n:,} rows, without the checks before them", "write", None),
    ]


def backfill(frame: DataFrame, url: str, n: int) -> float:
    """Measure our side: the backfill job with all its checks."""
    from aiodelay.spark.jobs.backfill import run as run_job  # noqa: PLC0415 - where Spark is

    empty(url)
    with Stopwatch() as watch:
        summary = run_job(frame, store=url, rate=0)
    check(summary.counts["stored"] == n, "not all rows were stored")
    _check_stored(url, n)
    return watch.seconds


def write(frame: DataFrame, url: str, n: int) -> float:
    """Measure our side: the data source alone, without the checks of the job."""
    empty(url)
    with Stopwatch() as watch:
        frame.write.format("aiodelay").mode("append").options(store=url, rate="0").save()
    _check_stored(url, n)
    return watch.seconds


def _check_stored(url: str, n: int) -> None:
    with redis.Redis.from_url(url) as client:
        check(client.hlen(MESSAGES_KEY) == n, "not all messages are there")


# --- the bare side ----------------------------------------------------------------------------------------


def prepare(url: str) -> None:
    """Empty the database, and create a namespace."""

    async def open_once() -> None:
        async with RedisStore(url):
            pass

    empty(url)
    asyncio.run(open_once())


def write_part(url: str, files: list[Path]) -> None:
    """Send the rows of one process, 500 rows a call. Compose each call while the server runs the call before."""
    apply, keys = script("apply"), Keys("default").fixed
    head = ("EVALSHA", apply.sha, len(keys), *keys, "", 0, "", "", "", "")
    with redis.Redis.from_url(url, socket_timeout=None) as client:
        client.script_load(apply.text)
        connection: Any = client.connection_pool.get_connection()
        sent = 0
        for rows in _chunks(files):
            connection.send_command(*head, *chain.from_iterable(map(_arguments, rows)))
            sent += 1
            if sent > 1:
                _read(connection)
        if sent:
            _read(connection)


def _read(connection: Any) -> None:  # noqa: ANN401 - redis-py's
    answers = connection.read_response()
    check(all(each[:1] == b"s" for each in answers[1:]), "a message was not stored")


def _chunks(files: list[Path]) -> Iterator[list[tuple[str, int, bytes, str]]]:
    import pyarrow as pa  # noqa: PLC0415 - where Spark is
    import pyarrow.parquet as pq  # noqa: PLC0415 - as above

    for file in files:
        for batch in pq.ParquetFile(file).iter_batches(AT_ONCE, columns=["id", "due_at", "payload", "to"]):
            ids, dues, payloads, destinations = batch.columns
            times = dues.cast(pa.timestamp("ms")).cast(pa.int64())
            columns = (ids.to_pylist(), times.to_pylist(), payloads.to_pylist(), destinations.to_pylist())
            yield list(zip(*columns, strict=True))


def _arguments(row: tuple[str, int, bytes, str]) -> tuple[Any, ...]:
    message_id, due_ms, payload, to = row
    lane, _, address = to.partition(":")
    body = msgspec.msgpack.encode({"p": payload, "a": address})
    return b"n-" + VERSION, b"\x02" + message_id.encode(), NO_OP, lane, due_ms, "", VERSION, body


BENCHMARK = Benchmark("BD1", "backfill from Spark into Redis", run, needs_redis=True, needs_spark=True)
