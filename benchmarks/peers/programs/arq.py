"""arq. Its settings: https://arq-docs.helpmanual.io/#arq.worker.Worker

A worker polls every `poll_delay`. After a kill, a job runs again when its mark "in progress" expires, 10 s after
`job_timeout`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker

from .shared import HANDLER_S, IS_BEST, URL, Asked, began, ended, main

AT_ONCE = 100
BEST: dict[str, Any] = {"max_jobs": 1_000, "poll_delay": 0.01, "keep_result": 0, "job_timeout": 5}


async def handle(_: dict[str, Any], number: int, text: str) -> None:
    began(number)
    if HANDLER_S:
        await asyncio.sleep(HANDLER_S)
        ended(number)


def schedule(asked: list[Asked]) -> None:
    async def schedule_all() -> None:
        pool = await create_pool(RedisSettings.from_dsn(URL))
        for at in range(0, len(asked), AT_ONCE):
            await asyncio.gather(
                *(
                    pool.enqueue_job("handle", each.number, each.text, _defer_until=each.due)
                    for each in asked[at : at + AT_ONCE]
                )
            )
        await pool.aclose()

    asyncio.run(schedule_all())


def work() -> None:
    asyncio.set_event_loop(asyncio.new_event_loop())
    Worker([handle], redis_settings=RedisSettings.from_dsn(URL), **(BEST if IS_BEST else {})).run()


if __name__ == "__main__":
    main(schedule, work)
