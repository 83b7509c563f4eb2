"""BD9: the number of rows from which Spark's backfill finishes before a plain program with `schedule_many`.

Both sides read the same Parquet files. Each side is a process, as a user starts it. So the times include the start of
Python, and on Spark's side the start of the session.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import redis

from tests.support.importing import import_path

from .harness import PAYLOAD_BYTES, Benchmark, Goal, Plan, Row, Stopwatch, check, in_turn, ratios
from .redis_server import MESSAGES_KEY, empty
from .spark_tables import DUE_MS, PROCESSES, TO

__all__ = ["BENCHMARK", "break_even"]

SIZES = (1_000, 10_000, 100_000, 500_000)
GOAL = Goal("at least", 1.0)
"""The goal at the largest size: Spark finishes first in spite of its start."""
LONGEST_S = 600.0
ROOT = Path(__file__).parents[1]


def run(plan: Plan) -> list[Row]:
    sizes = [plan.size(full) for full in SIZES]
    sides: dict[str, Callable[[], float]] = {}
    for n in sizes:
        folder = plan.directory / f"rows-{n}"
        write_rows(n, folder)
        sides |= {
            f"spark {n}": partial(load, plan, n, spark_command(plan, folder)),
            f"plain {n}": partial(load, plan, n, plain_command(plan, folder)),
        }
    times = in_turn(plan, sides)
    empty(plan.redis)
    spark, plain = ({n: times[f"{side} {n}"] for n in sizes} for side in ("spark", "plain"))
    return rows_of(spark, plain)


def rows_of(spark: Mapping[int, Sequence[float]], plain: Mapping[int, Sequence[float]]) -> list[Row]:
    """Return a row for each size; the row of the largest size has the goal and the break-even.

    Args:
        spark: Seconds that Spark takes, round by round, for each number of rows, ascending.
        plain: Seconds that the plain program takes.
    """
    sizes, largest = list(spark), max(spark)
    ours, bare = [*map(statistics.median, spark.values())], [*map(statistics.median, plain.values())]
    found = break_even(sizes, ours, bare)
    verdict = f"no break-even up to {largest:,} rows" if found is None else f"break-even at {found:,.0f} rows"
    rows = []
    for n, ours_s, bare_s in zip(sizes, ours, bare, strict=True):
        what = f"Redis: command `spark backfill` of {n:,} rows of Parquet, {PROCESSES} tasks, no rate limit"
        goal, found_of = (GOAL, f"; {verdict}") if n == largest else (None, "")
        beside = f"{ours_s:.1f} s, `schedule_many` {bare_s:.1f} s{found_of}"
        rows.append(Row("BD9", what, "x speed of `schedule_many`", ratios(plain[n], spark[n]), goal, beside))
    return rows


def break_even(sizes: Sequence[int], spark: Sequence[float], plain: Sequence[float]) -> float | None:
    """Return the number of rows from which Spark finishes first, by interpolation; None if it never does.

    Args:
        sizes: Numbers of rows, ascending.
        spark: Seconds that Spark takes for each size.
        plain: Seconds that the plain program takes for each size.
    """
    behind = [ours - bare for ours, bare in zip(spark, plain, strict=True)]
    if behind[0] <= 0:
        return float(sizes[0])
    for (n, now), (larger, then) in pairwise(zip(sizes, behind, strict=True)):
        if then <= 0:
            return n + (larger - n) * now / (now - then)
    return None


# --- the two sides ----------------------------------------------------------------------------------------


def write_rows(n: int, folder: Path) -> None:
    """Write messages 0 to n-1 as Parquet, a file for each task: an hour of due times, payloads of 200 bytes."""
    import pyarrow as pa  # noqa: PLC0415 - where Spark is
    import pyarrow.parquet as pq  # noqa: PLC0415 - as above

    folder.mkdir()
    for part in range(PROCESSES):
        numbers = range(part, n, PROCESSES)
        columns = {
            "id": pa.array([f"order-{number}" for number in numbers], pa.string()),
            "due_at": pa.array([DUE_MS + number % 3_600_000 for number in numbers], pa.timestamp("ms", tz="UTC")),
            "payload": pa.array([(b"%d" % number).ljust(PAYLOAD_BYTES, b"x") for number in numbers], pa.binary()),
            "to": pa.array([TO for _ in numbers], pa.string()),
        }
        pq.write_table(pa.table(columns), folder / f"part-{part}.parquet")


def spark_command(plan: Plan, folder: Path) -> list[str]:
    source, local = f"parquet:{folder}", f"spark.local.dir={plan.directory / 'spark'}"
    options = ["--from", source, "--store", plan.redis, "--rate", "0", "--master", f"local[{PROCESSES}]"]
    return ["aiodelay", "spark", "backfill", *options, "--conf", local]


def plain_command(plan: Plan, folder: Path) -> list[str]:
    return ["benchmarks.parquet_loader", plan.redis, f"{folder}"]


def load(plan: Plan, n: int, command: Sequence[str]) -> float:
    """Return the seconds that a program takes to store n messages in an empty database."""
    empty(plan.redis)
    variables = {**os.environ, "PYTHONPATH": import_path(f"{ROOT}")}
    with Stopwatch() as watch:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            cwd=plan.directory,
            env=variables,
            check=False,
        )
    check(done.returncode == 0, f"{command[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
    with redis.Redis.from_url(plan.redis) as client:
        check(client.hlen(MESSAGES_KEY) == n, "not all messages are there")
    return watch.seconds


BENCHMARK = Benchmark("BD9", "Spark's backfill beside `schedule_many`", run, needs_redis=True, needs_spark=True)
