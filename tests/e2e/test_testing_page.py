"""docs/testing.md: its blocks are a test file, which runs as a reader would run it."""

import re
from pathlib import Path

from tests.support.command import PYTEST, Program

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


def test_the_page_is_a_test_file_that_passes(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    page = tmp_path / "test_page.py"
    page.write_text("\n".join(blocks))
    tests = len(re.findall(r"^(?:async )?def test_", page.read_text(), re.MULTILINE))
    with Program(*PYTEST, "-q", "-p", "no:randomly", str(page), cwd=tmp_path) as program:
        assert program.exit_code() == 0, [*program.out.seen, *program.err.seen]
        assert f"{tests} passed" in program.out.seen[-1]
