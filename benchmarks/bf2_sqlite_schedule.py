"""BF2: the rate at which messages are stored in SQLite."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

from aiodelay import Message, Scheduler
from aiodelay.sqlite import SqliteStore

from .harness import Benchmark, Goal, Plan, Row, Stopwatch, check, in_turn, order, per_message_us, ratios
from .sqlite_files import count, insert, new_file, read_rows

__all__ = ["BENCHMARK"]

CALLS = 20_000
MANY = 100_000
AHEAD = timedelta(hours=1)
GOAL = Goal("at least", 0.5)


def run(plan: Plan) -> list[Row]:
    calls, many = plan.size(CALLS), plan.size(MANY)
    # Each side writes into a new file. The bare side copies rows from a file that aiodelay wrote before.
    of_calls, of_many = plan.directory / "calls.db", plan.directory / "many.db"
    plan.run(schedule_each(of_calls, calls))
    plan.run(schedule_many(of_many, many))
    calls_rows, many_rows = read_rows(of_calls), read_rows(of_many)
    file = plan.directory / "bf2.db"
    times = in_turn(
        plan,
        {
            "bare calls": lambda: insert(new_file(file), calls_rows),
            "calls": lambda: plan.run(schedule_each(new_file(file), calls)),
            "loop": lambda: plan.run(loop_alone(calls)),
            "bare many": lambda: insert(new_file(file), many_rows),
            "many": lambda: plan.run(schedule_many(new_file(file), many)),
        },
    )

    def row(what: str, ours: str, bare: str, n: int, goal: Goal | None) -> Row:
        beside = f"{per_message_us(times[ours], n)} a message, bare {per_message_us(times[bare], n)}"
        return Row("BF2", what, "x bare speed", ratios(times[bare], times[ours]), goal, beside)

    return [
        row(f"SQLite: {calls:,} concurrent calls of `schedule()`", "calls", "bare calls", calls, GOAL),
        row(f"asyncio alone, no store: {calls:,} tasks, each with its future", "loop", "bare calls", calls, None),
        row(f"SQLite: `schedule_many` of {many:,} messages", "many", "bare many", many, GOAL),
    ]


async def schedule_each(file: Path, n: int) -> float:
    """Measure our side: a task for each call of `schedule`, all concurrent."""
    async with Scheduler(SqliteStore(file), dispatch=False) as scheduler:
        with Stopwatch() as watch:
            async with asyncio.TaskGroup() as tasks:
                for i in range(n):
                    tasks.create_task(scheduler.schedule(order(i), delay=AHEAD))
    check(count(file, "queue") == n, "not all were scheduled")
    return watch.seconds


async def loop_alone(n: int) -> float:
    """Measure the concurrent calls alone, without a store. No library can be faster."""
    loop, futures = asyncio.get_running_loop(), list[asyncio.Future[None]]()

    async def call() -> None:
        future = loop.create_future()
        futures.append(future)
        await future

    with Stopwatch() as watch:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(n):
                tasks.create_task(call())
            await asyncio.sleep(0)
            for future in futures:
                future.set_result(None)
    return watch.seconds


async def schedule_many(file: Path, n: int) -> float:
    """Measure our side: one call of `schedule_many`."""
    async with Scheduler(SqliteStore(file), dispatch=False) as scheduler:
        with Stopwatch() as watch:
            stored = await scheduler.schedule_many(Message(order(i), delay=AHEAD) for i in range(n))
    check(stored == n and count(file, "queue") == n, "not all were scheduled")
    return watch.seconds


BENCHMARK = Benchmark("BF2", "scheduling into SQLite", run)
