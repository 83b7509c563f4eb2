"""The order of tests in a run, and which of them pytest-xdist gives to one process; used by `tests/conftest.py`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

__all__ = ["InGroups", "give_way", "slowest_first"]

ROOT = Path(__file__).parents[2]
FOLDERS = ("spark", "faults", "e2e", "integration", "browser", "stateful", "conformance", "regressions", "unit")
"""Folders of tests, those with the longest tests first: a long test at the end would keep all other processes idle."""
ONE_BY_ONE = ("faults", "e2e", "integration", "conformance")
"""Folders whose tests wait: any process may take each, unless the file has a server of its own."""
OF_ONE_PROCESS = ("spark", "browser")
"""Folders whose tests share what takes long to start: a Spark session with its JVM, a browser."""
OF_FILE = 'scope="module"'
"""What a file says whose tests share a server of their own: one process runs them all, and starts it once."""
OWN_BROKER = r"\([^)]*\bown_broker\b"
"""The parameters of a test or a fixture that kills the broker: one process runs all these tests, with one broker."""


def slowest_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return tests in the order in which processes should begin them; within a folder, as they were collected."""
    places = {folder: place for place, folder in enumerate(FOLDERS)}
    return sorted(
        items, key=lambda item: (places.get(folder_of(item.nodeid), len(places)), not kills_the_broker(item.nodeid))
    )


def give_way(item: pytest.Item) -> None:
    """Let the process that runs all of Spark's tests have the processor first: else it would be the last by far."""
    if "PYTEST_XDIST_WORKER" in os.environ and folder_of(item.nodeid) != "spark":
        lower_priority()


@cache
def lower_priority() -> None:
    os.nice(19)


class InGroups(LoadScopeScheduling):  # type: ignore[misc] # it has no types
    """Gives each group of tests to one process.

    `--dist=loadgroup` would do so by marks, but pytest 9.2 ignores what pytest-xdist 3.8 makes of the marks.
    """

    def _split_scope(self, nodeid: str) -> str:
        folder, file = folder_of(nodeid), nodeid.partition("::")[0]
        if folder in OF_ONE_PROCESS:
            return folder
        if kills_the_broker(nodeid):
            return "own broker"
        return nodeid if folder in ONE_BY_ONE and not shares_a_server(file) else file


@cache
def shares_a_server(file: str) -> bool:
    """Say whether the tests of a file share a server that no other file uses."""
    return OF_FILE in text_of(file)


def kills_the_broker(nodeid: str) -> bool:
    """Say whether a test, or a fixture of its file, takes the broker that may be killed."""
    if not nodeid.startswith("tests/faults/"):
        return False
    file, _, test = nodeid.partition("[")[0].partition("::")
    return takes_own_broker(file, test.rpartition("::")[2])


@cache
def takes_own_broker(file: str, test: str) -> bool:
    return re.search(rf"(def {test}|@pytest\.fixture\ndef \w+){OWN_BROKER}", text_of(file)) is not None


@cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def folder_of(nodeid: str) -> str:
    """Return the folder below `tests` that a test stands in."""
    return nodeid.removeprefix("tests/").partition("/")[0]
