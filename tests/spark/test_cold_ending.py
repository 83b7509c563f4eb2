"""End messages in a store from a cold tier: by version, next to other messages, and before they have arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from aiodelay.backends.registry import open_store
from aiodelay.core.transitions import NO_OP
from aiodelay.core.values import At, Cancel, Conflict, Demand, Done, Envelope, Outcome, Put, Refused, Stored
from aiodelay.errors import StoreUnavailableError
from aiodelay.ports import BulkLoad, Store
from aiodelay.spark import ending
from aiodelay.spark.ending import Ending, end_in
from tests.support.servers import RedisServer, redis_products, start

LANE = "redis-list"
DUE_MS = 2_000_000_000_000


@pytest.fixture(params=["redis", "sqlite"])
def url(request: pytest.FixtureRequest, redis_server: RedisServer, tmp_path: Path) -> str:
    return redis_server.url if request.param == "redis" else f"sqlite:///{tmp_path / 'delay.db'}"


def put(message_id: str, version: int, due_ms: int = DUE_MS) -> Put:
    return Put(NO_OP, Envelope(message_id, LANE, "orders", version=version), At(due_ms), Conflict.newer(version))


async def load(store: Store, *puts: Put) -> Sequence[Outcome]:
    assert isinstance(store, BulkLoad)
    return await store.bulk_load(puts)


def test_what_is_ended_does_not_come_and_what_is_newer_stays(url: str, namespace: str) -> None:
    async def play() -> None:
        async with open_store(url, namespace=namespace, clock=None) as store:
            there = ("pending", "newer", "any", "older", "claimed", "gone", "plain")
            await load(store, *(put(each, 5, 0 if each in ("claimed", "gone") else DUE_MS) for each in there))
            async with store.work("tests", [LANE]) as work:
                claims = (await work.claim({LANE: Demand(2)}, request="1", lease_ms=60_000)).claims
                (gone,) = (each for each in claims if each.record.id == "gone")
                await work.settle([Done("gone", gone.record.revision, gone.token)])
                endings = {
                    Ending("pending", 5, 5): "cancelled",
                    Ending("newer", 4, 4): "newer",
                    Ending("any", None, 4): "cancelled",
                    Ending("older", 6, 6): "cancelled",
                    Ending("claimed", 5, 5): "in_flight",
                    Ending("gone", 5, 5): "ended",
                    Ending("plain", 5, None): "cancelled",
                    Ending("nowhere", 5, None): "ended",
                    Ending("coming", 5, 5): "barred",
                }
                assert dict(zip(endings, await end_in(store, list(endings)), strict=True)) == endings
                # the promotion that had read them writes them only now, and again
                late = ("pending", "any", "claimed", "gone", "plain", "coming")
                outcomes = await load(store, *(put(each, 5) for each in late), put("older", 6))
                assert {each.reason if isinstance(each, Refused) else each for each in outcomes} == {"outdated"}
                pending = [each for each in (*late, "older", "newer", "nowhere") if await store.get(each)]
                assert pending == ["claimed", "newer"], "one is in flight, and goes on"
                (again,) = await load(store, put("coming", 6))
                assert isinstance(again, Stored), "what is put again is a new message"

    asyncio.run(play())


def test_a_newer_version_that_comes_between_look_and_cancel_stays(
    url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = ending._cancels

    async def look_and_be_overtaken(store: Store, endings: Sequence[Ending]) -> tuple[list[Cancel], dict[str, str]]:
        found = await look(store, endings)
        await load(store, put("a", 6))
        return found

    async def play() -> None:
        async with open_store(url, namespace=namespace, clock=None) as store:
            await load(store, put("a", 5), put("b", 5))
            monkeypatch.setattr(ending, "_cancels", look_and_be_overtaken)
            assert await end_in(store, [Ending("a", 5, None), Ending("b", 5, None)]) == ["newer", "cancelled"]
            stands = await store.get("a")
            assert stands is not None
            assert stands.record.envelope.version == 6

    asyncio.run(play())


def test_a_store_that_does_not_answer_is_told(namespace: str) -> None:
    async def play() -> None:
        async with open_store(server.url, namespace=namespace, clock=None) as store:
            server.kill()
            for barred in (1, None):
                with pytest.raises(StoreUnavailableError):
                    await end_in(store, [Ending("a", None, barred)])

    server = start(redis_products()[0].program)
    try:
        asyncio.run(play())
    finally:
        server.stop()
