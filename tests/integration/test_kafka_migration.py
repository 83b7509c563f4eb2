"""Take over a topic of etf1/kafka-message-scheduler, and give it back: docs/migration.md, on a broker.

The topic is written by librdkafka, as that scheduler, its client library, and clients with Java's partitioner do.
"""

from __future__ import annotations

import ast
import inspect
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, TopicPartition

from aiodelay import Every, Scheduler
from aiodelay.errors import StoreMismatchError
from aiodelay.kafka.records import java_partition
from tests.support.kafka import create_topic, new_name
from tests.support.topics import is_committed, new_producer
from tests.support.waiting import PATIENCE_S, until, until_sync

pytestmark = pytest.mark.asyncio

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text().partition("\n## From the delay box")[0]
BLOCKS: list[str] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SETTINGS = dict(re.findall(r"([a-z.]+)=(\w+)", re.findall(r"--add-config (\S+)", PAGE)[0]))
ITS_OWN = {"cleanup.policy": "compact", "retention.ms": "-1"}
PARTITIONS = 3
DAY_S = 86_400


class Old:
    """The old scheduler, and its clients, on a topic."""

    def __init__(self, bootstrap: str, topic: str, target: str) -> None:
        self.bootstrap, self.topic, self.target = bootstrap, topic, target
        self._producer = new_producer(bootstrap)  # its partitioner is librdkafka's: by CRC32

    def schedule(
        self, key: str, epoch: object, value: bytes | None, *, target_key: bytes | None = b"vid", partition: int = -1
    ) -> None:
        """As its client library does."""
        headers: list[tuple[str, str | bytes | None]] = [
            ("customer-header", b"dummy"),
            ("scheduler-epoch", f"{epoch}".encode()),
            ("scheduler-target-topic", self.target.encode()),
            ("scheduler-target-key", target_key),
        ]
        self._producer.produce(self.topic, value, key, partition, headers=headers)
        self._flush()

    def schedule_by_java(self, key: str, epoch: object, value: bytes) -> None:
        """As a client does that has Java's partitioner, where that is not the old scheduler's."""
        self.schedule(key, epoch, value, partition=java_partition(key.encode(), PARTITIONS))

    def delete(self, key: str) -> None:
        """As its client library does."""
        self._producer.produce(self.topic, None, key)
        self._flush()

    def fire(self, key: str, epoch: int) -> None:
        """As the scheduler ends what it has delivered: a tombstone with all that the delivered record had."""
        headers: list[tuple[str, str | bytes | None]] = [
            ("customer-header", b"dummy"),
            ("scheduler-epoch", f"{epoch}".encode()),
            ("scheduler-target-topic", self.target.encode()),
            ("scheduler-target-key", b"vid"),
            ("scheduler-timestamp", f"{epoch - 60}".encode()),
            ("scheduler-key", key.encode()),
            ("scheduler-topic", self.topic.encode()),
        ]
        self._producer.produce(self.topic, None, key, headers=headers)
        self._flush()

    def _flush(self) -> None:
        assert self._producer.flush(30) == 0
        time.sleep(0.002)  # each has a time of its own

    def takes_up(self, now_s: float) -> dict[bytes, tuple[int, bytes]]:
        """Return what it would deliver today, as it reads: the last value of a key counts, by its first headers."""
        found: dict[bytes, tuple[int, bytes]] = {}
        read = _read(self.bootstrap, self.topic, range(PARTITIONS))
        for record in sorted(read, key=lambda record: record.timestamp()[1]):
            headers = dict(reversed(_headers(record)))
            text, key, value = headers.get("scheduler-epoch") or b"", record.key(), record.value()
            epoch = int(text) if text.isdigit() else 0
            assert key is not None
            found.pop(key, None)
            if value is not None and epoch >= now_s - now_s % DAY_S:
                found[key] = epoch, value
        return found


def _read(bootstrap: str, topic: str, partitions: Sequence[int]) -> Iterator[Message]:
    until_sync(lambda: is_committed(bootstrap, topic, len(partitions)), f"all records of {topic} can be read")
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": new_name(), "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
    left = set(partitions)
    while left:
        record = consumer.poll(PATIENCE_S)
        assert record is not None
        if record.error():
            left.discard(record.partition())
        else:
            yield record
    consumer.close()


def _headers(record: Message) -> list[tuple[str, bytes | None]]:
    return cast("list[tuple[str, bytes | None]]", record.headers() or [])


def _delivered(bootstrap: str, target: str) -> list[tuple[bytes | None, bytes, bytes | None, bytes | None]]:
    """Return what was delivered: schedule, payload, key, and a header of the client's own."""
    found = []
    for record in _read(bootstrap, target, [0]):
        headers = dict(_headers(record))
        assert headers["scheduler-topic"]
        assert int(headers["scheduler-timestamp"] or b"") <= time.time()
        found.append((headers["scheduler-key"], record.value() or b"", record.key(), headers["customer-header"]))
    return sorted(found, key=repr)


async def _run(blocks: Sequence[str], bootstrap: str, topic: str, names: dict[str, Any]) -> None:
    for number, block in enumerate(blocks):
        source = block.replace("localhost:9092", bootstrap).replace('"schedules"', f'"{topic}"')
        source = source.replace("/schedules", f"/{topic}").replace("poll(10)", f"poll({PATIENCE_S})")
        code = compile(source, f"block {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        coroutine = eval(code, names)
        if inspect.iscoroutine(coroutine):
            await coroutine


async def test_a_topic_is_taken_over_and_given_back(kafka: str, capsys: pytest.CaptureFixture[str]) -> None:
    target, now = await create_topic(kafka, new_name("videos")), int(time.time())
    settings = {name.replace(".", "_"): value for name, value in (ITS_OWN | SETTINGS).items()}
    topic = await create_topic(kafka, new_name("schedules"), PARTITIONS, **settings)
    old = Old(kafka, topic, target)
    old.schedule("missed", now - 60, b"missed")
    old.schedule("missed-last-year", now - 365 * DAY_S, b"missed long ago", target_key=None)
    old.schedule("replaced", now + 3600, b"first")
    old.schedule("replaced", now + 1, b"second")
    old.schedule("deleted", now + 1, b"deleted")
    old.delete("deleted")
    old.schedule("fired", now - 120, b"fired")
    old.fire("fired", now - 120)
    astray = [f"astray-{i}" for i in range(6)]
    for name in astray:
        old.schedule_by_java(name, now - 120, b"astray")
        old.fire(name, now - 120)
    old.schedule_by_java("javas", now - 30, b"pending in Java's partition")
    old.schedule("bad", "tomorrow", b"bad")
    old.schedule("empty", now - 5, b"")
    old.schedule("later", now + 3600, b"later")
    expected = [
        (b"empty", b"", b"vid", b"dummy"),
        (b"javas", b"pending in Java's partition", b"vid", b"dummy"),
        (b"missed", b"missed", b"vid", b"dummy"),
        (b"missed-last-year", b"missed long ago", None, b"dummy"),
        (b"replaced", b"second", b"vid", b"dummy"),
    ]
    names: dict[str, Any] = {}
    await _run(BLOCKS[:2], kafka, topic, names)
    async with names["scheduler"] as scheduler:
        await scheduler.schedule(b"ours", to=f"kafka:{target}", delay="3h", id="ours", key=b"k")
        await scheduler.schedule(
            b"soon", to=f"kafka:{target}", delay="1ms", id="soon", headers={"customer-header": b"x"}
        )

        async def are_two_left() -> bool:
            return {each.record.id async for each in scheduler.pending()} == {"ours", "later"}

        await until(are_two_left, "only what is due later is pending")
        assert [each.record.id async for each in scheduler.dead_letters()] == ["bad"]
    assert _delivered(kafka, target) == sorted([*expected, (b"soon", b"soon", None, b"x")], key=repr)
    await _run(BLOCKS[2:], kafka, topic, names)
    assert {key: value for key, (_, value) in old.takes_up(now).items()} == {b"later": b"later", b"ours": b"ours"}
    assert old.takes_up(now)[b"later"][0] == now + 3600
    old.fire("later", now + 3600)
    async with Scheduler(f"kafka://{kafka}/{topic}") as scheduler:
        assert [each.record.id async for each in scheduler.pending()] == ["ours"]
    assert "'kafka': (" in capsys.readouterr().out


async def test_ends_that_went_astray_are_ended_once(kafka: str) -> None:
    topic = await create_topic(kafka, new_name("schedules"), PARTITIONS)
    old, now = Old(kafka, topic, "t"), int(time.time())
    for i in range(9):
        old.schedule_by_java(f"fired-{i}", now, b"")
        old.fire(f"fired-{i}", now)
        old.schedule_by_java(f"again-{i}", now, b"")
        old.fire(f"again-{i}", now)
        old.schedule_by_java(f"again-{i}", now + 60, b"again")
    names: dict[str, Any] = {}
    await _run([BLOCKS[0].partition("\n\n\nend_what")[0]], kafka, topic, names)
    assert 0 < names["end_what_was_fired"](kafka, topic) < 9
    assert names["end_what_was_fired"](kafka, topic) == 0
    assert sorted(old.takes_up(now)) == [b"again-%d" % i for i in range(9)]


async def test_a_topic_as_it_was_is_refused_with_the_commands_that_mend_it(kafka: str) -> None:
    settings = {name.replace(".", "_"): value for name, value in ITS_OWN.items()}
    topic = await create_topic(kafka, new_name("schedules"), PARTITIONS, **settings)
    with pytest.raises(StoreMismatchError, match=r"min\.compaction\.lag\.ms"):
        async with Scheduler(f"kafka://{kafka}/{topic}"):
            pass


async def test_moving_back_names_what_only_aiodelay_understands(kafka: str) -> None:
    topic = new_name("schedules")
    names: dict[str, Any] = {"scheduler": Scheduler(f"kafka://{kafka}/{topic}?create_topic=true&partitions=1")}
    async with names["scheduler"] as scheduler:
        await scheduler.schedule(b"", to="kafka:t", every=Every("1h"), id="series")
        await scheduler.schedule(b"", to="kafka:t", delay="1h", id="plain")
        await scheduler.schedule(b"", to="handler:h", delay="1h", id="handlers")
    with pytest.raises(AssertionError, match=r"cancel these, or wait for them: \['series', 'handlers'\]"):
        await _run(BLOCKS[2:], kafka, topic, names)
