"""Handles reminders of the example's orders when they are due, and ends after a given number of reminders.

First run `aiodelay spark backfill --to handler:remind …` on the orders that `orders.py` has written. Then run:
`python examples/spark/remind.py 'sqlite:///delay.db?journal=100000' --orders 2`. `aiodelay fire ID` makes an order due
now. `--namespace` or `AIODELAY_NAMESPACE` names another namespace than `default`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from datetime import datetime

from msgspec import Struct

from aiodelay import Scheduler, event


@event("remind")
class Order(Struct):
    """The payload of a reminder."""

    order_id: str
    customer: str
    total_cents: int
    remind_at: datetime


async def remind(store: str, namespace: str, n: int) -> None:
    """Handle `n` reminders of a namespace of a store."""
    scheduler, left = Scheduler(store, namespace=namespace), asyncio.Semaphore(0)

    @scheduler.handler
    async def remind_of(order: Order) -> None:
        print(f"{order.order_id}: {order.customer} has to pay {order.total_cents / 100:.2f}")
        left.release()

    async with scheduler:
        for _ in range(n):
            await left.acquire()


def main() -> None:
    """Read the arguments and handle the reminders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("--namespace", default=os.environ.get("AIODELAY_NAMESPACE", "default"))
    parser.add_argument("--orders", type=int, default=1)
    given = parser.parse_args()
    asyncio.run(remind(given.store, given.namespace, given.orders))


if __name__ == "__main__":
    main()
