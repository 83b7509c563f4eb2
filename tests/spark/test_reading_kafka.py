"""Reading the partitions of a Kafka store without owning them: the same messages as an owner, and no write."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from aiodelay import Message
from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.client.options import Cluster
from aiodelay.backends.kafka.store.table_scan import Scanner
from aiodelay.backends.kafka.topics.topic import SETTINGS
from aiodelay.core.ids import new_op
from aiodelay.core.table_scan import Scan
from aiodelay.core.values import Again, Cancel, Dead, Demand, Done, Envelope, Stored
from aiodelay.errors import StoreMismatchError
from aiodelay.ports import Store
from aiodelay.ports.clock import SystemClock
from tests.spark.test_reading import DUE, DUE_MS, EVERYTHING, parts_of, put, reader, rows, within
from tests.support.kafka import create_topic, new_name


async def _topic(bootstrap: str) -> str:
    settings = {name.replace(".", "_"): value for name, value in SETTINGS.items()}
    return await create_topic(bootstrap, new_name("schedules"), 3, **settings)


async def _ends(bootstrap: str, topic: str) -> dict[TopicPartition, int]:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap)
    await consumer.start()
    try:
        found: dict[TopicPartition, int] = await consumer.end_offsets([TopicPartition(topic, n) for n in range(3)])
    finally:
        await consumer.stop()
    return found


def test_partitions_are_read_as_their_owner_sees_them(kafka: str) -> None:
    topic = asyncio.run(_topic(kafka))
    url = f"kafka://{kafka}/{topic}"

    async def fill(store: Store) -> None:
        async with store.work("w", ["work", "kafka"]) as work:
            while work.status().phase != "ready":
                await work.wait(until_ms=None)
            puts = [put(Envelope(f"m{i}", "work", "a", payload=b"%d" % i)) for i in range(40)]
            puts += [
                put(EVERYTHING),
                put(Envelope("done", "work", "a"), 1_000),
                put(Envelope("dead", "work", "a"), 1_000),
            ]
            puts += [put(Envelope("again", "work", "a"), 1_000)]
            for outcome in await store.apply(puts):
                assert isinstance(outcome, Stored)
            await store.apply([put(Envelope("m1", "work", "b", payload=b"new")), Cancel(new_op(), "m2")])
            claimed: dict[str, Any] = {}
            while len(claimed) < 3:
                found = await work.claim({"work": Demand(9)}, request=new_op().hex(), lease_ms=15_000)
                claimed |= {each.record.id: each for each in found.claims}
            each = {name: (claim.record.id, claim.record.revision, claim.token) for name, claim in claimed.items()}
            await work.settle(
                [
                    Done(*each["done"]),
                    Dead(*each["dead"], "rejected", 1, "no", traceback="Traceback\n  é"),
                    Again(*each["again"], DUE_MS, 1, "boom"),
                ]
            )

    within(url, fill)
    before = asyncio.run(_ends(kafka, topic))
    parts = parts_of(reader(url))
    found = {row["id"]: row for part in parts for row in part}
    assert len(parts) == 3
    assert all(parts)
    assert sorted(found) == sorted([*(f"m{i}" for i in range(40) if i != 2), EVERYTHING.id, "again"])
    assert sum(map(len, parts)) == len(found)
    assert (found["m1"]["payload"], found["m1"]["to"]) == (b"new", "work:b")
    assert (found["again"]["attempt"], found["again"]["first_error"]) == (1, "boom")
    assert (found["again"]["next_attempt_at"], found["again"]["state"]) == (DUE, "scheduled")
    every = found[EVERYTHING.id]
    assert (every["payload"], every["key"], every["headers"]) == (
        EVERYTHING.payload,
        b"\x00k",
        [*EVERYTHING.headers.items()],
    )
    (letter,) = rows(url, table="dead")
    assert (letter["id"], letter["reason"], letter["last_error"]) == ("dead", "rejected", "no")
    assert (letter["errors"], letter["traceback"]) == (["no"], "Traceback\n  é")
    scanner = Scanner(Cluster("kafka", {"bootstrap_servers": [kafka]}, 10_000), [topic], SystemClock())
    for columns, traceback in ((("id", "errors"), None), (("traceback",), "Traceback\n  é")):
        scan = Scan(table="dead", columns=columns)
        indexes = [asyncio.run(scanner._read(scan, part))[0] for part in scanner.parts()]
        assert [each.traceback for index in indexes for each in index.table.letters] == [traceback]
    assert {row["id"] for row in rows(url, table="done")} >= {"done", "m2"}
    assert not {row["id"] for row in rows(url, "id", table="done")} & found.keys()
    assert [row["id"] for row in rows(url, "id", ids="m3,again", dueFrom="2030-01-01T00:00:00Z")] == ["m3"]
    assert asyncio.run(_ends(kafka, topic)) == before


def test_records_of_other_programs_open_transactions_and_what_comes_later(kafka: str) -> None:
    topic = asyncio.run(_topic(kafka))
    url = f"kafka://{kafka}/{topic}"

    def wire(message_id: str, payload: bytes = b"x") -> records.Wire:
        return records.encode(Message(payload, at=DUE, id=message_id, to="kafka:orders"))

    async def send(*wires: records.Wire, commit: bool = True) -> None:
        producer = AIOKafkaProducer(bootstrap_servers=kafka, transactional_id=new_name())
        await producer.start()
        try:
            await producer.begin_transaction()
            for each in wires:
                await producer.send_and_wait(topic, each.value, each.key, 0, headers=each.headers)
            await (producer.commit_transaction() if commit else producer.abort_transaction())
        finally:
            await producer.stop()

    bad = wire("bad")._replace(headers=[("scheduler-epoch", b"soon"), ("scheduler-target-topic", b"orders")])
    asyncio.run(send(wire("a"), wire("b"), records.encode_cancel(b"a"), wire("b", b"newest"), bad))
    asyncio.run(send(wire("aborted"), commit=False))
    given = reader(url)
    parts = given.partitions()
    asyncio.run(send(wire("later")))
    found = {row["id"]: row for part in parts for batch in given.read(part) for row in batch.to_pylist()}
    assert sorted(found) == ["b", "bad"]
    assert (found["b"]["payload"], found["b"]["due_at"]) == (b"newest", DUE)
    assert found["bad"]["last_error"].startswith("cannot be read: ")
    assert sorted(row["id"] for row in rows(url, "id")) == ["b", "bad", "later"]
    assert rows(url, "id", "version", table="done") == [{"id": "a", "version": None}]


def test_a_missing_topic_is_told_and_not_made(kafka: str) -> None:
    name = new_name("missing")
    for _ in range(2):
        with pytest.raises(StoreMismatchError) as raised:
            rows(f"kafka://{kafka}/{name}?create_topic=true", "id")
        assert name in f"{raised.value}"
