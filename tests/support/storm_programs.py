"""Small programs that storms must find a fault in, each with its mend.

Each program is a test for `storm`. It makes its handlers, schedules messages, and returns the state that must not
depend on faults of the process, the network or the clock. With `mended=True`, the program has no fault.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from aiodelay import AiodelayError, Context, Later, OutcomeUnknownError, Retry, Scheduler
from aiodelay.testing import VirtualClock

__all__ = ["PROGRAMS", "Program"]

Program: TypeAlias = Callable[..., Awaitable[object]]
PROGRAMS: list[Program] = []


@dataclass
class Order:
    n: int


@dataclass
class Mail:
    n: int


def planted(program: Program) -> Program:
    PROGRAMS.append(program)
    return program


async def deliver(scheduler: Scheduler, n: int = 5) -> None:
    """Schedule orders, one for each second, and wait until everything has been handled."""
    async with scheduler:
        await deliver_orders(scheduler, n)


async def deliver_orders(scheduler: Scheduler, n: int = 5) -> None:
    for i in range(n):
        await scheduler.schedule(Order(i), delay=timedelta(seconds=i + 1), id=f"order-{i}")
    await scheduler.run_until_idle()


async def deliver_with_reminders(scheduler: Scheduler) -> None:
    """Schedule orders, and a mail for each order that is due long after it."""
    async with scheduler:
        for i in range(5):
            await scheduler.schedule(Mail(i), delay="3h", id=f"mail-{i}")
        await deliver_orders(scheduler)


# --- repeated deliveries ----------------------------------------------------------------------------------


@planted
async def adds_to_a_balance(scheduler: Scheduler, *, mended: bool) -> object:
    balance, booked = 0, set[str]()

    @scheduler.handler
    async def book(event: Order, context: Context) -> None:
        nonlocal balance
        if not mended or context.delivery_id not in booked:
            balance += 10
            booked.add(context.delivery_id)

    await deliver(scheduler)
    return balance


@planted
async def mails_twice(scheduler: Scheduler, *, mended: bool) -> object:
    mails: list[int] = []

    @scheduler.handler
    async def mail(event: Order) -> None:
        if not mended or event.n not in mails:
            mails.append(event.n)

    await deliver(scheduler)
    return sorted(mails)


@planted
async def draws_a_new_number(scheduler: Scheduler, *, mended: bool) -> object:
    numbers: dict[int, int] = {}
    last = 0

    @scheduler.handler
    async def number(event: Order) -> None:
        nonlocal last
        if not mended or event.n not in numbers:
            last += 1
            numbers[event.n] = last

    await deliver(scheduler)
    return max(numbers.values())


@planted
async def takes_another_ticket(scheduler: Scheduler, *, mended: bool) -> object:
    tickets, owners = list(range(10)), dict[int, int]()

    @scheduler.handler
    async def assign(event: Order) -> None:
        if not mended or event.n not in owners:
            owners[event.n] = tickets.pop()

    await deliver(scheduler)
    return len(tickets)


@planted
async def toggles(scheduler: Scheduler, *, mended: bool) -> object:
    lights: dict[int, bool] = {}

    @scheduler.handler
    async def switch(event: Order) -> None:
        lights[event.n] = True if mended else not lights.get(event.n, False)

    await deliver(scheduler)
    return sorted(lights.items())


@planted
async def refuses_what_it_knows(scheduler: Scheduler, *, mended: bool) -> object:
    paid: set[int] = set()

    @scheduler.handler(retry=Retry.never())
    async def pay(event: Order) -> None:
        if event.n in paid and not mended:
            raise ValueError(f"order {event.n} is paid already")
        paid.add(event.n)

    await deliver(scheduler)
    return sorted(paid)


@planted
async def believes_that_attempt_one_runs_once(scheduler: Scheduler, *, mended: bool) -> object:
    mails: list[int] = []

    @scheduler.handler
    async def mail(event: Order, context: Context) -> None:
        if context.attempt == 1 if not mended else event.n not in mails:
            mails.append(event.n)

    await deliver(scheduler)
    return sorted(mails)


@planted
async def adds_to_a_balance_what_it_pulls(scheduler: Scheduler, *, mended: bool) -> object:
    balance, booked = 0, set[str]()

    async def book() -> None:
        nonlocal balance
        async for message in scheduler.messages(Order, concurrency=2):
            with message:
                if not mended or message.context.delivery_id not in booked:
                    balance += 10
                    booked.add(message.context.delivery_id)

    async with scheduler, asyncio.TaskGroup() as group:
        booking = group.create_task(book())
        await asyncio.sleep(0.1)  # the lane is served from here on, so it is waited for
        await deliver_orders(scheduler)
        booking.cancel()
    return balance


@planted
async def mails_a_batch_twice(scheduler: Scheduler, *, mended: bool) -> object:
    mails: list[int] = []

    @scheduler.handler(batch=3, batch_wait="2s")
    async def mail(events: list[Order]) -> None:
        mails.extend([event.n for event in events if not mended or event.n not in mails])

    await deliver(scheduler)
    return sorted(mails)


# --- a process that ends half-way -------------------------------------------------------------------------


@planted
async def marks_before_it_acts(scheduler: Scheduler, *, mended: bool) -> object:
    marked, mails = set[int](), set[int]()

    @scheduler.handler
    async def mail(event: Order) -> None:
        if event.n in marked:
            return
        if not mended:
            marked.add(event.n)
        await asyncio.sleep(0.1)  # the mail server
        mails.add(event.n)
        marked.add(event.n)

    await deliver(scheduler)
    return sorted(mails)


@planted
async def debits_and_credits_in_two_steps(scheduler: Scheduler, *, mended: bool) -> object:
    debited, credited = Counter[int](), Counter[int]()

    @scheduler.handler
    async def transfer(event: Order) -> None:
        debited[event.n] = 1 if mended else debited[event.n] + 1
        await asyncio.sleep(0.1)
        credited[event.n] = 1

    await deliver(scheduler)
    return debited.total() - credited.total()


@planted
async def leaves_itself_busy(scheduler: Scheduler, *, mended: bool) -> object:
    busy, done = set[int](), set[int]()

    @scheduler.handler
    async def work(event: Order) -> Later | None:
        if event.n in busy:
            return Later("1s") if mended else None  # the run that is busy may fail
        busy.add(event.n)
        try:
            await asyncio.sleep(0.1)
            done.add(event.n)
        finally:
            if mended or event.n in done:
                busy.discard(event.n)
        return None

    await deliver(scheduler)
    return sorted(done)


# --- messages that handlers schedule ----------------------------------------------------------------------


@planted
async def follows_up_without_an_id(scheduler: Scheduler, *, mended: bool) -> object:
    mails: list[int] = []

    @scheduler.handler
    async def order(event: Order, context: Context) -> None:
        await context.scheduler.schedule(Mail(event.n), delay="1s", id=f"mail-{event.n}" if mended else None)

    @scheduler.handler
    async def mail(event: Mail, context: Context) -> None:
        if context.id not in sent:
            sent.add(context.id)
            mails.append(event.n)

    sent: set[str] = set()
    await deliver(scheduler)
    return sorted(mails)


@planted
async def forgets_an_unknown_outcome(scheduler: Scheduler, *, mended: bool) -> object:
    mails: set[int] = set()

    @scheduler.handler
    async def order(event: Order, context: Context) -> None:
        try:
            await context.scheduler.schedule(Mail(event.n), delay="1s", id=f"mail-{event.n}")
        except OutcomeUnknownError:
            if mended:
                raise

    @scheduler.handler
    async def mail(event: Mail) -> None:
        mails.add(event.n)

    await deliver(scheduler)
    return sorted(mails)


@planted
async def takes_an_unknown_outcome_for_a_failure(scheduler: Scheduler, *, mended: bool) -> object:
    mails: list[str] = []

    @scheduler.handler
    async def order(event: Order, context: Context) -> None:
        try:
            await context.scheduler.schedule(Mail(event.n), delay="1s", id=f"mail-{event.n}")
        except OutcomeUnknownError as error:
            if not mended:
                await context.scheduler.schedule(Mail(event.n), delay="1s", id=f"again-{event.n}")
            else:
                await error.retry()

    @scheduler.handler
    async def mail(event: Mail, context: Context) -> None:
        if context.id not in mails:
            mails.append(context.id)

    await deliver(scheduler)
    return len(mails)


@planted
async def takes_an_unknown_cancel_for_success(scheduler: Scheduler, *, mended: bool) -> object:
    reminded: set[int] = set()

    @scheduler.handler
    async def remind(event: Mail) -> None:
        reminded.add(event.n)

    @scheduler.handler
    async def pay(event: Order, context: Context) -> None:
        try:
            await context.scheduler.cancel(f"mail-{event.n}")
        except OutcomeUnknownError:
            if mended:
                raise

    await deliver_with_reminders(scheduler)
    return sorted(reminded)


@planted
async def takes_an_unknown_reschedule_for_success(scheduler: Scheduler, clock: VirtualClock, *, mended: bool) -> object:
    soon: dict[int, bool] = {}
    at = clock.now() + timedelta(minutes=1)

    @scheduler.handler
    async def remind(event: Mail, context: Context) -> None:
        soon[event.n] = context.due == at

    @scheduler.handler
    async def hurry(event: Order, context: Context) -> None:
        try:
            await context.scheduler.reschedule(f"mail-{event.n}", at=at)
        except OutcomeUnknownError as error:
            if mended:
                await error.retry()

    await deliver_with_reminders(scheduler)
    return sorted(soon.items())


@planted
async def hides_an_unknown_outcome_from_its_caller(scheduler: Scheduler, *, mended: bool) -> object:
    mails: set[int] = set()

    @scheduler.handler
    async def mail(event: Mail) -> None:
        mails.add(event.n)

    async def place(n: int) -> None:
        while True:
            try:
                await scheduler.schedule(Mail(n), delay="1s", id=f"mail-{n}")
            except AiodelayError:
                if mended:
                    continue
            return

    async with scheduler:
        for n in range(5):
            await place(n)
        await scheduler.run_until_idle()
    return sorted(mails)


# --- order and concurrency --------------------------------------------------------------------------------


@planted
async def lets_the_last_event_win(scheduler: Scheduler, *, mended: bool) -> object:
    newest = -1

    @scheduler.handler
    async def note(event: Order) -> None:
        nonlocal newest
        newest = max(newest, event.n) if mended else event.n

    await deliver(scheduler)
    return newest


@planted
async def reports_at_the_last_event(scheduler: Scheduler, *, mended: bool) -> object:
    seen, report = set[int](), list[int]()

    @scheduler.handler
    async def note(event: Order) -> None:
        seen.add(event.n)
        if len(seen) == 5 if mended else event.n == 4:
            report[:] = sorted(seen)

    await deliver(scheduler)
    return report


@planted
async def reads_and_writes_across_an_await(scheduler: Scheduler, *, mended: bool) -> object:
    stock, sold, lock = 10, set[int](), asyncio.Lock()

    async def sell(n: int) -> None:
        nonlocal stock
        left = stock
        await asyncio.sleep(0.2)  # the database
        if n not in sold:
            sold.add(n)
            stock = left - 1

    @scheduler.handler
    async def order(event: Order) -> None:
        if not mended:
            await sell(event.n)
        else:
            async with lock:
                await sell(event.n)

    await deliver(scheduler)
    return stock


# --- time -------------------------------------------------------------------------------------------------


@planted
async def measures_with_the_wall_clock(scheduler: Scheduler, clock: VirtualClock, *, mended: bool) -> object:
    fees: dict[int, int] = {}
    begun = clock.now()

    @scheduler.handler
    async def charge(event: Order, context: Context) -> None:
        used = (context.due if mended else clock.now()) - begun
        fees[event.n] = round(used.total_seconds())

    await deliver(scheduler)
    return sorted(fees.items())


@planted
async def expects_to_be_on_time(scheduler: Scheduler, *, mended: bool) -> object:
    states: dict[int, str] = {}

    @scheduler.handler
    async def close_auction(event: Order, context: Context) -> None:
        is_over = context.lateness < timedelta(seconds=5)
        states[event.n] = "sold" if mended or is_over else "expired"

    await deliver(scheduler)
    return sorted(states.items())


@planted
async def reminds_after_the_meeting(scheduler: Scheduler, clock: VirtualClock, *, mended: bool) -> object:
    too_late: list[int] = []

    @scheduler.handler
    async def remind(event: Order, context: Context) -> None:
        meeting = context.due + timedelta(minutes=1)
        if clock.now() > meeting and not mended:
            too_late.append(event.n)

    await deliver(scheduler)
    return too_late
