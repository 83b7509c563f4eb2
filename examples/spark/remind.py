"""Reminds of the example's orders whose time has come, and ends when so many have been.

Run it: `python examples/spark/remind.py 'sqlite:///delay.db?journal=100000' --orders 2`, after
`aiodelay spark backfill --to handler:remind …` of what `orders.py` has written; `aiodelay fire ID` makes one due now.
`--namespace`, or `AIODELAY_NAMESPACE`, names another namespace than `default`.
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
    """What the payload of a reminder says."""

    order_id: str
    customer: str
    total_cents: int
    remind_at: datetime


async def remind(store: str, namespace: str, n: int) -> None:
    """Handle the reminders of a namespace of a store until so many have come."""
    scheduler, left = Scheduler(store, namespace=namespace), asyncio.Semaphore(0)

    @scheduler.handler
    async def remind_of(order: Order) -> None:
        print(f"{order.order_id}: {order.customer} has to pay {order.total_cents / 100:.2f}")
        left.release()

    async with scheduler:
        for _ in range(n):
            await left.acquire()


def main() -> None:
    """Handle them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("--namespace", default=os.environ.get("AIODELAY_NAMESPACE", "default"))
    parser.add_argument("--orders", type=int, default=1)
    given = parser.parse_args()
    asyncio.run(remind(given.store, given.namespace, given.orders))


if __name__ == "__main__":
    main()
