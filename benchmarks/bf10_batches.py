"""BF10: a handler that inserts into a SQLite table: in batches of 100, compared with one message a run."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from aiodelay import Message, Scheduler
from aiodelay.sqlite import SqliteStore

from .harness import (
    Benchmark,
    Goal,
    Order,
    Plan,
    Row,
    Stopwatch,
    check,
    check_once_each,
    in_turn,
    per_message_us,
    ratios,
)
from .harness import order as an_order
from .sqlite_files import count, new_file

__all__ = ["BENCHMARK"]

MESSAGES = 20_000
GOAL = Goal("at least", 5)
INSERT = "INSERT INTO orders (number, customer) VALUES (?, ?)"


def run(plan: Plan) -> list[Row]:
    n = plan.size(MESSAGES)
    due = new_file(plan.directory / "bf10_due.db")
    plan.run(_fill(due, n))

    def side(serve: Callable[[Scheduler, sqlite3.Connection, Callable[[int], None]], None]) -> float:
        file, table = new_file(plan.directory / "bf10.db"), new_file(plan.directory / "bf10_table.db")
        shutil.copy(due, file)
        return plan.run(_insert(file, table, n, serve))

    times = in_turn(plan, {"singly": lambda: side(_singly), "batches": lambda: side(_in_batches)})
    beside = f"{per_message_us(times['batches'], n)} a message, singly {per_message_us(times['singly'], n)}"
    what = f"SQLite: {n:,} messages due at once, inserted into a table in batches of 100"
    return [Row("BF10", what, "x speed singly", ratios(times["singly"], times["batches"]), GOAL, beside)]


def _singly(scheduler: Scheduler, table: sqlite3.Connection, done: Callable[[int], None]) -> None:
    @scheduler.handler
    async def insert(event: Order) -> None:
        with table:
            table.execute(INSERT, (event.number, event.text))
        done(1)


def _in_batches(scheduler: Scheduler, table: sqlite3.Connection, done: Callable[[int], None]) -> None:
    @scheduler.handler(batch=100)
    async def insert(events: list[Order]) -> None:
        with table:
            table.executemany(INSERT, [(event.number, event.text) for event in events])
        done(len(events))


async def _fill(file: Path, n: int) -> None:
    now = datetime.now(UTC)
    async with Scheduler(SqliteStore(file), dispatch=False) as producer:
        stored = await producer.schedule_many(Message(an_order(i), at=now) for i in range(n))
    check(stored == n, "not all were scheduled")


async def _insert(
    file: Path,
    table: Path,
    n: int,
    serve: Callable[[Scheduler, sqlite3.Connection, Callable[[int], None]], None],
) -> float:
    """Return the seconds from the open of the scheduler to its close, with all messages inserted and settled."""
    scheduler, left = Scheduler(SqliteStore(file), overdue_alarm="1h"), n
    all_done = asyncio.get_running_loop().create_future()

    def done(messages: int) -> None:
        nonlocal left
        left -= messages
        if left == 0:
            all_done.set_result(None)

    with closing(sqlite3.connect(table)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE orders (number INTEGER NOT NULL, customer TEXT NOT NULL)")
        serve(scheduler, connection, done)
        with Stopwatch() as watch:
            async with scheduler:
                await all_done
        check_once_each([number for (number,) in connection.execute("SELECT number FROM orders")], n)
    check(count(file, "queue") == count(file, "leases") == 0, "something is left in the store")
    return watch.seconds


BENCHMARK = Benchmark("BF10", "inserts in batches", run)
