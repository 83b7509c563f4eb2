"""BF4: the lateness of messages of a SQLite file, compared with timers of the loop."""

from __future__ import annotations

from aiodelay.sqlite import SqliteStore

from .harness import Benchmark, Goal, Plan, Row
from .lateness import PER_S, SPAN_S, check_all, measure, rows_of

__all__ = ["BENCHMARK"]

GOALS = {0.5: Goal("at most", 1.0), 0.99: Goal("at most", 3.0)}


def run(plan: Plan) -> list[Row]:
    n = plan.size(round(PER_S * SPAN_S))
    rounds = []
    for number in range(plan.runs):
        store = SqliteStore(plan.directory / f"bf4-{number}.db")
        rounds.append(check_all([plan.run(measure(store, range(n), PER_S, plan.scale))], n))
    return rows_of("BF4", "SQLite", rounds, GOALS)


BENCHMARK = Benchmark("BF4", "lateness", run)
