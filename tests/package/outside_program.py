"""A user's program with only the installed package, outside the source tree. Prints "ok", or exits with an error.

The session `package` of the noxfile copies it into an empty folder and runs it with `python -I`.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import aiodelay
from aiodelay import CancelOutcome, Context, Later, Reject, Retry, ScheduleOutcome, Scheduler, StoreError, event

LIMIT_S = 30


@event("invoice.due", aliases=("invoice",))
@dataclass
class InvoiceDue:
    number: int
    customer: str = ""


@dataclass
class Reminder:
    text: str


class Shop:
    """What is scheduled, and what became of it."""

    def __init__(self, url: str) -> None:
        self.scheduler = Scheduler(url, namespace="outside", retry=Retry(attempts=3, first="50ms", jitter=0))
        self.invoices: list[tuple[int, str, int, bytes]] = []
        self.reminders: list[str] = []
        self.scheduler.handler(self.check_invoice)
        self.scheduler.handler(timeout="5s", concurrency=2)(self.remind)

    async def check_invoice(self, invoice: InvoiceDue, context: Context) -> Later | Reject | None:
        if context.lateness < timedelta():
            raise AssertionError(f"early by {-context.lateness}")
        self.invoices.append((invoice.number, invoice.customer, context.attempt, context.headers.get("trace", b"")))
        if invoice.number == 1 and context.attempt == 1:
            raise ConnectionError("no answer from the bank")
        if invoice.number == 2:
            return Reject("paid in cash")
        if invoice.number == 3 and len(self.invoices) < 6:
            return Later("50ms")
        return None

    def remind(self, reminder: Reminder) -> None:
        """Runs in a worker thread."""
        self.reminders.append(reminder.text)

    async def fill(self) -> None:
        """Schedule, replace, cancel; then close with everything still pending."""
        async with self.scheduler as scheduler:
            stored = await scheduler.schedule(
                InvoiceDue(1, "Ada"), delay="600ms", id="invoice-1", headers={"trace": b"\x00t"}
            )
            check(stored.outcome is ScheduleOutcome.STORED, stored)
            await scheduler.schedule(InvoiceDue(9, "nobody"), delay="1h", id="invoice-2")
            replaced = await scheduler.schedule(InvoiceDue(2, "Grace"), delay="600ms", id="invoice-2")
            check(replaced.outcome is ScheduleOutcome.REPLACED, replaced)
            await scheduler.schedule(InvoiceDue(3, "Barbara"), delay="600ms")
            await scheduler.schedule(Reminder("never"), delay="600ms", id="cancelled")
            check(await scheduler.cancel("cancelled") is CancelOutcome.CANCELLED, "cancel")
            check(await scheduler.cancel("cancelled") is CancelOutcome.NOT_FOUND, "cancel again")
            texts = [f"reminder {n}" for n in range(20)]
            messages = (aiodelay.Message(Reminder(text), delay="600ms") for text in texts)
            check(await scheduler.schedule_many(messages) == len(texts), "schedule_many")
            check(not self.invoices and not self.reminders, "something came early")

    async def work(self) -> None:
        """Open the same file again, and handle what is due."""
        async with self.scheduler as scheduler:
            await scheduler.run_until_idle()
            letters = [letter async for letter in scheduler.dead_letters()]
        check([(letter.record.id, letter.reason) for letter in letters] == [("invoice-2", "rejected")], letters)
        by_number = {number: [attempt for n, _, attempt, _ in self.invoices if n == number] for number in (1, 2, 3, 9)}
        check(by_number[1] == [1, 2], "a failed run is run again")
        check(by_number[2] == [1], "what is rejected is run once")
        check(set(by_number[3]) == {1}, "`Later` costs no attempt")
        check(by_number[9] == [], "what was replaced never runs")
        check({trace for number, _, _, trace in self.invoices if number == 1} == {b"\x00t"}, "headers")
        check(sorted(self.reminders) == sorted(f"reminder {n}" for n in range(20)), self.reminders)


def check(is_so: object, what: object) -> None:  # `assert` would vanish under -O
    if not is_so:
        raise SystemExit(f"not so: {what}")


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{quote(str(Path(folder, 'delay.db')))}"
        async with asyncio.timeout(LIMIT_S):
            await Shop(url).fill()
            await Shop(url).work()
        try:
            Scheduler("http://user:hunter2@example.com")
        except aiodelay.ConfigurationError as error:
            check("hunter2" not in str(error), error)
    check(issubclass(aiodelay.StoreBusyError, StoreError), "errors have one root per remedy")
    check("aiodelay.testing" not in sys.modules, "the test kit is loaded")
    print("ok")


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    faulthandler.dump_traceback_later(2 * LIMIT_S, exit=True)
    asyncio.run(main())
