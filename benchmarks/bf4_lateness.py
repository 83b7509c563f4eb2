"""BF4: the lateness of messages of a SQLite file, compared with timers of the loop."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from aiodelay.sqlite import SqliteStore

from .harness import Benchmark, Goal, Plan, Row, quantile
from .lateness import PER_S, SPAN_S, check_all, measure, rows_of
from .sqlite_files import new_file, raw

__all__ = ["BENCHMARK"]

GOALS = {0.5: Goal("at most", 1.0), 0.99: Goal("at most", 3.0)}


def run(plan: Plan) -> list[Row]:
    n = plan.size(round(PER_S * SPAN_S))
    rounds, commits = [], []
    for number in range(plan.runs):
        store = SqliteStore(plan.directory / f"bf4-{number}.db")
        rounds.append(check_all([plan.run(measure(store, range(n), PER_S, plan.scale))], n))
        commits.append(commit_times(plan.directory / "bf4-bare.db", n))
    rows = rows_of("BF4", "SQLite", rounds, GOALS)
    p99 = tuple(quantile(each, 0.99) for each in commits)
    p50 = statistics.median(quantile(each, 0.5) for each in commits)
    what = f"plain `sqlite3`: p99 of {n:,} commits of one row, {PER_S} a second, each with its fsync"
    return [*rows, Row("BF4", what, "ms", p99, None, f"p50 {p50:.2f} ms")]


def commit_times(path: Path, n: int) -> list[float]:
    """Measure the bare limit of one step: the time of each commit, in ms, with the pragmas of aiodelay."""
    times = []
    with raw(new_file(path)) as connection:
        connection.execute("CREATE TABLE bare (n INTEGER)")
        since = time.perf_counter()
        for number in range(n):
            time.sleep(max(0.0, since + number / PER_S - time.perf_counter()))
            begun = time.perf_counter()
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO bare VALUES (?)", (number,))
            connection.execute("COMMIT")
            times.append((time.perf_counter() - begun) * 1000)
    return times


BENCHMARK = Benchmark("BF4", "lateness", run)
