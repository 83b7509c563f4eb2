"""Drivers that are killed while they write, and what another finds: every message once, and none that has ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyspark.sql import SparkSession

from aiodelay.model import Query
from aiodelay.ports import Inspectable
from aiodelay.registry import open_store
from aiodelay.spark.writing import write_frame
from tests.spark.messages import end_some, frame_of, given, stored
from tests.spark.program import ROWS, follow
from tests.support.processes import ROOT
from tests.support.servers import RedisServer


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program with a JVM and workers; all of them are killed at the end."""
    program = [sys.executable, "-m", "tests.spark.program", *arguments]
    with subprocess.Popen(program, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGKILL)


def wait_for_rows(process: subprocess.Popen[bytes], url: str, namespace: str, rows: int = 1) -> None:
    """Return once a program has written so many."""

    async def wait() -> None:
        async with open_store(url, namespace=namespace, clock=None) as store, store.work("tests", ()) as work:
            assert isinstance(store, Inspectable)
            while True:
                work.clear()
                if len(await store.search(Query(limit=rows))) == rows:
                    return
                assert process.poll() is None, "it ended before it wrote as many"
                await work.wait(until_ms=None)

    asyncio.run(wait())


def test_a_killed_write_is_completed_by_another(spark: SparkSession, redis_server: RedisServer, namespace: str) -> None:
    url = redis_server.url
    with running("write_slowly", url, namespace) as process:
        wait_for_rows(process, url, namespace)
    some = stored(url, namespace).keys()
    assert len(some) < ROWS
    ended = end_some(url, namespace, deliver=1)
    frame = frame_of(spark, ROWS, due="2020-01-01")
    counts = write_frame(frame, given(url, namespace))
    assert counts.known >= len(some)
    assert counts.rows == ROWS
    assert stored(url, namespace).keys() == {f"{n}" for n in range(ROWS)} - ended


def test_a_killed_stream_goes_on_from_its_checkpoint(
    spark: SparkSession, redis_server: RedisServer, namespace: str, tmp_path: Path
) -> None:
    url = redis_server.url
    frame_of(spark, 200, due="2020-01-01", partitions=4).write.parquet(f"{tmp_path / 'rows'}")
    with running("stream_slowly", url, namespace, f"{tmp_path}") as process:
        wait_for_rows(process, url, namespace, rows=2)
    some = stored(url, namespace).keys()
    assert len(some) < 200
    ended = end_some(url, namespace, deliver=1, cancel=[min(some)])
    follow(spark, url, namespace, f"{tmp_path}")
    assert stored(url, namespace).keys() == {f"{n}" for n in range(200)} - ended
