"""End a test with real processes: read the content of the store, and check the history against the rules."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path

from aiodelay.backends.registry import open_store
from aiodelay.testing import history as h
from aiodelay.testing.history import Limits, Report, check

from .processes import Crew

__all__ = ["judge", "judge_store", "url_of"]


def url_of(path: Path) -> str:
    """Return the URL of a store in a SQLite file."""
    return f"sqlite:///{path}"


def judge(crew: Crew, path: Path, limits: Limits | None = None) -> Report:
    """Read the file, check the history that the crew has written, and raise if a rule is broken.

    Args:
        crew: The processes. None of them may use the file any more.
        path: The path of the file.
        limits: The limits of this test, in addition to the rules that always hold.
    """
    return judge_store(crew, url_of(path), lambda: _leases(path), limits)


def judge_store(crew: Crew, url: str, leases: Callable[[], int], limits: Limits | None = None) -> Report:
    """Check the history of a crew as `judge` does, for a store of any kind.

    Args:
        crew: The processes. None of them may use the store any more.
        url: The URL of the store.
        leases: Returns the number of leases in the store.
        limits: The limits of this test, in addition to the rules that always hold.
    """
    crew.history.write(asyncio.run(_final(url, leases)))
    report = check(h.read(crew.history_path), limits)
    print(report)
    report.verify()
    return report


async def _final(url: str, leases: Callable[[], int]) -> h.Final:
    async with open_store(url, namespace="default", clock=None) as store:
        final = await h.content_of(store)
    final.leases = leases()
    return final


def _leases(path: Path) -> int:
    connection = sqlite3.connect(path)
    try:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return int(connection.execute("SELECT count(*) FROM leases").fetchone()[0])
    finally:
        connection.close()
