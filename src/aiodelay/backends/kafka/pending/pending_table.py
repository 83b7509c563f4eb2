"""`PendingTable`: the near messages of a partition. It derives `live` of a series from the retries that are stored."""

from __future__ import annotations

from msgspec.structs import replace

from aiodelay.core.dict_table.entries import Entry
from aiodelay.core.dict_table.table import DictTable
from aiodelay.core.transitions import base_id, occurrence_of
from aiodelay.core.values import Record

__all__ = ["PendingTable"]


class PendingTable(DictTable):
    """A `DictTable` that corrects `live` of a series whenever the series or one of its retries comes or goes.

    No record of the series is written when a retry ends. The series' own record may therefore list retries that have
    ended, and a new owner reads that record.
    """

    def place(self, record: Record, place_ms: int, sequence: int) -> None:
        super().place(record, place_ms, sequence)
        self._correct_live_of(record.id)

    def remove(self, row: Entry) -> None:
        super().remove(row)
        self._correct_live_of(row.record.id)

    def correct_live(self) -> None:
        """Correct `live` of all series, after decisions about their retries were undone."""
        for series in self.recurring.values():
            self._list_retries(series)

    def _list_retries(self, series: Entry) -> None:
        """List the stored retries of a series. Leave out the retries of an earlier series with the same id."""
        retries = (entry.record for entry in self.retries_of(series.record.id))
        live = tuple(_due_ms(each) for each in retries if each.revision >= series.record.revision)
        series.record = replace(series.record, live=live)

    def _correct_live_of(self, message_id: str) -> None:
        """Correct `live` of a series. The id is that of the series or of a retry. Do nothing for other ids."""
        series = self.recurring.get(base_id(message_id)) if self.recurring else None
        if series is not None:
            self._list_retries(series)


def _due_ms(retry: Record) -> int:
    """Return the due time of a retried occurrence."""
    occurrence = occurrence_of(retry.id)
    assert occurrence is not None
    return occurrence[1]
