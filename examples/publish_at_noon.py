"""Put videos online and take them offline at given times. A Kafka topic stores the schedules; no other store is needed.

Run it: python examples/publish_at_noon.py localhost:9092    (needs pip install '.[kafka]')

An editorial system in any language writes a schedule as a record with three headers. A record with the same key
replaces the schedule, and a tombstone deletes the schedule. No scheduler needs to run for this. When a scheduler
starts, it publishes the messages that became due meanwhile, once. You can start any number of schedulers: they share
the partitions of the topic, and move each message in one transaction.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from datetime import UTC, datetime, timedelta

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from aiodelay import Cron, Scheduler

SCHEDULES = "publish-at-noon.schedules"
VIDEOS = "publish-at-noon.videos"
DAY = timedelta(seconds=1)  # a short day, so that the example ends soon


async def edit(cluster: str) -> None:
    """Schedule with plain Kafka records, as an editorial system without aiodelay does. No scheduler runs meanwhile."""
    now = int(time.time())
    async with AIOKafkaProducer(bootstrap_servers=cluster) as producer:

        async def schedule(video: str, text: str | None, epoch: int) -> None:
            when = {"scheduler-epoch": f"{epoch}", "scheduler-target-topic": VIDEOS, "scheduler-target-key": video}
            headers = [(name, value.encode()) for name, value in when.items()]
            value = None if text is None else text.encode()
            await producer.send_and_wait(SCHEDULES, value, key=f"{video}-online".encode(), headers=headers)

        await schedule("vid1", "video 1, first cut", now + 3600)
        await schedule("vid1", "video 1, final cut", now + 2)  # the same key: a new version, at another time
        await schedule("vid2", "video 2", now + 2)
        await schedule("vid2", None, 0)  # a tombstone: withdrawn
        await schedule("vid3", "video 3", now - 10)  # missed: it should be online already
    print("the editors have scheduled three videos, and withdrawn one of them")


async def publish(scheduler: Scheduler) -> None:
    """Schedule from Python."""
    week = datetime.now(UTC) + 7 * DAY
    await scheduler.schedule(b"video 4", to=f"kafka:{VIDEOS}", key=b"vid4", at=week - 4 * DAY, id="vid4-online")
    await scheduler.schedule(None, to=f"kafka:{VIDEOS}", key=b"vid4", at=week, id="vid4-offline")  # a tombstone, later
    await scheduler.schedule(b"video 5", to=f"kafka:{VIDEOS}", key=b"vid5", at=week, id="vid5-online")
    print("vid5:", await scheduler.cancel("vid5-online"))
    noon = Cron("0 12 * * *", tz="Europe/Paris")  # noon stays noon in summer and in winter
    programme = await scheduler.schedule(b"the day", to=f"kafka:{VIDEOS}", key=b"day", every=noon, id="programme")
    print("the programme of the day comes next at", f"{programme.due:%H:%M} UTC, then each day")
    print("the programme:", await scheduler.cancel("programme"))


async def read(consumer: AIOKafkaConsumer, changes: int) -> None:
    """Read the topic as a video player does, and print each record: a video is online or offline."""
    for _ in range(changes):
        record = await consumer.getone()
        says = "is offline" if record.value is None else f"is online: {record.value.decode()}"
        print(f"{record.key.decode()} {says}")


async def main(cluster: str) -> None:
    scheduler = Scheduler(f"kafka://{cluster}/{SCHEDULES}?create_topic=true")
    admin = AIOKafkaAdminClient(bootstrap_servers=cluster)
    await admin.start()
    await admin.create_topics([NewTopic(VIDEOS, 2, 1)])
    try:
        async with scheduler:
            pass  # the scheduler creates its topic, with the settings that it needs
        await edit(cluster)
        consumer = AIOKafkaConsumer(VIDEOS, bootstrap_servers=cluster, isolation_level="read_committed")
        async with consumer:
            await consumer.seek_to_end()
            async with scheduler, asyncio.TaskGroup() as tasks:
                tasks.create_task(read(consumer, changes=4))
                await publish(scheduler)
    finally:
        await admin.delete_topics([SCHEDULES, VIDEOS])
        await admin.close()


if __name__ == "__main__":
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # aiodelay logs the problems that matter
    asyncio.run(main(*(sys.argv[1:] or ["localhost:9092"])))
