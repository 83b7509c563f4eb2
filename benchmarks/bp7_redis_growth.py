"""BP7: the growth of the times of put, claim and cancel in Redis with the pending messages, and the time of scripts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from aiodelay.backends.redis.connection.scripts import NAMES, script
from aiodelay.core.ids import new_id, new_op
from aiodelay.core.transitions import token_counter, token_for
from aiodelay.core.values import (
    LEASE_MS,
    MAX_CLAIM_MESSAGES,
    After,
    Again,
    At,
    Cancel,
    Claim,
    Dead,
    DeadKey,
    Demand,
    Done,
    Envelope,
    Put,
    Query,
    Renewal,
    RenewOutcome,
    Reschedule,
    Settlement,
    SettleOutcome,
    Stored,
)
from aiodelay.ports import Work
from aiodelay.redis import RedisStore

from .growth import LANE, MANY, VERY_MANY, ahead, apply, fill, grown
from .harness import Benchmark, Goal, Plan, Row, check, quantile, raw_payload
from .redis_server import Client, emptied, empty

__all__ = ["BENCHMARK"]

AT_ONCE = MAX_CLAIM_MESSAGES
ROUNDS_OF_ALL = 10
LOGGED_US = 500
"""Scripts that took no longer than this are ignored."""
SHORT_LEASE_MS = 10
MOST_LISTED = 1_000
GOAL = Goal("at most", 5.0)


def run(plan: Plan) -> list[Row]:
    rows: list[Row] = []
    for many in (MANY, VERY_MANY) if plan.nightly else (MANY,):
        rows += grown(plan, "BP7", "Redis", lambda name: RedisStore(plan.redis, namespace=name), many)
        empty(plan.redis)
        rows.append(longest_script(plan, plan.size(many)))
    return rows


def longest_script(plan: Plan, n: int) -> Row:
    """Return the longest run of a script, in each round."""
    rounds = plan.run(large_batches(plan, n))
    longest = {name: quantile((each.get(name, 0.0) for each in rounds), 0.5) for name in NAMES}
    beside = "longest run of each script, ms: " + ", ".join(f"{name} {ms:.1f}" for name, ms in longest.items() if ms)
    what = f"Redis: the longest run of a script with {n:,} messages pending, {AT_ONCE} messages a call"
    return Row("BP7", what, "ms", tuple(max(each.values(), default=0.0) for each in rounds), GOAL, beside)


async def large_batches(plan: Plan, n: int) -> list[dict[str, float]]:
    """Run all operations with the most messages of a call. Return each script's longest run by round, in ms."""
    chance = random.Random(n)
    rounds = []
    async with emptied(plan.redis) as client, RedisStore(plan.redis) as store:
        await fill(store, n, chance)
        await client.config_set("slowlog-log-slower-than", LOGGED_US)
        await client.config_set("slowlog-max-len", 10_000)
        async with store.work("bench", [LANE]) as work:
            for _ in range(plan.runs):
                await client.slowlog_reset()
                for _ in range(plan.size(ROUNDS_OF_ALL)):
                    await change(store, chance)
                    await deliver(store, work)
                    await look(store)
                rounds.append(await _longest(client))
    return rounds


async def change(store: RedisStore, chance: random.Random) -> None:
    """Put, put again as after a lost answer, replace, reschedule and cancel."""
    puts = [ahead(store, chance) for _ in range(AT_ONCE)]
    await apply(store, puts)
    await apply(store, puts)
    await apply(store, [Put(new_op(), put.envelope, put.due) for put in puts])
    await apply(store, [Reschedule(new_op(), put.id, After(86_400_000)) for put in puts])
    await apply(store, [Cancel(new_op(), put.id) for put in puts])


async def deliver(store: RedisStore, work: Work) -> None:
    """Claim, let lapse, claim, renew, retry, claim, give up, redrive, claim and settle."""
    now = store.now_ms()
    texts = [
        Put(new_op(), Envelope(f"order-{new_id()}", LANE, payload=raw_payload(0)), At(now)) for _ in range(AT_ONCE)
    ]
    await apply(store, texts)
    await claim_all(work, lease_ms=SHORT_LEASE_MS)
    await asyncio.sleep(2 * SHORT_LEASE_MS / 1000)
    claims = await claim_all(work)
    renewals = [_renewal(each, now) for each in claims]
    check(set(await work.renew(renewals)) == {RenewOutcome.RENEWED}, "a lease could not be renewed")
    await settle(work, [Again(each.id, each.revision, each.to, now, 1, "ValueError: no") for each in renewals])
    claims = await claim_all(work)
    dead = [Dead(each.record.id, each.record.revision, each.token, "rejected", 2, "no") for each in claims]
    await settle(work, dead)
    redriven = await store.redrive([DeadKey(each.id, each.revision) for each in dead])
    check(all(isinstance(outcome, Stored) for outcome in redriven), "a dead letter could not be redriven")
    claims = await claim_all(work)
    await settle(work, [Done(each.record.id, each.record.revision, each.token) for each in claims])
    await work.tidy([LANE], limit=AT_ONCE)


async def look(store: RedisStore) -> None:
    """Read as many messages as a page may hold, and the due messages of two weeks by the hour."""
    check(bool(await store.search(Query(limit=MOST_LISTED))), "what is pending was not listed")
    await store.load(bucket_ms=3_600_000, buckets=14 * 24)
    await store.counts()


async def claim_all(work: Work, lease_ms: int = LEASE_MS) -> list[Claim]:
    """Claim as many messages as a call may have. No other messages are due."""
    claims: list[Claim] = []
    while len(claims) < AT_ONCE:  # the store returns lapsed claims in parts
        claimed = await work.claim({LANE: Demand(AT_ONCE - len(claims))}, request=new_id(), lease_ms=lease_ms)
        check(bool(claimed.claims), "what is due was not claimed")
        claims += claimed.claims
    return claims


def _renewal(claim: Claim, now_ms: int) -> Renewal:
    to = token_for(now_ms + 2 * LEASE_MS, token_counter(claim.token))
    return Renewal(claim.record.id, claim.record.revision, claim.token, to)


async def settle(work: Work, settlements: Sequence[Settlement]) -> None:
    """Settle claims, and check that all settlements succeed."""
    check(set(await work.settle(settlements)) == {SettleOutcome.SETTLED}, "a claim could not be settled")


async def _longest(client: Client) -> dict[str, float]:
    """Return the longest run of each script since the log was reset, in ms."""
    names = {script(name).sha: name for name in NAMES}
    longest: dict[str, float] = {}
    for entry in await client.slowlog_get(-1):
        words = entry["command"].split(b" ", 2)
        if words[0] == b"EVALSHA":
            name = names[words[1]]
            longest[name] = max(longest.get(name, 0.0), entry["duration"] / 1000)
    return longest


BENCHMARK = Benchmark("BP7", "growth in Redis", run, needs_redis=True)
