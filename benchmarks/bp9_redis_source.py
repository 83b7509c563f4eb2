"""BP9: the rate at which a handler takes the elements of a Redis list."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime

from aiodelay import Message, Scheduler
from aiodelay.redis import RedisStore

from .bp2_redis_transfer import LIST, move_all
from .harness import (
    DEFAULT_CONCURRENCY,
    Benchmark,
    Goal,
    Order,
    Plan,
    Row,
    Stopwatch,
    beside_tuned,
    check,
    check_once_each,
    in_turn,
    order,
    per_message_us,
    ratios,
)
from .redis_server import Client, MinuteAgo, emptied

__all__ = ["BENCHMARK"]

MESSAGES = 100_000
CONCURRENCY = 1_500
"""The concurrency of BP1."""
GOAL = Goal("at least", 0.8)

AT_ONCE = 500
TAKE = """
redis.call('DEL', KEYS[2])
local elements = redis.call('LRANGE', KEYS[1], 0, ARGV[1] - 1)
if #elements > 0 then
  redis.call('RPUSH', KEYS[2], unpack(elements))
  redis.call('LTRIM', KEYS[1], ARGV[1], -1)
end
return elements
"""


def run(plan: Plan) -> list[Row]:
    n = plan.size(MESSAGES)
    elements = plan.run(waiting(plan.redis, n))
    times = in_turn(
        plan,
        {
            "bare loop": lambda: plan.run(bare(plan.redis, elements, tasks=False)),
            "bare loop with tasks": lambda: plan.run(bare(plan.redis, elements, tasks=True)),
            "ours": lambda: plan.run(take(plan.redis, elements, CONCURRENCY)),
            "default": lambda: plan.run(take(plan.redis, elements, DEFAULT_CONCURRENCY)),
        },
    )

    def row(what: str, ours: str, bare: str, goal: Goal | None) -> Row:
        beside = f"{per_message_us(times[ours], n)} an element, {bare} {per_message_us(times[bare], n)}"
        return Row("BP9", what, f"x speed of the {bare}", ratios(times[bare], times[ours]), goal, beside)

    of = f"Redis: {n:,} elements of a list, to an empty handler, concurrency"
    return [
        row(f"{of} {CONCURRENCY:,}", "ours", "bare loop", GOAL),
        row(f"{of} {CONCURRENCY:,}", "ours", "bare loop with tasks", None),
        row(f"{of} {DEFAULT_CONCURRENCY} (default)", "default", "bare loop", None),
        beside_tuned(
            "BP9",
            of,
            CONCURRENCY,
            times["ours"],
            times["default"],
            beside=f"{per_message_us(times['default'], n)} an element",
        ),
    ]


async def waiting(url: str, n: int) -> list[bytes]:
    """Return the list elements for n events."""
    at = datetime.now(UTC)
    async with emptied(url) as client:
        await move_all(client, url, [Message(order(i), at=at, to=f"redis-list:{LIST}") for i in range(n)], MinuteAgo())
        elements: list[bytes] = await client.lrange(LIST, 0, -1)
        return elements


async def bare(url: str, elements: Sequence[bytes], *, tasks: bool) -> float:
    """Measure the bare limit: a script that empties a processing list, and moves the next 500 elements into this list.

    Args:
        url: The URL of the server.
        elements: The elements of the list.
        tasks: True to start also a task for each element, as a handling loop does.
    """
    handled: list[bytes] = []

    async def handle(element: bytes) -> None:
        handled.append(element)

    async with emptied(url) as client:
        await _fill(client, elements)
        move = client.register_script(TAKE)
        with Stopwatch() as watch:
            while found := await move(keys=[LIST, "processing"], args=[AT_ONCE]):
                if tasks:
                    started = [asyncio.create_task(handle(element)) for element in found]
                    for task in started:
                        await task
                else:
                    handled += found
        check(handled == list(elements), "the bare side took other elements, or in another order")
        check(await client.dbsize() == 0, "the bare side left something")
    return watch.seconds


async def _fill(client: Client, elements: Sequence[bytes]) -> None:
    for at in range(0, len(elements), AT_ONCE):
        await client.rpush(LIST, *elements[at : at + AT_ONCE])


async def take(url: str, elements: Sequence[bytes], concurrency: int) -> float:
    """Measure our side, from the open of the scheduler to its close. Then no element is in the list or in flight."""
    n = len(elements)
    scheduler, handled = Scheduler(RedisStore(url)), list[int]()
    all_handled = asyncio.get_running_loop().create_future()

    @scheduler.handler(concurrency=concurrency, timeout="30s", source=f"redis-list:{LIST}")
    async def handle(event: Order) -> None:
        handled.append(event.number)
        if len(handled) == n:
            all_handled.set_result(None)

    async with emptied(url) as client:
        await _fill(client, elements)
        with Stopwatch() as watch:
            async with scheduler:
                await all_handled
        check_once_each(handled, n)
        left = [key async for key in client.scan_iter() if LIST.encode() in key]
        check(not left, f"{left} are left")
    return watch.seconds


BENCHMARK = Benchmark("BP9", "a Redis list as source", run, needs_redis=True)
