"""Traces and metrics on real servers, also with the instrumentation of the clients installed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer
from opentelemetry import propagate, trace
from opentelemetry.instrumentation.aiokafka import AIOKafkaInstrumentor
from opentelemetry.instrumentation.redis import RedisInstrumentor
from opentelemetry.trace import Link, SpanKind
from redis.asyncio import Redis

from aiodelay import Every, Late, Message, Retry, Scheduler
from aiodelay.delay_box import DelayBox
from aiodelay.redis import RedisListSource
from tests.support.boxes import request, send
from tests.support.kafka import create_topic, new_name
from tests.support.servers import redis_products, serving
from tests.support.telemetry import Emitted, id_of, linked
from tests.support.topics import lasting_producer
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

IDLE_S = 6.0
"""Longer than a blocking read, than two safety polls, and than a third of a lease."""


@dataclass
class Check:
    number: int


@pytest.fixture(scope="module", params=redis_products()[:1], ids=lambda found: found.name)
def redis_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as url:
        yield url


@pytest.fixture
def emitted() -> Emitted:
    return Emitted()


@pytest.fixture
def instrumented(emitted: Emitted) -> Iterator[Emitted]:
    """Both clients' own instrumentation emits here too."""
    instrumentors = RedisInstrumentor(), AIOKafkaInstrumentor()
    for each in instrumentors:
        each.instrument(tracer_provider=emitted.tracers)
    yield emitted
    for each in instrumentors:
        each.uninstrument()


async def read(kafka: str, topic: str) -> dict[str, list[bytes]]:
    """Return the headers of a topic's only record, by name."""
    found: dict[str, list[bytes]] = {}
    async with AIOKafkaConsumer(topic, bootstrap_servers=kafka, auto_offset_reset="earliest") as consumer:
        record = await consumer.getone()
        for name, value in record.headers:
            found.setdefault(name, []).append(value)
    return found


def carried_in(headers: dict[str, list[bytes]]) -> tuple[int, int]:
    texts = {name: values[0].decode() for name, values in headers.items()}
    found = trace.get_current_span(propagate.extract(texts)).get_span_context()
    return found.trace_id, found.span_id


async def test_from_redis_to_kafka_the_record_carries_the_delivery_s_context(
    redis_url: str, kafka: str, emitted: Emitted
) -> None:
    target = await create_topic(kafka, new_name())
    sinks, namespace = [f"kafka://{kafka}"], new_name("n")
    async with Scheduler(redis_url, namespace=namespace, sinks=sinks, telemetry=emitted.telemetry()) as scheduler:
        await scheduler.schedule(b"x", to=f"kafka:{target}", delay="50ms", headers={"own": b"1"})
        headers = await read(kafka, target)
        await scheduler.run_until_idle()
    schedule, deliver = emitted.one(f"schedule kafka:{target}"), emitted.one(f"deliver kafka:{target}")
    attributes = deliver.attributes or {}
    assert (deliver.kind, attributes["messaging.system"]) == (SpanKind.CLIENT, "kafka")
    assert (attributes["messaging.destination.partition.id"], attributes["messaging.kafka.offset"]) == ("0", 0)
    assert (linked(deliver), deliver.parent) == ([id_of(schedule)], None)
    assert carried_in(headers) == id_of(deliver)
    assert headers["own"] == [b"1"]
    assert emitted.total("aiodelay.delivery.lateness", messaging_destination_name=f"kafka:{target}") == 1


async def test_a_traceparent_of_the_user_s_own_stays_the_only_one(redis_url: str, kafka: str, emitted: Emitted) -> None:
    target, own = await create_topic(kafka, new_name()), b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sinks, namespace = [f"kafka://{kafka}"], new_name("n")
    async with Scheduler(redis_url, namespace=namespace, sinks=sinks, telemetry=emitted.telemetry()) as scheduler:
        await scheduler.schedule(b"x", to=f"kafka:{target}", delay="50ms", headers={"traceparent": own})
        headers = await read(kafka, target)
    assert headers["traceparent"] == [own]


async def test_what_kafka_moves_by_itself_carries_the_context_of_what_scheduled_it(
    kafka: str, emitted: Emitted
) -> None:
    target = await create_topic(kafka, new_name())
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=2"
    async with Scheduler(url, telemetry=emitted.telemetry(delayed="continue")) as scheduler:
        await scheduler.schedule(b"x", to=f"kafka:{target}", delay="1s")
        headers = await read(kafka, target)
        await until(lambda: "aiodelay.delivery.lateness" in emitted.points(), "its lateness is measured")
        points = emitted.points()
    assert carried_in(headers) == id_of(emitted.one(f"schedule kafka:{target}"))
    assert [name for name in headers if name.startswith("aiodelay-c")] == []
    moved = emitted.one("deliver kafka")
    assert (moved.attributes or {})["messaging.batch.message_count"] == 1
    assert linked(moved) == [id_of(emitted.one(f"schedule kafka:{target}"))]
    assert moved.end_time is not None
    assert moved.start_time is not None
    assert [n for _, n in points["aiodelay.assignment.partitions"]] == [2]
    assert [value[0] for _, value in points["aiodelay.restore.duration"]] == [2], "one for each partition"
    assert sum(value[0] for _, value in points["aiodelay.delivery.lateness"]) == 1


async def test_a_list_that_others_read_carries_the_context_to_its_handler(redis_url: str, emitted: Emitted) -> None:
    key, namespace, handled = new_name("list"), new_name("n"), asyncio.Event()
    telemetry = emitted.telemetry()
    worker = Scheduler(redis_url, namespace=namespace, telemetry=telemetry, sources=[RedisListSource(redis_url)])

    @worker.handler(source=f"redis-list:{key}")
    async def check(event: Check) -> None:
        handled.set()

    async with worker, Scheduler(redis_url, namespace=namespace, telemetry=telemetry, lanes=["redis-list"]) as mover:
        await mover.schedule(Check(1), to=f"redis-list:{key}", delay="50ms")
        await handled.wait()
        await worker.run_until_idle()
    assert linked(emitted.one("process Check")) == [id_of(emitted.one(f"schedule redis-list:{key}"))]
    assert emitted.one("deliver redis-list").parent is None


@pytest.mark.parametrize("sink", ["redis-list", "redis-log"])
async def test_what_redis_moves_by_itself_is_linked_to_what_scheduled_it(
    redis_url: str, emitted: Emitted, sink: str
) -> None:
    to, telemetry = f"{sink}:{new_name('to')}", emitted.telemetry()
    async with Scheduler(redis_url, namespace=new_name("n"), telemetry=telemetry, lanes=[sink]) as scheduler:
        await scheduler.pause(sink)
        for i in range(3):
            await scheduler.schedule(b"x", to=to, delay="0s", id=f"m{i}", headers={"h": b"x" * i})
        await scheduler.schedule(b"x", to=to, every=Every("1s"), id="series")
        scheduled = {*map(id_of, emitted.named(f"schedule {to}"))}
        await scheduler.resume(sink)

        def linked_so_far() -> list[Link]:
            return [link for each in emitted.named(f"deliver {sink}") for link in each.links]

        await until(lambda: len(linked_so_far()) >= 4, "all four are delivered")
        links = linked_so_far()
    assert {(link.context.trace_id, link.context.span_id) for link in links} == scheduled
    ids = sorted(str((link.attributes or {})["messaging.message.id"]) for link in links)
    assert ids[:4] == ["m0", "m1", "m2", "series"]


async def test_what_is_moved_has_no_more_links_than_are_kept(redis_url: str, emitted: Emitted) -> None:
    to = f"redis-list:{new_name('to')}"
    async with Scheduler(redis_url, namespace=new_name("n"), telemetry=emitted.telemetry()) as scheduler:
        await scheduler.pause("redis-list")
        await scheduler.schedule_many(Message(b"x", to=to, delay="0s") for _ in range(200))
        await scheduler.resume("redis-list")
        await scheduler.run_until_idle()
    spans = emitted.named("deliver redis-list")
    counts = [((span.attributes or {})["messaging.batch.message_count"], len(span.links)) for span in spans]
    assert sum(moved for moved, _ in counts) == 200  # type: ignore[misc]
    assert [links for _, links in counts] == [min(moved, 128) for moved, _ in counts]  # type: ignore[type-var]


async def test_partitions_that_come_by_a_rebalance_are_timed_until_they_serve(kafka: str, emitted: Emitted) -> None:
    url, telemetry = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=2", emitted.telemetry()

    async def until_restored(n: int) -> None:
        await until(lambda: emitted.total("aiodelay.restore.duration") >= n, f"{n} partitions are restored")

    async with Scheduler(url, telemetry=telemetry):
        async with Scheduler(url, telemetry=telemetry):
            await until_restored(3)  # both, and one of them again
        await until_restored(4)  # which returns
    assert emitted.total("aiodelay.restore.duration") == 4


async def test_what_a_handler_reads_from_a_topic_tells_its_partition_and_offset(kafka: str, emitted: Emitted) -> None:
    topic, handled = await create_topic(kafka, new_name(), 3), asyncio.Event()
    scheduler = Scheduler("memory://", sources=[f"kafka://{kafka}"], telemetry=emitted.telemetry())

    @scheduler.handler(source=f"kafka:{topic}?group={new_name('group')}", name="read")
    async def read_one(event: bytes) -> None:
        if event == b"1":
            handled.set()

    async with scheduler:
        for i in range(2):
            await asyncio.to_thread(send, kafka, topic, [b"%d" % i], partition=2, producer=lasting_producer(kafka))
        await handled.wait()
        await scheduler.run_until_idle()
    found = [dict(span.attributes or {}) for span in emitted.named("process read")]
    places = [(each["messaging.destination.partition.id"], each["messaging.kafka.offset"]) for each in found]
    assert (places, {each["messaging.system"] for each in found}) == ([("2", 0), ("2", 1)], {"kafka"})


@pytest.mark.parametrize("is_list", [True, False], ids=["list", "store"])
async def test_a_retry_in_another_process_is_linked_to_the_attempt_before(
    redis_url: str, emitted: Emitted, is_list: bool
) -> None:
    namespace, failed, telemetry = new_name("n"), asyncio.Event(), emitted.telemetry()
    to = f"redis-list:{new_name('list')}" if is_list else None

    def worker(error: Exception | None) -> Scheduler:
        sources, retry = [RedisListSource(redis_url)] if is_list else [], Retry(attempts=2, first="300ms")
        scheduler = Scheduler(redis_url, namespace=namespace, telemetry=telemetry, retry=retry, sources=sources)

        @scheduler.handler(source=to)
        async def check(event: Check) -> None:
            failed.set()
            if error is not None:
                raise error

        return scheduler

    async with worker(ValueError()) as first:
        await first.schedule(Check(1), to=to, delay="50ms")
        await failed.wait()
    async with worker(None) as second:
        await second.run_until_idle()
    before, after = emitted.named("process Check")
    assert linked(after) == [id_of(emitted.one(f"schedule {to or 'Check'}")), id_of(before)]


async def test_lists_and_memory_of_redis_are_measured(redis_url: str, emitted: Emitted) -> None:
    key, namespace = new_name("list"), new_name("n")
    async with Scheduler(redis_url, namespace=namespace, telemetry=emitted.telemetry()) as scheduler:
        await scheduler.store.shards[0].command("CONFIG", "SET", "maxmemory", "200mb")  # type: ignore[attr-defined]
        await scheduler.schedule(b"x", to=f"redis-list:{key}", delay="10ms")
        await scheduler.run_until_idle()
        observer = scheduler._running._options.observer  # type: ignore[union-attr]
        observer._look_again_s = 0.0  # type: ignore[union-attr]
        await observer.look(observer._tidied)  # type: ignore[union-attr]
        points = emitted.points()
        await scheduler.store.shards[0].command("CONFIG", "SET", "maxmemory", "0")  # type: ignore[attr-defined]
    lengths = {labels["messaging.destination.name"]: n for labels, n in points["aiodelay.list.length"]}
    assert lengths == {f"redis-list:{key}": 1}
    ((_, fill),) = points["aiodelay.store.fill"]
    assert 0 < fill < 1


@pytest.fixture(params=["memory", "sqlite", "redis", "kafka"])
def store_url(request: pytest.FixtureRequest, redis_url: str, kafka: str, tmp_path: Path) -> str:
    return {
        "memory": "memory://",
        "sqlite": f"sqlite:///{tmp_path}/shop.db",
        "redis": redis_url,
        "kafka": f"kafka://{kafka}/{new_name('schedules')}?create_topic=true",
    }[request.param]


async def test_a_message_that_the_store_gives_up_is_told_as_dead(store_url: str, emitted: Emitted) -> None:
    """The alert on dead letters needs it: the counter tells only what handlers and sinks gave up."""
    lane = new_name("nobody")
    dead = {"messaging_destination_name": lane, "aiodelay_message_state": "dead"}
    async with Scheduler(store_url, telemetry=emitted.telemetry()) as scheduler:
        await scheduler.schedule(b"x", to=f"handler:{lane}", delay="1ms", late=Late.dead_letter("1ms"))

        async def is_told() -> bool:
            await scheduler._running._loops.housekeeping._step()  # type: ignore[union-attr]
            scheduler._running._options.observer._look_again_s = 0.0  # type: ignore[union-attr]
            return emitted.total("aiodelay.messages", **dead) == 1

        await until(is_told, "the dead letter is counted")
        assert [letter.reason async for letter in scheduler.dead_letters(lane)] == ["late"]
        assert emitted.total("aiodelay.messages.dead_lettered", messaging_destination_name=lane) == 0


async def test_an_idle_process_makes_no_spans_although_its_clients_are_instrumented(
    redis_url: str, instrumented: Emitted
) -> None:
    telemetry = instrumented.telemetry()
    scheduler = Scheduler(redis_url, namespace=new_name("n"), telemetry=telemetry)
    seen: list[int] = []

    @scheduler.handler(source=f"redis-list:{new_name('idle')}")
    async def check(event: Check) -> None:
        seen.append(event.number)

    async with scheduler, Redis.from_url(redis_url) as client:
        await client.ping()
        assert [span.name for span in instrumented.spans] == ["PING"]  # it does emit here
        await asyncio.sleep(IDLE_S)  # nothing may be emitted meanwhile
        assert [span.name for span in instrumented.spans] == ["PING"]
        await scheduler.schedule(Check(1), delay="10ms")
        await scheduler.run_until_idle()
    assert seen == [1]
    assert [span.name for span in instrumented.spans] == ["PING", "schedule Check", "process Check"]
    assert linked(instrumented.one("process Check")) == [id_of(instrumented.one("schedule Check"))]


async def test_instrumented_clients_make_no_second_delivery(redis_url: str, kafka: str, instrumented: Emitted) -> None:
    target = await create_topic(kafka, new_name())
    sinks, namespace = [f"kafka://{kafka}"], new_name("n")
    telemetry = instrumented.telemetry()
    async with Scheduler(redis_url, namespace=namespace, sinks=sinks, telemetry=telemetry) as scheduler:
        await scheduler.schedule(b"x", to=f"kafka:{target}", delay="50ms")
        headers = await read(kafka, target)
        await scheduler.run_until_idle()
    deliver = instrumented.one(f"deliver kafka:{target}")
    assert carried_in(headers) == id_of(deliver)  # the first one counts
    assert linked(deliver) == [id_of(instrumented.one(f"schedule kafka:{target}"))]
    sends = instrumented.named(f"{target} send")
    assert len(sends) <= 1
    assert all(span.parent is not None and span.parent.span_id == deliver.context.span_id for span in sends)


async def test_what_a_delay_box_takes_in_is_linked_to_who_asked(kafka: str, emitted: Emitted) -> None:
    requests, target = await create_topic(kafka, new_name()), await create_topic(kafka, new_name())
    asked = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    scheduler = Scheduler("memory://", sinks=[f"kafka://{kafka}"], telemetry=emitted.telemetry())
    async with scheduler, DelayBox(scheduler, f"kafka://{kafka}/{requests}", allow=[target]):
        value = request(target, "x", 0)
        sent, producer = {"traceparent": asked}, lasting_producer(kafka)
        await asyncio.to_thread(send, kafka, requests, [value], headers=sent, producer=producer)
        headers = await read(kafka, target)
        await scheduler.run_until_idle()
    taken, deliver = emitted.one(f"process kafka:{requests}"), emitted.one(f"deliver kafka:{target}")
    assert taken.kind is SpanKind.CONSUMER
    assert (taken.attributes or {})["messaging.destination.partition.id"] == "0"
    assert linked(taken) == [(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)]
    assert linked(deliver) == [id_of(taken)]
    assert headers["traceparent"] == [asked.encode()]
    assert emitted.total("aiodelay.schedule.delay", messaging_destination_name=f"kafka:{target}") == 1
