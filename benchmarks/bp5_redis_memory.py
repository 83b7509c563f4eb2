"""BP5: the memory of the Redis server for a pending message."""

from __future__ import annotations

import random
from itertools import chain

from aiodelay.core.ids import new_id, new_op
from aiodelay.core.values import At, Envelope, Put, Stored
from aiodelay.redis import RedisStore

from .harness import PAYLOAD_BYTES, Benchmark, Goal, Plan, Row, check, quantile, raw_payload
from .redis_server import MESSAGES_KEY, Client, emptied, stored

__all__ = ["BENCHMARK"]

MESSAGES = 1_000_000
AT_ONCE = 500
LANE = "orders"
MONTH_MS = 30 * 86_400_000
MEMORY_GOAL = Goal("at most", 1.05)

HEAD_BYTES = 6
"""The bytes before the record in a value of `msg`."""
DUE_AT = slice(10, 16)
TRACE = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
HEADERS = {"source": b"web", "tenant": b"acme"}
RECORDS = {
    "a message of bytes": (Envelope("", LANE, payload=raw_payload(0)), Goal("at most", 48)),
    "a typed event": (Envelope("", LANE, payload=raw_payload(0), encoding="json"), Goal("at most", 48)),
    "a typed event with trace context and two headers": (
        Envelope("", LANE, payload=raw_payload(0), encoding="json", trace=TRACE, headers=HEADERS),
        Goal("at most", 110),
    ),
}
BARE_PUT = """
redis.call('ZADD', KEYS[1], unpack(ARGV, 2, 2 * ARGV[1] + 1))
redis.call('HSET', KEYS[2], unpack(ARGV, 2 * ARGV[1] + 2))
"""


def run(plan: Plan) -> list[Row]:
    n = plan.size(MESSAGES)
    rounds = [plan.run(memory(plan.redis, n)) for _ in range(plan.runs)]
    per_message = [(ours / n, bare / n) for ours, bare in rounds]
    beside = f"{quantile((ours for ours, _ in per_message), 0.5):.0f} B a message in all, "
    beside += f"bare {quantile((bare for _, bare in per_message), 0.5):.0f} B"
    ratios = tuple(ours / bare for ours, bare in per_message)
    rows = [
        Row("BP5", f"Redis: memory of {n:,} pending messages of bytes", "x bare memory", ratios, MEMORY_GOAL, beside),
    ]
    for what, (envelope, goal) in RECORDS.items():
        overheads = tuple(plan.run(overhead(plan.redis, envelope)) for _ in range(plan.runs))
        beside = f"the payload has {PAYLOAD_BYTES} B; a prefix of {HEAD_BYTES} B before the record is not counted"
        size = f"Redis: size of the record of {what}, without the payload"
        rows.append(Row("BP5", size, "B", overheads, goal, beside))
    return rows


async def overhead(url: str, envelope: Envelope) -> float:
    """Return the number of bytes of a record that are not payload."""
    async with emptied(url) as client, RedisStore(url) as store:
        (outcome,) = await store.apply([Put(new_op(), envelope, At(store.now_ms() + MONTH_MS))])
        check(isinstance(outcome, Stored), "the message was not stored")
        (value,) = (await stored(client)).values()
    return len(value) - HEAD_BYTES - len(envelope.payload)


async def memory(url: str, n: int) -> tuple[int, int]:
    """Return the bytes that the server's allocator uses for n messages, and for a bare copy of them."""
    async with emptied(url) as client:
        at_first = await _used(client)
        async with RedisStore(url) as store:
            await _fill(store, n)
        check(await client.hlen(MESSAGES_KEY) == n, "not all were stored")
        with_ours = await _used(client)
        await _copy_bare(client)
        check(await client.hlen("bare:msg") == await client.zcard("bare:due") == n, "not all were copied")
        return with_ours - at_first, await _used(client) - with_ours


async def _used(client: Client) -> int:
    return int((await client.info("memory"))["used_memory_dataset"])


async def _fill(store: RedisStore, n: int) -> None:
    chance = random.Random(n)
    payload = raw_payload(0)
    for first in range(0, n, AT_ONCE):
        now = store.now_ms()
        puts = [
            Put(new_op(), Envelope(new_id(), LANE, payload=payload), At(now + chance.randrange(MONTH_MS)))
            for _ in range(min(AT_ONCE, n - first))
        ]
        check(all(isinstance(each, Stored) for each in await store.apply(puts)), "a message was not stored")


async def _copy_bare(client: Client) -> None:
    """Copy the messages into the bare limit: one sorted set and one hash, with the same ids, times and records."""
    put = client.register_script(BARE_PUT)
    cursor = -1
    while cursor:
        cursor, found = await client.hscan(MESSAGES_KEY, max(cursor, 0), count=AT_ONCE)
        records = {message_id: value[HEAD_BYTES:] for message_id, value in found.items()}
        places = [(int.from_bytes(record[DUE_AT], "big"), message_id) for message_id, record in records.items()]
        if records:
            arguments = [len(records), *chain.from_iterable(places), *chain.from_iterable(records.items())]
            await put(keys=["bare:due", "bare:msg"], args=arguments)


BENCHMARK = Benchmark("BP5", "memory in Redis", run, needs_redis=True)
