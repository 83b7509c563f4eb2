"""F10: a primary that Sentinels have replaced may still take writes. A process that can reach it writes elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import pytest

from aiodelay.backends.redis.connection import locator
from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Envelope, Put, Stored
from aiodelay.redis import RedisStore
from tests.support.proxy import Proxy, proxied_by_thread
from tests.support.servers import RedisServer, redis_products, replicated_until_ns
from tests.support.slow_stores import opened_patiently
from tests.support.topologies import PRIMARY, Sentinel, SentinelTrio, watched
from tests.support.waiting import until, until_sync

NAMESPACE, MESSAGES = "faults", "{faults:00}:msg"
FAILOVER_MS = 60_000
"""The leader of a failover announces its end after this time, whether it is over or not."""
FOUND_S = 30.0
"""Less than `FAILOVER_MS`."""
CUT_OFF = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "1")


@pytest.fixture(params=redis_products(), ids=lambda found: found.name)
def program(request: pytest.FixtureRequest) -> str:
    return str(request.param.program)


@contextmanager
def fronts_of(sentinels: list[Sentinel]) -> Iterator[list[Proxy]]:
    """Run a proxy in front of each Sentinel."""
    with ExitStack() as stack:
        yield [stack.enter_context(proxied_by_thread(each.port)) for each in sentinels]


@asynccontextmanager
async def opened(fronts: list[Proxy], trio: SentinelTrio, options: str = "") -> AsyncIterator[RedisStore]:
    """Open a store that reaches the Sentinels through proxies, and the servers without a proxy."""
    hosts = ",".join(f"127.0.0.1:{each.port}" for each in fronts)
    url = f"redis+sentinel://{hosts}/{PRIMARY}?{trio.announce}{options}"
    async with RedisStore(url, namespace=NAMESPACE) as store:
        yield store


async def put(store: RedisStore, message_id: str) -> bool:
    """Schedule a message. Return whether the store has acknowledged it."""
    return isinstance((await store.apply([Put(new_op(), Envelope(message_id, "work"), After(0))]))[0], Stored)


async def is_put(store: RedisStore, message_id: str) -> None:
    """Schedule a message, and repeat it until the store acknowledges it."""
    await until(lambda: put(store, message_id), f"{message_id} is acknowledged")


def messages(server: RedisServer) -> int:
    return int(server.command("HLEN", MESSAGES)[1:])


def names(sentinel: Sentinel) -> int:
    """Return the port of the server that a Sentinel names as the primary."""
    return int(sentinel.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", PRIMARY).split(b"\r\n")[4])


def test_f10_a_primary_that_comes_back_gets_no_writes(program: str) -> None:
    """The announcements of the Sentinels do not arrive: a firewall may forget an idle connection."""

    async def play(trio: SentinelTrio, fronts: list[Proxy]) -> None:
        former, new = trio.servers
        async with opened(fronts, trio) as store:
            await is_put(store, "before")
            await asyncio.to_thread(replicated_until_ns, former, new)
            for each in fronts:
                each.freeze()
            former.kill()
            await until(lambda: trio.primary() is new, "the replica is the primary")
            former.start()
            await is_put(store, "after")
            assert messages(new) == 2

            # Now only a Sentinel answers that has not heard of the change.
            for sentinel in trio.sentinels:
                sentinel.kill()
            late = Sentinel(program, former.port)
            try:
                late.start()
                fronts[0].point_to(late.port)
                new.command("CLIENT", "KILL", "TYPE", "normal")
                await is_put(store, "later")
            finally:
                late.stop()
            assert messages(new) == 3

    with watched(program) as trio, fronts_of(trio.sentinels) as fronts:
        asyncio.run(play(trio, fronts))


def test_f10_a_primary_that_is_cut_off_from_its_replicas_is_left(program: str) -> None:
    """The former primary waits for its replicas, then refuses writes. No announcement arrives."""

    async def play(trio: SentinelTrio, fronts: list[Proxy]) -> None:
        former, new, _ = trio.servers
        options = "&durability=replicated:1&timeout_ms=500"
        async with opened_patiently(lambda: opened(fronts, trio, options)) as store:
            await is_put(store, "before")
            await asyncio.to_thread(replicated_until_ns, former, new)  # the other replica may have confirmed it
            for each in fronts:
                each.freeze()
            trio.link.mode = "black hole"
            await is_put(store, "after")
            assert messages(new) == 2
            await until(lambda: former.command("SET", "probe", "x").startswith(b"-NOREPLICAS"), "it refuses writes")

    with watched(program, *CUT_OFF, replicas=2) as trio, fronts_of(trio.sentinels) as fronts:
        asyncio.run(play(trio, fronts))


def test_f10_a_failover_that_is_not_over_counts(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica stands still, so the Sentinel that leads the failover does not announce its end."""
    monkeypatch.setattr(locator, "ASK_S", FAILOVER_MS / 1000)
    lock, is_over = threading.Lock(), threading.Event()

    def fail_over(trio: SentinelTrio) -> None:
        leader, other, _ = trio.sentinels
        with lock:
            if is_over.is_set():
                return
            until_sync(lambda: leader.command("SENTINEL", "FAILOVER", PRIMARY) == b"+OK\r\n", "a failover begins")
            until_sync(lambda: {names(leader), names(other)} == {trio.servers[1].port}, "both name the new primary")
            is_over.set()

    async def play(trio: SentinelTrio, fronts: list[Proxy]) -> None:
        new = trio.servers[1]

        async def look(number: int, data: bytes, is_answer: bool) -> None:
            if is_answer and b"config-epoch" in data:
                await asyncio.to_thread(fail_over, trio)

        async with opened(fronts, trio, "&timeout_ms=60000") as store:
            await is_put(store, "before")
            await asyncio.to_thread(replicated_until_ns, trio.servers[0], new)
            for front in fronts:
                front.look = look
                front.cut()
            while not is_over.is_set():  # until the store asks again, and gets answers from before the failover
                await put(store, "before")

            async def is_in_new() -> bool:
                await is_put(store, "after")
                return messages(new) == 2

            await until(is_in_new, "the new primary gets the writes", FOUND_S)
        async with opened(fronts[:1], trio) as store:
            await is_put(store, "later")
        assert messages(new) == 3

    with watched(program, replicas=2) as trio, fronts_of(trio.sentinels[:2]) as fronts:
        for each in trio.sentinels:
            for setting in ("down-after-milliseconds", "failover-timeout"):
                each.command("SENTINEL", "SET", PRIMARY, setting, f"{FAILOVER_MS}")
        os.kill(trio.servers[2].pid, signal.SIGSTOP)
        asyncio.run(play(trio, fronts))
