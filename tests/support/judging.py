"""End a test with real processes: read the content of the store, and check the history against the rules."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from aiodelay.backends.registry import open_store
from aiodelay.errors import StoreUnavailableError
from aiodelay.testing import history as h
from aiodelay.testing.history import Limits, Report, check

from .processes import Crew
from .waiting import until

__all__ = ["final_of", "judge_store", "leases_in", "url_of"]


def url_of(path: Path) -> str:
    """Return the URL of a store in a SQLite file."""
    return f"sqlite:///{path}"


def judge_store(crew: Crew, url: str, leases: Callable[[], int], limits: Limits | None = None) -> Report:
    """Read the store, check the history that the crew has written, and raise if a rule is broken.

    Args:
        crew: The processes. None of them may use the store any more.
        url: The URL of the store.
        leases: Returns the number of leases in the store.
        limits: The limits of this test, in addition to the rules that always hold.
    """
    crew.history.write(final_of(url, leases))
    report = check(h.read(crew.history_path), limits)
    print(report)
    report.verify()
    return report


def final_of(url: str, leases: Callable[[], int]) -> h.Final:
    """Return the content of a store that nobody uses any more."""
    return asyncio.run(_final(url, leases))


async def _final(url: str, leases: Callable[[], int]) -> h.Final:
    found: list[h.Final] = []

    async def is_read() -> bool:
        with suppress(StoreUnavailableError):
            async with open_store(url, namespace="default", clock=None) as store:
                found.append(await h.content_of(store))
        return bool(found)

    await until(is_read, "the store is read")
    found[0].leases = leases()
    return found[0]


def leases_in(path: Path) -> int:
    """Return the number of leases in a file, which must be undamaged."""
    connection = sqlite3.connect(path)
    try:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return int(connection.execute("SELECT count(*) FROM leases").fetchone()[0])
    finally:
        connection.close()
