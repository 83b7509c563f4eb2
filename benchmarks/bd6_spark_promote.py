"""BD6: the rate at which a window leaves a 20 times larger cold tier, compared with a backfill of as many rows."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from .bd1_spark_backfill import backfill
from .harness import Benchmark, Goal, Plan, Row, Stopwatch, check, in_turn, per_message_us, ratios
from .redis_server import empty
from .spark_tables import DUE_MS, PROCESSES, messages, session, write_messages

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

__all__ = ["BENCHMARK"]

ROWS = 1_000_000
DAYS = 20
GOAL = Goal("at least", 0.7)

DUE = datetime.fromtimestamp(DUE_MS / 1000, UTC)
PART = 0.1
"""A run that is not nightly uses this part of the rows."""


def run(plan: Plan) -> list[Row]:
    n, folder = plan.size(ROWS if plan.nightly else round(PART * ROWS)), plan.directory / "tier"
    with session(plan) as spark:
        frame = write_messages(spark, n, plan.directory / "rows")
        files = fill(spark, n, folder)
        sides = {
            "backfill": partial(backfill, frame, plan.redis, n),
            "promote": partial(promote, spark, plan.redis, n, folder),
        }
        for side in sides.values():
            side()  # warm up Spark
        times = in_turn(plan, sides)
    empty(plan.redis)
    beside = f"{per_message_us(times['promote'], n)} a message, backfill {per_message_us(times['backfill'], n)}; "
    beside += f"the scan read {files[0]} of {files[1]} files, 1 of {DAYS} days"
    what = f"Redis: promote {n:,} of {DAYS * n:,} messages, {PROCESSES} tasks, no rate limit"
    return [Row("BD6", what, "x speed of a backfill", ratios(times["backfill"], times["promote"]), GOAL, beside)]


def fill(spark: SparkSession, n: int, folder: Path) -> tuple[int, int]:
    """Create a tier with equal days. Return the number of files that a promotion reads, and of all files."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - its usual name; where Spark is

    from aiodelay.spark.cold import PUT, Tier, due_day  # noqa: PLC0415 - as above

    number = F.substring_index("id", "-", -1).cast("bigint")
    due_at = F.timestamp_millis(DUE_MS + number % DAYS * 86_400_000)
    columns = {"kind": F.lit(PUT), "version": F.lit(0), "due_at": due_at, "due_day": due_day(due_at)}
    place = Tier(spark, f"{folder}")
    place.add(messages(spark, DAYS * n).withColumns(columns), now_ms=DUE_MS)
    facts = place.facts(place.standing(), lambda day: day == DUE.date())
    read = [] if facts is None else facts.inputFiles()
    check({file.rpartition("/")[0].rpartition("=")[2] for file in read} == {f"{DUE.date()}"}, "other days were read")
    return len(read), len(list(folder.glob("facts/*/*/*.parquet")))


def promote(spark: SparkSession, url: str, n: int, folder: Path) -> float:
    """Measure our side: the promote job, as on its first run."""
    from aiodelay.spark.jobs.promote import run as run_job  # noqa: PLC0415 - where Spark is

    for entry in (*folder.glob("log/claim-*"), *folder.glob("log/promoted-*")):
        shutil.rmtree(entry)
    empty(url)
    with Stopwatch() as watch:
        summary = run_job(spark, tier=f"{folder}", store=url, rate=0, now=DUE - timedelta(days=7))
    check((summary.counts["stored"], summary.facts["days"]) == (n, [f"{DUE.date()}"]), "not the messages of one day")
    return watch.seconds


BENCHMARK = Benchmark("BD6", "promotion out of a cold tier", run, needs_redis=True, needs_spark=True)
