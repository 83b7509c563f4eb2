"""BF3: the rate at which due messages of a SQLite file reach a handler."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

from aiodelay import Context, Message, Scheduler
from aiodelay.sqlite import SqliteStore

from .harness import (
    DEFAULT_CONCURRENCY,
    Benchmark,
    Goal,
    Order,
    Plan,
    Row,
    Stopwatch,
    beside_tuned,
    check,
    check_once_each,
    in_turn,
    order,
    per_message_us,
    ratios,
)
from .sqlite_files import count, delete_in_order, raw

__all__ = ["BENCHMARK"]

MESSAGES = 100_000
CONCURRENCY = 1_000
"""The size of two claims. The handler runs one claim while the writer's thread makes the other."""
GOAL = Goal("at least", 0.5)


def run(plan: Plan) -> list[Row]:
    n = plan.size(MESSAGES)
    due, beside_ended = plan.directory / "due.db", plan.directory / "beside_ended.db"
    plan.run(fill(due, n))
    shutil.copy(due, beside_ended)
    plan.run(drain(beside_ended, n, CONCURRENCY))
    make_old(beside_ended)
    plan.run(fill(beside_ended, n))
    file = plan.directory / "bf3.db"

    def steady() -> float:
        seconds = plan.run(drain(_copy(beside_ended, file), n, CONCURRENCY))
        check(count(file, "messages") == n, "what ended earlier is still there")
        return seconds

    times = in_turn(
        plan,
        {
            "bare": lambda: delete_in_order(_copy(due, file), time.time_ns() // 1_000_000),
            "ours": lambda: plan.run(drain(_copy(due, file), n, CONCURRENCY)),
            "default": lambda: plan.run(drain(_copy(due, file), n, DEFAULT_CONCURRENCY)),
            "steady": steady,
        },
    )

    def row(what: str, ours: str, goal: Goal | None = GOAL) -> Row:
        beside = f"{per_message_us(times[ours], n)} a message, bare {per_message_us(times['bare'], n)}"
        return Row("BF3", what, "x bare speed", ratios(times["bare"], times[ours]), goal, beside)

    what = f"SQLite: {n:,} messages due at once, to an empty handler, concurrency"
    return [
        row(f"{what} {CONCURRENCY:,}", "ours"),
        row(f"{what} {CONCURRENCY:,}, while {n:,} messages that ended over 30 s ago are deleted", "steady"),
        row(f"{what} {DEFAULT_CONCURRENCY} (default)", "default", None),
        beside_tuned(
            "BF3",
            what,
            CONCURRENCY,
            times["ours"],
            times["default"],
            beside=f"{per_message_us(times['default'], n)} a message",
        ),
    ]


def _copy(source: Path, file: Path) -> Path:
    for suffix in ("-wal", "-shm"):
        file.with_name(file.name + suffix).unlink(missing_ok=True)
    shutil.copy(source, file)
    with file.open("rb+") as copied:
        os.fsync(copied.fileno())  # otherwise the first commit would write the copy to disk
    return file


async def fill(file: Path, n: int) -> None:
    """Schedule messages that are due now."""
    now = datetime.now(UTC)
    async with Scheduler(SqliteStore(file), dispatch=False) as producer:
        stored = await producer.schedule_many(Message(order(i), at=now) for i in range(n))
    check(stored == n, "not all were scheduled")


def make_old(file: Path) -> None:
    """Make ended messages look as if they had ended a minute ago."""
    with raw(file) as connection:
        connection.execute("UPDATE ended SET until_ms = until_ms - 60000")


async def drain(file: Path, n: int, concurrency: int) -> float:
    """Measure our side, from the open of the scheduler to its close, with all messages settled."""
    scheduler, delivered = Scheduler(SqliteStore(file), overdue_alarm="1h"), list[int]()
    all_delivered = asyncio.get_running_loop().create_future()

    @scheduler.handler(concurrency=concurrency, timeout="30s")
    async def handle(event: Order, context: Context) -> None:
        delivered.append(event.number)
        if len(delivered) == n:
            all_delivered.set_result(None)

    with Stopwatch() as watch:
        async with scheduler:
            await all_delivered
    check_once_each(delivered, n)
    check(count(file, "queue") == count(file, "leases") == 0, "something is left in the store")
    return watch.seconds


BENCHMARK = Benchmark("BF3", "dispatch from SQLite", run)
