"""BP6: the processor time, the requests and the commands of an idle process, for itself and for its server."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from aiodelay import Scheduler
from aiodelay.redis import RedisStore

from .bf5_idle import PENDING, SPAN_S, fill
from .harness import Benchmark, Goal, Order, Plan, Row, check, quantile
from .redis_server import Client, emptied

__all__ = ["BENCHMARK"]

OPENING_S = 6.0
"""After this time, each periodic step has run once."""
TRIPS_GOAL, COMMANDS_GOAL, LOAD_GOAL = Goal("at most", 1.0), Goal("at most", 3.0), Goal("at most", 0.2)


class Idle(NamedTuple):
    """Round trips and commands in a second, and the processor time of process and server in % of one core."""

    trips_per_s: float
    commands_per_s: float
    load: float
    server_load: float


def run(plan: Plan) -> list[Row]:
    n, span_s = plan.size(PENDING), SPAN_S * plan.scale
    rounds = [plan.run(idle(plan.redis, n, span_s)) for _ in range(plan.runs)]
    trips, commands, loads, server_loads = zip(*rounds, strict=True)
    what = f"while idle, {n:,} messages pending, due far ahead"
    beside = f"all threads together, over {span_s:g} s; the server takes {quantile(server_loads, 0.5):.2f} %"
    return [
        Row("BP6", f"Redis: round trips {what}", "a second", trips, TRIPS_GOAL, f"of one process, over {span_s:g} s"),
        Row("BP6", f"Redis: commands {what}", "a second", commands, COMMANDS_GOAL, "the commands of scripts included"),
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
            before = await _of_server(client)
            since, used = time.perf_counter(), time.process_time()
            await asyncio.sleep(span_s)
            seconds, used = time.perf_counter() - since, time.process_time() - used
            after = await _of_server(client)
    check(not delivered, "a message was delivered early")
    asked_by_us = 1
    trips, commands, server_s = (b - a for a, b in zip(before, after, strict=True))
    return Idle(
        (trips - asked_by_us) / seconds,
        (commands - asked_by_us) / seconds,
        used / seconds * 100,
        server_s / seconds * 100,
    )


async def _of_server(client: Client) -> tuple[int, int, float]:
    """Return the numbers of requests and commands of the server, and its processor time in seconds."""
    info = await client.info()
    used_s = info["used_cpu_user"] + info["used_cpu_sys"]
    return info["total_reads_processed"], info["total_commands_processed"], used_s


BENCHMARK = Benchmark("BP6", "idle on Redis", run, needs_redis=True)
