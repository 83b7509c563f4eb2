"""docs/versions.md names the lowest versions that pyproject.toml allows."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_lowest_version_of_each_package() -> None:
    text = (ROOT / "docs" / "versions.md").read_text()
    rows = re.findall(r"^\| ([a-z0-9-]+) \| (?:`(\w+)`)? ?\| ([\w.]+) \| [\w.]+ \|$", text, re.MULTILINE)
    assert sorted(rows) == sorted(lowest_versions())


def lowest_versions() -> Iterator[tuple[str, str, str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for extra, lines in [("", project["dependencies"]), *extras.items()]:
        for required in map(Requirement, lines):
            if extra not in {"spark-local", "all"}:
                (lowest,) = (each.version for each in required.specifier if each.operator in {">=", "=="})
                yield required.name, extra, lowest
