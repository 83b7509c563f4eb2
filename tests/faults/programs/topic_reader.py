"""A process whose handler takes from a topic, until told by SIGTERM.

It says `ready` when its scheduler is open. Each run that ends well is a line in a file: partition, number, attempt. A
record's payload is `<partition> <number>`; every seventh fails at its first attempt, and is tried again by the store.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

import msgspec

from aiodelay import Context, Retry, Scheduler

__all__ = ["CONCURRENCY", "Plan", "fails_once"]

CONCURRENCY = 16


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What it does.

    Attributes:
        kafka: The cluster.
        source: What its handler takes from.
        store: The store's URL.
        runs: The file that runs are written to.
    """

    kafka: str
    source: str
    store: str
    runs: str


def fails_once(number: int) -> bool:
    """Say whether a record's first attempt fails."""
    return number % 7 == 3


async def main(plan: Plan) -> None:
    logging.basicConfig(level=logging.WARNING)
    scheduler = Scheduler(plan.store, sources=[f"kafka://{plan.kafka}"], drain="2s")
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    with await asyncio.to_thread(Path(plan.runs).open, "ab", buffering=0) as runs:

        @scheduler.handler(
            name="work", source=plan.source, concurrency=CONCURRENCY, retry=Retry(attempts=9, first="50ms")
        )
        async def work(payload: bytes, context: Context) -> None:
            await asyncio.sleep(0.005)
            if fails_once(int(payload.split()[1])) and context.attempt == 1:
                raise ValueError("once")
            runs.write(b"%s %d\n" % (payload, context.attempt))

        async with scheduler:
            print("ready", flush=True)
            await told.wait()


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Plan)))
