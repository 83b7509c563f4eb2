"""The lease book (L1, S6, S7): renewals and settlements, one call at a time, for every answer of the store."""

from __future__ import annotations

import asyncio
import random
from asyncio import CancelledError
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Literal

import pytest
import pytest_asyncio

from aiodelay import CancelOutcome, Context, Every, Retry, ScheduleOutcome, Scheduler
from aiodelay.core.ids import new_id, new_op
from aiodelay.core.transitions import occurrence_id, token_deadline_ms
from aiodelay.core.values import (
    MAX_CLAIM_MESSAGES,
    After,
    Cancel,
    Claim,
    Demand,
    Envelope,
    Put,
    Query,
    RenewOutcome,
    Settlement,
    SettleOutcome,
)
from aiodelay.engine.delivery import settling
from aiodelay.engine.delivery.lease_book import Held, LeaseBook
from aiodelay.ports import Work
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.faults import Fault
from tests.support.noted import Call, NotedStore

pytestmark = pytest.mark.asyncio

LANE = "work"
LEASE_MS = 15_000
THIRD_MS = LEASE_MS // 3
LONGEST_PAUSE_MS = 2_000


class Stage:
    """A lease book that runs, the store under it, and what it told whom it had delivered to."""

    def __init__(self, clock: VirtualClock, store: NotedStore, work: Work) -> None:
        self.clock, self.store, self._work = clock, store, work
        self.ahead_ms = 0  # of the store's time, as far as known
        self.book = LeaseBook(
            work, clock, lambda: clock.now_ms() + self.ahead_ms, LEASE_MS, lambda: None, is_of_store=True
        )
        self.running = asyncio.create_task(self.book.run())
        self.ended: list[tuple[str, SettleOutcome]] = []
        self.freed: set[str] = set()
        self.lost_ids: list[str] = []

    # --- the taker ----------------------------------------------------------------------------------------

    def settled(self, held: Held, outcome: SettleOutcome | None) -> None:
        if outcome is None:
            self.freed.add(held.claim.record.id)
        else:
            self.ended.append((held.claim.record.id, outcome))

    def lost(self, held: Held) -> None:
        self.lost_ids.append(held.claim.record.id)

    # --- the play -----------------------------------------------------------------------------------------

    async def put(self, *ids: str) -> None:
        await self.store.memory.apply([Put(new_op(), Envelope(each, LANE), After(0)) for each in ids])

    async def hold(self, *ids: str) -> list[Held]:
        """Put messages, claim them, and give them to the book."""
        await self.put(*ids)
        return await self.claim(len(ids))

    async def claim(self, n: int) -> list[Held]:
        asked_at_ms = self.book.clock.monotonic_ms()
        claimed = await self._work.claim({LANE: Demand(n)}, request=new_id(), lease_ms=LEASE_MS)
        self.book.read(asked_at_ms)
        return self.book.add(claimed.claims, self)

    async def hold_one(self) -> Held:
        (held,) = await self.hold("m")
        return held

    def done(self, held: Held) -> None:
        """Have the book settle a claim as delivered, as a handler's runner does."""
        self.book.settle(held, settled_as_done(held))

    async def elsewhere(self) -> Sequence[Claim]:
        """Claim what there is as another process does."""
        async with self.store.memory.work("other", [LANE]) as other:
            return (await other.claim({LANE: Demand(10)}, request=new_id(), lease_ms=LEASE_MS)).claims

    async def left(self) -> list[str]:
        return [each.record.id for each in await self.store.memory.search(Query())]

    @property
    def renewals(self) -> list[Call]:
        return self.store.made("renew")

    @property
    def settlements(self) -> list[Call]:
        return self.store.made("settle")


def settled_as_done(held: Held) -> Settlement:
    return settling.done(held.claim.record, held.claim.token, 0)


@pytest_asyncio.fixture
async def stage(clock: VirtualClock) -> AsyncIterator[Stage]:
    store = NotedStore(clock)
    async with store.work("here", [LANE]) as work:
        stage = Stage(clock, store, work)
        yield stage
        store.heal()
        store.breaks_at = ""
        stage.book.close()
        await stage.running


# --- renewals ---------------------------------------------------------------------------------------------


async def test_l1_a_lease_is_renewed_at_a_third_of_it_each_time_in_full(stage: Stage) -> None:
    await stage.hold("a", "b")
    await asyncio.sleep(60.5)
    assert [call.asked_ms for call in stage.renewals] == [THIRD_MS * n for n in range(1, 13)]
    start_ms = stage.clock.now_ms() - 60_500
    for call in stage.renewals:
        assert [renewal.id for renewal in call.asked] == ["a", "b"]
        deadlines = {token_deadline_ms(renewal.to) - start_ms for renewal in call.asked}
        assert deadlines == {call.asked_ms + LEASE_MS}
    assert await stage.elsewhere() == []


async def test_l1_a_lease_that_was_renewed_too_far_ahead_is_set_right_once_the_time_is_known(stage: Stage) -> None:
    stage.ahead_ms = 3_600_000  # the clock has stepped back, and no answer has told of it
    await stage.hold("m")
    stage.store.inject("late_reply", "renew", lasting="1s")
    await asyncio.sleep(THIRD_MS / 1000 + 0.5)
    stage.ahead_ms = 0
    await asyncio.sleep(1)
    first, second = stage.renewals
    assert second.asked_ms == first.answered_ms
    assert token_deadline_ms(second.asked[0].to) == stage.clock.now_ms() - 500 + LEASE_MS
    await asyncio.sleep(60)
    assert await stage.elsewhere() == []


async def test_claims_of_different_times_are_each_renewed_at_their_own(stage: Stage) -> None:
    for name in "abc":
        await stage.hold(name)
        await asyncio.sleep(1)
    await asyncio.sleep(10)
    assert [(call.asked_ms, *(each.id for each in call.asked)) for call in stage.renewals] == [
        (THIRD_MS, "a"),
        (THIRD_MS + 1_000, "b"),
        (THIRD_MS + 2_000, "c"),
        (2 * THIRD_MS, "a"),
        (2 * THIRD_MS + 1_000, "b"),
        (2 * THIRD_MS + 2_000, "c"),
    ]


async def test_l1_more_leases_than_a_call_may_carry_are_all_renewed_in_time(stage: Stage) -> None:
    for part in range(3):
        await stage.hold(*(f"{part}-{n}" for n in range(400)))
    stage.store.inject("late_reply", "renew", times=None, lasting="500ms")
    await asyncio.sleep(60)
    assert max(len(call.asked) for call in stage.renewals) == MAX_CLAIM_MESSAGES
    assert stage.lost_ids == []
    assert await stage.elsewhere() == []


async def test_l1_leases_are_renewed_in_time_also_while_settlements_never_cease(stage: Stage) -> None:
    await stage.hold("long")
    stage.store.inject("delay", "settle", times=None, lasting="10ms")
    for part in range(5):
        for each in await stage.hold(*(f"{part}-{n}" for n in range(400))):
            stage.done(each)
            await asyncio.sleep(0.006)
    assert [call.asked_ms // 100 for call in stage.renewals if call.asked[0].id == "long"] == [50, 100]
    assert await stage.elsewhere() == []


async def test_a_renewal_whose_reply_was_lost_is_repeated_as_it_was(stage: Stage) -> None:
    await stage.hold("m")
    stage.store.inject("reply_lost", "renew", times=3)
    await asyncio.sleep(9)
    first, *others = stage.renewals
    assert [call.asked for call in others] == [first.asked] * 3
    assert others[-1].answer == [RenewOutcome.RENEWED]
    assert stage.lost_ids == []


async def test_l1_a_renewal_that_was_answered_late_is_followed_by_the_next_in_time(stage: Stage) -> None:
    """What counts is when it was asked for: the lease has run since."""
    await stage.hold("m")
    stage.store.inject("late_reply", "renew", lasting="12s")
    await asyncio.sleep(THIRD_MS / 1000 + 12 + 2)
    late, following = stage.renewals
    assert following.asked_ms == late.answered_ms
    await asyncio.sleep(60)
    assert await stage.elsewhere() == []


async def test_l1_a_lease_outlives_replies_lost_for_nearly_as_long_as_it_lasts(stage: Stage) -> None:
    await stage.hold("m")
    stage.store.inject("reply_lost", "renew", times=None)
    await asyncio.sleep((THIRD_MS + LEASE_MS - LONGEST_PAUSE_MS) / 1000 - 0.1)
    stage.store.heal()
    for _ in range(60):
        await asyncio.sleep(1)
        assert await stage.elsewhere() == []
    assert stage.lost_ids == []


async def test_what_was_claimed_while_a_renewal_waited_for_its_answer_is_renewed_in_its_turn(stage: Stage) -> None:
    await stage.hold("early")
    stage.store.inject("late_reply", "renew", lasting="8s")
    await asyncio.sleep(9)
    await stage.hold("between")
    await asyncio.sleep(20)
    assert [(call.asked_ms, *(each.id for each in call.asked)) for call in stage.renewals] == [
        (5_000, "early"),
        (13_000, "early"),  # due at 10 s, when the answer to the first had not come
        (14_000, "between"),
        (18_000, "early"),
        (19_000, "between"),
        (23_000, "early"),
        (24_000, "between"),
        (28_000, "early"),
    ]


# --- what a renewal is answered ---------------------------------------------------------------------------


async def test_only_lost_is_told_and_such_a_claim_is_settled_nowhere(stage: Stage) -> None:
    held = await stage.hold_one()
    stage.store.inject("unavailable", "renew", times=None)
    await asyncio.sleep(16)
    (theirs,) = await stage.elsewhere()
    assert stage.lost_ids == []
    stage.store.heal()
    await asyncio.sleep(3)
    assert stage.lost_ids == ["m"]
    assert len(stage.book) == 0
    stage.done(held)
    await asyncio.sleep(60)
    assert stage.ended == [("m", SettleOutcome.GONE)], "its slot is free, once"
    assert stage.settlements == []
    assert [each.token for each in await stage.elsewhere()] != [theirs.token]


async def test_s7_a_message_that_this_process_claims_again_has_one_open_claim_in_the_book(stage: Stage) -> None:
    older, ended, other = await stage.hold("m", "ended", "other")
    stage.store.inject("hang", "settle")
    stage.done(ended)
    await asyncio.sleep(0.1)
    stage.clock.step(timedelta(milliseconds=LEASE_MS))
    newer, _ = await stage.claim(2)
    assert newer.claim.record.id == "m"
    assert newer.claim.record.attempt == 0
    assert stage.lost_ids == ["m"], "the claim whose settlement is under way ends by the answer to the settlement"
    assert older not in stage.book.held()
    assert {newer, ended, other} <= set(stage.book.held())
    stage.store.heal()
    stage.done(older)
    stage.done(newer)
    await asyncio.sleep(0.1)
    assert [(call.id, call.token) for sent in stage.settlements[1:] for call in sent.asked] == [
        ("m", newer.claim.token)
    ]
    assert stage.ended[-1] == ("m", SettleOutcome.SETTLED)
    assert stage.ended.count(("m", SettleOutcome.GONE)) == 1


async def test_leases_that_are_lost_together_are_told_in_one_warning(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    await stage.hold(*(f"m{i}" for i in range(24)))
    stage.store.inject("unavailable", "renew", times=None)
    await asyncio.sleep(16)
    assert sum([len(await stage.elsewhere()) for _ in range(3)]) == 24
    stage.store.heal()
    await asyncio.sleep(3)
    assert len(stage.lost_ids) == 24
    (warning,) = [line for line in caplog.messages if "lost" in line]
    named = ", ".join(stage.lost_ids[:5])
    assert warning == (
        f"24 leases were lost before their messages were settled; these messages may be delivered again: "
        f"{named} and 19 more"
    )


async def test_a_claim_that_is_forgotten_is_left_to_its_lease_and_ends_once(stage: Stage) -> None:
    held = await stage.hold_one()
    stage.book.forget(held)
    stage.done(held)
    await asyncio.sleep((LEASE_MS - 1) / 1000)
    assert await stage.elsewhere() == []
    await asyncio.sleep(0.001)
    assert len(await stage.elsewhere()) == 1
    assert stage.renewals == stage.settlements == []
    assert stage.ended == [("m", SettleOutcome.GONE)]
    assert len(stage.book) == 0


async def test_forgotten_while_its_renewal_is_under_way_it_holds_up_no_other(stage: Stage) -> None:
    forgotten, _ = await stage.hold("forgotten", "kept")
    stage.store.inject("late_reply", "renew", lasting="1s")
    await asyncio.sleep(THIRD_MS / 1000 + 0.5)
    stage.book.forget(forgotten)
    await asyncio.sleep(60)
    assert [call.asked_ms for call in stage.renewals] == [THIRD_MS * n for n in range(1, 14)]
    assert [renewal.id for renewal in stage.renewals[-1].asked] == ["kept"]


async def test_lost_while_its_settlement_waits_it_ends_once(stage: Stage) -> None:
    held = await stage.hold_one()
    stage.store.inject("unavailable", "renew", times=None)
    await asyncio.sleep(16)
    await stage.elsewhere()
    stage.done(held)
    stage.store.heal()
    await asyncio.sleep(60)
    assert stage.ended == [("m", SettleOutcome.GONE)]
    assert len(stage.book) == 0


async def test_s4_superseded_lets_the_run_go_on_and_fences_its_settlement(clock: VirtualClock) -> None:
    store, runs = NotedStore(clock), list[tuple[bytes, int]]()
    scheduler = Scheduler(store, clock=clock)

    @scheduler.handler(name=LANE)
    async def work(payload: bytes, context: Context) -> None:
        await asyncio.sleep(12)
        runs.append((payload, context.attempt))

    async with scheduler:
        await scheduler.schedule(b"old", to="handler:work", delay="1s", id="m")
        await asyncio.sleep(3)
        again = await scheduler.schedule(b"new", to="handler:work", delay="1h", id="m")
        assert again.outcome is ScheduleOutcome.REPLACED
        await asyncio.sleep(20)
        assert [call.answer for call in store.made("renew")] == [[RenewOutcome.SUPERSEDED]] * 2
        assert [call.answer for call in store.made("settle")] == [[SettleOutcome.SUPERSEDED]]
        found = await scheduler.get("m")
        assert found is not None
        assert (found.record.revision, found.record.attempt) == (again.revision, 0)
        await asyncio.sleep(3_600)
    assert runs == [(b"old", 1), (b"new", 1)]


async def test_s4_superseding_a_series_marks_its_retries_and_no_other_or_newer_message(stage: Stage) -> None:
    ids = ["s", occurrence_id("s", 1_000_000_000), "other", occurrence_id("other", 1_000_000_000)]
    held = await stage.hold(*ids)
    revision = held[0].claim.record.revision
    stage.book.supersede("s", revision)
    assert [each.is_unwanted for each in held] == [False] * 4
    stage.book.supersede("s", revision + 1)
    on_their_way = stage.book.add([each.claim for each in held], stage)
    for claims in (held, on_their_way):
        assert [each.is_unwanted for each in claims] == [True, True, False, False]


async def test_s4_s5_a_renewal_tells_of_what_was_replaced_or_cancelled_elsewhere(stage: Stage) -> None:
    held = await stage.hold("kept", "replaced", "cancelled")
    await stage.store.memory.apply([Put(new_op(), Envelope("replaced", LANE), After(0)), Cancel(new_op(), "cancelled")])
    await asyncio.sleep(THIRD_MS / 1000 - 1)
    assert [each.is_unwanted for each in held] == [False, False, False]
    await asyncio.sleep(1.5)
    assert [each.is_unwanted for each in held] == [False, True, True]


@pytest.mark.parametrize("recurs", [False, True], ids=["retry", "recurrence"])
async def test_s5_cancelled_in_flight_lets_the_run_go_on_and_nothing_follows(clock: VirtualClock, recurs: bool) -> None:
    store, runs = NotedStore(clock), list[int]()
    scheduler = Scheduler(store, clock=clock, retry=Retry(first="1s"))

    @scheduler.handler(name=LANE)
    async def work(payload: bytes, context: Context) -> None:
        await asyncio.sleep(12)
        runs.append(context.attempt)
        raise ConnectionError

    async with scheduler:
        when = {"every": Every("10m")} if recurs else {"delay": "10m"}
        await scheduler.schedule(b"", to="handler:work", id="m", **when)
        await scheduler.fire("m")
        await asyncio.sleep(3)
        assert await scheduler.cancel("m") is CancelOutcome.IN_FLIGHT
        await asyncio.sleep(1_800)
        assert [call.answer for call in store.made("renew")] == [[RenewOutcome.CANCELLED]] * 2
        assert [call.answer for call in store.made("settle")] == [[SettleOutcome.SETTLED]]
        assert await scheduler.get("m") is None
    assert runs == [1]


# --- settlements ------------------------------------------------------------------------------------------


async def test_runs_that_end_in_turns_of_the_event_loop_one_after_another_are_settled_together(stage: Stage) -> None:
    held = await stage.hold(*map(str, range(6)))
    for each in held[:4]:
        stage.done(each)
        await asyncio.sleep(0)
    await asyncio.sleep(0.1)
    for each in held[4:]:
        stage.done(each)
        await asyncio.sleep(0.1)
    assert [len(call.asked) for call in stage.settlements] == [4, 1, 1]
    assert len(stage.ended) == 6


async def test_what_ends_while_a_call_is_under_way_leaves_in_one_batch(stage: Stage) -> None:
    stage.store.inject("delay", "settle", lasting="1s")
    held = await stage.hold(*(f"m{n:03}" for n in range(MAX_CLAIM_MESSAGES)))
    for each in held:
        stage.done(each)
        await asyncio.sleep(0.001)
    await asyncio.sleep(3)
    assert [len(call.asked) for call in stage.settlements] == [1, MAX_CLAIM_MESSAGES - 1]
    assert [each.id for each in stage.settlements[1].asked] == [f"m{n:03}" for n in range(1, MAX_CLAIM_MESSAGES)]
    assert await stage.left() == []


async def test_a_batch_of_settlements_is_no_larger_than_a_claim(stage: Stage) -> None:
    held = [each for part in range(3) for each in await stage.hold(*(f"{part}-{n}" for n in range(400)))]
    for each in held:
        stage.done(each)
    await asyncio.sleep(1)
    assert [len(call.asked) for call in stage.settlements] == [MAX_CLAIM_MESSAGES, MAX_CLAIM_MESSAGES, 200]
    assert [each for each, _ in stage.ended] == [held_.claim.record.id for held_ in held]


@pytest.mark.parametrize("seed", range(3))
async def test_s7_no_two_calls_overlap_and_each_settlement_has_the_token_of_its_last_renewal(
    stage: Stage, seed: int
) -> None:
    chance = random.Random(seed)
    for lasting in ("100ms", "900ms", "3s"):
        stage.store.inject("late_reply", "renew", "settle", times=None, probability=0.3, lasting=lasting)
        stage.store.inject("delay", "renew", "settle", times=None, probability=0.3, lasting=lasting)
    for part in range(20):
        for held in await stage.hold(*(f"{part}-{n}" for n in range(10))):
            asyncio.get_running_loop().call_later(chance.uniform(0, 30), stage.done, held)
        await asyncio.sleep(chance.uniform(0, 2))
    await asyncio.sleep(90)
    calls = [call for call in stage.store.calls_made if call.name != "claim"]
    assert {call.name for call in calls} == {"renew", "settle"}
    for before, after in pairwise(calls):
        assert before.answered_ms is not None
        assert before.answered_ms <= after.asked_ms
    assert {outcome for _, outcome in stage.ended} == {SettleOutcome.SETTLED}
    assert len(stage.ended) == len({name for name, _ in stage.ended}) == 200
    assert await stage.left() == []


async def test_what_ended_is_not_renewed(stage: Stage) -> None:
    held = await stage.hold_one()
    stage.store.inject("delay", "settle", lasting="20s")
    stage.done(held)
    await asyncio.sleep(30)
    assert stage.renewals == []
    assert stage.ended == [("m", SettleOutcome.SETTLED)]


async def test_a_renewal_in_doubt_is_repeated_before_its_claim_is_settled(stage: Stage) -> None:
    """The store may have the new token or the old one; a settlement under the wrong one would be refused."""
    held = await stage.hold_one()
    stage.store.inject("reply_lost", "renew")
    await asyncio.sleep(THIRD_MS / 1000 + 0.001)
    stage.done(held)
    await asyncio.sleep(3)
    assert [call.name for call in stage.store.calls_made] == ["claim", "renew", "renew", "settle"]
    assert stage.ended == [("m", SettleOutcome.SETTLED)]


async def test_s6_gone_after_a_lost_reply_counts_as_settled(stage: Stage) -> None:
    held = await stage.hold_one()
    stage.store.inject("reply_lost", "settle")
    stage.done(held)
    await asyncio.sleep(3)
    first, second = stage.settlements
    assert second.asked == first.asked
    assert second.answer == [SettleOutcome.GONE]
    assert stage.ended == [("m", SettleOutcome.GONE)]
    assert len(stage.book) == 0
    assert stage.lost_ids == []
    await asyncio.sleep(60)
    assert await stage.elsewhere() == []


# --- a store that is away ---------------------------------------------------------------------------------


async def test_a_settlement_is_repeated_until_it_is_answered_less_and_less_often(stage: Stage) -> None:
    held = await stage.hold_one()
    fault = stage.store.inject("unavailable", "settle", times=None)
    stage.done(held)
    await asyncio.sleep(300)
    times = [call.asked_ms for call in stage.settlements]
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps[0] <= 50
    assert max(gaps) <= LONGEST_PAUSE_MS
    assert len(times) < 400
    stage.store.heal()
    assert fault.hits == len(times)
    await asyncio.sleep(LONGEST_PAUSE_MS / 1000 + 0.01)
    assert stage.ended == [("m", SettleOutcome.SETTLED)], "its lease is over, but nobody has taken it: it counts"
    assert await stage.elsewhere() == []


async def test_once_it_works_again_the_next_failure_is_repeated_at_once(stage: Stage) -> None:
    first, second = await stage.hold("first", "second")
    stage.store.inject("unavailable", "settle", times=None)
    stage.done(first)
    await asyncio.sleep(60)
    stage.store.heal()
    await asyncio.sleep(LONGEST_PAUSE_MS / 1000)
    stage.store.inject("unavailable", "settle")
    before = len(stage.settlements)
    stage.done(second)
    await asyncio.sleep(1)
    failed, repeated = stage.settlements[before:]
    assert repeated.asked_ms - failed.asked_ms <= 50
    assert [name for name, _ in stage.ended] == ["first", "second"]


async def test_s7_settled_after_its_deadline_it_does_not_touch_whoever_took_it_since(stage: Stage) -> None:
    held = await stage.hold_one()
    stage.store.inject("unavailable", "settle", "renew", times=None)
    stage.done(held)
    await asyncio.sleep(LEASE_MS / 1000 + 1)
    (theirs,) = await stage.elsewhere()
    stage.store.heal()
    await asyncio.sleep(LONGEST_PAUSE_MS / 1000 + 0.01)
    assert stage.ended == [("m", SettleOutcome.GONE)]
    (found,) = await stage.store.memory.search(Query())
    assert (found.record.id, found.state) == (theirs.record.id, "in_flight")


@pytest.mark.parametrize("fault", ["unavailable", "request_lost", "reply_lost", "crash"])
async def test_l4_whatever_fails_all_is_settled_once_it_does_not(stage: Stage, fault: Fault) -> None:
    stage.store.inject(fault, "settle", "renew", times=None, probability=0.7)
    held = await stage.hold(*(f"m{n}" for n in range(100)))
    for each in held:
        asyncio.get_running_loop().call_later(random.Random(7).uniform(0, 30), stage.done, each)
    await asyncio.sleep(60)
    stage.store.heal()
    await asyncio.sleep(LONGEST_PAUSE_MS / 1000 + 0.01)
    assert len(stage.ended) == 100
    assert len(stage.book) == 0
    assert await stage.left() == []


@pytest.mark.parametrize("name", ["settle", "renew"])
async def test_an_answer_that_lacks_an_outcome_is_no_answer(stage: Stage, name: Literal["settle", "renew"]) -> None:
    held = await stage.hold("a", "b", "c")
    stage.store.cuts[name] = 3
    await asyncio.sleep(12)
    assert stage.lost_ids == []
    for each in held:
        stage.done(each)
    await asyncio.sleep(12)
    assert stage.store.cuts[name] == 0
    assert sorted(each for each, _ in stage.ended) == ["a", "b", "c"], "each slot is free, once"
    assert len(stage.book) == 0
    times = [call.asked_ms for call in stage.store.made(name)]
    assert all(b - a >= 25 for a, b in pairwise(times[:4])), "with a pause before each repetition"
    assert await stage.left() == []


@pytest.mark.parametrize(
    "error", [TimeoutError(), OSError("reset"), KeyError("bug"), ExceptionGroup("both", [OSError()]), CancelledError()]
)
@pytest.mark.parametrize("name", ["settle", "renew"])
async def test_l4_whatever_a_store_raises_is_outlived(
    stage: Stage, name: Literal["settle", "renew"], error: BaseException
) -> None:
    held = await stage.hold_one()
    stage.store.errors[name] = [error, error, error]
    await asyncio.sleep(12)
    stage.done(held)
    await asyncio.sleep(3)
    assert stage.store.errors[name] == []
    assert stage.ended == [("m", SettleOutcome.SETTLED)]
    assert stage.lost_ids == []
    assert await stage.left() == []


async def test_l5_a_settlement_at_which_the_store_breaks_holds_up_no_other(stage: Stage) -> None:
    stage.store.breaks_at = "m050"
    for part in range(2):
        for each in await stage.hold(*(f"m{200 * part + n:03}" for n in range(200))):
            stage.done(each)
        await asyncio.sleep(7)
    assert {name for name, _ in stage.ended} == {f"m{n:03}" for n in range(400)} - {"m050"}
    assert await stage.left() == ["m050"]
    assert len(stage.settlements) < 100, "they still go in batches"
    stage.store.breaks_at = ""
    await asyncio.sleep(LONGEST_PAUSE_MS / 1000)
    assert stage.ended[-1] == ("m050", SettleOutcome.SETTLED)


# --- a part of the store that does not answer -------------------------------------------------------------


async def test_l5_a_part_that_is_away_holds_up_no_settlement_of_the_others(stage: Stage) -> None:
    held = await stage.hold("lost", "a", "b", "c")
    stage.store.away.add("lost")
    for each in held:
        stage.done(each)
        await asyncio.sleep(2.2)
        assert len(stage.ended) == held.index(each)
        assert stage.freed == {"lost"}, "its place is free for another message"
    sent = {each.id: call.asked_ms for call in reversed(stage.settlements) for each in call.asked}
    assert [sent[name] for name in ("a", "b", "c")] == [2_200, 4_400, 6_600], "each is sent at once"
    assert 10 < len(stage.settlements) < 30, "the calls for the part that is away are repeated now and then"
    stage.store.away.clear()
    await asyncio.sleep(1)
    assert [name for name, _ in stage.ended] == ["a", "b", "c", "lost"]
    assert {outcome for _, outcome in stage.ended} == {SettleOutcome.SETTLED}


async def test_l1_a_part_that_is_away_holds_up_no_renewal_of_the_others(stage: Stage) -> None:
    await stage.hold("lost", "a")
    stage.store.away.add("lost")
    await asyncio.sleep(18)
    asked = [renewal for call in stage.renewals for renewal in call.asked if renewal.id == "lost"]
    assert len(set(asked)) == 1 < len(asked), "a renewal in doubt is repeated as it was"
    others = [call.asked_ms for call in stage.renewals if "a" in [each.id for each in call.asked]]
    assert others == [5_000, 10_000, 15_000]
    stage.store.away.clear()
    await asyncio.sleep(20)
    assert stage.lost_ids == []
    assert await stage.elsewhere() == []


async def test_s7_a_claim_whose_renewal_a_part_has_not_answered_is_settled_with_the_token_of_the_renewal(
    stage: Stage,
) -> None:
    lost, other = await stage.hold("lost", "a")
    stage.store.away.add("lost")
    await asyncio.sleep(6)
    stage.done(lost)
    stage.done(other)
    stage.book.close()
    await asyncio.sleep(1)
    assert (stage.ended, stage.freed) == ([("a", SettleOutcome.SETTLED)], {"lost"})
    stage.store.away.clear()
    await stage.running
    assert stage.ended[1:] == [("lost", SettleOutcome.SETTLED)]
    renewed = {renewal.to for call in stage.renewals for renewal in call.asked if renewal.id == "lost"}
    assert {each.token for call in stage.settlements for each in call.asked if each.id == "lost"} == renewed
    assert await stage.left() == []
