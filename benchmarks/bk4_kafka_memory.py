"""BK4: how much memory a message takes that is pending in a Kafka store beyond its horizon."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import subprocess
import sys
from pathlib import Path

from .bk3_kafka_load import LONGEST_S, MONTH, PARTITIONS, fill, opened_and_ready
from .harness import Benchmark, Goal, Plan, Row, quantile
from .kafka_server import topics

__all__ = ["BENCHMARK"]

MESSAGES = 1_000_000
WARM_UP = 20_000
GOAL = Goal("at most", 40)


def run(plan: Plan) -> list[Row]:
    n = plan.size(MESSAGES)
    grown = plan.run(grown_by(plan, n))
    beside = f"{quantile(grown, 0.5) / 2**20:.0f} MiB more resident, in a process of its own"
    what = f"Kafka: memory of {n:,} pending messages beyond the horizon"
    return [Row("BK4", what, "B a message", tuple(each / n for each in grown), GOAL, beside)]


async def grown_by(plan: Plan, n: int) -> list[int]:
    """Return by how many bytes a process grows that reads n messages, round by round."""
    async with topics(plan.kafka, PARTITIONS) as (schedules, _), topics(plan.kafka, PARTITIONS) as (warm_up, _):
        await fill(plan.kafka, schedules, n, MONTH)
        await fill(plan.kafka, warm_up, min(n, WARM_UP), MONTH)
        command = [sys.executable, "-m", __name__, plan.kafka, warm_up, f"{min(n, WARM_UP)}", schedules, f"{n}"]
        return [await asyncio.to_thread(_measured, command) for _ in range(plan.runs)]


def _measured(command: list[str]) -> int:
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=LONGEST_S).stdout)


async def _grow(bootstrap: str, warm_up: str, few: int, schedules: str, n: int) -> int:
    """Read a few messages first, so that what every process needs once is there."""
    first = await opened_and_ready(bootstrap, warm_up, few)
    before = _resident()
    store = await opened_and_ready(bootstrap, schedules, n)
    grown = _resident() - before
    for each in (first, store):
        await each.__aexit__(None, None, None)
    return grown


def _resident() -> int:
    """Return the bytes of this process that are in memory, once what is free has been returned."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


if __name__ == "__main__":
    address, small, small_n, large, large_n = sys.argv[1:]
    print(asyncio.run(_grow(address, small, int(small_n), large, int(large_n))))

BENCHMARK = Benchmark("BK4", "memory of a Kafka store", run, needs_kafka=True)
