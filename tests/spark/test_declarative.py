"""The Declarative Pipelines example, run twice by `spark-pipelines`: the second run's tables are complete, too."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import Row, SparkSession

from aiodelay.backends.registry import open_store
from aiodelay.core.ids import new_op
from aiodelay.core.values import At, Envelope, Put
from tests.spark.connect import Client
from tests.spark.messages import end_some, stored
from tests.spark.program import OWN_PORT
from tests.support.servers import RedisServer

pytestmark = pytest.mark.timeout(900)  # each run starts a JVM of its own, which takes a loaded machine long

SPEC = "spark-pipeline.yml"
EXAMPLE = Path(__file__).parents[2] / "examples" / "spark-pipelines"
N = 40
DAY_MS = 86_400_000


def deliver(url: str, first: int) -> None:
    """Have N messages delivered."""
    due_ms = time.time_ns() // 1_000_000 - 1_000

    async def put() -> None:
        async with open_store(url, namespace="default", clock=None) as store:
            envelopes = [Envelope(f"m{n}", "redis-list", "orders") for n in range(first, first + N)]
            await store.apply([Put(new_op(), each, At(due_ms)) for each in envelopes])

    asyncio.run(put())
    end_some(url, "default", N)


def command(folder: Path) -> list[str]:
    """Return the README's line, with another folder for everything."""
    text = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"^(spark-pipelines run .*?[^\\]\n)", text, re.DOTALL | re.MULTILINE)
    line = found.replace("\\\n", " ").replace("/tmp/aiodelay-pipelines", f"{folder}")
    program, *arguments = shlex.split(line.replace("examples/spark-pipelines", f"{folder / 'pipeline'}"))
    return [f"{Path(pyspark.__file__).parent / 'bin' / program}", *arguments]


TABLES = ("dispatch_log", "deliveries", "lateness_hourly")


@pytest.mark.nightly  # runs of the source that it reads: test_events; rows that it writes: test_connect
def test_a_second_run_takes_what_has_happened_since(
    spark: SparkSession, connect: Client, redis_server: RedisServer, tmp_path: Path
) -> None:
    run = [sys.executable, "-m", "pyspark.pipelines.cli", "run", "--spec", f"{tmp_path / 'pipeline' / SPEC}"]
    try:
        check_two_runs(spark, redis_server, tmp_path, run, connect.environment)
    finally:
        for name in TABLES:
            spark.sql(f"DROP TABLE IF EXISTS {name}")


@pytest.mark.nightly  # two JVMs, with a catalog that a file keeps; in the session's own: above
def test_a_second_run_by_the_line_of_the_page_takes_what_has_happened_since(
    spark: SparkSession, redis_server: RedisServer, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("SPARK_REMOTE", "SPARK_HOME")}
    environment |= {"PYSPARK_PYTHON": sys.executable} | OWN_PORT
    check_two_runs(spark, redis_server, tmp_path, command(tmp_path), environment)


def rows_of(spark: SparkSession, name: str, warehouse: Path) -> list[Row]:
    """Return the rows of a table: one of files, or of the session's own catalog if there is no such folder."""
    if warehouse.exists():
        return spark.read.parquet(f"{warehouse / name}").collect()
    spark.catalog.refreshTable(name)  # another session has written its files anew
    return spark.table(name).collect()


def check_two_runs(
    spark: SparkSession, redis_server: RedisServer, tmp_path: Path, command: list[str], environment: Mapping[str, str]
) -> None:
    """Run the example twice; after each run its tables have all that was delivered, and each delivery a message."""
    url = f"{redis_server.url}?journal=100000"
    shutil.copytree(EXAMPLE, tmp_path / "pipeline")
    for file in (tmp_path / "pipeline" / "transformations").iterdir():  # a server that runs has no such variable
        file.write_text(file.read_text("utf-8").replace("env:AIODELAY_STORE", url), "utf-8")
    spec = tmp_path / "pipeline" / SPEC
    spec.write_text(spec.read_text().replace("/tmp/aiodelay-pipelines", f"{tmp_path}"))
    environment = {**environment, "AIODELAY_STORE": url}
    warehouse = tmp_path / "warehouse"
    for runs in (1, 2):
        deliver(url, (runs - 1) * N)
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
        ids = {f"m{n}" for n in range(runs * N)}
        tables = {name: rows_of(spark, name, warehouse) for name in TABLES}
        assert {row.id for row in tables["dispatch_log"]} == ids
        assert sorted(row.id for row in tables["deliveries"]) == sorted(ids)
        assert sum(row.n for row in tables["lateness_hourly"]) == runs * N
        assert all(1_000 <= row.p50_ms <= row.p99_ms <= row.max_ms for row in tables["lateness_hourly"])
        follow_ups = stored(redis_server.url, "follow-ups")
        assert follow_ups.keys() == {f"follow-up-{each}" for each in ids}
    assert min(each.due_ms for each in follow_ups.values()) > time.time_ns() // 1_000_000 + DAY_MS - 3_600_000
