"""Whole tables of a store, read in parts by processes that need not open it: what a bulk reader asks for, and gets.

Columns are named as what they hold: the attributes of `Record` and `Envelope`; beside them, of a message, `state` and
`place_ms`, its next attempt; of a dead letter `reason`, `at_ms` and `errors`. Of what has ended: those of `Ended`.
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
"""What can be read of a store."""
Columns: TypeAlias = Mapping[str, Sequence[Any]]
"""A batch of rows by column; the columns that were wanted, all of one length."""

BATCH_ROWS = 10_000
BATCH_BYTES = 8 << 20
"""A batch is closed at so many rows, or bytes; it holds one page of the store more at most."""
ROWS_PER_PART = 250_000
MOST_PARTS = 10_000


class Scan(Struct, frozen=True, kw_only=True):
    """What to read of a table.

    Attributes:
        table: Which one.
        columns: Those that are wanted; what only others need is not fetched.
        lane: Only of this lane.
        from_ms: Only what is due at this or later, by the record's due time.
        to_ms: Only what is due before this.
        ids: Only these, looked up one by one.
        parts: Into how many parts to split it, at most; 0 = as many as its size asks for.
    """

    table: ScannedTable
    columns: tuple[str, ...]
    lane: Lane | None = None
    from_ms: int | None = None
    to_ms: int | None = None
    ids: tuple[str, ...] | None = None
    parts: int = 0

    def takes(self, lane: Lane, due_ms: int) -> bool:
        """Whether it asks for what is due then in that lane."""
        return (
            self.lane in (None, lane)
            and (self.from_ms is None or due_ms >= self.from_ms)
            and (self.to_ms is None or due_ms < self.to_ms)
        )


class Ended(Struct, frozen=True, gc=False):
    """What is remembered of a message that has ended: its version, and until when, epoch ms; None = not known."""

    id: str
    version: int | None
    until_ms: int | None


def parts_for(scan: Scan, rows: int) -> int:
    """Return into how many parts to split so many rows: an even number, so that two tasks at once end together."""
    by_rows = -(-rows // ROWS_PER_PART)
    wanted = scan.parts or (1 if by_rows <= 1 else by_rows + by_rows % 2)
    return max(1, min(wanted, rows, MOST_PARTS))


# --- columns ----------------------------------------------------------------------------------------------

_ENVELOPE = frozenset(Envelope.__struct_fields__)
_LETTER = frozenset({"reason", "at_ms", "errors"})


def columns_of_messages(snapshots: Sequence[Snapshot], wanted: Iterable[str]) -> Columns:
    """Return messages as columns."""
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
    """Return dead letters as columns."""
    records = [each.record for each in letters]
    return {
        name: list(map(attrgetter(name), letters)) if name in _LETTER else _column(records, name) for name in wanted
    }


def columns_of_ended(ended: Sequence[Ended], wanted: Iterable[str]) -> Columns:
    """Return what has ended as columns."""
    return {name: list(map(attrgetter(name), ended)) for name in wanted}


def _column(records: Sequence[Record], name: str) -> list[Any]:
    return list(map(attrgetter(f"envelope.{name}" if name in _ENVELOPE else name), records))


def batched(rows: Iterable[tuple[Any, int]]) -> Iterator[list[Any]]:
    """Yield rows in lists of at most `BATCH_ROWS`, each closed once it holds `BATCH_BYTES`.

    Args:
        rows: Each with its bytes.
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
