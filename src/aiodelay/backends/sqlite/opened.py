"""What an open store consists of: the writer, the reader, the watcher, and the loop and process that they belong to."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from aiodelay.core.wakeup import WakeUp
from aiodelay.errors import WrongLoopError
from aiodelay.ports.clock import Clock

from .claims import ClaimCounter
from .connection import Database
from .file_identity import FileIdentity
from .reading import Reader
from .watcher import Watcher
from .writer import Writer

__all__ = ["Opened"]

T = TypeVar("T")


class Opened:
    """One opening of a store, from `open` to `close`.

    Args:
        path: The file.
        namespace: Which messages of it.
        journal: Most entries to keep.
        clock: The store's.
    """

    def __init__(self, path: str, namespace: str, journal: int, clock: Clock) -> None:
        self._loop, self._pid = asyncio.get_running_loop(), os.getpid()
        self.counter: ClaimCounter = ClaimCounter()
        self.writer: Writer = Writer(path, namespace, journal, clock, self._wake)
        self._path, self._namespace = path, namespace
        self._wakeups: set[WakeUp] = set()
        self._watcher: Watcher | None = None
        self._reading: ThreadPoolExecutor | None = None
        self._database: Database | None = None

    async def open(self) -> None:
        """Open the file; see `Writer.open`."""
        await self.writer.open()
        self._file = FileIdentity(self._path)

    def loss(self) -> str:
        """Return how the file was lost; "" while the path leads to it."""
        return self._file.loss()

    def vanished(self) -> str:
        """Return how the file was lost, and leave a note of it for other processes; "" while the path leads to it."""
        return self._file.vanished()

    def check(self) -> None:
        """Refuse use from elsewhere.

        Raises:
            WrongLoopError: Another process, loop or thread.
        """
        if os.getpid() != self._pid:
            raise WrongLoopError("store", "process (this one was forked)")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is not self._loop:
            raise WrongLoopError("store", "event loop or thread")

    def add(self, wakeup: WakeUp) -> None:
        """Wake this from now on; with the first, other processes are watched."""
        self._wakeups.add(wakeup)
        if self._watcher is None:
            self._watcher = Watcher(self._path, self._changed)

    async def remove(self, wakeup: WakeUp) -> None:
        """Wake this no more."""
        self._wakeups.discard(wakeup)
        if not self._wakeups and self._watcher is not None:
            watcher, self._watcher = self._watcher, None
            watcher.stop()
            await self.writer.join(watcher.join)

    def _wake(self) -> None:
        for wakeup in self._wakeups:
            wakeup.set()

    def _changed(self) -> None:
        """Wake the loop, from the watcher's thread."""
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self.writer.look_around)

    async def read(self, read: Callable[[Reader], T]) -> T:
        """Run a function on the reading connection, in one snapshot."""
        if self._reading is None:
            self._reading = ThreadPoolExecutor(1, "aiodelay-sqlite-reader")
        return await self._loop.run_in_executor(self._reading, self._read, read)

    def _read(self, read: Callable[[Reader], T]) -> T:
        if self._database is None:
            self._database = Database(self._path, query_only=True)
        connection = self._database.connection
        connection.execute("BEGIN")
        try:
            return read(Reader(connection, self._namespace))
        finally:
            self._database.rollback()

    async def close(self) -> None:
        """Stop reading, let the writer finish, and close both connections."""
        try:
            if self._reading is not None:
                await self._close_reading(self._reading)
        finally:
            self._file.forget_note()
            await self.writer.close()

    async def _close_reading(self, executor: ThreadPoolExecutor) -> None:
        if self._database is not None:
            self._database.connection.interrupt()
        closing = self._loop.run_in_executor(executor, self._close_reader)
        executor.shutdown(wait=False)
        await asyncio.shield(closing)
        executor.shutdown()  # blocks for no longer than the thread takes to notice

    def _close_reader(self) -> None:
        if self._database is not None:
            self._database.close()
