"""BA2: the rate at which single requests are stored, compared with a bare route that only reads them."""

from __future__ import annotations

import json

from aiodelay import Scheduler

from .api_server import BARE, calls, running_api
from .harness import Benchmark, Goal, Plan, Row, Stopwatch, check, in_turn, order, per_message_us, ratios
from .redis_server import MESSAGES_KEY, emptied

__all__ = ["BENCHMARK"]

CALLS = 10_000
CONNECTIONS = 64
GOAL = Goal("at least", 0.6)


def run(plan: Plan) -> list[Row]:
    n = plan.size(CALLS)
    bodies = [json.dumps({"to": "handler:Order", "payload": order(i).text, "delay": "1h"}).encode() for i in range(n)]
    with running_api(plan.redis) as port:
        times = in_turn(
            plan,
            {
                "bare": lambda: plan.run(sent(plan.redis, port, BARE, bodies)),
                "ours": lambda: plan.run(sent(plan.redis, port, "/v1/messages", bodies)),
            },
        )
    beside = f"{per_message_us(times['ours'], n)} a request, bare route {per_message_us(times['bare'], n)}"
    what = f"HTTP: {n:,} requests over {CONNECTIONS} connections into Redis"
    return [Row("BA2", what, "x speed of the bare route", ratios(times["bare"], times["ours"]), GOAL, beside)]


async def sent(url: str, port: int, path: str, bodies: list[bytes]) -> float:
    async with emptied(url) as client:
        async with Scheduler(url, dispatch=False):  # opening the store creates its keys
            with Stopwatch() as watch:
                await calls(port, path, bodies, CONNECTIONS)
        stored = await client.hlen(MESSAGES_KEY)
        check(stored == (0 if path == BARE else len(bodies)), f"{stored} were scheduled")
    return watch.seconds


BENCHMARK = Benchmark("BA2", "scheduling over HTTP, one by one", run, needs_redis=True)
