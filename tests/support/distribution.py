"""The order of tests in a run, and which of them pytest-xdist gives to one process; used by `tests/conftest.py`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

__all__ = ["InGroups", "slowest_first"]

ROOT = Path(__file__).parents[2]
FOLDERS = ("spark", "faults", "e2e", "integration", "browser", "stateful", "conformance", "regressions", "unit")
"""Folders of tests, those with the longest tests first: a long test at the end would keep all other processes idle."""
ONE_BY_ONE = ("faults", "e2e", "integration")
"""Folders whose tests wait for seconds: any process may take each, unless the file has a fixture of its own."""
TOGETHER = ("spark", "browser")
"""Folders whose tests share what takes seconds to start, a JVM or a browser."""
COSTLY = "own_broker"
"""A fixture that takes seconds to start: the tests of all files that name it share a process, which starts it once."""


def slowest_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return tests in the order in which processes should begin them; within a folder, as they were collected."""
    places = {folder: place for place, folder in enumerate(FOLDERS)}
    return sorted(items, key=lambda item: places.get(folder_of(item.nodeid), len(places)))


class InGroups(LoadScopeScheduling):
    """Gives each group of tests to one process.

    `--dist=loadgroup` would do so by marks, but pytest 9.2 ignores what pytest-xdist 3.8 makes of the marks.
    """

    def _split_scope(self, nodeid: str) -> str:
        folder, file = folder_of(nodeid), nodeid.partition("::")[0]
        if folder in TOGETHER:
            return folder
        if folder not in ONE_BY_ONE:
            return file
        return shared_by(file) or nodeid


@cache
def shared_by(file: str) -> str:
    """Return what the tests of a file share with each other, or with other files; "" if they share nothing."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if COSTLY in text:
        return COSTLY
    return file if 'scope="module"' in text else ""


def folder_of(nodeid: str) -> str:
    """Return the folder below `tests` that a test stands in."""
    return nodeid.removeprefix("tests/").partition("/")[0]
