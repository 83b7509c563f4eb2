"""S7, L1 on Redis: with renewals every 20 ms between settlements, none is refused and no message runs twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Self, cast

import pytest
from msgspec.structs import replace

from aiodelay import Context, Scheduler
from aiodelay.core.ids import new_op
from aiodelay.core.transitions import token_for
from aiodelay.core.values import (
    After,
    Again,
    Claim,
    Claimed,
    Demand,
    Done,
    Envelope,
    Put,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
)
from aiodelay.ports import Work
from aiodelay.redis import RedisStore
from tests.support.servers import redis_products, serving

LANE = "work"
RENEWED_EVERY_MS = 20
COUNTERS = 4096
LEASE_MS = 15_000
OFFSET = (LEASE_MS - 3 * RENEWED_EVERY_MS) * COUNTERS
"""Between the tokens of the lease book, which renews at a third of its short lease, and those of the store."""


@pytest.fixture(params=redis_products(), ids=lambda found: found.name)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as url:
        yield url


class LongLeases:
    """A store whose leases last long, for a lease book that believes them to be short; it counts outcomes."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self.outcomes: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._store, name)

    async def __aenter__(self) -> Self:
        await self._store.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._store.__aexit__(*exc_info)

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[str]) -> AsyncIterator[Work]:
        async with self._store.work(worker, lanes) as work:
            yield cast(Work, _LongWork(work, self.outcomes))  # the rest is passed on


class _LongWork:
    def __init__(self, work: Work, outcomes: Counter[str]) -> None:
        self._work, self._outcomes = work, outcomes

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._work, name)

    async def claim(self, demand: Mapping[str, Demand], *, request: str, lease_ms: int) -> Claimed:
        claimed = await self._work.claim(demand, request=request, lease_ms=LEASE_MS)
        return replace(claimed, claims=[Claim(each.record, each.token - OFFSET) for each in claimed.claims])

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        found = await self._work.settle([replace(each, token=each.token + OFFSET) for each in settlements])
        self._outcomes.update(f"settle {each}" for each in found)
        return found

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        longer = [replace(each, token=each.token + OFFSET, to=each.to + OFFSET) for each in renewals]
        found = await self._work.renew(longer)
        self._outcomes.update(f"renew {each}" for each in found)
        return found


async def renew_and_settle(url: str, seconds: float) -> None:
    store = LongLeases(RedisStore(url, namespace="renewals"))
    scheduler = Scheduler(store)
    scheduler._options = replace(scheduler._options, lease_ms=3 * RENEWED_EVERY_MS)
    runs: Counter[str] = Counter()

    @scheduler.handler(name=LANE, concurrency=200)
    async def work(payload: bytes, context: Context) -> None:
        runs[context.id] += 1
        await asyncio.sleep(random.uniform(0, 6 * RENEWED_EVERY_MS / 1000))  # a run, as long as some renewals

    numbers = count()
    loop = asyncio.get_running_loop()
    ends = loop.time() + seconds
    async with scheduler:
        while loop.time() < ends:
            await scheduler.schedule(b"", to=f"handler:{LANE}", delay="0s", id=f"m{next(numbers)}")
            await asyncio.sleep(0.002)  # so that messages come all the time
        await scheduler.run_until_idle()
    assert set(runs.values()) == {1}
    assert len(runs) == next(numbers)
    assert store.outcomes.keys() == {"settle settled", "renew renewed"}, store.outcomes
    assert store.outcomes["renew renewed"] > len(runs) / 4, "too few renewals to meet settlements"


def test_s7_renewals_that_meet_settlements_are_never_refused(url: str) -> None:
    asyncio.run(renew_and_settle(url, 3))


@pytest.mark.storm
def test_s7_renewals_that_meet_settlements_for_a_minute(url: str) -> None:
    asyncio.run(renew_and_settle(url, 60))


async def claim_one(work: Work, request: str) -> Claim:
    (claim,) = (await work.claim({LANE: Demand(1)}, request=request, lease_ms=LEASE_MS)).claims
    return claim


def test_s7_a_renewal_and_a_settlement_on_their_way_at_once_leave_one_owner(url: str) -> None:
    """Without the lease book, which sends one call at a time: whichever comes first, the message ends once."""

    async def play() -> None:
        seen: Counter[tuple[str, str]] = Counter()
        async with RedisStore(url, namespace="overlap") as store, store.work("w", [LANE]) as work:
            for number in range(400):
                await store.apply([Put(new_op(), Envelope("m", LANE), After(0))])
                one = await claim_one(work, f"r{number}")
                renewal = Renewal("m", one.record.revision, one.token, token_for(store.now_ms() + 20_000, number))
                done = Done("m", one.record.revision, one.token)
                calls = [work.renew([renewal]), work.settle([done])]
                if number % 2:
                    calls.reverse()
                first, second = await asyncio.gather(*calls)
                (renewed,), (settled,) = (second, first) if number % 2 else (first, second)
                seen[str(renewed), str(settled)] += 1
                if settled is SettleOutcome.GONE:  # the renewal came first; the token that it gave ends it
                    assert await work.settle([replace(done, token=renewal.to)]) == [SettleOutcome.SETTLED]
                assert await store.get("m") is None
        assert seen.keys() == {("renewed", "gone"), ("lost", "settled")}

    asyncio.run(play())


@pytest.mark.parametrize(
    ("earlier", "claims"), [(COUNTERS - 100, 200), pytest.param(0, COUNTERS + 100, marks=pytest.mark.nightly)]
)
def test_s7_no_token_of_a_message_repeats_when_their_counter_begins_anew(url: str, earlier: int, claims: int) -> None:
    async def play() -> None:
        tokens: set[int] = set()
        async with RedisStore(url, namespace="tokens") as store, store.work("w", [LANE]) as work:
            await store.command("HSET", store._keys.key("meta"), "claims", earlier)
            await store.apply([Put(new_op(), Envelope("m", LANE), After(0))])
            for number in range(claims):
                one = await claim_one(work, f"r{number}")
                assert one.token not in tokens
                tokens.add(one.token)
                await work.settle([Again("m", one.record.revision, one.token, 0, 0)])

    asyncio.run(play())
