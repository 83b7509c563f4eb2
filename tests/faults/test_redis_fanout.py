"""Fan-out topics when a process, the network or the server fails; numbers of the fault table."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from aiodelay import Message, Scheduler
from aiodelay.backends.redis import RedisFanout, RedisFanoutSink, RedisFanoutSource, RedisStore
from aiodelay.backends.redis.fanout import publishing
from aiodelay.core.values import Demand, Done
from aiodelay.errors import StoreUnavailableError
from aiodelay.testing.history import Limits
from tests.faults.programs.worker import Burst
from tests.faults.scene import TAKEOVER_MS, RedisScene
from tests.faults.test_redis import in_loop
from tests.faults.test_redis_lists import STEPS, end, killed, start_role
from tests.support.observed import FailurePoint
from tests.support.processes import PATIENCE_S, Worker
from tests.support.proxy import proxied
from tests.support.servers import RedisServer
from tests.support.slow_stores import PATIENT
from tests.support.waiting import until, until_sync

TOPIC, KEY = "redis-fanout:orders", "{default:00}:fanout:orders"


async def taken_by(url: str, consumer: str) -> list[str]:
    """Take and settle all that a consumer gets; return the ids."""
    found: list[str] = []
    async with (
        RedisStore(f"{url}?{PATIENT}") as store,
        RedisFanoutSource(f"{url}?{PATIENT}") as source,
        source.feed(f"orders?consumer={consumer}", "me", store.put_back, store.now_ms) as feed,
    ):
        while claims := (await feed.claim({"lane": Demand(500)}, request="r", lease_ms=15_000)).claims:
            found += [each.record.id for each in claims]
            await feed.settle([Done(each.record.id, each.record.revision, each.token) for each in claims])
    return found


def register(server: RedisServer, *consumers: str) -> None:
    async def play() -> None:
        async with RedisFanout(f"{server.url}?{PATIENT}") as fanout:
            for each in consumers:
                await fanout.register("orders", each)

    asyncio.run(play())


# --- processes --------------------------------------------------------------------------------------------


def start_consumer(scene: RedisScene, name: str, role: str, point: FailurePoint | None = None) -> Worker:
    return start_role(scene, name, role, source=f"{TOPIC}?consumer=billing", point=point)


def wait_until_drained(scene: RedisScene, consumer: str) -> None:
    lanes = scene.server.command("HVALS", "{default:00}:lanes").split(b"\r\n")[2::2]
    keys = [f"{KEY}@{consumer}:{name}" for name in ("refs", "consumers", "later")]
    keys += [f"{{default:00}}:due:{lane.decode()}" for lane in lanes if lane]
    until_sync(
        lambda: all(scene.server.command("EXISTS", key) == b":0\r\n" for key in keys), "no message is left", PATIENCE_S
    )


@pytest.mark.parametrize(("point", "role"), killed(STEPS), ids=str)
def test_f1_a_consumer_killed_at_each_step_loses_nothing_and_one_that_is_away_gets_all(
    redis_scene: RedisScene, point: FailurePoint, role: str
) -> None:
    scene, n = redis_scene, 120
    register(scene.server, "billing", "away")
    mover = start_role(scene, "mover", "moves")
    victim = start_consumer(scene, "victim", role, point)
    burst = Burst(messages=n, spread_ms=1_500, special={7: b"fail:1"}, to=TOPIC)
    scene.start("producer", burst=burst, until="produced").ended_well()
    assert victim.wait() == -9
    heir = start_consumer(scene, "heir", role)
    wait_until_drained(scene, "billing")
    for worker in (mover, heir):
        end(worker)
    report = scene.judge(Limits(takeover_ms=TAKEOVER_MS))
    assert report.delivered >= n
    assert sorted(asyncio.run(taken_by(scene.server.url, "away"))) == sorted(f"m-{i}" for i in range(n))
    assert scene.server.command("EXISTS", f"{KEY}:content", f"{KEY}:left") == b":0\r\n"


# --- rights -----------------------------------------------------------------------------------------------

WITHOUT = {
    "any right to consumers": "~{default:00}:[^f]* ~{default:00}:fanout:orders:* +@all",
    "the command that pushes": "~* +@all -rpush",
    "the command that sets": "~* +@all -hset",
    "the command that remembers": "~* +@all -sadd",
    "the command that forgets": "~* +@all -pexpire",
}
CASES = [*(("publish", missing) for missing in WITHOUT), *(("transfer", missing) for missing in list(WITHOUT)[:2])]


@pytest.mark.parametrize(("way", "missing"), CASES)
def test_s2_a_topic_without_the_right_to_write_loses_nothing_and_doubles_nothing(
    server: RedisServer, caplog: pytest.LogCaptureFixture, way: str, missing: str
) -> None:
    @in_loop
    async def play(server: RedisServer) -> None:
        names, wanted = ("billing", "shipping"), [f"m{i}" for i in range(10)]
        async with RedisFanout(server.url) as fanout:
            for name in names:
                await fanout.register("orders", name)
        granted = [*WITHOUT[missing].split(), "-@dangerous", "+info", "+config", "+client"]
        server.command("ACL", "SETUSER", "mover", "reset", "on", ">secret", "~*", "+@all")
        url = f"redis://mover:secret@127.0.0.1:{server.port}"
        sinks = [RedisFanoutSink(url)]
        async with Scheduler(url if way == "transfer" else "memory://", sinks=sinks) as scheduler:
            for each in wanted[:5]:
                await scheduler.schedule(b"payload", to=TOPIC, delay="0s", id=each)
            await scheduler.run_until_idle()
            server.command("ACL", "SETUSER", "mover", "resetkeys", *granted)
            await scheduler.schedule_many(Message(b"payload", to=TOPIC, delay="0s", id=each) for each in wanted[5:])
            await until(lambda: "takes nothing" in caplog.text, "the topic refuses")
            server.command("ACL", "SETUSER", "mover", "~*", "+@all")
            await scheduler.run_until_idle()
        for name in names:
            assert sorted(await taken_by(server.url, name)) == wanted

    play(server)


# --- the way to the server, and the server ----------------------------------------------------------------


async def two_wait(fanout: RedisFanout) -> bool:
    return min(each.waiting for each in await fanout.consumers("orders")) >= 2


@in_loop
async def test_f6_what_is_published_from_elsewhere_while_answers_are_lost_arrives_once(server: RedisServer) -> None:
    async with RedisFanout(f"{server.url}?{PATIENT}") as fanout, proxied(server.port) as proxy:
        for name in ("billing", "shipping"):
            await fanout.register("orders", name)
        scheduler = Scheduler("memory://", sinks=[RedisFanoutSink(f"redis://127.0.0.1:{proxy.port}")])
        async with scheduler:
            await scheduler.schedule(b"payload", to=TOPIC, delay="0s", id="m00")
            await scheduler.run_until_idle()  # it is connected
            proxy.mode = "lose answers"
            for i in range(1, 20):
                await scheduler.schedule(b"payload", to=TOPIC, delay="0s", id=f"m{i:02}")
            await until(lambda: two_wait(fanout), "two messages arrived whose answers are lost")
            proxy.mode = "pass"
            await scheduler.run_until_idle()
    for name in ("billing", "shipping"):
        assert sorted(await taken_by(server.url, name)) == [f"m{i:02}" for i in range(20)]


@pytest.mark.parametrize("resend", [False, True])
def test_f6_what_was_unknown_for_longer_than_a_topic_remembers_is_given_up_or_sent_again(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, resend: bool
) -> None:
    monkeypatch.setattr(publishing, "REMEMBERED_S", 0.2)

    @in_loop
    async def play(server: RedisServer) -> None:
        async with proxied(server.port) as proxy:
            sink = RedisFanoutSink(f"redis://127.0.0.1:{proxy.port}?{PATIENT}", resend_unknown=resend)
            scheduler = Scheduler("memory://", sinks=[sink])
            async with scheduler:
                await scheduler.schedule(b"payload", to=TOPIC, delay="0s", id="m0")
                await scheduler.run_until_idle()  # it is connected
                proxy.mode = "lose answers"
                await scheduler.schedule(b"payload", to=TOPIC, delay="0s", id="m1")
                await until(lambda: sink._unknown, "its answer is lost")
                await asyncio.sleep(2 * publishing.REMEMBERED_S)
                proxy.mode = "pass"
                await scheduler.run_until_idle()
                letters = [(each.record.id, each.reason) async for each in scheduler.dead_letters()]
                assert letters == ([] if resend else [("m1", "outcome_unknown")])

    register(server, "billing")
    play(server)
    assert asyncio.run(taken_by(server.url, "billing")) == ["m0", "m1"]


@in_loop
async def test_f6_takes_and_settlements_whose_answers_are_lost(server: RedisServer) -> None:
    names = ("billing", "shipping")
    url = f"{server.url}?{PATIENT}"
    async with RedisFanout(url) as fanout, RedisStore(url) as store, proxied(server.port) as proxy:
        for name in names:
            await fanout.register("orders", name)
        scheduler = Scheduler(server.url)
        async with scheduler:
            for i in range(6):
                await scheduler.schedule(b"payload", to=TOPIC, delay="0s", id=f"m{i}")
            await scheduler.run_until_idle()
        async with (
            RedisFanoutSource(f"redis://127.0.0.1:{proxy.port}?connections=1&{PATIENT}") as source,
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
        assert [(each.waiting, each.in_flight) for each in await fanout.consumers("orders")] == [(0, 0), (6, 0)]


@in_loop
async def test_f9_a_server_killed_while_messages_fan_out_gives_each_to_each_exactly_once(server: RedisServer) -> None:
    server.command("CONFIG", "SET", "appendfsync", "always")
    n = 1000
    async with RedisFanout(server.url) as fanout:
        for name in ("billing", "shipping"):
            await fanout.register("orders", name)
    url = f"{server.url}?timeout_ms=500&connect_timeout_ms=500"
    async with Scheduler(url, open_timeout="1m", store_timeout="25s") as scheduler:
        publishing = asyncio.create_task(_schedule_all(scheduler, n))
        arrived = f"{KEY}@billing:refs"
        await until(lambda: server.command("LLEN", arrived) != b":0\r\n", "the first messages were moved")
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        await publishing
        await scheduler.run_until_idle()
    for name in ("billing", "shipping"):
        counted = Counter(await taken_by(server.url, name))
        assert len(counted) == n
        assert max(counted.values()) == 1


async def _schedule_all(scheduler: Scheduler, n: int) -> None:
    for start in range(0, n, 50):
        ids = range(start, start + 50)
        await asyncio.gather(*[scheduler.schedule(b"payload", to=TOPIC, delay="0s", id=f"m{i}") for i in ids])


@in_loop
async def test_f13_a_full_server_goes_on_fanning_out_what_it_holds(server: RedisServer) -> None:
    async with RedisFanout(server.url) as fanout, Scheduler(server.url, lanes=[]) as scheduler:
        await fanout.register("orders", "billing")
        for i in range(20):
            await scheduler.schedule(b"payload", to=TOPIC, delay="0s", id=f"m{i:02}")
        server.command("CONFIG", "SET", "maxmemory", "100kb")
        async with RedisStore(f"{server.url}?{PATIENT}") as store:
            with store.transferring(RedisFanoutSink(server.url)) as moves:
                assert (await moves.transfer(Demand(500))).moved == 20
        assert await taken_by(server.url, "billing") == [f"m{i:02}" for i in range(20)]
