"""A store's journal, the record of the events of messages, to read with or without opening the store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from aiodelay.core.values import JournalEntry

__all__ = ["Followed", "Journal", "JournalReader"]


@runtime_checkable
class Journal(Protocol):
    """The part of a store that lists its journal. Each entry is written in the same step as its event."""

    async def journal(
        self, *, message_id: str | None = None, after: int = 0, limit: int = 100
    ) -> Sequence[JournalEntry]:
        """List entries with a number above `after`, in order. With `message_id`, list only entries of that message.

        Raises:
            UnsupportedByStoreError: This store was opened without a journal.
        """
        ...


class JournalReader(Protocol):
    """A journal that is open for reading only. It consists of parts, and the numbers of a part begin at 0 or 1."""

    async def spans(self) -> Mapping[int, range]:
        """Return the readable numbers of each part: from the oldest kept entry up to the next entry to be written.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        ...

    def entries(
        self, part: int, span: range, trimmed: Callable[[range], object]
    ) -> AsyncIterator[Sequence[JournalEntry]]:
        """Yield a part's entries with these numbers, in order, in batches. A repeated call yields the same entries.

        Args:
            part: The part to read.
            span: The numbers to read: start included, stop excluded. They must lie within the result of `spans`.
            trimmed: Called with the numbers of entries that the journal no longer keeps. The function may raise.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        ...


@runtime_checkable
class Followed(Protocol):
    """The part of a store that reads its journal without opening the store. Reading writes nothing."""

    def journal_reader(self) -> AbstractAsyncContextManager[JournalReader]:
        """Return a context manager that opens the journal.

        Raises:
            UnsupportedByStoreError: The store's URL names no journal.
            StoreMismatchError: The journal does not exist, or another program wrote it.
            StoreUnavailableError: The store did not answer.
        """
        ...
