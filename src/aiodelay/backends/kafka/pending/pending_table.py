"""`PendingTable`: the near messages of a partition. It derives `live` of a series from the retries that are stored."""

from __future__ import annotations

from msgspec.structs import replace

from aiodelay.core.dict_table.entries import Entry
from aiodelay.core.dict_table.table import DictTable
from aiodelay.core.transitions import occurrence_of
from aiodelay.core.values import Record

__all__ = ["PendingTable"]


class PendingTable(DictTable):
    """A `DictTable` that corrects `live` of a series whenever the series or one of its retries comes or goes.

    No record of the series is written when a retry ends. The series' own record may therefore list retries that have
    ended, and a new owner reads that record.
    """

    def place(self, record: Record, place_ms: int, sequence: int) -> None:
        super().place(record, place_ms, sequence)
        if (series := self.recurring.get(record.id)) is not None:
            self._list_retries(series)
        elif self.recurring:
            self._list_retry(record, is_stored=True)

    def remove(self, row: Entry) -> None:
        super().remove(row)
        if self.recurring:
            self._list_retry(row.record, is_stored=False)

    def correct_live(self) -> None:
        """Correct `live` of all series, after decisions about their retries were undone."""
        for series in self.recurring.values():
            self._list_retries(series)

    def _list_retries(self, series: Entry) -> None:
        """List the stored retries of a series. Leave out the retries of an earlier series with the same id."""
        retries = (entry.record for entry in self.retries_of(series.record.id))
        live = tuple(_due_ms(each) for each in retries if each.revision >= series.record.revision)
        series.record = replace(series.record, live=live)

    def _list_retry(self, record: Record, *, is_stored: bool) -> None:
        """Add a retry to the list of its series, or remove it. Do nothing for a retry of an earlier series."""
        occurrence = occurrence_of(record.id)
        series = None if occurrence is None else self.recurring.get(occurrence[0])
        if series is None or record.revision < series.record.revision:
            return
        due_ms = _due_ms(record)
        live = tuple(each for each in series.record.live if each != due_ms)
        series.record = replace(series.record, live=(*live, due_ms) if is_stored else live)


def _due_ms(retry: Record) -> int:
    """Return the due time of a retried occurrence."""
    occurrence = occurrence_of(retry.id)
    assert occurrence is not None
    return occurrence[1]
