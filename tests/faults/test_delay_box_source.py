"""The topic of a delay box's requests loses records, or gets more partitions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]  # which names them all

from aiodelay.backends.kafka.topics import group, intake
from aiodelay.delay_box import DelayBox
from tests.support.boxes import Out, request, send
from tests.support.kafka import Broker, create_topic, new_name
from tests.support.sessions import shorten_sessions
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def _short_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_sessions(monkeypatch)


class Place:
    """A topic of requests, a topic of messages, and a SQLite store between them."""

    def __init__(self, kafka: str, source: str, target: str, store: Path) -> None:
        self.kafka, self.source, self.target = kafka, source, target
        self._store = f"sqlite:///{store}"

    def box(self) -> DelayBox:
        return DelayBox(self._store, f"kafka://{self.kafka}/{self.source}", allow=[self.target])

    async def send(self, *messages: str, countdown: float = 0, partition: int = 0) -> None:
        values = [request(self.target, message, countdown, id=message) for message in messages]
        await asyncio.to_thread(send, self.kafka, self.source, values, partition=partition)

    @asynccontextmanager
    async def out(self) -> AsyncIterator[Out]:
        out = Out(self.kafka, self.target)
        yield out
        out.close()


async def placed(kafka: str, folder: Path) -> Place:
    source = await create_topic(kafka, new_name("TB"))
    return Place(kafka, source, await create_topic(kafka, new_name("T")), folder / "delay.db")


async def test_requests_that_kafka_has_deleted_are_named_and_the_next_are_read(
    kafka: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = await placed(kafka, tmp_path)
    async with place.out() as out:
        async with place.box():
            await place.send("0", "1")
            await out.until(2)
        await place.send("2", "3", "4")
        admin, before = AdminClient({"bootstrap.servers": kafka}), TopicPartition(place.source, 0, 4)
        await asyncio.to_thread(admin.delete_records([before])[before].result, 30)
        async with place.box():
            await out.until(3)
        assert out.values == [b"0", b"1", b"4"]
    told = [each for each in caplog.records if each.levelno == logging.ERROR and each.name.startswith("aiodelay")]
    (text,) = [each.getMessage() for each in told]
    assert text == f"{place.source}/0: records 2 to 3 were deleted before they were read"


async def test_a_partition_that_is_added_while_the_box_runs_is_read_from_its_beginning(
    kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "METADATA_MS", 500)
    place = await placed(kafka, tmp_path)
    async with place.out() as out, place.box():
        await place.send("0")
        await out.until(1)
        admin = AdminClient({"bootstrap.servers": kafka})
        await asyncio.to_thread(admin.create_partitions([NewPartitions(place.source, 2)])[place.source].result, 30)

        async def is_known() -> bool:  # the broker learns of the partition a little later than the controller
            found = await asyncio.to_thread(admin.list_topics, place.source, 30)
            return len(found.topics[place.source].partitions) == 2

        await until(is_known, "the broker names both partitions")
        await place.send("1", partition=1)
        await place.send("2")
        await out.until(3)
        assert sorted(out.values) == [b"0", b"1", b"2"]


async def test_f31_a_source_that_was_cut_off_is_named_and_read_on_from_its_end(
    own_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next requests have the offsets of the lost requests, whose messages wait in the store. They name ids."""
    monkeypatch.setattr(intake, "CUT_OFF_S", 1.0)
    place = await placed(own_broker.bootstrap, tmp_path)
    async with place.box() as box:

        async def waiting() -> set[str]:
            return {each.record.envelope.payload.decode() async for each in box._scheduler.pending()}

        async def has(*messages: str) -> bool:
            return await waiting() >= {*messages}

        await place.send("0", countdown=3600)
        await until(lambda: has("0"), "the first request is stored")
        size = own_broker.log_bytes(place.source, 0)
        await place.send("lost 1", "lost 2", countdown=3600)
        await until(lambda: has("lost 1", "lost 2"), "all requests are stored")
        own_broker.kill()
        own_broker.cut_log(place.source, 0, size)
        await asyncio.to_thread(own_broker.start)
        why = f"{place.source}/0: the partition ends at 1, and was read to 3: it was cut off"
        await until(lambda: why in caplog.text, "the box has noticed", 60)
        await place.send("new 1", "new 2", "new 3", countdown=3600)
        await until(lambda: has("new 1", "new 2", "new 3"), "the next requests are stored", 60)
        assert await waiting() == {"0", "lost 1", "lost 2", "new 1", "new 2", "new 3"}
