"""Dramatiq with Redis as its broker. Its settings: https://dramatiq.io/reference.html

A worker fetches delayed messages, keeps them in memory, and sends them to the queue when they are due. An idle worker
wakes up every `dramatiq_worker_timeout`. After a kill, a message runs again when another worker does maintenance
(`maintenance_chance` of a million commands do) and the killed worker's last heartbeat is `heartbeat_timeout` ago.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from .shared import HANDLER_S, IS_BEST, MODULE, URL, Asked, began, ended, main

BEST: dict[str, Any] = {"heartbeat_timeout": 5_000, "maintenance_chance": 100_000}
VARIABLES = {"dramatiq_queue_prefetch": "1000", "dramatiq_worker_timeout": "10"}


def handle(number: int, text: str) -> None:
    began(number)
    if HANDLER_S:
        time.sleep(HANDLER_S)
        ended(number)


dramatiq.set_broker(RedisBroker(url=URL, **(BEST if IS_BEST else {})))
actor = dramatiq.actor(handle)


def schedule(asked: list[Asked]) -> None:
    for each in asked:
        actor.send_with_options(args=(each.number, each.text), delay=each.delay_ms)


def work() -> None:
    os.environ |= VARIABLES if IS_BEST else {}
    os.execv(sys.executable, [sys.executable, "-m", "dramatiq", f"{MODULE}dramatiq"])


if __name__ == "__main__":
    main(schedule, work)
