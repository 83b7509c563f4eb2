"""BP2: the rate at which due messages of a Redis store move into a list on the same server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from aiodelay import Message, Scheduler
from aiodelay.backends.redis.records.elements import decode_element
from aiodelay.ports.clock import Clock, SystemClock
from aiodelay.redis import RedisListSink, RedisStore

from .harness import (
    Benchmark,
    Goal,
    Plan,
    Row,
    Stopwatch,
    check,
    in_turn,
    number_of,
    per_message_us,
    ratios,
    raw_payload,
)
from .redis_server import Client, MinuteAgo, emptied, fill_bare

__all__ = ["BENCHMARK", "LIST", "move_all", "transfer"]

MESSAGES = 100_000
"""More messages than in BP1, because moving 20,000 takes only about as long as open and close."""
MAX_LENGTH = 0
GOAL = Goal("at least", 0.8)
LIST = "orders"
POLL_S = 0.002

AT_ONCE = 500
MOVE = """
local length = redis.call('LLEN', KEYS[3])
local room = tonumber(ARGV[2])
if tonumber(ARGV[3]) > 0 then room = math.min(room, ARGV[3] - length) end
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, room)
if #ids == 0 then return 0 end
redis.call('RPUSH', KEYS[3], unpack(redis.call('HMGET', KEYS[2], unpack(ids))))
redis.call('ZREM', KEYS[1], unpack(ids))
redis.call('HDEL', KEYS[2], unpack(ids))
return #ids
"""


def run(plan: Plan) -> list[Row]:
    n = plan.size(MESSAGES)
    elements = plan.run(moved(plan.redis, n))
    times = in_turn(
        plan,
        {
            "bare": lambda: plan.run(bare(plan.redis, elements)),
            "ours": lambda: plan.run(transfer(plan.redis, n, MinuteAgo())),
            "just now": lambda: plan.run(transfer(plan.redis, n, SystemClock())),
        },
    )

    def row(what: str, ours: str, goal: Goal | None) -> Row:
        beside = f"{per_message_us(times[ours], n)} a message, bare {per_message_us(times['bare'], n)}"
        return Row("BP2", what, "x bare speed", ratios(times["bare"], times[ours]), goal, beside)

    what = f"Redis: {n:,} messages due at once, moved to a list"
    return [row(what, "ours", GOAL), row(f"{what}, scheduled just before", "just now", None)]


async def moved(url: str, n: int) -> list[bytes]:
    """Return the list elements that aiodelay moves."""
    async with emptied(url) as client:
        await move_all(client, url, _messages(n), MinuteAgo())
        elements: list[bytes] = await client.lrange(LIST, 0, -1)
        return elements


async def bare(url: str, elements: list[bytes]) -> float:
    """Measure the bare limit: a script that reads the list's length, pushes 500 elements and removes their messages."""
    async with emptied(url) as client:
        await fill_bare(client, elements)
        move = client.register_script(MOVE)
        with Stopwatch() as watch:
            while await move(keys=["due", "messages", LIST], args=[time.time_ns() // 1_000_000, AT_ONCE, MAX_LENGTH]):
                pass
        check(await client.lrange(LIST, 0, -1) == elements, "the bare side moved other elements, or in another order")
        check(await client.dbsize() == 1, "the bare side left something")
    return watch.seconds


async def transfer(url: str, n: int, clock: Clock, key: str = LIST) -> float:
    """Measure our side, from the open of the scheduler to its close, with all messages in the list."""
    async with emptied(url) as client:
        seconds = await move_all(client, url, _messages(n, key), clock, key)
        elements = [decode_element(each, lane=RedisListSink.name) for each in await client.lrange(key, 0, -1)]
        check([number_of(each.record.envelope.payload) for each in elements] == list(range(n)), "moved wrongly")
        async with RedisStore(url) as store:
            check(not await store.counts(), "something is left in the store")
    return seconds


def _messages(n: int, key: str = LIST) -> list[Message]:
    at = datetime.now(UTC)
    return [Message(raw_payload(i), at=at, to=f"redis-list:{key}") for i in range(n)]


async def move_all(client: Client, url: str, messages: Sequence[Message], clock: Clock, key: str = LIST) -> float:
    """Schedule due messages, and move them."""
    n = len(messages)
    async with Scheduler(RedisStore(url, clock=clock), dispatch=False) as producer:
        check(await producer.schedule_many(messages) == n, "not all were scheduled")
    with Stopwatch() as watch:
        async with Scheduler(RedisStore(url), sinks=[RedisListSink(url, max_length=MAX_LENGTH)]):
            while await client.llen(key) < n:  # noqa: ASYNC110 - the change happens in the server
                await asyncio.sleep(POLL_S)
    return watch.seconds


BENCHMARK = Benchmark("BP2", "transfer to a Redis list", run, needs_redis=True)
