"""`python -O` removes assertions. The stores keep their rules without them, and the conformance suite still bites."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = ("test_memory.py", "test_sqlite.py", "test_suite_bites.py")
ALLOWED = "ignore::pytest.PytestConfigWarning"
"""pytest warns that it keeps the assertions of tests and plugins only."""


@pytest.mark.nightly
def test_stores_keep_their_rules_without_assertions() -> None:
    files = [str(HERE / name) for name in FILES]
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", ALLOWED, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
