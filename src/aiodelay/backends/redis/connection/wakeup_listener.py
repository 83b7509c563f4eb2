"""Reads that block, each on a connection of its own: a store's stream of wake-ups, and lists that may fill."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from redis.exceptions import RedisError

from aiodelay.core.backoff import pause_s

from .client import Client
from .scripts import Arg, packed

__all__ = ["AskedReader", "BlockingReader", "ListListener", "LogListener", "WakeupListener", "listening"]

log: logging.Logger = logging.getLogger("aiodelay.redis")

BLOCK_MS = 5_000
GRACE_S = 2.0
"""How much longer than asked for an answer may take before the connection counts as dead."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
START_S = 1.0
LASTING = 5
"""So many failures in a row, over some seconds, are told as a warning."""


class BlockingReader(ABC):
    """Keeps a connection, and calls `wake` after each reconnection: something may have been missed meanwhile."""

    def __init__(self, client: Client, wake: Callable[[], object]) -> None:
        self._client, self._wake = client, wake

    async def run(self) -> None:
        """Listen until cancelled; nothing else ends this."""
        failures = 0
        while True:
            connection = self._client.new_connection()
            try:
                async with asyncio.timeout(2 * GRACE_S):
                    await connection.connect()
                while True:
                    await self._read(connection)
                    failures = 0
            except (RedisError, OSError, TimeoutError) as error:
                failures += 1
                if failures == 1:
                    log.info("wake-ups interrupted: %s", error)
                elif failures == LASTING:
                    log.warning("there are no wake-ups, so that messages may be late by some seconds: %s", error)
            except Exception:
                failures += 1
                log.exception("reading wake-ups failed; the safety poll goes on")
            finally:
                await connection.disconnect(nowait=True)
            self._wake()
            await asyncio.sleep(pause_s(failures, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S))

    @abstractmethod
    async def _read(self, connection: Any) -> None:  # noqa: ANN401 - redis-py's connection
        """Read once, blocking at most `BLOCK_MS`."""


class WakeupListener(BlockingReader):
    """Reads the stream `wake`: what other processes put into a lane ahead of its head. Hints only.

    A cursor survives reconnecting, so that nothing is missed that the stream still holds. Whatever goes wrong here
    costs lateness up to the safety poll, and no message.

    Args:
        client: Makes the connection.
        key: The stream.
        writer: Entries of this one are skipped: its own workers are woken without the server.
        wake: Called for each batch of hints, and after each reconnection.
    """

    def __init__(self, client: Client, key: str, writer: str, wake: Callable[[], object]) -> None:
        super().__init__(client, wake)
        self._key, self._writer = key, writer.encode()
        self._cursor = b""
        self._listens = asyncio.Event()

    async def ready(self) -> None:
        """Return when the cursor stands, or soon if the server does not answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await self._listens.wait()

    async def _read(self, connection: Any) -> None:  # noqa: ANN401 - redis-py's connection
        if not self._cursor:
            last = await _ask(connection, ["XREVRANGE", self._key, "+", "-", "COUNT", 1], GRACE_S)
            self._cursor = last[0][0] if last else b"0-0"
            self._listens.set()
        command: list[Arg] = ["XREAD", "BLOCK", BLOCK_MS, "STREAMS", self._key, self._cursor]
        reply = await _ask(connection, command, BLOCK_MS / 1000 + GRACE_S)
        if not reply:
            return
        entries = next(iter(reply.values())) if isinstance(reply, dict) else reply[0][1]
        self._cursor = entries[-1][0]
        if any(self._writer not in fields for _, fields in entries):
            self._wake()


class AskedReader(BlockingReader):
    """Waits for something to take, whenever it is asked to; it takes nothing."""

    def __init__(self, client: Client, wake: Callable[[], object]) -> None:
        super().__init__(client, wake)
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Have `wake` called once there is something."""
        self._asked.set()

    async def _read(self, connection: Any) -> None:  # noqa: ANN401 - redis-py's connection
        if not self._asked.is_set():
            await self._asked.wait()
        if await _ask(connection, await self._command(connection), BLOCK_MS / 1000 + GRACE_S) is not None:
            self._asked.clear()
            self._wake()

    @abstractmethod
    async def _command(self, connection: Any) -> list[Arg]:  # noqa: ANN401 - redis-py's connection
        """Return the command that blocks at most `BLOCK_MS` while there is nothing, and then answers nil."""


class ListListener(AskedReader):
    """Waits for a list to have an element.

    The command moves the head of the list to the head of the list, and blocks while there is none: after it the list is
    what it was before. All who wait are told of an element, whoever pushed it.

    Args:
        client: Makes the connection.
        key: The list.
        wake: Called when it has an element, and after each reconnection.
    """

    def __init__(self, client: Client, key: str, wake: Callable[[], object]) -> None:
        super().__init__(client, wake)
        self._key = key

    async def _command(self, connection: Any) -> list[Arg]:  # noqa: ANN401 - redis-py's connection
        return ["BLMOVE", self._key, self._key, "LEFT", "LEFT", BLOCK_MS // 1000]


class LogListener(AskedReader):
    """Waits for a log to have an entry that a consumer has not had.

    Args:
        client: Makes the connection.
        key: The log.
        state: The consumer's, which says with which index it goes on.
        wake: Called when there is such an entry, and after each reconnection.
    """

    def __init__(self, client: Client, key: str, state: str, wake: Callable[[], object]) -> None:
        super().__init__(client, wake)
        self._key, self._state = key, state

    async def _command(self, connection: Any) -> list[Arg]:  # noqa: ANN401 - redis-py's connection
        index = int(await _ask(connection, ["HGET", self._state, "next"], GRACE_S) or 1)
        return ["XREAD", "COUNT", 1, "BLOCK", BLOCK_MS, "STREAMS", self._key, f"0-{index - 1}"]


@asynccontextmanager
async def listening(reader: BlockingReader, name: str) -> AsyncIterator[None]:
    """Have a reader at work for the length of a block; what ends the block goes its own way, not into a group."""
    failure: BaseException | None = None
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(reader.run(), name=name)
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - raised below
            failure = error
        task.cancel()
    if failure is not None:
        raise failure


async def _ask(connection: Any, command: list[Arg], seconds: float) -> Any:  # noqa: ANN401 - redis-py's
    async with asyncio.timeout(seconds):
        await connection.send_packed_command([packed(command)], check_health=False)
        return await connection.read_response()
