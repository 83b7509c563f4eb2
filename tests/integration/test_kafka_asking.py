"""A process without verdicts sends guarded cancels to the owners, and learns the outcome of each."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

from aiokafka import AIOKafkaProducer

from aiodelay import Message
from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.store.store import KafkaStore
from aiodelay.backends.kafka.topics.topic import SETTINGS
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Cancel, Envelope, Put, Refused, Reschedule, Stored
from tests.support.kafka import create_topic, new_name
from tests.support.waiting import until

HOUR_MS = 3_600_000
NEAR, FAR = After(HOUR_MS // 2), After(48 * HOUR_MS)


def test_owners_cancel_what_still_stands_as_it_is_meant_near_and_far(kafka: str) -> None:
    asyncio.run(_play(kafka))


async def _play(kafka: str) -> None:
    settings = {name.replace(".", "_"): value for name, value in SETTINGS.items()}
    topic = await create_topic(kafka, new_name("schedules"), 3, **settings)
    await _write_a_stray(kafka, topic)
    url = f"kafka://{kafka}/{topic}"
    async with KafkaStore(url) as owner, KafkaStore(url) as asker, owner.work("owner", ["kafka"]):
        puts = [_put("near", NEAR), _put("far", FAR), _put("moved", FAR), _put("replaced", NEAR), _put("gone", FAR)]
        stands = {put.id: _stored(each) for put, each in zip(puts, await owner.apply(puts), strict=True)}
        await owner.apply(
            [Reschedule(new_op(), "moved", NEAR), _put("replaced", NEAR), Cancel(new_op(), "gone")],
        )
        stray = await owner.get("stray")
        assert stray is not None
        stands["stray"] = stray.record.revision, stray.record.due_ms
        cancels = [Cancel(new_op(), name, only) for name, only in stands.items()]
        assert {each.id: _word(outcome) for each, outcome in zip(cancels, await asker.apply(cancels), strict=True)} == {
            "near": "cancelled",
            "far": "cancelled",
            "moved": "outdated",
            "replaced": "outdated",
            "gone": "not_found",
            "stray": "cancelled",
        }

        async def stand() -> bool:  # the owner reads its own tombstones back a little later than the asker
            return [name for name in stands if await owner.get(name)] == ["moved", "replaced"]

        await until(stand, "the owner shows the moved and the replaced message alone")
        assert await asker.apply(cancels[:1]) == [Refused("not_found")]


def _put(name: str, due: After) -> Put:
    return Put(new_op(), Envelope(name, "kafka", "orders", payload=new_op()), due)


def _stored(outcome: object) -> tuple[int, int]:
    assert isinstance(outcome, Stored)
    return outcome.revision, outcome.due_ms


def _word(outcome: Any) -> str:  # noqa: ANN401 - one of three
    return outcome.answer if isinstance(outcome, Stored) else outcome.reason


async def _write_a_stray(kafka: str, topic: str) -> None:
    """Write a message into a partition that is not its key's own."""
    due = datetime.now(UTC) + timedelta(hours=1)
    key, value, headers = records.encode(Message(b"x", at=due, id="stray", to="kafka:orders"))
    assert key is not None
    producer = AIOKafkaProducer(bootstrap_servers=kafka)
    await producer.start()
    try:
        other = (records.partition_of(key, 3) + 1) % 3
        await producer.send_and_wait(topic, value, key, other, headers=headers)
    finally:
        await producer.stop()
