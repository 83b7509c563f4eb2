"""Inspection in pages while others work: a page that became empty meanwhile is not the last page."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.records.keys import Keys
from aiodelay.core.ids import new_op
from aiodelay.core.values import (
    After,
    Cancel,
    Dead,
    DeadKey,
    Demand,
    Envelope,
    Put,
    Query,
    Refused,
    Reschedule,
    Snapshot,
)
from aiodelay.redis import RedisStore
from tests.support.servers import redis_servers, serving

LANE = "work"


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as url:
        yield url


class Interrupted(RedisStore):
    """Something happens, once, when a page's places have been read and its messages have not."""

    meanwhile: Callable[[], Awaitable[object]] | None = None

    async def run(self, script: str, arguments: Sequence[Arg], *, durable: bool = False) -> Any:  # noqa: ANN401 - as in the store
        reply = await super().run(script, arguments, durable=durable)
        if script == "range" and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        return reply


async def put(store: RedisStore, names: Sequence[str]) -> None:
    await store.apply([Put(new_op(), Envelope(name, LANE), After(i)) for i, name in enumerate(names)])


async def pages(store: RedisStore, limit: int) -> list[str]:
    found: list[Snapshot] = []
    query = Query(limit=limit)
    while page := await store.search(query):
        found += page
        query = Query(limit=limit, after=(page[-1].next_attempt_ms, page[-1].record.id))
    return [each.record.id for each in found]


def test_what_ended_between_places_and_messages_is_followed_by_the_next(url: str) -> None:
    async def play() -> None:
        async with Interrupted(url, namespace="ended") as store:
            names = [f"m{i}" for i in range(9)]
            await put(store, names)
            store.meanwhile = lambda: store.apply([Cancel(new_op(), name) for name in names[:4]])
            assert [each.record.id for each in await store.search(Query(limit=4))] == names[4:8]
            store.meanwhile = lambda: store.apply([Cancel(new_op(), name) for name in names[4:]])
            assert await store.search(Query(limit=40)) == []

    asyncio.run(play())


def test_what_moved_between_places_and_messages_hides_nothing(url: str) -> None:
    async def play() -> None:
        async with Interrupted(url, namespace="moved") as store:
            names = [f"m{i}" for i in range(9)]
            await put(store, names)
            store.meanwhile = lambda: store.apply([Reschedule(new_op(), "m1", After(60_000))])
            found = await pages(store, limit=3)
            assert found[:9] == names
            assert found[9:] == ["m1"], "and once more, at its new place"

    asyncio.run(play())


async def give_up(store: RedisStore, names: Sequence[str]) -> None:
    await store.apply([Put(new_op(), Envelope(name, LANE), After(0)) for name in names])
    async with store.work("w", [LANE]) as work:
        for start in range(0, len(names), 500):
            claims = (await work.claim({LANE: Demand(500)}, request=f"r{start}", lease_ms=15_000)).claims
            await work.settle(
                [Dead(each.record.id, each.record.revision, each.token, "rejected", 1) for each in claims]
            )


def test_dead_letters_without_an_index_by_id_are_indexed_when_one_is_looked_for(url: str) -> None:
    async def play() -> None:
        names = [f"m{i}" for i in range(1_203)]
        async with RedisStore(url, namespace="unindexed") as store:
            index = Keys("unindexed").key("graves:ids")
            await give_up(store, names[:-1])
            await store.command("UNLINK", index)  # as versions had it that did not know it
            await give_up(store, names[-1:])
            for name in (names[0], names[600], names[-1]):
                (letter,) = await store.dead_letters(message_id=name)
                assert letter.record.id == name
            assert await store.command("ZCARD", index) == len(names)
            letters = await store.dead_letters(limit=1_000)
            assert await store.purge([each.key for each in letters]) == 1_000
            assert await store.command("ZCARD", index) == 203

    asyncio.run(play())


def test_dead_letters_of_one_message_are_found_without_reading_others(url: str) -> None:
    async def play() -> None:
        async with RedisStore(url, namespace="by-id") as store:
            await give_up(store, [f"m{i}" for i in range(300)])
            await store.dead_letters(message_id="m7")  # loads the script
            before = await commands_run(store)
            for _ in range(10):
                (letter,) = await store.dead_letters(message_id="m7")
            assert letter.record.id == "m7"
            after = await commands_run(store)
            ran = {name: n - before.get(name, 0) for name, n in after.items() if n > before.get(name, 0)}
            assert "hscan" not in ran, ran
            assert "zrangebyscore" not in ran, ran
            assert sum(n for name, n in ran.items() if name != "info") <= 10 * 10, ran

    asyncio.run(play())


def test_a_dead_letter_that_cannot_be_read_is_not_redriven(url: str) -> None:
    async def play() -> None:
        async with RedisStore(url, namespace="unreadable") as store:
            await give_up(store, ["m"])
            (letter,) = await store.dead_letters()
            key = b"\x02m" + letter.key.revision.to_bytes(6, "big")
            await store.command("HSET", Keys("unreadable").key("dead"), key, b"\xff\x00\x01rubbish")
            (outcome,) = await store.redrive([letter.key])
            assert isinstance(outcome, Refused)
            assert outcome.reason == "undecodable"
            (letter,) = await store.dead_letters(message_id="m")
            assert (letter.reason, letter.record.envelope.payload) == ("undecodable", b"rubbish")

    asyncio.run(play())


async def commands_run(store: RedisStore) -> dict[str, int]:
    """Return how often the server has carried out each command so far."""
    answer: bytes = await store.command("INFO", "commandstats")
    found = re.findall(r"cmdstat_([^:]+):calls=(\d+)", answer.decode())
    return {name: int(calls) for name, calls in found}


def test_dead_letters_that_were_purged_meanwhile_are_followed_by_the_next(url: str) -> None:
    async def play() -> None:
        async with Interrupted(url, namespace="purged") as store, store.work("w", [LANE]) as work:
            await put(store, [f"m{i}" for i in range(6)])
            await asyncio.sleep(0.05)  # all are due, by the server's clock
            claims = (await work.claim({LANE: Demand(9)}, request="r", lease_ms=15_000)).claims
            dead = [Dead(each.record.id, each.record.revision, each.token, "rejected", 1) for each in claims]
            await work.settle(dead)
            letters = await store.dead_letters()
            keys = [DeadKey(each.record.id, each.record.revision) for each in letters]
            store.meanwhile = lambda: store.purge(keys[:3])
            assert [each.key for each in await store.dead_letters(limit=3)] == keys[3:]

    asyncio.run(play())
