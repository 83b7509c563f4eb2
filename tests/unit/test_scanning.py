"""Into how many parts a table is split."""

from __future__ import annotations

import pytest

from aiodelay.scanning import MOST_PARTS, Scan, parts_for


@pytest.mark.parametrize(
    ("rows", "parts"),
    [(0, 1), (1, 1), (250_000, 1), (250_001, 2), (500_001, 4), (1_000_000, 4), (1_000_001, 6), (10**12, MOST_PARTS)],
)
def test_there_are_as_many_parts_as_rows_ask_for_and_no_last_one_alone(rows: int, parts: int) -> None:
    assert parts_for(Scan(table="messages", columns=("id",)), rows) == parts


@pytest.mark.parametrize(("rows", "parts"), [(0, 1), (3, 3), (1_000_000, 7)])
def test_so_many_parts_as_were_asked_for_if_there_are_as_many_rows(rows: int, parts: int) -> None:
    assert parts_for(Scan(table="messages", columns=("id",), parts=7), rows) == parts
