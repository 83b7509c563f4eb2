"""A delayed queue with three roles, each a separate process: schedule messages, move due messages, handle messages.

Run it: python examples/three_roles.py redis://localhost

The example shows typed events on Redis lists, retries, and a handler that takes no more from a list than it can run.
You can start any role any number of times, and kill any process. To start one role:
`python examples/three_roles.py redis://localhost move`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from aiodelay import Context, Retry, Scheduler, event

HOUR = timedelta(seconds=0.4)  # a short hour, so that the example ends soon
ORDERS = range(1, 6)
ROLES = ("handle", "move", "schedule")
NAMESPACE = "three-roles"


@event("client.notify")
@dataclass
class NotifyClient:
    order: int


@event("payment.check")
@dataclass
class CheckPayment:
    order: int


async def schedule(url: str) -> None:
    """Only schedule. Another process moves the messages when they are due."""
    async with Scheduler(url, namespace=NAMESPACE, dispatch=False) as scheduler:
        for order in ORDERS:
            headers = {"customer": b"customer %d" % order}
            await scheduler.schedule(
                NotifyClient(order), delay=0.75 * HOUR, to="redis-list:notifications", headers=headers
            )
            await scheduler.schedule(
                CheckPayment(order), delay=3 * HOUR, to="redis-list:payments", id=f"check-{order}", headers=headers
            )
        await scheduler.cancel("check-5")
        # one write: other processes print too
        print(f"{len(ORDERS)} orders are placed, the last of them is paid\n", end="")


async def move(url: str) -> None:
    """Only move. Each message arrives in its list exactly once, when it is due."""
    scheduler = Scheduler(url, namespace=NAMESPACE, lanes=["redis-list"])
    print(f"moving {scheduler.reaches('redis-list').promise}\n", end="")
    await run_until_told(scheduler, asyncio.Event())


async def handle(url: str) -> None:
    """Only handle typed events from lists, with limited concurrency and retries."""
    scheduler = Scheduler(url, namespace=NAMESPACE, lanes=["client.notify", "payment.check"])
    left, is_done = set(ORDERS) - {5}, asyncio.Event()

    @scheduler.handler(source="redis-list:notifications", concurrency=2)
    async def notify(event: NotifyClient, context: Context) -> None:
        print(f"order {event.order}: {context.headers['customer'].decode()} is notified\n", end="")

    @scheduler.handler(source="redis-list:payments", retry=Retry(attempts=5, first="100ms"), timeout="5s")
    async def check(event: CheckPayment, context: Context) -> None:
        if event.order == 2 and context.attempt < 3:
            raise ConnectionError("the bank does not answer")
        print(f"order {event.order}: payment checked at attempt {context.attempt}\n", end="")
        left.discard(event.order)
        if not left:
            is_done.set()

    await run_until_told(scheduler, is_done)


async def run_until_told(scheduler: Scheduler, is_done: asyncio.Event) -> None:
    """Dispatch until `is_done` is set, which SIGTERM also does."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_done.set)
    async with scheduler:
        await is_done.wait()


async def all_roles(url: str) -> None:
    """Start a process for each role. Return when all events are handled."""
    handler, mover, producer = [
        await asyncio.create_subprocess_exec(sys.executable, "-u", __file__, url, role) for role in ROLES
    ]
    await producer.wait()
    await handler.wait()
    mover.terminate()
    await mover.wait()


def main(arguments: Sequence[str]) -> None:
    url, *roles = arguments or ["redis://localhost"]
    run = {"handle": handle, "move": move, "schedule": schedule}[roles[0]] if roles else all_roles
    asyncio.run(run(url))


if __name__ == "__main__":
    main(sys.argv[1:])
