"""BD4: the time of a reconcile, compared with reading the store and joining two tables of the same rows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .bd2_spark_read import read
from .harness import Benchmark, Goal, Plan, Row, Stopwatch, check, in_turn, per_message_us
from .redis_server import empty
from .spark_tables import COLUMNS, PROCESSES, session, write_messages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["BENCHMARK"]

ROWS = 1_000_000
GOAL = Goal("at most", 1.3)

MISSING, DRIFT, ORPHANS = 300, 200, 50


def run(plan: Plan) -> list[Row]:
    n = plan.size(ROWS)
    missing, drift, orphans = plan.size(MISSING), plan.size(DRIFT), plan.size(ORPHANS)
    with session(plan) as spark:
        empty(plan.redis)
        truth = write_messages(spark, n, plan.directory / "truth")
        stored = write_messages(spark, n + orphans, plan.directory / "stored")
        stored = differing(stored, n, missing, drift)
        stored.write.format("aiodelay").mode("append").options(store=plan.redis, rate="0").save()
        stored.write.mode("overwrite").parquet(f"{plan.directory / 'joined'}")
        frame = spark.read.parquet(f"{plan.directory / 'joined'}")
        found = {"missing": missing, "orphan": orphans, "drift": drift}
        sides = {
            "read": partial(read_store, spark, plan.redis),
            "join": partial(join, truth, frame, found),
            "ours": partial(reconcile, spark, truth, plan.redis, found),
        }
        for side in sides.values():
            side()  # warm up Spark
        times = in_turn(plan, sides)
    empty(plan.redis)
    bare = [sum(pair) for pair in zip(times["read"], times["join"], strict=True)]
    values = tuple(ours / both for ours, both in zip(times["ours"], bare, strict=True))
    beside = f"{per_message_us(times['ours'], n)} a row, reading {per_message_us(times['read'], n)}, "
    beside += f"joining {per_message_us(times['join'], n)}"
    what = f"Redis: reconcile of {n:,} rows, {PROCESSES} tasks"
    return [Row("BD4", what, "x time of reading and joining", values, GOAL, beside)]


def differing(stored: DataFrame, n: int, missing: int, drift: int) -> DataFrame:
    """Return a truth that lacks the first stored messages, and has other payloads for the messages after them."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - its usual name; where Spark is

    number = F.substring_index("id", "-", -1).cast("bigint")
    kept = stored.where(number >= missing)
    other = F.when(number < missing + drift, F.lit(b"other")).otherwise(F.col("payload"))
    return kept.withColumn("payload", other)


def read_store(spark: SparkSession, url: str) -> float:
    """Measure the first half of the bare side: read the compared columns, and drop them."""
    with Stopwatch() as watch:
        read(spark, url, COLUMNS).write.format("noop").mode("overwrite").save()
    return watch.seconds


def join(truth: DataFrame, stored: DataFrame, found: dict[str, int]) -> float:
    """Measure the second half of the bare side: a full outer join of two tables in files, and three counts."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as above

    def side(frame: DataFrame, name: str) -> DataFrame:
        return frame.select("id", F.xxhash64("due_at", "payload", "to").alias(name))

    want, have = F.col("want"), F.col("have")
    counts = {
        "missing": F.count_if(have.isNull()),
        "orphan": F.count_if(want.isNull()),
        "drift": F.count_if(want != have),
    }
    with Stopwatch() as watch:
        joined = side(truth, "want").join(side(stored, "have"), "id", "full_outer")
        (row,) = joined.agg(*(count.alias(name) for name, count in counts.items())).collect()
    check(row.asDict() == found, f"the bare side found {row.asDict()}")
    return watch.seconds


def reconcile(spark: SparkSession, truth: DataFrame, url: str, found: dict[str, int]) -> float:
    """Measure our side: the reconcile job."""
    from aiodelay.spark.jobs.reconcile import run as run_reconcile  # noqa: PLC0415 - where Spark is

    with Stopwatch() as watch:
        summary = run_reconcile(spark, truth, store=url)
    counted = {kind: summary.counts[kind] for kind in found}
    check(counted == found, f"ours found {counted}")
    return watch.seconds


BENCHMARK = Benchmark("BD4", "reconcile of a truth with Redis", run, needs_redis=True, needs_spark=True)
