"""docs/guarantees.md shows the same table "the same id again" as the conformance suite tests."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from aiodelay.core.values import CONFLICT_MODES
from aiodelay.testing.conformance import SAME_ID_TABLE

PAGE = Path(__file__).parents[2] / "docs" / "guarantees.md"
ANSWERS = {
    "replaced": "replaced",
    "joined": "replaced",
    "as with `Conflict.replace()`": "replaced",
    "stored as the next revision": "replaced",
    "stored": "stored",
    "the stored message is kept, answer `in_flight`": "in_flight",
    "the stored message is kept": "kept",
    "nothing is stored, answer `kept`": "kept",
    "`DuplicateIdError`": "duplicate",
    "refused, `exists`": "exists",
}
"""The answer of a cell, by the beginning of its text. Other cells begin with the answer itself."""

Row = tuple[str, ...]


def answer_of(cell: str, pending: str) -> str:
    if cell == 'as "pending"':
        return answer_of(pending, "")
    found = [answer for text, answer in ANSWERS.items() if cell.startswith(text)]
    return found[0] if found else re.split("[`;]", cell)[1]


def of_page() -> list[Row]:
    table = PAGE.read_text().split("| call | pending |")[1].split("\n\n")[0]
    rows = [re.split(r" *\| *", line)[1:-1] for line in table.splitlines()[2:]]
    return [(name_of(call), *(answer_of(cell, cells[0]) for cell in cells)) for call, *cells in rows]


def name_of(call: str) -> str:
    return re.sub(r"^`(?:Conflict\.)?(\w+).*", r"\1", call)


def of_suite() -> list[Row]:
    return [
        (
            row.call.replace(",", " ").split()[0],
            *(cell.answer for cell in (row.pending, row.in_flight, row.replacing, row.done)),
        )
        for row in SAME_ID_TABLE
    ]


def test_the_page_has_the_answers_of_the_suite_in_the_same_order() -> None:
    # Neighbouring rows that differ only in their condition are one row on one of the two sides.
    assert [row for row, _ in groupby(of_page())] == [row for row, _ in groupby(of_suite())]


def test_every_conflict_mode_has_a_row() -> None:
    assert {row[0] for row in of_suite()} >= {mode.removesuffix("_last") for mode in CONFLICT_MODES}
