"""L1, B1: the claims of a process whose event loop is blocked. The test plays the thread of the pulse."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from threading import Event, Thread
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from aiodelay.core.ids import new_id, new_op
from aiodelay.core.values import (
    After,
    Claim,
    Demand,
    Envelope,
    Put,
    Query,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
)
from aiodelay.engine.delivery import lease_book, settling
from aiodelay.engine.delivery.blocked_loop import BlockedLoop
from aiodelay.engine.delivery.lease_book import Held, LeaseBook, Outgoing
from aiodelay.engine.delivery.waiting_messages import WaitingMessages
from aiodelay.errors import StoreUnavailableError
from aiodelay.ports import Work
from aiodelay.ports.pulse import Step
from aiodelay.testing.clock import VirtualClock, VirtualLoop
from aiodelay.testing.faults import Fault
from tests.support.interleaving import interleaved
from tests.support.noted import NotedStore

pytestmark = pytest.mark.asyncio

T = TypeVar("T")
LANE = "work"
LEASE_MS = 15_000
THIRD_S = LEASE_MS / 3000
PATIENCE_S = 60.0


class DirectPulse:
    """Asks a memory store without an event loop, as a connection of its own does.

    Attributes:
        loses: So many of the next answers are lost.
        may_answer: No call is answered before.
        is_asked: Whether there was a call.
    """

    is_calling = False

    def __init__(self, work: Work) -> None:
        self._work = work
        self.loses = 0
        self.may_answer, self.is_asked = Event(), Event()
        self.may_answer.set()
        self.renewals: list[Sequence[Renewal]] = []
        self.settlements: list[Sequence[Settlement]] = []

    def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        self.renewals.append(renewals)
        return self._answer(self._work.renew(renewals))

    def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        self.settlements.append(settlements)
        return self._answer(self._work.settle(settlements))

    def _answer(self, call: Coroutine[Any, Any, T]) -> T:
        answer = at_once(call)
        self.is_asked.set()
        assert self.may_answer.wait(PATIENCE_S)
        if self.loses:
            self.loses -= 1
            raise StoreUnavailableError("memory://", "the answer was lost")
        return answer

    def may_begin(self) -> bool:
        return True

    def step(self, tokens: Collection[int]) -> Step:
        raise NotImplementedError

    def wait(self, ms: int) -> None: ...

    def wake(self) -> None: ...

    def restart(self) -> None: ...

    def leave(self) -> None: ...


def at_once(call: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that waits for nothing."""
    try:
        call.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it waits")


def pass_time(seconds: int) -> None:
    """Let time pass while the event loop does nothing."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop._now_us += seconds * 1_000_000


class Stage:
    """A lease book that runs, its store, and the thread."""

    def __init__(self, clock: VirtualClock, store: NotedStore, work: Work, apart: Work) -> None:
        self.clock, self.store, self._work, self._apart = clock, store, work, apart
        self.book = LeaseBook(work, clock, clock.now_ms, LEASE_MS, lambda: None)
        self.running = asyncio.create_task(self.book.run())
        self.ended: list[tuple[str, SettleOutcome]] = []
        self.lost_ids: list[str] = []
        self.waiting = WaitingMessages()
        self.pulse = DirectPulse(apart)
        loop = asyncio.get_running_loop()
        take = lambda: self.waiting.take(lambda held: True)  # noqa: E731
        self.thread = BlockedLoop(self.book, self.pulse, take, loop.call_soon_threadsafe, None)

    def settled(self, held: Held, outcome: SettleOutcome | None) -> None:
        assert outcome is not None
        self.ended.append((held.claim.record.id, outcome))

    def lost(self, held: Held) -> None:
        self.lost_ids.append(held.claim.record.id)

    async def hold(self, *ids: str) -> list[Held]:
        await self.store.memory.apply([Put(new_op(), Envelope(each, LANE), After(0)) for each in ids])
        asked_at_ms = self.book.clock.monotonic_ms()
        claimed = await self._work.claim({LANE: Demand(len(ids))}, request=new_id(), lease_ms=LEASE_MS)
        self.book.read(asked_at_ms)
        return self.book.add(claimed.claims, self)

    def done(self, held: Held) -> None:
        self.book.settle(held, settling.done(held.claim.record, held.claim.token, 0))

    def block(self, seconds: int) -> None:
        """Let time pass in which the event loop does nothing. The thread looks each second what there is to do."""
        for _ in range(seconds):
            pass_time(1)
            while self.thread.relieve():
                pass
            assert self.elsewhere() == []

    @asynccontextmanager
    async def call_in_thread(self) -> AsyncIterator[None]:
        """Make a call in another thread. It ends after the block."""
        self.pulse.may_answer.clear()
        pass_time(round(THIRD_S))
        thread = Thread(target=self.thread.relieve, daemon=True)
        thread.start()
        assert self.pulse.is_asked.wait(PATIENCE_S)
        yield
        self.pulse.may_answer.set()
        thread.join(PATIENCE_S)

    def elsewhere(self) -> Sequence[Claim]:
        """Claim what there is, as another process does."""
        self.store.memory._claiming.return_lapsed(self.clock.now_ms(), 100)
        queue = self.store.memory._table.lanes[LANE]
        return [] if queue.first() is None else [Claim(queue.first().record, 0)]  # type: ignore[union-attr]

    async def left(self) -> list[str]:
        return [each.record.id for each in await self.store.memory.search(Query())]


@pytest_asyncio.fixture
async def stage(clock: VirtualClock) -> AsyncIterator[Stage]:
    store = NotedStore(clock)
    async with store.work("here", [LANE]) as work, store.memory.work("here too", [LANE]) as apart:
        stage = Stage(clock, store, work, apart)
        yield stage
        store.heal()
        stage.book.close()
        await stage.running


async def test_l1_leases_are_renewed_while_the_loop_is_blocked_and_afterwards(stage: Stage) -> None:
    await stage.hold("a", "b")
    stage.block(60)
    assert [len(each) for each in stage.pulse.renewals] == [2] * 12
    await stage.hold("c")
    await asyncio.sleep(60)
    assert stage.elsewhere() == []
    assert stage.lost_ids == []


@pytest.mark.parametrize("fault", ["late_reply", "delay", "reply_lost", "unavailable"])
async def test_l1_a_renewal_that_was_under_way_when_the_loop_blocked_costs_no_lease(stage: Stage, fault: Fault) -> None:
    """`delay`: the store carries out the loop's renewal after those of the thread; with the others, before or never."""
    await stage.hold("m")
    stage.store.inject(fault, "renew", times=None, lasting="30s")
    await asyncio.sleep(THIRD_S + 0.5)
    assert stage.store.made("renew")
    stage.block(60)
    stage.store.heal()
    assert len(stage.pulse.renewals) > 10
    await asyncio.sleep(60)
    assert stage.elsewhere() == []
    assert stage.lost_ids == []


async def test_l1_a_renewal_of_the_thread_whose_answer_was_lost_is_repeated_as_it_was(stage: Stage) -> None:
    await stage.hold("m")
    stage.pulse.loses = 1
    stage.block(int(THIRD_S))
    await asyncio.sleep(1)
    [[first]] = stage.pulse.renewals
    [call] = stage.store.made("renew")
    assert (call.asked, call.answer) == ([first], [RenewOutcome.RENEWED])
    await asyncio.sleep(60)
    assert stage.lost_ids == []


async def test_b1_a_run_that_ended_while_the_loop_was_blocked_is_settled_by_the_thread(stage: Stage) -> None:
    held, _ = await stage.hold("ended", "goes on")
    stage.done(held)
    stage.block(60)
    assert await stage.left() == ["goes on"]
    assert stage.ended == [], "the loop has had no turn"
    await asyncio.sleep(1)
    assert stage.ended == [("ended", SettleOutcome.SETTLED)]
    assert stage.store.made("settle") == []


@pytest.mark.parametrize("fault", ["late_reply", "delay", "reply_lost"])
async def test_b1_a_settlement_that_was_under_way_when_the_loop_blocked_settles_once(
    stage: Stage, fault: Fault
) -> None:
    (held,) = await stage.hold("m")
    stage.store.inject(fault, "settle", lasting="30s")
    stage.done(held)
    for _ in range(3):
        await asyncio.sleep(0)
    assert stage.store.made("settle")
    stage.block(60)
    await asyncio.sleep(60)
    assert await stage.left() == []
    [(_, outcome)] = stage.ended
    assert outcome is (SettleOutcome.GONE if fault == "reply_lost" else SettleOutcome.SETTLED)


async def test_b1_a_settlement_waits_for_the_token_of_a_renewal_under_way(stage: Stage) -> None:
    (held,) = await stage.hold("m")
    stage.store.inject("late_reply", "renew", lasting="30s")
    await asyncio.sleep(THIRD_S + 0.5)
    stage.done(held)
    stage.block(60)
    await asyncio.sleep(60)
    assert await stage.left() == []
    assert stage.ended == [("m", SettleOutcome.SETTLED)]


async def test_l1_while_the_thread_has_a_call_under_way_the_loop_sends_none(stage: Stage) -> None:
    held, _ = await stage.hold("a", "b")
    stage.done(held)
    async with stage.call_in_thread():
        await asyncio.sleep(1)
        assert stage.store.made("renew") == stage.store.made("settle") == []
    await asyncio.sleep(0.1)
    assert stage.ended == [("a", SettleOutcome.SETTLED)]
    await asyncio.sleep(60)
    assert stage.elsewhere() == []
    assert stage.lost_ids == []


async def test_l1_the_loop_notes_no_answer_while_the_thread_has_a_call_under_way(stage: Stage) -> None:
    (held,) = await stage.hold("m")
    stage.store.inject("late_reply", "renew", lasting="1s")
    await asyncio.sleep(THIRD_S + 0.5)
    token = held.claim.token
    async with stage.call_in_thread():
        await asyncio.sleep(1)
        assert held.claim.token == token
    await asyncio.sleep(0.1)
    assert held.claim.token > token


async def test_b1_messages_whose_runs_have_not_begun_go_back_and_count_once(stage: Stage) -> None:
    running, *waiting = await stage.hold("runs", "a", "b")
    stage.waiting.extend(waiting)
    assert not stage.waiting.take(lambda held: held is running)
    assert stage.thread.relieve()
    assert not stage.thread.relieve()
    assert stage.waiting.next() is None, "the thread owns them"
    assert [each.record.id for each in stage.elsewhere()] == ["a"]
    await asyncio.sleep(1)
    assert stage.ended == [("a", SettleOutcome.SETTLED), ("b", SettleOutcome.SETTLED)]
    assert len(stage.book) == 1


async def test_s7_a_claim_that_the_thread_finds_lost_begins_no_run_and_is_told_once(stage: Stage) -> None:
    (held,) = await stage.hold("m")
    pass_time(16)
    assert stage.elsewhere(), "others have got it"
    assert stage.thread.relieve()
    assert held.is_lost
    assert not stage.thread.relieve(), "it is not renewed again"
    await asyncio.sleep(60)
    assert stage.lost_ids == ["m"]
    assert len(stage.book) == 0


async def test_l5_suspects_in_a_trial_are_left_to_the_heartbeat(stage: Stage) -> None:
    await stage.hold("m")
    for _ in range(2):
        pass_time(16)
        assert stage.elsewhere()
        stage.book.forget(stage.book.held()[0])
        claimed = await stage._work.claim({LANE: Demand(1)}, request=new_id(), lease_ms=LEASE_MS)
        stage.book.read(stage.book.clock.monotonic_ms())
        (held,) = stage.book.add(claimed.claims, stage)
    assert stage.book.suspects() == [held.claim.record.id]
    pass_time(6)
    assert not stage.thread.relieve()


async def test_b1_whoever_takes_a_waiting_message_out_owns_it(stage: Stage) -> None:
    held = await stage.hold("a", "b", "c", "d")
    waiting = WaitingMessages(held)
    assert waiting.take(lambda each: each in (held[1], held[3])) == [held[1], held[3]]
    assert waiting.next() is held[0]
    assert waiting.take_last(1) == []
    assert waiting.take_last(0) == [held[2]]
    assert waiting.next() is None


async def test_b1_the_loop_chooses_settlements_while_the_thread_gives_a_message_back(stage: Stage) -> None:
    """The loop goes on at the moment at which the thread gives a message back, before each step of the choice."""
    first, second = await stage.hold("first", "second")
    for step in count(-1):
        outgoing, chosen = Outgoing(), list[Held]()
        outgoing.ended.append(first)
        choose = partial(_choose, outgoing, chosen)
        if not interleaved(choose, partial(outgoing.ended.append, second), before_step=step, inside=lease_book):
            break
        assert chosen in ([first], [first, second])
        assert outgoing.batch() == [first, second]
    assert step > 0


def _choose(outgoing: Outgoing, chosen: list[Held]) -> None:
    chosen += outgoing.batch()


class Changing(deque[Held]):
    """A deque that another thread changes while it is read for the first time. Only without the GIL this happens."""

    is_read = False

    def __iter__(self) -> Iterator[Held]:
        if not self.is_read:
            self.is_read = True
            raise RuntimeError("deque mutated during iteration")
        return super().__iter__()


class ChangingWaiting(Changing, WaitingMessages):
    """Waiting messages of which the event loop takes one while the thread reads them."""


async def test_b1_the_thread_reads_again_what_the_loop_changes_meanwhile(stage: Stage) -> None:
    ended, *waiting = await stage.hold("ended", "a", "b")
    stage.book.outgoing.ended = Changing()
    stage.done(ended)
    stage.waiting = ChangingWaiting(waiting)
    while stage.thread.relieve():
        pass
    assert [settlement.id for [*batch] in stage.pulse.settlements for settlement in batch] == ["ended", "a", "b"]
