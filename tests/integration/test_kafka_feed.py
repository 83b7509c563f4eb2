"""Taking from a topic, call by call: given back, lost with its partition, cancelled, refused by the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from aiodelay.core.transitions import token_counter, token_for
from aiodelay.core.values import (
    Again,
    Claim,
    Dead,
    Demand,
    Done,
    PutBack,
    Query,
    Renewal,
    RenewOutcome,
    SettleOutcome,
    Stored,
)
from aiodelay.errors import StoreUnavailableError
from aiodelay.kafka import KafkaSource
from aiodelay.memory import MemoryStore
from aiodelay.ports import Feed, LocalFeed
from tests.support.kafka import create_topic, new_name
from tests.support.topics import committed, fill, lasting_producer

pytestmark = pytest.mark.asyncio

LANE = "orders"


class Scene:
    """A topic, a group, and a store that may be away."""

    def __init__(self, bootstrap: str, topic: str, store: MemoryStore) -> None:
        self.bootstrap, self.topic, self.store = bootstrap, topic, store
        self.group = new_name("group")
        self.is_away = False

    async def put_back(self, messages: Sequence[PutBack]) -> Sequence[Stored]:
        answers = await self.store.put_back(messages)
        if self.is_away:
            raise StoreUnavailableError("memory", "its answer is lost")
        return answers

    @asynccontextmanager
    async def feed(self) -> AsyncIterator[Feed]:
        async with KafkaSource(self.bootstrap) as source:
            address = f"{self.topic}?group={self.group}"
            async with source.feed(address, "me", self.put_back, self.store.now_ms) as feed:
                yield feed

    async def committed(self, partitions: int = 1) -> list[int]:
        return await asyncio.to_thread(committed, self.bootstrap, self.group, self.topic, partitions)


@asynccontextmanager
async def scene(bootstrap: str, n: int, partitions: int = 1) -> AsyncIterator[Scene]:
    topic = await create_topic(bootstrap, new_name(), partitions)
    for number in range(partitions):
        values = [b"%d" % (number * n + i) for i in range(n)]
        fill(bootstrap, topic, values, partition=number, producer=lasting_producer(bootstrap))
    before = asyncio.all_tasks()
    async with MemoryStore() as store:
        yield Scene(bootstrap, topic, store)
    assert asyncio.all_tasks() <= before


async def take(feed: Feed, n: int, *, at_once: int = 500) -> list[Claim]:
    """Claim so many records, and no others."""
    found: list[Claim] = []
    while len(found) < n:
        feed.clear()
        demand = {LANE: Demand(min(at_once, n - len(found)))}
        claimed = await feed.claim(demand, request=new_name(), lease_ms=15_000)
        found += claimed.claims
        if not claimed.claims:
            await feed.wait(until_ms=None)
    return found


def payloads(claims: Sequence[Claim]) -> list[int]:
    return [int(claim.record.envelope.payload) for claim in claims]


def done(claim: Claim) -> Done:
    return Done(claim.record.id, claim.record.revision, claim.token)


def failed(claim: Claim, due_ms: int = 10**14) -> Again:
    return Again(claim.record.id, claim.record.revision, claim.token, due_ms, 1, "no answer")


def rejected(claim: Claim) -> Dead:
    return Dead(claim.record.id, claim.record.revision, claim.token, "rejected", 1, "why")


def release(claim: Claim) -> Again:
    record = claim.record
    return Again(record.id, record.revision, claim.token, record.due_ms, record.attempt)


async def test_what_is_given_back_unrun_comes_again_in_its_place(kafka: str) -> None:
    async with scene(kafka, 6) as at, at.feed() as feed:
        claims = await take(feed, 4)
        assert payloads(claims) == [0, 1, 2, 3]
        assert await feed.settle([release(claims[i]) for i in (3, 1)]) == [SettleOutcome.SETTLED] * 2
        again = await take(feed, 4)
        assert payloads(again) == [1, 3, 4, 5]
        assert [each.record.id for each in again[:2]] == [claims[1].record.id, claims[3].record.id]
        assert await feed.settle([done(claims[1])]) == [SettleOutcome.GONE]  # that claim is over
        await feed.settle([done(each) for each in (claims[0], claims[2], *again)])
    assert await at.committed() == [6]


async def test_s2_what_the_store_did_not_take_keeps_its_offset(kafka: str) -> None:
    async with scene(kafka, 3) as at:
        async with at.feed() as feed:
            claims = await take(feed, 3)
            at.is_away = True
            for _ in range(2):
                with pytest.raises(StoreUnavailableError):
                    await feed.settle([done(claims[0]), failed(claims[1]), rejected(claims[2])])
        assert await at.committed() == [-1001]
        at.is_away = False
        async with at.feed() as feed:
            claims = await take(feed, 3)
            settled = await feed.settle([done(claims[0]), failed(claims[1]), rejected(claims[2])])
            assert settled == [SettleOutcome.SETTLED] * 3
        assert await at.committed() == [3]
        (retry,) = await at.store.search(Query(limit=9))
        (letter,) = await at.store.dead_letters()
        assert (retry.record.id, letter.record.id) == (claims[1].record.id, claims[2].record.id)


async def test_s7_claims_of_a_partition_that_went_to_another_end(kafka: str) -> None:
    async with scene(kafka, 50, partitions=4) as at, at.feed() as first:
        claims = await take(first, 200)
        async with at.feed() as second:
            theirs = await take(second, 100)  # two of four partitions
            moved = set(payloads(theirs))
            assert len(moved) == 100
            lost = [each for each in claims if int(each.record.envelope.payload) in moved]
            kept = [each for each in claims if int(each.record.envelope.payload) not in moved]
            ends_ms = at.store.now_ms() + 15_000
            renewals = [
                Renewal(each.record.id, each.record.revision, each.token, token_for(ends_ms, token_counter(each.token)))
                for each in (lost[0], kept[0])
            ]
            assert await first.renew(renewals) == [RenewOutcome.LOST, RenewOutcome.RENEWED]
            settled = await first.settle([failed(each) for each in lost] + [done(each) for each in kept])
            assert settled == [SettleOutcome.GONE] * 100 + [SettleOutcome.SETTLED] * 100
            assert await at.store.search(Query(limit=9)) == []  # who has it now gives it out
            await second.settle([done(each) for each in theirs])
    assert await at.committed(4) == [50] * 4


async def test_a_claim_or_wait_that_is_cancelled_anywhere_loses_and_doubles_nothing(kafka: str) -> None:
    async with scene(kafka, 300, partitions=3) as at, at.feed() as feed:
        found: list[int] = []
        steps = 0
        while len(found) < 900:
            steps += 1
            taking = asyncio.create_task(take(feed, 1))
            for _ in range(steps % 40):
                await asyncio.sleep(0)
            if steps % 7:
                taking.cancel()
            with suppress(asyncio.CancelledError):
                claims = await taking
                found += payloads(claims)
                await feed.settle([done(each) for each in claims])
        assert sorted(found) == list(range(900))
    assert await at.committed(3) == [300] * 3


async def test_records_that_were_read_are_claimed_and_settled_without_a_wait(kafka: str) -> None:
    async with scene(kafka, 20) as at:
        async with at.feed() as feed:
            assert isinstance(feed, LocalFeed)
            first = await take(feed, 1)
            claims = feed.claim_nowait({LANE: Demand(5)}, lease_ms=15_000).claims
            assert payloads([*first, *claims]) == [0, 1, 2, 3, 4, 5]
            assert feed.settle_nowait([done(first[0]), failed(claims[0])]) is None, "a retry waits for the store"
            assert feed.settle_nowait([done(first[0])]) == [SettleOutcome.SETTLED]
            assert feed.settle_nowait([done(first[0])]) == [SettleOutcome.GONE]
            assert feed.settle_nowait([release(claims[1])]) == [SettleOutcome.SETTLED]
            assert payloads(feed.claim_nowait({LANE: Demand(2)}, lease_ms=15_000).claims) == [2, 6]
        assert await at.committed() == [1]


async def test_s7_after_a_rebalance_nothing_is_claimed_before_the_partitions_are_taken_over(kafka: str) -> None:
    async with scene(kafka, 50, partitions=2) as at, at.feed() as first:
        assert isinstance(first, LocalFeed)
        first.settle_nowait([release(each) for each in await take(first, 2)])
        assert first.claim_nowait({LANE: Demand(1)}, lease_ms=15_000).claims
        async with at.feed() as second:
            theirs = await take(second, 50)
            assert first.claim_nowait({LANE: Demand(5)}, lease_ms=15_000).claims == []
            found = await take(first, 40)
            assert not set(payloads(found)) & set(payloads(theirs))
            assert first.claim_nowait({LANE: Demand(1)}, lease_ms=15_000).claims
