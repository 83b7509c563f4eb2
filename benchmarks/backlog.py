"""`python -m benchmarks.backlog`: start with millions of overdue messages; measure memory and the catch-up rate.

One process schedules the messages. Another process delivers them to an empty handler, and reports after each tenth.
Each message must run once, and the messages that are overdue for longer must run first.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import redis

from aiodelay import Context, Message, Scheduler

from .harness import Plan, check
from .peers.tables import table
from .redis_server import running_server
from .report import surroundings

__all__ = ["Tenth", "main"]

T = TypeVar("T")

MESSAGES, PAYLOAD, CONCURRENCY = 10_000_000, b"x" * 100, 500
SPAN_MS = 3_600_000
"""The messages became due one after another in this time, which ended at the start."""
PARTS = 10
HEAD = ("tenth", "time of a message", "processor time", "memory grown by", "memory of the server")
MIB = 2**20


class Tenth(NamedTuple):
    """The measurements at the end of a tenth of the messages.

    Attributes:
        us: Time for a message of this tenth, in µs.
        processor_us: Processor time of the process for a message of this tenth, in µs.
        grown_bytes: The largest growth so far of the memory of the process that delivers.
        server_bytes: Memory of the Redis server; 0 with SQLite.
    """

    us: float
    processor_us: float
    grown_bytes: int
    server_bytes: int


@dataclass(frozen=True, slots=True)
class Backlog:
    """A backlog to schedule or to deliver: the store's URL, the number of messages, and the Redis server, if any."""

    store: str
    messages: int
    server: str


def fill(backlog: Backlog) -> float:
    """Schedule the messages, in random order of their due times. Return the time for a message, in µs."""

    async def schedule() -> None:
        first_ms, n = time.time_ns() // 1_000_000 - SPAN_MS, backlog.messages
        stride = next(each for each in (7_368_787, 7_368_791) if n % each)  # a prime: each number comes once
        numbers = (number * stride % n for number in range(n))
        async with Scheduler(backlog.store, dispatch=False) as scheduler:
            await scheduler.schedule_many(
                Message(PAYLOAD, at=_instant(first_ms + number * SPAN_MS // n), to="handler:work", id=f"{number}")
                for number in numbers
            )

    since_s = time.perf_counter()
    asyncio.run(schedule())
    return (time.perf_counter() - since_s) * 1e6 / backlog.messages


def drain(backlog: Backlog) -> list[Tenth]:
    """Deliver all messages. Return the measurements of each tenth.

    Raises:
        WrongResultError: A message did not run, ran twice, or ran long before a message that was due earlier.
    """
    n, tenths = backlog.messages, list[Tenth]()
    seen, runs, farthest, latest = bytearray(n), 0, 0, 0
    seen[:] = b"\0" * n  # so that its memory counts at the start
    step = n // PARTS
    scheduler = Scheduler(backlog.store)
    at_first, since = 0, (0.0, 0.0)

    @scheduler.handler(name="work", concurrency=CONCURRENCY)
    async def work(payload: bytes, context: Context) -> None:
        nonlocal runs, farthest, latest, since
        number = int(context.id)
        seen[number] += 1
        farthest, latest = max(farthest, latest - number), max(latest, number)
        runs += 1
        if runs % step == 0:
            now, grown = _now(), most_resident_bytes() - at_first
            us, processor_us = ((end - begin) * 1e6 / step for begin, end in zip(since, now, strict=True))
            tenths.append(Tenth(us, processor_us, grown, _server_bytes(backlog)))
            since = now

    async def run() -> None:
        nonlocal at_first, since
        async with scheduler:
            at_first, since = most_resident_bytes(), _now()
            await scheduler.run_until_idle()

    asyncio.run(run())
    check(
        seen.count(1) == n, f"{seen.count(0):,} messages did not run, {n - seen.count(0) - seen.count(1):,} ran again"
    )
    check(farthest <= 2 * CONCURRENCY, f"a message ran {farthest:,} places later than its due time says")
    return tenths


def _now() -> tuple[float, float]:
    """Return the time, and the processor time of this process, in seconds."""
    return time.perf_counter(), time.process_time()


def most_resident_bytes() -> int:
    """Return the largest memory that this process has had. `ru_maxrss` would include the memory of its parent."""
    (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(peak) * 1024


def _server_bytes(backlog: Backlog) -> int:
    if not backlog.server:
        return 0
    with redis.Redis.from_url(backlog.server) as client:
        info: Any = client.info("memory")
    return int(info["used_memory"])


def _instant(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def main() -> int:
    """Measure the backlog, and print a table."""
    options = _parser().parse_args()
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="aiodelay-backlog-", dir=options.directory))
        )
        server = stack.enter_context(running_server(None)) if options.store == "redis" else ""
        backlog = Backlog(server or f"sqlite:///{folder / 'backlog.db'}", options.messages, server)
        around = surroundings(Plan(folder, runs=1, redis=server))
        fill_us = _in_new_process(fill, backlog)
        print(f"{options.store}: {options.messages:,} messages scheduled, {fill_us:.1f} µs a message", flush=True)
        tenths = _in_new_process(drain, backlog)
    print(table(HEAD, [_cells(number, each) for number, each in enumerate(tenths, 1)]))
    print("Conditions: " + ", ".join(f"{name} {value}" for name, value in around.items()) + ".")
    return 0


def _cells(number: int, tenth: Tenth) -> tuple[str, ...]:
    return (
        f"{number}",
        f"{tenth.us:.1f} µs",
        f"{tenth.processor_us:.1f} µs",
        f"{tenth.grown_bytes / MIB:.0f} MiB",
        f"{tenth.server_bytes / MIB:,.0f} MiB",
    )


def _in_new_process(function: Callable[[Backlog], T], backlog: Backlog) -> T:
    """Call a function in a process of its own, so that its memory can be measured."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, backlog).result()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backlog", description=__doc__)
    parser.add_argument("store", choices=("sqlite", "redis"))
    parser.add_argument("--messages", type=int, default=MESSAGES, help=f"default: {MESSAGES:,}")
    parser.add_argument(
        "--directory", type=Path, help="folder for the SQLite file (default: of the system, often /tmp)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
