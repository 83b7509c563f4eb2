"""No script reads much more than 1 MiB for large messages, and tidying moves a bounded number of messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.core.ids import new_id, new_op
from aiodelay.core.values import (
    After,
    Again,
    Claim,
    Dead,
    DeadKey,
    Demand,
    Done,
    Envelope,
    Late,
    Put,
    Query,
    Renewal,
    RenewOutcome,
    Reschedule,
    Stored,
)
from aiodelay.ports import Work
from aiodelay.redis import RedisStore
from aiodelay.testing.clock import VirtualClock
from tests.support.servers import Found, redis_servers

LANE = "work"
N, SIZE = 24, 1 << 18
AT_ONCE = 5
"""So many of that size are 1 MiB and one more."""


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def url(request: pytest.FixtureRequest, shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(request.param)


class Watched(RedisStore):
    """Keeps what scripts answered, by name."""

    def __init__(self, url: str, **options: Any) -> None:  # noqa: ANN401 - as in the store
        super().__init__(url, **options)
        self.answers: dict[str, list[Any]] = {}

    async def run(self, script: str, arguments: Sequence[Arg], *, durable: bool = False) -> Any:  # noqa: ANN401 - as in the store
        reply = await super().run(script, arguments, durable=durable)
        self.answers.setdefault(script, []).append(reply)
        return reply

    async def _run_parts(self, script: str, parts: Sequence[Sequence[Arg]]) -> list[Any]:
        replies = await super()._run_parts(script, parts)
        self.answers.setdefault(script, []).extend(replies)
        return replies

    def most(self, script: str) -> int:
        """Return the length of the longest answer so far, and forget them."""
        return max(map(len, self.answers.pop(script)))


async def put(store: RedisStore, n: int, size: int, address: str = "") -> None:
    for start in range(0, n, 500):
        names = (f"{address}-{i}" for i in range(start, min(n, start + 500)))
        await store.apply(
            [Put(new_op(), Envelope(name, LANE, address, payload=bytes(size)), After(0)) for name in names]
        )


async def claim(work: Work, n: int) -> list[Claim]:
    """Claim due messages, with as many calls as it takes."""
    claims: list[Claim] = []
    while len(claims) < n:
        claims += (await work.claim({LANE: Demand(n - len(claims))}, request=new_id(), lease_ms=15_000)).claims
    return claims


def test_a_call_blocks_the_server_only_for_as_many_messages_as_it_handles_in_some_milliseconds(url: str) -> None:
    """The more work a message is, the fewer messages a script handles."""

    async def play() -> None:
        clock = VirtualClock()
        async with Watched(url, namespace="cost", clock=clock) as store, store.work("w", [LANE]) as work:
            puts = [Put(new_op(), Envelope(new_id(), LANE, payload=b"x"), After(0)) for _ in range(500)]
            await store.apply(puts)
            assert store.most("apply") == 1 + 170
            await store.apply([Put(new_op(), each.envelope, each.due) for each in puts])
            assert store.most("apply") == 1 + 57
            await store.apply([Reschedule(new_op(), each.id, After(0)) for each in puts])
            assert store.most("apply") == 1 + 56
            claims = await claim(work, 500)
            assert store.most("claim") == 7 + 2 * 500
            await work.settle([Again(*key, clock.now_ms(), 1, "no") for key in keys(claims)])
            assert store.most("settle") == 41
            claims = await claim(work, 500)
            await work.settle([Done(*key) for key in keys(claims)])
            assert store.most("settle") == 500
            store.answers.clear()
            await store.apply([Put(new_op(), each.envelope, After(0), late=Late.drop("1h")) for each in puts])
            claims = await claim(work, 500)
            assert store.most("claim") == 7 + 2 * 250
            await work.settle([Dead(*key, "rejected", 1, "no") for key in keys(claims)])
            assert store.most("settle") == 41
            await store.redrive([DeadKey(*key[:2]) for key in keys(claims)])
            assert store.most("redrive") == 40

    asyncio.run(play())


def test_s9_commands_behind_a_part_that_was_cut_short_wait_for_its_rest(url: str) -> None:
    async def play() -> None:
        async with Watched(url, namespace="order", clock=VirtualClock()) as store, store.work("w", [LANE]) as work:
            names = [new_id() for _ in range(500)]
            await store.apply([Put(new_op(), Envelope(name, LANE), After(60_000)) for name in names[:150]])
            outcomes = await store.apply([Put(new_op(), Envelope(name, LANE), After(0)) for name in names])
            assert [type(each) for each in outcomes] == [Stored] * 500
            assert [each.record.id for each in await claim(work, 500)] == names

    asyncio.run(play())


def test_a_batch_is_stored_although_the_server_has_forgotten_the_script(url: str) -> None:
    async def play() -> None:
        async with Watched(url, namespace="forgotten") as store:
            await store.command("SCRIPT", "FLUSH")
            await put(store, 500, 1)
            assert (await store.counts())[LANE].overdue == 500

    asyncio.run(play())


def keys(claims: Sequence[Claim]) -> list[tuple[str, int, int]]:
    return [(each.record.id, each.record.revision, each.token) for each in claims]


def test_large_messages_are_read_few_at_a_time(url: str) -> None:
    async def play() -> None:
        clock = VirtualClock()
        async with Watched(url, namespace="large", clock=clock) as store, store.work("w", [LANE]) as work:
            await put(store, N, SIZE)
            assert len(await store.search(Query(limit=N))) == N
            assert store.most("look") <= 2 + 2 * AT_ONCE
            claims: list[Claim] = []
            while len(claims) < N:
                request = f"r{len(claims)}"
                claims += (await work.claim({LANE: Demand(N)}, request=request, lease_ms=15_000)).claims
            key = [(each.record.id, each.record.revision, each.token + 4096) for each in claims]
            renewed = await work.renew([Renewal(name, revision, to - 4096, to) for name, revision, to in key])
            assert renewed == [RenewOutcome.RENEWED] * N
            assert store.most("renew") <= AT_ONCE
            await work.settle([Dead(*each, "rejected", 1, "no") for each in key])
            letters = await store.dead_letters(limit=N)
            outcomes = await store.redrive([each.key for each in letters])
            assert [type(each) for each in outcomes] == [Stored] * N
            assert store.most("redrive") <= AT_ONCE
            for i in range(N):
                await work.claim({LANE: Demand(N)}, request=f"again{i}", lease_ms=15_000)
            clock.move(15_001)
            assert (await work.tidy([LANE], limit=500)).lapsed == N
            assert max(int(each[1]) for each in store.answers.pop("tidy")) <= AT_ONCE
            assert await store.purge([each.key for each in letters]) == 0
            clock.move(15_001)

    asyncio.run(play())


def test_late_large_messages_are_dropped_few_at_a_time(url: str) -> None:
    async def play() -> None:
        clock = VirtualClock()
        async with Watched(url, namespace="late", clock=clock) as store, store.work("w", ["other"]) as work:
            envelopes = [Envelope(f"m{i}", LANE, payload=bytes(SIZE)) for i in range(N)]
            await store.apply([Put(new_op(), each, After(0), late=Late.dead_letter("1s")) for each in envelopes])
            clock.move(1_001)
            assert (await work.tidy(["other"], limit=500)).expired == N
            assert max(int(each[2]) for each in store.answers["tidy"]) <= AT_ONCE
            letters = await store.dead_letters(limit=N)
            assert await store.purge([each.key for each in letters]) == N
            assert store.most("redrive") <= AT_ONCE

    asyncio.run(play())


def test_what_waits_aside_returns_a_bounded_number_at_a_time(url: str) -> None:
    """From 40 addresses whose hold was released by a process that ended at once."""

    async def play() -> None:
        async with Watched(url, namespace="aside") as store, store.work("w", [LANE]) as work:
            for i in range(40):
                await store.pause(LANE, f"a{i}")
                await put(store, 50, 1, f"a{i}")
            await store.command("DEL", "{aside:00}:holds")
            counts: list[int] = []
            while sum(counts) < 2_000:
                before = (await store.counts())[LANE].overdue
                await work.tidy([LANE], limit=500)
                counts.append((await store.counts())[LANE].overdue - before)
            assert max(counts) <= 500

    asyncio.run(play())


def test_a_release_that_was_cut_short_goes_on_when_it_is_repeated(url: str) -> None:
    async def play() -> None:
        async with Watched(url, namespace="cut") as store:
            await store.pause(LANE, "a")
            await put(store, 2_000, 1, "a")
            await store.run("hold", ["release", LANE, ":a"])
            assert await store.resume(LANE, "a") is False
            assert (await store.counts())[LANE].overdue == 2_000

    asyncio.run(play())


async def pages(store: RedisStore, limit: int) -> list[str]:
    found: list[str] = []
    after = None
    while page := await store.search(Query(limit=limit, after=after)):
        found += [each.record.id for each in page]
        after = page[-1].next_attempt_ms, page[-1].record.id
    return found


def test_what_comes_due_at_one_instant_is_listed_a_part_at_a_time(url: str) -> None:
    async def play() -> None:
        async with Watched(url, namespace="instant", clock=VirtualClock()) as store, store.work("w", [LANE]) as work:
            await put(store, 3_000, 1)
            names = sorted(f"-{i}" for i in range(3_000))
            assert await pages(store, 700) == names
            await claim(work, 1_500)
            assert await pages(store, 1_000) == names
            for i in range(20):
                await store.pause(LANE, f"{i}")
                await put(store, 100, 1, f"{i}")
            assert await pages(store, 900) == sorted([*names, *(f"{i}-{j}" for i in range(20) for j in range(100))])
            assert store.most("range") <= 2 + 2 * 2_000

    asyncio.run(play())


def test_large_messages_in_flight_are_listed_a_few_at_a_time(url: str) -> None:
    async def play() -> None:
        async with Watched(url, namespace="in flight", clock=VirtualClock()) as store, store.work("w", [LANE]) as work:
            await put(store, N, SIZE)
            for i in range(N):
                await work.claim({LANE: Demand(N)}, request=f"r{i}", lease_ms=15_000)
            assert await pages(store, N) == sorted(f"-{i}" for i in range(N))
            assert store.most("range") <= 2 + 2 * 2 * AT_ONCE

    asyncio.run(play())


def test_dead_letters_of_one_instant_are_listed_a_part_at_a_time(url: str) -> None:
    async def play() -> None:
        async with Watched(url, namespace="graves", clock=VirtualClock()) as store, store.work("w", [LANE]) as work:
            await put(store, 1_500, 1)
            claims = await claim(work, 1_500)
            key = ((each.record.id, each.record.revision, each.token) for each in claims)
            await work.settle([Dead(*each, "rejected", 1) for each in key])
            found: list[str] = []
            after = None
            while letters := await store.dead_letters(after=after, limit=400):
                found += [each.record.id for each in letters]
                last = letters[-1]
                after = last.at_ms, last.record.id, last.record.revision
            assert found == sorted(f"-{i}" for i in range(1_500))
            assert store.most("range") <= 2 + 2 * 1_000

    asyncio.run(play())


def test_the_load_of_many_addresses_is_counted_a_part_at_a_time(url: str) -> None:
    async def play() -> None:
        clock = VirtualClock()
        async with Watched(url, namespace="load", clock=clock) as store:
            for i in range(60):
                await store.pause(LANE, f"{i}")
                envelopes = (Envelope(f"{i}-{j}", LANE, f"{i}") for j in range(100))
                await store.apply([Put(new_op(), each, After(j * 10)) for j, each in enumerate(envelopes)])
            load = await store.load(bucket_ms=100, buckets=50)
            assert [each.messages for each in load] == [600] * 10
            assert [each.from_ms for each in load] == [clock.now_ms() + i * 100 for i in range(10)]
            assert len(store.answers["load"]) == 15

    asyncio.run(play())
