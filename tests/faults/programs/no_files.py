"""Run out of file descriptors before a scheduler opens, and while it works. Prints what happens, line by line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
from collections.abc import Iterator

import msgspec

from aiodelay import Scheduler
from aiodelay.errors import AiodelayError
from aiodelay.testing import history as h
from tests.faults.programs.worker import Plan, say, scheduler_of
from tests.support.observed import FailurePoints
from tests.support.producing import Producer

LIMIT = 256


@contextlib.contextmanager
def no_files_left() -> Iterator[None]:
    """Hold every file descriptor that there is."""
    held: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    try:
        yield
    finally:
        for each in held:
            os.close(each)


async def main(plan: Plan) -> None:
    history = h.History(plan.history, plan.name)
    scheduler = scheduler_of(plan, history, FailurePoints(None, lambda: None))
    scheduler._options = msgspec.structs.replace(scheduler._options, open_timeout_ms=0)  # no file comes free meanwhile
    await asyncio.to_thread(int)
    history.write(h.count_resources("baseline"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    with no_files_left():
        try:
            async with scheduler:
                say("error none")
        except AiodelayError as error:
            say(f"error {type(error).__name__}: {error}")
    async with scheduler:
        producer, another = Producer(scheduler, history), Scheduler(plan.store, dispatch=False)
        for number in range(20):
            await producer.schedule(f"before-{number}", b"", delay_ms=number * 50)
        with no_files_left():
            for number in range(20):
                await producer.schedule(f"during-{number}", b"", delay_ms=number * 50)
            try:
                async with another:
                    say("meanwhile none")
            except AiodelayError as error:
                say(f"meanwhile {type(error).__name__}: {error}")
            await asyncio.sleep(1)  # real time: as long as messages come due
        await scheduler.get("before-19")
        await scheduler.run_until_idle()
    history.write(h.count_resources("end"))
    say("closed")


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Plan)))
