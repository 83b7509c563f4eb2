"""BF11: limits on a SQLite file: the rate of a drain, and the turns of the keys beside a key with most messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiodelay.ports import Store
from aiodelay.sqlite import SqliteStore

from .harness import Benchmark, Plan, Row
from .limited_lanes import rows_of
from .sqlite_files import new_file

__all__ = ["BENCHMARK"]


def run(plan: Plan) -> list[Row]:
    @asynccontextmanager
    async def emptied() -> AsyncIterator[Callable[[], Store]]:
        file = new_file(plan.directory / "bf11.db")
        yield lambda: SqliteStore(file)

    return rows_of(plan, "BF11", "SQLite", emptied)


BENCHMARK = Benchmark("BF11", "limits on SQLite", run)
