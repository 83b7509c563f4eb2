"""`aiodelay import etf1|fred84|article-box`: take over the messages of other systems, on real servers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from tests.support.cli import Cli
from tests.support.kafka import create_topic, new_name
from tests.support.servers import RedisServer, redis_products, start
from tests.support.topics import new_producer
from tests.support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    server = start(redis_products()[0].program)
    yield server
    server.stop()


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(f"sqlite:///{tmp_path}/delay.db", tmp_path)


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    client = redis_py.Redis(port=server.port)
    yield client
    client.flushall()


def listed(cli: Cli) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in cli("list", "--json").objects}


def test_a_topic_of_etf1(kafka: str, cli: Cli) -> None:
    topic = asyncio.run(create_topic(kafka, new_name("etf1"), 2, cleanup_policy="compact"))
    producer = new_producer(kafka)

    def write(key: str, epoch: object, value: bytes | None, partition: int, *, at_ms: int = 0) -> None:
        headers: list[tuple[str, str | bytes | None]] = [
            ("scheduler-epoch", f"{epoch}".encode()),
            ("scheduler-target-topic", b"videos"),
            ("scheduler-target-key", b"vid"),
            ("customer", b"x"),
        ]
        producer.produce(topic, value, key, partition, headers=headers, timestamp=at_ms or int(time.time() * 1000))

    due_s = int(time.time()) + 7200
    write("a", due_s - 9, b"old", 0)
    write("a", due_s, b"new", 0)
    write("ended", due_s, b"x", 0)
    write("ended", due_s, None, 0)
    ahead_ms = int(time.time() * 1000) + 60_000  # the clock of a client
    write("ended ahead", due_s, b"x", 0, at_ms=ahead_ms)
    write("ended ahead", due_s, None, 0)
    write("late", due_s, b"replaced", 1, at_ms=ahead_ms)
    write("astray", due_s, b"x", 0, at_ms=1_700_000_000_000)
    producer.produce(topic, None, "astray", 1, timestamp=1_700_000_000_001)
    for partition, other in [(0, 1), (1, 0)]:
        write(f"again-{partition}", due_s, b"x", partition)
        producer.produce(topic, None, f"again-{partition}", other, timestamp=1_700_000_000_001)
    write("bad", "soon", b"x", 1)
    write("late", due_s - 90_000, b"x", 1)
    producer.produce(topic, b"x", b"\x00aiodelay/barrier", 1)
    assert producer.flush(PATIENCE_S) == 0
    ran = cli("import", "etf1", f"kafka://{kafka}/{topic}", "--json")
    assert (ran.code, ran.object["stored"], list(ran.object["skipped"])) == (1, 4, ["bad"])
    found = listed(cli)
    assert sorted(found) == ["a", "again-0", "again-1", "late"]
    shape = found["a"]
    assert (shape["to"], shape["payload"], shape["key"], shape["headers"]) == (
        "kafka:videos", "new", "vid", {"customer": "x"},
    )  # fmt: skip
    assert shape["due"] == time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(due_s))
    assert (found["late"]["state"], found["late"]["payload"]) == ("overdue", "x")
    assert cli("cancel", "a", "--yes").code == 0
    ran = cli("import", "etf1", f"kafka://{kafka}/{topic}")
    assert (ran.out, ran.err.partition(":")[0]) == ("0 stored, 4 known, 1 skipped\n", "bad")
    assert "a" not in listed(cli), "what has ended here does not come back"
    assert cli("import", "etf1", f"kafka://{kafka}/no-{topic}", "--json").error["error"] == "StoreMismatchError"


def test_what_fred84_keeps(client: redis_py.Redis, server: RedisServer, cli: Cli) -> None:
    for name, content in [("1", {"payload": {"id": "1"}, "type": "com.shop.Paid", "attempt": 1}), ("2", {})]:
        client.hset("de_events", f"com.shop.Paid###{name}", json.dumps(content))
        client.zadd("de_delayed_events", {f"com.shop.Paid###{name}": 1_900_000_000_000})
    for stored in (1, 0):
        ran = cli("import", "fred84", f"redis://127.0.0.1:{server.port}", "--json")
        assert (ran.code, ran.object["stored"], len(ran.object["skipped"])) == (1, stored, 1)
    shape = listed(cli)["com.shop.Paid###1"]
    assert (shape["to"], shape["payload"]) == ("handler:Paid", '{"id":"1"}'.replace(":", ": "))


def test_a_delay_box_of_the_article(client: redis_py.Redis, server: RedisServer, cli: Cli) -> None:
    due = int(time.time()) + 600
    for name, topic in [("u1", "orders"), ("u2", "secret")]:
        client.set(name, json.dumps({"topic": topic, "message": "m"}))
        client.zadd("blackbox-delay-key", {name: due})
    ran = cli("import", "article-box", f"redis://127.0.0.1:{server.port}", "--allow", "orders")
    assert (ran.code, ran.out) == (1, "1 stored, 0 known, 1 skipped\n")
    assert ran.err == "u2: its topic 'secret' is not allowed\n"
    assert {name: each["to"] for name, each in listed(cli).items()} == {"u1": "kafka:orders"}
    assert cli("import", "article-box", f"redis://127.0.0.1:{server.port}").code == 2, "--allow must be said"
