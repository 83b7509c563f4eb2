"""`ShardsListener`: reads the wake-ups of all shards on one connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.scripts import Arg, packed
from aiodelay.backends.redis.connection.wakeup_listener import BlockingReader

__all__ = ["ShardsListener"]

BLOCK_MS = 5_000
GRACE_S = 2.0
START_S = 1.0


class ShardsListener(BlockingReader):
    """Reads the streams `wake` of all shards of a server. `WakeupListener` does the same for one shard.

    Args:
        client: The client that makes the connection.
        streams: The key of each stream, with the name of this process in it, and a function to call for its hints.
    """

    def __init__(self, client: Client, streams: Mapping[str, tuple[str, Callable[[], object]]]) -> None:
        super().__init__(client, next(iter(streams)), self._wake_all)
        self._streams = {key.encode(): (writer.encode(), wake) for key, (writer, wake) in streams.items()}
        self._cursors: dict[bytes, bytes] = {}
        self._listens = asyncio.Event()
        self._is_late = False

    async def ready(self) -> None:
        """Wait until the listener knows its positions in the streams, but at most `START_S`."""
        try:
            async with asyncio.timeout(START_S):
                await self._listens.wait()
        except TimeoutError:
            self._is_late = not self._listens.is_set()

    def _wake_all(self) -> None:
        for _, wake in self._streams.values():
            wake()

    async def _read(self, connection: Any) -> None:  # noqa: ANN401 - redis-py's connection
        if not self._cursors:
            cursors: dict[bytes, bytes] = {}
            for key in self._streams:
                last = await _ask(connection, ["XREVRANGE", key, "+", "-", "COUNT", 1], GRACE_S)
                cursors[key] = last[0][0] if last else b"0-0"
            self._cursors = cursors
            self._listens.set()
            if self._is_late:  # The worker claims already. The positions may be behind entries that nobody has read.
                self._wake_all()
        command: list[Arg] = ["XREAD", "BLOCK", BLOCK_MS, "STREAMS", *self._cursors, *self._cursors.values()]
        reply = await _ask(connection, command, BLOCK_MS / 1000 + GRACE_S)
        for key, entries in reply.items() if isinstance(reply, dict) else reply or ():
            self._take(key, entries)

    def _take(self, key: bytes, entries: Sequence[Any]) -> None:
        writer, wake = self._streams[key]
        self._cursors[key] = entries[-1][0]
        if any(writer not in fields for _, fields in entries):
            wake()


async def _ask(connection: Any, command: list[Arg], seconds: float) -> Any:  # noqa: ANN401 - redis-py's
    async with asyncio.timeout(seconds):
        await connection.send_packed_command([packed(command)], check_health=False)
        return await connection.read_response()
