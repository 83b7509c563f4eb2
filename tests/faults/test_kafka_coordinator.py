"""A transaction whose end has a lost or late request or answer: only the log shows its outcome."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from threading import Event
from typing import NamedTuple

import pytest
from aiokafka.client import CoordinationType

from aiodelay.backends.kafka.client._overrides.producer import OwnTransactions
from aiodelay.core.values import Stored
from aiodelay.errors import StoreUnavailableError
from aiodelay.kafka import KafkaStore
from aiodelay.kafka.records import BARRIER
from tests.support.kafka import Broker, create_topic, new_name, read, started
from tests.support.proxy import Proxy, proxied_by_thread
from tests.support.slow_stores import opened_patiently, stored_patiently
from tests.support.topics import is_committed
from tests.support.waiting import until

from .test_kafka_store import ALL, moved, now_ms, put, transfer

pytestmark = pytest.mark.asyncio

FIND_COORDINATOR, ADD_PARTITIONS, END = 10, 24, 26
TIMEOUT_MS, PATIENT_MS = 3000, 60_000
"""The time limit of clients that lose an answer, and of clients that lose none, however slow the machine is."""
LATE_S = 60.0
"""So late comes an answer: a client that stood still for seconds must not find it beside the end of its time limit."""
IN_TIME_S = 12.0
"""Less than the 15 s after which a broker ends a transaction that its producer has left open."""


class Request(NamedTuple):
    """A request about a transaction; `epoch` is its producer's, which no later one of its id has."""

    kind: int
    epoch: int


def kind_in(data: bytes) -> int:
    """Return the kind of a client's request; 0 = too short for one that these tests know."""
    return int(struct.unpack_from(">h", data, 4)[0]) if len(data) > 14 else 0


def request_in(data: bytes) -> Request | None:
    """Return what a client asks its transaction coordinator, if it does."""
    kind = kind_in(data)
    if kind not in (ADD_PARTITIONS, END):
        return None
    at = 14 + max(struct.unpack_from(">h", data, 12)[0], 0)  # after the client's name
    at += 2 + struct.unpack_from(">h", data, at)[0] + 8  # after the transactional id and the producer's
    return Request(kind, struct.unpack_from(">h", data, at)[0])


class Coordinator:
    """Sees what transactions are begun and ended, and strikes at an end when told to: once."""

    def __init__(self, proxy: Proxy) -> None:
        self.requests: list[Request] = []
        self.fault = ""
        self.struck: list[int] = []
        self._at: int | None = None
        proxy.look = self.look

    async def look(self, number: int, data: bytes, is_answer: bool) -> None:
        if is_answer:
            await self._answered(number)
        elif (request := request_in(data)) is not None:
            self.requests.append(request)
            if self.fault and request.kind == END:
                self._at = number
                self.struck.append(len(self.requests) - 1)
                if self.fault == "request lost":
                    self.fault = ""
                    raise ConnectionResetError

    async def _answered(self, number: int) -> None:
        if self._at != number or not self.fault:
            return
        fault, self.fault = self.fault, ""
        if fault == "answer lost":
            raise ConnectionResetError
        await asyncio.sleep(LATE_S)


@pytest.fixture(scope="module")
def seen() -> Iterator[tuple[Broker, Proxy]]:
    """A broker, and a proxy that stands between it and who knows it by the proxy's address."""
    with proxied_by_thread(1) as proxy:
        broker = started(
            listeners="PLAINTEXT://127.0.0.1:{port},SEEN://127.0.0.1:{login},CONTROLLER://127.0.0.1:{controller}",
            advertised_listeners=f"PLAINTEXT://127.0.0.1:{{port}},SEEN://127.0.0.1:{proxy.port}",
            listener_security_protocol_map="CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SEEN:PLAINTEXT",
        )
        proxy.point_to(int(broker.login.rpartition(":")[2]))
        yield broker, proxy
        broker.stop()


@pytest.mark.parametrize("fault", ["request lost", "answer lost", "answer late"])
async def test_k4_f24_the_log_tells_what_became_of_a_transaction_and_its_producer_ends(
    seen: tuple[Broker, Proxy], fault: str
) -> None:
    broker, proxy = seen
    coordinator = Coordinator(proxy)
    schedules, target = new_name("schedules"), await create_topic(broker.bootstrap, new_name())
    url = f"kafka://127.0.0.1:{proxy.port}/{schedules}?create_topic=true&partitions=1&timeout_ms={TIMEOUT_MS}"
    async with opened_patiently(lambda: KafkaStore(url)) as store, store.work("w", ["kafka"]):
        for first in (0, 5, 10):
            await stored_patiently(store, [put(i, target, now_ms()) for i in range(first, first + 5)])
            coordinator.fault = fault
            async with asyncio.timeout(60):
                while await store.counts():
                    with suppress(StoreUnavailableError):  # between two sessions
                        await transfer(store, ALL)
                    await asyncio.sleep(0.01)
    assert Counter(record.value for record in await read(broker.bootstrap, target)) == Counter(
        b"%d" % i for i in range(15)
    )
    assert len(coordinator.struck) == 3
    for i in coordinator.struck:
        request, later = coordinator.requests[i], coordinator.requests[i + 1 :]
        assert Request(ADD_PARTITIONS, request.epoch) not in later, "a late end might end this one"
        assert fault != "answer late" or request not in later


async def test_k30_a_connection_that_breaks_while_the_coordinator_is_asked_for_ends_no_producer(
    seen: tuple[Broker, Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    broker, proxy = seen
    target, breaks = await create_topic(broker.bootstrap, new_name()), 0

    async def look(_: int, data: bytes, is_answer: bool) -> None:
        nonlocal breaks
        if not is_answer and kind_in(data) == FIND_COORDINATOR and breaks < 2:
            breaks += 1
            raise ConnectionResetError

    options = {"bootstrap_servers": f"127.0.0.1:{proxy.port}", "transactional_id": new_name("aiodelay")}
    async with OwnTransactions(**options, request_timeout_ms=PATIENT_MS) as producer:
        producer._sender._coordinator_dead(CoordinationType.TRANSACTION)
        proxy.look = look
        async with asyncio.timeout(60), producer.transaction():
            await producer.send_and_wait(target, b"written", partition=0)
    proxy.look = None
    assert breaks == 2
    assert [record.value for record in await read(broker.bootstrap, target, 1)] == [b"written"]
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []


async def test_k3_closing_leaves_no_transaction_open(seen: tuple[Broker, Proxy]) -> None:
    broker, proxy = seen
    schedules, is_begun = new_name("schedules"), Event()

    async def look(_: int, data: bytes, is_answer: bool) -> None:
        if is_armed and not is_answer and (request := request_in(data)) and request.kind == ADD_PARTITIONS:
            is_begun.set()
            await asyncio.sleep(0.3)  # closing begins meanwhile

    is_armed = False
    proxy.look = look
    url = f"kafka://127.0.0.1:{proxy.port}/{schedules}?create_topic=true&partitions=1&timeout_ms={PATIENT_MS}"
    async with opened_patiently(lambda: KafkaStore(url)) as store, store.work("w", ["kafka"]):
        await store.apply([put(0, "nowhere", now_ms() + 60_000)])
        is_armed = True
        putting = asyncio.create_task(store.apply([put(1, "nowhere", now_ms() + 60_000)]))
        assert await asyncio.to_thread(is_begun.wait, 60)
    assert [type(each) for each in await putting] == [Stored]
    proxy.look = None

    async def is_ended() -> bool:
        return await asyncio.to_thread(is_committed, broker.bootstrap, schedules, 1)

    await until(is_ended, "no transaction is open", IN_TIME_S)


async def test_k3_callers_that_are_cancelled_end_no_transaction(kafka: str) -> None:
    schedules, target = new_name("schedules"), await create_topic(kafka, new_name())
    url = f"kafka://{kafka}/{schedules}?create_topic=true&partitions=1"
    async with opened_patiently(lambda: KafkaStore(url)) as store, store.work("w", ["kafka"]):
        await store.apply([put(0, target, now_ms())])
        await moved(store, 1)  # so all clients have been started: aiokafka lets go of none while it starts
        for i in range(1, 40):
            putting = asyncio.create_task(store.apply([put(i, target, now_ms())]))
            moving = asyncio.create_task(transfer(store, ALL))
            await asyncio.sleep(0.001 * (i % 20))  # each is cancelled later in its course
            putting.cancel()
            moving.cancel()
            await asyncio.wait([putting, moving])
        while await store.counts():
            await transfer(store, ALL)
    found = Counter(record.value for record in await read(kafka, target))
    assert set(found.values()) == {1}
    assert len([each for each in await read(kafka, schedules) if each.key == BARRIER]) == 1
