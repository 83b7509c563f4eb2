"""A process that gives commands on a Kafka store, each id by itself, and writes its history.

It says `ready` when its scheduler is open, and ends when its time is over. The payload of version 1 of `m` is `m/1`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time

import msgspec

from aiodelay import Scheduler
from aiodelay.backends.kafka.topics import topic as topics
from aiodelay.testing import history as h
from tests.support.producing import Producer

__all__ = ["AFTER_MS", "FAR_MS", "Plan"]

SOON_MS, FAR_MS = 4_000, 40_000
"""The longest time from a command to the due time of most messages, and of the others.

A checker can judge a change only if the message is due long after it, compared with the longest fault.
"""
AFTER_MS = 3_000
"""The longest time from the end of the commands to a due time, so that a short run need not wait for long."""
DOWN_MS = 8_000
"""More than 20 attempts with a pause of 200 ms take, so a message whose destination is down becomes a dead letter."""
BULK = 50


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What it does.

    Attributes:
        store: The store's URL.
        target: The topic of most messages. The others go to the handler `work`.
        seconds: The time for which commands are given.
        rate: New ids per second.
    """

    name: str
    store: str
    history: str
    target: str
    seconds: float
    rate: int
    seed: int


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def give(producer: Producer, plan: Plan, rng: random.Random, message_id: str, last_ms: int) -> None:
    """Schedule, replace and perhaps cancel the message of one id. No due time is later than `last_ms`."""
    now = now_ms()
    if rng.random() < 0.005:
        payloads = {f"{message_id}-{i}": f"{message_id}-{i}/0".encode() for i in range(BULK)}
        await producer.schedule_many(payloads, at_ms=now + rng.randrange(SOON_MS))
        return
    if rng.random() < 0.02:
        await producer.schedule(message_id, f"{message_id}/down:{min(now + DOWN_MS, last_ms)}".encode(), at_ms=now)
        return
    to = f"kafka:{plan.target}" if rng.random() < 0.7 else None
    is_far = rng.random() < 0.2
    for version in range(rng.choice((1, 1, 2, 3))):
        due_ms = min(now_ms() + (FAR_MS if is_far else rng.randrange(SOON_MS)), last_ms)
        await producer.schedule(message_id, f"{message_id}/{version}".encode(), at_ms=due_ms, to=to)
        await asyncio.sleep(rng.uniform(0, 1.5))  # a user's pause before the next command
    if rng.random() < (0.7 if is_far else 0.2):
        await producer.cancel(message_id)


async def main(plan: Plan) -> None:
    logging.basicConfig(level=logging.WARNING)
    topics.check = lambda topic, cluster: None  # also one that is cleaned sooner than is allowed
    history = h.History(plan.history, plan.name)
    rng = random.Random(f"{plan.seed} {plan.name}")
    loop = asyncio.get_running_loop()
    async with Scheduler(plan.store, dispatch=False, open_timeout="2m") as scheduler, asyncio.TaskGroup() as tasks:
        print("ready", flush=True)
        producer = Producer(scheduler, history)
        ends, last_ms, number = loop.time() + plan.seconds, now_ms() + round(plan.seconds * 1_000) + AFTER_MS, 0
        while loop.time() < ends:
            number += 1
            tasks.create_task(give(producer, plan, rng, f"{plan.name}-{number}", last_ms))
            await asyncio.sleep(rng.expovariate(plan.rate))
    history.close()


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Plan)))
