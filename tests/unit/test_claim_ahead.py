"""Messages that are claimed before there is room to run them: how many, for how long, and what ends their wait."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from aiodelay import CancelOutcome, Context, Limit, RescheduleOutcome, Scheduler
from aiodelay.core.ids import new_op
from aiodelay.core.transitions import NO_OP
from aiodelay.core.values import MAX_CLAIM_BYTES, MAX_CLAIM_MESSAGES, After, Envelope, Put, PutBack, Record
from aiodelay.engine.delivery.claim_ahead import MOST_AHEAD
from aiodelay.ports import Feed
from aiodelay.testing.clock import VirtualClock
from tests.support.noted import NotedStore
from tests.support.sources import PlainSource
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

LANE, OTHER = "work", "other"
LIMIT = 16


class OtherStore(PlainSource):
    """A source that gives out the messages of a store of its own."""

    name = "other"

    def __init__(self, store: NotedStore) -> None:
        self._store = store

    @asynccontextmanager
    async def feed(self, *arguments: object) -> AsyncIterator[Feed]:
        async with self._store, self._store.work("worker", [LANE]) as work:
            yield work


class Stage:
    """A scheduler with a handler of the lane `work`; each run of it takes the time that `takes_s` says.

    Attributes:
        store: The store from which the handler gets its messages. With `from_source` it is a source's store, and the
            scheduler has a store of its own.
    """

    def __init__(
        self,
        clock: VirtualClock,
        *,
        concurrency: int = LIMIT,
        claim_ahead: bool = True,
        from_source: bool = False,
        limit: Sequence[Limit] = (),
    ) -> None:
        self.clock, self.store = clock, NotedStore(clock)
        self.own = NotedStore(clock) if from_source else self.store
        sources = [OtherStore(self.store)] if from_source else []
        self.scheduler = Scheduler(self.own, sources=sources, clock=clock, claim_ahead=claim_ahead)
        self.takes_s: dict[str, float] = {}
        self.usual_s = 0.0
        self.began: list[str] = []
        self.running = self.most_running = self.most_held = self.most_waiting = 0
        source, begun = "other:x" if from_source else None, set[str]()

        @self.scheduler.handler(name=LANE, concurrency=concurrency, source=source, limit=limit)
        async def work(payload: bytes, context: Context) -> None:
            self.began.append(context.id)
            begun.add(context.id)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            self.most_held = max(self.most_held, self.held)
            self.most_waiting = max(self.most_waiting, len(self.leased - begun))
            if takes_s := self.takes_s.get(context.id, self.usual_s):
                await asyncio.sleep(takes_s)
            self.running -= 1

    @property
    def held(self) -> int:
        return len(self.leased)

    @property
    def leased(self) -> set[str]:
        return set(self.store.memory._table.leased)

    async def put(self, *ids: str, lane: str = LANE, payload: bytes = b"", after_ms: int = 0, keys: int = 1) -> None:
        """Put messages as another process does, and give them keys in turn."""
        envelopes = [Envelope(each, lane, payload=payload, key=b"%d" % (i % keys)) for i, each in enumerate(ids)]
        puts = [Put(new_op(), each, After(after_ms)) for each in envelopes]
        for start in range(0, len(puts), 500):
            await self.store.memory.apply(puts[start : start + 500])

    async def begun(self, n: int) -> None:
        await until(lambda: len(self.began) >= n, f"{n} runs have begun")

    async def ended(self) -> None:
        await until(lambda: not self.store.memory._table.entries, "all messages have ended")


@pytest.fixture(params=[False, True], ids=["store", "source"])
def from_source(request: pytest.FixtureRequest) -> bool:
    """Whether the handler gets its messages from a source."""
    return bool(request.param)


def numbered(n: int) -> list[str]:
    return [f"m{i:05}" for i in range(n)]


# --- how many ---------------------------------------------------------------------------------------------


async def test_quick_runs_are_claimed_hundreds_at_a_time_and_in_order(clock: VirtualClock, from_source: bool) -> None:
    stage = Stage(clock, from_source=from_source)
    await stage.put(*numbered(5_000))
    async with stage.scheduler:
        await stage.ended()
    assert stage.began == numbered(5_000)
    assert len(stage.store.made("claim")) < 50, "without claims ahead there are 313"


@pytest.mark.parametrize("seed", range(3))
async def test_runs_keep_to_the_concurrency_and_claims_to_their_bound(
    clock: VirtualClock, from_source: bool, seed: int
) -> None:
    stage, chance = Stage(clock, from_source=from_source), random.Random(seed)
    ids = numbered(4_000)
    stage.takes_s = {each: chance.choice((0, 0, 0, 0.001, 0.02)) for each in ids}
    await stage.put(*ids)
    async with stage.scheduler:
        await stage.ended()
    assert sorted(stage.began) == ids, "each once"
    assert stage.most_running == LIMIT
    assert LIMIT < stage.most_waiting <= LIMIT + MOST_AHEAD
    assert stage.most_held <= LIMIT + MOST_AHEAD + MAX_CLAIM_MESSAGES


@pytest.mark.parametrize(("concurrency", "claim_ahead"), [(1, True), (LIMIT, False)])
async def test_nothing_is_claimed_ahead_for_a_single_run_at_a_time_or_if_it_is_turned_off(
    clock: VirtualClock, from_source: bool, concurrency: int, claim_ahead: bool
) -> None:
    stage = Stage(clock, concurrency=concurrency, claim_ahead=claim_ahead, from_source=from_source)
    await stage.put(*numbered(500))
    async with stage.scheduler:
        await stage.ended()
    assert stage.most_held <= concurrency


async def test_runs_that_take_long_have_nothing_claimed_ahead(clock: VirtualClock, from_source: bool) -> None:
    stage = Stage(clock, from_source=from_source)
    stage.usual_s = 0.5
    await stage.put(*numbered(300))
    async with stage.scheduler:
        await stage.ended()
    assert stage.most_held == LIMIT


async def test_bytes_that_wait_are_bounded(clock: VirtualClock, from_source: bool) -> None:
    stage, size = Stage(clock, from_source=from_source), 100_000
    stage.usual_s = 0.002
    await stage.put(*numbered(400), payload=b"x" * size)
    async with stage.scheduler:
        await stage.ended()
    assert len(stage.began) == 400
    assert (stage.most_held - LIMIT) * size <= 2 * MAX_CLAIM_BYTES


async def test_a_run_that_has_ended_makes_room_before_its_settlement_is_answered(clock: VirtualClock) -> None:
    stage = Stage(clock, limit=[Limit("key", rate="1000/s")])
    await stage.put(*numbered(300), keys=100)
    stage.store.inject("delay", "settle", times=None, lasting="1s")
    async with stage.scheduler:
        await asyncio.sleep(0.5)
        assert len(stage.began) == 2 * LIMIT, "as many more as the concurrency"
        await stage.put("later")
        await asyncio.sleep(0.4)
        assert len(stage.began) == 2 * LIMIT, "and then it waits for the store"
        await stage.ended()


# --- with limits ------------------------------------------------------------------------------------------


async def test_c1_messages_are_claimed_ahead_within_the_limits(clock: VirtualClock) -> None:
    stage, runs = Stage(clock, limit=[Limit("key", 4)]), 3_000
    stage.usual_s = 0.001
    await stage.put(*numbered(runs), keys=500)
    async with stage.scheduler:
        await stage.ended()
    assert sorted(stage.began) == numbered(runs), "each once"
    assert stage.most_running == LIMIT
    assert stage.most_waiting > 4 * LIMIT
    assert len(stage.store.made("claim")) < runs / LIMIT / 2


async def test_c1_nothing_waits_that_a_rate_has_counted(clock: VirtualClock) -> None:
    stage = Stage(clock, limit=[Limit("key", 4, "1000/s")])
    await stage.put(*numbered(500), keys=100)
    async with stage.scheduler:
        await stage.ended()
    assert len(stage.began) == 500
    assert stage.most_waiting <= LIMIT, "each message begins when it comes"


@pytest.mark.parametrize("is_declared", [True, False], ids=["by the code", "by an operator"])
async def test_c2_what_waits_keeps_no_other_process_idle(clock: VirtualClock, is_declared: bool) -> None:
    """Two processes have room for 32 runs, and the limit allows 40: each process gets its part."""
    limit, began = Limit(concurrency=40), list[str]()
    declared = [limit] if is_declared else []
    stage = Stage(clock, limit=declared)
    stage.usual_s = 0.001
    other = Scheduler(stage.store.memory, clock=clock)

    @other.handler(name=LANE, concurrency=LIMIT, limit=declared)
    async def work(payload: bytes, context: Context) -> None:
        began.append(context.id)
        await asyncio.sleep(0.001)

    await stage.put(*numbered(6_000))
    async with stage.scheduler:
        await stage.scheduler.set_limits(LANE, limit)
        await stage.begun(1_000)
        before = len(stage.began)
        async with other:
            await stage.ended()
    parts = len(stage.began) - before, len(began)
    assert min(parts) > 0.8 * max(parts), f"{parts} runs"


# --- what ends the wait -----------------------------------------------------------------------------------


async def test_messages_go_back_when_the_runs_before_them_take_long(clock: VirtualClock, from_source: bool) -> None:
    stage = Stage(clock, from_source=from_source)
    ids = numbered(2_000)
    stage.takes_s = dict.fromkeys(ids[1_000:], 60)
    await stage.put(*ids)
    async with stage.scheduler:
        await stage.begun(1_000 + LIMIT)
        assert stage.held > LIMIT, "more were claimed while the runs were quick"
        await asyncio.sleep(0.3)
        assert stage.held == LIMIT, "another process can claim the others now"
        found = [await stage.store.memory.get(each) for each in ids[1_000 + LIMIT : 1_900]]
        assert all(each is not None and each.record.lapses == each.record.attempt == 0 for each in found)


async def test_a_cancelled_message_does_not_begin_and_is_not_called_in_flight(clock: VirtualClock) -> None:
    stage = Stage(clock)
    ids = numbered(1_500)
    stage.takes_s = dict.fromkeys(ids[1_000:], 0.05)
    await stage.put(*ids)
    async with stage.scheduler as scheduler:
        await stage.begun(1_000)
        waiting = sorted(stage.leased - set(stage.began))
        assert len(waiting) > 50
        assert await scheduler.cancel(waiting[-1]) is CancelOutcome.CANCELLED
        assert await scheduler.reschedule(waiting[-2], delay="1h") is RescheduleOutcome.RESCHEDULED
        assert await scheduler.cancel(stage.began[-1]) is CancelOutcome.IN_FLIGHT
        await asyncio.sleep(60)
        assert set(ids) - set(stage.began) == set(waiting[-2:])


async def test_what_waits_goes_back_at_once_when_the_scheduler_closes(clock: VirtualClock, from_source: bool) -> None:
    stage = Stage(clock, from_source=from_source)
    ids = numbered(1_500)
    stage.takes_s = dict.fromkeys(ids[1_000:], 1)
    await stage.put(*ids)
    async with stage.scheduler:
        await stage.begun(1_000 + LIMIT)
        closes_s = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - closes_s < 1.1
    assert len(stage.began) == 1_000 + LIMIT
    assert stage.held == 0


# --- messages that have lapsed ----------------------------------------------------------------------------


async def put_lapsed(stage: Stage, lapses: int, *ids: str, lane: str = LANE) -> None:
    now = stage.store.memory.now_ms()
    records = [Record(Envelope(each, lane), 1, now, NO_OP, lapses=lapses) for each in ids]
    await stage.store.memory.put_back([PutBack(record, now) for record in records])


async def test_l5_a_message_that_has_lapsed_does_not_wait_in_this_process(
    clock: VirtualClock, from_source: bool
) -> None:
    stage = Stage(clock, from_source=from_source)
    await stage.put(*numbered(1_000))
    lapsed = [f"lapsed {i:03}" for i in range(400)]
    stage.takes_s = dict.fromkeys(lapsed, 0.01)
    held: list[int] = []
    async with stage.scheduler:
        await stage.begun(900)
        await put_lapsed(stage, 1, *lapsed)
        while set(lapsed) - set(stage.began):
            held.append(len(stage.leased & set(lapsed)))
            await asyncio.sleep(0.001)
        await stage.ended()
    assert sum(each > LIMIT for each in held) <= 5, "only until the store has answered that they are given back"
    assert sorted(stage.began) == sorted([*numbered(1_000), *lapsed])


async def test_l5_nothing_that_waits_begins_beside_a_suspect(clock: VirtualClock) -> None:
    stage = Stage(clock)
    ids = numbered(1_500)
    stage.takes_s = {"suspect": 0.5} | dict.fromkeys(ids[1_000:], 0.01)
    await stage.put(*ids)
    async with stage.scheduler as scheduler:

        @scheduler.handler(name=OTHER)
        async def try_suspect(payload: bytes, context: Context) -> None:
            stage.began.append(context.id)
            await asyncio.sleep(0.5)

        await stage.begun(1_000)
        await put_lapsed(stage, 9, "suspect", lane=OTHER)
        await until(lambda: "suspect" in stage.began, "the suspect is tried")
        before = len(stage.began)
        assert stage.held > 1
        await asyncio.sleep(0.4)
        assert stage.began[before:] == []
        await scheduler.run_until_idle()
    assert sorted(stage.began) == sorted([*ids, "suspect"])


# --- a store and a source -------------------------------------------------------------------------------------


async def test_b2_messages_of_the_store_and_of_a_source_run_in_turn(clock: VirtualClock) -> None:
    stage, ids, own = Stage(clock, from_source=True), numbered(10_000), [f"own {i:04}" for i in range(3_000)]
    await stage.put(*ids)
    puts = [Put(new_op(), Envelope(each, LANE), After(0)) for each in own]
    for start in range(0, len(puts), 500):
        await stage.own.memory.apply(puts[start : start + 500])
    async with stage.scheduler as scheduler:
        await stage.ended()
        await scheduler.run_until_idle()
    assert sorted(stage.began) == sorted(ids + own), "each once"
    assert [each for each in stage.began if not each.startswith("own")] == ids
    assert stage.began[-1] not in own, "the store's messages do not wait until the source is empty"
    first = stage.began[: len(own)]
    assert 0.2 * len(own) < sum(each.startswith("own") for each in first) < 0.8 * len(own)


async def test_l5_nothing_that_waits_begins_beside_the_suspect_of_a_source(clock: VirtualClock) -> None:
    stage, ids = Stage(clock, from_source=True), numbered(1_500)

    @stage.scheduler.handler(name=OTHER)
    async def other(payload: bytes, context: Context) -> None:
        stage.began.append(context.id)
        stage.most_held = max(stage.most_held, len(stage.own.memory._table.leased))
        if context.id >= ids[1_000]:
            await asyncio.sleep(0.01)

    for start in range(0, len(ids), 500):
        puts = [Put(new_op(), Envelope(each, OTHER), After(0)) for each in ids[start : start + 500]]
        await stage.own.memory.apply(puts)
    stage.takes_s = {"suspect": 0.5}
    async with stage.scheduler as scheduler:
        await stage.begun(1_000)
        await put_lapsed(stage, 9, "suspect")
        await until(lambda: "suspect" in stage.began, "the suspect is tried")
        before = len(stage.began)
        await asyncio.sleep(0.4)
        assert stage.began[before:] == []
        await stage.ended()
        await scheduler.run_until_idle()
    assert stage.most_held > LIMIT
    assert sorted(stage.began) == sorted([*ids, "suspect"])
