"""BA4: the lateness of messages while ten open web pages follow the delivering process, or another process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from socket import create_server

import uvicorn

from aiodelay import Scheduler
from aiodelay.redis import RedisStore
from aiodelay.service import admin

from .api_server import running_api
from .harness import Benchmark, Goal, Plan, Row, quantile
from .lateness import PER_S, SPAN_S, Lateness, check_all, measure
from .redis_server import empty

__all__ = ["BENCHMARK"]

VIEWERS = 10
GOAL = Goal("at most", 1.5)
FIRST_WITHIN_S = 30


def run(plan: Plan) -> list[Row]:
    n = plan.size(round(PER_S * SPAN_S))
    url = f"{plan.redis}{'&' if '?' in plan.redis else '?'}journal=10000"
    here, elsewhere = list[Lateness](), list[Lateness]()

    def measured(beside: Callable[[Scheduler], AbstractAsyncContextManager[None]]) -> Lateness:
        empty(plan.redis)
        return check_all([plan.run(measure(RedisStore(url), range(n), PER_S, plan.scale, beside))], n)

    with running_api(url) as port:
        for _ in range(plan.runs):
            elsewhere.append(measured(lambda _: followed(port)))
            here.append(measured(served_and_followed))
    empty(plan.redis)
    ours = [quantile(each.ours, 0.99) for each in here]
    theirs = [quantile(each.ours, 0.99) for each in elsewhere]
    what = f"Redis: {n:,} messages at {PER_S}/s while {VIEWERS} viewers follow the page, p99 of the lateness"
    beside = f"{quantile(ours, 0.5):.2f} ms, page served by another process {quantile(theirs, 0.5):.2f} ms"
    values = tuple(a / b for a, b in zip(ours, theirs, strict=True))
    return [Row("BA4", what, "x lateness with the page served elsewhere", values, GOAL, beside)]


@asynccontextmanager
async def served_and_followed(scheduler: Scheduler) -> AsyncIterator[None]:
    """Serve the page from this process, and follow it from several viewers."""
    app = admin(scheduler)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    with create_server(("127.0.0.1", 0)) as listening:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(sockets=[listening]))
            async with followed(listening.getsockname()[1]):
                yield
            app.state.page.closing.set()
            server.should_exit = True
            await serving


@asynccontextmanager
async def followed(port: int) -> AsyncIterator[None]:
    """Follow the front page from several viewers."""
    async with asyncio.TaskGroup() as tasks:
        seen = [asyncio.Event() for _ in range(VIEWERS)]
        viewers = [tasks.create_task(follow(port, each)) for each in seen]
        yield
        async with asyncio.timeout(FIRST_WITHIN_S):
            for each in seen:
                await each.wait()
        for viewer in viewers:
            viewer.cancel()


async def follow(port: int, seen: asyncio.Event) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /live?view=hour HTTP/1.1\r\nhost: localhost\r\n\r\n")
        while line := await reader.readline():
            if line.startswith(b"data: <hx-partial"):
                seen.set()
    finally:
        writer.close()


BENCHMARK = Benchmark("BA4", "lateness while pages follow", run, needs_redis=True)
