"""Regressions that a fan-out or a log can have, numbers 4, 7 to 10 and 29 to 32."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import wraps
from uuid import uuid4

import pytest
from msgspec.structs import replace

from aiodelay import Context, Retry, Scheduler
from aiodelay.ports import Source
from aiodelay.redis import RedisFanout, RedisFanoutSource, RedisLog, RedisStore
from tests.support.proxy import proxied
from tests.support.servers import RedisServer, redis_programs, start

SOON_S = 20.0
"""Less than the 30 s after which a consumer looks by itself, although nothing has woken it."""


@pytest.fixture(scope="module", params=redis_programs(), ids=lambda found: found.name)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = start(request.param.program)
    yield server
    server.stop()


class Scene:
    """A namespace of a server's with a topic that fans out, and what its consumer's handler has seen."""

    kind, to = "fanout", "redis-fanout:orders"

    def __init__(self, server: RedisServer) -> None:
        self.server, self.namespace = server, uuid4().hex
        self.tag = f"{{{self.namespace}:00}}:"
        self.seen: asyncio.Queue[tuple[bytes, str, int]] = asyncio.Queue()

    def scheduler(self, url: str = "", *, concurrency: int = 16, run_s: float = 0, fails: int = 0) -> Scheduler:
        sources = [self.source(url or self.server.url)]
        scheduler = Scheduler(self.server.url, namespace=self.namespace, sources=sources, drain="5s")

        @scheduler.handler(
            name="orders",
            source=f"{self.to}?consumer=billing",
            concurrency=concurrency,
            retry=Retry(attempts=5, first="50ms", jitter=0),
        )
        async def handle(payload: bytes, context: Context) -> None:
            await asyncio.sleep(run_s)  # a run that takes real time
            self.seen.put_nowait((payload, context.delivery_id, context.attempt))
            if context.attempt <= fails:
                raise RuntimeError("no answer")

        return scheduler

    async def next(self, seconds: float = 60) -> tuple[bytes, str, int]:
        async with asyncio.timeout(seconds):
            return await self.seen.get()

    def source(self, url: str) -> Source:
        return RedisFanoutSource(url, namespace=self.namespace)

    async def register(self) -> None:
        async with RedisFanout(self.server.url, namespace=self.namespace) as fanout:
            await fanout.register("orders", "billing")

    async def left(self) -> tuple[int, int]:
        """Return how many messages wait or are retried, and how many are in flight."""
        async with RedisFanout(self.server.url, namespace=self.namespace) as fanout:
            (billing,) = await fanout.consumers("orders")
            return billing.waiting + billing.retrying, billing.in_flight


class LogScene(Scene):
    """The same with a log."""

    kind, to = "log", "redis-log:orders"

    def source(self, url: str) -> Source:
        return RedisLog(url, namespace=self.namespace)

    async def register(self) -> None:
        async with RedisLog(self.server.url, namespace=self.namespace) as log:
            await log.register("orders", "billing")

    async def left(self) -> tuple[int, int]:
        async with RedisLog(self.server.url, namespace=self.namespace) as log:
            (billing,) = await log.consumers("orders")
            return billing.waiting + billing.retrying, billing.in_flight


def on_topic(test: Callable[[Scene], Awaitable[None]]) -> Callable[[RedisServer, type[Scene]], None]:
    @wraps(test)
    @pytest.mark.parametrize("kind", [Scene, LogScene], ids=lambda kind: kind.kind)
    def run(server: RedisServer, kind: type[Scene]) -> None:
        async def play() -> None:
            scene = kind(server)
            await scene.register()
            await test(scene)

        asyncio.run(play())

    del run.__wrapped__  # so that pytest fills in what `run` takes
    return run


@on_topic
async def test_r04_a_run_longer_than_its_lease_and_a_wait_behind_it_cost_no_attempt(scene: Scene) -> None:
    scheduler = scene.scheduler(concurrency=1, run_s=1.2)
    scheduler._options = replace(scheduler._options, lease_ms=1_000)
    async with scheduler:
        for i in range(3):
            await scheduler.schedule(b"%d" % i, to=scene.to, delay="0s")
        found = [await scene.next() for _ in range(3)]
        await asyncio.sleep(0.3)  # nothing else may come
    assert sorted((payload, attempt) for payload, _, attempt in found) == [(b"%d" % i, 1) for i in range(3)]
    assert scene.seen.empty()
    assert await scene.left() == (0, 0)


@on_topic
async def test_r07_a_settlement_that_fails_costs_no_slot(scene: Scene) -> None:
    async with (
        proxied(scene.server.port) as proxy,
        scene.scheduler(f"redis://127.0.0.1:{proxy.port}?timeout_ms=1000", concurrency=1, run_s=0.2) as scheduler,
    ):
        for i in range(3):
            await scheduler.schedule(b"%d" % i, to=scene.to, delay="0s")
        await asyncio.sleep(0.1)  # the first run begins
        proxy.mode = "lose answers"
        await scene.next()
        await asyncio.sleep(0.5)  # it is settled meanwhile, and waits for an answer until its time is up
        proxy.mode = "pass"
        found = {(await scene.next())[0] for _ in range(2)}
        assert len(found) == 2


@on_topic
async def test_r08_a_retry_in_less_than_a_second_is_not_waited_for_for_ever(scene: Scene) -> None:
    async with scene.scheduler(fails=3) as scheduler:
        await scheduler.schedule(b"m", to=scene.to, delay="0s")
        assert [(await scene.next(SOON_S))[2] for _ in range(4)] == [1, 2, 3, 4]


@on_topic
async def test_r09_close_drains_and_gives_back_what_has_not_begun(scene: Scene) -> None:
    async with scene.scheduler(concurrency=2, run_s=0.3) as scheduler:
        for i in range(20):
            await scheduler.schedule(b"%d" % i, to=scene.to, delay="0s")
        await scene.next()
    handled = 1 + scene.seen.qsize()
    assert 2 <= handled < 20
    assert await scene.left() == (20 - handled, 0)
    async with scene.scheduler():
        for _ in range(20 - handled):
            await scene.next()


@on_topic
async def test_r10_the_same_id_again_brings_its_own_payload_and_attempts(scene: Scene) -> None:
    async with scene.scheduler(fails=1) as scheduler:
        for payload in (b"old", b"new"):
            await scheduler.schedule(payload, to=scene.to, delay="0s", id="m")
            await scheduler.run_until_idle()
        runs = [await scene.next() for _ in range(4)]
    assert sorted((payload, attempt) for payload, _, attempt in runs) == [
        (b"new", 1),
        (b"new", 2),
        (b"old", 1),
        (b"old", 2),
    ]
    assert len({delivery_id for _, delivery_id, _ in runs}) == 2


@on_topic
async def test_r29_with_its_connections_cut_it_is_told_all_the_same(scene: Scene) -> None:
    async with scene.scheduler() as scheduler:
        await scheduler.schedule(b"first", to=scene.to, delay="0s")
        await scene.next()
        for i in range(3):
            await asyncio.sleep(0.1)  # it waits again
            scene.server.command("CLIENT", "KILL", "TYPE", "normal")
            async with RedisStore(scene.server.url, namespace=scene.namespace) as store, Scheduler(store) as publisher:
                await publisher.schedule(b"%d" % i, to=scene.to, delay="0s")
                assert (await scene.next(SOON_S))[0] == b"%d" % i


@on_topic
async def test_r30_a_wait_that_found_nothing_sees_what_comes_late(scene: Scene) -> None:
    async with scene.scheduler() as scheduler:
        for i in range(5):
            await asyncio.sleep(0.05 * i)  # so long a wait finds nothing
            await scheduler.schedule(b"%d" % i, to=scene.to, delay="0s")
            assert (await scene.next(SOON_S))[0] == b"%d" % i


@on_topic
async def test_r31_all_keys_are_in_one_slot(scene: Scene) -> None:
    async with scene.scheduler(fails=1) as scheduler, RedisStore(scene.server.url, namespace=scene.namespace) as store:
        await scheduler.schedule(b"m", to=scene.to, delay="0s")
        await scene.next()
        keys = [key.decode() for key in await store.command("KEYS", "*")]
        ours = [key for key in keys if f"{scene.kind}:" in key and scene.namespace in key]
        assert len(ours) >= 4
        assert {key.startswith(scene.tag) for key in ours} == {True}
        assert [key for key in keys if "orders" in key and "{" not in key] == []


@on_topic
async def test_r32_nothing_that_a_consumer_has_not_had_expires(scene: Scene) -> None:
    async with (
        Scheduler(scene.server.url, namespace=scene.namespace) as scheduler,
        RedisStore(scene.server.url, namespace=scene.namespace) as store,
    ):
        await scheduler.schedule(b"m", to=scene.to, delay="0s")
        await scheduler.run_until_idle()
        lives = {
            key: await store.command("TTL", key) for key in await store.command("KEYS", f"{scene.tag}{scene.kind}:*")
        }
        assert len(lives) >= 3
        assert set(lives.values()) == {-1}
