"""`ConnectionPool`: lends the connections of one `Client` to its calls.

The pools of redis-py take a lock and a condition, and report events and metrics, at each use of a connection. That is a
fifth of the processor time of a single `schedule()`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from redis.exceptions import RedisError

from .driver import has_ended_or_data
from .login import is_stale

__all__ = ["ConnectionPool", "disconnect_all"]

CLOSE_S = 2.0
"""Longest wait for connections to close, in seconds."""


class ConnectionPool:
    """Lends each connection to one call at a time. It can be closed while calls use its connections.

    Args:
        new_connection: Makes a connection that is not connected yet.
        most: Most connections.
    """

    def __init__(self, new_connection: Callable[[], Any], most: int) -> None:
        self._new_connection = new_connection
        self._room = asyncio.Semaphore(most)
        self._idle: list[Any] = []
        self._lent: set[Any] = set()
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether no call uses a connection."""
        return not self._lent

    async def take(self) -> Any:  # noqa: ANN401 - redis-py's connection
        """Return a connection that is connected. While all connections are lent, wait. The caller limits the wait.

        Raises:
            RedisError, OSError: The server cannot be reached, or it refuses the login.
        """
        await self._room.acquire()
        connection = self._idle.pop() if self._idle else self._new_connection()
        self._lent.add(connection)
        try:
            await _connect(connection)
        except BaseException:
            await connection.disconnect(nowait=True)
            await self.give_back(connection)
            raise
        return connection

    async def give_back(self, connection: Any) -> None:  # noqa: ANN401 - redis-py's connection
        """Take a connection back. If the pool was closed meanwhile, close the connection."""
        self._lent.discard(connection)
        self._idle.append(connection)
        self._room.release()
        if self._is_closed:
            await connection.disconnect(nowait=True)

    async def close_idle(self) -> None:
        """Close the connections that no call uses, without a wait for the server."""
        for connection in self._idle:
            await connection.disconnect(nowait=True)

    async def close(self) -> None:
        """Close all connections, also the connections that calls use now. A second call does nothing."""
        self._is_closed = True
        try:
            await disconnect_all((*self._idle, *self._lent))
        except asyncio.CancelledError:  # The cancellation may leave connections open. Close them, then pass it on.
            await disconnect_all((*self._idle, *self._lent))
            raise


async def disconnect_all(connections: Iterable[Any]) -> None:
    """Close connections of redis-py. Return when they are closed, but after `CLOSE_S` at the latest."""
    with suppress(RedisError, OSError, TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            await asyncio.gather(*(each.disconnect() for each in connections), return_exceptions=True)


async def _connect(connection: Any) -> None:  # noqa: ANN401 - redis-py's connection
    """Connect, unless the connection is open, has no unread data and need not log in again.

    The server may have closed an idle connection.
    """
    if connection.is_connected:
        with suppress(RedisError, OSError):
            if not is_stale(connection) and not await has_ended_or_data(connection):
                return
        await connection.disconnect(nowait=True)
    await connection.connect()
