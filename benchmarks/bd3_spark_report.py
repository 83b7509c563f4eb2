"""BD3: the growth of the report with the archive: time for each row, and memory of the driver."""

from __future__ import annotations

import resource
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .harness import Benchmark, Goal, Plan, Row, Stopwatch, check, in_turn, per_message_us
from .spark_tables import DUE_MS, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["BENCHMARK"]

FEW, MANY = 1_000_000, 10_000_000
TIME_GOAL, MEMORY_GOAL = Goal("at most", 1.1), Goal("at most", 1.1)

EVENTS_A_MESSAGE = 2
HOUR_MS = 3_600_000


def run(plan: Plan) -> list[Row]:
    few, many = plan.size(FEW), plan.size(MANY)
    memory: dict[int, list[int]] = {few: [], many: []}
    with session(plan) as spark:
        archives = {rows: write_archive(spark, rows, plan.directory / f"archive-{rows}") for rows in (few, many)}
        sides = {
            name: partial(report, spark, archives[rows], rows, memory[rows])
            for name, rows in (("few", few), ("many", many))
        }
        sides["few"]()  # warm up Spark
        memory[few].clear()
        times = in_turn(plan, sides)
    a_row = tuple(b / many / (a / few) for a, b in zip(times["few"], times["many"], strict=True))
    beside = f"{per_message_us(times['many'], many)} an event, with {few:,} events {per_message_us(times['few'], few)}"
    first, most = memory[few][0], max(memory[many])
    return [
        Row("BD3", f"report over {many:,} events: time of an event", f"x time with {few:,}", a_row, TIME_GOAL, beside),
        Row(
            "BD3",
            f"report over {many:,} events: peak memory of the driver's Python process",
            f"x memory after {few:,}",
            tuple(each / first for each in memory[many]),
            MEMORY_GOAL,
            f"{most / 1024:.0f} MB, after {few:,} events {first / 1024:.0f} MB; the driver's JVM (2 GB) runs the tasks",
        ),
    ]


def write_archive(spark: SparkSession, rows: int, path: Path) -> Path:
    """Write a day of events as Parquet: each message is claimed when it is due, and delivered 0 to 99 ms later."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - its usual name; where Spark is

    number, is_claim = F.expr(f"id div {EVENTS_A_MESSAGE}"), F.col("id") % EVENTS_A_MESSAGE == 0
    due_ms = DUE_MS + number % (24 * HOUR_MS)
    at_ms = F.when(is_claim, due_ms).otherwise(due_ms + number % 100)
    events = spark.range(rows - rows % EVENTS_A_MESSAGE).select(
        F.lit(0).alias("partition"),
        F.col("id").alias("number"),
        F.timestamp_millis(at_ms).alias("at"),
        F.when(is_claim, F.lit("claimed")).otherwise(F.lit("delivered")).alias("event"),
        F.concat(F.lit("order-"), number).alias("id"),
        F.lit(1).cast("bigint").alias("revision"),
        F.concat(F.lit("lane-"), number % 8).alias("lane"),
        F.timestamp_millis(due_ms).alias("due_at"),
        F.lit(1).alias("attempt"),
        F.lit("").alias("detail"),
        F.to_date(F.timestamp_millis(at_ms)).alias("day"),
    )
    events.write.mode("overwrite").parquet(f"{path}")
    return path


def report(spark: SparkSession, archive: Path, rows: int, memory: list[int]) -> float:
    """Write the page, and record the peak memory of this process, in kB."""
    from aiodelay.spark.jobs.report import run as run_report  # noqa: PLC0415 - where Spark is

    page = archive.with_suffix(".html")
    with Stopwatch() as watch:
        summary = run_report(spark, archive=f"{archive}", html=page, overwrite=True)
    check(summary.rows == rows // EVENTS_A_MESSAGE, f"{summary.rows} outcomes were counted")
    memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return watch.seconds


BENCHMARK = Benchmark("BD3", "report on events", run, needs_spark=True)
