"""A process of the soak: it schedules numbered messages at a steady rate, or handles them, and writes down the numbers.

It says `ready` when its scheduler is open. At SIGUSR1 it says `holds` and a `Sample` as JSON. It ends at SIGTERM, or
when its time is over.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import signal
import sys
import time
from array import array
from pathlib import Path

import msgspec

from aiodelay import Context, Message, Retry, Scheduler
from aiodelay.core.values import Scheduled
from aiodelay.errors import AiodelayError
from aiodelay.testing.history import count_resources
from tests.support.little_memory import listen_for_memory_faults

__all__ = ["CONCURRENCY", "Plan", "Sample"]

CONCURRENCY = 50
"""The most runs of the handler at once."""
STEP_S = 0.1
LATEST_MS = 20_000
"""The longest delay of a message."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What it does.

    Attributes:
        store: The store's URL.
        numbers: The file for the numbers of the messages that were acknowledged, or handled: 8 bytes each. The number
            of a message that was early is negative.
        first: The number of the first message.
        rate: Messages per second that it schedules; 0 = it handles messages.
        seconds: The time for which it schedules.
    """

    store: str
    numbers: str
    first: int = 0
    rate: int = 0
    seconds: float = 0.0


class Sample(msgspec.Struct, frozen=True):
    """What the process holds, and the median and the greatest lateness of the messages since the last sample."""

    tasks: int
    threads: int
    files: int
    median_ms: int
    late_ms: int


class Numbers:
    """A file of numbers, which another process may read at any time."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 - until the end of the process

    def write(self, *numbers: int) -> None:
        self._file.write(array("q", numbers).tobytes())


async def schedule(scheduler: Scheduler, plan: Plan, numbers: Numbers) -> None:
    """Schedule messages at the rate of the plan. While the store is away, the messages of that time are left out."""
    loop = asyncio.get_running_loop()
    begun, number, batch = loop.time(), plan.first, max(round(plan.rate * STEP_S), 1)
    while (passed := loop.time() - begun) < plan.seconds:
        await schedule_batch(scheduler, range(number, number + batch), numbers)
        number += batch
        next_s = (number - plan.first) / plan.rate
        if next_s < passed - 1:  # the store was away
            begun += passed - next_s
        await asyncio.sleep(max(begun + next_s - loop.time(), 0))


async def schedule_batch(scheduler: Scheduler, batch: range, numbers: Numbers) -> None:
    stored: list[int] = []

    def answered(position: int, answer: Scheduled | AiodelayError) -> None:
        if isinstance(answer, Scheduled):
            stored.append(batch[position])

    messages = [
        Message(b"%d" % number, delay=f"{random.randrange(LATEST_MS)}ms", to="handler:work", id=f"m{number}")
        for number in batch
    ]
    await scheduler.schedule_many(messages, answered=answered)
    numbers.write(*stored)


async def main(plan: Plan) -> None:
    logging.basicConfig(level=logging.ERROR)
    numbers = Numbers(plan.numbers)
    retry = Retry(attempts=20, first="200ms", factor=1)
    scheduler = Scheduler(plan.store, dispatch=not plan.rate, retry=retry, drain="10s", open_timeout="60s")
    told, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, told.set)
    listen_for_memory_faults(loop)

    lateness_ms = array("q")

    def tell() -> None:
        held, lateness = count_resources("end"), sorted(lateness_ms) or [0]
        sample = Sample(held.tasks, held.threads, held.files, lateness[len(lateness) // 2], lateness[-1])
        print("holds", msgspec.json.encode(sample).decode(), flush=True)
        del lateness_ms[:]

    loop.add_signal_handler(signal.SIGUSR1, tell)

    async def work(payload: bytes, context: Context) -> None:
        this_ms = math.floor((time.time() - context.due.timestamp()) * 1000)
        lateness_ms.append(this_ms)
        numbers.write(int(payload) if this_ms >= 0 else -int(payload))

    if not plan.rate:
        scheduler.add_handler(work, name="work", concurrency=CONCURRENCY)
    async with scheduler:
        print("ready", flush=True)
        if plan.rate:
            await schedule(scheduler, plan, numbers)
        else:
            await told.wait()


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Plan)))
