"""docs/formats.md says what `model.FIELDS` says."""

import re
from pathlib import Path

from aiodelay.model import FIELDS

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"


def test_the_table_of_fields_is_that_of_the_code() -> None:
    row = r"^\| `(\w+)` \| (?:`([^`]+)`)? ?\| (?:`([^`]+)`)? ?\| (?:`(\w+)`)? ?\| (?:`([^`]+)`)? ?\| (.+) \|$"
    rows = re.findall(row, PAGE.read_text(), re.MULTILINE)
    in_code = [(f.name, f.prefix or "", f.body or "", f.column or "", f.header or "", f.meaning) for f in FIELDS]
    assert rows == in_code
