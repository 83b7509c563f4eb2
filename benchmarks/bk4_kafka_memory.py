"""BK4: the memory of a pending message beyond the horizon of a Kafka store, and the records that a restart reads."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from aiodelay.backends.kafka.pending.record_reader import RecordReader
from aiodelay.kafka.records import Read

from .bk3_kafka_load import LONGEST_S, MONTH, PARTITIONS, fill, opened_and_ready
from .harness import Benchmark, Goal, Plan, Row, Stopwatch, check, quantile
from .kafka_server import topics

__all__ = ["BENCHMARK"]

MESSAGES = 1_000_000
WARM_UP = 20_000
TAIL = 1_000
MOST_GROWN, MOST_GROWN_ON_DISK, MOST_READ = Goal("at most", 40), Goal("at most", 5), Goal("at most", TAIL + 100)


class Start(msgspec.Struct):
    """The cost of one start of a process.

    Attributes:
        grown: Growth of the resident memory, in bytes.
        read: Number of records that the process has read.
        seconds: Time until all partitions were ready.
    """

    grown: int
    read: int
    seconds: float


def run(plan: Plan) -> list[Row]:
    n = plan.size(MESSAGES)
    memory, first, again = plan.run(started(plan, n))
    rows = []
    for where, starts, goal in (
        ("index in memory", memory, MOST_GROWN),
        ("index on disk, at the first start", first, None),
        ("index on disk, at a restart", again, MOST_GROWN_ON_DISK),
    ):
        grown = [each.grown for each in starts]
        beside = f"{quantile(grown, 0.5) / 2**20:.0f} MiB more resident memory, in a separate process"
        what = f"Kafka: memory of {n:,} messages pending beyond the horizon, {where}"
        rows.append(Row("BK4", what, "B a message", tuple(max(each, 0) / n for each in grown), goal, beside))
    took = [quantile([each.seconds for each in starts], 0.5) for starts in (again, first, memory)]
    beside = f"ready after {took[0]:.1f} s; first start {took[1]:.1f} s; with the index in memory {took[2]:.1f} s"
    what = f"Kafka: restart with the index on disk, {n:,} messages pending, {TAIL:,} scheduled meanwhile"
    rows.append(Row("BK4", what, "records read", tuple(each.read for each in again), MOST_READ, beside))
    return rows


async def started(plan: Plan, n: int) -> tuple[list[Start], list[Start], list[Start]]:
    """Return the cost of starts, round by round: in memory, with a new index, and at a restart with that index."""
    found: tuple[list[Start], list[Start], list[Start]] = [], [], []
    async with topics(plan.kafka, PARTITIONS) as (schedules, _), topics(plan.kafka, PARTITIONS) as (warm_up, _):
        await fill(plan.kafka, schedules, n, MONTH)
        await fill(plan.kafka, warm_up, min(n, WARM_UP), MONTH)
        for _ in range(plan.runs):
            with tempfile.TemporaryDirectory(dir=plan.directory) as folder:
                for starts, index in zip(found, ("", folder, folder), strict=True):
                    if starts is found[2]:
                        await fill(plan.kafka, schedules, min(TAIL, n), MONTH)  # schedules the same messages again
                    command = [sys.executable, "-m", __name__, plan.kafka, warm_up, schedules, f"{n}", index]
                    starts.append(await asyncio.to_thread(_measured, command))
    return found


def _measured(command: list[str]) -> Start:
    done = subprocess.run(command, check=True, capture_output=True, timeout=LONGEST_S)
    return msgspec.json.decode(done.stdout, type=Start)


async def _start(bootstrap: str, warm_up: str, schedules: str, n: int, index: str) -> Start:
    """Read a few messages first, so that the measurement has no one-time cost of a process."""
    offsets = [0]
    real = RecordReader.read

    def counting(reader: RecordReader, read: Read) -> None:
        offsets[0] += 1
        real(reader, read)

    first = await opened_and_ready(bootstrap, warm_up, min(n, WARM_UP))
    before = _resident()
    patched: Any = RecordReader
    patched.read = counting
    with Stopwatch() as watch:
        store = await opened_and_ready(bootstrap, schedules, n, f"&index={index}" if index else "")
    grown = _resident() - before
    check(len({each.index.state.far.is_in_file for each in store.partitions.values()} - {bool(index)}) == 0, "no index")
    for each in (first, store):
        await each.__aexit__(None, None, None)
    return Start(grown, offsets[0], watch.seconds)


def _resident() -> int:
    """Return the resident memory of this process in bytes, after it has returned free memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


if __name__ == "__main__":
    address, small, large, count, folder = sys.argv[1:]
    print(msgspec.json.encode(asyncio.run(_start(address, small, large, int(count), folder))).decode())

BENCHMARK = Benchmark("BK4", "memory of a Kafka store", run, needs_kafka=True)
