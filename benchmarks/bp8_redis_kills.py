"""BP8: the cost of kills: three processes share a Redis store, and every 2 s one of them is killed (kill -9).

Then the cost of an event loop that is blocked: see `bp8_blocked_loop`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import count
from multiprocessing.context import SpawnProcess
from typing import NamedTuple

import msgspec
from redis.asyncio import Redis

from aiodelay import Context, Scheduler
from aiodelay.backends.redis.records.keys import Keys, text_of
from aiodelay.core.values import LEASE_MS
from aiodelay.redis import RedisStore

from .bp8_blocked_loop import blocked_rows
from .harness import Benchmark, Goal, Order, Plan, Row, check, order
from .redis_server import Client, emptied

__all__ = ["BENCHMARK"]

PROCESSES = 3
SPAN_S, LEAST_SPAN_S = 60.0, 1.0
KILL_EVERY_S, LEAST_KILL_EVERY_S = 2.0, 0.5
PER_S = 200
LONGEST_DELAY_S = 2.0
HANDLER_S = 0.05
LEAST_LEASE_MS = 1_000
GOAL = Goal("at most", 4_000)
POLL_S = 0.05

KEYS = Keys("default")
BEGAN = "began"
"""A Redis list outside the store. Its elements outlive the processes that wrote them."""


class Began(msgspec.Struct, array_like=True):
    """The start of one run of a handler."""

    process: int
    message_id: str
    number: int
    lateness_ms: int


class Storm(NamedTuple):
    """The result of a series of kills."""

    messages: int
    kills: int
    lateness_ms: float
    repeated: int
    in_flight_at_kills: int
    dead_letters: int


def run(plan: Plan) -> list[Row]:
    span_s, lease_ms = max(SPAN_S * plan.scale, LEAST_SPAN_S), max(round(LEASE_MS * plan.scale), LEAST_LEASE_MS)
    every_s = max(KILL_EVERY_S * plan.scale, LEAST_KILL_EVERY_S)
    rounds = [plan.run(storm(plan.redis, span_s, every_s, lease_ms)) for _ in range(plan.runs if plan.nightly else 1)]
    what = f"Redis: {PROCESSES} processes, one killed every {every_s:g} s for {span_s:g} s"
    lateness = tuple(each.lateness_ms for each in rounds)
    repeated = tuple(each.repeated / max(each.in_flight_at_kills, 1) for each in rounds)
    of_kills = ", ".join(
        f"{each.repeated} repeated, {each.in_flight_at_kills} in flight at {each.kills} kills" for each in rounds
    )
    dead = tuple(float(each.dead_letters) for each in rounds)
    of_lease = f"the largest of {rounds[0].messages:,} messages; a lease lasts {lease_ms:,} ms"
    return [
        Row("BP8", f"{what}: largest lateness", "ms", lateness, GOAL, of_lease),
        Row("BP8", f"{what}: attempts repeated", "x in flight at the kills", repeated, Goal("at most", 1.0), of_kills),
        Row("BP8", f"{what}: dead letters", "messages", dead, Goal("at most", 0.0), "all were delivered"),
        *blocked_rows(plan),
    ]


# --- the processes ----------------------------------------------------------------------------------------


def scheduler_of(url: str, lease_ms: int) -> Scheduler:
    """Return a scheduler with leases of a given length."""
    scheduler = Scheduler(RedisStore(url))
    scheduler._options = msgspec.structs.replace(scheduler._options, lease_ms=lease_ms)
    return scheduler


def work(url: str, lease_ms: int, process: int) -> None:
    """Handle messages until this process is killed."""
    asyncio.run(handle_all(url, lease_ms, process))


async def handle_all(url: str, lease_ms: int, process: int) -> None:
    """Handle due messages. Each run first records its start."""
    client = Redis.from_url(url)
    scheduler = scheduler_of(url, lease_ms)

    @scheduler.handler(timeout="30s")
    async def handle(event: Order, context: Context) -> None:
        began = Began(process, context.id, event.number, context.lateness // timedelta(milliseconds=1))
        await client.rpush(BEGAN, msgspec.msgpack.encode(began))
        await asyncio.sleep(HANDLER_S)

    await scheduler.run()


class Crew:
    """The processes, and the messages in flight that kills have interrupted."""

    def __init__(self, client: Client, url: str, lease_ms: int) -> None:
        self._client, self._url, self._lease_ms = client, url, lease_ms
        self._numbers = count()
        self._processes: list[tuple[int, SpawnProcess]] = []
        self.kills = self.in_flight_at_kills = 0

    def start(self) -> None:
        """Start one more process."""
        number = next(self._numbers)
        process = multiprocessing.get_context("spawn").Process(target=work, args=(self._url, self._lease_ms, number))
        process.start()
        self._processes.append((number, process))

    async def ready(self) -> None:
        """Wait until all first processes handle messages."""

        async def all_serve() -> bool:
            return bool(await self._client.hlen(KEYS.key("workers")) == PROCESSES)

        await _until(all_serve)

    async def kill_oldest(self) -> None:
        """Kill the oldest process, count its unsettled messages, and start another process."""
        number, process = self._processes.pop(0)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.sleep(POLL_S)  # let its sent data arrive
        leased = await self._leased()
        begun = {began.message_id: began.process for began in await began_so_far(self._client)}
        self.in_flight_at_kills += sum(begun.get(message_id) == number for message_id in leased)
        self.kills += 1
        _kill(process)
        self.start()

    async def _leased(self) -> set[str]:
        lane = await self._client.hget(KEYS.key("lanes"), Order.__name__)
        return set(map(text_of, await self._client.zrange(KEYS.key(f"leased:{int(lane)}"), 0, -1)))

    def kill_all(self) -> None:
        """End all processes."""
        for _, process in self._processes:
            _kill(process)


def _kill(process: SpawnProcess) -> None:
    process.kill()
    process.join()
    process.close()


async def began_so_far(client: Client) -> list[Began]:
    """Return the started runs, in order."""
    written = await client.lrange(BEGAN, 0, -1)
    return [msgspec.msgpack.decode(each, type=Began) for each in written]


# --- the storm --------------------------------------------------------------------------------------------


async def storm(url: str, span_s: float, every_s: float, lease_ms: int) -> Storm:
    """Schedule messages while processes are killed. Then wait until all messages are delivered."""
    n = round(span_s * PER_S)
    async with emptied(url) as client, RedisStore(url) as store, _crew(client, url, lease_ms) as crew:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_schedule(url, n))
            for _ in range(int(span_s / every_s)):
                await asyncio.sleep(every_s)
                await crew.kill_oldest()

        async def is_over() -> bool:
            counts = (await store.counts()).values()
            return not any(each.scheduled or each.overdue or each.in_flight for each in counts)

        await _until(is_over)
        began = await began_so_far(client)
        dead = await store.dead_letters()
    runs = Counter(each.number for each in began)
    check(set(runs) == set(range(n)), f"of {n} messages {n - len(runs)} were not delivered")
    lateness_ms = max(each.lateness_ms for each in began)
    return Storm(n, crew.kills, lateness_ms, len(began) - n, crew.in_flight_at_kills, len(dead))


@asynccontextmanager
async def _crew(client: Client, url: str, lease_ms: int) -> AsyncIterator[Crew]:
    crew = Crew(client, url, lease_ms)
    try:
        for _ in range(PROCESSES):
            crew.start()
        await crew.ready()
        yield crew
    finally:
        crew.kill_all()


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    while not await holds():  # noqa: ASYNC110 - the change happens in other processes
        await asyncio.sleep(POLL_S)


async def _schedule(url: str, n: int) -> None:
    """Schedule messages at a rate, with random due times within the next seconds."""
    chance = random.Random(n)
    async with Scheduler(RedisStore(url), dispatch=False) as scheduler, asyncio.TaskGroup() as tasks:
        since = asyncio.get_running_loop().time()
        for number in range(n):
            await asyncio.sleep(max(0.0, since + number / PER_S - asyncio.get_running_loop().time()))
            delay = timedelta(seconds=chance.uniform(0.0, LONGEST_DELAY_S))
            tasks.create_task(scheduler.schedule(order(number), delay=delay))


BENCHMARK = Benchmark("BP8", "processes killed and event loops blocked on Redis", run, needs_redis=True)
