"""Order the tests of a run, and group those that pytest-xdist must give to one process, for tests/conftest.py."""

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
"""The folders of tests, longest tests first. A long test at the end would leave all other processes idle."""
ONE_BY_ONE = ("faults", "e2e", "integration", "conformance")
"""Folders whose tests mostly wait. Any process may run each test, unless the file has a server of its own."""
OF_ONE_PROCESS = ("spark", "browser")
"""Folders whose tests share a resource that starts slowly: a Spark session with its JVM, or a browser."""
OF_FILE = 'scope="module"'
"""The text in a file whose tests share their own server. One process runs all of them, and starts the server once."""
OWN_BROKER = r"\([^)]*\bown_broker\b"
"""Parameters of the tests and fixtures that kill the broker. One process runs all these tests, with one broker."""


def slowest_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the tests by the order of their folders. Within a folder, keep the order of collection."""
    places = {folder: place for place, folder in enumerate(FOLDERS)}
    return sorted(
        items, key=lambda item: (places.get(folder_of(item.nodeid), len(places)), not kills_the_broker(item.nodeid))
    )


def give_way(item: pytest.Item) -> None:
    """Lower the priority of this process for other tests than Spark's, so that the Spark process does not end last."""
    if "PYTEST_XDIST_WORKER" in os.environ and folder_of(item.nodeid) != "spark":
        lower_priority()


@cache
def lower_priority() -> None:
    os.nice(19)


class InGroups(LoadScopeScheduling):  # type: ignore[misc] # it has no types
    """Gives each group of tests to one process.

    `--dist=loadgroup` does this with marks, but pytest 9.2 ignores the node ids that pytest-xdist 3.8 makes from them.
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
    """Return whether the tests of a file share a server that no other file uses."""
    return OF_FILE in text_of(file)


def kills_the_broker(nodeid: str) -> bool:
    """Return whether a test, or a fixture of its file, uses the broker that may be killed."""
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
    """Return the folder below `tests` that contains a test."""
    return nodeid.removeprefix("tests/").partition("/")[0]
