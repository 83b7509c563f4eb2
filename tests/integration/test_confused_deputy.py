"""A client cannot make aiodelay write where the client may not write: not by a destination, a header or an id."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from aiodelay import Scheduler, TargetError
from aiodelay.core.validation import RESERVED_HEADERS
from tests.support.api import serving_api
from tests.support.kafka import create_topic, new_name
from tests.support.servers import Found, redis_servers

pytestmark = pytest.mark.asyncio
NDJSON = {"content-type": "application/x-ndjson"}


async def values_of(kafka: str, topic: str, n: int) -> list[bytes]:
    options = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
    async with AIOKafkaConsumer(topic, bootstrap_servers=kafka, **options) as consumer:
        return [(await consumer.getone()).value for _ in range(n)]


async def ends_of(kafka: str, topics: list[str]) -> list[int]:
    """Return the end offset of the only partition of each topic. A commit of a transaction takes one offset, too."""
    places = [TopicPartition(topic, 0) for topic in topics]
    async with AIOKafkaConsumer(bootstrap_servers=kafka) as consumer:
        ends = await consumer.end_offsets(places)
    return [ends[place] for place in places]


async def refusals(client: httpx.AsyncClient, message: dict[str, Any]) -> set[str]:
    """Send a message in each way in which the API takes one. Return the names of the errors."""
    posted = await client.post("/v1/messages", json=message)
    replaced = await client.put("/v1/messages/good", json=message)
    line = await client.post("/v1/messages", content=json.dumps(message), headers=NDJSON)
    assert posted.status_code in (403, 422), message
    assert replaced.status_code in (403, 422), message
    return {posted.json()["error"], replaced.json()["error"], json.loads(line.text.splitlines()[0])["problem"]["error"]}


async def test_on_a_kafka_store_a_client_reaches_only_the_topic_that_is_allowed(kafka: str) -> None:
    schedules, allowed, other = new_name("schedules"), await create_topic(kafka, new_name()), new_name("other")
    await create_topic(kafka, other)
    url = f"kafka://{kafka}/{schedules}?create_topic=true&partitions=1"
    good = {"to": f"kafka:{allowed}", "payload": "good", "delay": "1ms"}
    wrong: list[dict[str, Any]] = [
        *({"to": f"kafka:{topic}"} for topic in (other, schedules, "__consumer_offsets", f"{allowed}x", f" {allowed}")),
        *({"to": to} for to in (f"Kafka:{allowed}", "handler:work", f"redis-list:{allowed}", f"kafka:{allowed}\n")),
        *({"headers": {name: other}} for name in RESERVED_HEADERS),
        *({"headers": {name: other}} for name in ("aiodelay-lane", "aiodelay-address", "AIODELAY-from")),
    ]
    async with (
        Scheduler(url) as scheduler,
        serving_api(scheduler, read_only=False, allowed_targets=[f"kafka:{allowed}"]) as client,
    ):
        for change in wrong:
            names = await refusals(client, good | change)
            assert names <= {"TargetNotAllowedError", "TargetError", "UnknownSinkError", "HeaderError"}, (change, names)
        assert (await client.post("/v1/messages", json=good)).status_code == 201
        assert await values_of(kafka, allowed, 1) == [b"good"]
        assert [each async for each in scheduler.dead_letters()] == []
    assert await ends_of(kafka, [allowed, other]) == [2, 0]


@pytest.fixture(scope="module")
def redis(shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(redis_servers()[0])


OWN_KEYS = [
    *("{ns:00}:msg", "{ns:63}:due:1", "{default:00}:meta", "{other.Name-1:00}:dead", "{orders}:aiodelay:consumers"),
    *("{x}:aiodelay:never", "{ns:00}:msg?format=raw"),
]


@pytest.mark.parametrize("key", OWN_KEYS)
async def test_no_message_goes_to_a_key_of_aiodelay(redis: str, key: str) -> None:
    async with Scheduler(redis, namespace=new_name("n"), dispatch=False) as scheduler:
        with pytest.raises(TargetError, match="that does not belong to aiodelay itself"):
            await scheduler.schedule(b"x", to=f"redis-list:{key}", delay="1s")
        assert await scheduler.counts() == {}
