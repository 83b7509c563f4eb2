"""The end of a test with real processes: what the file holds, and whether the history keeps the promises."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from aiodelay.backends.registry import open_store
from aiodelay.core.values import Query

from . import history as h
from .checker import Limits, Report, check
from .processes import Crew

__all__ = ["judge", "judge_store", "url_of"]

PAGE = 1_000


def url_of(path: Path) -> str:
    """Return the URL of a store's file."""
    return f"sqlite:///{path}"


def judge(crew: Crew, path: Path, limits: Limits | None = None) -> Report:
    """Look into the file, check the history that the crew has written, and raise if a rule was broken.

    Args:
        crew: None of its processes may be using the file any more.
        path: The file.
        limits: What the test promises beyond what always holds.
    """
    return judge_store(crew, url_of(path), lambda: _leases(path), limits)


def judge_store(crew: Crew, url: str, leases: Callable[[], int], limits: Limits | None = None) -> Report:
    """Do as `judge` does, with any store.

    Args:
        crew: None of its processes may be using the store any more.
        url: The store's.
        leases: Counts the leases that the store holds.
        limits: What the test promises beyond what always holds.
    """
    crew.history.write(asyncio.run(_final(url, leases)))
    report = check(h.read(crew.history_path), limits)
    print(report)
    report.verify()
    return report


async def _final(url: str, leases: Callable[[], int]) -> h.Final:
    pending: list[h.PendingNote] = []
    dead: list[tuple[str, int, str]] = []
    async with open_store(url, namespace="default", clock=None) as store:
        after: tuple[int, str] | None = None
        while page := await store.search(Query(after=after, limit=PAGE)):
            for each in page:
                state, at_ms = str(each.state), each.next_attempt_ms
                pending.append(h.PendingNote(each.record.id, each.record.revision, state, at_ms))
            after = (page[-1].next_attempt_ms, page[-1].record.id)
        last: tuple[int, str, int] | None = None
        while letters := await store.dead_letters(after=last, limit=PAGE):
            dead += [(each.record.id, each.record.revision, each.reason) for each in letters]
            last = (letters[-1].at_ms, letters[-1].record.id, letters[-1].record.revision)
    return h.Final(now_ms=time.time_ns() // 1_000_000, pending=pending, dead=dead, leases=leases())


def _leases(path: Path) -> int:
    connection = sqlite3.connect(path)
    try:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return int(connection.execute("SELECT count(*) FROM leases").fetchone()[0])
    finally:
        connection.close()
