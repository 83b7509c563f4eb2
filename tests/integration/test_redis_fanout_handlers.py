"""Fan-out topics with schedulers: several consumers and instances, their pace, retries and dead letters."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import wraps
from uuid import uuid4

import pytest

from aiodelay import Context, Message, Reject, Retry, Scheduler, event
from aiodelay.core.values import Promise
from aiodelay.redis import RedisFanout, RedisFanoutSink, RedisFanoutSource, RedisLog
from tests.support.servers import Found, redis_servers
from tests.support.waiting import until

TO = "redis-fanout:orders"
SOON = Retry(attempts=3, first="50ms", factor=1, jitter=0)


@event("order.placed")
@dataclass
class OrderPlaced:
    number: int


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def server_url(request: pytest.FixtureRequest, shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(request.param)


class Scene:
    """A namespace, its topic, and what each handler's runs were."""

    def __init__(self, url: str, opened: AsyncExitStack) -> None:
        self.url, self._opened, self.namespace = url, opened, uuid4().hex
        self.fanout = RedisFanout(url, namespace=self.namespace)
        self.seen: dict[str, list[tuple[int, int]]] = {}

    async def open(self, scheduler: Scheduler) -> Scheduler:
        return await self._opened.enter_async_context(scheduler)

    async def publisher(self) -> Scheduler:
        return await self.open(Scheduler(self.url, namespace=self.namespace, lanes=["redis-fanout"]))

    async def consumer(
        self, name: str, options: str = "", *, handled_by: str = "", run_s: float = 0, fails: int = 0, at_once: int = 16
    ) -> Scheduler:
        """Open a scheduler of its own that handles a consumer's messages, registered by now."""
        scheduler = Scheduler(self.url, namespace=self.namespace, lanes=["order.placed"], drain="1s")
        runs = self.seen.setdefault(handled_by or name, [])

        @scheduler.handler(source=f"{TO}?consumer={name}{options}", retry=SOON, concurrency=at_once)
        async def handle(event: OrderPlaced, context: Context) -> Reject | None:
            runs.append((event.number, context.attempt))
            await asyncio.sleep(run_s)  # a handler at work
            if context.attempt <= fails:
                raise RuntimeError("no answer")
            return Reject("no") if event.number < 0 else None

        await self.open(scheduler)

        async def is_registered() -> bool:
            return name in {each.name for each in await self.fanout.consumers("orders")}

        await until(is_registered, f"{name} is registered")
        return scheduler

    async def until(self, condition: Callable[[], Awaitable[object]]) -> None:
        await until(condition, "the server holds what is waited for")

    async def until_settled(self, *names: str) -> None:
        async def are_settled() -> bool:
            consumers = [each for each in await self.fanout.consumers("orders") if each.name in names]
            return not any(each.waiting or each.in_flight or each.retrying for each in consumers)

        await self.until(are_settled)


def on_topic(test: Callable[[Scene], Awaitable[None]]) -> Callable[[str], None]:
    @wraps(test)
    def run(server_url: str) -> None:
        async def play() -> None:
            async with AsyncExitStack() as opened:
                scene = Scene(server_url, opened)
                await opened.enter_async_context(scene.fanout)
                await test(scene)
            assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

        asyncio.run(play())

    del run.__wrapped__  # so that pytest fills in what `run` takes
    return run


async def publish(scheduler: Scheduler, n: int) -> None:
    await scheduler.schedule_many([Message(OrderPlaced(i), to=TO, delay="0s") for i in range(n)])
    await scheduler.run_until_idle()


@on_topic
async def test_what_is_promised_depends_on_where_the_topics_are(scene: Scene) -> None:
    def promise(*sinks: RedisFanoutSink) -> Promise:
        return Scheduler(scene.url, namespace=scene.namespace, sinks=sinks).reaches("redis-fanout").promise

    assert promise() is Promise.EXACTLY_ONCE
    assert promise(RedisFanoutSink(scene.url, namespace=scene.namespace)) is Promise.EXACTLY_ONCE
    assert promise(RedisFanoutSink(scene.url)) is Promise.AT_LEAST_ONCE
    assert promise(RedisFanoutSink("redis://elsewhere:1", namespace=scene.namespace)) is Promise.AT_LEAST_ONCE


def test_sinks_and_sources_are_opened_by_url() -> None:
    sink = "redis-fanout://host:1/2?namespace=shop&max_messages=7&max_age=2d&inline_below=9"
    scheduler = Scheduler("memory://", sinks=[sink], sources=["rediss-fanout://host?namespace=shop"])
    opened, source = scheduler.sinks["redis-fanout"], scheduler._handlers.sources["redis-fanout"]
    assert isinstance(opened, RedisFanoutSink)
    assert isinstance(source, RedisFanoutSource)
    assert (opened.settings, opened.keys.namespace) == ((7, 172_800_000, 9), "shop")
    assert (source.options.secure, source.keys.namespace) == (True, "shop")


@on_topic
async def test_two_instances_of_a_consumer_get_each_message_once_and_share_them(scene: Scene) -> None:
    for instance in ("one", "two"):
        await scene.consumer("billing", handled_by=instance, run_s=0.02, at_once=4)
    await scene.consumer("shipping")
    await publish(await scene.publisher(), 400)
    await scene.until_settled("billing", "shipping")
    counted = Counter(number for runs in (scene.seen["one"], scene.seen["two"]) for number, _ in runs)
    assert counted == Counter(range(400))
    assert 0.4 <= len(scene.seen["one"]) / 400 <= 0.6
    assert Counter(number for number, _ in scene.seen["shipping"]) == Counter(range(400))


@on_topic
async def test_l3_a_consumer_that_never_ends_holds_up_no_other(scene: Scene) -> None:
    await scene.consumer("stuck", run_s=3600)
    await scene.consumer("quick")
    publisher = await scene.publisher()
    await publish(publisher, 500)
    await scene.until_settled("quick")
    await until(lambda: len(scene.seen["stuck"]) == 16, "the other consumer runs as many as it may")
    assert len(scene.seen["quick"]) == 500
    stuck = {each.name: each for each in await scene.fanout.consumers("orders")}["stuck"]
    assert (stuck.waiting + stuck.in_flight, len(scene.seen["stuck"])) == (500, 16)


@on_topic
async def test_l3_a_consumer_that_fails_is_tried_again_alone(scene: Scene) -> None:
    await scene.consumer("fails", fails=2)
    await scene.consumer("works")
    await publish(await scene.publisher(), 20)
    await scene.until_settled("fails", "works")
    assert sorted(scene.seen["works"]) == [(i, 1) for i in range(20)]
    assert sorted(scene.seen["fails"]) == [(i, attempt) for i in range(20) for attempt in (1, 2, 3)]


@on_topic
async def test_s9_an_ordered_consumer_handles_in_order_over_instances_and_retries(scene: Scene) -> None:
    for _ in range(2):
        await scene.consumer("ledger", "&ordered=true", fails=1)
    await publish(await scene.publisher(), 10)
    await scene.until_settled("ledger")
    assert scene.seen["ledger"] == [(i, attempt) for i in range(10) for attempt in (1, 2)]


@on_topic
async def test_a_dead_letter_names_its_consumer_and_is_redriven_to_it_alone(scene: Scene) -> None:
    billing = await scene.consumer("billing")
    await scene.consumer("shipping", fails=1)
    publisher = await scene.publisher()
    await publisher.schedule(OrderPlaced(-1), to=TO, delay="0s", id="m")
    await scene.until_settled("billing", "shipping")

    async def letters() -> list[str]:
        return sorted([each.record.id async for each in billing.dead_letters()])

    async def are_both_dead() -> bool:
        return len(await letters()) == 2 and len(scene.seen["shipping"]) == 2

    await scene.until(are_both_dead)
    assert await letters() == ["m@redis-fanout:orders@billing", "m@redis-fanout:orders@shipping"]
    async for letter in billing.dead_letters():
        if letter.record.id == "m@redis-fanout:orders@billing":
            await billing.redrive(letter)
            break

    async def is_dead_again() -> bool:
        return len(scene.seen["billing"]) == 2 and await letters() == [
            "m@redis-fanout:orders@billing",
            "m@redis-fanout:orders@shipping",
        ]

    await scene.until(is_dead_again)
    assert len(scene.seen["shipping"]) == 2


@pytest.mark.parametrize("kind", ["fanout", "log"])
def test_a_source_and_a_sink_in_different_namespaces_are_warned_of(
    server_url: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    source_type, sink_type = {"fanout": (RedisFanoutSource, RedisFanoutSink), "log": (RedisLog, RedisLog)}[kind]

    @on_topic
    async def play(scene: Scene) -> None:
        async def warned(sources: list[RedisFanoutSource | RedisLog], *sinks: RedisFanoutSink | RedisLog) -> list[str]:
            caplog.clear()
            scheduler = Scheduler(scene.url, namespace=scene.namespace, sources=sources, sinks=sinks)

            @scheduler.handler(source=f"redis-{kind}:orders?consumer=billing")
            async def handle(event: OrderPlaced) -> None: ...

            async with scheduler:
                return [each.getMessage() for each in caplog.records if "redriven" in each.getMessage()]

        shop, other = f"{scene.namespace}-shop", "redis://127.0.0.1:1"
        assert await warned([]) == []
        assert await warned([], sink_type(scene.url, namespace=scene.namespace)) == []
        reads_shop = source_type(scene.url, namespace=shop)
        assert await warned([reads_shop], sink_type(scene.url, namespace=shop)) == []
        (warning,) = await warned([reads_shop])
        assert f"reads redis-{kind} from" in warning
        assert f"namespace {shop!r}" in warning
        assert f"namespace {scene.namespace!r}: a redriven dead letter goes there" in warning
        (warning,) = await warned([], sink_type(other, namespace=scene.namespace))
        assert "127.0.0.1:1/0" in warning

    with caplog.at_level(logging.WARNING, "aiodelay.handlers"):
        play(server_url)


@on_topic
async def test_a_consumer_away_for_the_whole_run_gets_all_when_it_is_back(scene: Scene) -> None:
    await scene.fanout.register("orders", "away")
    await scene.consumer("present")
    await publish(await scene.publisher(), 300)
    await scene.until_settled("present")
    await scene.consumer("away")
    await scene.until_settled("away")
    assert sorted(scene.seen["away"]) == sorted(scene.seen["present"]) == [(i, 1) for i in range(300)]
    (topic,) = await scene.fanout.topics()
    assert (topic.kept, topic.memory) == (0, 0)


@on_topic
async def test_a_handler_is_told_what_its_consumer_missed(scene: Scene) -> None:
    await scene.fanout.register("orders", "away")
    limited = RedisFanoutSink(scene.url, namespace=scene.namespace, max_messages=5)
    async with Scheduler(scene.url, namespace=scene.namespace, sinks=[limited]) as publisher:
        await publish(publisher, 30)
    told: asyncio.Queue[int] = asyncio.Queue()
    scheduler = Scheduler(scene.url, namespace=scene.namespace, lanes=["order.placed"])

    @scheduler.handler(source=f"{TO}?consumer=away")
    async def handle(event: OrderPlaced, context: Context) -> None:
        told.put_nowait(context.missed)

    await scene.open(scheduler)
    async with asyncio.timeout(60):
        assert sorted([await told.get() for _ in range(5)]) == [0, 0, 0, 0, 25]
