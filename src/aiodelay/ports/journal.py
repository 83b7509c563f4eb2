"""A store's journal: the record of what happened to messages, through the open store or read alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from aiodelay.core.values import JournalEntry

__all__ = ["Followed", "Journal", "Trail"]


@runtime_checkable
class Journal(Protocol):
    """The part of a store that lists its journal; each entry is written in the step that causes it."""

    async def journal(
        self, *, message_id: str | None = None, after: int = 0, limit: int = 100
    ) -> Sequence[JournalEntry]:
        """List entries with a number above `after`, in order; of one message if named.

        Raises:
            UnsupportedByStoreError: This store was opened without a journal.
        """
        ...


class Trail(Protocol):
    """A journal, open for reading alone, part by part: entries of a part are numbered upwards from 0 or 1."""

    async def spans(self) -> Mapping[int, range]:
        """Return by part which numbers can be read: from the oldest that is kept to before the next to be given.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...

    def entries(
        self, part: int, span: range, trimmed: Callable[[range], object]
    ) -> AsyncIterator[Sequence[JournalEntry]]:
        """Yield a part's entries with these numbers, in order, some at a time; repeating gives the same.

        Args:
            part: Which.
            span: From which number on, up to before which; not beyond what `spans` has told.
            trimmed: Is given numbers whose entries, as far as they have any, are kept no more; may raise.

        Raises:
            StoreUnavailableError: No answer.
        """
        ...


@runtime_checkable
class Followed(Protocol):
    """The part of a store that reads its journal without opening the store; reading writes nothing."""

    def trail(self) -> AbstractAsyncContextManager[Trail]:
        """Open the journal.

        Raises:
            UnsupportedByStoreError: The store's URL names no journal.
            StoreMismatchError: What should hold it is not there, or not ours.
            StoreUnavailableError: No answer.
        """
        ...
