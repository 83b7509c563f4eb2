"""Lists with a scheduler: as a sink of any store, as a source of handlers, and as both."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, make_dataclass
from datetime import UTC, datetime, timedelta
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from msgspec.structs import replace

from aiodelay import (
    ConfigurationError,
    Context,
    DuplicateHandlerError,
    Every,
    Later,
    Message,
    Reject,
    Retry,
    Scheduler,
    TargetError,
    UnknownSinkError,
    event,
)
from aiodelay.backends.redis.records.elements import Element, decode_element, encode_element
from aiodelay.core.transitions import delivery_id
from aiodelay.core.values import MAX_LEASE_MS, Delivery, Envelope, Promise, State
from aiodelay.ports import Sink, Transferring
from aiodelay.redis import RedisListSink, RedisListSource, RedisStore
from aiodelay.testing import on_virtual_time
from aiodelay.testing.clock import VirtualClock, VirtualLoop
from tests.support.servers import Found, redis_servers
from tests.support.waiting import until

SOON = Retry(attempts=3, first="50ms", factor=1, jitter=0)


@event("payment.check", aliases=("payment",))
@dataclass
class CheckPayment:
    order: int


@dataclass
class Other:
    order: int = 0


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def server_url(request: pytest.FixtureRequest, shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(request.param)


class Scene:
    """A server, a list and a namespace of one's own, and what handlers saw."""

    def __init__(self, url: str, folder: Path, opened: AsyncExitStack) -> None:
        self.url, self.folder, self._opened = url, folder, opened
        self.namespace, self.key = uuid4().hex, f"list-{uuid4().hex}"
        self.to = self.source = f"redis-list:{self.key}"
        self.seen: list[tuple[str, int, int | None]] = []
        self.direct = RedisStore(url, namespace=uuid4().hex)

    def scheduler(self, store: str = "", **settings: Any) -> Scheduler:  # noqa: ANN401
        return Scheduler(store or self.url, namespace=self.namespace, **settings)

    def elsewhere(self, **settings: Any) -> Scheduler:  # noqa: ANN401
        """Return a scheduler whose store is not on the list's server."""
        url = f"sqlite:///{self.folder}/delay.db"
        return Scheduler(
            url, sinks=[RedisListSink(self.url, **settings)], sources=[RedisListSource(self.url)], retry=SOON
        )

    def serve(self, scheduler: Scheduler, *, fails: int = 0, **settings: Any) -> None:  # noqa: ANN401
        @scheduler.handler(source=self.source, retry=SOON, **settings)
        async def check(event: CheckPayment, context: Context) -> None:
            self.seen.append((context.id, context.attempt, context.queued_ms))
            if context.attempt <= fails:
                raise RuntimeError("no answer")

    async def open(self, scheduler: Scheduler) -> Scheduler:
        return await self._opened.enter_async_context(scheduler)

    async def elements(self) -> list[bytes]:
        found: list[bytes] = await self.direct.command("LRANGE", self.key, 0, -1)
        return found

    async def read(self) -> list[Element]:
        return [decode_element(each, lane="x") for each in await self.elements()]

    async def until(self, condition: Callable[[], Awaitable[object]]) -> None:
        await until(condition, "the server holds what is waited for")

    async def until_length(self, length: int, *, or_more: bool = False) -> None:
        async def is_reached() -> bool:
            found = len(await self.elements())
            return found == length or (or_more and found > length)

        await self.until(is_reached)

    async def until_seen(self, runs: int) -> None:
        async def is_reached() -> bool:
            return len(self.seen) >= runs

        await self.until(is_reached)


def on_lists(test: Callable[[Scene], Awaitable[None]]) -> Callable[[str, Path], None]:
    @wraps(test)
    def run(server_url: str, tmp_path: Path) -> None:
        async def play() -> None:
            async with AsyncExitStack() as opened:
                scene = Scene(server_url, tmp_path, opened)
                await opened.enter_async_context(scene.direct)
                await test(scene)
            assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

        asyncio.run(play())

    del run.__wrapped__
    return run


# --- what is promised -------------------------------------------------------------------------------------


@on_lists
async def test_a_scheduler_says_how_often_a_message_reaches_a_list(scene: Scene) -> None:
    here, elsewhere = scene.scheduler(), scene.elsewhere()
    assert here.reaches("redis-list").promise is Promise.EXACTLY_ONCE
    assert elsewhere.reaches("redis-list").promise is Promise.AT_LEAST_ONCE
    other = scene.scheduler(sinks=[RedisListSink("redis://elsewhere:1"), "stdout:"])
    assert other.reaches("redis-list").promise is Promise.AT_LEAST_ONCE
    assert "redis://elsewhere:1" in other.reaches("redis-list").reason
    assert other.reaches("stdout").promise is Promise.AT_LEAST_ONCE
    with pytest.raises(UnknownSinkError, match="redis-list, redis-log, stdout"):
        other.reaches("kafka")


@pytest.mark.parametrize(
    "address", ["", "key?format=json", "key?", "{default:00}:msg", "{other:07}:x", "{k}:aiodelay:taken:1"]
)
def test_an_address_that_can_never_work_is_refused(address: str) -> None:
    for each in (RedisListSink("redis://localhost"), RedisListSource("redis://localhost")):
        with pytest.raises(TargetError):
            each.check(address)
        each.check("key?format=raw")


@pytest.mark.parametrize("max_length", [-1, True, 1.5, "10", 1 << 41])
def test_a_limit_that_is_no_number_is_refused(max_length: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigurationError, match="max_length"):
        RedisListSink("redis://localhost", max_length=max_length)


def test_sinks_and_sources_are_opened_by_url() -> None:
    scheduler = Scheduler("memory://", sinks=["redis-list://host:1/2?max_length=7"], sources=["rediss-list://host"])
    sink, source = scheduler.sinks["redis-list"], scheduler._handlers.sources["redis-list"]
    assert isinstance(sink, RedisListSink)
    assert isinstance(source, RedisListSource)
    assert (sink.max_length, sink.options.connection["port"], source.options.secure) == (7, 1, True)
    for url in ("redis-list://host?max_length=x", "redis-list://host?depth=1"):
        with pytest.raises(ConfigurationError):
            Scheduler("memory://", sinks=[url])
    for sources in (
        ["redis-list://host?max_length=1"],
        ["redis-list://a", "redis-list://b"],
        ["lists://a"],
        [object()],
    ):
        with pytest.raises(ConfigurationError, match=r"source|option"):
            Scheduler("memory://", sources=sources)  # type: ignore[arg-type]


# --- the sink, from a store elsewhere ---------------------------------------------------------------------


async def server_ms(scene: Scene) -> int:
    """Return the time of the server, by which it notes when an element was pushed."""
    seconds, micros = await scene.direct.command("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


@on_lists
async def test_s8_another_stores_messages_arrive_whole(scene: Scene) -> None:
    scheduler, began_ms = await scene.open(scene.elsewhere()), await server_ms(scene)
    scheduled = await scheduler.schedule(
        CheckPayment(7), to=scene.to, delay="10ms", id="m", key=b"\x00", headers={"a": b"\xff"}
    )
    await scene.until_length(1)
    (found,) = await scene.read()
    record, envelope = found.record, found.record.envelope
    assert (envelope.id, envelope.type, envelope.encoding) == ("m", "payment.check", "json")
    assert (envelope.payload, envelope.key, dict(envelope.headers)) == (b'{"order":7}', b"\x00", {"a": b"\xff"})
    assert delivery_id(record) == f"m/{scheduled.revision}/{scheduled.due_ms}"
    assert found.pushed_ms is not None
    assert began_ms <= found.pushed_ms <= await server_ms(scene)
    await scheduler.run_until_idle()


@on_lists
async def test_series_and_raw_payloads_from_another_store(scene: Scene) -> None:
    scheduler = await scene.open(scene.elsewhere())
    await scheduler.schedule(b"beat", to=scene.to, every=Every("100ms"), id="s")
    await scheduler.schedule(b"\x00raw", to=f"{scene.to}-raw?format=raw", delay="0s")
    await scene.until_length(2, or_more=True)
    await scheduler.cancel("s")
    first, second = (await scene.read())[:2]
    assert (first.record.id.partition("~")[0], first.record.envelope.rule) == ("s", None)
    assert (second.record.due_ms - first.record.due_ms) % 100 == 0  # one that is late by a whole beat is left out
    assert await scene.direct.command("LRANGE", f"{scene.key}-raw", 0, -1) == [b"\x00raw"]


@on_lists
async def test_a_full_list_elsewhere_costs_no_attempt_and_holds_up_no_other(scene: Scene) -> None:
    scheduler = await scene.open(scene.elsewhere(max_length=2))
    for i in range(4):
        await scheduler.schedule(b"%d" % i, to=scene.to, delay="0s", id=f"m{i}")
    await scheduler.schedule(b"other", to=f"{scene.to}-other", delay="0s")
    await scene.until_length(2)

    async def has_arrived() -> object:
        return await scene.direct.command("LLEN", f"{scene.key}-other")

    await scene.until(has_arrived)

    async def waiting() -> list[tuple[int, str | None]]:
        return [(each.record.attempt, each.record.last_error) async for each in scheduler.pending()]

    async def are_refused() -> bool:
        return all(error for _, error in await waiting())

    await scene.until(are_refused)
    await asyncio.sleep(0.5)  # it may not be tried again and again meanwhile
    assert await waiting() == [(0, "full: 2 elements")] * 2
    await scene.direct.command("DEL", scene.key)
    await scene.until_length(2)
    await scheduler.run_until_idle()


@on_lists
async def test_a_wrong_type_elsewhere_costs_no_attempt_and_is_told_once(scene: Scene) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    logging.getLogger("aiodelay.sinks").addHandler(handler)
    try:
        await scene.direct.command("SET", scene.key, "no list")
        scheduler = await scene.open(scene.elsewhere())
        await scheduler.schedule(b"m", to=scene.to, delay="0s", id="m")

        async def has_failed() -> object:
            found = await scheduler.get("m")
            return found is not None and found.record.last_error

        await scene.until(has_failed)
        snapshot = await scheduler.get("m")
        assert snapshot is not None
        assert snapshot.record.attempt == 0
        assert "WRONGTYPE" in (snapshot.record.last_error or "")
        assert await scene.direct.command("GET", scene.key) == b"no list"
        await scene.direct.command("DEL", scene.key)
        await scene.until_length(1)
        await scheduler.run_until_idle()
    finally:
        logging.getLogger("aiodelay.sinks").removeHandler(handler)
    said = [record.getMessage() for record in records]
    assert len(said) == 2
    assert "takes nothing (WRONGTYPE" in said[0]
    assert said[1].endswith("takes messages again")


# --- the sink, by transfer --------------------------------------------------------------------------------


@on_lists
async def test_messages_move_once_due_and_blocked_lists_are_named(scene: Scene) -> None:
    scheduler = await scene.open(scene.scheduler(sinks=[RedisListSink(scene.url, max_length=1)]))
    due = [await scheduler.schedule(CheckPayment(i), to=scene.to, delay="50ms", id=f"m{i}") for i in range(2)]
    await scene.until_length(1)
    (found,) = await scene.read()
    assert found.pushed_ms is not None
    assert due[0].due_ms <= found.pushed_ms <= await server_ms(scene)
    await scene.until(scheduler.blocked)
    (blocked,) = await scheduler.blocked()
    assert (blocked.lane, blocked.address, blocked.messages) == ("redis-list", scene.key, 1)
    snapshot = await scheduler.get("m1")
    assert snapshot is not None
    assert snapshot.state is State.HELD
    await scene.direct.command("LPOP", scene.key)
    await scene.until_length(1)
    await scheduler.run_until_idle()
    assert list(await scheduler.blocked()) == []


@on_lists
async def test_a_list_holds_its_most_however_many_addresses_lead_to_it(scene: Scene) -> None:
    scheduler = await scene.open(scene.scheduler(sinks=[RedisListSink(scene.url, max_length=5)]))
    at = datetime.now(UTC) + timedelta(milliseconds=300)
    await scheduler.schedule_many([Message(b"", at=at, to=f"{scene.to}{raw}") for raw in ("", "?format=raw") * 8])
    await scene.until(scheduler.blocked)
    assert len(await scene.elements()) == 5


@on_lists
async def test_l4_moving_outlives_whatever_its_waiting_does(scene: Scene) -> None:
    failures: list[BaseException] = [RuntimeError("ours"), asyncio.CancelledError()]

    class Failing(RedisStore):
        @contextmanager
        def transferring(self, sink: Sink) -> Iterator[Transferring]:
            with super().transferring(sink) as moves:
                wait = moves.wait

                async def fail(*, until_ms: int | None) -> None:
                    if failures:
                        raise failures.pop()
                    await wait(until_ms=until_ms)

                moves.wait = fail  # type: ignore[method-assign]
                yield moves

    scheduler = await scene.open(Scheduler(Failing(scene.url, namespace=scene.namespace)))
    await until(lambda: not failures, "all waits have failed")
    await scheduler.schedule(b"m", to=scene.to, delay="0s")
    await scene.until_length(1)


@on_lists
async def test_l5_a_key_that_is_no_text_stops_nobody(scene: Scene) -> None:
    """Other languages schedule too."""
    scheduler = await scene.open(scene.scheduler(dispatch=False))
    await scheduler.schedule(b"odd", to="redis-list:AB", id="odd", delay="0s")
    await scheduler.schedule(b"m", to=scene.to, delay="0s")
    key, field = f"{{{scene.namespace}:00}}:msg", b"\x02odd"
    value: bytes = await scene.direct.command("HGET", key, field)
    await scene.direct.command("HSET", key, field, value.replace(b"\xa2AB", b"\xa2\xff\xfe"))
    await scene.direct.command("SET", b"\xff\xfe", "no list")
    async with scene.scheduler() as mover:
        await scene.until_length(1)
        (blocked,) = await mover.blocked()
        assert blocked.address == r"\xff\xfe"


@on_lists
async def test_series_move_by_their_policies(scene: Scene) -> None:
    scheduler = await scene.open(scene.scheduler())
    await scheduler.schedule(b"beat", to=scene.to, every=Every("100ms"), id="s")
    await scene.until_length(3, or_more=True)
    await scheduler.cancel("s")
    records = [each.record for each in await scene.read()]
    assert {record.id.partition("~")[0] for record in records} == {"s"}
    assert all((b.due_ms - a.due_ms) % 100 == 0 for a, b in pairwise(records))


@on_lists
async def test_a_store_without_transfers_has_nothing_blocked(scene: Scene) -> None:
    assert list(await (await scene.open(scene.elsewhere())).blocked()) == []


# --- the source -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_message_goes_through_a_list_and_its_retries_through_the_store(
    server_url: str, tmp_path: Path, where: str
) -> None:
    async def play(scene: Scene) -> None:
        scheduler = scene.scheduler() if where == "here" else scene.elsewhere()
        scene.serve(scheduler, fails=2)
        await scene.open(scheduler)
        await scheduler.schedule(CheckPayment(1), to=scene.to, delay="20ms", id="m")
        await scene.until_seen(3)
        await scheduler.run_until_idle()
        assert [seen[:2] for seen in scene.seen] == [("m", 1), ("m", 2), ("m", 3)]
        first, *rest = [queued_ms for _, _, queued_ms in scene.seen]
        assert first is not None
        assert first < 60_000
        assert rest == [None, None]
        assert await scene.direct.command("KEYS", f"*{scene.key}*") == []

    on_lists(play)(server_url, tmp_path)


@on_lists
async def test_the_last_failure_is_a_dead_letter_that_can_be_redriven(scene: Scene) -> None:
    scheduler = scene.scheduler()
    scene.serve(scheduler, fails=3)
    await scene.open(scheduler)
    await scheduler.schedule(CheckPayment(1), to=scene.to, delay="0s", id="m")
    await scene.until_seen(3)
    await scheduler.run_until_idle()
    (letter,) = [each async for each in scheduler.dead_letters(CheckPayment)]
    assert (letter.reason, letter.record.attempt) == ("attempts_exhausted", 3)
    await scheduler.redrive(letter)
    await scene.until_seen(6)


@on_lists
async def test_queued_is_how_long_it_waited_in_the_list(scene: Scene) -> None:
    mover = await scene.open(scene.scheduler(lanes=["redis-list"]))
    await mover.schedule(CheckPayment(1), to=scene.to, delay="0s", id="m")
    await scene.until_length(1)
    await asyncio.sleep(0.3)  # so long it waits in the list
    handler = scene.scheduler(lanes=["payment.check"])
    scene.serve(handler)
    await scene.open(handler)
    await scene.until_seen(1)
    assert scene.seen[0][2] is not None
    assert 300 <= scene.seen[0][2] < 30_000


@on_lists
async def test_what_a_handler_may_return_holds_for_lists_too(scene: Scene) -> None:
    scheduler = scene.scheduler()

    @scheduler.handler(source=scene.source)
    async def check(event: CheckPayment, context: Context) -> Later | Reject | None:
        scene.seen.append((context.id, context.attempt, context.queued_ms))
        if event.order == 1:
            return Reject("unknown order")
        return Later("30ms") if context.queued_ms is not None else None

    await scene.open(scheduler)
    await scheduler.schedule(CheckPayment(1), to=scene.to, delay="0s", id="rejected")
    await scheduler.schedule(CheckPayment(2), to=scene.to, delay="0s", id="later")
    await scene.until_seen(3)
    await scheduler.run_until_idle()
    assert sorted(seen[:2] for seen in scene.seen) == [("later", 1), ("later", 1), ("rejected", 1)]
    assert [each.reason async for each in scheduler.dead_letters()] == ["rejected"]


@on_lists
async def test_messages_of_another_type_and_raw_ones(scene: Scene) -> None:
    scheduler = scene.scheduler()
    scene.serve(scheduler)
    raw: list[bytes] = []

    @scheduler.handler(name="raw", source=f"{scene.source}-raw?format=raw")
    async def take(payload: bytes) -> None:
        raw.append(payload)

    await scene.open(scheduler)
    await scheduler.schedule(Other(), to=scene.to, delay="0s", id="other")
    await scene.direct.command("RPUSH", f"{scene.key}-raw", b"\x00", b"pushed by another program")
    await scheduler.schedule(CheckPayment(1), to=scene.to, delay="0s", id="fine")
    await scene.until_seen(1)

    async def is_buried() -> object:
        return [each async for each in scheduler.dead_letters()] and len(raw) == 2

    await scene.until(is_buried)
    (letter,) = [each async for each in scheduler.dead_letters()]
    assert (letter.record.id, letter.reason) == ("other", "undecodable")
    assert letter.record.last_error == (
        "RecordFormatError: stored record cannot be read: it is of type 'Other', not payment.check"
    )
    assert raw == [b"\x00", b"pushed by another program"]


@on_lists
async def test_demand_one_handler_never_runs_more_than_its_concurrency_from_both_its_feeds(scene: Scene) -> None:
    scheduler = scene.scheduler()
    runs = most = 0
    as_many_as_may = asyncio.Event()

    @scheduler.handler(source=scene.source, concurrency=3)
    async def check(event: CheckPayment, context: Context) -> None:
        nonlocal runs, most
        runs += 1
        most = max(most, runs)
        if runs == 3:
            as_many_as_may.set()
        await as_many_as_may.wait()
        await asyncio.sleep(0.01)  # a handler at work
        runs -= 1
        scene.seen.append((context.id, context.attempt, context.queued_ms))

    await scene.open(scheduler)
    for i in range(30):
        await scheduler.schedule(CheckPayment(i), to=scene.to if i % 2 else None, delay="0s", id=f"m{i}")
    await scene.until_seen(30)
    await scheduler.run_until_idle()
    assert most == 3
    assert len({seen[0] for seen in scene.seen}) == 30


@on_lists
async def test_l2_a_handler_that_takes_long_does_not_hold_up_what_is_pushed_meanwhile(scene: Scene) -> None:
    ended = asyncio.Event()
    scheduler = scene.scheduler()
    scheduler._options = replace(scheduler._options, lease_ms=MAX_LEASE_MS)

    @scheduler.handler(source=scene.source, concurrency=4)
    async def check(event: CheckPayment, context: Context) -> None:
        scene.seen.append((context.id, context.attempt, context.queued_ms))
        await ended.wait()

    await scene.open(scheduler)
    for i in range(1, 4):
        await scheduler.schedule(CheckPayment(i), to=scene.to, delay="0s", id=f"m{i}")
        async with asyncio.timeout(MAX_LEASE_MS / 1000 / 4):  # a renewal, after a third, would make it look again
            await scene.until_seen(i)
    ended.set()


@on_lists
async def test_l5_suspects_of_two_sources_run_one_after_the_other(scene: Scene) -> None:
    running: list[str] = []
    most = 0

    async def run(name: str) -> None:
        nonlocal most
        running.append(name)
        most = max(most, len(running))
        await asyncio.sleep(0.1)  # a handler at work
        running.remove(name)
        scene.seen.append((name, 0, 0))

    scheduler = scene.scheduler()
    for i in range(6):
        envelope = Envelope(f"m{i}", "x", encoding="json", payload=b"{}")
        written = encode_element(Delivery(envelope, "", 1000, 5, 1, 0)) + bytes(8)
        lapses_at = written.index(b'\xc4"') + 2 + 24
        suspect = written[:lapses_at] + b"\x02" + written[lapses_at + 1 :]
        await scene.direct.command("RPUSH", f"{scene.key}-{i}", suspect)

        async def handle(event: Any, context: Context) -> None:  # noqa: ANN401
            await run(context.id)

        handle.__annotations__["event"] = make_dataclass(f"Kind{i}", [])
        scheduler.add_handler(handle, source=f"{scene.source}-{i}")

    await scene.open(scheduler)
    await scene.until_seen(6)
    assert most == 1


@on_lists
async def test_l3_who_never_ends_holds_up_neither_others_of_its_list_nor_other_lists(scene: Scene) -> None:
    stuck = scene.scheduler(lanes=["payment.check", "Other"], drain="0s")
    quick = scene.scheduler(lanes=["payment.check"])

    @stuck.handler(source=scene.source, concurrency=4)
    async def check(event: CheckPayment) -> None:
        await asyncio.Event().wait()

    @stuck.handler(source=f"{scene.source}-others")
    async def other(event: Other, context: Context) -> None:
        scene.seen.append((context.id, event.order, None))

    scene.serve(quick)
    mover = await scene.open(scene.scheduler(lanes=["redis-list"]))
    await scene.open(stuck)
    await mover.schedule_many(Message(CheckPayment(i), to=scene.to, delay="0s") for i in range(100))
    await mover.schedule_many(Message(Other(i), to=f"{scene.to}-others", delay="0s") for i in range(100))
    await scene.until_length(96)
    await scene.until_seen(100)
    await scene.open(quick)
    await scene.until_seen(196)
    assert await scene.elements() == []


@on_lists
async def test_closing_gives_back_what_has_not_begun(scene: Scene) -> None:
    begun = asyncio.Event()
    scheduler = scene.scheduler(lanes=["payment.check"], drain="0s")

    @scheduler.handler(source=scene.source, concurrency=2)
    async def check(event: CheckPayment) -> None:
        begun.set()
        await asyncio.Event().wait()

    mover = await scene.open(scene.scheduler(lanes=["redis-list"]))
    for i in range(5):
        await mover.schedule(CheckPayment(i), to=scene.to, delay="0s", id=f"m{i}")
    await scene.until_length(5)
    async with scheduler:
        await begun.wait()
    assert sorted(each.record.id for each in await scene.read()) == [f"m{i}" for i in range(5)]
    assert {each.record.attempt for each in await scene.read()} == {0}
    assert await scene.direct.command("KEYS", f"*{scene.key}*") == [scene.key.encode()]


@on_lists
async def test_b1_elements_that_were_claimed_ahead_go_back_when_the_scheduler_closes(scene: Scene) -> None:
    elements, waiting = [b"%05d" % i for i in range(4_000)], 0
    for start in range(0, len(elements), 500):
        await scene.direct.command("RPUSH", scene.key, *elements[start : start + 500])
    scheduler = scene.scheduler(drain="0s")

    @scheduler.handler(name="raw", source=f"{scene.source}?format=raw")
    async def work(payload: bytes) -> None:
        nonlocal waiting
        if int(payload) >= 2_000:
            waiting += 1
            await asyncio.Event().wait()

    async def is_busy() -> bool:
        return waiting == 16

    async with scheduler:
        await scene.until(is_busy)
    assert sorted(await scene.elements()) == elements[2_000:], "each once"
    assert await scene.direct.command("KEYS", f"*{scene.key}*") == [scene.key.encode()]


@on_lists
async def test_handlers_with_sources_come_and_go_while_open(scene: Scene) -> None:
    scheduler = await scene.open(scene.scheduler())
    await scheduler.schedule(CheckPayment(1), to=scene.to, delay="0s", id="m1")
    await scene.until_length(1)
    for i in (1, 2):
        scene.serve(scheduler)
        await scene.until_seen(i)
        await scheduler.remove_handler(CheckPayment)
        await scheduler.schedule(CheckPayment(i), to=scene.to, delay="0s", id=f"m{i + 1}")
        await scene.until_length(1)
    assert [seen[0] for seen in scene.seen] == ["m1", "m2"]


@on_lists
async def test_a_source_that_cannot_be_is_refused(scene: Scene) -> None:
    async def check(event: CheckPayment) -> None: ...
    async def other(event: Other) -> None: ...

    scheduler = scene.scheduler()
    form = "allowed: '<source>:<address>', such as 'redis-list:orders'"
    for source, error, said in [
        ("redis-list", TargetError, f"source is 'redis-list'; {form}"),
        ("lists:x", ConfigurationError, "source is 'lists:x'; allowed: redis-fanout:, redis-list"),
        ("redis-list:x?format=json", TargetError, "'x?format=json'; allowed: <key> or <key>?format=raw"),
        (7, TargetError, f"source is an int; {form}"),
    ]:
        with pytest.raises(error, match=re.escape(said)):
            scheduler.add_handler(check, source=source)  # type: ignore[arg-type]
    scheduler.add_handler(check, source=scene.source)
    with pytest.raises(DuplicateHandlerError, match="one handler per source"):
        scheduler.add_handler(other, source=scene.source)


def test_on_virtual_time_what_goes_to_a_list_is_recorded_and_sources_are_not_read() -> None:
    scheduler = Scheduler("redis://nowhere:1")
    seen: list[tuple[int, int | None]] = []

    @scheduler.handler(source="redis-list:orders")
    async def check(event: CheckPayment, context: Context) -> None:
        seen.append((event.order, context.queued_ms))

    async def play() -> None:
        clock = VirtualClock()
        with on_virtual_time(scheduler, clock):
            async with scheduler:
                await scheduler.schedule(CheckPayment(1), delay="1h")
                await scheduler.schedule(CheckPayment(2), delay="1h", to="redis-list:orders")
                await clock.advance("2h")
                assert seen == [(1, None)]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(play())
