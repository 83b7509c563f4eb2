"""BF7: the cost of `check_events`: `schedule_many` with it, compared with `schedule_many` without it, in pairs.

The figure is the lower end of a 95 % interval of the median ratio. So an expensive check does not reach the goal by
luck.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from aiodelay import Message, Scheduler
from aiodelay.ports import Store
from aiodelay.redis import RedisStore
from aiodelay.sqlite import SqliteStore

from .harness import Benchmark, Goal, Plan, Row, check, in_turn, median_interval, order, per_message_us, ratios
from .redis_server import emptied
from .sqlite_files import new_file

__all__ = ["BENCHMARK"]

MESSAGES = 8_000
PAIRS = 30
AHEAD = timedelta(hours=1)
GOAL = Goal("at least", 0.95)


def run(plan: Plan) -> list[Row]:
    n = plan.size(MESSAGES)
    file = plan.directory / "bf7.db"
    return [
        _row(plan, "SQLite", lambda *, checks: plan.run(into_sqlite(file, n, checks=checks)), n),
        _row(plan, "Redis", lambda *, checks: plan.run(into_redis(plan.redis, n, checks=checks)), n),
    ]


def _row(plan: Plan, store: str, into: Callable[..., float], n: int) -> Row:
    pairs = plan.size(PAIRS)
    times = in_turn(plan, {"without": lambda: into(checks=False), "with": lambda: into(checks=True)}, rounds=pairs)
    of_pairs = ratios(times["without"], times["with"])
    least, greatest = median_interval(of_pairs)
    beside = (
        f"processor time {per_message_us(times['with'], n)} a message, unchecked {per_message_us(times['without'], n)};"
        f" median ratio of {pairs} pairs {statistics.median(of_pairs):.2f}, 95 % interval {least:.2f}-{greatest:.2f};"
        " this row shows the lower end of the interval"
    )
    what = f"{store}: `schedule_many` of {n:,} messages, checked"
    return Row("BF7", what, "x unchecked speed", (least,), GOAL, beside)


async def into_sqlite(file: Path, n: int, *, checks: bool) -> float:
    return await _schedule_many(SqliteStore(new_file(file)), n, checks=checks)


async def into_redis(url: str, n: int, *, checks: bool) -> float:
    async with emptied(url):
        return await _schedule_many(RedisStore(url), n, checks=checks)


async def _schedule_many(store: Store, n: int, *, checks: bool) -> float:
    """Return the processor time of this process in seconds. Other processes disturb it least."""
    async with Scheduler(store, dispatch=False, check_events=checks) as scheduler:
        await scheduler.schedule(order(0), delay=AHEAD)  # the first event of a class builds its encoder
        await asyncio.sleep(0)
        since = time.process_time()
        stored = await scheduler.schedule_many(Message(order(i), delay=AHEAD) for i in range(n))
        seconds = time.process_time() - since
    check(stored == n, "not all were scheduled")
    return seconds


BENCHMARK = Benchmark("BF7", "checking events before they are stored", run, needs_redis=True)
