"""BP3: the rate at which messages are stored in Redis."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from itertools import chain

from aiodelay import Message, Scheduler
from aiodelay.redis import RedisStore

from .harness import Benchmark, Goal, Plan, Row, Stopwatch, check, in_turn, order, per_message_us, ratios
from .redis_server import MESSAGES_KEY, Client, emptied, stored

__all__ = ["BENCHMARK", "schedule_each", "schedule_many"]

CALLS = 20_000
MANY = 100_000
AHEAD = timedelta(hours=1)
CALLS_GOAL, MANY_GOAL = Goal("at least", 0.5), Goal("at least", 0.6)

AT_ONCE = 500
PUT = """
local records, places = {}, {}
for i = 1, #ARGV, 3 do
  records[#records + 1], records[#records + 2] = ARGV[i], ARGV[i + 2]
  places[#places + 1], places[#places + 2] = ARGV[i + 1], ARGV[i]
end
redis.call('HSET', KEYS[1], unpack(records))
redis.call('ZADD', KEYS[2], unpack(places))
return #records / 2
"""


def run(plan: Plan) -> list[Row]:
    calls, many = plan.size(CALLS), plan.size(MANY)
    url = plan.redis
    records = plan.run(written(url, many))
    times = in_turn(
        plan,
        {
            "bare calls": lambda: plan.run(bare(url, dict(list(records.items())[:calls]))),
            "calls": lambda: plan.run(schedule_each(url, calls)),
            "bare many": lambda: plan.run(bare(url, records)),
            "many": lambda: plan.run(schedule_many(url, many)),
        },
    )

    def row(what: str, ours: str, bare: str, n: int, goal: Goal) -> Row:
        beside = f"{per_message_us(times[ours], n)} a message, bare {per_message_us(times[bare], n)}"
        return Row("BP3", what, "x bare speed", ratios(times[bare], times[ours]), goal, beside)

    return [
        row(f"Redis: {calls:,} concurrent calls of `schedule()`", "calls", "bare calls", calls, CALLS_GOAL),
        row(f"Redis: `schedule_many` of {many:,} messages", "many", "bare many", many, MANY_GOAL),
    ]


async def written(url: str, n: int) -> dict[bytes, bytes]:
    """Return the ids and the records that aiodelay writes."""
    async with emptied(url) as client:
        await _schedule_many(url, n)
        return await stored(client)


async def bare(url: str, records: dict[bytes, bytes]) -> float:
    """Measure the bare limit: a script that stores 500 ids, times and records of the same bytes in a call."""
    async with emptied(url) as client:
        put = client.register_script(PUT)
        items = [(message_id, 2_000_000_000_000, record) for message_id, record in records.items()]
        chunks = [list(chain.from_iterable(items[at : at + AT_ONCE])) for at in range(0, len(items), AT_ONCE)]
        with Stopwatch() as watch:
            for chunk in chunks:
                await put(keys=[MESSAGES_KEY, "due"], args=chunk)
        check(await stored(client) == records, "the bare side wrote other records")
        check(await client.zcard("due") == len(records), "the bare side wrote other places")
    return watch.seconds


async def schedule_each(url: str, n: int) -> float:
    """Measure our side: a task for each call of `schedule`, all concurrent."""
    async with emptied(url) as client:
        async with Scheduler(RedisStore(url), dispatch=False) as scheduler:
            with Stopwatch() as watch:
                async with asyncio.TaskGroup() as tasks:
                    for i in range(n):
                        tasks.create_task(scheduler.schedule(order(i), delay=AHEAD))
        await _check_count(client, n)
    return watch.seconds


async def schedule_many(url: str, n: int) -> float:
    """Measure our side: one call of `schedule_many`."""
    async with emptied(url) as client:
        seconds = await _schedule_many(url, n)
        await _check_count(client, n)
    return seconds


async def _schedule_many(url: str, n: int) -> float:
    async with Scheduler(RedisStore(url), dispatch=False) as scheduler:
        with Stopwatch() as watch:
            count = await scheduler.schedule_many(Message(order(i), delay=AHEAD) for i in range(n))
    check(count == n, "not all were scheduled")
    return watch.seconds


async def _check_count(client: Client, n: int) -> None:
    check(await client.hlen(MESSAGES_KEY) == n, "not all were scheduled")


BENCHMARK = Benchmark("BP3", "scheduling into Redis", run, needs_redis=True)
