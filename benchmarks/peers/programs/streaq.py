"""streaQ. Its settings: https://streaq.readthedocs.io/en/latest/worker.html (options, performance)

A worker moves due tasks to a stream every 0.5 s; no option changes this. After a kill, a task runs again when it has
been idle for `idle_timeout`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import coredis
from streaq import Worker

from .shared import HANDLER_S, IS_BEST, URL, Asked, began, ended, main

AT_ONCE = 1_000
BEST: dict[str, Any] = {"concurrency": 1_000, "idle_timeout": 5, "anyio_kwargs": {"use_uvloop": True}}


async def handle(number: int, text: str) -> None:
    began(number)
    if HANDLER_S:
        await asyncio.sleep(HANDLER_S)
        ended(number)


coredis.Config.optimized = IS_BEST
worker = Worker(URL, **(BEST if IS_BEST else {}))
task = worker.task(**({"ttl": 0} if IS_BEST else {}))(handle)


def schedule(asked: list[Asked]) -> None:
    async def schedule_all() -> None:
        async with worker:
            for at in range(0, len(asked), AT_ONCE):
                await worker.enqueue_many(
                    [task.enqueue(each.number, each.text).start(schedule=each.due) for each in asked[at : at + AT_ONCE]]
                )

    asyncio.run(schedule_all())


def work() -> None:
    worker.run_sync()


if __name__ == "__main__":
    main(schedule, work)
