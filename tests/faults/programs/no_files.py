"""Run out of file descriptors before a scheduler opens, and while it works. Prints what happens, line by line.

While it works, it says `hoards` once it has no file descriptor left, and goes on when it is told so.
"""

from __future__ import annotations

import asyncio
import contextlib
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

PATIENT_MS, LOST_MS = 60_000, 3_000
"""How long commands wait for the store: in general, and if they cannot reach it because no file comes free."""


@contextlib.contextmanager
def no_files_left() -> Iterator[None]:
    """Let the process have no new file descriptor, also if it closes one. It keeps those that it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # a new descriptor would have the number 3 or more
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def store_timeout(scheduler: Scheduler, ms: int) -> Iterator[None]:
    """Let commands wait for the store for so long inside a block, and for `PATIENT_MS` after it."""
    assert scheduler._running is not None
    parts = scheduler._running.commit, scheduler._commands
    for part in parts:
        part._timeout_ms = ms  # type: ignore[union-attr]
    yield
    for part in parts:
        part._timeout_ms = PATIENT_MS  # type: ignore[union-attr]


async def main(plan: Plan) -> None:
    history = h.History(plan.history, plan.name)
    scheduler = scheduler_of(plan, history, FailurePoints(None, lambda: None))
    scheduler._options = msgspec.structs.replace(scheduler._options, open_timeout_ms=0)  # no file comes free meanwhile
    await asyncio.to_thread(int)
    history.write(h.count_resources("baseline"))
    with no_files_left():
        try:
            async with scheduler:
                say("error none")
        except AiodelayError as error:
            say(f"error {type(error).__name__}: {error}")
    times = {"open_timeout_ms": PATIENT_MS, "store_timeout_ms": PATIENT_MS}
    scheduler._options = msgspec.structs.replace(scheduler._options, **times)
    async with scheduler:
        producer, another = Producer(scheduler, history), Scheduler(plan.store, dispatch=False)
        for number in range(20):
            await producer.schedule(f"before-{number}", b"", delay_ms=number * 50)
        with no_files_left():
            say("hoards")
            await asyncio.to_thread(sys.stdin.readline)
            with store_timeout(scheduler, PATIENT_MS if plan.store.startswith("sqlite:") else LOST_MS):
                async with asyncio.TaskGroup() as tasks:
                    for number in range(20):
                        tasks.create_task(producer.schedule(f"during-{number}", b"", delay_ms=number * 50))
            try:
                async with another:
                    say("meanwhile none")
            except AiodelayError as error:
                say(f"meanwhile {type(error).__name__}: {error}")
            await asyncio.sleep(1)  # real time: as long as messages come due
        for number in range(20):
            assert await producer.schedule(f"after-{number}", b"", delay_ms=number * 50) is not None
        await scheduler.run_until_idle()
    history.write(h.count_resources("end"))
    say("closed")


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Plan)))
