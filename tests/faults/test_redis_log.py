"""Logs when a process, the network or the server fails; numbers of the fault table."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from aiodelay import Scheduler
from aiodelay.core.values import Demand, Done
from aiodelay.errors import StoreUnavailableError
from aiodelay.redis import LogMessage, RedisLog, RedisStore
from aiodelay.testing.history import Limits
from tests.faults.programs.worker import Burst
from tests.faults.scene import TAKEOVER_MS, RedisScene
from tests.faults.test_redis import in_loop
from tests.faults.test_redis_lists import STEPS, end, start_role
from tests.support.observed import FailurePoint
from tests.support.processes import PATIENCE_S, Worker
from tests.support.proxy import proxied
from tests.support.servers import RedisServer
from tests.support.slow_stores import PATIENT
from tests.support.waiting import until, until_sync

TOPIC, KEY = "redis-log:orders", "{default:00}:log:orders"


async def taken_by(url: str, consumer: str) -> list[str]:
    """Take and settle all that a consumer gets; return the ids."""
    found: list[str] = []
    async with (
        RedisStore(f"{url}?{PATIENT}") as store,
        RedisLog(f"{url}?{PATIENT}") as log,
        log.feed(f"orders?consumer={consumer}", "me", store.put_back, store.now_ms) as feed,
    ):
        while claims := (await feed.claim({"lane": Demand(500)}, request="r", lease_ms=15_000)).claims:
            found += [each.record.id for each in claims]
            await feed.settle([Done(each.record.id, each.record.revision, each.token) for each in claims])
    return found


async def is_settled(url: str, consumer: str) -> bool:
    """Say whether a consumer has ended all there is, and the store has nothing due."""
    async with RedisLog(f"{url}?{PATIENT}") as log, RedisStore(f"{url}?{PATIENT}") as store:
        found = {each.name: each for each in await log.consumers("orders")}.get(consumer)
        is_open = found is None or found.waiting or found.in_flight or found.retrying
        return not is_open and not await store.counts()


async def ids_of(url: str) -> list[str]:
    async with RedisLog(f"{url}?{PATIENT}") as log:
        entries = [each async for each in log.read("orders")]
    assert [each.index for each in entries] == list(range(1, len(entries) + 1))
    return [each.id for each in entries]


# --- processes --------------------------------------------------------------------------------------------


def start_consumer(scene: RedisScene, name: str, point: FailurePoint | None = None) -> Worker:
    source = f"{TOPIC}?consumer=billing"
    return scene.start(name, serve=("list",), source=source, run_ms=20, until="sigterm", point=point)


@pytest.mark.parametrize("point", STEPS, ids=str)
def test_f1_a_consumer_killed_at_each_step_loses_nothing_and_its_cursor_gets_to_the_end(
    redis_scene: RedisScene, point: FailurePoint
) -> None:
    scene, n = redis_scene, 120
    mover = start_role(scene, "mover", "moves")
    victim = start_consumer(scene, "victim", point)
    burst = Burst(messages=n, spread_ms=1_500, special={7: b"fail:1"}, to=TOPIC)
    scene.start("producer", burst=burst, until="produced").ended_well()
    assert victim.wait() == -9
    heir = start_consumer(scene, "heir")
    until_sync(lambda: asyncio.run(is_settled(scene.server.url, "billing")), "no message is left", PATIENCE_S)
    for worker in (mover, heir):
        end(worker)
    report = scene.judge(Limits(takeover_ms=TAKEOVER_MS))
    assert report.delivered >= n
    everything = sorted(f"m-{i}" for i in range(n))
    assert sorted(asyncio.run(ids_of(scene.server.url))) == everything
    assert sorted(asyncio.run(taken_by(scene.server.url, "away"))) == everything


# --- the way to the server, and the server ----------------------------------------------------------------


async def has_two(log: RedisLog) -> bool:
    return (await log.topics())[0].last >= 2


@in_loop
async def test_f6_what_is_appended_from_elsewhere_while_answers_are_lost_is_there_once(server: RedisServer) -> None:
    async with RedisLog(f"{server.url}?{PATIENT}") as log, proxied(server.port) as proxy:
        scheduler = Scheduler("memory://", sinks=[RedisLog(f"redis://127.0.0.1:{proxy.port}")])
        async with scheduler:
            await scheduler.schedule(b"payload", to=TOPIC, delay="0s", id="m00")
            await scheduler.run_until_idle()  # it is connected
            proxy.mode = "lose answers"
            for i in range(1, 20):
                await scheduler.schedule(b"payload", to=TOPIC, delay="0s", id=f"m{i:02}")
            await until(lambda: has_two(log), "an entry arrived whose answer is lost")
            proxy.mode = "pass"
            await scheduler.run_until_idle()
    assert sorted(await ids_of(server.url)) == [f"m{i:02}" for i in range(20)]


@in_loop
async def test_f6_appending_by_hand_is_repeated_under_ids(server: RedisServer) -> None:
    messages = [LogMessage(b"payload", id=f"m{i}") for i in range(5)]
    async with proxied(server.port) as proxy, RedisLog(f"redis://127.0.0.1:{proxy.port}?{PATIENT}") as log:
        assert await log.append("orders", messages[:1]) == [1]
        proxy.mode = "lose answers"
        with pytest.raises(StoreUnavailableError):
            await log.append("orders", messages)
        proxy.mode = "pass"
        assert await log.append("orders", messages) == [None] * 5
    assert await ids_of(server.url) == [f"m{i}" for i in range(5)]


@in_loop
async def test_f6_takes_and_settlements_whose_answers_are_lost(server: RedisServer) -> None:
    url = f"{server.url}?{PATIENT}"
    async with RedisLog(url) as log, RedisStore(url) as store, proxied(server.port) as proxy:
        await log.append("orders", [LogMessage(b"payload", id=f"m{i}") for i in range(6)])
        async with (
            RedisLog(f"redis://127.0.0.1:{proxy.port}?connections=1&{PATIENT}") as source,
            source.feed("orders?consumer=billing", "me", store.put_back, store.now_ms) as feed,
        ):
            seen: list[str] = []
            for _ in range(3):
                proxy.mode = "lose answers"
                with pytest.raises(StoreUnavailableError):
                    await feed.claim({"lane": Demand(2)}, request="r", lease_ms=15_000)
                proxy.mode = "pass"
                claims = (await feed.claim({"lane": Demand(2)}, request="r", lease_ms=15_000)).claims
                seen += [each.record.id for each in claims]
                settlements = [Done(each.record.id, each.record.revision, each.token) for each in claims]
                proxy.mode = "lose answers"
                with pytest.raises(StoreUnavailableError):
                    await feed.settle(settlements)
                proxy.mode = "pass"
                assert set(await feed.settle(settlements)) <= {"gone", "settled"}
        assert seen == [f"m{i}" for i in range(6)]
        (billing,) = await log.consumers("orders")
        assert (billing.waiting, billing.in_flight, billing.cursor) == (0, 0, 6)


@in_loop
async def test_f9_a_server_killed_while_messages_are_moved_to_a_log_has_each_exactly_once(server: RedisServer) -> None:
    server.command("CONFIG", "SET", "appendfsync", "always")
    n = 1000
    url = f"{server.url}?timeout_ms=500&connect_timeout_ms=500"
    async with Scheduler(url, open_timeout="1m", store_timeout="25s") as scheduler:
        publishing = asyncio.create_task(_schedule_all(scheduler, n))
        await until(lambda: server.command("XLEN", KEY) != b":0\r\n", "the first messages were moved")
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        await publishing
        await scheduler.run_until_idle()
    assert Counter(await ids_of(server.url)) == Counter(f"m{i}" for i in range(n))


async def _schedule_all(scheduler: Scheduler, n: int) -> None:
    for start in range(0, n, 50):
        ids = range(start, start + 50)
        await asyncio.gather(*[scheduler.schedule(b"payload", to=TOPIC, delay="0s", id=f"m{i}") for i in ids])


@in_loop
async def test_f13_a_full_server_goes_on_moving_to_logs_what_it_holds(server: RedisServer) -> None:
    async with Scheduler(server.url, lanes=[]) as scheduler:
        for i in range(20):
            await scheduler.schedule(b"payload", to=TOPIC, delay="0s", id=f"m{i:02}")
        server.command("CONFIG", "SET", "maxmemory", "100kb")
        async with RedisStore(f"{server.url}?{PATIENT}") as store:
            with store.transferring(RedisLog(server.url)) as moves:
                assert (await moves.transfer(Demand(500))).moved == 20
        assert await taken_by(server.url, "billing") == [f"m{i:02}" for i in range(20)]


@in_loop
async def test_f13_what_a_full_server_or_a_missing_right_refuses_is_appended_when_it_is_sent_again(
    server: RedisServer,
) -> None:
    messages = [LogMessage(b"payload", id="m")]
    rights = ("reset", "on", ">secret", "~*", "+@all", "-xadd")
    server.command("ACL", "SETUSER", "reader", *rights)
    async with RedisLog(f"redis://reader:secret@127.0.0.1:{server.port}") as log:
        with pytest.raises(StoreUnavailableError):
            await log.append("orders", messages)
    async with RedisLog(server.url) as log:
        server.command("CONFIG", "SET", "maxmemory", "100kb")
        with pytest.raises(StoreUnavailableError):
            await log.append("orders", messages)
        server.command("CONFIG", "SET", "maxmemory", "0")
        assert await log.append("orders", messages) == [1]
