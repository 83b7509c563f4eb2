"""`LimitRules`: rules for limits of a lane and of its keys (C1), and for the turns of the keys (C2)."""

# ruff: noqa: D102 - the name of a test states its rule

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from aiodelay.core.transitions import SUSPECT_LAPSES
from aiodelay.core.values import (
    NO_LIMITS,
    After,
    At,
    Cancel,
    LaneLimits,
    Late,
    Limit,
    LimitedKey,
    Reschedule,
    SettleOutcome,
    lane_limits,
)

from .stage import HOUR_MS, LANE, OTHER, Bench, Stage, again, done, ending, ids_of, staged

__all__ = ["KeyTurnRules", "LimitChangeRules", "LimitRules", "RunningRules"]

MINUTE_MS = 60_000
TWO = lane_limits([Limit("customer", 2)])
RATE = lane_limits([Limit("customer", rate="3/min")])


async def _limited(stage: Stage, limits: LaneLimits, *, lane: str = LANE, is_declared: bool = False) -> None:
    await stage.needs_limits().set_limits(lane, limits, is_declared=is_declared)


async def _queued(stage: Stage, *names: str, late: Late = Late.deliver()) -> None:  # noqa: B008 - frozen
    """Store messages, due now in this order. The first letter of a name is the key."""
    for name in names:
        await stage.stored(stage.put(name, key=name[:1].encode(), late=late))


async def _keys(stage: Stage) -> Sequence[LimitedKey]:
    return await stage.needs_limits().limited_keys(LANE)


class RunningRules(Bench):
    """How many messages are in flight at once, and how many begin within a span (C1)."""

    @staged
    async def test_c1_a_key_has_no_more_messages_in_flight_than_its_limit(self, stage: Stage) -> None:
        await _limited(stage, TWO)
        await _queued(stage, "a1", "a2", "a3", "a4", "b1")
        claims = await stage.claim()
        assert sorted(ids_of(claims)) == ["a1", "a2", "b1"]
        assert await stage.ids() == []
        await stage.end(done(next(claim for claim in claims if claim.record.id == "a2")))
        assert await stage.ids() == ["a3"]
        assert await stage.ids() == []

    @pytest.mark.parametrize("how", ["done", "again", "dead", "lapse"])
    @staged
    async def test_c1_every_end_of_a_claim_makes_room(self, stage: Stage, how: str) -> None:
        await _limited(stage, lane_limits([Limit("customer", 1)]))
        await _queued(stage, "a1", "a2")
        claim = await stage.claim_one()
        if how == "lapse":
            await stage.lapse()
        else:
            await stage.end(ending(how, claim, due_ms=stage.now + HOUR_MS))
        assert len(await stage.ids()) == 1

    @staged
    async def test_c1_a_limit_of_the_lane_counts_all_keys(self, stage: Stage) -> None:
        await _limited(stage, lane_limits([Limit(concurrency=3), Limit("customer", 2)]))
        await _queued(stage, "a1", "a2", "a3", "b1", "b2", "c1")
        claims = await stage.claim()
        assert len(claims) == 3
        await stage.end(done(claims[0]))
        assert len(await stage.ids()) == 1

    @staged
    async def test_c1_messages_without_a_key_share_one_limit(self, stage: Stage) -> None:
        await _limited(stage, TWO)
        await stage.stored(*[stage.put(f"m{i}") for i in range(5)])
        assert len(await stage.claim()) == 2

    @staged
    async def test_c1_a_sink_is_limited_by_address(self, stage: Stage) -> None:
        await _limited(stage, lane_limits([Limit("address", 1)]))
        await stage.stored(*[stage.put(f"{to}{i}", address=to, key=b"k") for i in range(3) for to in ("x", "y")])
        assert sorted(await stage.ids()) == ["x0", "y0"]

    @staged
    async def test_c1_other_lanes_have_no_limit(self, stage: Stage) -> None:
        await _limited(stage, TWO)
        await stage.stored(*[stage.put(f"m{i}", lane=OTHER, key=b"a") for i in range(5)])
        assert len(await stage.claim(lane=OTHER)) == 5

    @pytest.mark.parametrize("end", ["settle", "lapse"])
    @staged
    async def test_c1_a_replaced_message_counts_while_it_is_in_flight(self, stage: Stage, end: str) -> None:
        await _limited(stage, lane_limits([Limit("customer", 1)]))
        await _queued(stage, "a1")
        claim = await stage.claim_one()
        await _queued(stage, "a1")
        assert await stage.ids() == []
        if end == "settle":
            assert await stage.settle(done(claim)) is SettleOutcome.SUPERSEDED
        else:
            await stage.lapse()
        assert await stage.ids() == ["a1"]
        assert await stage.ids() == []

    @staged
    async def test_c1_a_cancelled_message_counts_while_it_is_in_flight(self, stage: Stage) -> None:
        stage.needs_verdict()
        await _limited(stage, lane_limits([Limit("customer", 1)]))
        await _queued(stage, "a1", "a2")
        claim = await stage.claim_one()
        await stage.do(Cancel(stage.op(), "a1"))
        assert await stage.ids() == []
        await stage.end(again(claim, stage.now))
        assert await stage.ids() == ["a2"]

    @staged
    async def test_c1_no_span_has_more_beginnings_than_the_rate(self, stage: Stage) -> None:
        await _limited(stage, RATE)
        await _queued(stage, *[f"a{i}" for i in range(9)])
        begun: list[int] = []
        for _ in range(40):
            claims = await stage.claim(lane=LANE, limit=1)
            begun += [stage.now] * len(claims)
            for claim in claims:
                await stage.end(done(claim))
            stage.move(7_000)
        assert len(begun) == 9
        assert all(later - first >= MINUTE_MS for first, later in zip(begun, begun[3:], strict=False))

    @staged
    async def test_c1_a_rate_says_when_it_has_room_again(self, stage: Stage) -> None:
        await _limited(stage, RATE)
        await _queued(stage, *[f"a{i}" for i in range(5)])
        claimed = await stage.claimed()
        assert len(claimed.claims) == 3
        for claim in claimed.claims:
            await stage.end(done(claim))
        claimed = await stage.claimed()
        assert (list(claimed.claims), claimed.next_due_ms) == ([], stage.now + MINUTE_MS)
        stage.move(MINUTE_MS - 1)
        assert await stage.ids() == []
        stage.move(1)
        assert len(await stage.ids()) == 2

    @staged
    async def test_c1_a_rate_of_the_lane_counts_all_keys(self, stage: Stage) -> None:
        await _limited(stage, lane_limits([Limit(rate="3/min")]))
        await _queued(stage, "a1", "b1", "c1", "d1")
        claimed = await stage.claimed()
        assert len(claimed.claims) == 3
        for claim in claimed.claims:
            await stage.end(done(claim))
        assert (await stage.claimed()).next_due_ms == stage.now + MINUTE_MS
        stage.move(MINUTE_MS)
        assert len(await stage.ids()) == 1

    @staged
    async def test_c1_retries_count_again(self, stage: Stage) -> None:
        await _limited(stage, RATE)
        await _queued(stage, "a1")
        for attempt in (1, 2, 3):
            await stage.end(again(await stage.claim_one(), stage.now, attempt))
        assert await stage.ids() == []

    @pytest.mark.parametrize("limit", [Limit("customer", rate="3/min"), Limit(rate="3/min")], ids=["key", "lane"])
    @pytest.mark.parametrize("step_ms", [1_500, 30_000, MINUTE_MS - 2_000, MINUTE_MS + 2_000, HOUR_MS])
    @staged
    async def test_c1_a_clock_that_steps_back_blocks_a_rate_for_at_most_twice_its_span(
        self, stage: Stage, limit: Limit, step_ms: int
    ) -> None:
        await _limited(stage, lane_limits([limit]))
        await _queued(stage, *[f"a{i}" for i in range(5)])
        stage.move(2 * HOUR_MS)
        for claim in await stage.claim():
            await stage.end(done(claim))
        stage.step_back(step_ms)
        for _ in range(2 * MINUTE_MS // 1_000):
            if left := await stage.ids():
                break
            stage.move(1_000)
        assert left == ["a3", "a4"]


class KeyTurnRules(Bench):
    """The order of a limited lane: the keys take turns, and each key keeps its order (C2)."""

    @staged
    async def test_c2_a_key_with_many_messages_does_not_hold_up_another(self, stage: Stage) -> None:
        await _limited(stage, lane_limits([Limit("customer", 100)]))
        await _queued(stage, *[f"a{i}" for i in range(20)])
        stage.move(5)
        await _queued(stage, "b1")
        stage.move(5)
        assert "b1" in [each for _ in range(2) for each in ids_of(await stage.claim(1))]

    @staged
    async def test_c2_after_the_clock_has_stepped_back_a_key_does_not_wait_for_its_last_turn(
        self, stage: Stage
    ) -> None:
        await _limited(stage, lane_limits([Limit("customer", 1)]))
        await _queued(stage, "a1")
        await stage.end(done(await stage.claim_one()))
        stage.step_back(HOUR_MS)
        await _queued(stage, "a2")
        stage.move(2_000)
        assert await stage.ids() == ["a2"]

    @pytest.mark.parametrize("change", ["none", "limits"])
    @pytest.mark.parametrize("limit", [Limit("customer", 5), Limit("customer", rate="5/min")], ids=["5", "5/min"])
    @staged
    async def test_c2_after_the_clock_has_stepped_back_a_backlog_goes_on_beside_later_messages(
        self, stage: Stage, limit: Limit, change: str
    ) -> None:
        await _limited(stage, lane_limits([limit]))
        await _queued(stage, *[f"a{i}" for i in range(4)], "b1")
        stage.move(2 * HOUR_MS)
        claims = await stage.claim(2)
        stage.step_back(HOUR_MS)
        await stage.stored(stage.put("c1", After(HOUR_MS), key=b"c"))
        if change == "limits":
            await _limited(stage, lane_limits([limit, Limit(concurrency=9)]))
        for claim in claims:
            await stage.end(done(claim))
        await _queued(stage, "d1")
        assert sorted(ids_of(claims) + await stage.ids()) == ["a0", "a1", "a2", "a3", "b1", "d1"]

    @staged
    async def test_c2_keys_take_turns(self, stage: Stage) -> None:
        await _limited(stage, lane_limits([Limit("customer", 100)]))
        await _queued(stage, *[f"{key}{i:02}" for key in "abc" for i in range(20)])
        taken: Counter[str] = Counter()
        for _ in range(10):
            taken.update(each[0] for each in ids_of(await stage.claim(3)))
            stage.move(1)
        assert taken == {"a": 10, "b": 10, "c": 10}

    @staged
    async def test_c2_a_key_that_frees_room_waits_for_its_turn(self, stage: Stage) -> None:
        await _limited(stage, lane_limits([Limit("customer", 1)]))
        await _queued(stage, "a1", "a2", "a3")
        stage.move(10)
        await _queued(stage, "b1")
        stage.move(10)
        taken = []
        for _ in range(3):
            (claim,) = await stage.claim(1)
            taken.append(claim.record.id)
            stage.move(1)
            await stage.end(done(claim))
        assert taken == ["a1", "b1", "a2"]

    @staged
    async def test_s9_each_key_keeps_its_order(self, stage: Stage) -> None:
        stage.needs_order()
        await _limited(stage, lane_limits([Limit("customer", 100)]))
        names = [f"{key}{i:02}" for i in range(15) for key in "ab"]
        await _queued(stage, *names)
        taken: list[str] = []
        while claims := await stage.claim(4):
            taken += ids_of(claims)
        assert [each for each in taken if each[0] == "a"] == [each for each in names if each[0] == "a"]
        assert [each for each in taken if each[0] == "b"] == [each for each in names if each[0] == "b"]

    @staged
    async def test_c2_a_message_with_an_earlier_due_time_goes_first(self, stage: Stage) -> None:
        await _limited(stage, lane_limits([Limit("customer", 1)]))
        await stage.stored(stage.put("later", At(stage.now + 200), key=b"a"))
        await stage.stored(stage.put("sooner", At(stage.now + 100), key=b"a"))
        assert (await stage.claimed()).next_due_ms == stage.now + 100
        stage.move(100)
        assert await stage.ids() == ["sooner"]

    @staged
    async def test_s1_nothing_is_early(self, stage: Stage) -> None:
        await _limited(stage, TWO)
        await stage.stored(stage.put("m", After(1000), key=b"a"))
        stage.move(999)
        claimed = await stage.claimed()
        assert (list(claimed.claims), claimed.next_due_ms) == ([], stage.now + 1)
        stage.move(1)
        assert await stage.ids() == ["m"]


class LimitChangeRules(Bench):
    """Changes of limits and of waiting messages, and what operators see."""

    @staged
    async def test_limits_hold_for_messages_that_were_there_before(self, stage: Stage) -> None:
        store = stage.needs_limits()
        await _queued(stage, "a1", "a2", "a3", "a4")
        (claim, *_) = await stage.claim(1)
        await _limited(stage, TWO)
        assert await store.limits() == {LANE: TWO}
        assert len(await stage.claim()) == 1
        await stage.end(done(claim))
        assert len(await stage.claim()) == 1

    @staged
    async def test_limits_change_while_messages_wait(self, stage: Stage) -> None:
        await _limited(stage, lane_limits([Limit("customer", 1)]))
        await _queued(stage, *[f"a{i}" for i in range(8)])
        assert len(await stage.claim()) == 1
        await _limited(stage, lane_limits([Limit("customer", 3)]))
        assert len(await stage.claim()) == 2
        await _limited(stage, NO_LIMITS)
        assert await stage.needs_limits().limits() == {}
        assert len(await stage.claim()) == 5

    @pytest.mark.parametrize("before", [Limit(concurrency=9), Limit("customer", 9), Limit("address", 9)], ids=str)
    @pytest.mark.parametrize("after", [Limit(concurrency=1), Limit("customer", 1), Limit("address", 1)], ids=str)
    @staged
    async def test_c1_a_message_that_was_replaced_in_flight_before_a_change_counts_under_its_own_key(
        self, stage: Stage, before: Limit, after: Limit
    ) -> None:
        await _limited(stage, lane_limits([before]))
        await stage.stored(stage.put("m1", key=b"a", address="x"))
        claim = await stage.claim_one()
        await stage.stored(stage.put("m1", After(HOUR_MS), key=b"b", address="y"))
        await _limited(stage, lane_limits([after]))
        await stage.stored(stage.put("m2", key=b"a", address="x"))
        assert await stage.ids() == []
        assert await stage.settle(done(claim)) is SettleOutcome.SUPERSEDED
        assert await stage.ids() == ["m2"]

    @staged
    async def test_a_change_keeps_what_a_rate_has_counted(self, stage: Stage) -> None:
        await _limited(stage, RATE)
        await _queued(stage, *[f"a{i}" for i in range(8)])
        for claim in await stage.claim():
            await stage.end(done(claim))
        await _limited(stage, lane_limits([Limit("customer", rate="4/min")]))
        assert len(await stage.claim()) == 1

    @staged
    async def test_a_declaration_does_not_undo_a_change_by_an_operator(self, stage: Stage) -> None:
        store = stage.needs_limits()
        five = lane_limits([Limit("customer", 5)])
        await _limited(stage, TWO, is_declared=True)
        await _limited(stage, five)
        await _limited(stage, TWO, is_declared=True)
        assert await store.limits() == {LANE: five}
        await _limited(stage, RATE, is_declared=True)
        assert await store.limits() == {LANE: RATE}

    @staged
    async def test_a_declaration_stays_known_after_an_operator_has_ended_the_limits(self, stage: Stage) -> None:
        store = stage.needs_limits()
        await _limited(stage, RATE, lane=OTHER)
        await _limited(stage, TWO, is_declared=True)
        await _limited(stage, NO_LIMITS)
        assert (await store.limits(), await store.limits(is_declared=True)) == ({OTHER: RATE}, {LANE: TWO})
        await _limited(stage, NO_LIMITS, is_declared=True)
        assert await store.limits(is_declared=True) == {}
        await _limited(stage, TWO, is_declared=True)
        assert await store.limits() == {LANE: TWO, OTHER: RATE}

    @pytest.mark.parametrize("who", ["code", "operator"])
    @staged
    async def test_the_end_of_limits_that_are_not_there_changes_nothing(self, stage: Stage, who: str) -> None:
        store, is_declared = stage.needs_limits(), who == "code"
        await _queued(stage, "a1", "a2", "a3")
        for lane in (LANE, OTHER):
            await _limited(stage, NO_LIMITS, lane=lane, is_declared=is_declared)
        assert await store.limits() == {}
        await _limited(stage, TWO, is_declared=is_declared)
        assert await store.limits() == {LANE: TWO}
        assert len(await stage.claim()) == 2

    @staged
    async def test_limits_survive_a_restart(self, stage: Stage) -> None:
        await _limited(stage, TWO, is_declared=True)
        await _queued(stage, "a1", "a2", "a3")
        claims = await stage.claim()
        await stage.reopen()
        assert await stage.needs_limits().limits() == {LANE: TWO}
        assert await stage.ids() == []
        await stage.end(done(claims[0]))
        assert await stage.ids() == ["a3"]

    @staged
    async def test_a_waiting_message_can_be_cancelled_and_moved(self, stage: Stage) -> None:
        stage.needs_verdict()
        await _limited(stage, lane_limits([Limit("customer", 1)]))
        await _queued(stage, "a1", "a2", "a3", "a4")
        claim = await stage.claim_one()
        await stage.do(Cancel(stage.op(), "a2"))
        await stage.do(Reschedule(stage.op(), "a3", After(HOUR_MS)))
        await stage.end(done(claim))
        assert await stage.ids() == ["a4"]

    @staged
    async def test_a_waiting_message_can_become_late(self, stage: Stage) -> None:
        await _limited(stage, lane_limits([Limit("customer", 1)]))
        await _queued(stage, "a1")
        claim = await stage.claim_one()
        await _queued(stage, "a2", late=Late.drop("1s"))
        await _queued(stage, "a3")
        stage.move(2000)
        await stage.tidy()
        assert await stage.get("a2") is None
        await stage.end(done(claim))
        assert await stage.ids() == ["a3"]

    @staged
    async def test_a_paused_lane_waits(self, stage: Stage) -> None:
        await _limited(stage, TWO)
        await _queued(stage, "a1")
        await stage.store.pause(LANE)
        assert await stage.ids() == []
        await stage.store.resume(LANE)
        assert await stage.ids() == ["a1"]

    @staged
    async def test_a_paused_address_waits(self, stage: Stage) -> None:
        await _limited(stage, lane_limits([Limit("address", 1)]))
        await stage.store.pause(LANE, "x")
        await stage.stored(*[stage.put(f"{to}{i}", address=to) for i in range(2) for to in ("x", "y")])
        assert await stage.ids() == ["y0"]
        await stage.store.resume(LANE, "x")
        assert await stage.ids() == ["x0"]

    @staged
    async def test_a_paused_address_does_not_hold_up_another_address_of_the_lane(self, stage: Stage) -> None:
        await _limited(stage, lane_limits([Limit(concurrency=2)]))
        await stage.store.pause(LANE, "x")
        await stage.stored(*[stage.put(f"{to}{i}", address=to) for i in range(2) for to in ("x", "y")])
        claims = await stage.claim()
        assert ids_of(claims) == ["y0", "y1"]
        await stage.end(done(claims[0]))
        await stage.store.resume(LANE, "x")
        assert await stage.ids() == ["x0"]

    @staged
    async def test_c2_a_claim_names_the_demanded_lanes_that_have_limits(self, stage: Stage) -> None:
        await _limited(stage, TWO)
        await _queued(stage, "a1", "a2", "a3")
        await stage.stored(stage.put("other", lane=OTHER))
        for names in (["a1", "a2", "other"], []):
            claimed = await stage.claimed()
            assert (sorted(ids_of(claimed.claims)), sorted(claimed.limited)) == (names, [LANE])
        await _limited(stage, NO_LIMITS)
        assert not (await stage.claimed()).limited

    @staged
    async def test_a_settled_message_wakes_a_process_whose_messages_wait(self, stage: Stage) -> None:
        stage.needs_wake_ups()
        await _limited(stage, lane_limits([Limit("customer", 1)]))
        await _queued(stage, "a1", "a2")
        claim = await stage.claim_one()
        second = await stage.another_worker("second")
        await stage.wakes(lambda: stage.end(done(claim)), work=second)

    @staged
    async def test_operators_see_which_limit_makes_messages_wait(self, stage: Stage) -> None:
        await _limited(stage, lane_limits([Limit("customer", 1, "2/min")]))
        since = stage.now
        await _queued(stage, "a1", "a2", "a3", "b1")
        stage.move(10)
        first, _ = await stage.claim()
        assert await _keys(stage) == [
            LimitedKey(LANE, b"a", 1, 2, "concurrency", None, since),
            LimitedKey(LANE, b"b", 1, 0, ""),
        ]
        await stage.end(done(first))
        (second,) = await stage.claim()
        await stage.end(done(second))
        (waiting, _) = await _keys(stage)
        assert waiting == LimitedKey(LANE, b"a", 0, 1, "rate", stage.now + MINUTE_MS, since)

    @pytest.mark.parametrize("key", [b"a", b"b", b"c", b""])
    @staged
    async def test_operators_see_one_key(self, stage: Stage, key: bytes) -> None:
        await _limited(stage, TWO)
        await _queued(stage, "a1", "a2", "a3", "a4", "b1", "b2", "b3")
        for name, own in (("ab", b"ab"), ("none", None)):
            await stage.stored(stage.put(name, key=own))
        await stage.claim()
        every = await _keys(stage)
        one = await stage.needs_limits().limited_keys(LANE, key=key)
        assert one == [each for each in every if each.key == key]
        assert len(one) == (key != b"c")

    @staged
    async def test_operators_see_that_the_limit_of_the_lane_makes_messages_wait(self, stage: Stage) -> None:
        await _limited(stage, lane_limits([Limit(concurrency=1), Limit("customer", 1)]))
        await _queued(stage, "a1", "b1")
        await stage.claim_one()
        (_, waiting) = sorted(await _keys(stage), key=lambda each: each.waiting)
        assert waiting == LimitedKey(LANE, b"b", 0, 1, "lane", None, stage.now)

    @staged
    async def test_suspects_are_tried_within_the_limits(self, stage: Stage) -> None:
        await _limited(stage, lane_limits([Limit("customer", 1)]))
        await _queued(stage, "a1")
        for _ in range(SUSPECT_LAPSES):
            await stage.claim_one()
            await stage.lapse()
        await _queued(stage, "a2", "b1")
        taken = []
        for _ in range(4):
            claims = await stage.claim()
            assert sum(claim.record.id[0] == "a" for claim in claims) <= 1
            taken += ids_of(claims)
            for claim in claims:
                await stage.end(done(claim))
            stage.move(1000)
        assert sorted(taken) == ["a1", "a2", "b1"]


class LimitRules(RunningRules, KeyTurnRules, LimitChangeRules):
    """All rules for limits."""
