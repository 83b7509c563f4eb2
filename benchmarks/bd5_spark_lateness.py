"""BD5: the lateness of a scheduler while Spark backfills its store at a rate, or backfills another store."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import redis

from aiodelay.redis import RedisStore
from aiodelay.testing.servers import redis_programs, serving

from .harness import Benchmark, Goal, Plan, Row, check, quantile
from .lateness import DELAYS_S, PER_S, SPAN_S, Lateness, check_all, measure
from .redis_server import MESSAGES_KEY, empty
from .spark_tables import PROCESSES, messages, session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["BENCHMARK"]

RATE = 20_000
GOAL = Goal("at most", 1.5)


def run(plan: Plan) -> list[Row]:
    n = plan.size(round(PER_S * SPAN_S))
    beside, alone = list[Lateness](), list[Lateness]()
    context = multiprocessing.get_context("spawn")
    with (
        session(plan) as spark,
        serving(redis_programs()[0]) as other,
        ProcessPoolExecutor(1, mp_context=context) as processes,
    ):
        rows = plan.size(round(RATE * (SPAN_S + DELAYS_S[1])))
        frame = messages(spark, rows, to="kafka:orders")  # the scheduler does not serve this sink
        for number in range(plan.runs):
            sides = [(plan.redis, beside), (other, alone)]
            for url, figures in sides if number % 2 else reversed(sides):
                empty(plan.redis)
                with backfilling(frame, url):
                    figures.append(check_all([processes.submit(dispatch, plan, n).result()], n))
                empty(url)
    empty(plan.redis)
    ours, bare = ([quantile(each.ours, 0.99) for each in figures] for figures in (beside, alone))
    what = f"Redis: {n:,} messages at {PER_S}/s during a backfill at {RATE:,} rows/s, p99 of the lateness"
    values = tuple(a / b for a, b in zip(ours, bare, strict=True))
    told = f"{quantile(ours, 0.5):.2f} ms, during a backfill of another server {quantile(bare, 0.5):.2f} ms"
    return [Row("BD5", what, "x lateness during a backfill of another server", values, GOAL, told)]


def dispatch(plan: Plan, n: int) -> Lateness:
    """Schedule and handle messages, in a process of its own."""
    return plan.run(measure(RedisStore(plan.redis), range(n), PER_S, plan.scale))


@contextmanager
def backfilling(frame: DataFrame, url: str) -> Iterator[None]:
    """Backfill a server at the rate. The block begins when the server has rows, and ends with the backfill."""
    with ThreadPoolExecutor(1) as pool:
        rows = pool.submit(_backfill, frame, url)
        with redis.Redis.from_url(url) as client:
            while not client.hlen(MESSAGES_KEY) and not rows.done():
                time.sleep(0.01)
        yield
        check(rows.result() > 0, "nothing was stored")


def _backfill(frame: DataFrame, url: str) -> int:
    from aiodelay.spark.writing import write_frame  # noqa: PLC0415 - where Spark is

    return write_frame(frame, {"store": url, "rate": f"{RATE}", "concurrency": f"{PROCESSES}"}).stored


BENCHMARK = Benchmark("BD5", "lateness during a backfill from Spark", run, needs_redis=True, needs_spark=True)
