"""The seed alone repeats a run: the option that a nightly session prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WALK = """
import random
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

@settings(max_examples=20, database=None)
@given(st.integers(), st.text())
def test_values(number, text):
    print("drawn", number, ascii(text))

class Walk(RuleBasedStateMachine):
    @rule(number=st.integers())
    def step(self, number):
        print("drawn", number)

TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=20, database=None)

def test_plain():
    print("drawn", random.random())
"""


def drawn(folder: Path, *options: str) -> list[str]:
    """Run random walks with the project's configuration, as the session `storms` does; return the values drawn."""
    (folder / "test_walk.py").write_text(WALK)
    night = [
        "--override-ini=addopts=--import-mode=importlib -s",
        "-p",
        "tests.conftest",
        "--hypothesis-profile=nightly",
    ]
    quiet = ["--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:schemathesis"]
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", *night, *quiet, *options, str(folder)]
    environment = {**os.environ, "PYTHONHASHSEED": "random"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "drawn" in line]


@pytest.mark.nightly
def test_the_seed_of_a_night_repeats_its_walks_too(tmp_path: Path) -> None:
    first = drawn(tmp_path, "--randomly-seed=7")
    assert len(first) > 40
    assert drawn(tmp_path, "--randomly-seed=8", "--randomly-seed=7") == first, (
        "as nox passes it on: the last one counts"
    )
    assert drawn(tmp_path, "--randomly-seed=8") != first
