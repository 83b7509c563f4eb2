"""Recurring messages: one series by an interval, and one by a cron rule with a time zone.

Run it: python examples/recurring.py

A series is one record in the store. Any number of processes may serve it, and they are all equal. The series survives
a restart of all processes. In this example, the series ends because the program cancels it.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

from aiodelay import Context, Cron, Every, Scheduler
from aiodelay.recurrence import describe, upcoming

PARIS = "Europe/Paris"
TIMES = 3


@dataclass
class Beat:
    """An event without fields: the series that belongs to a handler creates its event without arguments."""


@dataclass
class WeeklyReport:
    team: str


async def main(file: Path) -> None:
    scheduler = Scheduler(f"sqlite:///{file}")
    beaten = asyncio.Semaphore(0)

    @scheduler.handler(every=Every("500ms", missed="coalesce"))  # recurs while a process serves this handler
    async def beat(event: Beat, context: Context) -> None:
        print(f"beat, due {context.due:%H:%M:%S.%f}, {context.lateness.total_seconds() * 1000:.0f} ms late")
        beaten.release()

    @scheduler.handler
    async def report(event: WeeklyReport) -> None:
        print(f"the week of {event.team}")

    async with scheduler:
        # The store keeps the wall time and the zone: 9:00 stays 9:00 in summer and in winter.
        rule = Cron("0 9 * * mon", tz=PARIS, overlap="skip")
        scheduled = await scheduler.schedule(WeeklyReport("sales"), every=rule, id="weekly-sales")
        print(f"{describe(rule)}:")
        for due_ms in upcoming(rule, scheduled.due_ms - 1, TIMES):
            print(f"  {datetime.fromtimestamp(due_ms / 1000, ZoneInfo(PARIS)):%a %d %b %Y, %H:%M %Z}")
        for _ in range(TIMES):
            await beaten.acquire()
        print("beat:", await scheduler.cancel("handler:Beat"))
        print("weekly-sales:", await scheduler.cancel("weekly-sales"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder, "recurring.db")))
