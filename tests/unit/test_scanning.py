"""The number of parts of a table, and the sizes of the batches in which a Kafka partition is read."""

from __future__ import annotations

import pytest

from aiodelay.backends.kafka.store.table_scan import _sized
from aiodelay.core.table_scan import BATCH_BYTES, MOST_PARTS, Scan, batched, parts_for
from aiodelay.core.transitions import NO_OP
from aiodelay.core.values import TRACEBACK_BYTES, DeadLetter, Envelope, Record


@pytest.mark.parametrize(
    ("rows", "parts"),
    [(0, 1), (1, 1), (250_000, 1), (250_001, 2), (500_001, 4), (1_000_000, 4), (1_000_001, 6), (10**12, MOST_PARTS)],
)
def test_there_are_as_many_parts_as_rows_ask_for_and_no_last_one_alone(rows: int, parts: int) -> None:
    assert parts_for(Scan(table="messages", columns=("id",)), rows) == parts


@pytest.mark.parametrize(("rows", "parts"), [(0, 1), (3, 3), (1_000_000, 7)])
def test_so_many_parts_as_were_asked_for_if_there_are_as_many_rows(rows: int, parts: int) -> None:
    assert parts_for(Scan(table="messages", columns=("id",), parts=7), rows) == parts


def test_errors_and_tracebacks_of_dead_letters_count_as_bytes_of_a_batch() -> None:
    record = Record(Envelope("d", "work"), 1, 2, NO_OP, last_error="e" * 500, traceback="t" * TRACEBACK_BYTES)
    letters = [DeadLetter(record, "rejected", 3)] * 2_000
    batches = list(batched(_sized(Scan(table="dead", columns=("id",)), letters)))
    assert len(batches) == -(-2_000 * (TRACEBACK_BYTES + 500) // BATCH_BYTES) == 3
