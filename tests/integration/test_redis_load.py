"""A bulk load leaves only its messages in Redis: no ops, and no tombstones of replaced messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Conflict, Envelope, Put, Stored
from aiodelay.redis import RedisStore
from tests.support.servers import RedisServer, redis_products, start


@pytest.fixture(params=redis_products(), ids=lambda found: found.name)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = start(request.param.program)
    yield server
    server.stop()


def versioned(version: int) -> list[Put]:
    return [
        Put(new_op(), Envelope(f"m{n}", "work", version=version), After(60_000), Conflict.newer(version))
        for n in range(1_000)
    ]


def test_a_load_leaves_neither_ops_nor_tombstones(server: RedisServer) -> None:
    async def remembered(store: RedisStore) -> dict[str, set[str]]:
        windows = await store.command("KEYS", "{load:00}:done:*") + await store.command("KEYS", "{load:00}:ended:*")
        found: dict[str, set[str]] = {}
        for name in windows:
            kinds = {key[:1].decode() for key in await store.command("HKEYS", name)}
            found[name.decode()[10:14]] = found.get(name.decode()[10:14], set()) | kinds
        return found

    async def play() -> None:
        async with RedisStore(server.url, namespace="load") as store:
            for version, answer in ((1, "stored"), (2, "replaced")):
                outcomes = await store.bulk_load(versioned(version))
                assert {each.answer for each in outcomes if isinstance(each, Stored)} == {answer}
            assert all(not isinstance(each, Stored) for each in await store.bulk_load(versioned(2)))
            assert await remembered(store) == {"done": {"r"}}, "revisions, for half a minute"
            await store.apply(versioned(3)[:1])
            assert await remembered(store) == {"done": {"r", "o"}}, "an ordinary command's op is remembered"

    asyncio.run(play())
