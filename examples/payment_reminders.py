"""Remind customers who have not paid, then give up their orders: what a shop does with three days, in three seconds.

Run it: python examples/payment_reminders.py

It shows typed events, an id of one's own to cancel by, retries, a rejected message, and a handler that schedules the
next step. Messages are kept in a SQLite file: kill it at any point, start it again with the same file name as an
argument, and what was scheduled is delivered.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from aiodelay import Context, Reject, Retry, Scheduler, event

DAY = timedelta(seconds=0.5)  # so that nobody has to wait

ADDRESSES = {1: "ann@example.com", 2: "bob@example.com", 3: "cyd@example.com", 4: ""}


@event("payment.remind")  # the name that is stored: the class may be renamed, the module moved
@dataclass
class RemindOfPayment:
    order: int


@event("order.give-up")
@dataclass
class GiveUpOrder:
    order: int


class MailServerError(Exception):
    """The mail server did not take it; it may the next time."""


async def send_mail(address: str, text: str, attempt: int) -> None:
    """Stand in for a mail server that is away for the first attempt at anything."""
    await asyncio.sleep(0.01)
    if attempt == 1:
        raise MailServerError("the mail server is away")
    print(f"to {address}: {text} (attempt {attempt})")


async def remind(event: RemindOfPayment, context: Context) -> Reject | None:
    address = ADDRESSES[event.order]
    if not address:
        return Reject("the customer has no address")  # no retry will change that: a dead letter
    await send_mail(address, f"please pay order {event.order}", context.attempt)
    # Delivered at least once: should this run twice, the same id makes it one message all the same.
    await context.scheduler.schedule(GiveUpOrder(event.order), delay=2 * DAY, id=f"give-up-{event.order}")
    return None


async def give_up(event: GiveUpOrder) -> None:
    print(f"order {event.order} is given up")


async def place_order(scheduler: Scheduler, order: int) -> None:
    await scheduler.schedule(RemindOfPayment(order), delay=3 * DAY, id=f"remind-{order}")
    print(f"order {order} is placed")


async def pay(scheduler: Scheduler, order: int) -> None:
    reminder = await scheduler.cancel(f"remind-{order}")
    end = await scheduler.cancel(f"give-up-{order}")
    print(f"order {order} is paid (its reminder: {reminder}, its end: {end})")


async def main(file: Path) -> None:
    scheduler = Scheduler(f"sqlite:///{file}")
    scheduler.add_handler(remind, retry=Retry(attempts=5, first="100ms", cap="1s"), timeout="5s")
    scheduler.add_handler(give_up)
    async with scheduler:
        for order in ADDRESSES:
            await place_order(scheduler, order)
        await asyncio.sleep(DAY.total_seconds())
        await pay(scheduler, 2)  # in time: no reminder
        await asyncio.sleep(3 * DAY.total_seconds())
        await pay(scheduler, 3)  # after the reminder
        await scheduler.run_until_idle()
        async for letter in scheduler.dead_letters(RemindOfPayment):
            print(f"{letter.record.id} was {letter.reason}: {letter.record.last_error}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else f"{folder}/shop.db")))
