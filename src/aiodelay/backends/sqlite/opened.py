"""`Opened`: the writer, the reader and the watcher of an open store. They belong to one event loop and process."""

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
    """The threads and connections of a store. Each opening of the store has its own object.

    Args:
        path: The absolute path of the file.
        namespace: The namespace of the messages.
        journal: The largest number of journal entries to keep.
        clock: The clock of the store.
    """

    def __init__(self, path: str, namespace: str, journal: int, clock: Clock) -> None:
        self._loop, self._pid = asyncio.get_running_loop(), os.getpid()
        self.counter: ClaimCounter = ClaimCounter()
        self.writer: Writer = Writer(path, namespace, journal, clock, self._wake)
        self._path, self._namespace = path, namespace
        self._workers: dict[WakeUp, Callable[[], object]] = {}
        self._watcher: Watcher | None = None
        self._reading: ThreadPoolExecutor | None = None
        self._database: Database | None = None

    async def open(self) -> None:
        """Open the file for writing. The errors are those of `Writer.open`."""
        await self.writer.open()
        self._file = FileIdentity(self._path)

    def loss(self) -> str:
        """Describe how the file was lost, or return "" if the path still leads to the opened file."""
        return self._file.loss()

    def vanished(self) -> str:
        """Describe how the file was lost and write a note for other processes. Return "" if the file is not lost."""
        return self._file.vanished()

    def check(self) -> None:
        """Check that the caller runs in the process and the event loop that opened the store.

        Raises:
            WrongLoopError: The caller runs in another process, event loop or thread.
        """
        if os.getpid() != self._pid:
            raise WrongLoopError("store", "process (this process was forked)")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is not self._loop:
            raise WrongLoopError("store", "event loop or thread")

    def add(self, wakeup: WakeUp, changed: Callable[[], object]) -> None:
        """Add a worker.

        The first call starts the watcher for writes of other processes.

        Args:
            wakeup: A wake-up that is set when lanes change.
            changed: A function that the thread of the watcher calls after each write to the file. It must not block.
        """
        self._workers[wakeup] = changed
        if self._watcher is None:
            self._watcher = Watcher(self._path, self._changed)

    async def remove(self, wakeup: WakeUp) -> None:
        """Remove the worker of a wake-up. If it was the last one, stop the watcher."""
        self._workers.pop(wakeup, None)
        if not self._workers and self._watcher is not None:
            watcher, self._watcher = self._watcher, None
            watcher.stop()
            await self.writer.join(watcher.join)

    def _wake(self) -> None:
        for wakeup in self._workers:
            wakeup.set()

    def _changed(self) -> None:
        """Make the writer check for writes of other processes. The thread of the watcher calls this method."""
        for changed in list(self._workers.values()):
            changed()
        with suppress(RuntimeError):  # The event loop is closed.
            self._loop.call_soon_threadsafe(self.writer.look_around)

    async def read(self, read: Callable[[Reader], T]) -> T:
        """Run a function on the reading connection, in one snapshot of the file. Return the function's answer."""
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
        """Stop the reader, let the writer finish its jobs, and close both connections."""
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
        executor.shutdown()  # This blocks only until the thread notices that there is no more work.

    def _close_reader(self) -> None:
        if self._database is not None:
            self._database.close()
