"""The part of BP8 about a blocked event loop: the cost for the messages of its process, with a second process."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from datetime import timedelta
from multiprocessing.context import SpawnProcess
from typing import Literal, NamedTuple

import msgspec
from redis.asyncio import Redis

from aiodelay import Context, Message, Scheduler
from aiodelay.core.values import LEASE_MS
from aiodelay.redis import RedisStore

from .harness import Goal, Order, Plan, Row, check, order
from .redis_server import Client, emptied

__all__ = ["blocked_rows"]

BLOCKED_S, LEAST_BLOCKED_S = 60.0, 2.0
LEAST_LEASE_MS = 1_000
N = 200
HANDLER_S = 0.05
POLL_S = 0.05
MOST_ENTRIES = 100_000
BEGAN, BLOCKS = "began", "blocks"
"""Redis keys outside the store: the numbers of the runs that have begun, and whether one of them blocks the loop."""
_NONE = Goal("at most", 0.0)

Way = Literal["in Python", "with the GIL released"]
WAYS: tuple[Way, ...] = ("in Python", "with the GIL released")


class Blocked(NamedTuple):
    """The result for one way to block a loop."""

    lapses: int
    repeated: int


def blocked_rows(plan: Plan) -> list[Row]:
    """Return the rows: for each way to block the loop, lapses and repeated runs."""
    seconds = max(BLOCKED_S * plan.scale, LEAST_BLOCKED_S)
    lease_ms = max(round(LEASE_MS * plan.scale), LEAST_LEASE_MS)
    rows: list[Row] = []
    for way in WAYS:
        rounds = [
            plan.run(_measured(plan.redis, way, seconds, lease_ms)) for _ in range(plan.runs if plan.nightly else 1)
        ]
        what = f"Redis: a loop that is blocked for {seconds:g} s {way}, and a second process"
        of = f"of {N} messages; a lease lasts {lease_ms:,} ms"
        rows.append(Row("BP8", f"{what}: lapses", "messages", tuple(float(each.lapses) for each in rounds), _NONE, of))
        repeated = tuple(float(each.repeated) for each in rounds)
        rows.append(Row("BP8", f"{what}: attempts repeated", "messages", repeated, _NONE, of))
    return rows


def _store(url: str) -> RedisStore:
    return RedisStore(f"{url}{'&' if '?' in url else '?'}journal={MOST_ENTRIES}")


def _work(url: str, lease_ms: int, way: Way, seconds: float) -> None:
    asyncio.run(_handle_all(url, lease_ms, way, seconds))


async def _handle_all(url: str, lease_ms: int, way: Way, seconds: float) -> None:
    client = Redis.from_url(url)
    scheduler = Scheduler(_store(url))
    scheduler._options = msgspec.structs.replace(scheduler._options, lease_ms=lease_ms)

    @scheduler.handler(timeout="300s")
    async def handle(event: Order, context: Context) -> None:
        del context
        await client.rpush(BEGAN, event.number)
        if event.number == 0 and await client.set(BLOCKS, 1, nx=True):
            _block(way, seconds)
        await asyncio.sleep(HANDLER_S)

    await scheduler.run()


def _block(way: Way, seconds: float) -> None:
    if way == "with the GIL released":
        time.sleep(seconds)
        return
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        pass


async def _measured(url: str, way: Way, seconds: float, lease_ms: int) -> Blocked:
    processes: list[SpawnProcess] = []

    def start() -> None:
        arguments = url, lease_ms, way, seconds
        processes.append(multiprocessing.get_context("spawn").Process(target=_work, args=arguments))
        processes[-1].start()

    async with emptied(url) as client, _store(url) as store:
        try:
            start()
            async with Scheduler(_store(url), dispatch=False) as scheduler:
                await scheduler.schedule_many(Message(order(number), delay=timedelta(0)) for number in range(N))
            await _until_blocks(client)
            start()
            await _until_delivered(store)
            numbers = [int(each) for each in await client.lrange(BEGAN, 0, -1)]
            entries = await store.journal(limit=MOST_ENTRIES)
        finally:
            for process in processes:
                process.kill()
                process.join()
    check(set(numbers) == set(range(N)), f"of {N} messages {N - len(set(numbers))} were not delivered")
    return Blocked(sum(entry.event == "lapsed" for entry in entries), len(numbers) - N)


async def _until_delivered(store: RedisStore) -> None:
    counts = await store.counts()
    while any(each.scheduled or each.overdue or each.in_flight for each in counts.values()):
        await asyncio.sleep(POLL_S)
        counts = await store.counts()


async def _until_blocks(client: Client) -> None:
    while not await client.exists(BLOCKS):  # noqa: ASYNC110 - the change happens in another process
        await asyncio.sleep(POLL_S)
