"""The network to a Redis server: connections are lost, hang or are refused, and a server stands still for long."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest
from msgspec.structs import replace

from aiodelay.backends.redis import RedisStore
from aiodelay.backends.redis.connection import wakeup_listener
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Demand, Done, Envelope, Put, Query, Refused, SettleOutcome, Stored, Unknown
from aiodelay.errors import StoreUnavailableError
from aiodelay.ports import Work
from aiodelay.testing.history import Limits
from tests.faults.programs.worker import Stream
from tests.faults.scene import TAKEOVER_MS, RedisScene
from tests.support.processes import PATIENCE_S
from tests.support.proxy import proxied, proxied_by_thread
from tests.support.servers import RedisServer, redis_products, start, stopped
from tests.support.slow_stores import PATIENT, opened_patiently, stored_patiently
from tests.support.waiting import until, until_sync

LANE = "work"
LONG_LEASE_MS = 15_000


def put(message_id: str, due_ms: int = 0) -> Put:
    return Put(new_op(), Envelope(message_id, LANE, payload=b"p"), After(due_ms))


def store_at(port: int, **options: int) -> RedisStore:
    limits = [] if "timeout_ms" in options else [PATIENT]
    query = "&".join([*limits, *(f"{name}={value}" for name, value in options.items())])
    return RedisStore(f"redis://127.0.0.1:{port}?{query}", namespace="faults")


# --- several processes ------------------------------------------------------------------------------------


def test_f6_f7_connections_that_break_all_the_time_cost_neither_a_message_nor_a_duplicate(
    redis_scene: RedisScene,
) -> None:
    with proxied_by_thread(redis_scene.server.port) as way:
        redis_scene.url = f"redis://127.0.0.1:{way.port}?timeout_ms=1000"
        flow = Stream(seconds=5, rate=60, ids=100, seed=3, until_told=True)
        settings = {"serve": ("work",), "run_ms": 20, "lease_ms": LONG_LEASE_MS, "stream": flow, "is_patient": True}
        workers = [redis_scene.start(name, **settings) for name in ("a", "b")]
        for worker in workers:
            worker.line("running")
        way.mode = "lossy"
        until_sync(lambda: way.made > 20, "many connections break", PATIENCE_S)
        way.mode = "pass"
        for worker in workers:
            worker.line("run 60")
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.ended_well()
    report = redis_scene.judge(Limits(lapses=False))
    assert (report.delivered > 100, report.duplicates) == (True, 0)


@pytest.mark.parametrize("seconds", [4, pytest.param(12, marks=pytest.mark.nightly)])
def test_f8_a_server_that_stands_still_for_long_does_everything_once(redis_scene: RedisScene, seconds: int) -> None:
    redis_scene.url += "?timeout_ms=1000"
    flow = Stream(seconds=4, rate=40, ids=100, seed=4, until_told=True)
    settings = {"serve": ("work",), "run_ms": 20, "lease_ms": 2 * LONG_LEASE_MS, "stream": flow}
    workers = [redis_scene.start(name, **settings) for name in ("a", "b")]
    for worker in workers:
        worker.line("run 20")
    os.kill(redis_scene.server.pid, signal.SIGSTOP)
    time.sleep(seconds)  # the fault; several times as long as calls wait for an answer
    os.kill(redis_scene.server.pid, signal.SIGCONT)
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.ended_well()
    report = redis_scene.judge(Limits(takeover_ms=TAKEOVER_MS + 2 * LONG_LEASE_MS))
    assert report.delivered > 30
    assert report.duplicates == 0, "it stands still for less than is left of a lease that is renewed every 10 s"


# --- one process ------------------------------------------------------------------------------------------


@pytest.fixture(params=redis_products(), ids=lambda found: found.name)
def product(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """One server of each product: these tests wait for time-outs."""
    server = start(request.param.program)
    yield server
    server.stop()


def test_f11_half_open_connections_are_noticed_also_by_the_one_that_listens(
    product: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RedisStore, "traits", replace(RedisStore.traits, safety_poll_ms=600_000))  # nobody looks
    monkeypatch.setattr(wakeup_listener, "BLOCK_MS", 500)
    monkeypatch.setattr(wakeup_listener, "GRACE_S", 0.5)

    @asynccontextmanager
    async def opened_for_work(port: int) -> AsyncIterator[tuple[RedisStore, Work]]:
        async with store_at(port, timeout_ms=1000, connections=1) as store, store.work("w", [LANE]) as work:
            yield store, work

    async def play() -> None:
        loop = asyncio.get_running_loop()
        async with (
            proxied(product.port) as way,
            opened_patiently(lambda: opened_for_work(way.port)) as (store, work),
            store_at(product.port) as other,
        ):

            async def is_given_up_soon() -> bool:
                await stored_patiently(store, [put("before")])
                way.freeze()
                command = put("m")
                before = loop.time()
                assert isinstance((await store.apply([command]))[0], Unknown)
                took_s = loop.time() - before
                await stored_patiently(store, [command])
                return took_s < 5

            async def has_claimed() -> bool:
                with suppress(StoreUnavailableError):
                    await work.claim({LANE: Demand(9)}, request=f"{number}", lease_ms=60_000)
                    return True
                return False

            await until(is_given_up_soon, "a call is given up sooner than by default")
            for number in range(2):  # first it notices; then it listens on a new connection
                work.clear()
                await until(has_claimed, "the server answers")
                await other.apply([put(f"hint {number}")])
                async with asyncio.timeout(60):
                    await work.wait(until_ms=None)

    asyncio.run(play())


def test_f8_a_silent_server_holds_up_a_replicated_command_no_longer_than_another(product: RedisServer) -> None:
    """The wait for replicas begins with the answer of the server."""

    async def takes_s(store: RedisStore) -> float:
        before = asyncio.get_running_loop().time()
        assert isinstance((await store.apply([put("m")]))[0], Unknown)
        return asyncio.get_running_loop().time() - before

    async def play() -> None:
        url = f"{product.url}?timeout_ms=1000"
        async with (
            opened_patiently(lambda: RedisStore(url, namespace="faults")) as plain,
            opened_patiently(lambda: RedisStore(f"{url}&durability=replicated:1", namespace="faults")) as replicated,
        ):

            async def is_no_longer() -> bool:
                for each in (plain, replicated):  # it is connected
                    await until(partial(answers, each), "the server answers")
                with stopped(product):
                    plain_s, replicated_s = await asyncio.gather(takes_s(plain), takes_s(replicated))
                return replicated_s - plain_s < 1.0

            await until(is_no_longer, "both calls end at the same time")

    asyncio.run(play())


def test_f12_a_server_that_takes_no_more_connections_is_waited_for(product: RedisServer) -> None:
    async def play() -> None:
        operator = socket.create_connection(("127.0.0.1", product.port))
        async with store_at(product.port, connections=20) as store, store.work("w", [LANE]) as work:
            operator.sendall(b"CONFIG SET maxclients 5\r\n")
            assert operator.recv(16) == b"+OK\r\n"
            outcomes = await asyncio.gather(*(store.apply([put(f"m{i}")]) for i in range(200)))
            stored = {f"m{i}" for i, (outcome,) in enumerate(outcomes) if isinstance(outcome, Stored)}
            refused = {f"m{i}" for i, (outcome,) in enumerate(outcomes) if isinstance(outcome, Refused)}
            assert stored
            assert len(refused) > 100
            operator.sendall(b"CONFIG SET maxclients 100\r\n")
            assert operator.recv(16) == b"+OK\r\n"
            claims = (await work.claim({LANE: Demand(500)}, request="r", lease_ms=1000)).claims
            assert stored <= {each.record.id for each in claims}
            assert not refused & {each.record.id for each in claims}
            done = [Done(each.record.id, each.record.revision, each.token) for each in claims]
            assert set(await work.settle(done)) == {SettleOutcome.SETTLED}
        operator.close()
        await until(lambda: clients_left(product) == 1, "no client is left but the one that asks")

    asyncio.run(play())


async def answers(store: RedisStore) -> bool:
    with suppress(StoreUnavailableError):
        await store.search(Query(limit=1))
        return True
    return False


def clients_left(server: RedisServer) -> int:
    return server.command("CLIENT", "LIST", "TYPE", "normal").count(b" addr=")


@pytest.mark.parametrize("protocol", [2, 3])
def test_f20_a_server_without_resp3_is_used_with_resp2_or_refused_clearly(protocol: int) -> None:
    server = start(redis_products()[0].program, "--rename-command", "HELLO", "")
    try:
        if protocol == 2:
            asyncio.run(schedule_one(server))
            return
        with pytest.raises(StoreUnavailableError, match=r"HELLO.*protocol=2"):
            asyncio.run(schedule_one(server, protocol=3))
    finally:
        server.stop()


async def schedule_one(server: RedisServer, **options: int) -> None:
    async with store_at(server.port, **options) as store:
        assert isinstance((await store.apply([put("m", 1000)]))[0], Stored)
        assert len(await store.search(Query())) == 1
