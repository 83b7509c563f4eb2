"""A claiming process polls all lanes at once. Lanes that its store moves itself are not polled in addition."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest

from aiodelay.backends.redis import RedisListSink, RedisStore
from aiodelay.backends.redis.store import transfer
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


def test_what_claims_look_at_is_not_polled_besides(server_url: str) -> None:
    async def play() -> None:
        async with idle(server_url, uuid4().hex) as (work, moving):
            waiting = asyncio.ensure_future(moving.wait(until_ms=None))
            for _ in range(6):
                await asyncio.sleep(POLL_S / 4)  # looks that come sooner than polls
                await look(work)
            assert not waiting.done()
            await asyncio.wait_for(waiting, 2 * POLL_S)  # nobody looks any more

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
