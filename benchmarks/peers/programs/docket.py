"""docket (pydocket). Its settings: https://docket.lol/en/latest/production/#worker-configuration

A worker moves due tasks to a stream every `scheduling_resolution`. After a kill, a task runs again when it has been in
the stream's pending list for `redelivery_timeout`. Each running task needs a connection, so the pool must be larger
than `concurrency`.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

from docket import Docket, Worker

from .shared import HANDLER_S, IS_BEST, URL, Asked, began, ended, main

CONCURRENCY = 100
POLL = timedelta(milliseconds=10)
BEST: dict[str, Any] = {
    "concurrency": CONCURRENCY,
    "minimum_check_interval": POLL,
    "scheduling_resolution": POLL,
    "redelivery_timeout": timedelta(seconds=5),
}


async def handle(number: int, text: str) -> None:
    began(number)
    if HANDLER_S:
        await asyncio.sleep(HANDLER_S)
        ended(number)


def opened() -> Docket:
    if IS_BEST:
        docket = Docket("peers", f"{URL}?max_connections={2 * CONCURRENCY}", execution_ttl=timedelta(0))
    else:
        docket = Docket("peers", URL)
    docket.register(handle)
    return docket


def schedule(asked: list[Asked]) -> None:
    async def schedule_all() -> None:
        async with opened() as docket:
            await docket.add_many(docket.call(handle, when=each.due)(each.number, each.text) for each in asked)

    asyncio.run(schedule_all())


def work() -> None:
    async def run() -> None:
        async with opened() as docket, Worker(docket, **(BEST if IS_BEST else {})) as worker:
            await worker.run_forever()

    asyncio.run(run())


if __name__ == "__main__":
    main(schedule, work)
