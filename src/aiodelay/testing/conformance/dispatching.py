"""`DispatchRules`: rules for demand, fairness between lanes, wake-ups, `Late` and pauses."""

# ruff: noqa: D102 - the name of a test states its rule

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from aiodelay.core.values import (
    LEASE_MS,
    MAX_CLAIM_BYTES,
    MAX_CLAIM_MESSAGES,
    After,
    Cancel,
    Command,
    Demand,
    Fire,
    Lane,
    Late,
    Reschedule,
    State,
)

from .stage import HOUR_MS, LANE, LANES, OTHER, THIRD, Bench, Stage, again, dead, done, ids_of, staged

__all__ = ["DemandRules", "DispatchRules", "LatenessRules", "PauseRules", "WakeUpRules"]

RULE: Mapping[str, str | int] = {"e": 60_000}


class DemandRules(Bench):
    """How many messages a claim returns, and how lanes share it (L3)."""

    @staged
    async def test_demand_no_more_messages_than_asked_for(self, stage: Stage) -> None:
        await stage.stored(*[stage.put(f"{lane} {i}", lane=lane) for i in range(5) for lane in (LANE, OTHER)])
        claimed = await stage.claimed({LANE: Demand(2), OTHER: Demand(3)})
        assert [sum(each.startswith(lane) for each in ids_of(claimed.claims)) for lane in (LANE, OTHER)] == [2, 3]
        assert claimed.next_due_ms == stage.now

    @pytest.mark.parametrize("demand", [{OTHER: Demand(9)}, {LANE: Demand(0), OTHER: Demand(9)}], ids=["none", "zero"])
    @staged
    async def test_demand_lanes_that_ask_for_nothing_are_not_touched(
        self, stage: Stage, demand: Mapping[Lane, Demand]
    ) -> None:
        await stage.stored(stage.put(late=Late.drop("1s")))
        stage.move(HOUR_MS)
        before = await stage.picture()
        claimed = await stage.claimed(demand)
        assert (list(claimed.claims), claimed.next_due_ms) == ([], None)
        assert await stage.picture() == before

    @staged
    async def test_demand_no_more_bytes_than_asked_for(self, stage: Stage) -> None:
        parts = {"payload": b"x" * 30, "key": b"y" * 5, "headers": {"abc": b"zz"}}  # 40 bytes
        await stage.stored(*[stage.put(f"m{i}", **parts) for i in range(4)])  # type: ignore[arg-type]
        assert len((await stage.claimed({LANE: Demand(9, max_bytes=119)})).claims) == 2
        assert len((await stage.claimed({LANE: Demand(9, max_bytes=80)})).claims) == 2

    @staged
    async def test_demand_one_larger_message_is_given_alone(self, stage: Stage) -> None:
        sizes = [("small", 10), ("large", 1000), ("next", 10)]
        await stage.stored(*[stage.put(each, payload=bytes(size)) for each, size in sizes])
        demand = {LANE: Demand(9, max_bytes=100)}
        taken = [ids_of((await stage.claimed(demand)).claims) for _ in sizes]
        assert taken == [["small"], ["large"], ["next"]]

    @staged
    async def test_demand_a_claim_is_bounded_whatever_is_asked_for(self, stage: Stage) -> None:
        await stage.stored(*[stage.put(f"m{i}") for i in range(MAX_CLAIM_MESSAGES + 10)])
        assert len(await stage.claim(10_000)) == MAX_CLAIM_MESSAGES
        kilobytes = 400
        puts = [stage.put(f"{lane} {i}", lane=lane, payload=bytes(kilobytes << 10)) for i in (1, 2) for lane in LANES]
        await stage.stored(*puts)
        demand = {lane: Demand(9, max_bytes=8 << 20) for lane in (OTHER, THIRD)}
        claims = (await stage.claimed(demand)).claims
        assert sum(claim.record.envelope.size for claim in claims) <= MAX_CLAIM_BYTES
        assert len(claims) == 2

    @staged
    async def test_demand_one_message_larger_than_any_claim_is_given_alone(self, stage: Stage) -> None:
        await stage.stored(*[stage.put(lane, lane=lane, payload=bytes(MAX_CLAIM_BYTES + 1)) for lane in (LANE, OTHER)])
        claims = [(await stage.claimed()).claims for _ in range(2)]
        assert sorted(ids_of(claims[0]) + ids_of(claims[1])) == sorted([LANE, OTHER])
        assert [len(each) for each in claims] == [1, 1]

    @staged
    async def test_demand_aliases_share_one_demand(self, stage: Stage) -> None:
        for number, lane in enumerate([LANE, OTHER, THIRD, OTHER, LANE]):
            await stage.stored(stage.put(f"{number}", lane=lane))
            stage.move(1)
        demand = {LANE: Demand(3, aliases=(OTHER, THIRD))}
        claimed = await stage.claimed(demand)
        assert (ids_of(claimed.claims), claimed.next_due_ms) == (["0", "1", "2"], stage.now - 2)
        assert ids_of((await stage.claimed(demand)).claims) == ["3", "4"]

    @staged
    async def test_demand_no_lane_is_said_to_be_due_later_than_it_is(self, stage: Stage) -> None:
        later = stage.put("later", lane=OTHER, due=After(HOUR_MS))
        await stage.stored(*[stage.put(f"m{i}") for i in range(3)], stage.put("third", lane=THIRD), later)
        claimed = await stage.claimed({LANE: Demand(2), OTHER: Demand(2), THIRD: Demand(2)})
        if claimed.next_by_lane is not None:
            actual = {LANE: stage.now, OTHER: stage.now + HOUR_MS, THIRD: stage.now + LEASE_MS}
            assert claimed.next_by_lane.keys() == actual.keys()
            for lane, due_ms in actual.items():
                said_ms = claimed.next_by_lane[lane]
                assert said_ms is not None, lane
                assert stage.now <= said_ms <= due_ms, lane

    @staged
    async def test_l3_a_flooded_lane_leaves_the_others_their_share(self, stage: Stage) -> None:
        await stage.stored(*[stage.put(f"flood {i}") for i in range(3 * MAX_CLAIM_MESSAGES)])
        stage.move(1000)
        for turn in range(len(LANES)):  # the lane that is served first changes with each claim
            puts = [stage.put(f"{turn} {lane} {i}", lane=lane) for i in range(20) for lane in (OTHER, THIRD)]
            await stage.stored(*puts)
            claims = (await stage.claimed({lane: Demand(1000) for lane in LANES})).claims
            assert len(claims) == MAX_CLAIM_MESSAGES
            assert sum(not each.startswith("flood") for each in ids_of(claims)) == len(puts)

    @staged
    async def test_l3_flooded_lanes_get_equal_shares(self, stage: Stage) -> None:
        for lane in LANES:
            await stage.stored(*[stage.put(f"{lane} {i}", lane=lane) for i in range(300)])
        claims = (await stage.claimed({lane: Demand(1000) for lane in LANES})).claims
        counts = [sum(claim.record.envelope.lane == lane for claim in claims) for lane in LANES]
        assert (sum(counts), min(counts)) == (MAX_CLAIM_MESSAGES, MAX_CLAIM_MESSAGES // 3)

    @staged
    async def test_l3_lanes_are_served_first_in_turn(self, stage: Stage) -> None:
        size = MAX_CLAIM_BYTES // 2 + 1  # a claim has room for one such message
        await stage.stored(
            *[stage.put(f"{lane} {i}", lane=lane, payload=bytes(size)) for i in (0, 1) for lane in LANES]
        )
        lanes = []
        for _ in range(2 * len(LANES)):
            (claim,) = (await stage.claimed({lane: Demand(9) for lane in LANES})).claims
            lanes.append(claim.record.envelope.lane)
        assert sorted(lanes[:3]) == sorted(lanes[3:]) == sorted(LANES)


class WakeUpRules(Bench):
    """When `wait` ends (L2)."""

    @pytest.mark.parametrize("what", ["put", "later put", "fire", "reschedule", "release", "redrive", "again", "rearm"])
    @staged
    async def test_l2_wait_ends_when_a_message_may_be_earlier(self, stage: Stage, what: str) -> None:
        await stage.stored(stage.put("ahead", After(HOUR_MS)), stage.put(rule=RULE))
        claim = await stage.claim_one()
        if what == "release":
            await stage.store.pause(LANE)
        if what == "redrive":
            await stage.end(dead(claim))
        letters = await stage.dead() if what == "redrive" else []
        actions = {
            "put": lambda: stage.do(stage.put("new")),
            "later put": lambda: stage.do(stage.put("new", After(2 * HOUR_MS))),
            "fire": lambda: stage.do(Fire(stage.op(), "ahead")),
            "reschedule": lambda: stage.do(Reschedule(stage.op(), "ahead", After(1))),
            "release": lambda: stage.store.resume(LANE),
            "redrive": lambda: stage.store.redrive([letter.key for letter in letters]),
            "again": lambda: stage.end(again(claim, stage.now)),
            "rearm": lambda: stage.end(done(claim, then=stage.now + 1)),
        }
        await stage.wakes(actions[what])

    @staged
    async def test_l2_wait_ends_by_what_another_worker_does(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        claim = await stage.claim_one()
        other = await stage.another_worker("second")
        await stage.wakes(lambda: stage.end(again(claim, stage.now)), work=other)

    @staged
    async def test_l2_wait_ends_by_what_another_process_puts(self, stage: Stage) -> None:
        stage.needs_wake_ups()
        async with self.reopen(stage.store, stage.clock) as other:
            await stage.wakes(lambda: other.apply([stage.put()]))

    @staged
    async def test_l2_a_signal_between_clear_and_wait_is_not_lost(self, stage: Stage) -> None:
        stage.work.clear()
        assert await stage.claim() == []
        await stage.stored(stage.put())
        await self._ends_at_once(stage, None)
        await self._ends_at_once(stage, None)  # the wake-up stays until `clear`

    @pytest.mark.parametrize("ago_ms", [0, 1, HOUR_MS])
    @staged
    async def test_l2_wait_for_a_time_that_has_come_ends_at_once(self, stage: Stage, ago_ms: int) -> None:
        stage.work.clear()
        await self._ends_at_once(stage, stage.now - ago_ms)

    @staged
    async def test_l2_wake_ends_a_wait(self, stage: Stage) -> None:
        stage.work.wake()
        await self._ends_at_once(stage, None)

        async def wake() -> None:
            stage.work.wake()

        await stage.wakes(wake)

    @staticmethod
    async def _ends_at_once(stage: Stage, until_ms: int | None) -> None:
        async with asyncio.timeout(stage.soon_s):
            await stage.work.wait(until_ms=until_ms)


class LatenessRules(Bench):
    """What becomes of a message that is later than its `Late` allows."""

    @pytest.mark.parametrize("attempt", ["first", "retry", "after a lapse"])
    @pytest.mark.parametrize("policy", ["deliver", "drop", "dead letter"])
    @pytest.mark.parametrize("by", ["claim", "tidy"])
    @staged
    async def test_late_policy(self, stage: Stage, attempt: str, policy: str, by: str) -> None:
        late = {"deliver": Late.deliver(), "drop": Late.drop("1m"), "dead letter": Late.dead_letter("1m")}[policy]
        due_ms = (await stage.stored(stage.put(late=late, lane="unserved"))).due_ms
        if attempt != "first":
            claim = await stage.claim_one("unserved")
            if attempt == "retry":
                await stage.end(again(claim, due_ms + 30_000, 1, "e"))
            else:
                await stage.lapse()
        stage.move(due_ms + 60_000 - stage.now)
        assert (await stage.tidy()).expired == 0
        (claim,) = await stage.claim(lane="unserved")  # exactly at the limit, the message is not late yet
        await stage.end(again(claim, stage.now, claim.record.attempt))
        stage.move(1)
        expired = (await stage.tidy()).expired if by == "tidy" else 0
        assert expired == (by == "tidy" and policy != "deliver")
        assert len(await stage.claim(lane="unserved")) == (policy == "deliver")
        assert (await stage.get() is None) == (policy != "deliver")
        attempts = [(letter.reason, letter.record.attempt) for letter in await stage.dead()]
        assert attempts == ([("late", 1 if attempt == "retry" else 0)] if policy == "dead letter" else [])

    @staged
    async def test_late_messages_do_not_hide_those_behind_them(self, stage: Stage) -> None:
        await stage.stored(*[stage.put(f"late {i}", late=Late.drop("1s")) for i in range(20)])
        await stage.stored(stage.put("on time", After(500)))
        stage.move(1001)
        assert await stage.ids() == ["on time"]

    @staged
    async def test_late_retry_that_waits_is_judged_when_its_time_comes(self, stage: Stage) -> None:
        await stage.stored(stage.put(late=Late.drop("1s")))
        await stage.end(again(await stage.claim_one(), stage.now + HOUR_MS))
        stage.move(2000)
        assert (await stage.tidy()).expired == 0
        await stage.do(Reschedule(stage.op(), "m", After(0)))  # sets a new due time
        await stage.claim_one()

    @pytest.mark.parametrize("policy", [Late.drop("1s"), Late.dead_letter("1s")], ids=["drop", "dead letter"])
    @staged
    async def test_late_recurring_messages_are_given_out(self, stage: Stage, policy: Late) -> None:
        await stage.stored(stage.put(rule=RULE, late=policy))
        stage.move(HOUR_MS)
        assert (await stage.tidy()).expired == 0
        claim = await stage.claim_one()
        assert claim.record.expires_ms == claim.record.due_ms + 1000

    @staged
    async def test_late_tidy_is_bounded(self, stage: Stage) -> None:
        await stage.stored(*[stage.put(f"m{i}", late=Late.drop("1s")) for i in range(5)])
        stage.move(HOUR_MS)
        assert [(await stage.tidy(limit=2)).expired for _ in range(4)] == [2, 2, 1, 0]

    @pytest.mark.parametrize("address", [None, "address"], ids=["lane", "address"])
    @staged
    async def test_late_what_is_held_is_judged_only_once_it_is_released(
        self, stage: Stage, address: str | None
    ) -> None:
        await stage.store.pause(LANE, address)
        await stage.stored(stage.put(address="address", late=Late.drop("1s")))
        stage.move(HOUR_MS)
        assert ((await stage.tidy()).expired, await stage.claim()) == (0, [])
        assert await stage.get() is not None
        await stage.store.resume(LANE, address)
        assert (await stage.tidy()).expired == 1


class PauseRules(Bench):
    """Messages of a paused lane or address are kept and not claimed."""

    @pytest.mark.parametrize("address", [None, "held"], ids=["lane", "address"])
    @staged
    async def test_held_messages_are_kept_and_come_back_in_order(self, stage: Stage, address: str | None) -> None:
        puts = [stage.put(f"m{i}", After(i % 2), address="held") for i in range(6)]
        await stage.stored(*puts[:3])
        assert await stage.store.pause(LANE, address)
        await stage.stored(*puts[3:])
        stage.move(10)
        claimed = await stage.claimed()
        assert (list(claimed.claims), claimed.next_due_ms) == ([], None)
        assert [each.state for each in await stage.messages()] == [State.HELD] * 6
        await stage.do(Cancel(stage.op(), "m0"))
        assert await stage.store.resume(LANE, address)
        assert (await stage.claimed({LANE: Demand(0)})).next_due_ms is None
        assert await stage.ids() == ["m2", "m4", "m1", "m3", "m5"]

    @staged
    async def test_hold_and_release_say_whether_they_changed_anything(self, stage: Stage) -> None:
        for address in (None, "", "a"):
            assert [await stage.store.pause(LANE, address), await stage.store.pause(LANE, address)] == [True, False]
        assert list(await stage.store.paused()) == [(LANE, None), (LANE, ""), (LANE, "a")]
        for address in (None, "", "a"):
            assert [await stage.store.resume(LANE, address), await stage.store.resume(LANE, address)] == [True, False]
        assert not await stage.store.paused()

    @staged
    async def test_other_addresses_flow_past_a_held_one(self, stage: Stage) -> None:
        await stage.store.pause(LANE, "held")
        for first in range(0, 2000, 500):
            await stage.stored(*[stage.put(f"h{first + i}", address="held") for i in range(500)])
        stage.move(1)
        await stage.stored(stage.put("a", address="free"), stage.put("b", address=""))
        claimed = await stage.claimed({LANE: Demand(500)})
        assert ids_of(claimed.claims) == ["a", "b"]
        assert claimed.next_due_ms == stage.now + LEASE_MS

    @staged
    async def test_other_lanes_flow_past_a_held_one(self, stage: Stage) -> None:
        await stage.store.pause(LANE)
        await stage.stored(stage.put("held"), stage.put("free", lane=OTHER))
        assert ids_of((await stage.claimed()).claims) == ["free"]

    @staged
    async def test_a_message_in_flight_is_not_held_until_it_returns(self, stage: Stage) -> None:
        await stage.stored(stage.put("a"), stage.put("b"))
        claims = await stage.claim()
        await stage.store.pause(LANE)
        assert {each.state for each in await stage.messages()} == {State.IN_FLIGHT}
        await stage.end(done(claims[0]))
        await stage.end(again(claims[1], stage.now))
        assert await stage.claim() == []
        await stage.store.resume(LANE)
        await stage.claim_one()

    @pytest.mark.parametrize("kind", ["reschedule", "fire", "replace"])
    @staged
    async def test_held_messages_can_be_changed_and_stay_held(self, stage: Stage, kind: str) -> None:
        await stage.stored(stage.put("m", address="held"))
        await stage.store.pause(LANE, "held")
        assert await stage.claim() == []
        commands: dict[str, Command] = {
            "reschedule": Reschedule(stage.op(), "m", After(0)),
            "fire": Fire(stage.op(), "m"),
            "replace": stage.put("m", address="held"),
        }
        await stage.do(commands[kind])
        assert await stage.claim() == []
        await stage.store.resume(LANE, "held")
        await stage.claim_one()
        assert await stage.claim() == []


class DispatchRules(DemandRules, WakeUpRules, LatenessRules, PauseRules):
    """Which messages a claim returns, and when `wait` ends."""
