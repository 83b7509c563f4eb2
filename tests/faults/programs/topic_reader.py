"""Take messages from a topic, with or without a handler, until SIGTERM.

It says `ready` when its scheduler is open. Each run that ends well is a line in a file: partition, number, attempt. A
record's payload is `<partition> <number>`; every seventh fails at its first attempt, and is tried again by the store.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from aiodelay import Context, Received, Retry, Scheduler
from tests.support.sessions import shorten_sessions

__all__ = ["CONCURRENCY", "Plan", "fails_once"]

CONCURRENCY = 16


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What it does.

    Attributes:
        kafka: The cluster.
        source: What it takes from.
        store: The store's URL.
        runs: The file that runs are written to.
        pulls: Takes by `async for`, without a handler.
    """

    kafka: str
    source: str
    store: str
    runs: str
    pulls: bool = False


def fails_once(number: int) -> bool:
    """Say whether a record's first attempt fails."""
    return number % 7 == 3


async def main(plan: Plan) -> None:
    logging.basicConfig(level=logging.WARNING)
    shorten_sessions()
    scheduler = Scheduler(plan.store, sources=[f"kafka://{plan.kafka}"], drain="2s")
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    retry = Retry(attempts=9, first="50ms")
    with await asyncio.to_thread(Path(plan.runs).open, "ab", buffering=0) as runs:

        async def work(payload: bytes, context: Context) -> None:
            await asyncio.sleep(0.015)  # a run's own time, in which it may be killed
            if fails_once(int(payload.split()[1])) and context.attempt == 1:
                raise ValueError("once")
            runs.write(b"%s %d\n" % (payload, context.attempt))

        async def take(message: Received[bytes]) -> None:
            with suppress(ValueError), message as payload:
                await work(payload, message.context)

        async def pull() -> None:
            messages = scheduler.messages("work", source=plan.source, concurrency=CONCURRENCY, retry=retry)
            async with asyncio.TaskGroup() as taking:
                async for message in messages:
                    taking.create_task(take(message))

        if not plan.pulls:
            scheduler.add_handler(work, name="work", source=plan.source, concurrency=CONCURRENCY, retry=retry)
        async with asyncio.TaskGroup() as tasks, scheduler:
            if plan.pulls:
                tasks.create_task(pull())
            print("ready", flush=True)
            await told.wait()


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Plan)))
