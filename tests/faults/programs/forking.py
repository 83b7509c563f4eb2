"""Forks while its scheduler is open: the child is refused, the parent works on. Says what the child got."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
import warnings

import msgspec

from aiodelay import Scheduler, WrongLoopError
from tests.faults.programs.worker import Plan, say, scheduler_of
from tests.support import history as h
from tests.support.observed import FailurePoints
from tests.support.producing import Producer


def in_child(scheduler: Scheduler) -> None:
    """Try to use the parent's scheduler; ends the child."""
    try:
        for call in (
            lambda: scheduler.schedule(b"", to="handler:work", delay=0),
            lambda: scheduler.cancel("m-1"),
            lambda: scheduler.get("m-1"),
        ):
            try:
                asyncio.run(call())
                say("child none")
            except WrongLoopError as error:
                say(f"child {error}")
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


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
            in_child_without_loop(scheduler)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        say(f"status {os.waitstatus_to_exitcode(status)}")
        for number in range(10):
            await producer.schedule(f"after-{number}", b"", delay_ms=0)
        await scheduler.run_until_idle()
    say("closed")


def in_child_without_loop(scheduler: Scheduler) -> None:
    """The child has a copy of the running loop; leave it, as a forked worker process does."""
    asyncio.events._set_running_loop(None)
    in_child(scheduler)


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Plan)))
