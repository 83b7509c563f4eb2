"""taskiq with taskiq-redis. Its settings: https://taskiq-python.github.io/guide/cli.html and the README of taskiq-redis

The broker is the one with acknowledgements (`RedisStreamBroker`), the source of schedules is the recommended one
(`ListRedisScheduleSource`). A scheduler, a process beside the workers, sends due tasks once a second, and reads new
schedules once every `--update-interval`. After a kill, a task runs again when it has been idle for `idle_timeout` and
a worker has received a new task.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

from taskiq import TaskiqScheduler
from taskiq_redis import ListRedisScheduleSource, RedisStreamBroker

from .shared import HANDLER_S, IS_BEST, MODULE, URL, Asked, began, ended, main

AT_ONCE = 100
SOURCE: dict[str, Any] = {"buffer_size": 1_000, "max_connection_pool_size": 100}
BROKER: dict[str, Any] = {
    "idle_timeout": 5_000,
    "unacknowledged_lock_timeout": 5.0,
    "xread_count": 1_000,
    "max_connection_pool_size": 100,
}
WORKER = ("--max-async-tasks", "1000", "--max-prefetch", "1000", "--log-level", "WARNING")
SCHEDULER = ("--update-interval", "1", "--log-level", "WARNING")


async def handle(number: int, text: str) -> None:
    began(number)
    if HANDLER_S:
        await asyncio.sleep(HANDLER_S)
        ended(number)


broker = RedisStreamBroker(URL, **(BROKER if IS_BEST else {}))
source = ListRedisScheduleSource(URL, **(SOURCE if IS_BEST else {}))
scheduler = TaskiqScheduler(broker, [source])
task = broker.task("handle")(handle)


def schedule(asked: list[Asked]) -> None:
    async def schedule_all() -> None:
        await source.startup()
        for at in range(0, len(asked), AT_ONCE):
            await asyncio.gather(
                *(task.schedule_by_time(source, each.due, each.number, each.text) for each in asked[at : at + AT_ONCE])
            )
        await source.shutdown()

    asyncio.run(schedule_all())


def work() -> None:
    module = f"{MODULE}taskiq"
    taskiq = [sys.executable, "-m", "taskiq"]
    subprocess.Popen([*taskiq, "scheduler", f"{module}:scheduler", *(SCHEDULER if IS_BEST else ())])
    os.execv(taskiq[0], [*taskiq, "worker", f"{module}:broker", *(WORKER if IS_BEST else ())])


if __name__ == "__main__":
    main(schedule, work)
