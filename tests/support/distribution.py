"""The order of tests in a run, and which of them pytest-xdist keeps in one process; used by `tests/conftest.py`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

__all__ = ["group_of", "slowest_first"]

FOLDERS = ("spark", "faults", "e2e", "integration", "browser", "stateful", "conformance", "regressions", "unit")
"""Folders of tests, those with the longest tests first: a long test at the end would keep all other processes idle."""
APART = FOLDERS[1:4]
"""Folders whose tests are given out one by one, as many of them wait for seconds; others go by file."""
COSTLY = ("java", "own_broker", "browser")
"""Fixtures whose servers take seconds to start: the tests that use one share a process, which starts it once."""


def slowest_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return tests in the order in which processes should begin them; within a folder, as they were collected."""
    places = {folder: place for place, folder in enumerate(FOLDERS)}
    return sorted(items, key=lambda item: places.get(folder_of(item), len(places)))


def group_of(item: pytest.Function) -> str:
    """Return the name of the group whose tests run in one process; "" if any process may run this test."""
    definitions = item._fixtureinfo.name2fixturedefs
    for name in COSTLY:
        if name in definitions:
            return name
    if folder_of(item) not in APART or any(each[-1].scope == "module" for each in definitions.values()):
        return item.nodeid.partition("::")[0]
    return ""


def folder_of(item: pytest.Item) -> str:
    """Return the folder below `tests` that a test stands in."""
    return item.nodeid.removeprefix("tests/").partition("/")[0]
