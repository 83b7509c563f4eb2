"""BP4: the lateness of messages of a Redis store, compared with timers of the loop, in one process and in three."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from aiodelay.redis import RedisStore

from .harness import Benchmark, Goal, Plan, Row
from .lateness import PER_S, SPAN_S, Lateness, check_all, measure, rows_of
from .redis_server import empty

__all__ = ["BENCHMARK"]

PROCESSES = 3
GOALS = {0.5: Goal("at most", 0.7), 0.99: Goal("at most", 2.0), 0.999: Goal("at most", 5.0)}


def run(plan: Plan) -> list[Row]:
    n = plan.size(round(PER_S * SPAN_S))
    alone, together = list[Lateness](), list[Lateness]()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=context) as processes:
        for _ in range(plan.runs):
            empty(plan.redis)
            alone.append(check_all([part_of(plan, n, 1, 0)], n))
            empty(plan.redis)
            parts = processes.map(partial(part_of, plan, n, PROCESSES), range(PROCESSES))
            together.append(check_all(list(parts), n))
    empty(plan.redis)
    return [
        *rows_of("BP4", "Redis, one process", alone, GOALS),
        *rows_of("BP4", f"Redis, {PROCESSES} processes", together, GOALS),
    ]


def part_of(plan: Plan, n: int, processes: int, number: int) -> Lateness:
    """Do the part of one process: one in `processes` messages, at the same part of the rate."""
    numbers = range(number, n, processes)
    return plan.run(measure(RedisStore(plan.redis), numbers, PER_S / processes, plan.scale))


BENCHMARK = Benchmark("BP4", "lateness on Redis", run, needs_redis=True)
