"""Readers that block until something happens on the server, each on its own connection.

`WakeupListener` reads the store's stream of wake-ups. `ListListener` and `LogListener` wait for elements of a list and
for entries of a log. Sources and the store use them to end their waits.
"""

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
"""How long after its time limit an answer may still arrive. Then the connection counts as dead."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
START_S = 1.0
LASTING = 5
"""After this many failures in a row, which take some seconds, the reader logs a warning."""


class BlockingReader(ABC):
    """Keeps one connection open and reads from it. Calls `wake` after each failure: a signal may have been missed."""

    def __init__(self, client: Client, wake: Callable[[], object]) -> None:
        self._client, self._wake = client, wake

    async def run(self) -> None:
        """Listen until cancelled. No error ends this method."""
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
                    log.warning("no wake-ups arrive, so messages may be some seconds late: %s", error)
            except Exception:
                failures += 1
                log.exception("reading wake-ups failed; the safety poll still finds due messages")
            finally:
                await connection.disconnect(nowait=True)
            self._wake()
            await asyncio.sleep(pause_s(failures, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S))

    @abstractmethod
    async def _read(self, connection: Any) -> None:  # noqa: ANN401 - redis-py's connection
        """Read once. Block for at most `BLOCK_MS`."""


class WakeupListener(BlockingReader):
    """Reads the stream `wake`, into which a process writes when it puts a message ahead of the head of a lane.

    The entries are only hints. A failure here delays messages until the safety poll, and loses none. The cursor
    survives a reconnection, so the listener misses no entry that the stream still holds.

    Args:
        client: The client that makes the connection.
        key: The key of the stream.
        writer: The name of this process. Its own entries are skipped: it wakes its own workers without the server.
        wake: Called for each batch of hints, and after each failed connection.
    """

    def __init__(self, client: Client, key: str, writer: str, wake: Callable[[], object]) -> None:
        super().__init__(client, wake)
        self._key, self._writer = key, writer.encode()
        self._cursor = b""
        self._listens = asyncio.Event()

    async def ready(self) -> None:
        """Return when the listener has its place in the stream, or after `START_S` if the server does not answer."""
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
    """Waits for something to take, each time that its owner asks. It takes nothing itself."""

    def __init__(self, client: Client, wake: Callable[[], object]) -> None:
        super().__init__(client, wake)
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Ask for a call of `wake` when there is something to take."""
        self._asked.set()

    async def _read(self, connection: Any) -> None:  # noqa: ANN401 - redis-py's connection
        if not self._asked.is_set():
            await self._asked.wait()
        if await _ask(connection, await self._command(connection), BLOCK_MS / 1000 + GRACE_S) is not None:
            self._asked.clear()
            self._wake()

    @abstractmethod
    async def _command(self, connection: Any) -> list[Arg]:  # noqa: ANN401 - redis-py's connection
        """Return a command that waits for something to take. After `BLOCK_MS` without it, the command answers nil."""


class ListListener(AskedReader):
    """Waits until a list has an element.

    Its command, BLMOVE, moves the head of the list to the head of the same list, so the list does not change. The
    command blocks while the list is empty. Every waiting listener wakes up, no matter which program pushed the element.

    Args:
        client: The client that makes the connection.
        key: The key of the list.
        wake: Called when the list has an element, and after each failed connection.
    """

    def __init__(self, client: Client, key: str, wake: Callable[[], object]) -> None:
        super().__init__(client, wake)
        self._key = key

    async def _command(self, connection: Any) -> list[Arg]:  # noqa: ANN401 - redis-py's connection
        return ["BLMOVE", self._key, self._key, "LEFT", "LEFT", BLOCK_MS // 1000]


class LogListener(AskedReader):
    """Waits until a log has an entry that a consumer has not read yet.

    Args:
        client: The client that makes the connection.
        key: The key of the log.
        state: The key of the consumer's state, which holds the index of its next entry.
        wake: Called when there is such an entry, and after each failed connection.
    """

    def __init__(self, client: Client, key: str, state: str, wake: Callable[[], object]) -> None:
        super().__init__(client, wake)
        self._key, self._state = key, state

    async def _command(self, connection: Any) -> list[Arg]:  # noqa: ANN401 - redis-py's connection
        index = int(await _ask(connection, ["HGET", self._state, "next"], GRACE_S) or 1)
        return ["XREAD", "COUNT", 1, "BLOCK", BLOCK_MS, "STREAMS", self._key, f"0-{index - 1}"]


@asynccontextmanager
async def listening(reader: BlockingReader, name: str) -> AsyncIterator[None]:
    """Run a reader during a block. An error of the block is raised unchanged, not inside an exception group."""
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
