"""A log of orders on one Redis: consumers may start late and go back, and they learn how many orders they have missed.

Run it: python examples/topic_log.py redis://localhost

1. The consumer `billing` has two processes, which share its cursor.
2. The consumer `report` starts later and begins with the oldest order. Then the example moves `report` back, so that it
   gets some orders again.
3. The example trims the log to two orders and moves `billing` back to the first order. `billing` learns how many
   orders it has missed.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Sequence

from aiodelay import Context, Scheduler
from aiodelay.redis import RedisLog

NAMESPACE = "topic-log"
ORDERS = range(1, 7)


async def publish(url: str) -> None:
    """Schedule the orders. aiodelay appends each of them to the log half a second later, exactly once."""
    async with Scheduler(url, namespace=NAMESPACE) as scheduler:
        for number in ORDERS:
            await scheduler.schedule(b"order %d" % number, to="redis-log:orders", key=b"%d" % number, delay="500ms")
        await scheduler.run_until_idle()
    print(f"{len(ORDERS)} orders are appended\n", end="")  # one write for text and newline: other processes print too


async def consume(url: str, consumer: str) -> None:
    """Handle the orders after a consumer's cursor until SIGTERM comes."""
    scheduler = Scheduler(url, namespace=NAMESPACE, lanes=["order"])

    @scheduler.handler(name="order", source=f"redis-log:orders?consumer={consumer}", concurrency=1)
    async def handle(order: bytes, context: Context) -> None:
        await asyncio.sleep(0.05)
        missed = f", after {context.missed} that it has missed" if context.missed else ""
        print(f"{consumer}: {order.decode()}{missed}\n", end="")

    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    async with scheduler:
        await told.wait()


async def until_settled(log: RedisLog, consumer: str) -> None:
    """Wait until a consumer has handled all orders of the log, then print the position of its cursor."""
    while True:
        found = [each for each in await log.consumers("orders") if each.name == consumer]
        if found and not any(each.waiting + each.in_flight for each in found):
            break
        await asyncio.sleep(0.05)
    print(f"the cursor of {consumer} is at {found[0].cursor}\n", end="")


async def everything(url: str) -> None:
    """Start a process for each role. Return when all orders are handled."""
    async with RedisLog(url, namespace=NAMESPACE) as log:
        running = [await start(url, "billing"), await start(url, "billing")]
        await (await start(url, "publish")).wait()
        await until_settled(log, "billing")
        running.append(await start(url, "report"))
        await until_settled(log, "report")
        await log.seek("orders", "report", 5)
        await until_settled(log, "report")
        for each in running:
            each.terminate()
            await each.wait()
        (index,) = await log.append("orders", [b"order 7"])
        print(f"order 7 has index {index}, and {await log.trim('orders', max_messages=2)} orders are dropped\n", end="")
        await log.seek("orders", "billing", 1)
        billing = await start(url, "billing")
        await until_settled(log, "billing")
        billing.terminate()
        await billing.wait()
        for name in ("billing", "report"):
            await log.unregister("orders", name)
        await log.trim("orders", max_age="1ms")


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
