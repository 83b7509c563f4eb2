"""Random walks over a lane with limits: the Redis store takes the same messages as the memory store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import count
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodelay.core.values import (
    NO_LIMITS,
    After,
    Again,
    Cancel,
    Claim,
    Command,
    Dead,
    Demand,
    Done,
    Envelope,
    Fire,
    LaneLimits,
    Limit,
    Put,
    Reschedule,
    Settlement,
    lane_limits,
)
from aiodelay.memory import MemoryStore
from aiodelay.redis import open_store
from aiodelay.testing.clock import VirtualClock
from tests.stateful.test_store_machine import WALKS
from tests.support.servers import redis_servers, serving

LANE, LEASE_MS, STEP_MS = "x", 15_000, 100
LIMITS: Sequence[LaneLimits] = (
    lane_limits([Limit("customer", 1, "9/5s")]),
    lane_limits([Limit("customer", 2, "3/5s")]),
    lane_limits([Limit("customer", 3, "4/5s")]),
    lane_limits([Limit("customer", rate="2/5s")]),
    NO_LIMITS,
    lane_limits([Limit(concurrency=3), Limit("customer", 2)]),
    lane_limits([Limit(None, 5, "6/2s")]),
    lane_limits([Limit("address", 2), Limit(rate="9/10s")]),
)
OF_KEYS = 5
"""The first limits do not limit the lane as a whole."""

ids = st.integers(0, 11)
steps = st.one_of(
    st.tuples(st.just("put"), ids, st.sampled_from([0, 0, 0, 300, 700, 20_000])),
    st.tuples(st.just("put"), ids, st.sampled_from([0, 0, 0, 300, 700, 20_000])),
    st.tuples(st.just("claim"), st.sampled_from([1, 2, 3, 50]), st.just(0)),
    st.tuples(st.just("claim"), st.sampled_from([1, 2, 3, 50]), st.just(0)),
    st.tuples(st.sampled_from(["done", "again", "later", "dead"]), ids, st.just(0)),
    st.tuples(st.sampled_from(["done", "again", "later", "dead"]), ids, st.just(0)),
    st.tuples(st.sampled_from(["cancel", "move", "fire"]), ids, st.sampled_from([0, 700])),
    st.tuples(st.just("wait"), st.sampled_from([200, 300, 1000, 5000, LEASE_MS]), st.just(0)),
    st.tuples(st.just("limits"), st.integers(0, len(LIMITS) - 1), st.just(0)),
)


class Pair:
    """A memory store and a Redis store that get the same calls.

    Some turns may differ after a lapse and after a change of limits. A walk either compares the order of messages, or
    it has lapses and changes, and claims all messages at once.

    Args:
        url: The server.
        has_order: Whether the walk compares the order.
    """

    def __init__(self, url: str, *, has_order: bool) -> None:
        self.has_order = has_order
        self.clock, self.namespace = VirtualClock(), uuid4().hex
        self.stores: list[Any] = [
            MemoryStore(clock=self.clock),
            open_store(url, namespace=self.namespace, clock=self.clock),
        ]
        self.numbers = count(1)
        self.claims: tuple[list[Claim], list[Claim]] = [], []
        self.limits, self.later, self.has_lapsed = NO_LIMITS, 0, False

    async def play(self, walk: Sequence[tuple[str, int, int]]) -> None:
        async with AsyncExitStack() as opened:
            works = []
            for store in self.stores:
                await opened.enter_async_context(store)
                works.append(await opened.enter_async_context(store.work("one", [LANE])))
            self.works = works
            for what, which, more in walk:
                self.clock.move(STEP_MS)
                await self.step(what, which, more)

    async def step(self, what: str, which: int, more: int) -> None:
        if what == "limits":
            if not self.has_order or not self.limits:
                await self.set_limits(LIMITS[which if self.has_order else which % OF_KEYS])
        elif what == "wait":
            if which == LEASE_MS and (self.has_order or self.has_lapsed):
                await self.end_all()
            self.has_lapsed = self.has_lapsed or which == LEASE_MS
            self.clock.move(which)
            for work in self.works:
                await work.tidy([LANE], limit=1000)
        elif what == "claim":
            await self.claim(which if self.has_order else 50)
        elif what in ("done", "again", "later", "dead"):
            await self.end(what, which)
        else:
            await self.apply(what, which, more)

    async def set_limits(self, limits: LaneLimits) -> None:
        if not self.limits:  # The Redis store may not know the lanes of messages that were replaced without limits.
            await self.end_all()
        self.limits = limits
        for store in self.stores:
            await store.set_limits(LANE, limits, is_declared=False)

    async def end_all(self) -> None:
        while self.claims[0]:
            await self.end("done", 0)

    async def claim(self, messages: int) -> None:
        request = f"r{next(self.numbers)}"
        demand = {LANE: Demand(messages)}
        found = [await work.claim(demand, request=request, lease_ms=LEASE_MS) for work in self.works]
        taken = [list(claimed.claims) for claimed in found]
        if not self.has_order:
            taken = [sorted(claims, key=lambda claim: claim.record.id) for claims in taken]
        first, second = ([claim.record.id for claim in claims] for claims in taken)
        assert first == second
        for held, claims in zip(self.claims, taken, strict=True):
            held.extend(claims)

    async def end(self, what: str, which: int) -> None:
        if not self.claims[0]:
            return
        which %= len(self.claims[0])
        outcomes = [
            await work.settle([self.ending(what, own.pop(which))])
            for work, own in zip(self.works, self.claims, strict=True)
        ]
        assert outcomes[0] == outcomes[1]

    def ending(self, what: str, claim: Claim) -> Settlement:
        message_id, revision, token = claim.record.id, claim.record.revision, claim.token
        if what == "done":
            return Done(message_id, revision, token)
        if what == "dead":
            return Dead(message_id, revision, token, "not_retryable", claim.record.attempt + 1, "failed")
        due_ms = self.clock.now_ms() + (self.later_ms(500) if what == "later" else 0)
        return Again(message_id, revision, token, due_ms, claim.record.attempt + 1, "failed")

    def later_ms(self, ms: int) -> int:
        """Return a time that no other message has: the order of messages with the same place is free."""
        self.later += 1
        return ms + self.later % STEP_MS

    async def apply(self, what: str, which: int, more: int) -> None:
        op, name, due = next(self.numbers).to_bytes(8, "big"), f"{which}", After(self.later_ms(more) if more else 0)
        command: Command
        if what == "cancel":
            command = Cancel(op, name)
        elif what == "fire":
            command = Fire(op, name)
        elif what == "move":
            command = Reschedule(op, name, due)
        else:
            envelope = Envelope(name, LANE, address="pq"[which % 2], key=b"abc"[which % 3 : which % 3 + 1])
            command = Put(op, envelope, due)
        outcomes = [await store.apply([command]) for store in self.stores]
        assert outcomes[0] == outcomes[1]


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as found:
        yield f"{found}?timeout_ms=60000"


@pytest.mark.valkey_too
@pytest.mark.parametrize("has_order", [True, False])
def test_walks_with_limits(url: str, has_order: bool) -> None:
    @settings(WALKS, max_examples=40)
    @given(first=st.integers(0, len(LIMITS) - 1), walk=st.lists(steps, min_size=10, max_size=60))
    def walks(first: int, walk: list[tuple[str, int, int]]) -> None:
        asyncio.run(Pair(url, has_order=has_order).play([("limits", first, 0), *walk]))

    walks()
