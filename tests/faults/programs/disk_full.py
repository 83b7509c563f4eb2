"""Fill the disk under a store, continue to work while nothing can be stored, and recover when there is room.

The disk is a limit on the size of files (RLIMIT_FSIZE), which SQLite cannot tell from a full one. Says `full`, `roomy`.
"""

from __future__ import annotations

import asyncio
import resource
import sys

import msgspec

from aiodelay import Scheduler, StoreFullError
from aiodelay.errors import StoreError
from aiodelay.testing import history as h
from tests.faults.programs.worker import Plan, say, scheduler_of
from tests.support.observed import FailurePoints
from tests.support.producing import Producer

LIMIT_BYTES = 3 << 20
PAYLOAD = b"x" * 30_000


def limit_files(size: int) -> None:
    """Allow no file to grow beyond this."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


async def fill(scheduler: Scheduler, producer: Producer) -> int:
    """Schedule until there is no room; return how many were stored. Half are due soon, half are far ahead."""
    for number in range(1_000):
        delay_ms = 1_000 if number % 2 else 3_600_000
        if not await producer.schedule(f"m-{number}", PAYLOAD, delay_ms=delay_ms, lane="work" if number % 2 else "far"):
            return number
    raise AssertionError("the disk did not fill up")


async def main(plan: Plan) -> None:
    history = h.History(plan.history, plan.name)
    scheduler = scheduler_of(plan, history, FailurePoints(None, lambda: None))
    async with scheduler:
        producer = Producer(scheduler, history)
        limit_files(LIMIT_BYTES)
        stored = await fill(scheduler, producer)
        say(f"full {stored}")
        try:
            await scheduler.schedule(PAYLOAD, to="handler:work", delay="1h", id="refused")
        except StoreFullError as error:
            say(f"error {error}")
        await asyncio.sleep(1.5)  # real time: what is due meanwhile is delivered, or tried, and nothing breaks
        try:
            assert await scheduler.get("m-0") is not None, "what is stored can be read"
            await scheduler.cancel("refused")
        except StoreError as error:
            say(f"meanwhile {type(error).__name__}")
        limit_files(resource.RLIM_INFINITY)
        say("roomy")
        again = await producer.schedule("after", PAYLOAD, delay_ms=0)
        assert again is not None
        await scheduler.run_until_idle()
    say("closed")


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Plan)))
