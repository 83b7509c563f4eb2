"""Fan out orders to three consumers on one Redis. A consumer works at its own pace, and loses no order while it is off.

Run it: python examples/fan_out.py redis://localhost

The consumer `billing` has two processes that share its orders, and `shipping` has one. `mail` is not running at first
and gets its orders when it starts. Kill any process and start it again, for example with
`python examples/fan_out.py redis://localhost mail`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Sequence
from dataclasses import dataclass

from aiodelay import Context, Retry, Scheduler, event
from aiodelay.redis import RedisFanout

CONSUMERS = ("billing", "shipping", "mail")
ORDERS = range(1, 7)
NAMESPACE = "fan-out"


@event("order.placed")
@dataclass
class OrderPlaced:
    number: int


async def publish(url: str) -> None:
    """Register the consumers, as a deployment does, and publish orders that are due half a second later."""
    async with RedisFanout(url, namespace=NAMESPACE) as fanout:
        for consumer in CONSUMERS:
            await fanout.register("orders", consumer)
    async with Scheduler(url, namespace=NAMESPACE) as scheduler:
        for number in ORDERS:
            await scheduler.schedule(OrderPlaced(number), to="redis-fanout:orders", delay="500ms")
        await scheduler.run_until_idle()
    print(f"{len(ORDERS)} orders are published\n", end="")  # one write: other processes print too


async def consume(url: str, consumer: str) -> None:
    """Handle the orders of one consumer until SIGTERM comes."""
    scheduler = Scheduler(url, namespace=NAMESPACE, lanes=["order.placed"])

    @scheduler.handler(
        source=f"redis-fanout:orders?consumer={consumer}", concurrency=2, retry=Retry(attempts=5, first="100ms")
    )
    async def handle(order: OrderPlaced, context: Context) -> None:
        await asyncio.sleep(0.05)
        if consumer == "shipping" and order.number == 3 and context.attempt == 1:
            raise ConnectionError("the carrier does not answer")
        print(f"{consumer}: order {order.number} at attempt {context.attempt}\n", end="")

    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    async with scheduler:
        await told.wait()


async def until_settled(url: str, consumers: Sequence[str]) -> None:
    """Wait until these consumers have handled all orders. Then print how many orders wait for each consumer."""
    async with RedisFanout(url, namespace=NAMESPACE) as fanout:
        while True:
            found = await fanout.consumers("orders")
            if not any(each.waiting + each.in_flight + each.retrying for each in found if each.name in consumers):
                break
            await asyncio.sleep(0.05)
        for each in found:
            print(f"{each.name} has {each.waiting} orders waiting\n", end="")


async def everything(url: str) -> None:
    """Start a process for each role, `mail` last. Return when all orders are handled."""
    await (await start(url, "publish")).wait()
    running = [await start(url, name) for name in ("billing", "billing", "shipping")]
    await until_settled(url, ["billing", "shipping"])
    running.append(await start(url, "mail"))
    await until_settled(url, CONSUMERS)
    for each in running:
        each.terminate()
        await each.wait()
    async with RedisFanout(url, namespace=NAMESPACE) as fanout:
        (topic,) = await fanout.topics()
        print(f"the topic keeps {topic.kept} of {topic.published} orders\n", end="")
        for consumer in CONSUMERS:
            await fanout.unregister("orders", consumer)


async def start(url: str, role: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-u", __file__, url, role)


def main(arguments: Sequence[str]) -> None:
    url, *roles = arguments or ["redis://localhost"]
    if not roles:
        asyncio.run(everything(url))
    elif roles[0] == "publish":
        asyncio.run(publish(url))
    else:
        asyncio.run(consume(url, roles[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
