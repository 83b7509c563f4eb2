"""Races between the runs of one handler, in many orders of the tasks."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from aiodelay import Retry, Scheduler
from aiodelay.memory import MemoryStore
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.storms import SeededLoop

ORDERS = 60


def test_a_message_that_comes_while_a_cancelled_run_ends_is_run() -> None:
    """The task of a cancelled run ends. The message waited for this task, and no other task ran it."""
    for seed in range(ORDERS):
        loop = SeededLoop(seed)
        loop.jump_limit = 5_000
        with asyncio.Runner(loop_factory=lambda loop=loop: loop) as runner:  # type: ignore[misc]
            assert runner.run(asyncio.wait_for(_time_out_as_a_message_comes(loop), 300)) == {"slow", "next"}, seed


async def _time_out_as_a_message_comes(loop: SeededLoop) -> set[str]:
    clock = VirtualClock(loop)
    scheduler, seen = Scheduler(MemoryStore(clock=clock), clock=clock), set[str]()

    @scheduler.handler(name="work", timeout="1s", concurrency=1, retry=Retry(attempts=2, first="1h"))
    async def work(payload: bytes) -> None:
        is_again = payload.decode() in seen
        seen.add(payload.decode())
        if payload == b"slow" and not is_again:
            await asyncio.sleep(60)

    async with scheduler:
        await scheduler.schedule(b"slow", to="handler:work", delay="0s")
        await scheduler.schedule(b"next", to="handler:work", delay=timedelta(seconds=1))
        await asyncio.sleep(40)
    return seen
