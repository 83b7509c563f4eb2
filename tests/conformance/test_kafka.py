from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from aiodelay import Received, Scheduler
from aiodelay.backends.kafka.client import Outgoing, Transactions
from aiodelay.backends.kafka.store import transfer, work
from aiodelay.core.transitions import NO_OP, occurrence_id
from aiodelay.core.values import MAX_CLAIM_BYTES, MAX_CLAIM_MESSAGES, Demand, Envelope, Record
from aiodelay.kafka import KafkaSink, open_store
from aiodelay.ports import Sink, Store
from aiodelay.reactive import Publisher
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.conformance import StoreConformance, TransferConformance
from aiodelay.testing.conformance.stage import Stage, again, staged
from tests.support.kafka import create_topic, new_name
from tests.support.publishing import MessagesConformance
from tests.support.slow_stores import POLL_MS, wait_long_for_wake_ups
from tests.support.subscribing import SinkConformance
from tests.support.topics import fill
from tests.support.waiting import until, until_sync


class OnKafka:
    order_per_group: ClassVar[bool] = False
    leases_survive: ClassVar[bool] = False
    counted_journal: ClassVar[bool] = False

    @pytest.fixture(autouse=True)
    def _patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wait_long_for_wake_ups(monkeypatch)
        for module in (work, transfer):
            monkeypatch.setattr(module, "SAFETY_POLL_MS", POLL_MS)

    @pytest.fixture(autouse=True)
    def _broker(self, kafka: str) -> Iterator[None]:
        self.bootstrap = kafka
        with AdminClient({"bootstrap.servers": kafka}) as self.admin:
            yield

    def make_store(self, clock: VirtualClock, *, journal: int = 0) -> Store:
        self.url = f"kafka://{self.bootstrap}/{new_name('schedules')}?create_topic=true&partitions=1"
        self.url += f"&history={new_name('history')}" if journal else ""
        return open_store(self.url, namespace="default", clock=clock)

    def reopen(self, store: Store, clock: VirtualClock) -> Store:
        return open_store(self.url, namespace="default", clock=clock)


class TestKafkaStore(OnKafka, StoreConformance):
    pass


class TestKafkaTopics(OnKafka, TransferConformance):
    """Topics on the store's own cluster."""

    has_limit = False

    def moves(self, stage: Stage, *, limit: int = 0) -> Any:  # noqa: ANN401 - the suite's own
        moves = super().moves(stage, limit=limit)
        for topic in (moves.here, moves.there):
            self._create(topic)
        return moves

    def _create(self, topic: str) -> None:
        (created,) = self.admin.create_topics([NewTopic(topic, 1, 1)]).values()
        created.result(60)
        until_sync(lambda: self._error_of(topic) is None, f"the broker knows {topic}")

    def _error_of(self, topic: str) -> object:
        return self.admin.list_topics(topic).topics[topic].error

    def make_sink(self, store: Store, *, limit: int) -> Sink:
        return KafkaSink(self.bootstrap)

    async def arrived(self, store: Store, sink: Sink, address: str) -> Sequence[Record]:
        options = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
        found: list[Record] = []
        async with AIOKafkaConsumer(address, bootstrap_servers=self.bootstrap, **options) as consumer:
            ends = await consumer.end_offsets(consumer.assignment())
            while any([await consumer.position(each) < end for each, end in ends.items()]):
                for batch in (await consumer.getmany(timeout_ms=100)).values():
                    found += [_record(each, sink.name, address) for each in batch]
        return found

    async def clear(self, store: Store, sink: Sink, address: str) -> None:
        self._create(address)

    async def spoil(self, store: Store, sink: Sink, address: str) -> None:
        (deleted,) = self.admin.delete_topics([address]).values()
        deleted.result(60)
        await until(lambda: self._error_of(address) is not None, f"the broker has deleted {address}")

    @staged
    async def test_demand_a_call_is_bounded_whatever_is_asked_for(self, stage: Stage) -> None:
        """Each of its transactions is."""
        moves, sizes, begin = self.moves(stage), list[tuple[int, int]](), Transactions.begin

        async def noted(self: Transactions, records: Sequence[Outgoing]) -> list[int]:
            values = [each.value or b"" for each in records if each.topic == moves.here]
            sizes.append((len(values), sum(map(len, values))))
            return await begin(self, records)

        await moves.stored(*[moves.put(f"m{i}") for i in range(MAX_CLAIM_MESSAGES + 10)])
        await moves.stored(*[moves.put(f"l{i}", payload=bytes(400 << 10)) for i in range(4)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Transactions, "begin", noted)
            assert (await moves.move(Demand(MAX_CLAIM_MESSAGES + 1, 8 << 20))).moved == MAX_CLAIM_MESSAGES + 1
            assert (await moves.move(Demand(10_000, max_bytes=16 << 20))).moved == 13
        assert max(n for n, _ in sizes) == MAX_CLAIM_MESSAGES
        assert max(size for _, size in sizes) < MAX_CLAIM_BYTES + (400 << 10)

    @pytest.mark.parametrize("message_id", ["m", "é ✓", "x" * 255])
    @staged
    async def test_s8_the_whole_message_arrives_identical(self, stage: Stage, message_id: str) -> None:
        """All of it that is of use to readers of a topic; the rest is the schedule's own."""
        moves = self.moves(stage)
        put = moves.put(
            message_id,
            key=b"\x00\xff",
            headers={"é": b"", "a": b"\xff" * 300},
            type_="payment.check",
            encoding="msgpack",
            trace={"traceparent": "00-1"},
        )
        stored = await moves.stored(put)
        await moves.move_all()
        (record,) = await moves.arrived()
        sent, got = put.envelope, record.envelope
        assert (got.id, got.type, got.encoding, got.key) == (sent.id, sent.type, sent.encoding, sent.key)
        assert dict(got.headers) == {**sent.headers, "traceparent": b"00-1"}
        assert (record.revision, record.due_ms, record.attempt) == (stored.revision, stored.due_ms, 0)

    @staged
    async def test_s8_attempts_and_errors_travel_along(self, stage: Stage) -> None:
        """Attempts do."""
        moves = self.moves(stage)
        await moves.stored(moves.put("m"))
        (claim,) = await stage.claim(lane=moves.sink.name)
        await stage.end(again(claim, stage.now, 3, "no answer"))
        await moves.move_all()
        assert [record.attempt for record in await moves.arrived()] == [3]


class OfKafka(MessagesConformance):
    @pytest.fixture(autouse=True)
    def _broker(self, kafka: str) -> None:
        self.bootstrap = kafka


class TestPublisherOffKafka(OfKafka):
    def make_scheduler(self, **settings: Any) -> Scheduler:  # noqa: ANN401
        url = f"kafka://{self.bootstrap}/{new_name('schedules')}?create_topic=true&partitions=2"
        return Scheduler(url, **settings)


class TestPublisherFromATopic(OfKafka):
    """Records that another client wrote."""

    def make_scheduler(self, **settings: Any) -> Scheduler:  # noqa: ANN401
        return Scheduler("memory://", sources=[f"kafka://{self.bootstrap}"], **settings)

    @asynccontextmanager
    async def publisher(self, items: int) -> AsyncIterator[Publisher[Received[bytes]]]:
        topic = await create_topic(self.bootstrap, new_name(), 2)
        for partition in range(2):
            fill(self.bootstrap, topic, [b"%d" % number for number in range(partition, items, 2)], partition=partition)
        self.source = f"kafka:{topic}?group={new_name('group')}"
        async with super().publisher(0) as publisher:
            yield publisher


class TestSinkSubscriber(SinkConformance):
    @pytest.fixture(autouse=True)
    def _broker(self, kafka: str) -> None:
        self.bootstrap, self.address = kafka, asyncio.run(create_topic(kafka, new_name(), 2))

    def make_sink(self) -> Sink:
        return KafkaSink(self.bootstrap)


def _record(read: Any, lane: str, address: str) -> Record:  # noqa: ANN401 - aiokafka's
    """Return what a delivered record tells of its message."""
    headers = dict(read.headers)
    message_id, revision, due = headers["aiodelay-delivery-id"].decode().rsplit("/", 2)
    if message_id == "s":  # the rules' series
        message_id = occurrence_id(message_id, int(due))
    own = {name: value for name, value in headers.items() if not name.startswith(("aiodelay-", "scheduler-"))}
    type_, encoding = (headers.get(f"aiodelay-{name}", b"").decode() for name in ("type", "encoding"))
    envelope = Envelope(message_id, lane, address, type_, encoding, read.value, read.key, own)
    return Record(envelope, int(revision), int(due), NO_OP, attempt=int(headers["aiodelay-attempt"]) - 1)
