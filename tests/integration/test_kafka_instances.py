"""The instances of a Kafka store: the processes of its group, each with its partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from aiodelay import Scheduler
from aiodelay.core.values import Instance
from aiodelay.kafka import KafkaStore, open_store
from aiodelay.service import admin
from tests.support.api import client_of, serving_app
from tests.support.kafka import new_name
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

PARTITIONS = 6


def opened(bootstrap: str, topic: str, options: str = "") -> KafkaStore:
    url = f"kafka://{bootstrap}/{topic}?create_topic=true&partitions={PARTITIONS}{options}"
    return open_store(url, namespace="default", clock=None)


def sees_part(store: KafkaStore) -> bool:
    return store.traits.lookup == "owner"


async def shared_by(store: KafkaStore, number: int) -> Sequence[Instance]:
    """Return the instances once so many share all partitions."""

    async def found() -> Sequence[Instance]:
        each = await store.instances()
        return each if len(each) == number and sum(len(one.parts) for one in each) == PARTITIONS else []

    return await until(found, f"{number} instances share {PARTITIONS} partitions", 60)


async def test_each_member_knows_all_with_their_partitions_and_its_own_with_its_lanes(kafka: str) -> None:
    topic = new_name("schedules")
    async with opened(kafka, topic) as one, one.work("host-1-a", ["orders"]):
        (alone,) = await shared_by(one, 1)
        everything = tuple(f"{topic}/{n}" for n in range(PARTITIONS))
        assert (alone.name, alone.lanes, alone.parts) == ("host-1-a", ("orders",), everything)
        async with opened(kafka, topic) as other, other.work("host-2-b", ["orders", "mails"]):
            first, second = await shared_by(one, 2)
            assert sorted([*first.parts, *second.parts]) == sorted(everything)
            assert (len(first.parts), len(second.parts)) == (3, 3)
            assert [(each.name, each.lanes) for each in (first, second)] == [
                ("host-1-a", ("orders",)),
                ("host-2-b", None),
            ]
            seen_there = await shared_by(other, 2)
            assert [(each.name, each.lanes) for each in seen_there] == [
                ("host-1-a", None),
                ("host-2-b", ("mails", "orders")),
            ]
            assert [each.parts for each in seen_there] == [first.parts, second.parts]
            assert sees_part(one)
        (left,) = await shared_by(one, 1)
        assert left.parts == everything
        assert not sees_part(one)


async def test_without_a_group_a_process_knows_itself(kafka: str) -> None:
    async with opened(kafka, new_name("schedules"), "&member=1&members=3") as store, store.work("host-1-a", ["orders"]):
        (only,) = await store.instances()
        assert (only.name, [part.rpartition("/")[2] for part in only.parts]) == ("host-1-a", ["1", "4"])


@dataclass
class Order:
    number: int


async def take(order: Order) -> None: ...


async def test_the_page_shows_instances_and_lateness_and_says_that_it_sees_a_part(kafka: str) -> None:
    topic = new_name("schedules")
    store = opened(kafka, topic, f"&history={new_name('history')}")
    scheduler = Scheduler(store)
    scheduler.add_handler(take)
    async with scheduler, serving_app(admin(scheduler)) as base, client_of(base) as client:
        await shared_by(store, 1)
        await scheduler.schedule(Order(1), delay="0s")
        await scheduler.run_until_idle()
        front = (await client.get("/")).text
        assert "6 partitions" in front
        assert "of the 1 first attempts in the last 5 minutes" in front
        assert PART not in front
        async with opened(kafka, topic) as other, other.work("host-2-b", ["orders"]):
            await shared_by(other, 2)
            await shared_by(store, 2)
            page = (await client.get("/instances")).text
            assert "host-2-b" in page
            assert f"{topic}/0" in page
            assert PART in page


PART = "shared among several processes"
