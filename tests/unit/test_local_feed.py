"""Sources whose messages are in this process already: runners settle and claim between two runs, without a wait."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from aiodelay import Context, Retry, Scheduler, Telemetry
from aiodelay.core.ids import new_op
from aiodelay.core.transitions import NO_OP, is_release, returned, token_counter, token_for
from aiodelay.core.values import (
    After,
    Again,
    Claim,
    Claimed,
    Demand,
    Done,
    Envelope,
    Lane,
    Put,
    PutBack,
    Record,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    Stored,
)
from aiodelay.core.wakeup import WakeUp
from aiodelay.errors import StoreUnavailableError
from aiodelay.ports import Feed, LocalFeed
from aiodelay.testing.clock import VirtualClock
from tests.support.noted import NotedStore
from tests.support.sources import PlainSource
from tests.support.telemetry import Emitted
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

LANE, OTHER, LIMIT = "work", "other", 16
SOON = Retry(attempts=3, first="100ms", jitter=0)


class LocalSource(PlainSource):
    """A source that holds its messages in this process.

    Attributes:
        left: The ids that are to be given out, in order.
        taken: The records in flight, by id.
        calls: How often each method was called.
        most_taken: The largest number of records that were in flight at once.
        fails: Names of the methods whose next calls raise.
        answers_s: The time that each `claim` and `settle` takes.
    """

    def __init__(self, name: str = "local") -> None:
        self.name = name
        self.left: deque[str] = deque()
        self.taken: dict[str, Record] = {}
        self.calls: Counter[str] = Counter()
        self.fails: Counter[str] = Counter()
        self.most_taken = self._number = 0
        self.answers_s = 0.0
        self._wakeup = WakeUp()

    @asynccontextmanager
    async def feed(
        self,
        address: str,
        consumer: str,
        put_back: Callable[[Sequence[PutBack]], Awaitable[Sequence[Stored]]],
        now_ms: Callable[[], int],
    ) -> AsyncIterator[Feed]:
        self._put_back, self._now_ms = put_back, now_ms
        assert isinstance(self, LocalFeed)
        yield self

    def push(self, *ids: str) -> None:
        self.left += ids
        self.wake()

    def _note(self, name: str) -> None:
        self.calls[name] += 1
        if self.fails[name]:
            self.fails[name] -= 1
            raise RuntimeError(f"{name} fails")

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        self._note("claim")
        await asyncio.sleep(self.answers_s)
        return self._give_out(demand, lease_ms)

    def claim_nowait(self, demand: Mapping[Lane, Demand], *, lease_ms: int) -> Claimed:
        self._note("claim_nowait")
        return self._give_out(demand, lease_ms)

    def _give_out(self, demand: Mapping[Lane, Demand], lease_ms: int) -> Claimed:
        ((lane, wanted),) = demand.items()
        now, claims = self._now_ms(), list[Claim]()
        while self.left and len(claims) < wanted.messages:
            self._number += 1
            record = Record(Envelope(self.left.popleft(), lane), 1, now, NO_OP)
            self.taken[record.id] = record
            claims.append(Claim(record, token_for(now + lease_ms, token_counter(self._number))))
        self.most_taken = max(self.most_taken, len(self.taken))
        return Claimed(claims, now, now if claims else None)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        self._note("settle")
        await asyncio.sleep(self.answers_s)
        await self._put_back(self._leaving(settlements))
        return self._end(settlements)

    def settle_nowait(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome] | None:
        self._note("settle_nowait")
        return None if self._leaving(settlements) else self._end(settlements)

    def _leaving(self, settlements: Sequence[Settlement]) -> list[PutBack]:
        held = [(self.taken[each.id], each) for each in settlements]
        return [
            returned(record, each)
            for record, each in held
            if not isinstance(each, Done) and not is_release(record, each)
        ]

    def _end(self, settlements: Sequence[Settlement]) -> list[SettleOutcome]:
        for each in settlements:
            record = self.taken.pop(each.id)
            if isinstance(each, Again) and is_release(record, each):
                self.left.appendleft(record.id)
        return [SettleOutcome.SETTLED] * len(settlements)

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        return [RenewOutcome.RENEWED] * len(renewals)

    def beat(self, ids: Collection[str]) -> None: ...

    async def wait(self, *, until_ms: int | None) -> None:
        await self._wakeup.wait(10)

    def wake(self) -> None:
        self._wakeup.set()

    def clear(self) -> None:
        self._wakeup.clear()


class Stage:
    """A scheduler with a handler of a local source.

    Attributes:
        takes_s: How long the runs of some ids take. Other runs end at once.
        fail_once: The ids whose first runs raise.
        hooks: Functions that runs of some ids call.
        next: Another source, which no handler has yet.
    """

    def __init__(self, clock: VirtualClock, *, concurrency: int = LIMIT, telemetry: Telemetry | None = None) -> None:
        self.store, self.source, self.next = NotedStore(clock), LocalSource(), LocalSource("next")
        sources = [self.source, self.next]
        self.scheduler = Scheduler(self.store, sources=sources, clock=clock, telemetry=telemetry)
        self.takes_s: dict[str, float] = {}
        self.fail_once: set[str] = set()
        self.hooks: dict[str, Callable[[], Awaitable[None]]] = {}
        self.began: list[str] = []
        self.running = self.most_running = 0

        @self.scheduler.handler(name=LANE, source="local:x", concurrency=concurrency, retry=SOON)
        async def work(payload: bytes, context: Context) -> None:
            self.began.append(context.id)
            if context.id in self.hooks:
                await self.hooks[context.id]()
            if context.id in self.fail_once:
                self.fail_once.remove(context.id)
                raise ValueError("no answer")
            if takes_s := self.takes_s.get(context.id, 0):
                self.running += 1
                self.most_running = max(self.most_running, self.running)
                await asyncio.sleep(takes_s)
                self.running -= 1

    async def ended(self) -> None:
        await until(lambda: not self.source.left and not self.source.taken, "all messages have ended")


def numbered(n: int) -> list[str]:
    return [f"m{i:05}" for i in range(n)]


@pytest.mark.parametrize("concurrency", [1, LIMIT])
async def test_quick_runs_are_settled_and_followed_without_a_wait_in_order(
    clock: VirtualClock, concurrency: int
) -> None:
    stage = Stage(clock, concurrency=concurrency)
    stage.source.push(*numbered(1_000))
    async with stage.scheduler:
        await stage.ended()
    assert stage.began == numbered(1_000)
    assert stage.source.calls["claim_nowait"] >= 0.9 * 1_000 // concurrency
    assert stage.source.most_taken == concurrency, "no message is claimed before there is room to run it"


async def test_runs_that_wait_are_settled_together_by_the_loops(clock: VirtualClock) -> None:
    stage, ids = Stage(clock), numbered(LIMIT * 20)
    stage.takes_s = dict.fromkeys(ids, 1)
    stage.source.push(*ids)
    async with stage.scheduler:
        await stage.ended()
    assert stage.most_running == LIMIT
    assert sorted(stage.began) == ids
    assert stage.source.calls["claim_nowait"] == 0
    assert stage.source.calls["settle"] <= 20


async def test_a_retry_goes_through_the_store_and_the_runs_beside_it_go_on(clock: VirtualClock) -> None:
    stage, ids = Stage(clock), numbered(500)
    stage.fail_once = set(ids[::7])
    failing = sorted(stage.fail_once)
    stage.source.push(*ids)
    async with stage.scheduler as scheduler:
        await stage.ended()
        await scheduler.run_until_idle()
    assert sorted(stage.began) == sorted(ids + failing)
    assert stage.source.most_taken <= LIMIT


async def test_s7_nothing_is_claimed_or_settled_twice_while_a_call_is_under_way(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    stage, ids = Stage(clock), numbered(2_000)
    stage.fail_once, stage.source.answers_s = set(ids[::9]), 0.003
    stage.takes_s = dict.fromkeys(ids[::5], 0.002)
    stage.source.push(*ids)
    async with stage.scheduler:
        await stage.ended()
    assert sorted(set(stage.began)) == ids
    assert stage.source.most_taken <= LIMIT
    assert [each.message for each in caplog.records if each.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("name", ["claim_nowait", "settle_nowait"])
async def test_after_an_error_of_the_feed_nothing_is_lost_and_nothing_runs_twice(
    clock: VirtualClock, name: str
) -> None:
    stage, ids = Stage(clock), numbered(500)
    stage.source.fails[name] = 3
    stage.source.push(*ids)
    async with stage.scheduler:
        await stage.ended()
    assert stage.began == ids
    assert stage.source.fails[name] == 0


@pytest.mark.parametrize("concurrency", [1, LIMIT])
@pytest.mark.parametrize("takes_s", [0, 0.001, 0.1])
async def test_b2_the_store_and_a_source_get_turns_while_both_have_messages(
    clock: VirtualClock, takes_s: float, concurrency: int
) -> None:
    stage = Stage(clock, concurrency=concurrency)
    ids, retries = numbered(2_000), [f"retry {i:03}" for i in range(200)]
    stage.takes_s = dict.fromkeys(ids + retries, takes_s)

    async def put() -> None:
        await stage.store.memory.apply([Put(new_op(), Envelope(each, LANE), After(0)) for each in retries])

    stage.hooks[ids[100]] = put
    stage.source.push(*ids)
    async with stage.scheduler as scheduler:
        await until(lambda: not stage.source.left, "the source has given all out", 10_000)
        await scheduler.run_until_idle()
    assert sorted(stage.began) == sorted(ids + retries), "each once"
    at = [stage.began.index(each) for each in retries]
    assert max(at) < 1_500, "the store's messages do not wait until the source is empty"
    assert max(after - before for before, after in pairwise(sorted(at))) <= 40 * concurrency
    between = [stage.began.index(each) for each in ids if min(at) < stage.began.index(each) < max(at)]
    assert len(between) >= 100, "nor does the source wait until the store is empty"


async def test_l4_a_source_goes_on_while_the_store_whose_turn_it_is_does_not_answer(clock: VirtualClock) -> None:
    stage, ids = Stage(clock), numbered(2_000)
    stage.takes_s = dict.fromkeys(ids, 0.001)

    async def put() -> None:
        await stage.store.memory.apply([Put(new_op(), Envelope(f"retry {i}", LANE), After(0)) for i in range(200)])

    async def go_away() -> None:
        stage.store.errors["claim"] = [StoreUnavailableError("memory", "it is away")] * 100_000

    stage.hooks = {ids[100]: put, ids[200]: go_away}
    stage.source.push(*ids)
    async with stage.scheduler:
        await stage.ended()
        assert sum(each.startswith("retry") for each in stage.began) < 200, "the store was away before it was empty"


async def test_l4_turns_go_on_when_a_lane_gets_another_handler_while_the_first_ends(clock: VirtualClock) -> None:
    stage, ids = Stage(clock), numbered(5_000)
    stage.takes_s = {"long": 5}
    stage.source.push("long")
    stage.next.push(*ids)
    retries = [f"retry {i:04}" for i in range(5_000)]
    began: list[str] = []

    async def work(payload: bytes, context: Context) -> None:
        began.append(context.id)
        await asyncio.sleep(0.02)

    async with stage.scheduler as scheduler, asyncio.TaskGroup() as tasks:
        await until(lambda: stage.running, "the long run has begun")
        tasks.create_task(scheduler.remove_handler(LANE))
        await asyncio.sleep(0.1)
        for start in range(0, len(retries), 500):
            puts = [Put(new_op(), Envelope(each, LANE), After(0)) for each in retries[start : start + 500]]
            await stage.store.memory.apply(puts)
        scheduler.add_handler(work, name=LANE, source="next:x", concurrency=LIMIT)
        await until(lambda: not stage.next.left and not stage.next.taken, "the source has given all out")
        await scheduler.run_until_idle()
    assert sorted(began) == sorted(ids + retries)


async def test_calls_without_a_wait_are_measured(clock: VirtualClock) -> None:
    emitted = Emitted()
    stage = Stage(clock, telemetry=emitted.telemetry(tracing=False))
    stage.source.push(*numbered(500))
    async with stage.scheduler:
        await stage.ended()
        points = emitted.points()["messaging.client.operation.duration"]
    calls = Counter({labels["messaging.operation.name"]: value[0] for labels, value in points})
    assert stage.source.calls["claim_nowait"] > 20
    assert calls["claim"] >= stage.source.calls["claim_nowait"] + stage.source.calls["claim"]
    assert calls["settle"] == stage.source.calls["settle_nowait"] + stage.source.calls["settle"]


async def test_no_message_is_taken_once_the_scheduler_closes(clock: VirtualClock) -> None:
    stage, ids = Stage(clock), numbered(1_000)
    stage.takes_s = dict.fromkeys(ids[500:], 1)
    stage.source.push(*ids)
    async with stage.scheduler:
        await until(lambda: stage.running == LIMIT, "all places are taken")
    assert stage.began == ids[: 500 + LIMIT]
    assert not stage.source.taken
    assert len(stage.source.left) == 500 - LIMIT


async def test_l5_no_message_is_taken_beside_a_suspect(clock: VirtualClock) -> None:
    stage, ids = Stage(clock), numbered(5_000)
    stage.takes_s = dict.fromkeys(ids[::20], 0.001)
    stage.source.push(*ids)

    @stage.scheduler.handler(name=OTHER)
    async def try_suspect(payload: bytes, context: Context) -> None:
        stage.began.append(context.id)
        await asyncio.sleep(0.5)

    async with stage.scheduler:
        await until(lambda: stage.began, "the first run has begun")
        now = stage.store.memory.now_ms()
        suspect = Record(Envelope("suspect", OTHER), 1, now, NO_OP, lapses=9)
        await stage.store.memory.put_back([PutBack(suspect, now)])
        await until(lambda: "suspect" in stage.began, "the suspect is tried")
        await asyncio.sleep(0.01)  # runs that have begun end
        before = len(stage.began)
        assert stage.source.left
        await asyncio.sleep(0.4)
        assert stage.began[before:] == []
        await stage.ended()
    assert sorted(stage.began) == sorted([*ids, "suspect"])
