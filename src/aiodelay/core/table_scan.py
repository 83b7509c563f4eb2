"""`Scan` and its results: whole tables of a store, read in parts by processes that do not open the store.

Columns have the names of the attributes of `Record` and `Envelope`. Messages also have `state` and `place_ms`, the time
of the next attempt. Dead letters also have `reason`, `at_ms` and `errors`. Ended messages have the attributes of
`Ended`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from .values import DeadLetter, Envelope, Lane, Record, Snapshot

__all__ = [
    "BATCH_BYTES",
    "BATCH_ROWS",
    "ROWS_PER_PART",
    "Columns",
    "Ended",
    "Scan",
    "ScannedTable",
    "batched",
    "columns_of_ended",
    "columns_of_letters",
    "columns_of_messages",
    "parts_for",
]

ScannedTable: TypeAlias = Literal["messages", "dead", "done"]
"""The tables of a store that can be scanned."""
Columns: TypeAlias = Mapping[str, Sequence[Any]]
"""A batch of rows: the values of each requested column. All columns have the same length."""

BATCH_ROWS = 10_000
BATCH_BYTES = 8 << 20
"""A batch ends when it holds this many rows or bytes. It may exceed the limits by up to one page of the store."""
ROWS_PER_PART = 250_000
MOST_PARTS = 10_000


class Scan(Struct, frozen=True, kw_only=True):
    """The part of a table to read.

    Attributes:
        table: The table.
        columns: The requested columns. Data that only other columns need are not fetched.
        lane: Only rows of this lane; None = of all lanes.
        from_ms: Only rows whose record is due at this time or later; None = no limit.
        to_ms: Only rows whose record is due before this time; None = no limit.
        ids: Only these ids, each looked up separately; None = all ids.
        parts: The largest number of parts; 0 = as many as the size requires.
    """

    table: ScannedTable
    columns: tuple[str, ...]
    lane: Lane | None = None
    from_ms: int | None = None
    to_ms: int | None = None
    ids: tuple[str, ...] | None = None
    parts: int = 0

    def takes(self, lane: Lane, due_ms: int) -> bool:
        """Return whether the scan includes a record of this lane with this due time."""
        return (
            self.lane in (None, lane)
            and (self.from_ms is None or due_ms >= self.from_ms)
            and (self.to_ms is None or due_ms < self.to_ms)
        )


class Ended(Struct, frozen=True, gc=False):
    """The data that a store still keeps of an ended message.

    Attributes:
        id: The message id.
        version: The caller's version of the message; None = not known.
        until_ms: Until when the store keeps these data, epoch ms; None = not known.
    """

    id: str
    version: int | None
    until_ms: int | None


def parts_for(scan: Scan, rows: int) -> int:
    """Return the number of parts in which to read this many rows.

    Unless the scan sets the number, it is 1 or even, so that two concurrent tasks end together.
    """
    by_rows = -(-rows // ROWS_PER_PART)
    wanted = scan.parts or (1 if by_rows <= 1 else by_rows + by_rows % 2)
    return max(1, min(wanted, rows, MOST_PARTS))


# --- columns ----------------------------------------------------------------------------------------------

_ENVELOPE = frozenset(Envelope.__struct_fields__)
_LETTER = frozenset({"reason", "at_ms", "errors"})


def columns_of_messages(snapshots: Sequence[Snapshot], wanted: Iterable[str]) -> Columns:
    """Return messages as a mapping of columns."""
    found: dict[str, Sequence[Any]] = {}
    records = [each.record for each in snapshots]
    for name in wanted:
        if name == "state":
            found[name] = [each.state.value for each in snapshots]
        elif name == "place_ms":
            found[name] = [each.next_attempt_ms for each in snapshots]
        else:
            found[name] = _column(records, name)
    return found


def columns_of_letters(letters: Sequence[DeadLetter], wanted: Iterable[str]) -> Columns:
    """Return dead letters as a mapping of columns."""
    records = [each.record for each in letters]
    return {
        name: list(map(attrgetter(name), letters)) if name in _LETTER else _column(records, name) for name in wanted
    }


def columns_of_ended(ended: Sequence[Ended], wanted: Iterable[str]) -> Columns:
    """Return ended messages as a mapping of columns."""
    return {name: list(map(attrgetter(name), ended)) for name in wanted}


def _column(records: Sequence[Record], name: str) -> list[Any]:
    return list(map(attrgetter(f"envelope.{name}" if name in _ENVELOPE else name), records))


def batched(rows: Iterable[tuple[Any, int]]) -> Iterator[list[Any]]:
    """Yield rows in lists of at most `BATCH_ROWS`. A list ends when it holds `BATCH_BYTES`.

    Args:
        rows: Rows, each with its size in bytes.
    """
    batch: list[Any] = []
    size = 0
    for row, bytes_ in rows:
        batch.append(row)
        size += bytes_
        if len(batch) == BATCH_ROWS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
