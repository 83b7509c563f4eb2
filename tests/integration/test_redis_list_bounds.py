"""Large elements, many consumers and many lists: the amount that one script reads and moves is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from redis.asyncio import Redis

from aiodelay.backends.redis.records.elements import encode_element
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Delivery, Demand, Envelope, Put
from aiodelay.ports import Feed
from aiodelay.redis import RedisListSource, RedisStore
from tests.support.servers import Found, redis_servers

SINK, LANE = "redis-list", "work"
LARGE = 600_000
SIZE, AT_ONCE = 1 << 18, 5
"""So many of that size are 1 MiB and one more."""
LISTS_AT_ONCE = 250


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def url(request: pytest.FixtureRequest, shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(request.param)


async def put(store: RedisStore, n: int, size: int, address: str) -> None:
    envelopes = [Envelope(f"{address}-{i}", SINK, address, payload=bytes(size)) for i in range(n)]
    await store.apply([Put(new_op(), each, After(0)) for each in envelopes])


def elements(n: int, size: int) -> list[bytes]:
    envelopes = [Envelope(f"m{i:04}", LANE, payload=bytes(size)) for i in range(n)]
    return [encode_element(Delivery(each, "", 1000, 5, 1, 0)) + bytes(8) for each in envelopes]


@asynccontextmanager
async def feeding(store: RedisStore, url: str, key: str, consumer: str) -> AsyncIterator[Feed]:
    async with RedisListSource(url) as source, source.feed(key, consumer, store.put_back, store.now_ms) as feed:
        yield feed


async def called_by_scripts(url: str, name: str, call: Callable[[], Awaitable[object]]) -> list[list[str]]:
    """Return the arguments with which scripts called a command meanwhile."""
    found: list[list[str]] = []
    async with Redis.from_url(url) as client, client.monitor() as monitor:
        await call()
        await client.echo("that was all")
        while "that was all" not in (heard := await monitor.next_command())["command"]:
            words = heard["command"].split()
            if heard["client_type"] == "lua" and words[0].upper() == name:
                found.append(words[1:])
    return found


def test_large_messages_are_moved_to_lists_without_reading_those_behind_them(url: str) -> None:
    async def play() -> None:
        async with RedisStore(url, namespace="moved") as store:
            await put(store, 40, LARGE, "large-ones")
            with store.transferring(store.sinks[0]) as moves:
                read = await called_by_scripts(url, "HMGET", lambda: moves.transfer(Demand(500)))
            assert 1 <= sum(len(ids) for key, *ids in read if key == "{moved:00}:msg") <= 2

    asyncio.run(play())


def test_large_elements_are_taken_without_reading_those_behind_them(url: str) -> None:
    async def play() -> None:
        async with RedisStore(url, namespace="taken") as store, feeding(store, url, "large", "c") as feed:
            await store.command("RPUSH", "large", *elements(40, LARGE))
            read = await called_by_scripts(
                url, "LRANGE", lambda: feed.claim({LANE: Demand(500)}, request="r", lease_ms=15_000)
            )
            assert 1 <= sum(int(last) - int(first) + 1 for _, first, last in read) <= 2

    asyncio.run(play())


@pytest.mark.parametrize(("size", "at_once"), [(1, 500), (SIZE, AT_ONCE)])
def test_what_many_dead_consumers_had_taken_returns_a_bounded_number_at_a_time(
    url: str, size: int, at_once: int
) -> None:
    async def play() -> None:
        key = f"lapsed-{size}"
        async with RedisStore(url, namespace="lapsed") as store:
            n = 4 * at_once
            await store.command("RPUSH", key, *elements(n, size))
            for i in range(6):
                async with feeding(store, url, key, f"dead-{i}") as feed:
                    await feed.claim({LANE: Demand(at_once * 3 // 4)}, request="r", lease_ms=15_000)
            consumers = f"{{{key}}}:aiodelay:consumers"
            for consumer in await store.command("ZRANGE", consumers, 0, -1):
                await store.command("ZADD", consumers, 1, consumer)
            lengths = [await store.command("LLEN", key)]
            async with feeding(store, url, key, "living") as feed:
                while lengths[-1] < n:
                    await feed.claim({LANE: Demand(0)}, request="r", lease_ms=15_000)
                    lengths.append(await store.command("LLEN", key))
            assert max(after - before for before, after in pairwise(lengths)) <= at_once

    asyncio.run(play())


@pytest.mark.valkey_too
def test_messages_for_more_lists_than_one_script_may_touch_are_moved_in_several(url: str) -> None:
    async def play() -> None:
        async with RedisStore(url, namespace="lists") as store:
            addresses = [f"broken-{i}" for i in range(600)]
            for address in addresses:
                await store.command("SET", address, "no list")
                await put(store, 1, 1, address)
            await put(store, 1, 1, "fine")
            told: list[int] = []
            with store.transferring(store.sinks[0]) as moves:
                while not await store.command("EXISTS", "fine"):
                    told.append(len((await moves.transfer(Demand(500))).changed))
            assert max(told) <= LISTS_AT_ONCE

    asyncio.run(play())
