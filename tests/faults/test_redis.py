"""The errors and the behaviour of a Redis store when the server or the network fails; numbers of the fault table."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import wraps
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace

from aiodelay import Scheduler
from aiodelay.backends.redis import RedisStore
from aiodelay.backends.redis.connection import wakeup_listener
from aiodelay.core.ids import new_op
from aiodelay.core.values import (
    After,
    Cancel,
    Claimed,
    DeadKey,
    Demand,
    Done,
    Envelope,
    Outcome,
    Put,
    Query,
    Refused,
    SettleOutcome,
    Stored,
    Unknown,
)
from aiodelay.errors import StoreMismatchError, StoreUnavailableError
from aiodelay.ports import Work
from tests.support.bad_inputs import REDIS_RECORDS
from tests.support.proxy import proxied
from tests.support.servers import RedisServer, replicate, start
from tests.support.slow_stores import PATIENT, opened_patiently
from tests.support.topologies import node_of_a_cluster
from tests.support.waiting import until

LANE = "orders"
HASTY_MS = 1_000
"""The time limit of a store whose calls must fail."""
requests = count(1)


def in_loop(test: Callable[[RedisServer], Awaitable[None]]) -> Callable[[RedisServer], None]:
    @wraps(test)
    def run(server: RedisServer) -> None:
        async def play() -> None:
            await test(server)
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            assert left == []

        asyncio.run(play())

    return run


@asynccontextmanager
async def opened(port: int, **options: str | int) -> Any:  # noqa: ANN401
    limits = [] if "timeout_ms" in options else [PATIENT]
    query = "&".join([*limits, *(f"{name}={value}" for name, value in options.items())])
    async with RedisStore(f"redis://127.0.0.1:{port}?{query}", namespace="faults") as store:
        yield store


@asynccontextmanager
async def opened_for_work(port: int, **options: str | int) -> AsyncIterator[tuple[RedisStore, Work]]:
    async with opened(port, **options) as store, store.work("w", [LANE]) as work:
        yield store, work


def put(message_id: str = "m", due_ms: int = 0, payload: bytes = b"payload") -> Put:
    return Put(new_op(), Envelope(message_id, LANE, payload=payload), After(due_ms))


async def do(store: RedisStore, *commands: Put | Cancel) -> Outcome:
    return (await store.apply(commands))[-1]


async def do_patiently(store: RedisStore, command: Put | Cancel) -> Outcome:
    """Repeat a command until a store with a short time limit has its answer."""
    outcomes: list[Outcome] = []

    async def is_answered() -> bool:
        outcomes.append(await do(store, command))
        last = outcomes[-1]
        return not (isinstance(last, Unknown) or (isinstance(last, Refused) and last.reason == "unavailable"))

    await until(is_answered, "the store answers")
    return outcomes[-1]


async def claim(work: Work, request: str = "") -> Claimed:
    return await work.claim({LANE: Demand(500)}, request=request or f"r{next(requests)}", lease_ms=60_000)


async def ids(store: RedisStore) -> list[str]:
    return [each.record.id for each in await store.search(Query(limit=1000))]


# --- the way to the server --------------------------------------------------------------------------------


@in_loop
async def test_f6_a_lost_answer_is_unknown_and_its_repetition_has_no_second_effect(server: RedisServer) -> None:
    async with proxied(server.port) as proxy, opened(proxy.port, connections=1) as store:
        command = put()
        proxy.mode = "lose answers"
        assert isinstance(await do(store, command), Unknown)
        proxy.mode = "pass"
        first = await do(store, command)
        assert isinstance(first, Stored)
        assert (first.answer, await ids(store)) == ("stored", ["m"])
        cancel = Cancel(new_op(), "m")
        proxy.mode = "lose answers"
        assert isinstance(await do(store, cancel), Unknown)
        proxy.mode = "pass"
        again = await do(store, cancel)
        assert isinstance(again, Stored)
        assert (again.answer, await do(store, command)) == ("cancelled", first)
        assert await ids(store) == []


@in_loop
async def test_f6_a_claim_whose_answer_is_lost_is_given_again(server: RedisServer) -> None:
    async with (
        proxied(server.port) as proxy,
        opened(proxy.port, connections=1) as store,
        store.work("w", [LANE]) as work,
    ):
        await do(store, put("a"), put("b"))
        proxy.mode = "lose answers"
        with pytest.raises(StoreUnavailableError):
            await claim(work, "lost")
        proxy.mode = "pass"
        claims = (await claim(work, "lost")).claims
        assert [each.record.id for each in claims] == ["a", "b"]
        settlements = [Done(each.record.id, each.record.revision, each.token) for each in claims]
        proxy.mode = "lose answers"
        with pytest.raises(StoreUnavailableError):
            await work.settle(settlements)
        proxy.mode = "pass"
        assert await work.settle(settlements) == [SettleOutcome.GONE] * 2
        assert not (await claim(work)).claims


@in_loop
async def test_f7_a_request_that_was_not_sent_is_refused(server: RedisServer) -> None:
    async with proxied(server.port) as proxy, opened(proxy.port) as store, store.work("w", [LANE]) as work:
        proxy.mode = "lose requests"
        assert isinstance(await do(store, put("lost")), Unknown | Refused)
        proxy.mode = "refuse"
        for _ in range(5):
            outcome = await do(store, put("refused"))
            assert isinstance(outcome, Unknown | Refused), outcome
        proxy.mode = "pass"
        assert isinstance(await do(store, put("passed")), Stored)
        assert await ids(store) == ["passed"]
        assert len((await claim(work)).claims) == 1


@in_loop
async def test_f8_a_server_that_stands_still_is_given_up_in_time_and_comes_back(server: RedisServer) -> None:
    async with opened_patiently(lambda: opened_for_work(server.port, timeout_ms=HASTY_MS)) as (store, work):
        command = put()
        os.kill(server.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(60):
                outcome = await do(store, command)
                with pytest.raises(StoreUnavailableError):
                    await claim(work)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert isinstance(outcome, Unknown)
        assert f"{HASTY_MS} ms" in outcome.detail
        assert isinstance(await do_patiently(store, command), Stored)
    async with opened(server.port) as store:
        assert await ids(store) == ["m"]


@pytest.mark.valkey_too
@in_loop
async def test_f9_a_restart_keeps_what_the_append_only_file_holds(server: RedisServer) -> None:
    async with opened(server.port) as store:
        has_waitaof = b"unknown command" not in server.command("WAITAOF", "0", "0", "1")
    if not has_waitaof:
        server.command("CONFIG", "SET", "appendfsync", "always")
    durability = "fsynced" if has_waitaof else "memory"
    async with opened(server.port, durability=durability) as store, store.work("w", [LANE]) as work:
        assert isinstance(await do(store, put("kept")), Stored)
        server.kill()
        refused = [await do(store, put("refused")) for _ in range(3)]
        assert isinstance(refused[-1], Refused)
        assert refused[-1].reason == "unavailable"
        with pytest.raises(StoreUnavailableError):
            await claim(work)
        server.start()
        assert [each.record.id for each in (await claim(work)).claims] == ["kept"]


@pytest.mark.valkey_too
@in_loop
async def test_fsynced_is_refused_where_it_cannot_be_had(server: RedisServer) -> None:
    if b"unknown command" in server.command("WAITAOF", "0", "0", "1"):
        with pytest.raises(StoreMismatchError, match="or later, which durability=fsynced needs"):
            async with opened(server.port, durability="fsynced"):
                pass
        return
    server.command("CONFIG", "SET", "appendonly", "no")
    with pytest.raises(StoreMismatchError, match="durability=memory"):
        async with opened(server.port, durability="fsynced"):
            pass


@pytest.mark.valkey_too
@in_loop
async def test_f9_a_server_that_forgot_the_scripts_is_sent_them(server: RedisServer) -> None:
    async with opened(server.port) as store, store.work("w", [LANE]) as work:
        for _ in range(2):
            server.command("SCRIPT", "FLUSH")
            assert isinstance(await do(store, put()), Stored)
            server.command("SCRIPT", "FLUSH")
            (one,) = (await claim(work)).claims
            server.command("SCRIPT", "FLUSH")
            assert await work.settle([Done("m", one.record.revision, one.token)]) == [SettleOutcome.SETTLED]


@in_loop
async def test_f9_a_server_that_lost_everything_gives_lanes_other_numbers_and_none_is_mistaken(
    server: RedisServer,
) -> None:
    async with opened(server.port, journal=10) as store, store.work("w", ["a", "b", "c"]) as work:
        for names in ("abc", "cba"):
            for name in names:
                await do(store, Put(new_op(), Envelope(f"m{name}", f"lane {name}"), After(0)))
            wanted = {f"lane {name}": Demand(5) for name in "abc"}
            claims = (await work.claim(wanted, request=names, lease_ms=15_000)).claims
            assert {each.record.id: each.record.envelope.lane for each in claims} == {
                "ma": "lane a",
                "mb": "lane b",
                "mc": "lane c",
            }
            await store.pause("lane b")
            assert await store.paused() == [("lane b", None)]
            assert {(each.record.id, each.record.envelope.lane) for each in await store.search(Query())} == {
                ("ma", "lane a"),
                ("mb", "lane b"),
                ("mc", "lane c"),
            }
            assert {each.lane[5:] for each in await store.journal()} == set("abc")
            settled = await work.settle([Done(each.record.id, each.record.revision, each.token) for each in claims])
            assert list(settled) == [SettleOutcome.SETTLED] * 3
            server.command("FLUSHALL")


@in_loop
async def test_f11_a_black_hole_is_noticed(server: RedisServer) -> None:
    async with (
        proxied(server.port) as proxy,
        opened_patiently(lambda: opened(proxy.port, timeout_ms=HASTY_MS)) as store,
    ):
        assert isinstance(await do_patiently(store, put("before")), Stored)
        proxy.mode = "black hole"
        async with asyncio.timeout(60):
            assert isinstance(await do(store, put("lost")), Unknown)
        proxy.mode = "pass"
        assert isinstance(await do_patiently(store, put("after")), Stored)


@in_loop
async def test_f12_more_calls_than_connections_wait_their_turn(server: RedisServer) -> None:
    async with opened(server.port, connections=2) as store:
        outcomes = await asyncio.gather(*[do(store, put(f"m{i}")) for i in range(300)])
        assert all(isinstance(each, Stored) for each in outcomes)
        assert len(await ids(store)) == 300


@in_loop
async def test_f5_cancelling_a_call_leaves_no_wrong_answer_behind(server: RedisServer) -> None:
    async with opened(server.port, connections=2) as store:
        for step in range(60):
            task = asyncio.create_task(do(store, put(f"m{step}")))
            for _ in range(step % 12):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            outcome = await do(store, put(f"n{step}"))
            assert isinstance(outcome, Stored)
            assert outcome.answer == "stored"
        assert {f"n{step}" for step in range(60)} <= set(await ids(store))


# --- the server -------------------------------------------------------------------------------------------


@pytest.mark.valkey_too
@in_loop
async def test_f13_a_full_server_takes_no_more_but_delivers(server: RedisServer) -> None:
    async with opened(server.port) as store, store.work("w", [LANE]) as work:
        await store.apply([put(f"m{i}") for i in range(20)])
        server.command("CONFIG", "SET", "maxmemory", "100kb")
        outcome = await do(store, put("full", payload=bytes(1000)))
        assert isinstance(outcome, Refused)
        assert outcome.reason == "full"
        claimed = await claim(work)
        assert len(claimed.claims) == 20
        done = [Done(each.record.id, each.record.revision, each.token) for each in claimed.claims]
        assert set(await work.settle(done)) == {SettleOutcome.SETTLED}
        await work.tidy([LANE], limit=500)
        server.command("CONFIG", "SET", "maxmemory", "0")
        assert await ids(store) == []
        assert isinstance(await do(store, put("room")), Stored)


@pytest.mark.valkey_too
@in_loop
async def test_f13_a_full_server_can_be_opened_and_emptied(server: RedisServer) -> None:
    async with opened(server.port) as store:
        await store.apply([put(f"m{i}") for i in range(20)])
    server.command("CONFIG", "SET", "maxmemory", "100kb")
    async with opened(server.port) as store, store.work("another", [LANE]) as work:
        assert len((await claim(work)).claims) == 20
        assert [each.served for each in (await work.tidy([LANE], limit=500)).lanes] == [True]


@pytest.mark.valkey_too
@in_loop
async def test_f14_a_server_that_evicts_is_refused(server: RedisServer) -> None:
    server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreMismatchError, match="maxmemory-policy noeviction"):
        async with opened(server.port):
            pass


@pytest.mark.valkey_too
@in_loop
async def test_a_replica_is_refused_and_one_that_became_one_stores_nothing(server: RedisServer) -> None:
    async with opened(server.port) as store:
        server.command("REPLICAOF", "127.0.0.1", "1")
        outcome = await do(store, put())
        assert isinstance(outcome, Refused)
        assert outcome.reason == "unavailable"
        with pytest.raises(StoreMismatchError, match="replica"):
            async with opened(server.port):
                pass
        server.command("REPLICAOF", "NO", "ONE")
        assert await ids(store) == []


@pytest.mark.valkey_too
@in_loop
async def test_connections_that_lead_to_a_replica_now_are_made_anew(server: RedisServer) -> None:
    primary = start(server.program, "--repl-diskless-sync-delay", "0")
    try:
        async with proxied(server.port) as proxy, opened(proxy.port) as store:
            assert isinstance(await do(store, put("before")), Stored)
            replicate(server, primary.port)
            proxy.point_to(primary.port, cut=False)  # as a name does whose address changes
            outcomes = [await do(store, put("after")) for _ in range(4)]
            assert [isinstance(each, Refused) for each in outcomes] == [True, True, True, False]
            assert await ids(store) == ["after"]
    finally:
        primary.stop()


@pytest.mark.valkey_too
@in_loop
async def test_a_node_of_a_cluster_needs_the_url_of_a_cluster(server: RedisServer) -> None:
    node = node_of_a_cluster(server.program)
    try:
        with pytest.raises(StoreMismatchError, match=rf"allowed: redis\+cluster://127\.0\.0\.1:{node.port}"):
            async with opened(node.port):
                pass
    finally:
        node.stop()


@in_loop
async def test_another_layout_is_refused(server: RedisServer) -> None:
    server.command("HSET", "{faults:00}:meta", "schema", "99")
    with pytest.raises(StoreMismatchError, match="schema 99"):
        async with opened(server.port):
            pass


@in_loop
async def test_no_server_says_so(server: RedisServer) -> None:
    port = server.port
    server.kill()
    with pytest.raises(StoreUnavailableError, match="is unavailable"):
        async with opened(port):
            pass


@pytest.mark.valkey_too
@in_loop
async def test_a_scheduler_that_starts_before_its_server_delivers_once_that_is_there(server: RedisServer) -> None:
    server.command("CONFIG", "SET", "appendfsync", "always")
    handled = asyncio.Event()
    scheduler = Scheduler(server.url, namespace="faults", open_timeout="2m")

    @scheduler.handler(name=LANE)
    async def handle(payload: bytes) -> None:
        handled.set()

    async def delivered() -> None:
        async with scheduler, asyncio.timeout(60):
            await handled.wait()

    async with Scheduler(server.url, namespace="faults", dispatch=False) as client:
        await client.schedule(b"x", to=f"handler:{LANE}", delay="1ms")
    server.kill()
    with pytest.raises(StoreUnavailableError):  # a client gets its error at once: `open_timeout` is None
        await client.__aenter__()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(delivered())
        async with asyncio.timeout(60):
            while "is unavailable" not in scheduler.status().why:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.02)
        await asyncio.to_thread(server.start)


@in_loop
async def test_replicated_without_replicas_is_unknown(server: RedisServer) -> None:
    hasty = opened_patiently(lambda: opened(server.port, durability="replicated:1", timeout_ms=HASTY_MS))
    async with hasty as store, opened(server.port) as patient:
        command = put()

        async def lacks_replica() -> bool:
            outcome = await do(store, command)
            assert isinstance(outcome, Unknown | Refused), outcome
            return "0 of 1 replicas" in outcome.detail

        await until(lacks_replica, "the server answers in time that no replica has it")
        assert await ids(patient) == ["m"]


@in_loop
async def test_b2_answers_that_come_late_do_not_set_the_clock_back(server: RedisServer) -> None:
    """A wait until something is due would last longer by as much."""
    async with proxied(server.port) as proxy, opened(proxy.port) as store, store.work("w", [LANE]) as work:
        for _ in range(3):
            asking = asyncio.create_task(claim(work))
            await asyncio.sleep(0)
            time.sleep(0.3)  # noqa: ASYNC251 - the fault: a handler keeps the loop for so long
            await asking
        proxy.delay_answers_s = 0.5
        await do(store, put("m", 60_000))
        before_ms = time.time() * 1000
        assert before_ms - 100 < store.now_ms() < time.time() * 1000 + 100


@in_loop
async def test_f33_a_value_that_cannot_be_read_stops_nobody(server: RedisServer) -> None:
    async with opened(server.port) as store, store.work("w", [LANE]) as work:
        await store.apply([put(each) for each in ("cut", "damaged", "fine", "newer")])
        keys = store._keys
        value = await store.command("HGET", keys.key("msg"), b"\x02damaged")
        await store.command("HSET", keys.key("msg"), b"\x02damaged", value[:-9] + b"\xc1" * 9)
        await store.command("HSET", keys.key("msg"), b"\x02cut", b"garbage")
        await store.command("HSET", keys.key("msg"), b"\x02newer", value[:6] + b"\x63" + value[7:])
        assert [each.record.id for each in (await claim(work)).claims] == ["fine"]
        letters = await store.dead_letters()
        assert {(each.record.id, each.reason) for each in letters} == {
            ("cut", "undecodable"),
            ("damaged", "undecodable"),
            ("newer", "undecodable"),
        }
        counts = await store.counts()
        assert counts[LANE].dead == 3
        assert await store.purge([DeadKey(each.record.id, each.record.revision) for each in letters]) == 3
        assert (await store.counts())[LANE].dead == 0


@in_loop
async def test_l5_every_bad_record_of_the_table_is_a_dead_letter_and_stops_nobody(server: RedisServer) -> None:
    bad = {f"bad-{n}": record for n, record in enumerate(REDIS_RECORDS.values())}
    good = [f"good-{n}" for n in range(len(bad))]
    async with opened(server.port) as store, store.work("w", [LANE]) as work:
        await store.apply([put(each) for pair in zip(bad, good, strict=True) for each in pair])
        for name, record in bad.items():
            place = store._keys.key("msg"), b"\x02" + name.encode()
            value = await store.command("HGET", *place)
            await store.command("HSET", *place, value[:6] + record)
        found: list[str] = []
        while len(found) < len(good):
            claims = (await claim(work)).claims
            assert claims, f"{found} of {len(good)} good messages"
            found += [each.record.id for each in claims]
        assert found == good
        letters = await store.dead_letters()
        assert {(each.record.id, each.reason) for each in letters} == {(name, "undecodable") for name in bad}
        assert all(each.record.last_error for each in letters)
        assert await store.get("bad-0") is None


# --- wake-ups ---------------------------------------------------------------------------------------------


@contextmanager
def safety_poll(ms: int) -> Iterator[None]:
    """Have stores look by themselves so often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RedisStore, "traits", replace(RedisStore.traits, safety_poll_ms=ms))
        yield


async def waits(work: Work) -> None:
    """Wait until something may be due; it must end long before the test's time is up."""
    async with asyncio.timeout(60):
        await work.wait(until_ms=None)


@pytest.mark.valkey_too
@in_loop
async def test_a_put_of_another_process_ends_the_wait(server: RedisServer) -> None:
    with safety_poll(ms=600_000):
        async with opened(server.port) as store, opened(server.port) as other, store.work("w", [LANE]) as work:
            work.clear()
            await claim(work)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(waits(work))
                await asyncio.sleep(0)
                assert isinstance(await do(other, put()), Stored)


@in_loop
async def test_f18_a_lost_wake_up_costs_no_more_than_the_safety_poll(server: RedisServer) -> None:
    with safety_poll(ms=300):
        async with opened(server.port) as store, opened(server.port) as other, store.work("w", [LANE]) as work:
            (listening,) = [task for task in asyncio.all_tasks() if "wake-ups" in task.get_name()]
            listening.cancel()
            work.clear()
            await claim(work)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(waits(work))
                await asyncio.sleep(0)
                await do(other, put())
            assert len((await claim(work)).claims) == 1


@pytest.mark.valkey_too
@in_loop
async def test_f18_wake_ups_come_back_after_the_connection_was_killed(server: RedisServer) -> None:
    with safety_poll(ms=600_000):
        async with opened(server.port) as store, opened(server.port) as other, store.work("w", [LANE]) as work:
            server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            with suppress(StoreUnavailableError):
                await claim(work)  # it connects anew
            for number in range(3):
                work.clear()
                assert not (await claim(work)).claims
                command = put(f"m{number}")
                assert any([isinstance(await do(other, command), Stored) for _ in range(4)])
                await waits(work)
                assert [each.record.id for each in (await claim(work)).claims] == [f"m{number}"]


@in_loop
async def test_l2_what_is_written_before_a_late_listener_knows_its_position_wakes_all_the_same(
    server: RedisServer,
) -> None:
    stored = asyncio.Event()

    async def hold(_: int, data: bytes, is_answer: bool) -> None:
        if not is_answer and b"XREVRANGE" in data:
            await stored.wait()

    with safety_poll(ms=600_000), pytest.MonkeyPatch.context() as patched:
        patched.setattr(wakeup_listener, "START_S", 0.01)
        patched.setattr(wakeup_listener, "GRACE_S", 600.0)  # no failed connection wakes the worker
        async with proxied(server.port) as proxy, opened(proxy.port) as store, opened(server.port) as other:
            proxy.look = hold
            async with store.work("w", [LANE]) as work:
                work.clear()
                assert not (await claim(work)).claims
                assert isinstance(await do(other, put("m")), Stored)
                stored.set()
                await waits(work)
                assert [each.record.id for each in (await claim(work)).claims] == ["m"]


@pytest.mark.valkey_too
def test_wake_ups_that_stay_away_are_told_once(
    server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeup_listener, "LONGEST_PAUSE_S", 0.2)
    tries = 0

    read = wakeup_listener.WakeupListener._read

    async def counted(self: wakeup_listener.WakeupListener, connection: object) -> None:
        nonlocal tries
        tries += 1
        await read(self, connection)

    monkeypatch.setattr(wakeup_listener.WakeupListener, "_read", counted)
    server.command("ACL", "SETUSER", "deaf", "on", "nopass", "~*", "+@all", "-xread")

    async def play() -> None:
        url = f"redis://deaf:any@127.0.0.1:{server.port}"
        async with RedisStore(url, namespace="faults") as store, store.work("w", [LANE]):
            await until(lambda: tries > 3 * wakeup_listener.LASTING, "it tries again and again")

    with caplog.at_level(logging.WARNING, "aiodelay.redis"):
        asyncio.run(play())
    (told,) = (each for each in caplog.messages if "no wake-ups" in each)
    assert "xread" in told
