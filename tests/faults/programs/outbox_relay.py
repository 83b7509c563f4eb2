"""The relay of examples/outbox.py, which ends at a given step as by `kill -9`.

Started with the URLs of a database and a store, and the step.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterable, Iterable
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import create_async_engine

from aiodelay import Message, Scheduler
from examples.outbox import move_rows

__all__ = ["STEPS"]

STEPS = ("read", "scheduled", "deleted", "committed")


class MortalScheduler(Scheduler):
    async def schedule_many(self, messages: Iterable[Message] | AsyncIterable[Message], **options: Any) -> int:  # noqa: ANN401 - whatever the relay gives
        reach("read")
        return await super().schedule_many(messages, **options)


def reach(step: str) -> None:
    if step == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)


async def main(database_url: str, store_url: str) -> None:
    database = create_async_engine(database_url)

    @event.listens_for(database.sync_engine, "before_cursor_execute")
    def before(connection: Connection, cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("DELETE FROM outbox"):
            reach("scheduled")

    @event.listens_for(database.sync_engine, "after_cursor_execute")
    def after(connection: Connection, cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("DELETE FROM outbox"):
            reach("deleted")

    async with MortalScheduler(store_url, dispatch=False) as scheduler:
        await move_rows(database, scheduler)
    reach("committed")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
