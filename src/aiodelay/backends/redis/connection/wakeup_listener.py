"""Listeners: readers that block on a connection of their own until something happens on the server.

`WakeupListener` reads the store's streams of wake-ups. `ListListener` waits for elements of a list, and `LogListener`
waits for entries of a log. Each listener ends the waits of a loop in this process.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from redis.exceptions import RedisError

from aiodelay.core.backoff import pause_s

from .client import Client
from .faults import Fault
from .login import is_stale
from .scripts import Arg, packed

__all__ = ["AskedReader", "BlockingReader", "ListListener", "LogListener", "Runs", "WakeupListener", "listening"]

log: logging.Logger = logging.getLogger("aiodelay.redis")

BLOCK_MS = 5_000
GRACE_S = 2.0
"""The extra time for an answer after the time limit of its command. After this time, the connection counts as dead."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
START_S = 1.0
LASTING = 5
"""After this number of failures in a row, which take some seconds, the reader logs a warning."""


class BlockingReader(ABC):
    """Keeps one connection open and reads from it.

    After each failure it calls `wake`, because it may have missed a signal.
    """

    def __init__(self, client: Client, key: str, wake: Callable[[], object]) -> None:
        self._client, self._key, self._wake = client, key, wake

    async def run(self) -> None:
        """Listen until the task is cancelled. No error of the connection ends this method."""
        failures = 0
        while True:
            connection = None
            try:
                async with asyncio.timeout(2 * GRACE_S):
                    connection = await self._client.new_connection(self._key)
                    await connection.connect()
                while self._client.is_current(self._key, connection) and not is_stale(connection):
                    await self._read(connection)
                    failures = 0
                if is_stale(connection):  # Connect again at once: no signal can have been missed.
                    continue
            except (RedisError, OSError, TimeoutError, Fault) as error:
                failures += 1
                if connection is not None:
                    self._client.lost(self._key, connection, error)
                if failures == 1:
                    log.info("the connection for wake-ups failed: %s", error)
                elif failures == LASTING:
                    log.warning("no wake-ups arrive (%s); messages may be some seconds late", error)
            except Exception:
                failures += 1
                log.exception("reading wake-ups failed; the safety poll still finds due messages")
            finally:
                if connection is not None:
                    await connection.disconnect(nowait=True)
            self._wake()
            await asyncio.sleep(pause_s(failures, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S))

    @abstractmethod
    async def _read(self, connection: Any) -> None:  # noqa: ANN401 - redis-py's connection
        """Read one answer, or return without one. Block for at most `BLOCK_MS`."""


class WakeupListener(BlockingReader):
    """Reads streams `wake`. A process writes into one when a message becomes the earliest message of a lane.

    The entries are only hints. If the listener misses an entry, the safety poll still finds the message, but later. The
    listener keeps its positions when it connects again, so it misses no entry that the streams still have.

    Args:
        client: The client that makes the connection.
        streams: For the key of each stream: the name of this process in the stream, and a function to call for each
            batch of hints and after each failed connection. The listener skips this process's own entries, because the
            process wakes its own workers without the server. All streams are on one server.
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
            writer, wake = self._streams[key]
            self._cursors[key] = entries[-1][0]
            if any(writer not in fields for _, fields in entries):
                wake()


class AskedReader(BlockingReader):
    """Waits for something to take, once for each request of its owner. The reader itself takes nothing."""

    def __init__(self, client: Client, key: str, wake: Callable[[], object]) -> None:
        super().__init__(client, key, wake)
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Request one call of `wake`, as soon as there is something to take."""
        self._asked.set()

    async def _read(self, connection: Any) -> None:  # noqa: ANN401 - redis-py's connection
        if not self._asked.is_set():
            await self._asked.wait()
            return  # After a long wait, `run` looks first whether the connection must log in again.
        if await _ask(connection, await self._command(connection), BLOCK_MS / 1000 + GRACE_S) is not None:
            self._asked.clear()
            self._wake()

    @abstractmethod
    async def _command(self, connection: Any) -> list[Arg]:  # noqa: ANN401 - redis-py's connection
        """Return a command that waits for something to take.

        The command returns nil after `BLOCK_MS` without success.
        """


class ListListener(AskedReader):
    """Waits until a list has an element.

    The command BLMOVE moves the head of the list to the head of the same list, so the list does not change. The command
    blocks while the list is empty. A new element wakes every listener of the list, whichever program has pushed it.

    Args:
        client: The client that makes the connection.
        key: The key of the list.
        wake: A function to call when the list has an element, and after each failed connection.
    """

    async def _command(self, connection: Any) -> list[Arg]:  # noqa: ANN401 - redis-py's connection
        return ["BLMOVE", self._key, self._key, "LEFT", "LEFT", BLOCK_MS // 1000]


class LogListener(AskedReader):
    """Waits until a log has an entry that a consumer has not read yet.

    Args:
        client: The client that makes the connection.
        key: The key of the log.
        state: The key of the consumer's state, which has the index of the consumer's next entry.
        wake: A function to call when the log has an unread entry, and after each failed connection.
    """

    def __init__(self, client: Client, key: str, state: str, wake: Callable[[], object]) -> None:
        super().__init__(client, key, wake)
        self._state = state

    async def _command(self, connection: Any) -> list[Arg]:  # noqa: ANN401 - redis-py's connection
        index = int(await _ask(connection, ["HGET", self._state, "next"], GRACE_S) or 1)
        return ["XREAD", "COUNT", 1, "BLOCK", BLOCK_MS, "STREAMS", self._key, f"0-{index - 1}"]


class Runs(Protocol):
    """An object with a method that runs until it is cancelled."""

    async def run(self) -> None:
        """Run until the task is cancelled."""
        ...


@asynccontextmanager
async def listening(reader: Runs, name: str) -> AsyncIterator[None]:
    """Run a reader while the caller's block runs.

    An error of the block is raised unchanged, not in an exception group.
    """
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
