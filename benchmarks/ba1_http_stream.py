"""BA1: the rate at which a stream of lines over HTTP is stored in Redis, compared with `schedule_many` in process."""

from __future__ import annotations

import json

from aiodelay import Message, Scheduler

from .api_server import post, running_api
from .harness import Benchmark, Goal, Plan, Row, Stopwatch, check, in_turn, order, per_message_us, ratios
from .redis_server import MESSAGES_KEY, emptied

__all__ = ["BENCHMARK"]

LINES = 100_000
GOAL = Goal("at least", 0.5)
TO, AHEAD = "handler:Order", "1h"


def run(plan: Plan) -> list[Row]:
    n = plan.size(LINES)
    texts = [order(i).text for i in range(n)]
    body = "".join(json.dumps({"to": TO, "payload": text, "delay": AHEAD}) + "\n" for text in texts).encode()
    with running_api(plan.redis) as port:
        times = in_turn(
            plan,
            {
                "in process": lambda: plan.run(in_process(plan.redis, texts)),
                "over HTTP": lambda: plan.run(over_http(plan.redis, port, body, n)),
            },
        )
    beside = f"{per_message_us(times['over HTTP'], n)} a line, `schedule_many` {per_message_us(times['in process'], n)}"
    what = f"HTTP: a stream of {n:,} lines into Redis"
    values = ratios(times["in process"], times["over HTTP"])
    return [Row("BA1", what, "x speed of `schedule_many`", values, GOAL, beside)]


async def in_process(url: str, texts: list[str]) -> float:
    async with emptied(url) as client:
        async with Scheduler(url, dispatch=False) as scheduler:
            with Stopwatch() as watch:
                await scheduler.schedule_many(Message(text.encode(), to=TO, delay=AHEAD) for text in texts)
        check(await client.hlen(MESSAGES_KEY) == len(texts), "not all were scheduled")
    return watch.seconds


async def over_http(url: str, port: int, body: bytes, n: int) -> float:
    async with emptied(url) as client:
        async with Scheduler(url, dispatch=False):  # opening the store creates its keys
            with Stopwatch() as watch:
                answer = await post(port, "/v1/messages", body, "application/x-ndjson")
        check(f'{{"stored":{n},"refused":0}}'.encode() in answer, repr(answer))
        check(await client.hlen(MESSAGES_KEY) == n, "not all were scheduled")
    return watch.seconds


BENCHMARK = Benchmark("BA1", "scheduling over HTTP in streams", run, needs_redis=True)
