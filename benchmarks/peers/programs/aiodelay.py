"""aiodelay. Its best settings: `concurrency` of three claims, as in BP1 (docs/performance.md)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from aiodelay import Message, Scheduler

from .shared import HANDLER_S, IS_BEST, URL, Asked, began, ended, main


@dataclass(frozen=True, slots=True)
class Order:
    number: int
    text: str


async def handle(event: Order) -> None:
    began(event.number)
    if HANDLER_S:
        await asyncio.sleep(HANDLER_S)
        ended(event.number)


def schedule(asked: list[Asked]) -> None:
    async def schedule_all() -> None:
        async with Scheduler(URL, dispatch=False) as scheduler:
            await scheduler.schedule_many(Message(Order(each.number, each.text), at=each.due) for each in asked)

    asyncio.run(schedule_all())


def work() -> None:
    scheduler = Scheduler(URL)
    options: dict[str, Any] = {"concurrency": 1_500} if IS_BEST else {}
    scheduler.add_handler(handle, **options)
    asyncio.run(scheduler.run())


if __name__ == "__main__":
    main(schedule, work)
