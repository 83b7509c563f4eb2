"""`migrate` from other schedulers that have been stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiodelay import ConfigurationError, UnsupportedByStoreError
from aiodelay.spark.jobs import takeover
from tests.integration.test_redis_fred84 import CLASS, enqueue
from tests.spark.messages import stored
from tests.support.kafka import create_topic, new_name
from tests.support.servers import RedisServer, redis_products, start
from tests.support.topics import new_producer

DUE_MS = 1_893_456_000_000


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    server = start(redis_products()[0].program)
    yield server
    server.stop()


def test_fred84s_events_are_known_when_they_are_looked_at_again(server: RedisServer, tmp_path: Path) -> None:
    for number in range(3):
        enqueue(server, number, DUE_MS, prefix="app_")
    server.command("ZADD", "app_delayed_events", f"{DUE_MS}", "empty")
    source, target = f"fred84+{server.url}?prefix=app_", f"sqlite:///{tmp_path / 'delay.db'}"
    summary = takeover.run(source=source, target=target, verify=True)
    assert (summary.rows, summary.rejected) == (4, 1)
    assert summary.counts == {"stored": 3, "known": 0, "skipped": 1, "same": 3, "missing": 0}
    assert summary.facts["skipped"] == {"empty": "it has no content"}
    records = stored(target, "default")
    assert {(each.id, each.due_ms, each.envelope.lane) for each in records.values()} == {
        (f"{CLASS}###{number}", DUE_MS, "OrderPlaced") for number in range(3)
    }
    assert takeover.run(source=source, target=target).counts == {"stored": 0, "known": 3, "skipped": 1}


def send_etf1(kafka: str) -> str:
    """Write a schedule that is pending, and one that has fired, into a topic; return its name."""
    topic = asyncio.run(create_topic(kafka, new_name("old"), 2, cleanup_policy="compact"))
    producer = new_producer(kafka, {"partitioner": "murmur2_random"})
    headers: dict[str, str | bytes | None] = {
        "scheduler-epoch": f"{DUE_MS // 1000}",
        "scheduler-target-topic": "orders",
    }
    for key in (b"pending", b"fired"):
        producer.produce(topic, b"x", key, headers=headers)
    producer.produce(topic, None, b"fired")
    assert producer.flush(30) == 0
    return topic


def test_etf1s_schedules_that_are_pending(kafka: str, tmp_path: Path) -> None:
    topic = send_etf1(kafka)
    target = f"sqlite:///{tmp_path / 'delay.db'}"
    summary = takeover.run(source=f"etf1+kafka://{kafka}/{topic}", target=target, verify=True)
    assert summary.counts == {"stored": 1, "known": 0, "skipped": 0, "same": 1, "missing": 0}
    (record,) = stored(target, "default").values()
    assert (record.id, record.due_ms, record.envelope.address) == ("pending", DUE_MS, "orders")


def test_what_cannot_be_taken_over(server: RedisServer, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedByStoreError, match="redis: or sqlite:"):
        takeover.run(source=f"fred84+{server.url}", target="kafka://localhost:1/schedules")
    with pytest.raises(ConfigurationError, match="fixed"):
        takeover.run(source=f"fred84+{server.url}?fixed=1", target=f"sqlite:///{tmp_path / 'delay.db'}")
