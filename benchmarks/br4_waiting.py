"""BR4: the memory of a process whose handler never returns, with few and with many messages waiting for it."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

from aiodelay import Message, Scheduler

from .harness import Benchmark, Goal, Plan, Row, check, quantile, raw_payload
from .redis_server import empty

__all__ = ["BENCHMARK"]

FEW, MANY = 10_000, 1_000_000
CONCURRENCY = 16
SPAN_S = 12.0
"""The duration of a run. It is longer than the interval of housekeeping."""
LEAVES_S = 60.0
GOAL = Goal("at most", 1.1)


def run(plan: Plan) -> list[Row]:
    few, many = plan.size(FEW), plan.size(MANY)
    rows = []
    for name, urls in urls_of(plan).items():
        for n, url in zip((few, many), urls, strict=True):
            plan.run(fill(url, n))
        sizes = [tuple(resident_mib(url, SPAN_S * plan.scale) for url in urls) for _ in range(plan.runs)]
        growth = tuple(with_many / with_few for with_few, with_many in sizes)
        what = f"{name}: peak memory of a process whose handler never returns, with {many:,} messages due"
        medians = [quantile(values, 0.5) for values in zip(*sizes, strict=True)]
        beside = f"{medians[1]:.1f} MiB, with {few:,} due {medians[0]:.1f} MiB"
        rows.append(Row("BR4", what, f"x memory with {few:,} due", growth, GOAL, beside))
    empty(plan.redis)
    return rows


def urls_of(plan: Plan) -> dict[str, tuple[str, str]]:
    return {
        "Redis": (f"{plan.redis}#few", f"{plan.redis}#many"),
        "SQLite": (f"sqlite:///{plan.directory}/br4-few.db", f"sqlite:///{plan.directory}/br4-many.db"),
    }


def scheduler_on(url: str, *, dispatch: bool) -> Scheduler:
    """Open the store of a URL. The part after `#` is the namespace."""
    url, _, namespace = url.partition("#")
    return Scheduler(url, namespace=namespace or "default", dispatch=dispatch, drain="0s")


async def fill(url: str, n: int) -> None:
    async with scheduler_on(url, dispatch=False) as producer:
        messages = (Message(raw_payload(number), delay="0s", to="handler:raw") for number in range(n))
        check(await producer.schedule_many(messages) == n, "not all were scheduled")


def resident_mib(url: str, span_s: float) -> float:
    """Return the peak memory of a new process."""
    command = [sys.executable, "-m", "benchmarks.br4_waiting", url, f"{span_s}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=span_s + LEAVES_S)
    began, kib = map(int, done.stdout.split())
    check(began == CONCURRENCY, f"{began} runs began instead of {CONCURRENCY}")
    return kib / 1024


async def wait(url: str, span_s: float) -> None:
    """Keep as many messages in flight as the handler requests, for a time. Print their number and the peak memory."""
    began, all_began = 0, asyncio.Event()
    scheduler = scheduler_on(url, dispatch=True)

    @scheduler.handler(name="raw", concurrency=CONCURRENCY)
    async def never_returns(payload: bytes) -> None:
        nonlocal began
        began += 1
        if began == CONCURRENCY:
            all_began.set()
        await asyncio.Event().wait()

    async with scheduler:
        await all_began.wait()
        await asyncio.sleep(span_s)
        print(began, most_kib(), flush=True)


def most_kib() -> str:
    """Return the peak memory of this process. `ru_maxrss` would include its parent's peak."""
    (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return str(kib)


BENCHMARK = Benchmark("BR4", "a handler that never returns", run, needs_redis=True)

if __name__ == "__main__":
    asyncio.run(wait(sys.argv[1], float(sys.argv[2])))
