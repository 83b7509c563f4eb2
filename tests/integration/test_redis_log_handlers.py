"""Logs with schedulers: consumers and instances, their pace, replay, and a log that replaces Kafka by name."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import wraps
from uuid import uuid4

import pytest

from aiodelay import Context, Message, Reject, Retry, Scheduler, event
from aiodelay.core.values import Promise
from aiodelay.errors import TargetError
from aiodelay.redis import LogConsumer, RedisLog
from tests.support.servers import Found, redis_servers
from tests.support.waiting import until

TO = "redis-log:orders"
SOON = Retry(attempts=3, first="50ms", factor=1, jitter=0)


@event("order.placed")
@dataclass
class OrderPlaced:
    number: int


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def server_url(request: pytest.FixtureRequest, shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(request.param)


class Scene:
    """A namespace, its log, and what each handler's runs were."""

    def __init__(self, url: str, opened: AsyncExitStack) -> None:
        self.url, self._opened, self.namespace = url, opened, uuid4().hex
        self.log = RedisLog(url, namespace=self.namespace)
        self.seen: dict[str, list[tuple[int, int]]] = {}

    async def open(self, scheduler: Scheduler) -> Scheduler:
        return await self._opened.enter_async_context(scheduler)

    async def publisher(self) -> Scheduler:
        return await self.open(Scheduler(self.url, namespace=self.namespace, lanes=["redis-log"]))

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
        await self.until(lambda: self.find(name))
        return scheduler

    async def find(self, name: str) -> LogConsumer | None:
        return {each.name: each for each in await self.log.consumers("orders")}.get(name)

    async def until(self, condition: Callable[[], Awaitable[object]]) -> None:
        await until(condition, "the server holds what is waited for")

    async def until_settled(self, *names: str) -> None:
        async def are_settled() -> bool:
            consumers = [each for each in await self.log.consumers("orders") if each.name in names]
            return not any(each.waiting or each.in_flight or each.retrying for each in consumers)

        await self.until(are_settled)


def on_log(test: Callable[[Scene], Awaitable[None]]) -> Callable[[str], None]:
    @wraps(test)
    def run(server_url: str) -> None:
        async def play() -> None:
            async with AsyncExitStack() as opened:
                scene = Scene(server_url, opened)
                await opened.enter_async_context(scene.log)
                await test(scene)
            assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

        asyncio.run(play())

    del run.__wrapped__  # so that pytest fills in what `run` takes
    return run


async def publish(scheduler: Scheduler, n: int, to: str = TO) -> None:
    await scheduler.schedule_many([Message(OrderPlaced(i), to=to, delay="0s") for i in range(n)])
    await scheduler.run_until_idle()


@on_log
async def test_what_is_promised_depends_on_where_the_logs_are(scene: Scene) -> None:
    def promise(*sinks: RedisLog, name: str = "redis-log") -> Promise:
        return Scheduler(scene.url, namespace=scene.namespace, sinks=sinks).reaches(name).promise

    own = RedisLog(scene.url, namespace=scene.namespace, name="kafka", max_messages=7)
    assert promise() is Promise.EXACTLY_ONCE
    assert promise(own, name="kafka") is Promise.EXACTLY_ONCE
    assert promise(RedisLog(scene.url)) is Promise.AT_LEAST_ONCE
    assert promise(RedisLog("redis://elsewhere:1", namespace=scene.namespace)) is Promise.AT_LEAST_ONCE


def test_logs_are_opened_by_url() -> None:
    sink = "redis-log://host:1/2?namespace=shop&max_messages=7&max_age=2d&drop_passed=1"
    scheduler = Scheduler("memory://", sinks=[sink], sources=["rediss-log://host?namespace=shop"])
    opened, source = scheduler.sinks["redis-log"], scheduler._handlers.sources["redis-log"]
    assert isinstance(opened, RedisLog)
    assert isinstance(source, RedisLog)
    assert (opened.settings, opened.keys.namespace) == ((7, 172_800_000, 1), "shop")
    assert (source.options.secure, source.keys.namespace) == (True, "shop")


@on_log
async def test_a_handler_must_name_its_consumer(scene: Scene) -> None:
    scheduler = Scheduler(scene.url, namespace=scene.namespace)

    @scheduler.handler(source="redis-log:orders")
    async def handle(event: OrderPlaced) -> None: ...

    with pytest.raises(TargetError, match="consumer"):
        async with scheduler:
            pass


@on_log
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
    assert [each.cursor for each in await scene.log.consumers("orders")] == [400, 400]


@on_log
async def test_l3_a_consumer_that_never_ends_holds_up_no_other(scene: Scene) -> None:
    await scene.consumer("stuck", run_s=3600)
    await scene.consumer("quick")
    publisher = await scene.publisher()
    await publish(publisher, 500)
    await scene.until_settled("quick")
    await until(lambda: len(scene.seen["stuck"]) == 16, "the other consumer runs as many as it may")
    assert len(scene.seen["quick"]) == 500
    stuck = await scene.find("stuck")
    assert stuck is not None
    assert (stuck.waiting + stuck.in_flight, stuck.cursor, len(scene.seen["stuck"])) == (500, 0, 16)


@on_log
async def test_l3_a_consumer_that_fails_is_tried_again_alone(scene: Scene) -> None:
    await scene.consumer("fails", fails=2)
    await scene.consumer("works")
    await publish(await scene.publisher(), 20)
    await scene.until_settled("fails", "works")
    assert sorted(scene.seen["works"]) == [(i, 1) for i in range(20)]
    assert sorted(scene.seen["fails"]) == [(i, attempt) for i in range(20) for attempt in (1, 2, 3)]


@on_log
async def test_s9_an_ordered_consumer_handles_in_order_over_instances_and_retries(scene: Scene) -> None:
    for _ in range(2):
        await scene.consumer("ledger", "&ordered=true", fails=1)
    await publish(await scene.publisher(), 10)
    await scene.until_settled("ledger")
    order = [number for number, _ in scene.seen["ledger"]]
    assert order == sorted(order)
    assert sorted(scene.seen["ledger"]) == [(i, attempt) for i in range(10) for attempt in (1, 2)]


@on_log
async def test_a_dead_letter_names_its_consumer_and_is_redriven_to_it_alone(scene: Scene) -> None:
    billing = await scene.consumer("billing")
    await scene.consumer("shipping", fails=1)
    publisher = await scene.publisher()
    await publisher.schedule(OrderPlaced(-1), to=TO, delay="0s", id="m")

    async def letters() -> list[str]:
        return sorted([each.record.id async for each in billing.dead_letters()])

    async def are_both_dead() -> bool:
        return (
            await letters() == [f"m@{TO}?consumer={name}" for name in ("billing", "shipping")]
            and len(scene.seen["shipping"]) == 2
        )

    await scene.until(are_both_dead)
    async for letter in billing.dead_letters():
        if letter.record.id == "m@redis-log:orders?consumer=billing":
            await billing.redrive(letter)
            break

    async def is_dead_again() -> bool:
        return len(scene.seen["billing"]) == 2 and await letters() == [
            f"m@{TO}?consumer={name}" for name in ("billing", "shipping")
        ]

    await scene.until(is_dead_again)
    assert len(scene.seen["shipping"]) == 2


@on_log
async def test_a_running_handler_is_given_all_again_from_where_it_is_sent_back_to(scene: Scene) -> None:
    await scene.consumer("billing")
    await publish(await scene.publisher(), 50)
    await scene.until_settled("billing")
    assert await scene.log.seek("orders", "billing", 31) == 31
    await scene.until_settled("billing")
    assert Counter(number for number, _ in scene.seen["billing"]) == Counter([*range(50), *range(30, 50)])


@on_log
async def test_a_handler_is_told_what_its_consumer_missed(scene: Scene) -> None:
    await scene.log.register("orders", "away")
    limited = RedisLog(scene.url, namespace=scene.namespace, max_messages=5)
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


@on_log
async def test_a_log_trimmed_while_a_slow_consumer_reads_gives_it_the_rest_and_says_how_many_are_missing(
    scene: Scene,
) -> None:
    told: list[int] = []
    handled: list[int] = []
    allowed = asyncio.Semaphore(0)
    scheduler = Scheduler(scene.url, namespace=scene.namespace, lanes=["order.placed"])

    @scheduler.handler(source=f"{TO}?consumer=slow", concurrency=2)
    async def handle(event: OrderPlaced, context: Context) -> None:
        told.append(context.missed)
        handled.append(event.number)
        await allowed.acquire()

    await scene.open(scheduler)
    await scene.until(lambda: scene.find("slow"))
    limited = RedisLog(scene.url, namespace=scene.namespace, max_messages=20)
    async with Scheduler(scene.url, namespace=scene.namespace, sinks=[limited], lanes=["redis-log"]) as publisher:
        for start in range(0, 400, 40):
            messages = [Message(OrderPlaced(start + i), to=TO, delay="0s") for i in range(40)]
            await publisher.schedule_many(messages)
            await publisher.run_until_idle()
            for _ in range(4):  # fewer than the 20 that the log keeps
                allowed.release()
    for _ in range(400):
        allowed.release()
    await scene.until_settled("slow")
    slow = await scene.find("slow")
    assert slow is not None
    assert 0 < slow.missed == sum(told)
    assert len(handled) + slow.missed == 400
    assert len(set(handled)) == len(handled)
    assert max(handled) == 399


@pytest.mark.parametrize("store", ["memory", "redis"])
def test_a_log_takes_kafkas_place_by_name(server_url: str, store: str) -> None:
    """The application says `kafka:` alone; only what its scheduler is made with differs."""
    seen: asyncio.Queue[tuple[int, bytes | None, dict[str, bytes]]] = asyncio.Queue()

    def application(scheduler: Scheduler) -> None:
        @scheduler.handler(source="kafka:orders?group=billing")
        async def bill(event: OrderPlaced, context: Context) -> None:
            seen.put_nowait((event.number, context.key, dict(context.headers)))

    @on_log
    async def play(scene: Scene) -> None:
        log = RedisLog(scene.url, namespace=scene.namespace, name="kafka")
        at = "memory://" if store == "memory" else scene.url
        scheduler = Scheduler(at, namespace=scene.namespace, sinks=[log], sources=[log])
        application(scheduler)
        async with scheduler:
            await scheduler.schedule(OrderPlaced(7), to="kafka:orders", key=b"k", headers={"h": b"v"}, delay="10ms")
            async with asyncio.timeout(60):
                assert await seen.get() == (7, b"k", {"h": b"v"})
            await scene.until_settled("billing")

    play(server_url)
