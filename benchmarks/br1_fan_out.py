"""BR1: the rate at which due messages of a Redis store are fanned out on the same server, and their memory."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime

from aiodelay import Message, Scheduler
from aiodelay.backends.redis.fanout.sink import TopicKeys
from aiodelay.backends.redis.records.elements import decode_element
from aiodelay.backends.redis.records.keys import Keys
from aiodelay.redis import RedisFanout, RedisFanoutSink, RedisStore

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
    quantile,
    ratios,
    raw_payload,
)
from .redis_server import Client, MinuteAgo, emptied, fill_bare

__all__ = ["BENCHMARK"]

SIZES = ((20_000, 5), (1_000, 1_000))
GOAL, MEMORY_GOAL = Goal("at least", 0.7), Goal("at most", 1.3)
TOPIC = "orders"
KEYS = TopicKeys(Keys("default"), TOPIC)
POLL_S = 0.002

AT_ONCE = 500
FAN_OUT = """
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
if #ids == 0 then return 0 end
local last, content, refs = redis.call('INCRBY', KEYS[3], #ids) - #ids, {}, {}
for i, value in ipairs(redis.call('HMGET', KEYS[2], unpack(ids))) do
  refs[i] = last + i
  content[2 * i - 1], content[2 * i] = last + i, value
end
redis.call('HSET', KEYS[4], unpack(content))
for _, name in ipairs(redis.call('SMEMBERS', KEYS[5])) do redis.call('RPUSH', 'refs:' .. name, unpack(refs)) end
redis.call('ZREM', KEYS[1], unpack(ids))
redis.call('HDEL', KEYS[2], unpack(ids))
return #ids
"""


def run(plan: Plan) -> list[Row]:
    return [row for messages, consumers in SIZES for row in _rows(plan, messages, consumers)]


def _rows(plan: Plan, messages: int, consumers: int) -> list[Row]:
    n, names = plan.size(messages), [f"c{i}" for i in range(plan.size(consumers))]
    elements = plan.run(published(plan.redis, n))
    ours_bytes: list[int] = []
    bare_bytes: list[int] = []
    times = in_turn(
        plan,
        {
            "bare": lambda: plan.run(bare(plan.redis, elements, names, bare_bytes)),
            "ours": lambda: plan.run(fan_out(plan.redis, n, names, ours_bytes)),
        },
    )
    what = f"Redis: {n:,} messages due at once, fanned out to {len(names):,} consumers"
    beside = f"{per_message_us(times['ours'], n)} a message, bare {per_message_us(times['bare'], n)}"
    takes = tuple(ours / bare for ours, bare in zip(ours_bytes, bare_bytes, strict=True))
    held = f"{quantile(ours_bytes, 0.5) / n:,.0f} B a message, bare {quantile(bare_bytes, 0.5) / n:,.0f} B"
    return [
        Row("BR1", what, "x bare speed", ratios(times["bare"], times["ours"]), GOAL, beside),
        Row("BR1", f"{what}: memory", "x memory of one copy and its references", takes, MEMORY_GOAL, held),
    ]


async def published(url: str, n: int) -> list[bytes]:
    """Return the elements that aiodelay stores for the messages."""
    async with emptied(url) as client:
        await _fan_out(client, url, n, ["c"])
        by_index: dict[bytes, bytes] = await client.hgetall(KEYS.content)
        return [by_index[b"%d" % (i + 1)] for i in range(n)]


async def bare(url: str, elements: list[bytes], names: list[str], memory: list[int]) -> float:
    """Measure the bare limit: a script that fans out 500 messages in a call.

    The script stores their elements, pushes a reference to each element for each consumer, and removes the messages.
    """
    async with emptied(url) as client:
        await fill_bare(client, elements)
        await client.sadd("consumers", *names)
        script = client.register_script(FAN_OUT)
        keys = ["due", "messages", "next", "content", "consumers"]
        with Stopwatch() as watch:
            while await script(keys=keys, args=[time.time_ns() // 1_000_000, AT_ONCE]):
                pass
        for name in (names[0], names[-1]):
            indexes = await client.lrange(f"refs:{name}", 0, -1)
            check(await client.hmget("content", indexes) == elements, "the bare side fanned out otherwise")
        memory.append(await _used(client, "content", "refs:"))
    return watch.seconds


async def fan_out(url: str, n: int, names: list[str], memory: list[int]) -> float:
    """Measure our side, from the open of the scheduler until all consumers have all messages."""
    async with emptied(url) as client:
        seconds = await _fan_out(client, url, n, names)
        for name in (names[0], names[-1]):
            indexes = await client.lrange(KEYS.of(name).refs, 0, -1)
            elements = [decode_element(each, lane=TOPIC) for each in await client.hmget(KEYS.content, indexes)]
            numbers = [number_of(each.record.envelope.payload) for each in elements]
            check(numbers == list(range(n)), "fanned out wrongly")
        async with RedisStore(url) as store:
            check(not await store.counts(), "something is left in the store")
        memory.append(await _used(client, KEYS.prefix, KEYS.prefix))
    return seconds


async def _used(client: Client, *prefixes: str) -> int:
    """Return the memory of the keys with a prefix, in bytes."""
    used = 0
    async for key in client.scan_iter(count=1000):
        if key.decode().startswith(prefixes):
            used += await client.memory_usage(key, samples=0)
    return used


async def _fan_out(client: Client, url: str, n: int, names: list[str]) -> float:
    at = datetime.now(UTC)
    async with RedisFanout(url) as fanout:
        for name in names:
            await fanout.register(TOPIC, name)
    messages = [Message(raw_payload(i), at=at, to=f"{RedisFanoutSink.name}:{TOPIC}") for i in range(n)]
    async with Scheduler(RedisStore(url, clock=MinuteAgo()), dispatch=False) as producer:
        check(await producer.schedule_many(messages) == n, "not all were scheduled")
    last = KEYS.of(names[-1]).refs
    async with AsyncExitStack() as opened:
        with Stopwatch() as watch:
            await opened.enter_async_context(Scheduler(RedisStore(url)))
            while await client.llen(last) < n:  # noqa: ASYNC110 - the change happens in the server
                await asyncio.sleep(POLL_S)
    return watch.seconds


BENCHMARK = Benchmark("BR1", "fan-out on Redis", run, needs_redis=True)
