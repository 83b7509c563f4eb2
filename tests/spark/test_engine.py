"""The engine on a real Kafka: each requested message comes once and never early, also after kills."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from pyspark.sql import SparkSession

from aiodelay.errors import ConfigurationError, StoreMismatchError, StoreUnavailableError
from aiodelay.kafka.records import java_partition
from aiodelay.spark.engine import pending
from aiodelay.spark.jobs import engine
from aiodelay.spark.slots import WAS_DUE
from tests.spark.commands import command_running
from tests.spark.program import PATIENT
from tests.support.kafka import create_topic, new_name

pytestmark = pytest.mark.timeout(900)  # a process starts a JVM of its own, which takes a loaded machine long

PAGE = Path(__file__).parents[2] / "docs" / "spark" / "engine.md"
PARTITIONS = 2
WAIT_S = 300.0
NONE = {"delivered": 0}
Asked: TypeAlias = tuple[str, bytes | None, dict[str, bytes]]
"""An id, a value and headers."""


class Topics:
    """A broker, a topic of schedules and one to deliver to."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.schedules, self.out = (asyncio.run(create_topic(bootstrap, new_name(), PARTITIONS)) for _ in range(2))
        self.dead = f"{self.schedules}.dead"
        self.url = f"kafka://{bootstrap}/{self.schedules}"

    def send(self, *given: Asked) -> None:
        """Write records of id, value and headers, each to the partition of its id; readers find all or none of them."""

        async def send() -> None:
            producer = AIOKafkaProducer(bootstrap_servers=self.bootstrap, transactional_id=new_name())
            async with producer, producer.transaction():
                for key, value, headers in given:
                    place = java_partition(key.encode(), PARTITIONS)
                    await producer.send(self.schedules, value, key.encode(), place, headers=[*headers.items()])

        asyncio.run(send())

    def put(self, key: str, due_ms: int, *, was_due_ms: int | None = None, to: str = "", value: bytes = b"v") -> Asked:
        headers = {"scheduler-target-topic": (to or self.out).encode(), "aiodelay-due-ms": b"%d" % due_ms}
        return key, value, headers | ({} if was_due_ms is None else {WAS_DUE: b"%d" % was_due_ms})

    def read(self, topic: str, n: int, *, is_going: Callable[[], bool] = lambda: True) -> list[Any]:
        """Wait for so many records while what writes them is going on; return all that are there then."""

        async def read() -> list[Any]:
            found = list[Any]()
            async with self._reading(topic) as consumer, asyncio.timeout(WAIT_S):
                while len(found) < n and is_going():
                    found += [each for batch in (await consumer.getmany(timeout_ms=500)).values() for each in batch]
            assert len(found) >= n
            return found

        return asyncio.run(read())

    @asynccontextmanager
    async def _reading(self, topic: str) -> AsyncIterator[AIOKafkaConsumer]:
        consumer = AIOKafkaConsumer(bootstrap_servers=self.bootstrap, auto_offset_reset="earliest")
        await consumer.start()
        try:
            consumer.assign([TopicPartition(topic, number) for number in range(PARTITIONS)])
            yield consumer
        finally:
            await consumer.stop()


@pytest.fixture
def topics(kafka: str) -> Topics:
    return Topics(kafka)


def ids(found: Sequence[Any]) -> list[str]:
    return sorted(dict(each.headers)["scheduler-key"].decode() for each in found)


def check_none_early(found: Sequence[Any]) -> None:
    for each in found:
        assert each.timestamp >= int(dict(each.headers)["aiodelay-delivery-id"].rsplit(b"/", 1)[1])


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def test_schedules_cancels_and_changes_come_to_what_was_asked_last(
    spark: SparkSession, topics: Topics, tmp_path: Path
) -> None:
    checkpoint = f"{tmp_path / 'checkpoint'}"
    query = engine.start(spark, source=topics.url, checkpoint=checkpoint, shards=2, trigger="2s")
    try:
        far = now_ms() + 3_600_000
        topics.send(topics.put("first", 0), topics.put("moved here", far, value=b"old"))
        topics.read(topics.out, 1, is_going=lambda: bool(query.isActive))
        soon = now_ms() + 3_000
        topics.send(
            *(topics.put(f"m{n}", soon + n * 50) for n in range(20)),
            topics.put("moved away", soon),
            topics.put("cancelled", soon),
            topics.put("nowhere", soon, to="no-such-topic"),
            ("bad", b"v", {"scheduler-target-topic": b"out", "scheduler-epoch": b"soon"}),
            ("cancel", None, {}),
            topics.put("moved here", soon, was_due_ms=far, value=b"new"),
            topics.put("moved away", far, was_due_ms=soon),
            ("cancelled", None, {WAS_DUE: b"%d" % soon}),
        )
        found = topics.read(topics.out, 22, is_going=lambda: bool(query.isActive))
        dead = topics.read(topics.dead, 3, is_going=lambda: bool(query.isActive))
        while sum(each["observedMetrics"].get("aiodelay", NONE)["delivered"] for each in query.recentProgress) < 23:
            assert not query.awaitTermination(1)  # until the batch is committed; one of them went to the dead topic
    finally:
        query.stop()
    assert query.exception() is None
    assert ids(found) == sorted(["first", *(f"m{n}" for n in range(20)), "moved here"])
    assert {each.value for each in found} == {b"v", b"new"}
    check_none_early(found)
    reasons = sorted(dict(each.headers)["aiodelay-dead-reason"].decode() for each in dead)
    assert [reason.partition(" is ")[0] for reason in reasons] == [
        "header scheduler-epoch",
        "no-such-topic: there",
        f"the record cancels a message, but has no header {WAS_DUE}: its slot",
    ]
    assert [row.id for row in pending(spark, checkpoint).collect()] == ["moved away"]
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
    with pytest.raises(Exception, match=r"checkpoint is for .* in slots of 1000 ms and 2 shards'; allowed: "):
        engine.start(spark, source=topics.url, checkpoint=checkpoint, shards=2, slot="2s").awaitTermination()


@pytest.mark.nightly  # killed: test_kills; the command: test_connect
@pytest.mark.usefixtures("java")
def test_what_waits_when_the_engine_is_killed_comes_once_and_none_early(topics: Topics, tmp_path: Path) -> None:
    with running(topics, tmp_path) as killed:
        topics.send(topics.put("first", 0))
        topics.read(topics.out, 1, is_going=lambda: killed.poll() is None)
        start_ms = now_ms() + 3_000
        topics.send(*(topics.put(f"m{n}", start_ms + n * 50) for n in range(300)))
        before = topics.read(topics.out, 50, is_going=lambda: killed.poll() is None)
    assert len(before) < 301
    with running(topics, tmp_path) as process:
        done = asyncio.run(until_all(topics, 301))
        process.send_signal(signal.SIGINT)
        summary = json.loads(process.communicate(timeout=WAIT_S)[0])
    assert process.returncode == 0
    assert (summary["job"], summary["rejected"]) == ("engine", 0)
    assert 0 < summary["counts"]["delivered"] <= 301
    assert summary["facts"]["lateness_ms"]["max"] > 0
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line.startswith('{"batch"')]
    assert sum(line["delivered"] for line in lines) >= summary["counts"]["delivered"]
    assert all(line["lateness_ms"]["p50"] <= line["lateness_ms"]["p99"] for line in lines)
    check_none_early(done)
    times = Counter(dict(each.headers)["aiodelay-delivery-id"] for each in done)
    assert set(ids(done)) == {"first", *(f"m{n}" for n in range(300))}
    assert len(times) == 301
    assert max(times.values()) <= 2  # of the one batch that was under way


async def until_all(topics: Topics, n: int) -> list[Any]:
    """Read until so many different ids have come."""
    found = list[Any]()
    async with topics._reading(topics.out) as consumer, asyncio.timeout(WAIT_S):
        while len({each.headers[-1] for each in found}) < n:
            found += [each for batch in (await consumer.getmany(timeout_ms=500)).values() for each in batch]
    return found


def running(topics: Topics, folder: Path) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run the command for as long as a block."""
    patient = (argument for name, value in PATIENT.items() for argument in ("--conf", f"{name}={value}"))
    line = ("--in", topics.url, "--checkpoint", f"{folder / 'checkpoint'}", "--shards", "2", *patient)
    return command_running(folder, "engine", *line)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"checkpoint": " "}, ConfigurationError, "checkpoint is blank"),
        ({"slot": "1ms"}, ConfigurationError, "slot is "),
        ({"trigger": "soon"}, ConfigurationError, "trigger is 'soon'"),
        ({"shards": 0}, ConfigurationError, "shards is 0"),
        ({"source": "kafka://127.0.0.1:1"}, ConfigurationError, "source is .*; allowed: kafka://host:9092/topic"),
        ({"to": "redis://127.0.0.1"}, ConfigurationError, "to is redis://127.0.0.1; allowed: kafka://host:9092"),
        ({"dead": "a b"}, ConfigurationError, "dead is 'a b'"),
        (
            {"source": "kafka://127.0.0.1:1/topic?timeout_ms=500"},
            StoreUnavailableError,
            r"kafka://127.0.0.1:1/topic.* is unavailable",
        ),
    ],
)
def test_what_is_wrong_is_told_before_spark_begins(
    spark: SparkSession, options: dict[str, Any], error: type[Exception], told: str
) -> None:
    given = {"source": "kafka://127.0.0.1:1/topic?timeout_ms=500", "checkpoint": "never"} | options
    with pytest.raises(error, match=told):
        engine.start(spark, **given)
    assert not Path("never").exists()


def test_a_missing_topic_is_told_and_not_made(spark: SparkSession, kafka: str) -> None:
    name = new_name("missing")
    for _ in range(2):
        with pytest.raises(StoreMismatchError, match=name):
            engine.start(spark, source=f"kafka://{kafka}/{name}", checkpoint="never")


def test_the_block_of_the_page_schedules_and_changes(spark: SparkSession, topics: Topics, tmp_path: Path) -> None:
    first, second = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    code = first.replace("localhost:9092", topics.bootstrap)
    code = code.replace('"schedules"', f'"{topics.schedules}"').replace("kafka:reminders", f"kafka:{topics.out}")
    names: dict[str, Any] = {}
    exec(code.replace("timedelta(seconds=5)", "timedelta(seconds=1)"), names)
    checkpoint = f"{tmp_path / 'checkpoint'}"
    query = engine.start(spark, source=topics.url, checkpoint=checkpoint, shards=2)
    try:
        (found,) = topics.read(topics.out, 1, is_going=lambda: bool(query.isActive))
    finally:
        query.stop()
    assert found.value == b"see you at noon"
    exec(second.replace('"engine"', repr(checkpoint)), names)
    assert names["soon"](spark).collect() == []
