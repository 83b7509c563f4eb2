"""No wait is endless and no answer is premature: partitions that stall, are being read, or are given away."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import NodeNotReadyError
from aiokafka.protocol.metadata import MetadataRequest

from aiodelay.backends.kafka.client import client_of, consumer_of, plain_consumer_of, stop
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.topics.group import SESSION_MS
from aiodelay.core.ids import new_op
from aiodelay.core.values import (
    After,
    At,
    Cancel,
    Command,
    Dead,
    DeadKey,
    Demand,
    Done,
    Envelope,
    Fire,
    Put,
    Refused,
    Settlement,
    Stored,
    Unknown,
)
from aiodelay.errors import StoreUnavailableError, UnsupportedByStoreError
from aiodelay.kafka import KafkaStore
from aiodelay.kafka.records import Read
from aiodelay.ports import Work
from tests.support.kafka import Broker, create_topic, ids_in, new_name
from tests.support.proxy import proxied
from tests.support.slow_stores import opened_patiently, stored_patiently
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

ALL = Demand(100)
METADATA = 3


def url_of(kafka: str, schedules: str, partitions: int = 1, timeout_ms: int = 2000) -> str:
    options = f"partitions={partitions}&members=1&timeout_ms={timeout_ms}"
    return f"kafka://{kafka}/{schedules}?create_topic=true&{options}"


def opened(
    kafka: str, schedules: str, partitions: int = 1, timeout_ms: int = 2000
) -> AbstractAsyncContextManager[KafkaStore]:
    return opened_patiently(lambda: KafkaStore(url_of(kafka, schedules, partitions, timeout_ms)))


def put(name: str, target: str, due: At | After = After(0), lane: str = "kafka") -> Put:  # noqa: B008 - immutable
    return Put(new_op(), Envelope(name, lane, target, payload=name.encode()), due)


async def settled_patiently(work: Work, settlements: Sequence[Settlement]) -> None:
    """Settle claims. Repeat it while the store cannot answer."""

    async def is_settled() -> bool:
        with suppress(StoreUnavailableError):
            await work.settle(settlements)
            return True
        return False

    await until(is_settled, "the claims are settled")


async def fired_patiently(store: KafkaStore, message_id: str) -> None:
    """Make a message due. Repeat the command while the store cannot answer."""

    async def is_fired() -> bool:
        return isinstance((await store.apply([fire]))[0], Stored)

    fire = Fire(new_op(), message_id)
    await until(is_fired, "the message is due")


@asynccontextmanager
async def foreign(kafka: str, schedules: str) -> AsyncIterator[None]:
    """A transaction that somebody leaves open in a schedules topic's first partition."""
    options = {"transactional_id": new_name(), "transaction_timeout_ms": 200_000}
    async with AIOKafkaProducer(bootstrap_servers=kafka, **options) as producer:
        await producer.begin_transaction()
        await producer.send_and_wait(schedules, None, key=b"other", partition=0)
        yield
        await producer.abort_transaction()


async def test_f27_l5_a_partition_that_stalls_under_way_holds_up_no_other(kafka: str) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    (stalled,), (other,) = ids_in(0, 2), ids_in(1, 2)
    async with opened(kafka, schedules, 2) as store, store.work("w", []):
        await stored_patiently(store, [put(stalled, target), put(other, target, After(3_600_000))])
        async with foreign(kafka, schedules):
            with store.transferring(store.sinks[0]) as moves:

                async def is_moved() -> bool:
                    with suppress(StoreUnavailableError):  # between two sessions
                        return bool((await moves.transfer(ALL)).moved)
                    return False

                assert not await is_moved(), "what is written cannot be read"
                await fired_patiently(store, other)
                await until(is_moved, "the message of the other partition is moved")
            assert await store.get(other) is None
            assert await store.get(stalled) is not None


async def test_f27_l1_a_settlement_that_cannot_be_read_back_is_not_waited_for_longer_than_renewals_can(
    kafka: str,
) -> None:
    schedules = new_name("schedules")
    async with opened(kafka, schedules) as store, store.work("w", ["h"]) as work:
        await stored_patiently(store, [put("m", "", lane="h")])
        (claim,) = (await work.claim({"h": ALL}, request="1", lease_ms=60_000)).claims
        done = Done(claim.record.id, claim.record.revision, claim.token)
        async with foreign(kafka, schedules):
            async with asyncio.timeout(20):
                with pytest.raises(StoreUnavailableError, match="read back"):
                    await work.settle([done])
        await settled_patiently(work, [done])
        assert await store.get("m") is None


async def test_f27_dead_letters_answer_in_time(kafka: str) -> None:
    schedules = new_name("schedules")
    async with opened(kafka, schedules) as store, store.work("w", ["h"]) as work:
        await stored_patiently(store, [put("bad", "", lane="h"), put("worse", "", lane="h")])
        claims = (await work.claim({"h": ALL}, request="1", lease_ms=60_000)).claims
        ended = [Dead(each.record.id, each.record.revision, each.token, "rejected", 1) for each in claims]
        await settled_patiently(work, ended)
        keys = [DeadKey(each.id, each.revision) for each in ended]
        async with foreign(kafka, schedules), asyncio.timeout(60):
            (outcome,) = await store.redrive(keys[:1])
            assert isinstance(outcome, Unknown)
            with pytest.raises(StoreUnavailableError):
                await store.purge(keys[1:])


@pytest.mark.parametrize(
    "commands", [[put("m", "t"), put("m", "t")], [put("m", "t"), Cancel(new_op(), "m")]], ids=["puts", "a cancel"]
)
async def test_commands_under_way_while_partitions_are_given_away_have_an_answer_each(
    kafka: str, commands: list[Command]
) -> None:
    schedules = new_name("schedules")
    async with opened(kafka, schedules) as store, store.work("w", []):
        applying = asyncio.create_task(store.apply(commands))
        await asyncio.sleep(0)
        store.assignment.assign(schedules, [])
        outcomes = await applying
        assert len(outcomes) == 2
        assert all(isinstance(each, Refused | Unknown) for each in outcomes)


async def test_looking_waits_for_what_is_being_read(kafka: str) -> None:
    schedules = new_name("schedules")
    async with opened(kafka, schedules, timeout_ms=60_000) as store, store.work("w", []):
        (stored,) = await store.apply([put("m", "t", After(3_600_000))])
        assert isinstance(stored, Stored)
    async with opened(kafka, schedules, timeout_ms=60_000) as store:
        store.assignment.own("test")
        assert await store.get("m") is not None


async def test_looking_says_so_where_a_later_topic_is_anothers(kafka: str) -> None:
    first, second = new_name("first"), new_name("second")
    for name, partitions in ((first, 1), (second, 2)):
        async with opened(kafka, name, partitions):
            pass
    async with KafkaStore(f"kafka://{kafka}/{first},{second}?member=0&members=2") as store, store.work("w", []):
        assert await store.get(ids_in(0, 2)[0]) is None
        with pytest.raises(UnsupportedByStoreError, match="partition 1"):
            await store.get(ids_in(1, 2)[0])


async def test_f3_what_was_decided_before_a_process_stood_still_is_not_written_after(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    async with (
        opened(kafka, schedules, timeout_ms=60_000) as store,
        store.work("w", []),
        AIOKafkaProducer(bootstrap_servers=kafka) as plain,
    ):
        (stored,) = await store.apply([put("m", target)])
        assert isinstance(stored, Stored)
        (mine,) = store.partitions.values()
        await store._parts.targets.inspect([target])
        missed: list[tuple[Sequence[Read], int]] = []
        with monkeypatch.context() as patched:
            patched.setattr(mine, "take_in", lambda *read: missed.append(read))
            await plain.send_and_wait(schedules, None, key=b"m")  # somebody cancels it while this process stands still
            assert len(mine.moves.begin("kafka", ALL)[0]) == 1
            mine._ownership._last_read_s -= SESSION_MS / 1000 + 1
            await asyncio.sleep(0.5)  # it may settle the message, and must not
        for batch, read_to in missed:
            mine.take_in(batch, read_to)
        assert await store.get("m") is None
    async with AIOKafkaConsumer(target, bootstrap_servers=kafka, isolation_level="read_committed") as consumer:
        (end,) = (await consumer.end_offsets(consumer.assignment())).values()
    assert end == 0


async def test_r1_closing_that_is_cancelled_leaves_nothing_open(kafka: str) -> None:
    before = asyncio.all_tasks()

    async def use() -> None:
        async with opened(kafka, new_name("schedules"), timeout_ms=60_000) as store, store.work("w", []):
            await store.pause("kafka")
            await store._parts.targets.inspect([new_name()])
            is_used.set()
            await asyncio.Event().wait()

    is_used = asyncio.Event()
    using = asyncio.create_task(use())
    await is_used.wait()
    for _ in range(2):
        using.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await using
    assert asyncio.all_tasks() <= before


async def test_k20_a_start_that_is_cancelled_leaves_no_connection_open(kafka: str) -> None:
    async def look(_: int, data: bytes, is_answer: bool) -> None:
        if not is_answer and struct.unpack_from(">h", data, 4)[0] == METADATA:
            has_asked.set()
            await asyncio.Event().wait()

    has_asked = asyncio.Event()
    host, _, port = kafka.rpartition(":")
    async with proxied(int(port), host) as proxy:
        proxy.look = look
        consumer = consumer_of(Cluster("slow", {"bootstrap_servers": [f"127.0.0.1:{proxy.port}"]}, 10_000))
        starting = asyncio.create_task(consumer.start())
        await has_asked.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await stop(consumer)
    gc.collect()  # which complains of a connection that is open


async def test_k31_a_connection_that_is_made_while_its_client_closes_is_closed(kafka: str) -> None:
    client = client_of(Cluster("closing", {"bootstrap_servers": [kafka]}, 10_000))
    await client.bootstrap()
    request = asyncio.create_task(client.send(client.get_random_node(), MetadataRequest([])))
    await asyncio.sleep(0)  # the request begins to connect
    await client.close()
    with pytest.raises(NodeNotReadyError):
        await request
    gc.collect()  # which complains of a connection that is open


async def test_k31_a_consumer_that_cannot_tell_its_group_leaves_no_task(own_broker: Broker) -> None:
    topic = await create_topic(own_broker.bootstrap, new_name(), 2)
    cluster = Cluster("leaving", {"bootstrap_servers": [own_broker.bootstrap]}, 60_000)
    consumer = plain_consumer_of(cluster, topic, group_id=new_name("group"), heartbeat_interval_ms=100)
    await consumer.start()
    own_broker.kill()
    host, _, port = own_broker.bootstrap.rpartition(":")
    with socket.create_server((host, int(port))):
        await stop(consumer)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_k25_a_host_that_is_silent_leaves_time_for_the_next_one(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.shuffle", lambda _: None)  # aiokafka asks hosts in the order of chance
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = f"127.0.0.1:{silent.getsockname()[1]},{kafka}"
        url = url_of(hosts, new_name("schedules"), timeout_ms=5000)
        async with opened_patiently(lambda: KafkaStore(url)) as store:
            await stored_patiently(store, [put("m", "t", After(3_600_000))])
