"""BF8: the time from the kill (kill -9) of a process on a SQLite file until its messages run again."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from multiprocessing.context import SpawnProcess
from pathlib import Path

import msgspec

from aiodelay import Message, Scheduler
from aiodelay.sqlite import SqliteStore

from .harness import Benchmark, Goal, Order, Plan, Row, check, check_once_each, order
from .sqlite_files import count, new_file

__all__ = ["BENCHMARK"]

MESSAGES = 16
KILLS = 10
GOAL = Goal("at most", 4_000)
LONGEST_S = 60.0
POLL_S = 0.01


class Began(msgspec.Struct, array_like=True):
    """The start of one run of a handler, in the monotonic time that all processes share."""

    process: str
    number: int
    at_ms: float


def run(plan: Plan) -> list[Row]:
    kills = max(round(KILLS * plan.scale), 1)
    file = plan.directory / "bf8.db"
    cases = {"another process dispatches": True, "the process is started again": False}
    rows = []
    for case, has_other in cases.items():
        times = tuple(
            max(plan.run(redelivery(new_file(file), has_other=has_other)) for _ in range(kills))
            for _ in range(plan.runs)
        )
        what = f"SQLite: {MESSAGES} messages in flight in a process that is killed, {case}: all run again"
        note = f"the slowest of {kills} kills; a lease lasts 15,000 ms"
        rows.append(Row("BF8", what, "ms", times, GOAL, note if has_other else f"{note}; includes the start of Python"))
    return rows


async def redelivery(file: Path, *, has_other: bool) -> float:
    """Kill a process. Return the ms until all messages that it had in flight have begun again."""
    runs = file.with_suffix(".runs")
    runs.write_bytes(b"")
    async with Scheduler(SqliteStore(file), dispatch=False) as producer:
        now = datetime.now(UTC)
        await producer.schedule_many(Message(order(number), at=now) for number in range(MESSAGES))
    with _started(file, runs, "victim") as victim:
        await _until_begun(runs, "victim")
        with _started(file, runs, "heir") if has_other else _nobody() as other:
            while other is not None and count(file, "workers") < 2:  # noqa: ASYNC110 - in another process
                await asyncio.sleep(POLL_S)
            killed_ms = _now_ms()
            victim.kill()
            if has_other:
                began = await _until_begun(runs, "heir")
            else:
                with _started(file, runs, "heir"):
                    began = await _until_begun(runs, "heir")
    check_once_each([each.number for each in began], MESSAGES)
    return max(each.at_ms for each in began) - killed_ms


# --- the processes ----------------------------------------------------------------------------------------


def work(file: Path, runs: Path, process: str) -> None:
    """Begin runs that do not end, until this process is killed."""
    asyncio.run(handle_all(file, runs, process))


async def handle_all(file: Path, runs: Path, process: str) -> None:
    """Note the start of each run."""
    scheduler = Scheduler(SqliteStore(file))
    written = os.open(runs, os.O_WRONLY | os.O_APPEND)

    @scheduler.handler(timeout="1h")
    async def handle(event: Order) -> None:
        os.write(written, msgspec.json.encode(Began(process, event.number, _now_ms())) + b"\n")
        await asyncio.Event().wait()

    await scheduler.run()


@contextmanager
def _started(file: Path, runs: Path, name: str) -> Iterator[SpawnProcess]:
    process = multiprocessing.get_context("spawn").Process(target=work, args=(file, runs, name))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        process.close()


@contextmanager
def _nobody() -> Iterator[None]:
    yield


async def _until_begun(runs: Path, process: str) -> list[Began]:
    """Wait until a process has begun all messages. Return the starts of its runs."""
    ends_ms = _now_ms() + LONGEST_S * 1000
    while len(began := _begun(runs, process)) < MESSAGES:
        check(_now_ms() < ends_ms, f"the {process} has begun {len(began)} of {MESSAGES} messages")
        await asyncio.sleep(POLL_S)
    return began


def _begun(runs: Path, process: str) -> list[Began]:
    lines = runs.read_bytes().splitlines()
    return [each for each in (msgspec.json.decode(line, type=Began) for line in lines) if each.process == process]


def _now_ms() -> float:
    return time.monotonic_ns() / 1e6


BENCHMARK = Benchmark("BF8", "processes killed on SQLite", run)
