"""The dispatch loop: its calls to the store, and its behaviour while the store or the event loop fails."""

from __future__ import annotations

import asyncio
import random
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import pytest

from aiodelay import Context, Message, Scheduler
from aiodelay.core.ids import new_id, new_op
from aiodelay.core.transitions import LONGEST_TRIAL_MS, NO_OP, SILENT_LEASES, Trials
from aiodelay.core.values import LEASE_MS, After, CancelOutcome, Demand, Envelope, Put, PutBack, Query, Record
from aiodelay.memory import MemoryStore
from aiodelay.testing.clock import VirtualClock, VirtualLoop
from aiodelay.testing.faults import Fault
from tests.support.noted import NotedStore

pytestmark = pytest.mark.asyncio

LANE = "work"
TO = f"handler:{LANE}"
SAFETY_POLL_S = MemoryStore.traits.safety_poll_ms // 1000
HOUR_S = 3_600
LONGEST_PAUSE_MS = 2_000


class Stage:
    """A scheduler with one handler, the store under it, and when which message began to be handled."""

    def __init__(
        self, clock: VirtualClock, *, concurrency: int = 16, takes_s: float = 0, claim_ahead: bool = True
    ) -> None:
        self.clock, self.store = clock, NotedStore(clock)
        self.scheduler = Scheduler(self.store, clock=clock, claim_ahead=claim_ahead)
        self.takes_s, self.outlives_cancellation_s = takes_s, 0.0
        self.began: list[tuple[int, str]] = []
        self.running = 0
        self.on_begin: Callable[[str], None] = lambda message_id: None

        @self.scheduler.handler(name=LANE, concurrency=concurrency)
        async def work(payload: bytes, context: Context) -> None:
            self.began.append((self.now_ms, context.id))
            self.running += 1
            self.on_begin(context.id)
            try:
                if self.takes_s:
                    await asyncio.sleep(self.takes_s)
            except CancelledError:
                await asyncio.sleep(self.outlives_cancellation_s)
            self.running -= 1

    @property
    def now_ms(self) -> int:
        return self.clock.monotonic_ms()

    @property
    def ids(self) -> list[str]:
        return [message_id for _, message_id in self.began]

    async def put(self, *ids: str, after_s: float = 0, lane: str = LANE) -> None:
        """Put messages as another process does."""
        after = After(round(after_s * 1000))
        await self.store.memory.apply([Put(new_op(), Envelope(each, lane), after) for each in ids])

    @property
    def in_flight(self) -> int:
        return len(self.store.memory._table.leased)

    async def lapses(self) -> int:
        return sum(entry.event == "lapsed" for entry in await self.store.memory.journal(limit=100_000))

    def claimed_at(self, since_ms: int = 0) -> list[int]:
        return [call.asked_ms for call in self.store.made("claim", since_ms)]


def gaps(times: Sequence[int]) -> list[int]:
    return [after - before for before, after in pairwise(times)]


# --- demand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_no_more_is_in_flight_than_was_asked_for_also_while_concurrency_changes(
    clock: VirtualClock, seed: int
) -> None:
    chance = random.Random(seed)
    stage = Stage(clock, concurrency=5, claim_ahead=False)
    limit, exceeded = 5, list[tuple[int, int]]()

    def begin(message_id: str) -> None:
        stage.takes_s = chance.choice((0, 0.001, 0.3, 0.9))
        if stage.running > limit:
            exceeded.append((stage.running, limit))

    stage.on_begin = begin
    if seed:
        stage.store.inject("late_reply", "claim", "settle", times=None, probability=0.5, lasting="30ms")
    await stage.put(*(f"m{n}" for n in range(1_500)))
    async with stage.scheduler as scheduler:
        for limit in [5, 20, 1, 7, 3, 40, 2, 2, 16]:
            scheduler.set_concurrency(LANE, limit)
            await asyncio.sleep(1.1)  # longer than any run: what began under the limit before has ended
            seen = set[int]()
            for _ in range(60):
                await asyncio.sleep(0.015)
                seen.add(stage.in_flight)
            assert max(seen) == limit, "as many as asked for, and never more"
        assert exceeded == []
        assert await stage.store.memory.search(Query()), "there was always more to do"


async def test_a_lower_concurrency_set_by_a_handler_holds_for_those_that_have_not_begun(clock: VirtualClock) -> None:
    stage = Stage(clock, concurrency=5, takes_s=10)
    most = 0

    def begin(message_id: str) -> None:
        nonlocal most
        if message_id == "m1":
            stage.scheduler.set_concurrency(LANE, 3)
        most = max(most, stage.running)

    stage.on_begin = begin
    await stage.put(*(f"m{n}" for n in range(20)))
    async with stage.scheduler:
        await asyncio.sleep(65)
    assert most == 3
    assert sorted(stage.ids) == sorted(f"m{n}" for n in range(20))


async def test_a_lane_whose_handler_is_busy_is_not_asked_for(clock: VirtualClock) -> None:
    stage = Stage(clock, concurrency=2, takes_s=10)

    @stage.scheduler.handler(name="other", concurrency=3)
    async def other(payload: bytes) -> None: ...

    await stage.put("a", "b", "c")
    async with stage.scheduler:
        await asyncio.sleep(1)
        await stage.put("d", lane="other")
        await asyncio.sleep(1)
        asked = [dict(call.asked) for call in stage.store.made("claim")]
        assert asked[0] == {LANE: Demand(2), "other": Demand(3)}
        assert {LANE: Demand(1)} not in asked
        assert all(list(each) == ["other"] for each in asked[1:])
        assert stage.ids == ["a", "b"]


async def test_l2_a_lane_is_asked_at_its_own_due_time_beside_a_busy_lane_with_more(clock: VirtualClock) -> None:
    stage = Stage(clock, concurrency=2, takes_s=1, claim_ahead=False)
    begun = list[int]()

    @stage.scheduler.handler(name="other")
    async def other(payload: bytes) -> None:
        begun.append(stage.now_ms - began_ms)

    await stage.put(*(f"m{n}" for n in range(20)))
    await stage.put("soon", after_s=0.25, lane="other")
    began_ms = stage.now_ms
    async with stage.scheduler:
        await asyncio.sleep(0.2)
        assert [list(call.asked) for call in stage.store.made("claim")] == [[LANE, "other"]]
        await asyncio.sleep(0.1)
        assert begun == [250]
        await stage.put("now", lane="other")
        await asyncio.sleep(0.1)
        assert begun == [250, 300]
        await asyncio.sleep(1)
        assert len(stage.ids) == 4


async def test_runs_that_end_make_no_claim_from_a_lane_that_has_nothing(clock: VirtualClock) -> None:
    stage = Stage(clock, concurrency=2, takes_s=1, claim_ahead=False)

    @stage.scheduler.handler(name="idle")
    async def idle(payload: bytes) -> None: ...

    await stage.put(*(f"m{n}" for n in range(20)))
    async with stage.scheduler:
        await asyncio.sleep(8.5)
        assert len(stage.ids) == 18
        assert [list(call.asked) for call in stage.store.made("claim")] == [[LANE, "idle"]] * 9


async def test_the_next_claim_is_on_its_way_while_the_last_is_handled(clock: VirtualClock) -> None:
    stage = Stage(clock, takes_s=1)
    async with stage.scheduler:
        await asyncio.sleep(1)
        stage.store.inject("late_reply", "claim", times=None, lasting="1s")
        await stage.put("a1", "a2", after_s=9)
        await stage.put("b1", "b2", after_s=9.5)
        await asyncio.sleep(20)
    begun = [(at - stage.began[0][0], message_id) for at, message_id in stage.began]
    assert begun == [(0, "a1"), (0, "a2"), (1_000, "b1"), (1_000, "b2")]


@pytest.mark.parametrize("fault", ["reply_lost", "request_lost", "unavailable"])
async def test_a_claim_without_an_answer_is_repeated_with_its_request_until_it_has_one(
    clock: VirtualClock, fault: Fault
) -> None:
    stage = Stage(clock)
    async with stage.scheduler:
        await asyncio.sleep(1)
        await stage.put(*(f"m{n}" for n in range(5)), after_s=1)
        stage.store.inject(fault, "claim", times=4)
        await asyncio.sleep(10)
        calls = stage.store.made("claim", 1_000)
        assert len({call.request for call in calls[:5]}) == 1
        assert [call.asked for call in calls[:5]] == [calls[0].asked] * 5
        assert len({call.request for call in calls[4:]}) == len(calls) - 4, "each answered claim is followed by a new"
    assert stage.ids == [f"m{n}" for n in range(5)]
    assert await stage.lapses() == 0


async def test_s5_a_message_that_is_cancelled_while_its_claim_is_repeated_does_not_run(clock: VirtualClock) -> None:
    stage = Stage(clock)
    async with stage.scheduler:
        await stage.put("m", after_s=1)
        await asyncio.sleep(0.5)  # the claims before the due time have been answered
        stage.store.inject("reply_lost", "claim", times=None)
        await asyncio.sleep(4)  # longer than the longest pause between two calls
        assert await stage.scheduler.cancel("m") == CancelOutcome.IN_FLIGHT
        await asyncio.sleep(1)
        stage.store.heal()
        await asyncio.sleep(60)
    assert stage.ids == []


async def test_l1_the_lease_of_a_repeated_claim_is_renewed_as_one_that_began_with_the_first_call(
    clock: VirtualClock,
) -> None:
    stage = Stage(clock, takes_s=60)
    async with stage.scheduler:
        await stage.put("m", after_s=1)
        await asyncio.sleep(0.5)  # the claims before the due time have been answered
        stage.store.inject("reply_lost", "claim", times=None)
        await asyncio.sleep((LEASE_MS - LONGEST_PAUSE_MS) / 1000)
        stage.store.heal()
        await asyncio.sleep(90)
    assert (stage.ids, await stage.lapses()) == (["m"], 0)


# --- when it looks ----------------------------------------------------------------------------------------


async def test_l2_it_sleeps_until_the_next_is_due_and_looks_only_now_and_then_meanwhile(clock: VirtualClock) -> None:
    stage = Stage(clock)
    await stage.put("in an hour", after_s=HOUR_S)
    async with stage.scheduler:
        await asyncio.sleep(HOUR_S - 0.001)
        assert len(stage.claimed_at()) <= HOUR_S / SAFETY_POLL_S + 10
        assert max(gaps(stage.claimed_at())) == SAFETY_POLL_S * 1000
        assert stage.ids == []
        await asyncio.sleep(0.002)
    assert stage.began == [(HOUR_S * 1000, "in an hour")]


async def test_l2_a_run_that_ends_asks_for_nothing_if_the_last_claim_left_nothing(clock: VirtualClock) -> None:
    stage = Stage(clock, takes_s=1)
    async with stage.scheduler:
        await asyncio.sleep(1)
        await stage.put("a", after_s=0.5)
        await asyncio.sleep(0.6)
        since_ms = stage.now_ms
        await asyncio.sleep(2)
        assert stage.ids == ["a"]
        assert stage.in_flight == 0
        assert stage.claimed_at(since_ms) == []


async def test_l2_a_run_that_ends_during_a_claim_for_others_makes_room_for_the_next(clock: VirtualClock) -> None:
    stage = Stage(clock, concurrency=1, takes_s=1)

    @stage.scheduler.handler(name="other")
    async def other(payload: bytes) -> None: ...

    async with stage.scheduler:
        await asyncio.sleep(1)
        await stage.put("a")
        await asyncio.sleep(0.1)
        stage.store.inject("late_reply", "claim", times=1, lasting="1.5s")
        asked_ms = stage.now_ms
        await stage.put("b")
        await asyncio.sleep(2)
        assert stage.began[1] == (asked_ms + 1_500, "b")


async def test_l5_suspects_are_claimed_as_soon_as_what_has_lapsed_once_has_ended(clock: VirtualClock) -> None:
    stage = Stage(clock, takes_s=0.5)
    await put_lapsed(stage, lapsed=1)
    async with stage.scheduler:
        await asyncio.sleep(0)
        begins_ms = stage.now_ms
        await asyncio.sleep(0.1)
        await put_lapsed(stage, suspect=2)
        await asyncio.sleep(1)
    assert stage.began == [(begins_ms, "lapsed"), (begins_ms + 500, "suspect")]


async def test_l5_the_next_suspect_is_claimed_as_soon_as_the_last_has_ended(clock: VirtualClock) -> None:
    stage = Stage(clock, takes_s=0.5)
    now = stage.store.memory.now_ms()
    killers = [Record(Envelope(each, LANE), 1, now, NO_OP, lapses=2, kills=1) for each in ("a", "b")]
    await stage.store.memory.put_back([PutBack(record, now) for record in killers])
    async with stage.scheduler:
        await asyncio.sleep(0)
        begins_ms = stage.now_ms
        await asyncio.sleep(2)
    assert stage.began == [(begins_ms, "a"), (begins_ms + 500, "b")]


async def test_nothing_is_asked_while_nothing_is_wanted(clock: VirtualClock) -> None:
    stage = Stage(clock, concurrency=1, takes_s=600)
    await stage.put("long", "next")
    async with stage.scheduler:
        await asyncio.sleep(599)
        assert len(stage.claimed_at()) == 1
        await asyncio.sleep(2)
    assert stage.ids == ["long", "next"]


async def test_s1_l2_it_wakes_at_once_for_what_is_put_before_all_others(clock: VirtualClock) -> None:
    stage = Stage(clock)
    async with stage.scheduler as scheduler:
        await scheduler.schedule(b"", to=TO, delay="1h", id="late")
        await asyncio.sleep(10)
        await scheduler.schedule(b"", to=TO, delay="10s", id="sooner")
        await asyncio.sleep(2)
        await scheduler.schedule(b"", to=TO, delay="0s", id="now")
        await scheduler.schedule(b"", to=TO, delay="1ms", id="a moment later")
        await asyncio.sleep(20)
        await scheduler.fire("late")
        await asyncio.sleep(1)
    due = [10_000 + 2_000, 10_000 + 2_000 + 1, 10_000 + 10_000, 10_000 + 2_000 + 20_000]
    assert stage.began == list(zip(due, ["now", "a moment later", "sooner", "late"], strict=True))


# --- suspects ---------------------------------------------------------------------------------------------


async def stage_with_suspect(clock: VirtualClock) -> Stage:
    """Put a message that two processes died with, others of its lane, and one of another lane."""
    stage = Stage(clock)

    @stage.scheduler.handler(name="other")
    async def other(payload: bytes, context: Context) -> None:
        stage.began.append((stage.now_ms, context.id))

    await stage.put("suspect")
    async with stage.store.memory.work("dies", [LANE]) as work:
        for _ in range(2):
            (claim,) = (await work.claim({LANE: Demand(1)}, request=new_id(), lease_ms=20)).claims
            assert not claim.record.alone
            await asyncio.sleep(0.021)
    await stage.put("neighbour 1", "neighbour 2", after_s=0.5)
    await stage.put("elsewhere", after_s=0.5, lane="other")
    return stage


@pytest.mark.parametrize(
    ("takes_s", "alone_ms"), [(0.7, 700), (60, 1_000)], ids=["until it has settled", "for a second"]
)
async def test_l5_while_a_suspect_is_tried_alone_nothing_else_is_claimed(
    clock: VirtualClock, takes_s: float, alone_ms: int
) -> None:
    stage = await stage_with_suspect(clock)
    stage.takes_s = takes_s
    async with stage.scheduler as scheduler:
        begins_ms = stage.now_ms
        await asyncio.sleep(0.6)
        await scheduler.schedule(b"", to=TO, delay="0s", id="new")
        scheduler.set_concurrency(LANE, 20)
        await asyncio.sleep(10)
        first, second, *_ = stage.store.made("claim", begins_ms)
        assert [claim.record.id for claim in first.answer.claims] == ["suspect"]
        assert first.answer.claims[0].record.alone
        assert second.asked_ms == begins_ms + alone_ms
        await asyncio.sleep(60)
    assert stage.began[0] == (begins_ms, "suspect")
    others = {"neighbour 1", "neighbour 2", "new", "elsewhere"}
    assert {(at, each) for at, each in stage.began[1:]} == {(begins_ms + alone_ms, each) for each in others}
    assert await stage.lapses() == 2


async def test_l5_a_suspect_whose_lease_cannot_be_renewed_holds_up_nobody(clock: VirtualClock) -> None:
    stage = await stage_with_suspect(clock)
    stage.takes_s = stage.outlives_cancellation_s = 120
    async with stage.scheduler:
        begins_ms = stage.now_ms
        stage.store.inject("unavailable", "renew", times=None)
        await asyncio.sleep(SILENT_LEASES * LEASE_MS / 1000 + 1)
        assert [each for each in stage.ids if each == "suspect"] == ["suspect"]
        begun = {each: at for at, each in reversed(stage.began)}
        assert {begun[each] for each in ("neighbour 1", "neighbour 2", "elsewhere")} == {
            begins_ms + SAFETY_POLL_S * 1000
        }
        async with stage.store.memory.work("takes over", [LANE]) as work:
            (claim, *_) = (await work.claim({LANE: Demand(9)}, request=new_id(), lease_ms=60_000)).claims
            assert claim.record.id == "suspect"
            assert claim.record.kills == 0, "its process lives"


async def put_lapsed(stage: Stage, **lapses: int) -> None:
    """Put messages that have lapsed so many times in a row."""
    now = stage.store.memory.now_ms()
    records = [Record(Envelope(each, LANE), 1, now, NO_OP, lapses=n) for each, n in lapses.items()]
    await stage.store.memory.put_back([PutBack(record, now) for record in records])


async def test_l5_what_has_never_lapsed_is_claimed_beside_a_trial_after_a_second(clock: VirtualClock) -> None:
    stage = Stage(clock, takes_s=20)
    await put_lapsed(stage, suspect=9)
    async with stage.scheduler:
        begins_ms = stage.now_ms
        await stage.put("at once")
        await asyncio.sleep(3)
        await stage.put("later")
        await asyncio.sleep(20)
    assert stage.began == [
        (begins_ms, "suspect"),
        (begins_ms + 1_000, "at once"),
        (begins_ms + 3_000, "later"),
    ]


async def test_l5_what_has_lapsed_waits_for_the_suspects_and_comes_before_others(clock: VirtualClock) -> None:
    stage = Stage(clock, takes_s=20)
    stage.store.memory._table.trials.set_search(Trials(hot=2))
    await put_lapsed(stage, suspect=2, suspected=2, lapsed=1)
    async with stage.scheduler:
        begins_ms = stage.now_ms
        await asyncio.sleep(65)
    assert stage.began == [
        (begins_ms, "suspect"),
        (begins_ms + 20_000, "lapsed"),
        (begins_ms + 40_000, "suspected"),
    ]


async def test_l5_what_has_lapsed_runs_beside_suspects_that_have_run_for_a_minute(clock: VirtualClock) -> None:
    stage = Stage(clock, takes_s=100)
    await put_lapsed(stage, suspect=2, lapsed=1)
    async with stage.scheduler:
        begins_ms = stage.now_ms
        await asyncio.sleep(70)
    assert stage.ids == ["suspect", "lapsed"]
    assert begins_ms + LONGEST_TRIAL_MS <= stage.began[1][0] <= begins_ms + LONGEST_TRIAL_MS + 1_000


async def test_l5_suspects_wait_for_what_has_lapsed_for_a_minute(clock: VirtualClock) -> None:
    stage = Stage(clock, takes_s=100)
    await put_lapsed(stage, lapsed=1, suspect=2)
    async with stage.scheduler:
        begins_ms = stage.now_ms
        await asyncio.sleep(5)
        await stage.put("fresh")
        await asyncio.sleep(65)
    assert stage.began[:2] == [(begins_ms, "lapsed"), (begins_ms + 5_000, "fresh")]
    assert stage.ids[2:] == ["suspect"]
    assert begins_ms + LONGEST_TRIAL_MS <= stage.began[2][0] <= begins_ms + LONGEST_TRIAL_MS + 1_000


# --- an event loop that was blocked -----------------------------------------------------------------------


def block_the_loop(seconds: float) -> None:
    """Let time pass while nothing else can happen, as a handler does that computes for so long."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop._now_us += round(seconds * 1_000_000)


async def test_while_the_loop_lags_nothing_fresh_is_claimed_and_afterwards_it_is(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(clock, takes_s=60)
    stage.on_begin = lambda message_id: block_the_loop(3) if message_id == "blocks" else None
    async with stage.scheduler:
        await stage.put("long")
        await stage.put("blocks", after_s=9)
        await stage.put("due meanwhile", after_s=10)
        await asyncio.sleep(30)
        blocked_ms = next(at for at, each in stage.began if each == "blocks")
        (first, *_) = stage.claimed_at(blocked_ms + 1)
        assert first > blocked_ms + 3_000, "not before it was seen to run freely"
        assert first <= blocked_ms + 3_000 + 1_000
        assert stage.began[-1] == (first, "due meanwhile")
        assert any(call.asked_ms < first for call in stage.store.made("renew", blocked_ms + 3_000)), "renewals go on"
    assert "the event loop ran 2." in caplog.text


async def test_b1_a_loop_that_is_blocked_while_a_memory_store_is_asked_costs_its_process_no_lease(
    clock: VirtualClock,
) -> None:
    store, began = MemoryStore(clock=clock, journal=1_000), list[str]()
    scheduler = Scheduler(store, clock=clock)

    @scheduler.handler(name=LANE)
    async def work(payload: bytes, context: Context) -> None:
        began.append(context.id)
        if context.id == "blocks":
            block_the_loop(60)
        await asyncio.sleep(1 if context.id == "short" else 200)

    async with scheduler:
        for name, after_s in {"long": 1, "too": 1, "short": 4, "blocks": 5, "later": 6}.items():
            await scheduler.schedule(b"", to=TO, delay=f"{after_s}s", id=name)
        await asyncio.sleep(400)
        assert not [entry for entry in await store.journal() if entry.event == "lapsed"]
    assert began == ["long", "too", "short", "blocks", "later"]


async def test_a_loop_that_lags_a_little_is_no_reason_to_wait(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(clock, takes_s=60)
    stage.on_begin = lambda message_id: block_the_loop(0.9) if message_id == "blocks" else None
    async with stage.scheduler:
        await stage.put("long")
        await stage.put("blocks", after_s=10)
        await stage.put("due meanwhile", after_s=10.5)
        await asyncio.sleep(30)
    assert [at for at, _ in stage.began] == [0, 10_000, 10_900]
    assert "blocked" not in caplog.text


# --- the end ----------------------------------------------------------------------------------------------


async def test_a_claim_on_its_way_for_a_handler_that_is_removed_is_given_back_to_the_next(clock: VirtualClock) -> None:
    stage, handled = Stage(clock), list[str]()

    async def successor(payload: bytes, context: Context) -> None:
        handled.append(context.id)

    async with stage.scheduler as scheduler:
        await asyncio.sleep(1)
        stage.store.inject("late_reply", "claim", lasting="3s")
        await stage.put("a", "b")
        await asyncio.sleep(0.5)
        await scheduler.remove_handler(LANE)
        scheduler.add_handler(successor, name=LANE)
        await asyncio.sleep(5)
    assert stage.ids == []
    assert handled == ["a", "b"]
    assert await stage.lapses() == 0


async def test_closing_does_not_wait_for_a_claim_that_fails(clock: VirtualClock) -> None:
    stage = Stage(clock)
    async with stage.scheduler:
        await asyncio.sleep(1)
        stage.store.inject("unavailable", "claim", times=None)
        await stage.put("a")
        await asyncio.sleep(60)
    assert stage.now_ms <= 61_000 + LONGEST_PAUSE_MS


# --- a store that fails -----------------------------------------------------------------------------------

ERRORS: dict[str, Callable[[], BaseException]] = {
    "TimeoutError": TimeoutError,
    "OSError": OSError,
    "a bug": KeyError,
    "several": lambda: ExceptionGroup("both", [OSError(), ValueError()]),
    "a cancellation of its own": CancelledError,
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", ["claim", "settle", "renew", "tidy", "apply"])
async def test_l4_whatever_a_store_raises_at_any_step_is_outlived(
    clock: VirtualClock, name: Literal["claim", "settle", "renew", "tidy", "apply"], error: str
) -> None:
    stage = Stage(clock, takes_s=6)
    async with stage.scheduler as scheduler:
        stage.store.errors[name] += [ERRORS[error]() for _ in range(3)]
        for n in range(30):
            await scheduler.schedule(b"", to=TO, delay="1s", id=f"m{n}")
            await asyncio.sleep(1)
        await asyncio.sleep(30)
        assert stage.store.errors[name] == []
        assert await stage.store.memory.search(Query()) == []
    assert set(stage.ids) == {f"m{n}" for n in range(30)}


@pytest.mark.parametrize("fault", ["unavailable", "crash"])
async def test_l4_a_store_that_is_away_is_asked_less_and_less_often_and_at_once_after_it_came_back(
    clock: VirtualClock, fault: Fault
) -> None:
    stage = Stage(clock)
    async with stage.scheduler:
        for _ in range(2):  # the second time its patience is as great as the first time
            stage.store.inject(fault, "claim", times=None)
            begins_ms = stage.now_ms
            await stage.put("a")
            await asyncio.sleep(60)
            stage.store.heal()
            await asyncio.sleep(LONGEST_PAUSE_MS / 1000)
            pauses = gaps(stage.claimed_at(begins_ms + 1))[:-2]
            assert pauses[0] <= 100
            assert pauses == sorted(pauses[:5]) + pauses[5:]
            assert all(LONGEST_PAUSE_MS // 2 <= pause <= LONGEST_PAUSE_MS for pause in pauses[8:])
    assert stage.ids == ["a", "a"]


# --- fairness ---------------------------------------------------------------------------------------------


async def test_l3_a_lane_with_thousands_due_does_not_starve_another(clock: VirtualClock) -> None:
    stage, lateness = Stage(clock, concurrency=500), list[float]()
    stage.store.inject("late_reply", "claim", "settle", times=None, lasting="10ms")

    @stage.scheduler.handler(name="calm")
    async def calm(payload: bytes, context: Context) -> None:
        lateness.append(context.lateness.total_seconds())

    async with stage.scheduler as scheduler:
        await scheduler.schedule_many(Message(b"", to="handler:calm", delay=f"{1_000 + 10 * n}ms") for n in range(10))
        await scheduler.schedule_many(Message(b"", to=TO, delay="1s") for n in range(4_000))
        await asyncio.sleep(10)
    assert len(lateness) == 10
    assert max(lateness) <= 0.03, "the next claim, or the one after it"
    assert len(stage.began) == len(set(stage.ids)) == 4_000
    assert stage.began[-1][0] >= 1_100, "the flood went on all the while"
