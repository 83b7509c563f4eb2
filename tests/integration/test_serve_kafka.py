"""The service with a broker: the files of docs/operate.md, a slow start, a signal under load."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiodelay.testing.servers import redis_servers, serving
from tests.support.boxes import Out, headers_of, request, send
from tests.support.kafka import create_topic, new_name
from tests.support.service import Service, until, until_ready
from tests.support.topics import lasting_producer, new_producer
from tests.support.waiting import until_sync

PAGE = (Path(__file__).parents[2] / "docs" / "operate.md").read_text()
MANY = 10_000
AHEAD_S = 100_000
QUIET_S = 0.5
"""Longer than a record needs that was written; nothing signals that no further record comes."""


@pytest.fixture
def redis_url() -> Iterator[str]:
    with serving(redis_servers()[0]) as url:
        yield url


def file_of_the_page(name: str, **places: str) -> str:
    """Return a file that the page shows, at most ten lines long, with other places."""
    text: str
    (text,) = re.findall(rf"```toml\n# {name}\n(.*?)```", PAGE, re.DOTALL)
    assert len(text.splitlines()) <= 10
    for shown, place in places.items():
        assert shown in text
        text = text.replace(shown, place)
    return text


def create(kafka: str, what: str, partitions: int = 1) -> str:
    return asyncio.run(create_topic(kafka, new_name(what), partitions))


class Scheduling:
    """A client as those of seed 004, which knows Kafka alone."""

    def __init__(self, kafka: str, topic: str, target: str) -> None:
        self._producer = new_producer(kafka, {"partitioner": "murmur2_random"})
        self._topic, self._target = topic, target

    def write(self, key: str, value: bytes, at: float) -> None:
        headers: dict[str, str | bytes | None] = {
            "scheduler-epoch": str(int(at)),
            "scheduler-target-topic": self._target,
            "scheduler-target-key": "vid1",
            "customer-header": "dummy",
        }
        self._producer.produce(self._topic, value, key, headers=headers)
        assert self._producer.flush(30) == 0

    def delete(self, key: str) -> None:
        self._producer.produce(self._topic, None, key)
        assert self._producer.flush(30) == 0


# --- the files of the page --------------------------------------------------------------------------------


def test_ten_lines_take_the_place_of_a_scheduler_of_topics(kafka: str, tmp_path: Path) -> None:
    topic, videos = new_name("schedules"), create(kafka, "online-videos")
    text = file_of_the_page("scheduler.toml", **{"localhost:9092": kafka, "schedules": topic, "online-videos": videos})
    out = Out(kafka, videos, read="committed")
    with Service(tmp_path, text) as service, service.client() as client:
        until_ready(client)
        user = Scheduling(kafka, topic, videos)
        now = time.time()
        user.write("vid3-online", b"video 3", now + 3600)
        user.write("vid1-online", b"video 1", now + 3600)
        user.write("vid2-online", b"video 2", now + 3600)
        until_sync(lambda: "vid2-online" in client.get("/schedules").text, "video 2 is scheduled")
        user.delete("vid2-online")
        until_sync(lambda: "vid2-online" not in client.get("/schedules").text, "video 2 is deleted")
        now = time.time()
        user.write("vid1-online", b"video 1, the latest version", now + 2)
        (record,) = asyncio.run(out.until(1))
        assert time.time() >= int(now + 2)
        assert (record.key(), record.value()) == (b"vid1", b"video 1, the latest version")
        headers = headers_of(record)
        assert (headers["scheduler-key"], headers["scheduler-topic"]) == (b"vid1-online", topic.encode())
        assert headers["customer-header"] == b"dummy"
        assert abs(int(headers["scheduler-timestamp"] or 0) - time.time()) < 60
        assert "vid3-online" in client.get("/schedules").text
        service.send(signal.SIGTERM)
        assert service.exit_code() == 0
    assert [each.value() for each in asyncio.run(out.quiet(QUIET_S))] == [b"video 1, the latest version"]
    out.close()


def test_ten_lines_are_a_delay_box(kafka: str, redis_url: str, tmp_path: Path) -> None:
    delays, orders = new_name("delays"), create(kafka, "orders")
    places = {"localhost:9092": kafka, "redis://localhost": redis_url, "delays": delays, "orders": orders}
    out = Out(kafka, orders)
    with Service(tmp_path, file_of_the_page("box.toml", **places)) as service, service.client() as client:
        until_ready(client)
        refused = Out(kafka, f"{delays}.dead")
        begun = time.time()
        producer = lasting_producer(kafka)
        send(kafka, delays, [request(orders, "not paid", 1)], headers={"CALLER_SERVICE": "S"}, producer=producer)
        send(kafka, delays, [request("elsewhere", "x", 0)], producer=producer)
        (record,) = asyncio.run(out.until(1))
        assert time.time() - begun >= 1
        assert (record.value(), headers_of(record)["CALLER_SERVICE"]) == (b"not paid", b"S")
        assert len(asyncio.run(refused.until(1))) == 1
        service.send(signal.SIGTERM)
        assert service.exit_code() == 0
    out.close()
    refused.close()


def test_what_others_write_goes_where_it_may_and_nowhere_else(kafka: str, tmp_path: Path) -> None:
    topic, allowed, other = new_name("schedules"), create(kafka, "allowed"), create(kafka, "other")
    text = f'store = "kafka://{kafka}/{topic}?create_topic=true"\nallowed_targets = ["kafka:{allowed}"]\n'
    out, elsewhere = Out(kafka, allowed, read="committed"), Out(kafka, other, read="committed")
    with Service(tmp_path, text + "[api]\nread_only = false\n") as service, service.client() as client:
        until_ready(client)
        Scheduling(kafka, topic, other).write("a", b"a", time.time())
        Scheduling(kafka, topic, allowed).write("b", b"b", time.time() + 1)
        assert [each.value() for each in asyncio.run(out.until(1))] == [b"b"]
        (letter,) = until_sync(lambda: client.get("/v1/dead").json()["letters"], "a dead letter")
        assert (letter["id"], letter["reason"]) == ("a", "undecodable")
        assert f"to is 'kafka:{other}'; allowed:" in json.dumps(letter)
        service.send(signal.SIGTERM)
        assert service.exit_code() == 0
    assert asyncio.run(elsewhere.quiet(QUIET_S)) == []
    out.close()
    elsewhere.close()


# --- from start to end ------------------------------------------------------------------------------------


class Held:
    """A partition that nobody can read to its end: another producer has a transaction open there."""

    def __init__(self, kafka: str, topic: str, partition: int) -> None:
        options: dict[str, str | int] = {"transactional.id": new_name(), "transaction.timeout.ms": 600_000}
        self._producer = new_producer(kafka, options)
        self._producer.init_transactions(60)
        self._topic, self._partition = topic, partition

    def hold(self) -> None:
        self._producer.begin_transaction()
        self._producer.produce(self._topic, None, "held", self._partition)
        assert self._producer.flush(60) == 0

    def release(self) -> None:
        self._producer.commit_transaction(60)


def fill(kafka: str, topic: str) -> None:
    producer = new_producer(kafka, {"linger.ms": 20, "queue.buffering.max.messages": MANY + 1})
    due = str(int(time.time()) + AHEAD_S)
    for n in range(MANY):
        headers: dict[str, str | bytes | None] = {"scheduler-epoch": due, "scheduler-target-topic": "anywhere"}
        producer.produce(topic, b"x" * 100, f"id-{n}", headers=headers, partition=n % 6)
    assert producer.flush(60) == 0


def test_it_tells_how_much_is_read_and_ends_meanwhile(kafka: str, tmp_path: Path) -> None:
    topic = asyncio.run(
        create_topic(kafka, new_name("schedules"), 6, cleanup_policy="compact", min_compaction_lag_ms=3_600_000)
    )
    fill(kafka, topic)
    text = f'store = "kafka://{kafka}/{topic}"\n'
    last = Held(kafka, topic, 5)
    last.hold()
    with Service(tmp_path, text) as service, service.client() as client:
        answer = until(client, lambda answer: answer.json()["stores"]["default"]["loaded"] == 5)
        store = answer.json()["stores"]["default"]
        assert (answer.status_code, store["phase"], store["of"]) == (503, "loading", 6)
        assert store["reasons"][0] == "it is being opened: 5 of 6 partitions are read"
        last.release()
        until_ready(client)
        assert client.get("/readyz").json()["stores"]["default"]["loaded"] == 6
    last.hold()
    with Service(tmp_path, text) as service, service.client() as client:
        until(client, lambda answer: answer.json()["stores"]["default"]["loaded"] == 5)
        service.send(signal.SIGTERM)
        assert service.exit_code() == 0


@pytest.mark.parametrize("requests", [1_000, pytest.param(3_000, marks=pytest.mark.nightly)])
def test_signals_under_load_lose_nothing(kafka: str, redis_url: str, tmp_path: Path, requests: int) -> None:
    delays, orders = new_name("delays"), create(kafka, "orders")
    places = {"localhost:9092": kafka, "redis://localhost": redis_url, "delays": delays, "orders": orders}
    text = file_of_the_page("box.toml", **places)
    out = Out(kafka, orders)
    wanted = {f"request {n}".encode() for n in range(requests)}
    for taken in (1, requests // 3, requests):
        with Service(tmp_path, text) as service, service.client() as client:
            until_ready(client)
            if taken == 1:
                values = [request(orders, value.decode(), 0.2) for value in sorted(wanted)]
                send(kafka, delays, values, producer=lasting_producer(kafka))
            asyncio.run(out.until(taken))
            service.send(signal.SIGTERM)
            assert service.exit_code() == 0
            errors = [line for line in service.logged() if line["level"] == "error"]
            assert not [line for line in errors if not line["logger"].startswith("aiokafka")]
    asyncio.run(out.quiet(QUIET_S))
    assert set(out.values) == wanted
    assert len(out.values) == len(wanted)
    out.close()
