"""The demo's traffic: a small shop. Some of its messages are cancelled or replaced, and some fail or are given up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Self

import anyio
from anyio.abc import TaskGroup

from aiodelay import (
    AiodelayError,
    CancelOutcome,
    Context,
    DeadLetter,
    Every,
    Message,
    Retry,
    Scheduled,
    ScheduleOutcome,
    Scheduler,
)
from aiodelay.core.durations import from_epoch_ms
from aiodelay.core.values import Delivery, Demand, SendOutcome, Sent
from aiodelay.ports import Registry

from .report import Attempt, Report

__all__ = ["ChargeCard", "LogSink", "SendReceipt", "Traffic"]


@dataclass
class CheckPayment:
    """Checks whether an order is paid."""

    order: int


@dataclass
class SendReceipt:
    """Sends a receipt. The mail server does not answer the first two attempts."""

    order: int


@dataclass
class ChargeCard:
    """Charges an expired card: three attempts fail, then the message becomes a dead letter."""

    order: int


@dataclass
class Heartbeat:
    """A recurring message."""


@dataclass
class RenewContract:
    """Renews a contract. Its messages are due in minutes to months."""

    contract: int


@dataclass
class OrderPlaced:
    """A message of a fan-out topic: each consumer gets it. Used only if the store has topics."""

    order: int


@dataclass
class PaymentBooked:
    """An entry of a log, which a consumer reads in order. Used only if the store has logs."""

    order: int


class MailServerAwayError(Exception):
    """The mail server does not answer."""


class CardExpiredError(Exception):
    """The bank refuses."""


RECEIPT_RETRY = Retry.intervals(["250ms", "500ms"], jitter=0)
CARD_RETRY = Retry.intervals(["200ms", "300ms"], jitter=0)
HEARTBEAT = Every("1s")
WORK_S, LOOK_S = 0.01, 0.05
CONTRACTS = 200
FIRST_CONTRACT = timedelta(minutes=2)
CONTRACT_SPANS = (timedelta(hours=1), timedelta(days=1), timedelta(days=30), timedelta(days=90))
CONTRACT_SHARES = (1, 2, 6, 3)
OPENING_ORDERS, OPENING_PACE_S = 12, 0.06
PACE_S = (0.15, 0.45)
DEAD_LETTERS_KEPT = 100


class Traffic:
    """Schedules messages and handles them.

    Args:
        scheduler: The scheduler, not yet open. It gets the handlers.
        report: Reports the events.
    """

    def __init__(self, scheduler: Scheduler, report: Report) -> None:
        self._scheduler, self._report = scheduler, report
        self._given_up: set[str] = set()
        self._new_given_up = asyncio.Event()
        scheduler.add_handler(self._check_payment)
        scheduler.add_handler(self._send_receipt, retry=RECEIPT_RETRY)
        scheduler.add_handler(self._charge_card, retry=CARD_RETRY)
        scheduler.add_handler(self._beat, every=HEARTBEAT)
        scheduler.add_handler(self._renew_contract)
        self._has_topics = isinstance(scheduler.store, Registry)
        if self._has_topics:
            scheduler.add_handler(self._send_invoice, source="redis-fanout:orders?consumer=billing")
            scheduler.add_handler(self._note_payment, source="redis-log:payments?consumer=ledger")

    # --- handlers -----------------------------------------------------------------------------------------

    async def _check_payment(self, event: CheckPayment, context: Context) -> None:
        await asyncio.sleep(WORK_S)
        self._report.delivered(_attempt(event, context))

    async def _send_receipt(self, event: SendReceipt, context: Context) -> None:
        await asyncio.sleep(WORK_S)
        if context.attempt <= 2:
            error = MailServerAwayError("no answer")
            self._failed(_attempt(event, context), RECEIPT_RETRY, error)
            raise error
        self._report.delivered(_attempt(event, context))

    async def _charge_card(self, event: ChargeCard, context: Context) -> None:
        await asyncio.sleep(WORK_S)
        error = CardExpiredError("refused by the bank")
        if context.attempt > len(CARD_RETRY.delays_ms):
            self._given_up.add(context.id)
            self._new_given_up.set()
        else:
            self._failed(_attempt(event, context), CARD_RETRY, error)
        raise error

    async def _beat(self, event: Heartbeat, context: Context) -> None:
        self._report.delivered(_attempt(event, context), f", every {HEARTBEAT.interval}")

    async def _renew_contract(self, event: RenewContract, context: Context) -> None:
        self._report.delivered(_attempt(event, context))

    async def _send_invoice(self, event: OrderPlaced, context: Context) -> None:
        self._report.delivered(_attempt(event, context), ", consumer billing of topic orders")

    async def _note_payment(self, event: PaymentBooked, context: Context) -> None:
        self._report.delivered(_attempt(event, context), ", consumer ledger of log payments")

    def _failed(self, attempt: Attempt, plan: Retry, error: Exception) -> None:
        self._report.retried(attempt, f"{error}, again in {plan.delays_ms[attempt.number - 1]} ms")

    # --- scheduling ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Place orders until cancelled. The events of each order are reported when they happen."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._report_dead_letters)
            with self._reporting_errors("contracts"):
                await self._schedule_contracts()
            for order in count(1):
                with self._reporting_errors(f"order {order}"):
                    await self._place(order, tasks)
                await asyncio.sleep(OPENING_PACE_S if order < OPENING_ORDERS else random.uniform(*PACE_S))

    async def _schedule_contracts(self) -> None:
        """Schedule contracts that are due far ahead, unless the store has some already."""
        if [snapshot async for snapshot in self._scheduler.pending(RenewContract, limit=1)]:
            return
        contracts = (
            Message(RenewContract(n), delay=FIRST_CONTRACT + span * random.betavariate(2, 3))
            for n, span in enumerate(random.choices(CONTRACT_SPANS, CONTRACT_SHARES, k=CONTRACTS))
        )
        stored = await self._scheduler.schedule_many(contracts)
        self._report.scheduled_many(RenewContract.__name__, stored, f"due in the next {CONTRACT_SPANS[-1].days} days")

    async def _place(self, order: int, tasks: TaskGroup) -> None:
        match order % 12:
            case 1:
                await self._schedule(ChargeCard(order), 0.3, 0.6)
            case 2:
                await self._schedule(SendReceipt(order), 0.2, 0.8)
            case 3 | 9:
                tasks.start_soon(self._pay, await self._schedule(CheckPayment(order), 2.5, 3))
            case 4:
                tasks.start_soon(self._postpone, order, await self._schedule(CheckPayment(order), 1.5, 2))
            case 6 if self._has_topics:
                await self._schedule(OrderPlaced(order), 0.3, 1, to="redis-fanout:orders")
            case 8 if self._has_topics:
                await self._schedule(PaymentBooked(order), 0.3, 1, to="redis-log:payments")
            case 5 | 11:
                await self._schedule(f"order {order} placed".encode(), 0.5, 1.5, to="log:audit")
            case _:
                await self._schedule(CheckPayment(order), 0.3, 3)

    async def _schedule(self, event: object, least_s: float, most_s: float, to: str | None = None) -> Scheduled:
        delay = timedelta(seconds=random.uniform(least_s, most_s))
        scheduled = await self._scheduler.schedule(event, delay=delay, to=to)
        self._report.scheduled()
        return scheduled

    async def _pay(self, check: Scheduled) -> None:
        """Cancel a payment check: the customer pays before it is due."""
        await asyncio.sleep(random.uniform(0.4, 1.2))
        with self._reporting_errors("cancel"):
            if await self._scheduler.cancel(check.id) is CancelOutcome.CANCELLED:
                note = f"paid {_ahead(check)} before the check was due"
                self._report.cancelled(CheckPayment.__name__, check.id, note)

    async def _postpone(self, order: int, check: Scheduled) -> None:
        """Replace a payment check by a later one with the same id: the customer asks for more time."""
        await asyncio.sleep(random.uniform(0.4, 1))
        delay = timedelta(seconds=random.uniform(1, 3))
        with self._reporting_errors("replace"):
            later = await self._scheduler.schedule(CheckPayment(order), delay=delay, id=check.id)
            self._report.scheduled()
            if later.outcome is ScheduleOutcome.REPLACED:
                self._report.replaced(CheckPayment.__name__, check.id, f"now due in {_ahead(later)}")

    @contextmanager
    def _reporting_errors(self, what: str) -> Iterator[None]:
        """Report an error and go on. A store that does not answer now may answer later."""
        try:
            yield
        except AiodelayError as error:
            self._report.failed(what, error)

    # --- dead letters -------------------------------------------------------------------------------------

    async def _report_dead_letters(self) -> None:
        """Report each given-up message when the store has it as a dead letter. Purge all except the newest letters."""
        while True:
            await self._new_given_up.wait()
            self._new_given_up.clear()
            while self._given_up:
                with self._reporting_errors("dead letters"):
                    letters = [letter async for letter in self._scheduler.dead_letters(ChargeCard)]
                    for letter in letters:
                        self._report_dead_letter(letter)
                    await self._scheduler.purge(*letters[:-DEAD_LETTERS_KEPT])
                await asyncio.sleep(LOOK_S)

    def _report_dead_letter(self, letter: DeadLetter) -> None:
        record = letter.record
        if record.id in self._given_up:
            self._given_up.remove(record.id)
            note = f"{letter.reason.replace('_', ' ')} ({record.attempt}): {record.last_error}"
            self._report.dead(ChargeCard.__name__, record.id, note)


class LogSink:
    """The sink of `to="log:<address>"`: reports each message.

    Args:
        report: Reports the messages.
    """

    name: str = "log"
    limits: Demand = Demand(100)

    def __init__(self, report: Report) -> None:
        self._report = report

    def check(self, address: str) -> None:
        """Accept every address."""

    async def __aenter__(self) -> Self:
        """Return the sink. It connects to nothing."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Do nothing: there is nothing to close."""

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        """Report the messages as delivered."""
        for delivery in deliveries:
            envelope = delivery.envelope
            due = from_epoch_ms(delivery.due_ms)
            what = f"{envelope.lane}:{envelope.address}"
            attempt = Attempt(what, envelope.id, due, delivery.lateness_ms, delivery.attempt)
            self._report.delivered(attempt, f", {envelope.payload.decode()!r}")
        return [Sent()] * len(deliveries)


def _attempt(event: object, context: Context) -> Attempt:
    lateness_ms = context.lateness // timedelta(milliseconds=1)
    return Attempt(type(event).__name__, context.id, context.due, lateness_ms, context.attempt)


def _ahead(scheduled: Scheduled) -> str:
    return f"{(scheduled.due - datetime.now(UTC)).total_seconds():.1f} s"
