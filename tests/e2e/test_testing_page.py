"""The blocks of docs/testing.md are a test file: it is run as its readers would run it."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


def test_the_page_is_a_test_file_that_passes(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    page = tmp_path / "test_page.py"
    page.write_text("\n".join(blocks))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(page)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    tests = sum(block.count("async def test_") for block in blocks)
    assert f"{tests} passed" in done.stdout, done.stdout + done.stderr
