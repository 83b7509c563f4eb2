"""docs/formats.md agrees with the declarations in `record_format`."""

from __future__ import annotations

from pathlib import Path

from aiodelay.core.record_format import FIELDS
from tests.support.record_places import table_of

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"


def test_the_table_of_fields_is_that_of_the_code() -> None:
    head, *rows = table_of(FIELDS).splitlines()
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = lines.index(head) + 1
    assert lines[first : first + len(rows) + 1] == [*rows, ""]
