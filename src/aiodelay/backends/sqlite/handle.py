"""`Handle`: the file of a store while it is open; all reads and writes of the store go through it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import NoReturn, TypeVar

from aiodelay.errors import ClosedError, ConfigurationError, StoreTooNewError, StoreUnavailableError
from aiodelay.ports.clock import Clock

from .connection import Failure, failure_of
from .opened import Opened
from .reading import Reader
from .tables import Tables
from .writer import Job

__all__ = ["Handle"]

T = TypeVar("T")


class Handle:
    """The file of one store, which may be closed and opened again.

    Args:
        path: The file, an absolute path.
        name: What error messages call the store.
        namespace: Which messages of the file.
        journal: Most entries of the journal to keep; 0 = keep none.
        clock: Where the store reads the time; also read in its threads.
    """

    path: str
    name: str
    namespace: str
    journal: int
    clock: Clock

    def __init__(self, path: str, name: str, namespace: str, journal: int, clock: Clock) -> None:
        self.path, self.name, self.namespace, self.journal, self.clock = path, name, namespace, journal, clock
        self.opened: Opened | None = None

    async def open(self) -> None:
        """Open the file.

        Raises:
            ConfigurationError: It is open already.
            StoreUnavailableError, StoreMismatchError: As `Opened.open` raises them.
        """
        if self.opened is not None:
            self.opened.check()
            raise ConfigurationError("store", "open already", "one 'async with' block at a time")
        self.clock.now_ms()  # a clock that binds itself to the loop does so here, not in a thread
        opened = Opened(self.path, self.namespace, self.journal, self.clock)
        await opened.open()
        self.opened = opened

    async def close(self) -> None:
        """Close the file, if it is open."""
        if self.opened is None:
            return
        opened = self.checked()
        self.opened = None
        await opened.close()

    def checked(self) -> Opened:
        """Return the open file.

        Raises:
            ClosedError: The store is closed.
            WrongLoopError: It was opened in another loop, thread or process.
        """
        if self.opened is None:
            raise ClosedError("store", "closed")
        self.opened.check()
        return self.opened

    async def read(self, read: Callable[[Reader], T]) -> T:
        """Run a function on the reading connection, in one snapshot.

        Raises:
            StoreUnavailableError: The file cannot be read.
        """
        opened = self.checked()
        try:
            return await opened.read(read)
        except sqlite3.Error as error:
            raise StoreUnavailableError(self.name, failure_of(error, self.path).reason) from error

    async def write(
        self,
        run: Callable[[Tables], T],
        *,
        size: int = 1,
        is_durable: bool = True,
        committed: Callable[[T], object] | None = None,
        failed: Callable[[Failure], object] | None = None,
    ) -> T:
        """Run a function in a transaction.

        Args:
            run: May run twice, if the first time is undone.
            size: How many messages it is about.
            is_durable: Return when the disk has it.
            committed: Called in the writer's thread with the answer.
            failed: Called there when nothing was written.

        Raises:
            StoreUnavailableError: Nothing was written, or that is not known.
            StoreTooNewError: Nothing was written: the file uses a feature that this version does not know.
        """

        def refuse(failure: Failure) -> NoReturn:
            if failed is not None:
                failed(failure)
            if failure.too_new is not None:
                raise StoreTooNewError(self.name, failure.too_new.value, failure.too_new.allowed)
            raise StoreUnavailableError(self.name, failure.reason)

        job = Job(run, refuse, size=size, is_durable=is_durable, committed=committed)
        return await self.checked().writer.do(job)
