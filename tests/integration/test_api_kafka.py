"""The HTTP API on a Kafka store: the differences from other stores, and the etf1 routes on a topic like etf1's."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from aiodelay import Scheduler
from tests.support.api import ALL, problem_of, serving_api
from tests.support.kafka import new_name
from tests.support.topics import new_producer
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

TARGETS = {"allowed_targets": ["kafka:online-videos"]}


async def test_an_owner_answers_as_other_stores_do_and_etf1s_routes_in_its_shapes(kafka: str) -> None:
    topic = new_name("schedules")
    due = int(datetime.now(UTC).timestamp()) + 3600
    async with (
        Scheduler(f"kafka://{kafka}/{topic}?create_topic=true&partitions=2") as scheduler,
        serving_api(scheduler, **(ALL | TARGETS)) as client,
    ):
        producer = new_producer(kafka, {"partitioner": "murmur2_random"})
        headers = {
            "scheduler-epoch": str(due),
            "scheduler-target-topic": "online-videos",
            "scheduler-target-key": "vid1",
        }
        producer.produce(topic, "video 1", "vid1-online", headers=list(headers.items()))
        assert producer.flush(30) == 0

        async def schedules() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = (await client.get("/schedules")).json()
            return found

        (schedule,) = await until(schedules, "the schedule is read")
        assert abs(schedule.pop("timestamp") - datetime.now(UTC).timestamp()) < 120
        assert schedule == {
            "id": "vid1-online",
            "epoch": due,
            "topic": topic,
            "target-topic": "online-videos",
            "target-key": "vid1",
            "value": "dmlkZW8gMQ==",
        }
        info = (await client.get("/info")).json()
        assert info["kafka"] == {"bootstrap_servers": kafka, "topics": [topic], "history_topic": ""}
        assert (await client.get("/liveness")).status_code == 200

        given = {"to": "kafka:online-videos", "payload": "2", "key": "vid2", "delay": "1h", "id": "b"}
        assert (await client.post("/v1/messages", json=given)).status_code == 201
        assert (await client.get("/v1/messages/b")).json()["key"] == "vid2"
        for _ in range(2):
            answer = await client.post("/v1/messages", json=given | {"id": None}, headers={"idempotency-key": "k"})
            assert answer.status_code in (200, 201), answer.text
        listed = (await client.get("/v1/messages")).json()
        assert len(listed["messages"]) == 3, "the key's message was stored once"
        counts = (await client.get("/v1/counts")).json()
        assert [(each["lane"], each["scheduled"]) for each in counts["lanes"]] == [("kafka", 3)]
        moved = await client.post("/v1/messages/b/reschedule", json={"delay": "2h"})
        assert moved.json()["outcome"] == "rescheduled"
        assert (await client.delete("/v1/messages/b")).json()["outcome"] in ("cancelled", "recorded")
        refused = await client.post("/v1/messages", json=given | {"to": "kafka:other"})
        problem_of(refused, 403, "TargetNotAllowedError")


async def test_a_process_that_only_schedules_says_what_it_cannot_do(kafka: str) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=1"
    async with (
        Scheduler(url, dispatch=False) as scheduler,
        serving_api(scheduler, **(ALL | TARGETS)) as client,
    ):
        at = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        given = {"to": "kafka:online-videos", "payload": "1", "at": at, "id": "a"}
        assert (await client.post("/v1/messages", json=given)).status_code == 201
        assert (await client.delete("/v1/messages/a")).json()["outcome"] == "recorded"
        for method, path, body in (
            ("GET", "/v1/messages", None),
            ("GET", "/v1/messages/a", None),
            ("GET", "/v1/counts", None),
            ("POST", "/v1/messages/a/fire", None),
            ("POST", "/v1/messages/a/reschedule", {"delay": "1s"}),
            ("POST", "/v1/messages", given | {"conflict": "error"}),
        ):
            answer = await client.request(method, path, json=body)
            assert problem_of(answer, 422, "UnsupportedByStoreError")["allowed"], path
        lines = "\n".join(json.dumps(given | {"id": f"m{n}"}) for n in range(50))
        answer = await client.post("/v1/messages", content=lines, headers={"content-type": "application/x-ndjson"})
        assert json.loads(answer.text.splitlines()[-1]) == {"stored": 50, "refused": 0}
