"""BP1: the rate at which due messages of a Redis store reach a handler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from aiodelay import Context, Message, Scheduler, Telemetry
from aiodelay.ports.clock import Clock, SystemClock
from aiodelay.redis import RedisStore

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
    number_of,
    order,
    per_message_us,
    ratios,
    raw_payload,
)
from .redis_server import MinuteAgo, emptied, fill_bare

__all__ = ["BENCHMARK", "typed"]

MESSAGES = 20_000
CONCURRENCY = 1_500
"""The size of three claims: the store makes one claim, the handler runs one, and one is being settled."""
BARE_BATCH = 500
MINUTE_AGO = MinuteAgo()
GOAL = Goal("at least", 0.8)

DUE, LEASED, MESSAGES_KEY = "due", "leased", "messages"
LEASE_MS = 15_000
CLAIM = """
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
if #ids == 0 then return {{}, {}} end
redis.call('ZREM', KEYS[1], unpack(ids))
local leased = {}
for i, id in ipairs(ids) do
  leased[2 * i - 1] = ARGV[3]
  leased[2 * i] = id
end
redis.call('ZADD', KEYS[2], unpack(leased))
return {ids, redis.call('HMGET', KEYS[3], unpack(ids))}
"""
ACKNOWLEDGE = """
redis.call('ZREM', KEYS[1], unpack(ARGV))
return redis.call('HDEL', KEYS[2], unpack(ARGV))
"""


def run(plan: Plan) -> list[Row]:
    n = plan.size(MESSAGES)
    measured: dict[str, Callable[[], Coroutine[None, None, float]]] = {
        "bare": partial(bare, plan.redis, n),
        "typed": partial(typed, plan.redis, n, CONCURRENCY),
        "bytes": partial(untyped, plan.redis, n, CONCURRENCY),
        "typed, just now": partial(typed, plan.redis, n, CONCURRENCY, clock=SystemClock()),
        f"typed {DEFAULT_CONCURRENCY}": partial(typed, plan.redis, n, DEFAULT_CONCURRENCY),
    }
    loops = {"asyncio": replace(plan, uvloop=False), "uvloop": replace(plan, uvloop=True)}
    sides = {
        f"{name}, {loop}": partial(_measured, on_loop, main)
        for loop, on_loop in loops.items()
        for name, main in measured.items()
    }
    times = in_turn(plan, sides)

    def row(loop: str, what: str, ours: str, goal: Goal | None) -> Row:
        seconds, limit = times[f"{ours}, {loop}"], times[f"bare, {loop}"]
        beside = f"{per_message_us(seconds, n)} a message, bare {per_message_us(limit, n)}"
        return Row("BP1", f"Redis, {loop}: {what}", "x bare speed", ratios(limit, seconds), goal, beside)

    def of_tuned(loop: str) -> Row:
        default, tuned = times[f"typed {DEFAULT_CONCURRENCY}, {loop}"], times[f"typed, {loop}"]
        beside = f"{per_message_us(default, n)} a message, with concurrency {CONCURRENCY:,} {per_message_us(tuned, n)}"
        return beside_tuned("BP1", f"Redis, {loop}: {typed_of}", CONCURRENCY, tuned, default, beside=beside)

    of = f"{n:,} messages due at once, to an empty handler"
    typed_of = f"{of} of typed events, concurrency"
    rows = []
    for loop in loops:
        rows += [
            row(loop, f"{typed_of} {CONCURRENCY:,}", "typed", GOAL),
            row(loop, f"{of} of bytes, concurrency {CONCURRENCY:,}", "bytes", GOAL),
            row(loop, f"{typed_of} {CONCURRENCY:,}, scheduled just before", "typed, just now", None),
            row(loop, f"{typed_of} {DEFAULT_CONCURRENCY} (default)", f"typed {DEFAULT_CONCURRENCY}", None),
            of_tuned(loop),
        ]
    return rows


def _measured(plan: Plan, main: Callable[[], Coroutine[None, None, float]]) -> float:
    return plan.run(main())


# --- the bare limit ---------------------------------------------------------------------------------------


async def bare(url: str, n: int) -> float:
    """Measure the bare limit: claim 500 with a lease, run a task per message, acknowledge ended messages together."""
    async with emptied(url) as client:
        await fill_bare(client, [raw_payload(i) for i in range(n)])
        acknowledge = client.register_script(ACKNOWLEDGE)
        delivered: list[int] = []
        ended: list[bytes] = []
        has_ended = asyncio.Event()
        tasks = set[asyncio.Task[None]]()

        async def handle(message_id: bytes, payload: bytes) -> None:
            delivered.append(number_of(payload))
            ended.append(message_id)
            has_ended.set()

        async def claim_all() -> None:
            claim = client.register_script(CLAIM)
            while True:
                now_ms = time.time_ns() // 1_000_000
                ids, payloads = await claim(
                    keys=[DUE, LEASED, MESSAGES_KEY], args=[now_ms, BARE_BATCH, now_ms + LEASE_MS]
                )
                if not ids:
                    return
                for message_id, payload in zip(ids, payloads, strict=True):
                    task = asyncio.create_task(handle(message_id, payload))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)

        with Stopwatch() as watch:
            async with asyncio.TaskGroup() as group:
                group.create_task(claim_all())
                left = n
                while left:
                    await has_ended.wait()
                    has_ended.clear()
                    while ended:
                        batch, ended[:BARE_BATCH] = ended[:BARE_BATCH], []
                        left -= await acknowledge(keys=[LEASED, MESSAGES_KEY], args=batch)
        check_once_each(delivered, n)
        check(await client.dbsize() == 0, "the bare side left something")
    return watch.seconds


# --- ours -------------------------------------------------------------------------------------------------


async def typed(
    url: str, n: int, concurrency: int, *, clock: Clock = MINUTE_AGO, telemetry: Telemetry | None = None
) -> float:
    """Measure our side, from the open of the scheduler to its close, with all messages settled."""
    at = datetime.now(UTC)
    scheduler, delivered = Scheduler(RedisStore(url), telemetry=telemetry), list[int]()
    all_delivered = asyncio.get_running_loop().create_future()

    @scheduler.handler(concurrency=concurrency, timeout="30s")
    async def handle(event: Order, context: Context) -> None:
        _ = context.attempt, context.lateness
        delivered.append(event.number)
        if len(delivered) == n:
            all_delivered.set_result(None)

    messages = (Message(order(i), at=at) for i in range(n))
    return await _drained(
        url, scheduler, messages, clock, delivered=delivered, all_delivered=all_delivered, telemetry=telemetry
    )


async def untyped(url: str, n: int, concurrency: int) -> float:
    """Measure our side with a handler of bytes."""
    at = datetime.now(UTC)
    scheduler, delivered = Scheduler(RedisStore(url)), list[int]()
    all_delivered = asyncio.get_running_loop().create_future()

    @scheduler.handler(concurrency=concurrency, timeout="30s", name="raw")
    async def handle(payload: bytes, context: Context) -> None:
        _ = context.attempt, context.lateness
        delivered.append(number_of(payload))
        if len(delivered) == n:
            all_delivered.set_result(None)

    messages = (Message(raw_payload(i), at=at, to="handler:raw") for i in range(n))
    return await _drained(url, scheduler, messages, MINUTE_AGO, delivered=delivered, all_delivered=all_delivered)


async def _drained(
    url: str,
    scheduler: Scheduler,
    messages: Iterable[Message],
    clock: Clock,
    *,
    delivered: list[int],
    all_delivered: asyncio.Future[None],
    telemetry: Telemetry | None = None,
) -> float:
    async with emptied(url):
        async with Scheduler(RedisStore(url, clock=clock), dispatch=False, telemetry=telemetry) as producer:
            n = await producer.schedule_many(messages)
        with Stopwatch() as watch:
            async with scheduler:
                await all_delivered
        check_once_each(delivered, n)
        async with RedisStore(url) as store:
            check(not await store.counts(), "something is left in the store")
    return watch.seconds


BENCHMARK = Benchmark("BP1", "dispatch from Redis", run, needs_redis=True)
