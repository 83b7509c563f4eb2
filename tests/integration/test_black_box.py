"""Take over the data that a delay box of the article keeps in Redis. A model of that box writes the data."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import redis
from confluent_kafka import Consumer

from aiodelay.delay_box import DelayBox
from aiodelay.errors import ConfigurationError, StoreUnavailableError
from aiodelay.importers.black_box import take_over_black_box
from aiodelay.importers.put_all import Imported
from aiodelay.memory import MemoryStore
from aiodelay.redis import RedisStore
from tests.support.boxes import Out, request, send
from tests.support.kafka import create_topic, new_name
from tests.support.servers import RedisServer, redis_products, start
from tests.support.topics import lasting_producer, new_producer
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.asyncio

KEY = "blackbox-delay-key"


@pytest.fixture(params=redis_products(), ids=lambda found: found.name)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = start(request.param.program)
    yield server
    server.stop()


class BlackBox:
    """The article's box: its commands, and nothing else."""

    def __init__(self, server: RedisServer, kafka: str) -> None:
        self.redis: Any = redis.Redis(port=server.port)
        self.group = new_name("black-box")  # other processes of this run use the same broker
        self._producer = new_producer(kafka)
        self._kafka = kafka

    def add(self, member: str, topic: str, message: object, due: float, *, lives_ms: int | None = None) -> None:
        """`SET U '{"topic", "message"}'`, with `EX` or without, then `zadd blackbox-delay-key NX <due> U`."""
        self.redis.set(member, json.dumps({"topic": topic, "message": message}), px=lives_ms)
        self.redis.zadd(KEY, {member: due}, nx=True)

    def consume(self, topic: str, n: int) -> None:
        """Take in n requests, and commit that, as a group."""
        options = {"bootstrap.servers": self._kafka, "group.id": self.group, "auto.offset.reset": "earliest"}
        consumer = Consumer(options | {"enable.auto.commit": False})
        consumer.subscribe([topic])
        for record in consumer.consume(n, PATIENCE_S):
            request = json.loads(record.value() or b"")
            self.add(str(uuid4()), request["topic"], request["message"], time.time() + request["countdown"])
            consumer.commit(message=record, asynchronous=False)
        consumer.close()

    def tick(self) -> int:
        """Do what it does every second."""
        members = self.redis.zrange(KEY, "0", f"{time.time()}", byscore=True, offset=0, num=10)
        for member in members:
            body = json.loads(self.redis.get(member))
            self._producer.produce(body["topic"], body["message"])
        assert self._producer.flush(PATIENCE_S) == 0
        if members:
            self.redis.zrem(KEY, *members)
            self.redis.delete(*members)
        return len(members)


async def test_a_running_box_is_taken_over_with_nothing_lost_or_doubled(server: RedisServer, kafka: str) -> None:
    target, box = await create_topic(kafka, new_name("T")), BlackBox(server, kafka)
    now = time.time()
    for number in range(1_240):
        box.add(f"uuid-{number}", target, f"{number}", now - 10 if number < 40 else now + 1 + number / 1000)
    assert await asyncio.to_thread(lambda: [box.tick() for _ in range(3)]) == [10] * 3
    async with RedisStore(server.url, namespace="shop") as store:
        first = await take_over_black_box(server.url, store, allow=[target])
        assert first == Imported(1_210, 0, {})
        assert box.tick() == 0, "it finds nothing more"
        box.add("uuid-late", target, "1240", now + 2)
        box.redis.zadd(f"{KEY}:taken", {"uuid-39": now - 10})  # as if the first call had been cut short
        box.redis.set("uuid-39", json.dumps({"topic": target, "message": "39"}))
        assert await take_over_black_box(server.url, store, allow=[target]) == Imported(1, 1, {})
        assert await take_over_black_box(server.url, store, allow=[target]) == Imported(0, 0, {})
    assert [key for key in box.redis.scan_iter() if not key.startswith(b"{shop")] == [], "it is moved"
    intake, out = await create_topic(kafka, new_name("TB")), Out(kafka, target)
    async with DelayBox(server.url, f"kafka://{kafka}/{intake}", allow=[target], namespace="shop"):
        await out.until(1_241)
        records = await out.quiet(0.5)
    assert sorted(int(record.value() or b"") for record in records) == list(range(1_241))
    for record in records:
        number = int(record.value() or b"")
        due = now + 1 + number / 1000 if 40 <= number < 1_240 else now - 10
        assert record.timestamp()[1] >= int(due * 1000)
    out.close()


async def test_its_topic_is_taken_over_where_its_group_stands(server: RedisServer, kafka: str) -> None:
    intake, target = await create_topic(kafka, new_name("TB")), await create_topic(kafka, new_name("T"))
    box, out = BlackBox(server, kafka), Out(kafka, target)
    requests = [request(target, f"{number}", 1) for number in range(50)]
    await asyncio.to_thread(send, kafka, intake, requests, producer=lasting_producer(kafka))
    await asyncio.to_thread(box.consume, intake, 30)
    async with RedisStore(server.url) as store:
        assert (await take_over_black_box(server.url, store, allow=[target])).stored == 30
    for _ in range(2):  # the second time its own position stands
        async with DelayBox(server.url, f"kafka://{kafka}/{intake}", allow=[target], begin_after=box.group):
            await out.until(50)
            await out.quiet(0.5)
    assert sorted(map(int, out.values)) == list(range(50))
    out.close()


async def test_a_server_that_ends_meanwhile_leaves_nothing_half_moved(server: RedisServer) -> None:
    """Each answer of the box's server is lost in turn; what is repeated goes on."""
    box = BlackBox(server, "127.0.0.1:1")
    for number in range(20):
        box.add(f"u{number}", "T", "m", time.time() + 60)
    store = MemoryStore()
    found: set[str] = set()
    for lost in range(1, 5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("aiodelay.backends.redis.connection.client.Client.command", _failing_after(lost))
            with pytest.raises(StoreUnavailableError):
                await take_over_black_box(server.url, store, allow=["T"])
        found |= {key.decode() for key in box.redis.zrange(f"{KEY}:taken", 0, -1)}
    assert len(found) == 20
    final = await take_over_black_box(server.url, store, allow=["T"])
    assert final.skipped == {}
    assert [await store.get(f"u{number}") is not None for number in range(20)] == [True] * 20
    assert box.redis.exists(KEY, f"{KEY}:taken") == 0


def _failing_after(n: int) -> object:
    from aiodelay.backends.redis.connection.client import Client  # noqa: PLC0415 - what is patched
    from aiodelay.backends.redis.connection.faults import Fault  # noqa: PLC0415

    command, left = Client.command, [n]

    async def failing(self: Client, *arguments: object) -> object:
        answer = await command(self, *arguments)  # type: ignore[arg-type]
        left[0] -= 1
        if not left[0]:
            raise Fault("unknown", "the answer was lost")
        return answer

    return failing


async def test_what_cannot_be_taken_over_stays_and_is_named(server: RedisServer) -> None:
    box, due = BlackBox(server, "127.0.0.1:1"), time.time() + 60
    box.add("good", "T", {"a": [1, "é"]}, due)
    box.add("gone", "T", "m", due, lives_ms=1)
    box.add("forbidden", "X", "m", due)
    box.add("number", "T", 7, due)
    box.add("in ms", "T", "m", due * 1000)
    box.add("x" * 256, "T", "m", due)
    box.redis.set("no json", "nope")
    box.redis.zadd(KEY, {"no json": due})
    await until(lambda: not box.redis.exists("gone"), "the message has gone")
    store = MemoryStore()
    found = await take_over_black_box(server.url, store, allow=["T"])
    assert (found.stored, len(found.skipped)) == (1, 6)
    reasons = {
        "gone": "no content",
        "forbidden": "not allowed",
        "number": "cannot be read",
        "no json": "cannot be read",
    }
    reasons |= {"in ms": "if the unit is s", "x" * 256: "cannot be an id"}
    assert all(part in found.skipped[name] for name, part in reasons.items()), found.skipped
    snapshot = await store.get("good")
    assert snapshot is not None
    assert (snapshot.record.envelope.payload, snapshot.record.due_ms) == (
        b'{"a": [1, "\\u00e9"]}',
        -int(-due * 1000 // 1),
    )
    box.add("later", "T", "m", due)
    assert (await take_over_black_box(server.url, store, allow=["T", "X"])).stored == 2
    assert box.redis.zcard(f"{KEY}:taken") == 5


async def test_scores_in_ms_and_another_key(server: RedisServer) -> None:
    box, due_ms = BlackBox(server, "127.0.0.1:1"), int(time.time() * 1000) + 60_000
    box.redis.set("u", json.dumps({"topic": "T", "message": "m"}))
    box.redis.zadd("other", {"u": due_ms})
    store = MemoryStore()
    assert (await take_over_black_box(server.url, store, allow=["T"], key="other", unit="ms")).stored == 1
    snapshot = await store.get("u")
    assert snapshot is not None
    assert snapshot.record.due_ms == due_ms
    with pytest.raises(ConfigurationError, match="unit is 'h'"):
        await take_over_black_box(server.url, store, allow=["T"], unit="h")  # type: ignore[arg-type]
