"""BF6: the growth of the times of put, claim and cancel with the pending messages, in SQLite and in memory."""

from __future__ import annotations

from aiodelay.memory import MemoryStore
from aiodelay.sqlite import SqliteStore

from .growth import MANY, VERY_MANY, grown
from .harness import Benchmark, Plan, Row

__all__ = ["BENCHMARK"]


def run(plan: Plan) -> list[Row]:
    rows = grown(plan, "BF6", "SQLite", lambda name: SqliteStore(plan.directory / f"bf6-{name}.db"), MANY)
    rows += grown(plan, "BF6", "memory", lambda name: MemoryStore(), MANY)
    if plan.nightly:
        nightly = plan.directory / "bf6-nightly"
        rows += grown(plan, "BF6", "SQLite", lambda name: SqliteStore(f"{nightly}-{name}.db"), VERY_MANY)
    return rows


BENCHMARK = Benchmark("BF6", "growth", run)
