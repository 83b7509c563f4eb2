"""BP11: limits on Redis: the rate of a drain, and the turns of the keys beside a key with most messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiodelay.ports import Store
from aiodelay.redis import RedisStore

from . import redis_server
from .harness import Benchmark, Plan, Row
from .limited_lanes import rows_of

__all__ = ["BENCHMARK"]


def run(plan: Plan) -> list[Row]:
    @asynccontextmanager
    async def emptied() -> AsyncIterator[Callable[[], Store]]:
        async with redis_server.emptied(plan.redis):
            yield lambda: RedisStore(plan.redis)

    return rows_of(plan, "BP11", "Redis", emptied)


BENCHMARK = Benchmark("BP11", "limits on Redis", run, needs_redis=True)
