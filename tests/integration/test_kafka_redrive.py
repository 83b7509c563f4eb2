"""`redrive` on a Kafka store, while another process schedules the id of the dead letter."""

from __future__ import annotations

import asyncio

import pytest

from aiodelay.core.ids import new_op
from aiodelay.core.values import After, DeadKey, Envelope, Put, PutBack, Record, Refused, Stored
from aiodelay.kafka import KafkaStore
from tests.support.kafka import new_name

pytestmark = pytest.mark.asyncio

N = 20


async def test_s2_a_refused_redrive_leaves_the_dead_letter(kafka: str) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=1"
    async with KafkaStore(url) as owner, KafkaStore(url) as user, owner.work("w", ()):
        now = owner.now_ms()
        letters = [Record(Envelope(f"m{i}", "kafka", "t"), now, now, new_op()) for i in range(N)]
        await owner.put_back([PutBack(each, now, "attempts_exhausted") for each in letters])
        for each in letters:
            put = Put(new_op(), Envelope(each.id, "kafka", "t"), After(3_600_000))
            putting = asyncio.create_task(user.apply([put]))
            await asyncio.sleep(0.0005)  # the owner decides the redrive while the put is on its way
            (outcome,) = await owner.redrive([DeadKey(each.id, each.revision)])
            await putting
            is_there = bool(await owner.dead_letters(message_id=each.id))
            assert (outcome == Refused("exists")) is is_there
            assert is_there or isinstance(outcome, Stored)
