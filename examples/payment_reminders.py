"""Remind customers who have not paid, then give up their orders. Five days of a shop pass in four seconds.

Run it: python examples/payment_reminders.py redis://localhost

The example shows typed events, handlers with limited concurrency, retries, a rejected message, cancelling by id, and
context variables that travel with a message. Kill the program at any point and start it again: scheduled messages are
still delivered. Without Redis: `python examples/payment_reminders.py sqlite:///shop.db`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta

from msgspec.structs import replace

from aiodelay import Context, Message, Reject, Retry, Scheduled, Scheduler, event

DAY = timedelta(seconds=0.8)  # a short day, so that the example ends soon

CUSTOMERS = {1: "ann@example.com", 2: "bob@example.com", 3: "cyd@example.com", 4: ""}
TEXTS = {"en": "please pay order", "fr": "veuillez payer la commande"}

language: ContextVar[str] = ContextVar("language", default="en")


@event("payment.remind")  # the store keeps this name, so you can rename the class and move it to another module
@dataclass
class RemindOfPayment:
    order: int


@event("order.give-up")
@dataclass
class GiveUpOrder:
    order: int


class MailServerError(Exception):
    """The mail server did not take the mail. A later attempt may succeed."""


async def send_mail(address: str, text: str, attempt: int) -> None:
    """Play a mail server that is down at the first attempt of each mail."""
    await asyncio.sleep(0.01)
    if attempt == 1:
        raise MailServerError("the mail server is away")
    print(f"to {address}: {text} (attempt {attempt})")


# --- what happens when a message is due ---------------------------------------------------------------------


async def remind(event: RemindOfPayment, context: Context) -> Reject | None:
    address = CUSTOMERS[event.order]
    if not address:
        return Reject("the customer has no address")  # a retry cannot help: the message becomes a dead letter
    await send_mail(address, f"{TEXTS[language.get()]} {event.order}", context.attempt)
    # Delivery is at least once, so this handler may run twice. The same id makes both schedules one message.
    await context.scheduler.schedule(GiveUpOrder(event.order), delay=2 * DAY, id=f"give-up-{event.order}")
    return None


async def give_up(event: GiveUpOrder) -> None:
    print(f"order {event.order} is given up")


# --- the language of the customer travels with the messages of an order ---------------------------------------


async def send_language(message: Message, call_next: Callable[[Message], Awaitable[Scheduled]]) -> Scheduled:
    headers = {**message.headers, "language": language.get().encode()}
    return await call_next(replace(message, headers=headers))


async def set_language(context: Context, call_next: Callable[[Context], Awaitable[object]]) -> object:
    language.set(context.headers["language"].decode())
    return await call_next(context)


# --- the shop -----------------------------------------------------------------------------------------------


async def place_order(scheduler: Scheduler, order: int) -> None:
    await scheduler.schedule(RemindOfPayment(order), delay=3 * DAY, id=f"remind-{order}")
    print(f"order {order} is placed")


async def pay(scheduler: Scheduler, order: int) -> None:
    reminder = await scheduler.cancel(f"remind-{order}")
    end = await scheduler.cancel(f"give-up-{order}")
    print(f"order {order} is paid (its reminder: {reminder}, its end: {end})")


async def main(url: str) -> None:
    scheduler = Scheduler(url, namespace="payment-reminders")
    scheduler.middleware("schedule")(send_language)
    scheduler.middleware("handle")(set_language)
    # At most two mails at once. Other due messages wait in the store, where other processes can take them.
    scheduler.add_handler(remind, concurrency=2, retry=Retry(attempts=5, first="100ms", cap="1s"), timeout="5s")
    scheduler.add_handler(give_up)
    async with scheduler:
        for order in CUSTOMERS:
            language.set("fr" if order == 3 else "en")
            await place_order(scheduler, order)
        print("waiting:", (await scheduler.counts())["payment.remind"].scheduled)
        await asyncio.sleep(DAY.total_seconds())
        await pay(scheduler, 2)  # in time: no reminder
        while await scheduler.get("remind-3"):  # noqa: ASYNC110 - only the store knows
            await asyncio.sleep(0.05)
        await pay(scheduler, 3)  # after the reminder
        await scheduler.run_until_idle()
        async for letter in scheduler.dead_letters(RemindOfPayment):
            print(f"{letter.record.id} was {letter.reason}: {letter.record.last_error}")
            await scheduler.purge(letter)


if __name__ == "__main__":
    asyncio.run(main(*(sys.argv[1:] or ["redis://localhost"])))
