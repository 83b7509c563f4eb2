"""Kafka processes that share a topic by number: each serves its own partitions only."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.protocol.group import LeaveGroupRequest

from aiodelay import Conflict, UnsupportedByStoreError
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Demand, Envelope, Put, Stored, WorkStatus
from aiodelay.errors import ConfigurationError, StoreUnavailableError
from aiodelay.kafka import KafkaStore
from tests.faults.programs.kafka_owner import Plan
from tests.support.kafka import create_topic, new_name
from tests.support.processes import Crew
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.asyncio

N = 400


async def values(bootstrap: str, topic: str, n: int) -> Counter[bytes]:
    """Return what was committed to a topic, once there is as much as is awaited."""
    options = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
    found: Counter[bytes] = Counter()
    async with AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, **options) as consumer:
        async with asyncio.timeout(2 * PATIENCE_S):
            while found.total() < n:
                for batch in (await consumer.getmany(timeout_ms=100)).values():
                    found.update(each.value for each in batch)
        for batch in (await consumer.getmany(timeout_ms=500)).values():
            found.update(each.value for each in batch)
    return found


async def deliver(store: KafkaStore) -> None:
    with store.transferring(store.sinks[0]) as moves:
        while True:
            moves.clear()
            with suppress(StoreUnavailableError):
                await moves.transfer(Demand(20))
            await asyncio.sleep(0.01)


async def test_s7_members_share_the_partitions_and_one_that_is_replaced_loses_and_doubles_nothing(kafka: str) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=4&members=2&member="
    target = await create_topic(kafka, new_name())
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(KafkaStore(f"{url}{member}")) for member in (0, 1)]
        for store in stores:
            await stack.enter_async_context(store.work("w", []))
        assert [sorted(each.partition for each in store.partitions) for store in stores] == [[0, 2], [1, 3]]
        barriers = [each.session.barrier for each in stores[0].partitions.values()]
        puts = [Put(new_op(), Envelope(f"m{i}", "kafka", target, payload=b"%d" % i), After(0)) for i in range(N)]
        for store, part in zip(stores, (puts[::2], puts[1::2]), strict=True):
            assert all(isinstance(each, Stored) for each in await store.apply(part))
        tasks = [asyncio.create_task(deliver(store)) for store in stores]
        async with KafkaStore(f"{url}1") as other, other.work("w", []):  # as when one is deployed anew
            tasks.append(asyncio.create_task(deliver(other)))
            found = await values(kafka, target, N)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert [each.session.barrier for each in stores[0].partitions.values()] == barriers  # nobody disturbed it
    assert found == Counter(b"%d" % i for i in range(N))


async def test_a_member_says_what_it_cannot_know(kafka: str) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=2&members=2&member="
    async with KafkaStore(f"{url}0") as store, store.work("w", []):
        assert store.traits.conflicts == {"replace", "keep"}
        assert store.traits.cancel == "recorded"
        envelope = Envelope("m", "kafka", "t")
        with pytest.raises(UnsupportedByStoreError):
            await store.apply([Put(new_op(), envelope, After(0), conflict=Conflict.error())])
        others = next(f"m{i}" for i in range(99) if _is_others(store, f"m{i}"))
        with pytest.raises(UnsupportedByStoreError, match="partition 1"):
            await store.get(others)
    with pytest.raises(ConfigurationError, match="member"):
        KafkaStore(f"{url}2")


async def test_a_named_process_that_was_killed_has_its_partitions_again_before_its_session_ends(
    kafka: str, tmp_path: Path
) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=2&instance=orders-0"
    plan = Plan(name="killed", store=url, runs=f"{tmp_path / 'runs'}", session_ms=600_000)
    with Crew(tmp_path) as crew:
        owner = crew.start("kafka_owner", plan, name="killed")
        owner.line("ready")
        owner.kill()
    async with KafkaStore(url) as store, store.work("w", []) as work:
        await until(lambda: work.status() == WorkStatus("ready", 2, 2), "it has them again")


async def test_of_two_processes_of_one_name_the_later_one_owns_and_the_earlier_one_ends_loudly(
    kafka: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=2&instance=orders-0"
    async with (
        KafkaStore(url) as one,
        one.work("one", []) as first,
        KafkaStore(url) as two,
        two.work("two", []) as second,
    ):
        await until(lambda: first.status().phase == "ended", "the first one has noticed")
        assert "instance=orders-0 is another process's now" in first.status().why
        assert not one.partitions
        await until(lambda: second.status() == WorkStatus("ready", 2, 2), "the second one owns all")
        assert [each.name for each in await two.instances()] == ["orders-0"]
    assert [each.levelname for each in caplog.records if "instance=orders-0" in each.message] == ["ERROR"]


async def test_a_named_process_that_the_broker_has_forgotten_joins_again(kafka: str) -> None:
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=2&instance=orders-0"
    async with KafkaStore(url) as store, store.work("w", []) as work:
        (group,) = store.assignment.groups.values()
        before = group._member_id
        member: Any = group._member()
        await member._coordinator._send_req(LeaveGroupRequest(group.name, before))  # as when it stood still
        await until(lambda: group._member_id != before and work.status() == WorkStatus("ready", 2, 2), "it is back")


@pytest.mark.parametrize("options", ["instance=a/b", "instance=.", "instance=a&members=2"])
async def test_a_name_that_cannot_be_is_refused(options: str) -> None:
    with pytest.raises(ConfigurationError, match="instance in kafka://"):
        KafkaStore(f"kafka://localhost/schedules?{options}")


def _is_others(store: KafkaStore, message_id: str) -> bool:
    try:
        store._parts.lookup.partition_of(message_id)
    except UnsupportedByStoreError:
        return True
    return False
