"""`put_back` on a Kafka store with shared partitions: the caller does not have to own the partition."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from aiodelay.core.ids import new_op
from aiodelay.core.values import After, Claim, Demand, Envelope, Put, PutBack, Record, Stored
from aiodelay.kafka import KafkaStore
from aiodelay.ports import Work
from tests.support.kafka import new_name
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

LANE = "orders"
N = 20
LEASE_MS = 600_000
"""Longer than a test lasts, so that no message is claimed twice."""


@asynccontextmanager
async def shared(kafka: str) -> AsyncIterator[tuple[KafkaStore, list[KafkaStore], list[Work]]]:
    """Give a store that only schedules, and two members that own all between them."""
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=4"
    async with AsyncExitStack() as stack:
        schedules = await stack.enter_async_context(KafkaStore(url))
        members = [await stack.enter_async_context(KafkaStore(f"{url}&members=2&member={n}")) for n in (0, 1)]
        works = [await stack.enter_async_context(member.work("w", [LANE])) for member in members]
        yield schedules, members, works


def failed(i: int, *, due_ms: int) -> Record:
    envelope = Envelope(f"m{i}", LANE, payload=b"%d" % i, key=b"k", headers={"a": b"\xff"})
    return Record(envelope, due_ms - 50, due_ms, new_op(), attempt=3, first_error="first", last_error="last")


async def claimed(works: list[Work], n: int) -> list[tuple[Work, Claim]]:
    """Claim until there are so many; a while longer, there are no more."""
    found: list[tuple[Work, Claim]] = []

    async def claim() -> None:
        for work in works:
            got = await work.claim({LANE: Demand(100)}, request=new_name(), lease_ms=LEASE_MS)
            found.extend((work, each) for each in got.claims)

    async def are_claimed() -> bool:
        await claim()
        return len(found) >= n

    await until(are_claimed, f"{n} messages are claimed")
    ends = asyncio.get_running_loop().time() + 0.5
    while asyncio.get_running_loop().time() < ends:
        await asyncio.sleep(0.02)  # nothing tells that no more comes
        await claim()
    return found


@pytest.mark.parametrize("who", ["a member", "a process that only schedules"])
async def test_s8_what_is_put_back_reaches_its_owner_as_it_was(kafka: str, who: str) -> None:
    async with shared(kafka) as (schedules, members, works):
        store = members[0] if who == "a member" else schedules
        now = store.now_ms()
        messages = [PutBack(failed(i, due_ms=now - 100), now) for i in range(N)]
        for _ in range(2):  # its answer was lost
            assert [each.answer for each in await store.put_back(messages)].count("stored") >= N // 4
        found = await claimed(works, N)
        assert len(found) == N
        for _, claim in found:
            sent = messages[int(claim.record.envelope.payload)].record
            assert (claim.record.envelope, claim.record.revision) == (sent.envelope, sent.revision)
            assert (claim.record.attempt, claim.record.first_error, claim.record.last_error) == (3, "first", "last")
            assert claim.record.due_ms == sent.due_ms


async def test_s4_what_is_put_back_takes_nobodys_place(kafka: str) -> None:
    async with shared(kafka) as (schedules, _, works):
        now = schedules.now_ms()
        puts = [Put(new_op(), Envelope(f"m{i}", LANE, payload=b"newer"), After(0)) for i in range(N)]
        assert all(isinstance(each, Stored) for each in await schedules.apply(puts))
        await schedules.put_back([PutBack(failed(i, due_ms=now), now) for i in range(N)])
        found = await claimed(works, N)
        assert [claim.record.envelope.payload for _, claim in found] == [b"newer"] * N


async def test_s1_what_is_put_back_waits_for_its_time(kafka: str) -> None:
    async with shared(kafka) as (schedules, _, works):
        now = schedules.now_ms()
        due_ms = now + 1500
        await schedules.put_back([PutBack(failed(i, due_ms=now), due_ms) for i in range(N)])
        n = 0
        while n < N:
            for work in works:
                got = await work.claim({LANE: Demand(100)}, request=new_name(), lease_ms=LEASE_MS)
                n += len(got.claims)
                assert not got.claims or schedules.now_ms() >= due_ms
            await asyncio.sleep(0.01)  # it is asked all the time, so that one that comes too early is seen
        assert n == N


async def test_s6_a_dead_letter_is_put_back_once_by_anybody(kafka: str) -> None:
    async with shared(kafka) as (schedules, members, works):
        now = schedules.now_ms()
        messages = [PutBack(failed(i, due_ms=now), now, "rejected") for i in range(N)]
        for _ in range(2):
            await schedules.put_back(messages)

        async def are_all_there() -> bool:
            return sum([len(await member.dead_letters()) for member in members]) >= N

        await until(are_all_there, "all are dead letters")
        letters = [letter for member in members for letter in await member.dead_letters()]
        assert sorted(each.record.id for each in letters) == sorted(f"m{i}" for i in range(N))
        assert {(each.reason, each.record.attempt, each.record.last_error) for each in letters} == {
            ("rejected", 3, "last")
        }
        assert await claimed(works, 0) == []
