"""A Kafka process that only schedules: it reads and takes over nothing, and reports outcomes that it cannot know."""

from __future__ import annotations

import asyncio

import pytest

from aiodelay import CancelOutcome, Conflict, Scheduler, UnsupportedByStoreError
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Cancel, Command, Demand, Envelope, Fire, Put, Query, Refused, Stored
from aiodelay.kafka import KafkaStore
from tests.support.kafka import Broker, create_topic, new_name
from tests.support.slow_stores import opened_patiently
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio


def url_of(bootstrap: str, topic: str, options: str = "") -> str:
    return f"kafka://{bootstrap}/{topic}?create_topic=true&partitions=3{options}"


async def test_what_it_schedules_and_cancels_the_owner_carries_out_undisturbed(kafka: str) -> None:
    url = url_of(kafka, new_name("schedules"))
    target = await create_topic(kafka, new_name())
    async with KafkaStore(url) as owner, owner.work("w", []):
        sessions = [each.session for each in owner.partitions.values()]
        async with Scheduler(url, dispatch=False) as producer:
            for i in range(20):
                await producer.schedule(b"%d" % i, to=f"kafka:{target}", delay="1h", id=f"m{i}")
            await producer.schedule(b"new", to=f"kafka:{target}", delay="1h", id="m3")
            assert await producer.cancel("m7") is CancelOutcome.RECORDED
            assert await producer.cancel("never there") is CancelOutcome.RECORDED

        async def payloads() -> dict[str, bytes]:
            return {each.record.id: each.record.envelope.payload for each in await owner.search(Query())}

        wanted = {f"m{i}": b"%d" % i for i in range(20)} | {"m3": b"new"}
        del wanted["m7"]

        async def has_read_all() -> bool:
            return await payloads() == wanted

        await until(has_read_all, "the owner has read all commands")
        assert (await owner.counts())["kafka"].scheduled == 19
        assert [each.session.barrier for each in owner.partitions.values()] == [each.barrier for each in sessions]


async def test_what_only_an_owner_can_do_is_refused_before_anything_is_written(kafka: str) -> None:
    url = url_of(kafka, new_name("schedules"))
    async with Scheduler(url, dispatch=False) as producer:
        for conflict in (Conflict.error(), Conflict.newer(1)):
            with pytest.raises(UnsupportedByStoreError, match="replace"):
                await producer.schedule(b"", to="kafka:t", delay="1h", id="m", conflict=conflict)
        for refused in (producer.fire("m"), producer.reschedule("m", delay="1h"), producer.get("m"), producer.counts()):
            with pytest.raises(UnsupportedByStoreError):
                await refused
    async with KafkaStore(url) as store:
        put = Put(new_op(), Envelope("m", "kafka", "t"), After(0))
        fire, cancel = Fire(new_op(), "m"), Cancel(new_op(), "m", (1, None))
        commands: dict[str, Command] = {"fire": fire, "cancel with if_revision": cancel}
        for what, command in commands.items():
            with pytest.raises(UnsupportedByStoreError, match=f"command is {what}; allowed: schedule with replace or"):
                await store.apply([put, command])
    async with KafkaStore(url) as owner, owner.work("w", []):
        assert await owner.counts() == {}


async def test_f22_a_put_that_is_sent_again_is_one_message_also_once_it_was_delivered(kafka: str) -> None:
    url = url_of(kafka, new_name("schedules"))
    target = await create_topic(kafka, new_name())
    far = Put(new_op(), Envelope("far", "kafka", target), After(3_600_000))
    now = Put(new_op(), Envelope("now", "kafka", target), After(0))
    async with KafkaStore(url) as producer, KafkaStore(url) as owner, owner.work("w", []):
        with owner.transferring(owner.sinks[0]) as moves:
            assert all(isinstance(each, Stored) for each in await producer.apply([far, now]))
            moved = 0
            async with asyncio.timeout(60):
                while not moved:
                    moved = (await moves.transfer(Demand(10))).moved
                    await asyncio.sleep(0.01)
            first = await owner.get("far")
            await producer.apply([far, now])
            await producer.apply([Put(new_op(), Envelope("last", "kafka", target), After(3_600_000))])
            ends = asyncio.get_running_loop().time() + 1
            while asyncio.get_running_loop().time() < ends:
                assert (await moves.transfer(Demand(10))).moved == 0
                await asyncio.sleep(0.01)
            assert await owner.get("far") == first
    async with KafkaStore(url) as owner, owner.work("w", []):  # nor does it come back later
        assert await owner.get("now") is None


async def test_f21_while_the_cluster_is_away_nothing_is_said_to_be_stored(own_broker: Broker) -> None:
    url = url_of(own_broker.bootstrap, new_name("schedules"))
    async with KafkaStore(url):  # which makes the topic, and waits for it longer
        pass
    async with opened_patiently(lambda: KafkaStore(f"{url}&timeout_ms=2000")) as producer:
        put = Put(new_op(), Envelope("m", "kafka", "t"), After(3_600_000))
        own_broker.freeze()
        try:
            (outcome,) = await producer.apply([put])
        finally:
            own_broker.thaw()
        assert isinstance(outcome, Refused)
        async with asyncio.timeout(60):  # a busy broker needs more than a second to come back
            while not isinstance(outcome, Stored):
                (outcome,) = await producer.apply([Cancel(new_op(), "m")])
        assert outcome == Stored("recorded", 0, 0)
