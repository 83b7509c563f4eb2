"""`HistoryJournal`: the journal of a Kafka store, which is its history topic."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from aiodelay.core.values import JournalEntry
from aiodelay.errors import UnsupportedByStoreError

from .history import read_history
from .journal_reader import KafkaJournalReader, open_journal
from .store_parts import StorePort

__all__ = ["HistoryJournal"]


class HistoryJournal(StorePort):
    """`Journal` and `Followed` over the history topic."""

    async def journal(
        self, *, message_id: str | None = None, after: int = 0, limit: int = 100
    ) -> Sequence[JournalEntry]:
        """List the entries that the history topic still keeps."""
        self._parts.tasks.check_open()
        cluster, topic = self._parts.cluster, self._history()
        return await read_history(cluster, topic, message_id=message_id, after=after, limit=limit)

    def journal_reader(self) -> AbstractAsyncContextManager[KafkaJournalReader]:
        """Open the history topic without opening the store. The numbers of its entries are offsets."""
        return open_journal(self._parts.cluster, self._history())

    def _history(self) -> str:
        history = self._parts.options.history
        if not history:
            raise UnsupportedByStoreError("journal", "off", "'kafka://host/schedules?history=<topic>'")
        return history
