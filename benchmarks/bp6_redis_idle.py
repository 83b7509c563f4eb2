"""BP6: the processor time and the requests of an idle process, for itself and for its server."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from aiodelay import Scheduler
from aiodelay.redis import RedisStore

from .bf5_idle import OPENING_S, PENDING, SPAN_S, fill
from .harness import Benchmark, Goal, Order, Plan, Row, check, quantile
from .redis_server import Client, emptied

__all__ = ["BENCHMARK"]

TRIPS_GOAL, LOAD_GOAL = Goal("at most", 1.0), Goal("at most", 0.2)


class Idle(NamedTuple):
    """Round trips in a second, and the processor time of process and server in % of one core."""

    trips_per_s: float
    load: float
    server_load: float


def run(plan: Plan) -> list[Row]:
    n, span_s = plan.size(PENDING), SPAN_S * plan.scale
    rounds = [plan.run(idle(plan.redis, n, span_s)) for _ in range(plan.runs)]
    trips, loads, server_loads = zip(*rounds, strict=True)
    what = f"while idle, {n:,} messages pending, due far ahead"
    beside = f"all threads together, over {span_s:g} s; the server takes {quantile(server_loads, 0.5):.2f} %"
    return [
        Row("BP6", f"Redis: round trips {what}", "a second", trips, TRIPS_GOAL, f"of one process, over {span_s:g} s"),
        Row("BP6", f"Redis: processor time {what}", "% of a core", loads, LOAD_GOAL, beside),
    ]


async def idle(url: str, n: int, span_s: float) -> Idle:
    """Dispatch for a time without messages."""
    delivered: list[int] = []
    store = RedisStore(url)
    scheduler = Scheduler(store)

    @scheduler.handler(timeout="30s")
    async def handle(event: Order) -> None:
        delivered.append(event.number)

    async with emptied(url) as client:
        await fill(store, n)
        async with scheduler:
            await asyncio.sleep(min(OPENING_S, span_s))
            trips, server_s = await _of_server(client)
            since, used = time.perf_counter(), time.process_time()
            await asyncio.sleep(span_s)
            seconds, used = time.perf_counter() - since, time.process_time() - used
            trips_after, server_s_after = await _of_server(client)
    check(not delivered, "a message was delivered early")
    asked_by_us = 1
    return Idle(
        (trips_after - trips - asked_by_us) / seconds, used / seconds * 100, (server_s_after - server_s) / seconds * 100
    )


async def _of_server(client: Client) -> tuple[int, float]:
    """Return the number of requests that the server has read, and its processor time in seconds."""
    info = await client.info()
    return info["total_reads_processed"], info["used_cpu_user"] + info["used_cpu_sys"]


BENCHMARK = Benchmark("BP6", "idle on Redis", run, needs_redis=True)
