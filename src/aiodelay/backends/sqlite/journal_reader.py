"""`SqliteJournalReader`: reads the journal from any entry on. The store need not be open.

The reader neither creates the file nor writes to it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from aiodelay.core.values import FIRST_ENTRY, JournalEntry
from aiodelay.errors import StoreUnavailableError

from .connection import Database, failure_of
from .reading import Reader

__all__ = ["SqliteJournalReader", "open_journal"]

T = TypeVar("T")
PART = 0
AT_ONCE = 5_000


class SqliteJournalReader:
    """Implements the Protocol `JournalReader` for a SQLite store. The journal has one part.

    The entries have consecutive numbers. If a number is missing, the store has trimmed the entry.

    Args:
        path: The absolute path of the file.
        namespace: The namespace of the entries.
        name: The name of the store in error messages.
        thread: An executor with one thread. All uses of the connection run in this thread.
    """

    def __init__(self, path: str, namespace: str, name: str, thread: ThreadPoolExecutor) -> None:
        self._path, self._namespace, self._name, self._thread = path, namespace, name, thread
        self._database: Database | None = None

    async def open(self) -> None:
        """Open the file for reading.

        Raises:
            StoreUnavailableError: The file does not exist or cannot be opened.
            StoreMismatchError: Another program has written the file.
        """
        self._database = await self._called(lambda: Database(self._path, query_only=True))

    async def close(self) -> None:
        """Close the file, if it is open."""
        if self._database is not None:
            await self._called(self._database.close)

    async def spans(self) -> Mapping[int, range]:
        """Return the range of entry numbers that the store still keeps. The map has one part, `PART`."""
        return {PART: await self._read(lambda reader: reader.journal_span())}

    async def entries(
        self, part: int, span: range, trimmed: Callable[[range], object]
    ) -> AsyncIterator[Sequence[JournalEntry]]:
        """Yield the entries of a span in order, in batches. Report the numbers of missing entries to `trimmed`."""
        del part
        following = max(span.start, FIRST_ENTRY)
        while following < span.stop:
            after, limit = following - 1, min(AT_ONCE, span.stop - following)
            found = await self._read(partial(Reader.journal, message_id=None, after=after, limit=limit))
            found = [entry for entry in found if entry.number < span.stop]
            first = found[0].number if found else span.stop
            if first > following:
                trimmed(range(following, first))
            if found:
                yield found
            following = found[-1].number + 1 if found else span.stop

    async def _read(self, read: Callable[[Reader], T]) -> T:
        database = self._database
        assert database is not None
        try:
            return await self._called(lambda: read(Reader(database.connection, self._namespace)))
        except sqlite3.Error as error:
            raise StoreUnavailableError(self._name, failure_of(error, self._path).reason) from error

    async def _called(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


@asynccontextmanager
async def open_journal(path: str, namespace: str, name: str) -> AsyncGenerator[SqliteJournalReader]:
    """Open a reader of the journal, and close it after the block.

    Raises:
        StoreUnavailableError: The file does not exist or cannot be opened.
        StoreMismatchError: Another program has written the file.
    """
    with ThreadPoolExecutor(1, "aiodelay-sqlite-journal") as thread:
        reader = SqliteJournalReader(path, namespace, name, thread)
        await reader.open()
        try:
            yield reader
        finally:
            await reader.close()
