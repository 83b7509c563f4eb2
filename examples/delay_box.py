"""A delay box: services write JSON requests to a Kafka topic, and each message arrives in its target topic when due.

Run it: python examples/delay_box.py localhost:9092 redis://localhost    (needs pip install '.[kafka,redis]')

Messages wait in Redis. Two boxes share the work. You can start any number of boxes, and kill any of them at any time:
`python examples/delay_box.py localhost:9092 redis://localhost box`. To start the same box without Python code:
`aiodelay delay-box --from kafka://localhost:9092/delay-box.requests --store redis://localhost --namespace delay-box
--allow delay-box.reminders`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Sequence

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from aiodelay.delay_box import DelayBox

REQUESTS = "delay-box.requests"
REFUSED = f"{REQUESTS}.dead"
REMINDERS = "delay-box.reminders"


async def box(cluster: str, store: str) -> None:
    """Take requests in, and deliver messages, until SIGTERM comes."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    async with DelayBox(store, f"kafka://{cluster}/{REQUESTS}", allow=[REMINDERS], namespace="delay-box"):
        await told.wait()


async def ask(cluster: str) -> None:
    """Send the requests, as a service in any language can do."""
    requests = [
        {"topic": REMINDERS, "message": "order 1 is not paid", "countdown": 6},
        {"topic": REMINDERS, "message": "order 2 is not paid", "countdown": 2},
        {"topic": REMINDERS, "message": {"order": 3, "paid": False}, "countdown": 4, "key": "3"},
        {"topic": REMINDERS, "message": "order 4 is not paid", "countdown": "soon"},
        {"topic": "salaries", "message": "raise mine", "countdown": 0},
    ]
    async with AIOKafkaProducer(bootstrap_servers=cluster) as producer:
        for request in requests:
            value = json.dumps(request).encode()
            await producer.send_and_wait(REQUESTS, value, headers=[("CALLER_SERVICE", b"shop")])
    print(f"the shop has asked {len(requests)} times\n", end="")  # one write: other processes print too


async def read(cluster: str, answers: int) -> None:
    """Read the delivered messages and the refused requests, as a service in any language can do."""
    async with AIOKafkaConsumer(REMINDERS, REFUSED, bootstrap_servers=cluster) as consumer:
        await consumer.seek_to_end()
        asked = time.monotonic()
        await ask(cluster)
        for _ in range(answers):
            record = await consumer.getone()
            after, headers = time.monotonic() - asked, dict(record.headers)
            if record.topic == REFUSED:
                print(f"refused: {headers['aiodelay-dead-reason'].decode()}\n", end="")
            else:
                caller = headers["CALLER_SERVICE"].decode()
                print(f"{caller} is told: {record.value.decode()} ({after:.1f} s later)\n", end="")


async def everything(cluster: str, store: str) -> None:
    """Start two boxes as processes, send the requests, and read until each request has its answer."""
    admin = AIOKafkaAdminClient(bootstrap_servers=cluster)
    await admin.start()
    await admin.create_topics([NewTopic(topic, 2, 1) for topic in (REQUESTS, REFUSED, REMINDERS)])
    boxes = [await start(cluster, store, "box") for _ in range(2)]
    try:
        await read(cluster, answers=5)
    finally:
        for each in boxes:
            each.terminate()
            await each.wait()
        await admin.delete_topics([REQUESTS, REFUSED, REMINDERS])
        await admin.close()


async def start(*arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-u", __file__, *arguments)


def main(arguments: Sequence[str]) -> None:
    cluster, store, *role = [*arguments, *["localhost:9092", "redis://localhost"][len(arguments) :]]
    asyncio.run((box if role else everything)(cluster, store))


if __name__ == "__main__":
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # aiodelay logs the problems that matter
    main(sys.argv[1:])
