"""docs/promises-and-tests.md has a row for each rule and each fault, and names tests that exist."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "promises-and-tests.md").read_text()
ROWS = re.findall(r"^\| ((?:[SBLRCVF]\d+(?:, )?)+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
SOURCES = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "src" / "aiodelay" / "testing" / "conformance").rglob("*.py")]


def bearing(pattern: str) -> list[str]:
    names = (name for path in SOURCES for name in re.findall(r"def (test_\w+)", path.read_text()))
    return [name for name in names if fnmatch(name, pattern)]


def test_every_rule_has_a_row() -> None:
    rules = {rule for row in ROWS for rule in re.findall(r"[SBLRCV]\d", row[0])}
    faults = {fault for row in ROWS for fault in re.findall(r"F\d+", row[0])}
    several = {f"S{n}" for n in range(1, 10)} | {f"L{n}" for n in range(1, 6)}
    assert rules == several | {"B1", "B2", "C1", "C2", "R1", "V1"}
    assert faults == {f"F{n}" for n in range(1, 43)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_promise_names_tests_that_exist(row: tuple[str, str, str]) -> None:
    named = re.findall(r"`([^`]+)`", row[2])
    assert named
    for name in named:
        assert bearing(name) if name.startswith("test_") else (ROOT / name).exists(), name


TABLES = PAGE.partition("## Bad inputs")[2]
THREATS = (ROOT / "docs" / "threat-model.md").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/[^`]+)`", TABLES + THREATS))))
def test_the_tables_of_inputs_and_attacks_name_files_that_exist(name: str) -> None:
    assert (ROOT / name).is_file()
