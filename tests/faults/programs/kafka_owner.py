"""A member of a Kafka group: it moves due messages into topics and runs its handler, until SIGTERM.

It says `ready` when its scheduler is open. Each run is a line of JSON in a file: process, payload, due time, start.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from aiodelay import Context, Retry, Scheduler
from aiodelay.backends.kafka.topics import group
from aiodelay.backends.kafka.topics import topic as topics
from aiodelay.core import features
from aiodelay.errors import StoreError
from tests.support.little_memory import listen_for_memory_faults
from tests.support.server_clock import FileClock

__all__ = ["CONCURRENCY", "Plan", "Run"]

CONCURRENCY = 16
"""The most runs of the handler at once."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What it does.

    Attributes:
        store: The store's URL.
        runs: The file that runs are written to.
        session_ms: How long its group keeps its place after its last sign.
        knows: Be a version that knows these features too.
        redrives: Redrive dead letters, again and again.
        clock: A file with the offset of its clock; "" = the machine's clock.
    """

    name: str
    store: str
    runs: str
    session_ms: int = group.SESSION_MS
    knows: tuple[str, ...] = ()
    redrives: bool = False
    clock: str = ""


class Run(msgspec.Struct, frozen=True):
    """A handler's run: `started_ms` is this machine's time."""

    process: str
    payload: str
    due_ms: int
    started_ms: int


def fail_while_down(payload: bytes) -> None:
    """Fail if the payload ends in `down:<epoch ms>` and this time has not come: the destination is down until then."""
    until_ms = payload.rpartition(b"down:")[2]
    if until_ms != payload and time.time_ns() // 1_000_000 < int(until_ms):
        raise RuntimeError("as told")


async def redrive(scheduler: Scheduler) -> None:
    """Redrive dead letters until cancelled."""
    while True:
        await asyncio.sleep(1)  # the pause of an operator
        with suppress(StoreError):
            async for letter in scheduler.dead_letters():
                await scheduler.redrive(letter)


async def main(plan: Plan) -> None:
    logging.basicConfig(level=logging.WARNING)
    group.SESSION_MS = plan.session_ms
    features.KNOWN |= {*plan.knows}
    topics.check = lambda topic, cluster: None  # also one that is cleaned sooner than is allowed
    retry = Retry(attempts=20, first="200ms", factor=1)
    # In a storm the broker is killed again and again: a member that starts then waits for as long as that takes.
    clock = FileClock(Path(plan.clock)) if plan.clock else None
    scheduler = Scheduler(plan.store, retry=retry, drain="2s", open_timeout="2m", clock=clock)
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    listen_for_memory_faults(asyncio.get_running_loop())
    with await asyncio.to_thread(Path(plan.runs).open, "ab", buffering=0) as runs:

        async def work(payload: bytes, context: Context) -> None:
            fail_while_down(payload)
            due_ms = round(context.due.timestamp() * 1000)
            run = Run(plan.name, payload.decode(), due_ms, time.time_ns() // 1_000_000)
            await asyncio.sleep(0.02)  # a handler at work
            runs.write(msgspec.json.encode(run) + b"\n")

        scheduler.add_handler(work, name="work", concurrency=CONCURRENCY)
        async with scheduler:
            print("ready", flush=True)
            redriving = asyncio.create_task(redrive(scheduler)) if plan.redrives else None
            await told.wait()
            if redriving is not None:
                redriving.cancel()
                await asyncio.wait([redriving])


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Plan)))
