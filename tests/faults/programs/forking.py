"""Fork while a scheduler is open. The child is refused, the parent continues. Prints the error of the child."""

from __future__ import annotations

import asyncio
import os
import sys
import warnings
from typing import NoReturn

import msgspec

from aiodelay import Scheduler, WrongLoopError
from aiodelay.testing import history as h
from tests.faults.programs.worker import Plan, say, scheduler_of
from tests.support.observed import FailurePoints
from tests.support.producing import Producer


def in_child(scheduler: Scheduler) -> NoReturn:
    """Leave the parent's loop, as a forked worker process does, and try to use its scheduler on another one."""
    asyncio.events._set_running_loop(None)
    code = 1
    try:
        asyncio.run(use(scheduler))
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


async def use(scheduler: Scheduler) -> None:
    for call in (
        lambda: scheduler.schedule(b"", to="handler:work", delay="0s"),
        lambda: scheduler.cancel("m-1"),
        lambda: scheduler.get("m-1"),
    ):
        try:
            await call()
            say("child none")
        except WrongLoopError as error:
            say(f"child {error}")


async def main(plan: Plan) -> None:
    history = h.History(plan.history, plan.name)
    scheduler = scheduler_of(plan, history, FailurePoints(None, lambda: None))
    async with scheduler:
        producer = Producer(scheduler, history)
        for number in range(10):
            await producer.schedule(f"before-{number}", b"", delay_ms=100)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads: what this is about
            child = os.fork()
        if not child:
            in_child(scheduler)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        say(f"status {os.waitstatus_to_exitcode(status)}")
        for number in range(10):
            await producer.schedule(f"after-{number}", b"", delay_ms=0)
        await scheduler.run_until_idle()
    say("closed")


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Plan)))
