"""A dead letter of an unreadable record names no destination, so no interface redrives it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx

from aiodelay import Reject, Scheduler
from aiodelay.core.values import DeadLetter, Refused
from tests.support.api import ALL, serving_api
from tests.support.cli import Cli
from tests.support.kafka import create_topic, new_name
from tests.support.topics import new_producer
from tests.support.waiting import until


def write(kafka: str, topic: str, target: str, names: list[str]) -> None:
    """Write records as a client would that has the time wrong."""
    producer = new_producer(kafka, {"partitioner": "murmur2_random"})
    for name in names:
        headers: dict[str, str | bytes | None] = {"scheduler-epoch": "noon", "scheduler-target-topic": target}
        producer.produce(topic, b"payload", name, headers=headers)
    assert producer.flush(30) == 0


async def letters_of(scheduler: Scheduler, n: int) -> list[DeadLetter]:

    async def letters() -> list[DeadLetter]:
        found = [each async for each in scheduler.dead_letters()]
        return found if len(found) >= n else []

    return await until(letters, f"{n} dead letters")


async def confirmed(client: httpx.AsyncClient, form: dict[str, str]) -> str:
    """Do something from the page; return what it shows in the end."""
    page = (await client.get("/dead")).text
    (csrf, *_) = re.findall(r'name="csrf" value="([^"]+)"', page)
    asked = await client.post("/plan", data=form | {"csrf": csrf, "back": "/dead"}, follow_redirects=True)
    (token,) = re.findall(r'name="confirm" value="([^"]+)"', asked.text)
    confirmed = {"csrf": csrf, "back": "/dead", "confirm": token}
    return (await client.post("/confirm", data=confirmed, follow_redirects=True)).text


def test_a_letter_without_a_destination_is_redriven_by_nobody(kafka: str, tmp_path: Path) -> None:
    topic, target = new_name("schedules"), asyncio.run(create_topic(kafka, new_name()))
    url = f"kafka://{kafka}/{topic}?members=1"

    async def play() -> None:
        scheduler = Scheduler(f"{url}&create_topic=true")

        @scheduler.handler(name="work")
        async def refuse(event: bytes) -> Reject:
            return Reject("no")

        async with scheduler, serving_api(scheduler, **ALL) as client:
            write(kafka, topic, target, ["a", "b"])
            first, second = letters = await letters_of(scheduler, 2)
            for outcome in await scheduler.redrive(first, second.key):
                assert isinstance(outcome, Refused)
                assert outcome.reason == "undecodable"
                assert "'noon'" in outcome.detail
            keys = [{"id": each.record.id, "revision": each.record.revision} for each in letters]
            redriven = (await client.post("/v1/dead/redrive", json={"letters": keys})).json()
            assert [each["outcome"] for each in redriven["letters"]] == ["undecodable"] * 2
            shown = await confirmed(
                client, {"action": "redrive", "letter": f"{first.record.revision} {first.record.id}"}
            )
            assert re.search(r"undecodable</th><td[^>]*>1<", shown), shown
            assert [each async for each in scheduler.pending()] == []

            await scheduler.schedule(b"c", to="handler:work", delay="0s")
            await letters_of(scheduler, 3)
            await scheduler.remove_handler("work")
            plan = (await client.post("/v1/bulk", json={"action": "redrive"})).json()
            done = await client.post(f"/v1/bulk/{plan['confirm']}")
            assert done.json()["outcomes"] == {"undecodable": 2, "stored": 1}
            assert await letters_of(scheduler, 2) == letters

    asyncio.run(play())
    ran = Cli(url, tmp_path)("dead", "redrive", "--all", "--yes", "--own")
    assert (ran.code, ran.lines[:1]) == (1, ["0 redriven, 2 not"]), ran
    assert re.search(r"^a: undecodable: .*'noon'.*schedule the message again", ran.out, re.MULTILINE), ran.out
