"""The server that BP1 to BP9 run on, and plain redis-py on it for the bare sides."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeAlias

import redis
from redis.asyncio import Redis

from aiodelay.backends.redis.records.keys import Keys
from aiodelay.ports.clock import SystemClock
from aiodelay.testing.servers import Found, redis_servers, serving

from .harness import check

__all__ = ["MESSAGES_KEY", "Client", "MinuteAgo", "emptied", "empty", "names_of_build", "running_server", "stored"]

Client: TypeAlias = Any
"""Plain redis-py's; its types name every reply that it could give."""
MINUTE_MS = 60_000
MESSAGES_KEY = Keys("default").key("msg")
"""Where aiodelay keeps records by id; the bare sides write there as well."""


class MinuteAgo(SystemClock):
    """A clock for stores that schedule: their messages look as if they had been scheduled a minute ago, as most have.

    What was scheduled within the last 30 s costs more when it ends, because its command may still be repeated.
    """

    def now_ms(self) -> int:
        return super().now_ms() - MINUTE_MS


@contextmanager
def running_server(given: str | None) -> Iterator[str]:
    """Give the URL of a server: the one given, or one found as the tests find theirs.

    Raises:
        WrongResultError: It holds something, which would be removed.
    """
    with serving(Found("given", given, url=given) if given else redis_servers()[0]) as url:
        with redis.Redis.from_url(url) as client:
            check(client.dbsize() == 0, f"the database of {url} must be empty: everything in it would be removed")
        yield url


def names_of_build(url: str) -> str:
    """Return the server's product and version, its allocator, and how it writes to the disk."""
    with redis.Redis.from_url(url, decode_responses=True) as client:
        info: Any = client.info()
    product = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"
    return f"{product} ({info['mem_allocator']}, appendonly {'on' if info['aof_enabled'] else 'off'})"


def empty(url: str) -> None:
    """Remove everything from the database."""
    with redis.Redis.from_url(url, socket_timeout=None) as client:
        client.flushdb()


@asynccontextmanager
async def emptied(url: str) -> AsyncIterator[Client]:
    """Connect with plain redis-py, and remove everything from the database, at first and at last."""
    client = Redis.from_url(url, protocol=2, socket_timeout=None)
    async with client:
        await client.flushdb()
        try:
            yield client
        finally:
            await client.flushdb()


async def stored(client: Client) -> dict[bytes, bytes]:
    """Return the records that there are, by id."""
    records: dict[bytes, bytes] = await client.hgetall(MESSAGES_KEY)
    return records


async def fill_bare(client: Client, payloads: Sequence[bytes]) -> None:
    """Put messages that are due now into a sorted set `due` and a hash `messages`, as plain programs keep them."""
    now_ms = time.time_ns() // 1_000_000
    ids = [number.to_bytes(16, "big") for number in range(len(payloads))]
    for at in range(0, len(ids), 500):
        await client.zadd("due", dict.fromkeys(ids[at : at + 500], now_ms))
        await client.hset("messages", mapping=dict(zip(ids[at : at + 500], payloads[at : at + 500], strict=True)))
