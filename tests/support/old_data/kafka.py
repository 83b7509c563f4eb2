"""Old data of Kafka: a schedules topic with records of aiodelay and of users, and its history topic."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from confluent_kafka import Producer
from msgspec.structs import replace

from aiodelay import Message
from aiodelay.backends.kafka import KafkaStore, open_store, records
from aiodelay.core.values import Cancel, Conflict, Late, Record
from aiodelay.ports import Store
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.conformance import Stage
from tests.support.kafka import create_topic, new_name
from tests.support.topics import is_committed, producing
from tests.support.waiting import until

from .answers import OldData
from .kafka_topics import Partition, Stands, load, read_lines, read_topic, written
from .story import FAR, JOURNAL, Told, tell

__all__ = ["OldKafka", "records_of"]

SCHEDULES, HISTORY = "schedules.jsonl", "history.jsonl"
PARTITIONS = 2
SETTINGS: dict[str, str | float] = {
    "cleanup_policy": "compact",
    "min_compaction_lag_ms": 86_400_000,
    "delete_retention_ms": 604_800_000,
    "message_timestamp_type": "CreateTime",
}
"""The settings of a topic that is written again: its records keep their times."""
KEPT, ASKED, BAD = "recorded to be kept", "for a user to ask", {"of a later format", "without a time"}
DUE = datetime(2090, 1, 1, tzinfo=UTC)


class OldKafka(OldData):
    """The topics of an old version.

    Args:
        fixture: The folder with the topics.
        bootstrap: The address of the cluster that gets the topics.
    """

    order_per_group: ClassVar[bool] = False
    leases_survive: ClassVar[bool] = False
    counted_journal: ClassVar[bool] = False

    def __init__(self, fixture: Path, bootstrap: str) -> None:
        self._fixture, self._bootstrap = fixture, bootstrap
        self.schedules: str = new_name("schedules")
        self.history: str = new_name("history")

    async def restore(self) -> None:
        """Write the topics under new names."""
        self.schedules = await create_topic(self._bootstrap, new_name("schedules"), PARTITIONS, **SETTINGS)
        self.history = await create_topic(self._bootstrap, new_name("history"), PARTITIONS, retention_ms=-1)
        old = self.old_topics()
        for topic, file in ((self.schedules, SCHEDULES), (self.history, HISTORY)):
            await asyncio.to_thread(load, self._bootstrap, topic, old[file])

    def make_store(self, clock: VirtualClock, *, journal: int = 0) -> Store:
        """Return a store on the topics."""
        url = f"kafka://{self._bootstrap}/{self.schedules}?create_topic=true&partitions={PARTITIONS}"
        return open_store(f"{url}&history={self.history}" if journal else url, namespace="default", clock=clock)

    async def journal_is_whole(self, stage: Stage) -> None:
        """Wait for the entries that change no message. The owner writes them with the next transaction, or later."""
        assert isinstance(stage.store, KafkaStore)
        logs = [each.index.log for each in stage.store.partitions.values()]
        await until(lambda: not any(log.notes or log.under_way for log in logs), "all entries are told")

        async def can_be_read() -> bool:
            return await asyncio.to_thread(is_committed, self._bootstrap, self.history, PARTITIONS)

        await until(can_be_read, "readers see all entries")

    async def settle_down(self, stage: Stage) -> None:
        """Wait until the owner has judged the records that users wrote after the old owner had ended."""

        async def has_decided() -> bool:
            letters = {each.record.id for each in await stage.dead()}
            return letters >= BAD and await stage.get(KEPT) is not None and await stage.get(ASKED) is None

        await until(has_decided, "the owner has decided about records of users")

    async def write(self) -> Told:
        """Write the topics. Users continue to write after the owner has ended."""
        told = await self.tell()
        for file, partitions in (await self.topics()).items():
            (self._fixture / file).write_bytes(written(partitions))
        return told

    async def tell(self) -> Told:
        """Play the story in new topics, and write the records of users."""
        async with Stage(self, journal=JOURNAL) as stage:
            told = await tell(stage)
            asked = await stage.record(ASKED)
        await self._write_as_users(stage, asked)
        return told

    async def topics(self) -> Mapping[str, Sequence[Partition]]:
        """Return the current content of the topics, by the name of its file."""
        names = {SCHEDULES: self.schedules, HISTORY: self.history}
        return {file: await asyncio.to_thread(read_topic, self._bootstrap, name) for file, name in names.items()}

    def old_topics(self) -> Mapping[str, Sequence[Partition]]:
        """Return the topics that the old version wrote."""
        return {file: read_lines((self._fixture / file).read_bytes()) for file in (SCHEDULES, HISTORY)}

    async def _write_as_users(self, stage: Stage, asked: Record) -> None:
        """Write records that no owner has seen, by a process that only schedules and by other producers."""
        async with self.make_store(stage.clock, journal=0) as store:
            await store.apply(
                [
                    stage.put("recorded", FAR, headers={"a": b"b"}, key=b"k"),
                    stage.put(KEPT, FAR, conflict=Conflict.keep()),
                    stage.put(
                        "for a user to keep", FAR, conflict=Conflict.keep(), payload=b"not stored, since one stands"
                    ),
                    Cancel(stage.op(), "for a user to cancel"),
                ]
            )
        with producing(self._bootstrap) as producer:
            for wire in (*_encoded(), *_plain(), *_asking(asked)):
                _produce(producer, self.schedules, wire)


def _encoded() -> list[records.Wire]:
    """Return the records of a user of `aiodelay.kafka.records`."""
    late = Late.dead_letter("1h")
    messages = [
        Message(b"payload", at=DUE, id="encoded", to="kafka:target", key=b"k", headers={"a": b"\xff"}, late=late),
        Message(None, at=DUE, id="encoded null", to="kafka:target", key=b"k"),
    ]
    return [*map(records.encode, messages), records.encode_cancel(b"for a user to end")]


def _plain() -> list[records.Wire]:
    """Return the records of producers that know only the format. Some of the records are wrong."""
    at = ("scheduler-epoch", b"%d" % DUE.timestamp())
    past = ("scheduler-epoch", b"1700000000")
    target, key = ("scheduler-target-topic", b"target"), ("scheduler-target-key", b"k")
    return [
        records.Wire(
            b"of a producer", b"hello", [at, target, key, ("own", b"1"), ("own", b"2"), ("aiodelay-was-due-ms", b"1")]
        ),
        records.Wire(b"\xff\xfe", b"a key of bytes", [at, target]),
        records.Wire(b"of a producer, in ms", b"hello", [("aiodelay-due-ms", b"%d" % FAR.ms), target]),
        records.Wire(b"to a handler", b"hello", [past, ("aiodelay-lane", b"orders"), ("aiodelay-format", b"1")]),
        records.Wire(b"of a later format", b"?", [at, target, ("aiodelay-format", b"2")]),
        records.Wire(b"without a time", b"?", [target]),
        records.Wire(b"for a user to replace", b"replaced", [at, target]),
    ]


def _asking(record: Record) -> list[records.Wire]:
    """Return the records of a process that is not the owner, for cancels that depend on the stored message."""
    due_ms = record.due_ms
    asked = [(ASKED, record.revision - 1), (ASKED, record.revision), ("for a user to keep", 1)]
    cancels = [Cancel(b"asking %d" % n, message_id, (it, due_ms)) for n, (message_id, it) in enumerate(asked)]
    return [*map(records.encode_ask_to_cancel, cancels)]


def _produce(producer: Producer, topic: str, wire: records.Wire) -> None:
    assert wire.key is not None
    partition = records.partition_of(wire.key.removeprefix(records.KEEP), PARTITIONS)
    producer.produce(topic, wire.value, wire.key, partition, headers=list(wire.headers))


def records_of(partition: Partition) -> set[Stands]:
    """Return the records of a partition, without their write times, and without position records."""
    kept = [each for each in partition.records if each.key not in (records.BARRIER, records.MARK)]
    return {replace(each, offset=0, timestamp=0, headers=tuple(_told_of(each))) for each in kept}


def _told_of(record: Stands) -> Iterator[tuple[str, bytes | None]]:
    return ((name, value) for name, value in record.headers if name != "aiodelay-from")
