"""`MoveClient`: the commands of `aiodelay reshard` on the keys of all shards, which may be on several servers.

A failover between the copy of an entry and its deletion must lose nothing. So each write waits for the level of
durability in the URL. Each write may be repeated.

A write may arrive late, when another mover has taken over. So each mover has a number, and a server refuses the writes
of a mover once a later one has written into the shard.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from redis.exceptions import RedisError

from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.faults import Fault, fault_of
from aiodelay.backends.redis.connection.login import is_stale
from aiodelay.backends.redis.connection.options import Options
from aiodelay.backends.redis.connection.scripts import Arg, packed
from aiodelay.backends.redis.records.keys import Keys

__all__ = ["Entry", "MoveClient", "pairs_of"]

T = TypeVar("T")
Entry = tuple[bytes, bytes]
"""A field and its value, or a member and its score."""
MOST_ARGUMENTS = 4_000
"""The most arguments of one write, an even number. Lua passes at most some 8,000 arguments on to a command."""


class MoveClient:
    """Reads and writes the keys of a namespace that is being moved.

    Args:
        options: The options of the URL.
        before_write: Called before each write. It raises if this process may no longer write.
    """

    def __init__(self, options: Options, before_write: Callable[[], Awaitable[None]]) -> None:
        self._client, self._before_write = Client(options), before_write
        self._number = 0
        self._timeout_ms = options.timeout_ms
        self._scanning: tuple[str, Any] | None = None  # the tag of the scanned shard, and the connection

    async def aclose(self) -> None:
        """Close all connections."""
        await self._end_scans()
        await self._client.aclose()

    async def read(self, *arguments: Arg) -> Any:  # noqa: ANN401 - what the command returns
        """Send a command that changes nothing, or that needs no durability, and return its reply."""
        return await self._client.command(*arguments)

    async def confirm(self, keys: Keys) -> None:
        """Check that writes into a shard reach the level of durability. Leave nothing there.

        Raises:
            Fault: They do not reach it.
        """
        meta = keys.key("meta")
        await self._client.commands([("HSET", meta, "confirmed", 1), ("HDEL", meta, "confirmed")], durable=True)

    async def take_over(self, first: Keys) -> None:
        """Get a number that no earlier mover had. From now on, the first shard refuses the writes of earlier movers.

        Each other shard refuses them once this mover has written there.
        """
        self._number = await self._client.command("HINCRBY", first.key("meta"), "mover", 1, durable=True)

    async def write(self, name: str, key: Arg, *arguments: Arg) -> None:
        """Send a command that changes a key. Return when the command has reached the level of durability.

        Many arguments are sent in several commands of the same name. So the arguments are fields, members, keys or
        pairs.

        A repeated command may change nothing, and then Valkey's WAIT does not wait for the first one. So each write
        also writes the number of the mover.

        Raises:
            Fault: The command failed, or a later mover has written into the shard.
        """
        await self._before_write()
        for at in range(0, max(len(arguments), 1), MOST_ARGUMENTS):
            command = [self._number, name, key, *arguments[at : at + MOST_ARGUMENTS]]
            if not await self._client.run_on("move", [_meta_of(key)], command, durable=True):
                raise Fault("unavailable", "another mover has written into the shard", is_moving=True)

    async def now_ms(self, keys: Keys) -> int:
        """Return the time of the server of a shard, in epoch ms."""
        _, (seconds, micros) = await self._client.commands([("EXISTS", keys.key("meta")), ("TIME",)])
        return int(seconds) * 1000 + int(micros) // 1000

    async def scan(self, name: str, keys: Keys, key: Arg, limit: int) -> AsyncIterator[list[Entry]]:
        """Yield the entries of a hash or a sorted set in batches. An entry may come twice.

        A cursor counts only in the process that gave it: a replica that has taken over, or a server that was started
        again, would leave entries out. So all calls of a scan use one connection.

        Args:
            name: `HSCAN` or `ZSCAN`.
            keys: The keys of a shard.
            key: The key of this shard.
            limit: About how many entries to read in one call.

        Raises:
            Fault: The connection failed. Scan the key from its beginning.
        """
        connection = await self._connected(keys.tag)
        cursor: Arg = 0
        while True:
            cursor, flat = await self._asked(connection, [name, key, cursor, "COUNT", limit])
            yield pairs_of(flat)
            if int(cursor) == 0:
                return

    async def _connected(self, tag: str) -> Any:  # noqa: ANN401 - redis-py's connection
        if self._scanning is not None and self._scanning[0] == tag and not is_stale(self._scanning[1]):
            return self._scanning[1]
        await self._end_scans()
        connection = await self._client.new_connection(tag)
        self._scanning = tag, connection
        await self._guarded(connection.connect())
        return connection

    async def _asked(self, connection: Any, command: list[Arg]) -> Any:  # noqa: ANN401 - redis-py's
        await self._guarded(connection.send_packed_command([packed(command)], check_health=False))
        return await self._guarded(connection.read_response())

    async def _guarded(self, step: Awaitable[T]) -> T:
        """Return the result of a step of a scan. If it fails, end the connection, because it could connect again."""
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                return await step
        except BaseException as error:
            assert self._scanning is not None
            self._client.lost(*self._scanning, error)
            await self._end_scans()
            if isinstance(error, RedisError | OSError | TimeoutError):
                raise fault_of(error, sent=False, timeout_ms=self._timeout_ms) from error
            raise

    async def _end_scans(self) -> None:
        if self._scanning is not None:
            (_, connection), self._scanning = self._scanning, None
            await connection.disconnect(nowait=True)


def pairs_of(flat: Any) -> list[Entry]:  # noqa: ANN401 - redis-py's reply
    """Return the pairs in a flat reply."""
    return list(zip(flat[::2], flat[1::2], strict=True))


def _meta_of(key: Arg) -> str:
    """Return the key `meta` of the shard that has a key."""
    whole = key if isinstance(key, bytes) else str(key).encode()
    return whole.partition(b"}:")[0].decode() + "}:meta"
