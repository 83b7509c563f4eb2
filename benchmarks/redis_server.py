"""The servers of BP1 to BP13, and plain redis-py for the bare sides."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeAlias

import redis
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from aiodelay.backends.redis.records.keys import Keys
from aiodelay.ports.clock import SystemClock
from aiodelay.testing.servers import Found, redis_servers, serving

from .harness import check

__all__ = ["MESSAGES_KEY", "Client", "MinuteAgo", "emptied", "empty", "names_of_build", "running_server", "stored"]

Client: TypeAlias = Any
"""The client of plain redis-py. Its own types list every possible reply."""
CLUSTER = "redis+cluster://"
MINUTE_MS = 60_000
MESSAGES_KEY = Keys("default").key("msg")
"""The key at which aiodelay keeps records by id. The bare sides write there too."""


class MinuteAgo(SystemClock):
    """A clock for stores that schedule. It is a minute behind, so their messages look as old as most messages are.

    A message that was scheduled within the last 30 s costs more when it ends, because its command may be repeated.
    """

    def now_ms(self) -> int:
        return super().now_ms() - MINUTE_MS


@contextmanager
def running_server(given: str | None) -> Iterator[str]:
    """Yield the URL of the given server, or of a server found in the same way as in the tests.

    Raises:
        WrongResultError: The database is not empty. The benchmark would remove its data.
    """
    with serving(Found("given", given, url=given) if given else redis_servers()[0]) as url:
        with redis.Redis.from_url(url) as client:
            check(client.dbsize() == 0, f"the database of {url} must be empty: everything in it would be removed")
        yield url


def names_of_build(url: str) -> str:
    """Return the product and version of the server, its allocator, and its settings for persistence."""
    with redis.Redis.from_url(url, decode_responses=True) as client:
        info: Any = client.info()
    product = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"
    return f"{product} ({info['mem_allocator']}, appendonly {'on' if info['aof_enabled'] else 'off'})"


def empty(url: str) -> None:
    """Empty the database."""
    with redis.Redis.from_url(url, socket_timeout=None) as client:
        client.flushdb()


@asynccontextmanager
async def emptied(url: str) -> AsyncIterator[Client]:
    """Connect with plain redis-py, and empty the database before and after the block; on a cluster, all nodes."""
    client: Client
    if url.startswith(CLUSTER):
        host, _, port = url.removeprefix(CLUSTER).partition(",")[0].partition(":")
        client = RedisCluster(host, int(port), protocol=2, socket_timeout=None)
    else:
        client = Redis.from_url(url, protocol=2, socket_timeout=None)
    async with client:
        await client.flushdb()
        try:
            yield client
        finally:
            await client.flushdb()


async def stored(client: Client) -> dict[bytes, bytes]:
    """Return all records by id."""
    records: dict[bytes, bytes] = await client.hgetall(MESSAGES_KEY)
    return records


async def fill_bare(client: Client, payloads: Sequence[bytes]) -> None:
    """Put due messages into a sorted set `due` and a hash `messages`, as a plain program does."""
    now_ms = time.time_ns() // 1_000_000
    ids = [number.to_bytes(16, "big") for number in range(len(payloads))]
    for at in range(0, len(ids), 500):
        await client.zadd("due", dict.fromkeys(ids[at : at + 500], now_ms))
        await client.hset("messages", mapping=dict(zip(ids[at : at + 500], payloads[at : at + 500], strict=True)))
