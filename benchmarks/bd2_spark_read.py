"""BD2: the rate at which Spark reads pending messages from Redis, compared with bare redis-py in as many processes."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import redis

from aiodelay.backends.redis.records.keys import Keys

from .harness import Benchmark, Goal, Plan, Row, Stopwatch, check, in_turn, per_message_us, ratios
from .redis_server import MESSAGES_KEY, empty
from .spark_tables import COLUMNS, PROCESSES, session, write_messages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["BENCHMARK", "read", "read_bare"]

ROWS = 1_000_000
GOAL = Goal("at least", 0.7)

AT_ONCE = 2_000
SEQUENCE_BYTES = 6


def run(plan: Plan) -> list[Row]:
    n = plan.size(ROWS)
    context = multiprocessing.get_context("spawn")
    with session(plan) as spark, ProcessPoolExecutor(PROCESSES, mp_context=context) as processes:
        empty(plan.redis)
        frame = write_messages(spark, n, plan.directory / "messages")
        frame.write.format("aiodelay").mode("append").options(store=plan.redis, rate="0").save()
        full, few = read(spark, plan.redis, COLUMNS), read(spark, plan.redis, ("id", "due_at"))
        wrong = full.exceptAll(frame).count()
        check(wrong == 0, f"{wrong} rows were read otherwise than they were written")
        check(few.distinct().count() == n, "not all ids were read")
        sides = {
            "bare full": partial(read_bare, processes, plan.redis, n, bodies=True),
            "full": partial(_timed, full),
            "bare few": partial(read_bare, processes, plan.redis, n, bodies=False),
            "few": partial(_timed, few),
        }
        for side in sides.values():
            side()  # warm up Spark
        times = in_turn(plan, sides)
    empty(plan.redis)

    def row(what: str, ours: str, bare: str) -> Row:
        beside = f"{per_message_us(times[ours], n)} a message, bare {per_message_us(times[bare], n)}"
        return Row("BD2", what, "x bare speed", ratios(times[bare], times[ours]), GOAL, beside)

    return [
        row(f"Redis: reading {n:,} pending messages whole, {PROCESSES} tasks", "full", "bare full"),
        row(f"Redis: reading only ids and due times of {n:,} pending messages, {PROCESSES} tasks", "few", "bare few"),
    ]


def read(spark: SparkSession, url: str, columns: tuple[str, ...]) -> DataFrame:
    """Return some columns of the pending messages."""
    types = {"id": "string", "due_at": "timestamp", "payload": "binary", "to": "string"}
    schema = ", ".join(f"{name} {types[name]}" for name in columns)
    return spark.read.format("aiodelay").options(store=url).schema(schema).load()


def _timed(frame: DataFrame) -> float:
    with Stopwatch() as watch:
        frame.write.format("noop").mode("overwrite").save()
    return watch.seconds


# --- the bare side ----------------------------------------------------------------------------------------


def read_bare(processes: ProcessPoolExecutor, url: str, n: int, *, bodies: bool) -> float:
    """Read the same data with plain redis-py, a part of the queue in each process."""
    share = -(-n // PROCESSES)
    with Stopwatch() as watch:
        counts = list(processes.map(partial(_read_part, url, share, bodies), range(PROCESSES)))
    check(sum(counts) == n, "the bare side read another number")
    return watch.seconds


def _read_part(url: str, share: int, bodies: bool, number: int) -> int:  # noqa: FBT001 - `map` gives no names
    keys = Keys("default")
    count = 0
    with redis.Redis.from_url(url, socket_timeout=None, protocol=2) as client:
        (lane,) = client.hvals(keys.key("lanes"))
        places = keys.key(f"due:{int(lane)}")
        for at in range(number * share, (number + 1) * share, AT_ONCE):
            last = min(at + AT_ONCE, (number + 1) * share) - 1
            found: Any = client.zrange(places, at, last, withscores=True)
            members = [member[SEQUENCE_BYTES:] for member, _ in found]
            if bodies and members:
                records: Any = client.hmget(MESSAGES_KEY, members)
                members = [member for member, record in zip(members, records, strict=True) if record]
            count += len(members)
    return count


BENCHMARK = Benchmark("BD2", "reading from Redis into Spark", run, needs_redis=True, needs_spark=True)
