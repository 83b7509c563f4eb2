"""The delay box from outside: requests in, messages out, with every store; confluent-kafka on both ends."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from msgspec.structs import replace

from aiodelay import ConfigurationError, Scheduler
from aiodelay.backends.kafka.records import DEAD_REASON
from aiodelay.backends.kafka.topics.intake import DEAD_FROM, DEAD_TIMESTAMP
from aiodelay.core.values import Command, Conflict, Outcome, Put, Snapshot, SourcePosition
from aiodelay.delay_box import DelayBox
from aiodelay.errors import (
    SinkUnavailableError,
    StoreMismatchError,
    StoreUnavailableError,
    TargetError,
    UnknownSinkError,
)
from aiodelay.kafka import KafkaSink
from aiodelay.redis import RedisStore
from aiodelay.testing.forwarding import ForwardingStore
from aiodelay.testing.servers import Found, redis_servers
from tests.support.bad_requests import BAD
from tests.support.boxes import Out, headers_of, request, send
from tests.support.cli import Cli
from tests.support.command import Program
from tests.support.kafka import create_topic, new_name
from tests.support.proxy import proxied
from tests.support.topics import LEAST, delete_topic, lasting_producer, new_producer
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

SHARED = ["sqlite", "redis", "kafka"]
QUIET_S = 0.5
"""Longer than a box needs for a message that is due; nothing signals that no further message comes."""


@pytest.fixture(scope="module")
def redis_url(shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(redis_servers()[0])


@pytest.fixture
def urls(kafka: str, redis_url: str, tmp_path: Path) -> dict[str, str]:
    """The URL of a store of each kind, which holds nothing."""
    return {
        "memory": "memory://",
        "sqlite": f"sqlite:///{tmp_path / 'delay.db'}",
        "redis": redis_url,
        "kafka": f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=2",
    }


class Place:
    """An intake topic, where its messages go, and boxes between them."""

    def __init__(self, kafka: str, intake: str, target: str, store: str) -> None:
        self.kafka, self.intake, self.target, self.store = kafka, intake, target, store

    def box(self, **options: Any) -> DelayBox:  # noqa: ANN401 - those of a box
        apart = {} if self.store.startswith("kafka:") else {"namespace": self.intake}
        options = {"allow": [self.target]} | apart | options
        return DelayBox(self.store, f"kafka://{self.kafka}/{self.intake}", **options)

    async def send(self, *values: bytes | None, **options: Any) -> None:  # noqa: ANN401 - those of `send`
        producer = lasting_producer(self.kafka)
        await asyncio.to_thread(send, self.kafka, self.intake, values, producer=producer, **options)

    @asynccontextmanager
    async def out(self, topic: str = "") -> AsyncIterator[Out]:
        out = Out(self.kafka, topic or self.target)
        yield out
        out.close()


async def placed(kafka: str, store: str, partitions: int = 2) -> Place:
    intake = await create_topic(kafka, new_name("TB"), partitions)
    return Place(kafka, intake, await create_topic(kafka, new_name("T")), store)


# --- the article's own numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "boxes", "countdown"),
    [
        ("sqlite", 1, 5),
        ("memory", 1, 1),
        *((kind, 2, 1) for kind in SHARED),
        *(
            pytest.param(kind, n, 5, marks=pytest.mark.nightly)
            for kind, n in [("memory", 1), ("sqlite", 2), *((kind, n) for kind in ("redis", "kafka") for n in (1, 2))]
        ),
    ],
)
async def test_a_countdown_of_5_comes_out_once_after_5_seconds(
    kafka: str, urls: dict[str, str], kind: str, boxes: int, countdown: int
) -> None:
    place = await placed(kafka, urls[kind])
    async with AsyncExitStack() as stack:
        for _ in range(boxes):
            await stack.enter_async_context(place.box())
        before_ms = time.time() * 1000
        await place.send(request(place.target, "<message body>", countdown), headers={"CALLER_SERVICE": "S"})
        after_ms = time.time() * 1000
        async with place.out() as out:
            (record,) = await out.until(1)
            out_ms = record.timestamp()[1]
            assert before_ms - 1 <= out_ms - countdown * 1000 <= after_ms + 80_000
            assert record.value() == b"<message body>"
            assert headers_of(record)["CALLER_SERVICE"] == b"S"
            assert len(await out.quiet(QUIET_S)) == 1


# --- what goes beyond them --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_a_burst_of_requests_comes_out_once(kafka: str, urls: dict[str, str], kind: str) -> None:
    place = await placed(kafka, urls[kind], partitions=1)
    requests = [request(place.target, f"{n}", id="m") for n in range(500)]
    begun_ms = time.time() * 1000
    await place.send(*requests, headers={"aiodelay-conflict": "debounce:1h"})
    async with place.box() as box, place.out() as out:

        async def last() -> list[Snapshot]:
            return [each async for each in box._scheduler.pending() if each.record.envelope.payload == b"499"]

        (waits,) = await until(last, "the last request is stored")
        assert begun_ms + 3_600_000 - 1 <= waits.record.due_ms <= time.time() * 1000 + 3_600_000
        await box._scheduler.fire("m")
        (record,) = await out.until(1)
        assert record.value() == b"499"
        assert len(await out.quiet(QUIET_S)) == 1


async def test_a_box_that_stores_in_kafka_refuses_a_rule_that_only_an_owner_can_carry_out(
    kafka: str, urls: dict[str, str]
) -> None:
    place = await placed(kafka, urls["kafka"])
    async with place.box(), place.out(f"{place.intake}.dead") as dead:
        await place.send(request(place.target, "x", id="m"), headers={"aiodelay-conflict": "debounce:2s"})
        (record,) = await dead.until(1)
        why = headers_of(record)[DEAD_REASON]
        assert why == b"its conflict rule is debounce; here a request may have: keep, replace"


@pytest.mark.parametrize("kind", SHARED)
async def test_s3_what_was_taken_in_is_not_taken_in_again(kafka: str, urls: dict[str, str], kind: str) -> None:
    place = await placed(kafka, urls[kind])
    numbers = [f"{i}".encode() for i in range(1_300)]
    async with place.out() as out:
        for part in (numbers[:600], numbers[600:]):
            await place.send(*[request(place.target, number.decode(), 0.5) for number in part])
            async with place.box():
                await out.until(len(part))
        async with place.box():
            await place.send(request(place.target, "last", 0))
            await out.until(1_301)
            await out.quiet(QUIET_S)
        assert sorted(out.values) == sorted([*numbers, b"last"])


@pytest.mark.parametrize("kind", ["memory", *SHARED])
async def test_fields_of_our_own(kafka: str, urls: dict[str, str], kind: str) -> None:
    place = await placed(kafka, urls[kind], partitions=1)
    due_s = int(time.time()) + 2
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(due_s))
    async with place.box() as box, place.out() as out:
        await place.send(request(place.target, "replaced", 600, id="m"))
        fields: dict[str, Any] = {"at": at, "id": "m", "key": "k", "headers": {"h": "é"}}
        await place.send(request(place.target, {"a": [1.50]}, **fields), headers={"CALLER_SERVICE": "S", "n": None})
        (record,) = await out.until(1)
        assert record.timestamp()[1] >= due_s * 1000
        assert (record.key(), record.value()) == (b"k", b'{"a": [1.5]}')
        headers = headers_of(record)
        assert {name: headers[name] for name in ("h", "CALLER_SERVICE", "n", "scheduler-key")} == {
            "h": "é".encode(),
            "CALLER_SERVICE": b"S",
            "n": b"",
            "scheduler-key": b"m",
        }

        async def is_empty() -> bool:
            return [each async for each in box._scheduler.pending()] == []

        await until(is_empty, "neither of the two is pending")
        assert len(await out.quiet(QUIET_S)) == 1


@pytest.mark.parametrize(("countdown_from", "countdown"), [("record", 3602), ("arrival", 2)])
async def test_where_a_countdown_begins(kafka: str, urls: dict[str, str], countdown_from: str, countdown: int) -> None:
    """The record is an hour old, or a little more, when it is read."""
    place = await placed(kafka, urls["sqlite"])
    async with place.box(countdown_from=countdown_from), place.out() as out:
        sent_ms = time.time() * 1000
        written_ms = int(sent_ms) - 3_600_000
        await place.send(request(place.target, "m", countdown), timestamp_ms=written_ms)
        (record,) = await out.until(1)
        waited_ms = record.timestamp()[1] - (written_ms if countdown_from == "record" else sent_ms)
        assert waited_ms >= countdown * 1000 - 1


async def test_what_a_producer_aborts_was_never_asked_for(kafka: str, urls: dict[str, str]) -> None:
    place = await placed(kafka, urls["sqlite"], partitions=1)
    producer = new_producer(kafka, {"transactional.id": place.intake})
    producer.init_transactions(60)
    for number in range(6):
        producer.begin_transaction()
        producer.produce(place.intake, request(place.target, f"{number}", 0))
        assert producer.flush(60) == 0
        if number % 2:
            producer.commit_transaction(60)
        else:
            producer.abort_transaction(60)
    async with place.out() as out:
        async with place.box():
            await out.until(3)
        async with place.box():
            await place.send(request(place.target, "last", 0))
            await out.until(4)
            await out.quiet(QUIET_S)
        assert sorted(out.values) == [b"1", b"3", b"5", b"last"]


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", *SHARED])
async def test_l5_every_bad_record_of_the_table_ends_in_the_dead_topic(
    kafka: str, urls: dict[str, str], kind: str
) -> None:
    place = await placed(kafka, urls[kind])
    table = [(text.encode() if isinstance(text, str) else text, reason) for text, reason in BAD]
    table = [(text and text.replace(b'"T"', f'"{place.target}"'.encode(), 1), reason) for text, reason in table]
    begun_ms = time.time() * 1000
    for number, (text, _) in enumerate(table):
        good = request(place.target, f"{number}", 0)
        await place.send(text, good, headers={"n": f"{number}", "null": None}, key=b"\xff%d" % number)
    dead_topic = f"{place.intake}.dead"
    async with place.box(max_payload=1000), place.out() as out, place.out(dead_topic) as dead:
        await out.until(len(table))
        await dead.until(len(table))
        assert len(await dead.quiet(QUIET_S)) == len(table)
        await out.quiet(QUIET_S)
        assert sorted(map(int, out.values)) == list(range(len(table)))
    for record in dead.records:
        headers = headers_of(record)
        number = int(headers["n"] or b"")
        text, reason = table[number]
        assert (record.value(), record.key()) == (text, b"\xff%d" % number)
        assert list(headers)[:2] == ["n", "null"]
        assert headers["null"] is None
        assert reason in (headers[DEAD_REASON] or b"").decode()
        assert (headers[DEAD_FROM] or b"").decode().startswith(f"{place.intake}/")
        assert begun_ms - 1 <= int(headers[DEAD_TIMESTAMP] or b"") <= time.time() * 1000


class _OnceForEachId(ForwardingStore):
    """Refuses a message if its id is stored already."""

    async def apply(self, commands: Sequence[Command], *, source: SourcePosition | None = None) -> Sequence[Outcome]:
        refusing = [replace(each, conflict=Conflict.error()) if type(each) is Put else each for each in commands]
        return await super().apply(refusing, source=source)


async def test_s2_a_request_that_the_store_refuses_ends_in_the_dead_topic_once(
    kafka: str, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its batch holds no other request, and the dead topic takes nothing for a while."""
    place = await placed(kafka, redis_url, partitions=1)
    dead_topic = f"{place.intake}.dead"
    store = _OnceForEachId(RedisStore(redis_url, namespace=place.intake))
    scheduler = Scheduler(store, sinks=[KafkaSink(f"kafka://{kafka}")])
    async with scheduler, DelayBox(scheduler, f"kafka://{kafka}/{place.intake}", allow=[place.target]):
        await place.send(request(place.target, "first", 3600, id="a"))
        await until(lambda: store.get("a"), "the first request is stored")
        await asyncio.to_thread(delete_topic, kafka, dead_topic)
        await place.send(request(place.target, "second", 3600, id="a"))
        await until(lambda: f"1 records go to {dead_topic}" in caplog.text, "the store has refused the second request")
        async with place.out() as out:
            await place.send(request(place.target, "third", 0))
            await out.quiet(QUIET_S)
            assert out.values == []
            await create_topic(kafka, dead_topic)
            async with place.out(dead_topic) as dead:
                (record,) = await dead.until(1)
                assert headers_of(record)[DEAD_REASON] == b"the store refuses it: duplicate "
                await out.until(1)
                assert len(await dead.quiet(QUIET_S)) == 1


async def test_what_is_too_large_for_the_dead_topic_leaves_its_reason_there(kafka: str, urls: dict[str, str]) -> None:
    place = await placed(kafka, urls["memory"])
    dead_topic = await create_topic(kafka, f"{place.intake}.dead", max_message_bytes=10_000)
    await place.send(b"x" * 20_000, b"small", request(place.target, "good", 0), key=b"k", partition=0)
    async with place.box(), place.out() as out, place.out(dead_topic) as dead:
        await out.until(1)
        large, small = sorted(await dead.until(2), key=lambda record: headers_of(record)[DEAD_FROM] or b"")
        assert (large.value(), large.key(), small.value(), small.key()) == (None, None, b"small", b"k")
        assert "too large for the dead topic" in (headers_of(large)[DEAD_REASON] or b"").decode()
        assert headers_of(large)[DEAD_FROM] == f"{place.intake}/0/0".encode()


async def test_l5_a_request_that_the_schedules_topic_never_takes_holds_up_no_other(kafka: str) -> None:
    """Each of the others fits, and all of them together do not."""
    settings = {**LEAST, "max_message_bytes": 50_000}
    schedules = await create_topic(kafka, new_name("schedules"), 1, **settings)
    place = await placed(kafka, f"kafka://{kafka}/{schedules}", partitions=1)
    values = [request(place.target, "x" * size, 0) for size in [5_000] * 20 + [100_000] + [5_000] * 20]
    await place.send(*values)
    async with place.box(), place.out() as out, place.out(f"{place.intake}.dead") as dead:
        (record,) = await dead.until(1)
        assert record.value() == values[20]
        assert b"max.message.bytes" in (headers_of(record)[DEAD_REASON] or b"")
        await out.until(40)
        await out.quiet(QUIET_S)
        assert (len(out.values), len(dead.values)) == (40, 1)


async def test_s2_no_position_passes_what_the_dead_topic_has_not(kafka: str, urls: dict[str, str]) -> None:
    """It takes nothing for a while."""
    place = await placed(kafka, urls["sqlite"], partitions=1)
    dead_topic = f"{place.intake}.dead"
    async with place.out() as out:
        async with place.box():
            await place.send(request(place.target, "first", 0))
            await out.until(1)
            await asyncio.to_thread(delete_topic, kafka, dead_topic)
            await place.send(b"bad", request(place.target, "second", 0))
            await out.quiet(QUIET_S)
            assert out.values == [b"first"]
            await create_topic(kafka, dead_topic)
            async with place.out(dead_topic) as dead:
                assert [record.value() for record in await dead.until(1)] == [b"bad"]
                await out.until(2)
                await dead.quiet(QUIET_S)
                assert dead.values == [b"bad"]
        assert out.values == [b"first", b"second"]


# --- opening it -------------------------------------------------------------------------------------------


async def test_topics_are_created_if_told_to_and_dead_topics_always(kafka: str) -> None:
    intake, target = new_name("TB"), await create_topic(kafka, new_name("T"))
    url = f"kafka://{kafka}/{intake}"
    with pytest.raises(StoreMismatchError, match=f"topic {intake} is missing; .*create_topic=true"):
        await DelayBox("memory://", url, allow=[target]).__aenter__()
    async with DelayBox("memory://", f"{url}?create_topic=true&partitions=3", allow=[target]):
        topics = AdminClient({"bootstrap.servers": kafka}).list_topics(timeout=60).topics
        assert (len(topics[intake].partitions), len(topics[f"{intake}.dead"].partitions)) == (3, 3)


async def test_with_a_scheduler_of_ones_own(kafka: str) -> None:
    intake, target = await create_topic(kafka, new_name("TB")), await create_topic(kafka, new_name("T"))
    handled: list[bytes] = []
    async with Scheduler("memory://") as scheduler:
        with pytest.raises(UnknownSinkError):
            await DelayBox(scheduler, f"kafka://{kafka}/{intake}", allow=[target]).__aenter__()
    scheduler = Scheduler("memory://", sinks=[KafkaSink(kafka)])

    @scheduler.handler(name="own")
    async def handle(event: bytes) -> None:
        handled.append(event)

    before = asyncio.all_tasks()
    out = Out(kafka, target)
    async with scheduler, DelayBox(scheduler, f"kafka://{kafka}/{intake}", allow=[target]):
        await scheduler.schedule(b"own", to="handler:own", delay="0s")
        values = [request(target, "m", 0)]
        await asyncio.to_thread(send, kafka, intake, values, producer=lasting_producer(kafka))
        await out.until(1)
    assert (out.values, handled) == ([b"m"], [b"own"])
    assert asyncio.all_tasks() <= before
    out.close()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"allow": []}, "allow is empty"),
        ({"allow": "T"}, "allow is 'T'"),
        ({"allow": ["a b"]}, "allow is 'a b'"),
        ({"allow": ["TB"]}, "allow is TB"),
        ({"allow": ["TB.dead"]}, "allow is TB.dead"),
        ({"dead_topic": "TB"}, "dead_topic is TB"),
        ({"source": "kafka://h/TB,TB.dead"}, "dead_topic is TB.dead"),
        ({"dead_topic": "a b"}, "dead_topic is 'a b'"),
        ({"countdown_from": "now"}, "countdown_from is 'now'"),
        ({"max_payload": 0}, "max_payload is 0"),
        ({"source": "redis://h/TB"}, "source is redis://h/TB"),
        ({"source": "kafka://h"}, "source is kafka://h"),
        ({"source": "kafka://h/TB,TB"}, "source is"),
        ({"source": "kafka://h/TB?x=1"}, "option of kafka://h/TB"),
        ({"source": "kafka://h/TB?create_topic=yes"}, "create_topic"),
        ({"store": "nowhere://h"}, "scheme of store"),
    ],
)
async def test_wrong_settings_are_refused_at_once(options: dict[str, Any], problem: str) -> None:
    given = {"store": "memory://", "source": "kafka://h/TB", "allow": ["T"]} | options
    with pytest.raises((ConfigurationError, TargetError), match=problem):
        DelayBox(given.pop("store"), given.pop("source"), **given)


async def test_the_schedules_topic_takes_no_messages(kafka: str, urls: dict[str, str]) -> None:
    place = await placed(kafka, urls["kafka"])
    schedules = urls["kafka"].rpartition("/")[2].partition("?")[0]
    with pytest.raises(TargetError, match=schedules):
        await place.box(allow=[schedules]).__aenter__()


async def test_a_cluster_that_does_not_answer_is_told() -> None:
    nowhere = "kafka://127.0.0.1:1"
    with pytest.raises(SinkUnavailableError):
        await Scheduler("memory://", sinks=[nowhere], open_timeout="0s").__aenter__()
    async with Scheduler("memory://", sinks=[nowhere], lanes=[], open_timeout="0s") as scheduler:
        with pytest.raises(StoreUnavailableError):
            await DelayBox(scheduler, f"{nowhere}/TB", allow=["T"]).__aenter__()


async def test_a_box_that_starts_while_its_cluster_does_not_answer_waits_for_it(
    kafka: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = await placed(kafka, "memory://")
    host, _, port = kafka.partition(":")
    async with proxied(int(port), host) as proxy, Scheduler("memory://", sinks=[f"kafka://{kafka}"]) as scheduler:
        proxy.mode = "refuse"
        box = DelayBox(scheduler, f"kafka://127.0.0.1:{proxy.port}/{place.intake}", allow=[place.target])
        await place.send(request(place.target, "m", 0))
        async with asyncio.TaskGroup() as tasks:
            opening = tasks.create_task(box.__aenter__())
            await until_said(caplog, "opening the intake from kafka://127.0.0.1")
            assert not opening.done()
            proxy.mode = "pass"
        async with place.out() as out:
            await out.until(1)
        await box.__aexit__(None, None, None)


async def until_said(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Wait for a line of the log."""
    async with asyncio.timeout(60):
        while not any(text in each for each in caplog.messages):  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.02)


async def test_a_command_that_waits_for_a_cluster_ends_at_a_signal(tmp_path: Path) -> None:
    where = ["--from", "kafka://127.0.0.1:1/TB", "--store", "memory://", "--allow", "T"]
    with Program("-m", "aiodelay", "delay-box", *where, cwd=tmp_path) as box:
        await asyncio.to_thread(box.err.wait_for, "trying again for up to 30s")
        box.send(signal.SIGTERM)
        assert await asyncio.to_thread(box.exit_code) == 0
        assert "the delay box has stopped" in box.err.seen[-1]


# --- the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    ["sqlite", "kafka", pytest.param("redis", marks=pytest.mark.nightly)],  # docs/delay-box.md runs it with Redis
)
async def test_one_command_runs_a_box_until_sigterm(
    kafka: str, urls: dict[str, str], kind: str, tmp_path: Path
) -> None:
    intake, target = new_name("TB"), await create_topic(kafka, new_name("T"))
    arguments = ["delay-box", "--from", f"kafka://{kafka}/{intake}?create_topic=true", "--store", urls[kind]]
    options = ["--allow", target, "--allow", "other", "--dead-topic", f"{intake}-bad"]
    options += [] if kind == "kafka" else ["--namespace", intake]
    with Program("-m", "aiodelay", *arguments, *options, cwd=tmp_path) as box:
        await asyncio.to_thread(box.err.wait_for, "delaying from kafka://")
        sent_ms = time.time() * 1000
        values = [request(target, "m", 1.5), b"bad"]
        headers, producer = {"CALLER_SERVICE": "S"}, lasting_producer(kafka)
        await asyncio.to_thread(send, kafka, intake, values, headers=headers, producer=producer)
        out, dead = Out(kafka, target), Out(kafka, f"{intake}-bad")
        (record,) = await out.until(1)
        assert record.timestamp()[1] >= sent_ms + 1_499
        assert [each.value() for each in await dead.until(1)] == [b"bad"]
        box.send(signal.SIGTERM)
        assert await asyncio.to_thread(box.exit_code) == 0
        out.close()
        dead.close()


async def test_a_command_that_cannot_work_says_why_in_a_line(kafka: str, tmp_path: Path) -> None:
    where = ["--from", f"kafka://{kafka}/{new_name('TB')}", "--store", "memory://"]
    with Program("-m", "aiodelay", "delay-box", *where, "--allow", "T", cwd=tmp_path) as box:
        assert await asyncio.to_thread(box.exit_code) == 1
        assert "is missing" in box.err.seen[-1]
    run = await asyncio.to_thread(Cli("", tmp_path), "delay-box", *where)
    assert run.code == 2
    assert "--allow" in run.err + run.out
