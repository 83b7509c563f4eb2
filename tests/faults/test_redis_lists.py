"""Lists when the network, the server, its memory, a right or a process fails; numbers of the fault table."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from aiodelay import Scheduler
from aiodelay.backends.redis.records.elements import decode_element
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Delivery, Demand, Done, Envelope, Put, Query, Stored, Transferred
from aiodelay.errors import StoreUnavailableError
from aiodelay.redis import RedisListSink, RedisListSource, RedisStore
from aiodelay.testing.history import Limits
from tests.faults.programs.worker import Burst
from tests.faults.scene import TAKEOVER_MS, RedisScene
from tests.faults.test_poison import most_deaths
from tests.faults.test_redis import in_loop
from tests.support.observed import FailurePoint
from tests.support.processes import PATIENCE_S, Worker
from tests.support.proxy import proxied
from tests.support.servers import RedisServer
from tests.support.slow_stores import PATIENT, opened_patiently
from tests.support.waiting import until, until_sync

LIST, OTHER = "orders", "mails"
STEPS = [
    FailurePoint("claim", "after", 3),
    FailurePoint("handler", "before", 10),
    FailurePoint("handler", "after", 10),
    FailurePoint("settle", "before", 3),
    FailurePoint("settle", "after", 3),
]
LONG_LEASE_MS = 15_000
"""A lease that no process loses because it stands still."""
numbers = count()


def killed(points: list[FailurePoint]) -> list[Any]:
    """Return where a handler is killed, and who takes messages without one: the gate kills that around a run."""
    return [
        *((point, "handles") for point in points),
        *(
            pytest.param(point, "pulls", marks=() if point.name == "handler" else pytest.mark.nightly)
            for point in points
        ),
    ]


@asynccontextmanager
async def opened(port: int, **options: int) -> AsyncIterator[RedisStore]:
    limits = [] if "timeout_ms" in options else [PATIENT]
    query = "&".join([*limits, *(f"{name}={value}" for name, value in options.items())])
    async with RedisStore(f"redis://127.0.0.1:{port}?{query}", namespace="faults") as store:
        yield store


async def put(store: RedisStore, messages: int, address: str = LIST, payload: bytes = b"payload") -> list[str]:
    ids = [f"m{next(numbers):05}" for _ in range(messages)]
    for first in range(0, messages, 100):
        puts = [
            Put(new_op(), Envelope(each, "redis-list", address, payload=payload), After(0))
            for each in ids[first : first + 100]
        ]
        assert all(isinstance(each, Stored) for each in await store.apply(puts))
    return ids


async def move(store: RedisStore, messages: int = 500, *, max_length: int = 0) -> Transferred:
    with store.transferring(RedisListSink(store._options, max_length=max_length)) as moves:
        return await moves.transfer(Demand(messages))


async def move_all(store: RedisStore) -> None:
    while True:
        transferred = await move(store)
        if transferred.next_due_ms is None or transferred.next_due_ms > transferred.now_ms:
            return


async def ids_in(store: RedisStore, key: str = LIST) -> list[str]:
    elements = await store.command("LRANGE", key, 0, -1)
    return [decode_element(each, lane="lane").record.id for each in elements]


async def left(store: RedisStore) -> int:
    return len(await store.search(Query(limit=1000)))


# --- the way to the server --------------------------------------------------------------------------------


@in_loop
async def test_f6_a_transfer_whose_answer_is_lost_is_repeated_without_a_double(server: RedisServer) -> None:
    async with proxied(server.port) as proxy, opened(proxy.port, connections=1) as store:
        ids = await put(store, 30)
        for _ in range(3):
            proxy.mode = "lose answers"
            with pytest.raises(StoreUnavailableError):
                await move(store, 7)
            proxy.mode = "pass"
            await move(store, 3)
        assert await ids_in(store) == ids
        assert await left(store) == 0


@in_loop
async def test_f7_a_transfer_that_did_not_arrive_moves_nothing(server: RedisServer) -> None:
    async with proxied(server.port) as proxy, opened(proxy.port, connections=1) as store:
        ids = await put(store, 3)
        proxy.mode = "lose requests"
        with pytest.raises(StoreUnavailableError):
            await move(store)
        proxy.mode = "pass"
        assert await ids_in(store) == []
        await move(store)
        assert await ids_in(store) == ids


@in_loop
async def test_f6_a_take_and_its_settlement_whose_answers_are_lost(server: RedisServer) -> None:
    async with (
        proxied(server.port) as proxy,
        opened(server.port) as store,
        RedisListSource(f"redis://127.0.0.1:{proxy.port}?connections=1&{PATIENT}") as source,
        source.feed(LIST, "me", store.put_back, store.now_ms) as feed,
    ):
        ids = await put(store, 6)
        await move(store)
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
        assert seen == ids
        assert await store.command("KEYS", f"*{LIST}*") == []


@in_loop
async def test_f6_a_push_whose_answer_is_lost_is_repeated_and_doubles_no_more_than_that(server: RedisServer) -> None:
    async with proxied(server.port) as proxy, opened(server.port) as store:
        url = f"redis://127.0.0.1:{proxy.port}"
        scheduler = Scheduler("memory://", sinks=[RedisListSink(url)])
        async with scheduler:
            proxy.mode = "lose answers"
            for i in range(20):
                await scheduler.schedule(b"payload", to=f"redis-list:{LIST}", delay="0s", id=f"m{i}")
            await asyncio.sleep(0.3)  # it tries again meanwhile, which doubles what had arrived
            proxy.mode = "pass"
            await scheduler.run_until_idle()
        counted = Counter(await ids_in(store))
        assert len(counted) == 20
        assert max(counted.values()) <= 5  # pauses grow: few tries fit into that time


@in_loop
async def test_f5_cancelling_transfers_loses_and_doubles_nothing(server: RedisServer) -> None:
    async with opened(server.port, connections=2) as store:
        ids = await put(store, 400)
        for step in range(60):
            task = asyncio.create_task(move(store, 5))
            for _ in range(step % 15):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        await move_all(store)
        assert sorted(await ids_in(store)) == ids


@in_loop
async def test_f5_cancelling_takes_and_settlements_loses_nothing(server: RedisServer) -> None:
    async with (
        opened(server.port) as store,
        RedisListSource(f"{server.url}?{PATIENT}") as source,
        source.feed(LIST, "me", store.put_back, store.now_ms) as feed,
    ):
        ids = await put(store, 60)
        await move(store)
        settled: set[str] = set()
        for step in range(200):
            task = asyncio.create_task(feed.claim({"lane": Demand(3)}, request="r", lease_ms=15_000))
            await _strike(task, step)
            if task.cancelled() or not task.result().claims:
                continue
            claims = task.result().claims
            settlements = [Done(each.record.id, each.record.revision, each.token) for each in claims]
            settling = asyncio.create_task(feed.settle(settlements))
            await _strike(settling, step)
            await feed.settle(settlements)
            settled |= {each.record.id for each in claims}
            if len(settled) == len(ids):
                break
        while claims := (await feed.claim({"lane": Demand(9)}, request="r", lease_ms=15_000)).claims:
            settled |= {each.record.id for each in claims}
            await feed.settle([Done(each.record.id, each.record.revision, each.token) for each in claims])
        assert sorted(settled) == ids
        assert await store.command("KEYS", f"*{LIST}*") == []


async def _strike(task: asyncio.Task[object], step: int) -> None:
    for _ in range(step % 13):
        await asyncio.sleep(0)
    if step % 3:
        task.cancel()
    await asyncio.wait([task])


# --- the server -------------------------------------------------------------------------------------------


@in_loop
async def test_f9_a_server_that_forgot_the_scripts_is_sent_them(server: RedisServer) -> None:
    async with opened(server.port) as store, RedisListSink(f"{server.url}?{PATIENT}") as sink:
        (message_id,) = await put(store, 1)
        server.command("SCRIPT", "FLUSH")
        await move(store)
        server.command("SCRIPT", "FLUSH")
        await sink.send([Delivery(Envelope("pushed", "redis-list", LIST), "", 1, 1, 1, 0)])
        assert await ids_in(store) == [message_id, "pushed"]


@in_loop
async def test_f13_a_full_server_goes_on_moving_and_taking(server: RedisServer) -> None:
    async with (
        opened(server.port) as store,
        RedisListSource(f"{server.url}?{PATIENT}") as source,
        source.feed(LIST, "me", store.put_back, store.now_ms) as feed,
    ):
        ids = await put(store, 20)
        server.command("CONFIG", "SET", "maxmemory", "100kb")
        assert (await move(store)).moved == 20
        claims = (await feed.claim({"lane": Demand(50)}, request="r", lease_ms=15_000)).claims
        assert [each.record.id for each in claims] == ids
        assert set(await feed.settle([Done(each.record.id, each.record.revision, each.token) for each in claims])) == {
            "settled"
        }


@in_loop
async def test_f9_a_server_killed_while_messages_move_keeps_each_exactly_once(server: RedisServer) -> None:
    server.command("CONFIG", "SET", "appendfsync", "always")
    hasty = opened_patiently(lambda: opened(server.port, timeout_ms=500, connect_timeout_ms=500))
    async with opened(server.port) as store, hasty as moving:
        ids = await put(store, 2000)
        mover = asyncio.create_task(_keep_moving(moving))
        await until(lambda: server.command("LLEN", LIST) != b":0\r\n", "the first messages were moved")
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        await mover
        found = await ids_in(store)
        assert Counter(found) == Counter(ids)


async def _keep_moving(store: RedisStore) -> None:
    while True:
        try:
            transferred = await move(store, 40)
        except StoreUnavailableError:
            await asyncio.sleep(0.05)  # a pause between tries, as any client makes
        else:
            if transferred.next_due_ms is None:
                return


@in_loop
async def test_f8_a_server_that_stands_still_moves_nothing_twice(server: RedisServer) -> None:
    hasty = opened_patiently(lambda: opened(server.port, timeout_ms=1000))
    async with opened(server.port) as store, hasty as moving:
        ids = await put(store, 100)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            for _ in range(2):
                with pytest.raises(StoreUnavailableError):
                    await move(moving, 60)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await _keep_moving(moving)
        assert await ids_in(store) == ids


# --- rights -----------------------------------------------------------------------------------------------

WITHOUT = {
    "any right to the list": "~{faults:00}:* ~mails +@all -@dangerous +info +config +client",
    "the command that pushes": "~* +@all -rpush -@dangerous +info +config +client",
}


@pytest.mark.parametrize("missing", WITHOUT)
def test_a_list_without_the_right_to_write_loses_nothing_and_holds_up_no_other(
    server: RedisServer, missing: str
) -> None:
    @in_loop
    async def play(server: RedisServer) -> None:
        server.command("ACL", "SETUSER", "mover", "reset", "on", ">secret", *WITHOUT[missing].split())
        url = f"redis://mover:secret@127.0.0.1:{server.port}?{PATIENT}"
        async with RedisStore(url, namespace="faults") as store, opened(server.port) as admin:
            ids, others = await put(store, 10), await put(store, 5, OTHER)
            transferred = await move(store)
            may_write_others = missing == "any right to the list"
            assert transferred.moved == (5 if may_write_others else 0)
            assert await ids_in(admin, OTHER) == (others if may_write_others else [])
            assert await ids_in(admin) == []
            assert await left(store) == (10 if may_write_others else 15)
            reasons = {each.address: each.reason for each in await store.blocked()}
            assert "permission" in reasons[LIST] or "can't access" in reasons[LIST] or "can't run" in reasons[LIST]
            server.command("ACL", "SETUSER", "mover", "~*", "+@all")

            async def all_moved() -> bool:
                await move_all(store)
                return not await left(store)

            await until(all_moved, "what was set aside is tried again")
            assert (await ids_in(admin), await ids_in(admin, OTHER)) == (ids, others)

    play(server)


# --- a million for one ------------------------------------------------------------------------------------


@in_loop
async def test_a_flood_for_a_full_list_costs_others_little_and_no_script_reads_it_all(server: RedisServer) -> None:
    async with opened(server.port) as store:
        await put(store, 20_000)
        others = await put(store, 10, OTHER)
        steps = 0
        while await ids_in(store, OTHER) != others:
            await move(store, max_length=100)
            steps += 1
        assert 20 <= steps <= 25, "a script sets at most 1,000 aside, and hardly fewer"
        later = await put(store, 1, OTHER)
        await move(store, max_length=100)
        assert await ids_in(store, OTHER) == others + later
        assert len(await ids_in(store)) == 100


# --- processes --------------------------------------------------------------------------------------------


def drained(scene: RedisScene) -> bool:
    lists = [LIST, f"{{{LIST}}}:aiodelay:consumers"]
    lanes = scene.server.command("HVALS", "{default:00}:lanes").split(b"\r\n")[2::2]
    of_lanes = [f"{{default:00}}:{kind}:{lane.decode()}" for lane in lanes if lane for kind in ("due", "leased")]
    # A message may move from a lane to the list, or back, between two commands.
    return all(scene.server.command("EXISTS", key) == b":0\r\n" for key in (*lists, *of_lanes, *lists))


def wait_until_drained(scene: RedisScene) -> None:
    until_sync(lambda: drained(scene), "no message is left", PATIENCE_S)


def start_role(scene: RedisScene, name: str, role: str, **settings: Any) -> Worker:  # noqa: ANN401 - the fields of a plan
    if role == "moves":
        return scene.start(name, moves=True, until="sigterm")
    settings = {"source": f"redis-list:{LIST}", "run_ms": 20, "until": "sigterm"} | settings
    return scene.start(name, serve=("list",), pulls=role == "pulls", **settings)


def end(worker: Worker) -> None:
    worker.line("ready")  # one that was just started may not listen to signals yet
    worker.terminate()
    worker.ended_well()


def test_f1_three_roles_as_processes_and_each_is_killed(redis_scene: RedisScene) -> None:
    scene = redis_scene
    handlers = [start_role(scene, f"handler{i}", "handles") for i in range(2)]
    victim = start_role(scene, "victim", "handles", point=FailurePoint("handler", "after", 10))
    victim.line("ready")  # before the others have taken all
    movers = [start_role(scene, f"mover{i}", "moves") for i in range(2)]
    for number in range(20):  # the others may take all of a burst while the victim stands still
        burst = Burst(messages=300, spread_ms=2_000, prefix=f"m{number}", to=f"redis-list:{LIST}")
        scene.start(f"producer{number}", burst=burst, until="produced").ended_well()
        until_sync(lambda: not victim.is_alive or drained(scene), "it dies, or no message is left", PATIENCE_S)
        if not victim.is_alive:
            break
    assert victim.wait() == -9
    for worker in (movers[0], handlers[0]):
        worker.kill()
    handlers.append(start_role(scene, "heir", "handles"))
    wait_until_drained(scene)
    for worker in (movers[1], *handlers[1:]):
        end(worker)
    report = scene.judge(Limits(takeover_ms=TAKEOVER_MS))
    assert report.delivered >= 300


@pytest.mark.parametrize(
    ("point", "role"), killed([*STEPS, FailurePoint("put_back", "before"), FailurePoint("put_back", "after")]), ids=str
)
def test_f1_who_takes_from_a_list_is_killed_at_each_step(
    redis_scene: RedisScene, point: FailurePoint, role: str
) -> None:
    scene = redis_scene
    mover, victim = start_role(scene, "mover", "moves"), start_role(scene, "victim", role, point=point)
    burst = Burst(messages=120, spread_ms=1_500, special={7: b"fail:1"}, to=f"redis-list:{LIST}")
    scene.start("producer", burst=burst, until="produced").ended_well()
    assert victim.wait() == -9
    heir = start_role(scene, "heir", role)
    wait_until_drained(scene)
    for worker in (mover, heir):
        end(worker)
    assert scene.judge(Limits(takeover_ms=TAKEOVER_MS)).delivered >= 120


def test_l5_a_message_that_kills_its_processes_is_given_up_and_its_neighbours_are_not(
    redis_scene: RedisScene,
) -> None:
    scene = redis_scene
    mover = start_role(scene, "mover", "moves")
    burst = Burst(messages=12, spread_ms=1, special={5: b"die"}, to=f"redis-list:{LIST}")
    scene.start("producer", burst=burst, until="produced").ended_well()
    for i in range(most_deaths(12) + 1):
        worker = start_role(scene, f"handler{i}", "handles")
        until_sync(lambda: not worker.is_alive or drained(scene), "it dies, or no message is left", PATIENCE_S)  # noqa: B023
        if worker.is_alive:
            break
        assert worker.wait() == -9
    wait_until_drained(scene)
    for each in (mover, worker):
        end(each)
    waits_ms = most_deaths(12) * TAKEOVER_MS  # suspects wait for the trials of others, each of which may end a process
    scene.judge(Limits(takeover_ms=waits_ms, poison={"m-5": "killed_worker"}))


def test_f41_handlers_told_to_end_give_back_what_has_not_begun(redis_scene: RedisScene) -> None:
    scene = redis_scene
    mover = start_role(scene, "mover", "moves")
    burst = Burst(messages=300, spread_ms=1, to=f"redis-list:{LIST}")
    scene.start("producer", burst=burst, until="produced").ended_well()
    for i in range(4):
        worker = start_role(scene, f"handler{i}", "handles", lease_ms=LONG_LEASE_MS)
        worker.line("running")
        worker.terminate()
        worker.ended_well()
    last = start_role(scene, "last", "handles")
    wait_until_drained(scene)
    for each in (mover, last):
        end(each)
    report = scene.judge()
    assert report.duplicates == 0


def test_s3_retries_of_what_came_from_a_list_are_shared_by_all_who_handle_it(redis_scene: RedisScene) -> None:
    scene = redis_scene
    settings = {"lease_ms": LONG_LEASE_MS, "is_patient": True}
    handlers = [start_role(scene, f"handler{i}", "handles", **settings) for i in range(2)]
    crew = [start_role(scene, "mover", "moves"), *handlers]
    special = dict.fromkeys(range(0, 100, 3), b"fail:2")
    burst = Burst(messages=100, spread_ms=1_000, special=special, to=f"redis-list:{LIST}")
    scene.start("producer", burst=burst, until="produced").ended_well()
    wait_until_drained(scene)
    for worker in crew:
        end(worker)
    report = scene.judge()
    assert (report.delivered, report.duplicates) == (100, 0)


@pytest.mark.parametrize("seed", [1])
def test_f1_a_storm_of_kills_of_movers_and_handlers(redis_scene: RedisScene, seed: int) -> None:
    scene, rng = redis_scene, random.Random(seed)
    burst = Burst(messages=400, spread_ms=5_000, to=f"redis-list:{LIST}")
    crew = {f"{role}-{i}": start_role(scene, f"{role}-{i}", role) for role in ("moves", "handles") for i in range(2)}
    producer = scene.start("producer", burst=burst, until="produced")
    for round_ in range(6):
        time.sleep(0.8)  # a storm's pause: they work meanwhile
        name = rng.choice(sorted(crew))
        crew.pop(name).kill()
        role = name.partition("-")[0]
        name = f"{role}-{10 + round_}"
        crew[name] = start_role(scene, name, role)
    producer.ended_well()
    wait_until_drained(scene)
    for worker in crew.values():
        end(worker)
    scene.judge(Limits(takeover_ms=TAKEOVER_MS))
