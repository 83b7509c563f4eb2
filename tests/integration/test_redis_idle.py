"""A claiming process polls all lanes at once. Lanes that its store moves itself are not polled in addition."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
from msgspec import structs

from aiodelay.backends.redis import RedisListSink, RedisStore
from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.store import transfer
from aiodelay.backends.redis.store import work as work_of_store
from aiodelay.backends.redis.store.work import RedisWork
from aiodelay.core.ids import new_id, new_op
from aiodelay.core.values import After, Demand, Envelope, Put, Stored
from aiodelay.ports import Transferring, Work
from tests.support.servers import Found, redis_servers

POLL_S = 2.0
"""Without a hint, nothing is looked for later than this."""


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def server_url(request: pytest.FixtureRequest, shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(request.param)


@asynccontextmanager
async def idle(url: str, namespace: str) -> AsyncIterator[tuple[Work, Transferring]]:
    """Open both roles; no hint from other processes reaches them, and nothing is there."""
    async with RedisStore(url, namespace=namespace) as store:
        with store.transferring(RedisListSink(url)) as moving:
            assert (await moving.transfer(Demand(1))).next_due_ms is None
            yield RedisWork(store, "w"), moving


async def put_elsewhere(url: str, namespace: str, delay_ms: int) -> None:
    async with RedisStore(url, namespace=namespace) as store:
        envelope = Envelope(new_id(), "redis-list", address=f"list-{namespace}")
        assert isinstance((await store.apply([Put(new_op(), envelope, After(delay_ms))]))[0], Stored)


async def look(work: Work) -> None:
    await work.claim({"orders": Demand(1)}, request=new_id(), lease_ms=1_000)


async def waiting_beside_looks(work: Work, moving: Transferring) -> asyncio.Future[None]:
    """Begin a wait, and look more often than polls come. If this process stood still meanwhile, begin again."""
    clock = asyncio.get_running_loop().time
    while True:
        begun_s, longest_s = clock(), 0.0
        await look(work)
        waiting = asyncio.ensure_future(moving.wait(until_ms=None))
        for _ in range(6):
            await asyncio.sleep(POLL_S / 4)
            next_s = clock()
            await look(work)
            longest_s, begun_s = max(longest_s, clock() - begun_s), next_s
        if longest_s < 0.9 * POLL_S:
            return waiting
        waiting.cancel()


def test_what_claims_look_at_is_not_polled_besides(server_url: str) -> None:
    async def play() -> None:
        async with idle(server_url, uuid4().hex) as (work, moving):
            waiting = await waiting_beside_looks(work, moving)
            assert not waiting.done()
            await asyncio.wait_for(waiting, 60)  # nobody looks any more

    asyncio.run(play())


@pytest.mark.parametrize("planned", [True, False])
def test_a_claim_that_finds_something_for_a_moved_lane_says_so(
    server_url: str, monkeypatch: pytest.MonkeyPatch, planned: bool
) -> None:
    monkeypatch.setattr(transfer, "SAFETY_POLL_S", 60.0)

    async def play() -> None:
        namespace = uuid4().hex
        async with idle(server_url, namespace) as (work, moving):
            if planned:
                await put_elsewhere(server_url, namespace, 60_000)
            until_ms = (await moving.transfer(Demand(1))).next_due_ms
            assert (until_ms is not None) is planned
            waiting = asyncio.ensure_future(moving.wait(until_ms=until_ms))
            await look(work)
            await put_elsewhere(server_url, namespace, 0)
            await asyncio.sleep(0)
            assert not waiting.done()
            await look(work)
            await asyncio.wait_for(waiting, 20)

    asyncio.run(play())


class Glancing(RedisStore):
    """Polls often, and counts its safety polls."""

    traits = structs.replace(RedisStore.traits, safety_poll_ms=20)

    def __init__(self, url: str, namespace: str) -> None:
        super().__init__(url, namespace=namespace)
        self.polls = 0
        self.polled = asyncio.Event()

    async def _commands(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        found = await super()._commands(commands)
        self.polls += 1
        self.polled.set()
        return found

    async def polls_again(self, n: int) -> None:
        """Wait for some more safety polls."""
        wanted = self.polls + n
        while self.polls < wanted:
            self.polled.clear()
            await asyncio.wait_for(self.polled.wait(), 20)


@asynccontextmanager
async def waiting(url: str, namespace: str) -> AsyncIterator[tuple[Glancing, RedisWork, asyncio.Future[None]]]:
    """A worker without wake-ups, which has just found nothing to claim."""
    async with Glancing(url, namespace) as store:
        work = RedisWork(store, "w")
        claimed = await work.claim({"orders": Demand(1)}, request=new_id(), lease_ms=1_000)
        assert not claimed.claims
        wait = asyncio.ensure_future(work.wait(until_ms=claimed.next_due_ms))
        yield store, work, wait
        wait.cancel()


@pytest.fixture
def _no_look_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stands still before it answers a look must not seem to have stepped its clock."""
    monkeypatch.setattr(work_of_store, "CLOCK_STEP_MS", 60_000)


def order(delay_ms: int, lane: str = "orders") -> Put:
    return Put(new_op(), Envelope(new_id(), lane), After(delay_ms))


@pytest.mark.usefixtures("_no_look_is_late")
def test_l2_a_safety_poll_of_a_store_that_has_not_changed_claims_nothing(server_url: str) -> None:
    async def play() -> None:
        namespace = uuid4().hex
        async with RedisStore(server_url, namespace=namespace) as other:
            await other.apply([order(60_000)])
            async with waiting(server_url, namespace) as (store, _, wait):
                await store.polls_again(5)
                assert not wait.done()

    asyncio.run(play())


async def put(store: RedisStore, meta: str) -> None:
    await store.apply([order(0)])


async def claim_elsewhere(store: RedisStore, meta: str) -> None:
    """Lease a message in another process, which may end at once."""
    await RedisWork(store, "other").claim({"others": Demand(1)}, request=new_id(), lease_ms=1_000)


async def switch_on(store: RedisStore, meta: str) -> None:
    await store.switch_on(["some feature"])


async def lose(store: RedisStore, meta: str) -> None:
    await store.command("DEL", meta)


@pytest.mark.usefixtures("_no_look_is_late")
@pytest.mark.parametrize("change", [put, claim_elsewhere, switch_on, lose])
def test_l2_a_safety_poll_finds_each_change_that_may_bring_a_claim(
    server_url: str, change: Callable[[RedisStore, str], Awaitable[None]]
) -> None:
    async def play() -> None:
        namespace = uuid4().hex
        async with RedisStore(server_url, namespace=namespace) as other:
            await other.apply([order(0, "others")])
            async with waiting(server_url, namespace) as (store, _, wait):
                await store.polls_again(2)
                assert not wait.done()
                await change(other, f"{{{namespace}:00}}:meta")
                await asyncio.wait_for(wait, 20)

    asyncio.run(play())


def test_l2_a_repeated_command_changes_the_marks(server_url: str) -> None:
    """The first call may have failed behind the write of its message."""

    async def play() -> None:
        async with RedisStore(server_url, namespace=uuid4().hex) as store:
            put = order(60_000)
            await store.apply([put])
            _, before = await store.glance.look()
            await store.apply([put])
            _, after = await store.glance.look()
            assert after != before

    asyncio.run(play())


def test_l2_while_something_is_paused_each_safety_poll_claims(server_url: str) -> None:
    async def play() -> None:
        namespace = uuid4().hex
        async with RedisStore(server_url, namespace=namespace) as other:
            await other.pause("orders", "somebody")
            async with waiting(server_url, namespace) as (_, _, wait):
                await asyncio.wait_for(wait, 20)

    asyncio.run(play())


def test_l1_a_safety_poll_finds_that_the_clock_of_the_server_was_stepped(server_url: str) -> None:
    async def play() -> None:
        async with waiting(server_url, uuid4().hex) as (store, _, wait):
            ahead_ms = store.now_ms() + 60_000  # as an answer would say before the clock was stepped back
            store.heard(b"%d" % ahead_ms, asyncio.get_running_loop().time())
            await asyncio.wait_for(wait, 20)

    asyncio.run(play())


def test_l4_housekeeping_wakes_the_loops_if_a_message_is_overdue(server_url: str) -> None:
    """A script that failed may have stored the message without a trace in the marks."""

    async def play() -> None:
        namespace = uuid4().hex
        meta = f"{{{namespace}:00}}:meta"
        async with RedisStore(server_url, namespace=namespace) as other:
            await other.apply([order(60_000)])
            async with waiting(server_url, namespace) as (store, work, wait):
                store.waiters.add(work.waiter)
                before = await other.command("HGET", meta, "seq")
                await other.apply([order(0)])
                await other.command("HSET", meta, "seq", before)
                await store.polls_again(2)
                if not wait.done():  # A poll may have come between the two commands.
                    await work.tidy(["orders"], limit=10)
                await asyncio.wait_for(wait, 20)

    asyncio.run(play())
