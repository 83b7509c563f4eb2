"""A backlog after an outage: fill a file with overdue messages, or deliver them and print measurements.

No history is written: it would be most of the work. The last line is a `Result` as JSON.
"""

from __future__ import annotations

import asyncio
import random
import re
import resource
import sys
import time
from pathlib import Path
from typing import Literal

import msgspec

from aiodelay import Context, Message, Scheduler
from tests.support.producing import instant

__all__ = ["Plan", "Result"]

PAYLOAD_BYTES = 500
SPAN_MS = 3_600_000


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`fill` the file with messages, or `drain` it."""

    what: Literal["fill", "drain"]
    store: str
    messages: int
    concurrency: int = 500


class Result(msgspec.Struct, frozen=True):
    """What draining was like.

    Attributes:
        runs: How many runs there were.
        different: How many different messages ran.
        displaced_ms: By how much at most a message ran after one that was due later than itself.
        grown_bytes: By how much the process's memory grew at most while it delivered, SQLite's caches included.
        grown_blocks: By how many blocks Python's own grew at most; a message that is held takes ten or more.
    """

    runs: int
    different: int
    displaced_ms: int
    grown_bytes: int
    grown_blocks: int


async def fill(plan: Plan) -> None:
    rng = random.Random(plan.messages)
    now = time.time_ns() // 1_000_000
    dues = [now - SPAN_MS + i * SPAN_MS // plan.messages for i in range(plan.messages)]
    rng.shuffle(dues)
    async with Scheduler(plan.store, dispatch=False) as scheduler:
        messages = (
            Message(rng.randbytes(PAYLOAD_BYTES), at=instant(due), to="handler:work", id=f"m-{i}")
            for i, due in enumerate(dues)
        )
        assert await scheduler.schedule_many(messages) == plan.messages


async def drain(plan: Plan) -> Result:
    scheduler = Scheduler(plan.store)
    seen = bytearray(plan.messages)
    runs = displaced_ms = latest_ms = most_blocks = 0

    @scheduler.handler(name="work", concurrency=plan.concurrency)
    async def work(payload: bytes, context: Context) -> None:
        nonlocal runs, displaced_ms, latest_ms, most_blocks
        runs += 1
        seen[int(context.id[2:])] = 1
        due_ms = int(context.delivery_id.rsplit("/", 1)[1])
        displaced_ms = max(displaced_ms, latest_ms - due_ms)
        latest_ms = max(latest_ms, due_ms)
        if runs % 500 == 0:
            most_blocks = max(most_blocks, sys.getallocatedblocks())

    async with scheduler:
        at_first, blocks_at_first = resident_bytes(), sys.getallocatedblocks()
        await scheduler.run_until_idle()
    return Result(runs, sum(seen), displaced_ms, most_resident_bytes() - at_first, most_blocks - blocks_at_first)


def resident_bytes() -> int:
    """Return how much memory this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def most_resident_bytes() -> int:
    """Return how much memory this process has had at most; `ru_maxrss` would count what its parent had."""
    (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(peak) * 1024


async def main(plan: Plan) -> None:
    if plan.what == "fill":
        await fill(plan)
    else:
        print("result", msgspec.json.encode(await drain(plan)).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Plan)))
