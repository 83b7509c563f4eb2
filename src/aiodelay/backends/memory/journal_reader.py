"""`MemoryJournalReader`: reads the journal of a memory store. This journal has one part."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from aiodelay.core.values import JournalEntry

__all__ = ["MemoryJournalReader"]

PART = 0


class MemoryJournalReader:
    """Implements the Protocol `JournalReader` for a memory store.

    Args:
        journal: The journal of the store. The store may add entries while this object reads.
    """

    def __init__(self, journal: deque[JournalEntry]) -> None:
        self._journal = journal

    async def spans(self) -> Mapping[int, range]:
        """Return the range of entry numbers that the store still keeps. The map has one part, `PART`."""
        if not self._journal:
            return {PART: range(1, 1)}
        return {PART: range(self._journal[0].number, self._journal[-1].number + 1)}

    async def entries(
        self, part: int, span: range, trimmed: Callable[[range], object]
    ) -> AsyncIterator[Sequence[JournalEntry]]:
        """Yield all entries of a span in one batch. If entries at the start are missing, report them to `trimmed`."""
        del part
        found = [entry for entry in self._journal if entry.number in span]
        first = found[0].number if found else span.stop
        if first > span.start:
            trimmed(range(span.start, first))
        if found:
            yield found
