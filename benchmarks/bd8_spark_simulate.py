"""BD8: a simulation's time, compared with the bare aggregation; and its forecast, compared with real dispatch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiodelay import Context, Message, Scheduler
from aiodelay.core.durations import from_epoch_ms
from aiodelay.redis import RedisStore

from .harness import (
    Benchmark,
    Goal,
    Order,
    Plan,
    Row,
    Stopwatch,
    check,
    check_once_each,
    in_turn,
    order,
    per_message_us,
    quantile,
)
from .redis_server import empty
from .spark_tables import DUE_MS, session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["BENCHMARK"]

PENDING = 10_000_000
RATES = (10, 20, 40)
WEEK_MS = 7 * 86_400_000
TIME_GOAL = Goal("at most", 2.0)

SHAPE = 100_000
RATE = 1_000
LOAD = 0.8
BURSTS = 5
LEAD_MS = 3_000
STORED_A_MS = 4
AT_ONCE = 256
CATCH_UP_S = 0.02
"""The time that a delayed dispatcher may catch up, as in a token bucket: a loop sleeps longer than requested."""
FLOOR_MS = 200
"""Lateness below this comes from the machine."""
MATCH_GOAL = Goal("at most", 10.0)
PERCENTS = (50, 95, 99)


def run(plan: Plan) -> list[Row]:
    with session(plan) as spark:
        return [_speed(plan, spark), *_match(plan, spark)]


# --- the time of a simulation -----------------------------------------------------------------------------


def _speed(plan: Plan, spark: SparkSession) -> Row:
    n = plan.size(PENDING)
    frame = write_week(spark, n, plan.directory / "week")
    sides = {"bare": partial(aggregate, frame), "ours": partial(simulate_week, frame, n, plan.directory / "simulated")}
    sides["ours"]()  # warm up Spark
    times = in_turn(plan, sides)
    values = tuple(ours / bare for ours, bare in zip(times["ours"], times["bare"], strict=True))
    beside = f"{per_message_us(times['ours'], n)} a message, counting {per_message_us(times['bare'], n)}"
    what = f"`simulate` of {n:,} messages pending within a week, at {len(RATES)} rates, with table and page"
    return Row("BD8", what, "x time of counting by second", values, TIME_GOAL, beside)


def write_week(spark: SparkSession, n: int, path: Path) -> DataFrame:
    """Write a week of due times as Parquet: days with a peak at noon, and a tenth at whole hours."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - its usual name; where Spark is

    in_day_ms = ((F.rand(1) + F.rand(2)) / 2 * 86_400_000).cast("bigint")
    at_ms = F.floor(F.rand(3) * 7) * 86_400_000 + in_day_ms
    due_ms = DUE_MS + F.when(F.col("id") % 10 == 0, at_ms - at_ms % 3_600_000).otherwise(at_ms)
    spark.range(n).select("id", F.timestamp_millis(due_ms).alias("due_at")).write.parquet(f"{path}")
    return spark.read.parquet(f"{path}")


def aggregate(frame: DataFrame) -> float:
    """Measure the bare limit: count messages by the second."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as above

    with Stopwatch() as watch:
        frame.groupBy(F.unix_seconds("due_at")).count().write.format("noop").mode("overwrite").save()
    return watch.seconds


def simulate_week(frame: DataFrame, n: int, out: Path) -> float:
    from aiodelay.spark.forecast import Span  # noqa: PLC0415 - where Spark is
    from aiodelay.spark.jobs.simulate import run as simulate  # noqa: PLC0415

    with Stopwatch() as watch:
        summary = simulate(frame, rates=RATES, span=Span(DUE_MS, DUE_MS + WEEK_MS), out=out, overwrite=True)
    check(summary.rows == n, f"{summary.rows} messages were simulated")
    return watch.seconds


# --- the forecast, compared with real dispatch ------------------------------------------------------------


def _match(plan: Plan, spark: SparkSession) -> list[Row]:
    n = plan.size(SHAPE)
    rounds = list[tuple[Mapping[int, float], Mapping[int, float]]]()
    for _ in range(plan.runs):
        empty(plan.redis)
        dispatched = plan.run(dispatch(plan.redis, n))
        rounds.append((foretell(spark, list(dispatched), plan.directory / "shape.parquet"), happened(dispatched)))
    empty(plan.redis)
    return [_match_row(n, percent, rounds) for percent in PERCENTS]


def _match_row(n: int, percent: int, rounds: Sequence[tuple[Mapping[int, float], Mapping[int, float]]]) -> Row:
    pairs = [(foretold[percent], seen[percent]) for foretold, seen in rounds]
    values = tuple(abs(foretold - seen) / max(seen, FLOOR_MS) * 100 for foretold, seen in pairs)
    what = f"Redis: {n:,} messages in bursts, {RATE:,}/s handled: forecast of the p{percent} of the lateness"
    told = ", ".join(f"{foretold:,.0f} / {seen:,.0f} ms" for foretold, seen in pairs)
    return Row("BD8", what, "% from the dispatch", values, MATCH_GOAL, f"forecast / dispatch of each round: {told}")


def shape(n: int, from_ms: int) -> list[int]:
    """Return due times, half of them evenly spread and half in bursts, over a time that gives the load `LOAD`."""
    length_ms = round(n / RATE / LOAD * 1000)
    return [
        from_ms + (number * length_ms // n if number % 2 else (1 + number // 2 % BURSTS) * length_ms // (BURSTS + 2))
        for number in range(n)
    ]


async def dispatch(url: str, n: int) -> list[tuple[int, float]]:
    """Schedule messages and dispatch them at the rate. Return the due time and the lateness of each, in ms."""
    due = shape(n, time.time_ns() // 1_000_000 + LEAD_MS + n // STORED_A_MS)
    begun = list[tuple[int, float]]()
    scheduler = Scheduler(RedisStore(url))
    loop = asyncio.get_running_loop()
    free_s = 0.0

    @scheduler.handler(concurrency=AT_ONCE, timeout="60s")
    async def handle(event: Order, context: Context) -> None:
        nonlocal free_s
        begin_s = max(loop.time() - CATCH_UP_S, free_s)
        free_s = begin_s + 1 / RATE
        await asyncio.sleep(begin_s - loop.time())
        begun.append((event.number, time.time_ns() / 1e6 - round(context.due.timestamp() * 1000)))

    async with Scheduler(RedisStore(url)) as producer:
        await producer.schedule_many(
            Message(order(number), at=from_epoch_ms(at_ms)) for number, at_ms in enumerate(due)
        )
    check(time.time_ns() // 1_000_000 < min(due), "to store the messages took longer than it may")
    async with scheduler:
        await scheduler.run_until_idle()
    check_once_each((number for number, _ in begun), n)
    check(min(late_ms for _, late_ms in begun) >= 0, "a message began early")
    return [(due[number], late_ms) for number, late_ms in begun]


def happened(dispatched: Sequence[tuple[int, float]]) -> dict[int, float]:
    return {percent: quantile((late for _, late in dispatched), percent / 100) for percent in PERCENTS}


def foretell(spark: SparkSession, dispatched: Sequence[tuple[int, float]], file: Path) -> dict[int, float]:
    import pyarrow as pa  # noqa: PLC0415 - where Spark is
    import pyarrow.parquet as pq  # noqa: PLC0415 - as above

    from aiodelay.spark.forecast import Span  # noqa: PLC0415 - as above
    from aiodelay.spark.jobs.simulate import run as simulate  # noqa: PLC0415 - as above

    due = [at_ms for at_ms, _ in dispatched]
    pq.write_table(pa.table({"due_at": pa.array(due, pa.timestamp("ms", tz="UTC"))}), file)
    span = Span(min(due), max(due) + 1)
    summary = simulate(spark.read.parquet(f"{file}"), rates=[RATE], span=span)
    figures: Mapping[str, Any] = summary.facts["rates"][0]
    return {percent: figures[f"p{percent}_ms"] for percent in PERCENTS}


BENCHMARK = Benchmark("BD8", "simulation", run, needs_redis=True, needs_spark=True)
