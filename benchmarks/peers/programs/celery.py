"""Celery with Redis as its broker. Its settings: https://docs.celeryq.dev/en/stable/userguide/optimizing.html

A worker fetches each task with an ETA at once, and keeps it in memory until it is due. After a kill, a task runs again
after the visibility timeout, 1 h. The documentation advises against less than the longest delay:
https://docs.celeryq.dev/en/stable/getting-started/backends-and-brokers/redis.html#caveats
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from celery import Celery

from .shared import HANDLER_S, IS_BEST, MODULE, URL, Asked, began, ended, main

BEST: dict[str, Any] = {
    "worker_prefetch_multiplier": 128,
    "task_acks_late": True,
    "task_reject_on_worker_lost": True,
    "task_ignore_result": True,
}


def handle(number: int, text: str) -> None:
    began(number)
    if HANDLER_S:
        time.sleep(HANDLER_S)
        ended(number)


app = Celery("peers", broker=URL)
app.conf.update(BEST if IS_BEST else {})
task = app.task(name="handle")(handle)


def schedule(asked: list[Asked]) -> None:
    with app.producer_pool.acquire(block=True) as producer:
        for each in asked:
            task.apply_async((each.number, each.text), eta=each.due, producer=producer)


def work() -> None:
    os.execv(sys.executable, [sys.executable, "-m", "celery", "-A", f"{MODULE}celery", "worker"])


if __name__ == "__main__":
    main(schedule, work)
