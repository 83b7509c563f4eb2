"""BP10: the time of one `schedule()` after another on Redis."""

from __future__ import annotations

from datetime import timedelta

from aiodelay import Scheduler
from aiodelay.redis import RedisStore

from .harness import Benchmark, Goal, Plan, Row, Stopwatch, check, in_turn, order, per_message_us
from .redis_server import MESSAGES_KEY, emptied, stored

__all__ = ["BENCHMARK"]

CALLS = 5_000
AHEAD = timedelta(hours=1)
GOAL = Goal("at most", 1.4)

PUT = """
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""


def run(plan: Plan) -> list[Row]:
    n = plan.size(CALLS)
    records = plan.run(written(plan.redis, n))
    times = in_turn(
        plan,
        {
            "bare": lambda: plan.run(bare(plan.redis, records)),
            "ours": lambda: plan.run(schedule_in_sequence(plan.redis, n)),
        },
    )
    slower = tuple(ours / bare for ours, bare in zip(times["ours"], times["bare"], strict=True))
    beside = f"{per_message_us(times['ours'], n)} a call, bare {per_message_us(times['bare'], n)}"
    return [Row("BP10", f"Redis: {n:,} calls of `schedule()`, one after another", "x bare time", slower, GOAL, beside)]


async def written(url: str, n: int) -> dict[bytes, bytes]:
    """Return the ids and the records that aiodelay writes."""
    async with emptied(url) as client:
        await _schedule(url, n)
        return await stored(client)


async def bare(url: str, records: dict[bytes, bytes]) -> float:
    """Measure the bare limit: one `EVALSHA` after another, each of a script that stores an id, a time and a record."""
    async with emptied(url) as client:
        sha = await client.script_load(PUT)
        with Stopwatch() as watch:
            for message_id, record in records.items():
                await client.evalsha(sha, 2, MESSAGES_KEY, "due", message_id, 2_000_000_000_000, record)
        check(await stored(client) == records, "the bare side wrote other records")
    return watch.seconds


async def schedule_in_sequence(url: str, n: int) -> float:
    """Measure our side: each call of `schedule` begins when the last one has ended."""
    async with emptied(url) as client:
        seconds = await _schedule(url, n)
        check(await client.hlen(MESSAGES_KEY) == n, "not all were scheduled")
    return seconds


async def _schedule(url: str, n: int) -> float:
    async with Scheduler(RedisStore(url), dispatch=False) as scheduler:
        with Stopwatch() as watch:
            for i in range(n):
                await scheduler.schedule(order(i), delay=AHEAD)
    return watch.seconds


BENCHMARK = Benchmark("BP10", "single calls on Redis", run, needs_redis=True)
