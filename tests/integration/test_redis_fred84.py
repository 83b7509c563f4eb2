"""Take over the data of fred84/delayedQueue: many pages, messages only in lists, and unreadable ones."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from aiodelay import Context, Scheduler
from aiodelay.core.values import Query
from aiodelay.errors import StoreUnavailableError
from aiodelay.importers.fred84 import import_fred84, simple_name
from aiodelay.importers.put_all import Imported
from aiodelay.memory import MemoryStore
from aiodelay.redis import RedisStore
from tests.support.servers import RedisServer, redis_products, start

CLASS = "com.shop.events.OrderPlaced"


@pytest.fixture(params=redis_products(), ids=lambda found: found.name)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = start(request.param.program)
    yield server
    server.stop()


def envelope(number: int, **changes: Any) -> str:  # noqa: ANN401
    """As version 0.5.1 writes it, with Jackson's defaults."""
    content = {"payload": {"id": f"{number}", "total": number, "note": "é"}, "type": CLASS, "attempt": 1}
    return json.dumps({**content, "logContext": {"trace": f"t{number}"}, **changes}, ensure_ascii=False)


def enqueue(server: RedisServer, number: int, due_ms: int, prefix: str = "de_") -> None:
    """As its `enqueueWithDelayNonBlocking` does."""
    server.command("HSET", f"{prefix}events", f"{CLASS}###{number}", envelope(number))
    server.command("ZADD", f"{prefix}delayed_events", "NX", f"{due_ms}", f"{CLASS}###{number}")


@dataclass
class OrderPlaced:
    id: str
    total: int
    note: str


def test_all_that_waits_is_taken_over_once_and_delivered(server: RedisServer) -> None:
    now_ms = int(time.time() * 1000)
    for number in range(1_203):  # three pages
        enqueue(server, number, now_ms - 1000 + number)
    server.command("LPUSH", "de_orderplaced", envelope(5))  # a copy of one that is still in the zset
    server.command("LPUSH", "de_orderplaced", envelope(9_999, attempt=70))  # a last attempt
    server.command("SET", "de_delayed_events_lock", "lock")

    async def play() -> None:
        async with RedisStore(server.url, namespace="shop") as store:
            assert await import_fred84(server.url, store) == Imported(1_204, 0, {})
            assert await import_fred84(server.url, store) == Imported(0, 1_204, {})
            (last,) = [each for each in await store.search(Query(limit=1_204)) if each.record.id.endswith("#9999")]
            assert abs(last.record.due_ms - now_ms) < 60_000
        seen: dict[str, tuple[OrderPlaced, dict[str, bytes]]] = {}
        scheduler = Scheduler(server.url, namespace="shop")

        @scheduler.handler(concurrency=100)
        async def placed(event: OrderPlaced, context: Context) -> None:
            assert context.id not in seen
            seen[context.id] = event, dict(context.headers)

        async with scheduler:
            await scheduler.run_until_idle()
        assert seen.keys() == {f"{CLASS}###{number}" for number in [*range(1_203), 9_999]}
        assert seen[f"{CLASS}###7"] == (OrderPlaced("7", 7, "é"), {"trace": b"t7"})
        async with RedisStore(server.url, namespace="shop") as store:
            assert await import_fred84(server.url, store) == Imported(0, 1_204, {}), "what was delivered stays so"

    asyncio.run(play())


@pytest.mark.parametrize("protocol", [2, 3])
def test_what_cannot_be_taken_over_is_named_and_stops_nothing(server: RedisServer, protocol: int) -> None:
    now_ms = int(time.time() * 1000)
    enqueue(server, 1, now_ms, "own*[a]-")
    enqueue(server, 2, now_ms, "ownXa-")  # another queue, which the prefix as a pattern would match
    long = f"{CLASS}###{'x' * 300}"
    for key, value in (("garbage", "{not json"), ("without payload", '{"type": "x"}'), (long, envelope(3))):
        server.command("HSET", "own*[a]-events", key, value)
        server.command("ZADD", "own*[a]-delayed_events", f"{now_ms}", key)
    server.command("ZADD", "own*[a]-delayed_events", f"{now_ms}", "orphan")
    server.command("LPUSH", "own*[a]-orderplaced", "also garbage")
    for score in ("inf", "-inf", "1e300"):
        server.command("HSET", "own*[a]-events", score, envelope(4))
        server.command("ZADD", "own*[a]-delayed_events", score, score)

    async def play() -> None:
        store = MemoryStore()
        url = f"{server.url}?protocol={protocol}"
        found = await import_fred84(url, store, prefix="own*[a]-", type_of=lambda name: name.lower())
        assert found.stored == 1
        times = {"inf", "-inf", "1e300"}
        assert found.skipped.keys() == {"garbage", "without payload", long, "orphan", "also garbage", *times}
        assert found.skipped["inf"] == "its time is inf, which is out of range"
        assert found.skipped["orphan"] == "it has no content"
        assert "255 bytes" in found.skipped[long]
        (one,) = await store.search(Query())
        assert (one.record.id, one.record.envelope.lane, one.record.due_ms) == (f"{CLASS}###1", CLASS.lower(), now_ms)

    asyncio.run(play())


def test_a_server_that_is_not_there_is_told() -> None:
    with pytest.raises(StoreUnavailableError, match=r"redis://127\.0\.0\.1:1 is unavailable"):
        asyncio.run(import_fred84("redis://127.0.0.1:1", MemoryStore()))


@pytest.mark.parametrize(("class_name", "name"), [(CLASS, "OrderPlaced"), ("a.B$C", "C"), ("Plain", "Plain"), ("", "")])
def test_simple_names(class_name: str, name: str) -> None:
    assert simple_name(class_name) == name
