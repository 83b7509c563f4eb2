"""S7, L1 on Redis: with renewals every 20 ms between settlements, none is refused and no message runs twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from itertools import count

import pytest
from msgspec.structs import replace

from aiodelay import Context, Scheduler
from aiodelay.core.ids import new_op
from aiodelay.core.transitions import token_for
from aiodelay.core.values import After, Again, Claim, Demand, Done, Envelope, Put, Renewal, SettleOutcome
from aiodelay.ports import Work
from aiodelay.redis import RedisStore
from tests.support.long_leases import LongLeases
from tests.support.servers import redis_products, serving
from tests.support.slow_stores import PATIENT
from tests.support.waiting import PATIENCE_S

LANE = "work"
RENEWED_EVERY_MS = 20
LEAST_RUNS, LEAST_RENEWALS = 100, 300
COUNTERS = 4096
LEASE_MS = 15_000


@pytest.fixture(params=redis_products(), ids=lambda found: found.name)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as url:
        yield url


async def renew_and_settle(url: str, seconds: float) -> None:
    store = LongLeases(RedisStore(f"{url}?{PATIENT}", namespace="renewals"), believed_ms=3 * RENEWED_EVERY_MS)
    scheduler = Scheduler(store)
    scheduler._options = replace(scheduler._options, lease_ms=store.believed_ms)
    runs: Counter[str] = Counter()

    @scheduler.handler(name=LANE, concurrency=200)
    async def work(payload: bytes, context: Context) -> None:
        runs[context.id] += 1
        await asyncio.sleep(random.uniform(0, 6 * RENEWED_EVERY_MS / 1000))  # a run, as long as some renewals

    numbers = count()
    loop = asyncio.get_running_loop()
    async with scheduler:
        ends = loop.time() + seconds
        while loop.time() < ends or len(runs) < LEAST_RUNS or store.outcomes["renew renewed"] < LEAST_RENEWALS:
            assert loop.time() < ends + PATIENCE_S, store.outcomes  # a slow machine takes longer
            await scheduler.schedule(b"", to=f"handler:{LANE}", delay="0s", id=f"m{next(numbers)}")
            await asyncio.sleep(0.002)  # so that messages come all the time
        await scheduler.run_until_idle()
    assert set(runs.values()) == {1}
    assert len(runs) == next(numbers)
    assert store.outcomes.keys() == {"settle settled", "renew renewed"}, store.outcomes


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
        async with RedisStore(f"{url}?{PATIENT}", namespace="overlap") as store, store.work("w", [LANE]) as work:
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
        async with RedisStore(f"{url}?{PATIENT}", namespace="tokens") as store, store.work("w", [LANE]) as work:
            await store.command("HSET", store._keys.key("meta"), "claims", earlier)
            await store.apply([Put(new_op(), Envelope("m", LANE), After(0))])
            for number in range(claims):
                one = await claim_one(work, f"r{number}")
                assert one.token not in tokens
                tokens.add(one.token)
                await work.settle([Again("m", one.record.revision, one.token, 0, 0)])

    asyncio.run(play())
