"""`Handle`: opens and closes the file of a store. The store reads and writes the file only through this object."""

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
from .writer import Job, Writer

__all__ = ["Handle"]

T = TypeVar("T")


class Handle:
    """The file of one store. It may be opened again after a close.

    Args:
        path: The absolute path of the file.
        name: The name of the store in error messages.
        namespace: The namespace of the messages.
        journal: The largest number of journal entries to keep. With 0, the store keeps no journal.
        clock: The clock of the store. The store's threads read the clock too.
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
            ConfigurationError: The store is open already.
            StoreUnavailableError, StoreMismatchError: The file cannot be opened, for the reasons that `Writer.open`
                names.
        """
        if self.opened is not None:
            self.opened.check()
            raise ConfigurationError("store", "open already", "one 'async with' block at a time")
        self.clock.now_ms()  # A clock may bind itself to the event loop at its first use. So use it here first.
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
        """Return the open file. Check that the caller may use it.

        Raises:
            ClosedError: The store is closed.
            WrongLoopError: The store was opened in another event loop, thread or process.
        """
        if self.opened is None:
            raise ClosedError("store", "closed")
        self.opened.check()
        return self.opened

    async def read(self, read: Callable[[Reader], T]) -> T:
        """Run a function on the reading connection, in one snapshot of the file. Return the function's answer.

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
        """Run a function in a transaction of the writer's thread. Return the function's answer.

        Args:
            run: The function to run. If its first transaction is undone, it may run again.
            size: The number of messages that the function handles.
            is_durable: True if the call must wait until the disk has the data.
            committed: A function to call with the answer after the commit. It runs in the writer's thread.
            failed: A function to call with the failure, if nothing was written or if the outcome is unknown.

        Raises:
            StoreUnavailableError: Nothing was written, or the outcome of the commit is unknown.
            StoreTooNewError: The file uses a feature that this version does not know. Nothing was written.
        """

        def refuse(failure: Failure) -> NoReturn:
            if failed is not None:
                failed(failure)
            self._refuse(failure)

        job = Job(run, refuse, size=size, is_durable=is_durable, committed=committed)
        return await self.checked().writer.do(job)

    def write_apart(
        self,
        writer: Writer,
        run: Callable[[Tables], T],
        *,
        size: int = 1,
        is_durable: bool = True,
        committed: Callable[[T], object] | None = None,
    ) -> T:
        """Run a function as `write` does, for a caller in a thread other than the event loop's. Block meanwhile.

        Args:
            writer: The writer of the opening to which the caller belongs.
            run: The function to run, as for `write`.
            size: The number of messages that the function handles.
            is_durable: True if the call must wait until the disk has the data.
            committed: A function to call with the answer after the commit.

        Raises:
            StoreUnavailableError: As for `write`; or the file did not answer within a second, and the function may
                still run later.
            StoreTooNewError: As for `write`.
            ClosedError: The store is closed.
        """
        job = Job(run, self._refuse, size=size, is_durable=is_durable, committed=committed)
        try:
            return writer.do_apart(job)
        except TimeoutError as error:
            raise StoreUnavailableError(self.name, "the file did not answer within a second") from error

    def _refuse(self, failure: Failure) -> NoReturn:
        if failure.too_new is not None:
            raise StoreTooNewError(self.name, failure.too_new.value, failure.too_new.allowed)
        raise StoreUnavailableError(self.name, failure.reason)
