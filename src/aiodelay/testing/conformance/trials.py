"""`TrialRules`, `KillRules` and `SilenceRules`: rules for messages that may end their process, the suspects."""

# ruff: noqa: D102 - the name of a test states its rule

from __future__ import annotations

import asyncio

import pytest

from aiodelay.core.transitions import KILLS_TO_DEATH, SILENT_LEASES, SUSPECT_LAPSES, TRIAL_MS
from aiodelay.core.values import LEASE_MS, After, Claim, Demand, RenewOutcome, SettleOutcome, Stored
from aiodelay.ports import Work

from .stage import ALL, LANES, OTHER, Bench, Stage, again, dead, done, ids_of, staged

__all__ = ["KillRules", "SilenceRules", "TrialRules"]


async def _make_suspect(stage: Stage) -> None:
    """Let the claims of all due messages lapse until the messages are suspects."""
    for _ in range(SUSPECT_LAPSES):
        assert await stage.claim()
        await stage.lapse()


class TrialRules(Bench):
    """The rules for which suspects are tried, and when."""

    @staged
    async def test_l5_suspects_are_tried_together_and_without_others(self, stage: Stage) -> None:
        await stage.stored(*[stage.put(f"m{i}") for i in range(3)])
        await _make_suspect(stage)
        await stage.stored(stage.put("fresh", lane=OTHER), stage.put("new"))
        tried = (await stage.claimed()).claims
        assert sorted(ids_of(tried)) == ["m0", "m1", "m2"]
        assert not any(claim.record.alone for claim in tried)
        assert sorted(ids_of((await stage.claimed()).claims)) == ["fresh", "new"]

    @staged
    async def test_l5_a_claim_takes_what_has_lapsed_no_more_often_than_it_asks_for(self, stage: Stage) -> None:
        await stage.stored(stage.put("suspect"))
        await _make_suspect(stage)
        await stage.stored(stage.put("lapsed"), stage.put("lapsed too", lane=OTHER))
        assert sorted(ids_of(await stage.die(max_lapses=1))) == ["lapsed", "lapsed too"]
        await stage.stored(stage.put("fresh"))
        for max_lapses, ids in enumerate([["fresh"], ["lapsed", "lapsed too"], ["suspect"]]):
            demand = {lane: Demand(ALL, max_lapses=max_lapses) for lane in LANES}
            assert sorted(ids_of((await stage.claimed(demand)).claims)) == ids
            left = await stage.claimed(demand)
            assert left.claims == []
            assert left.next_due_ms == stage.now + (LEASE_MS if max_lapses == SUSPECT_LAPSES else TRIAL_MS)

    @staged
    async def test_l5_one_group_of_suspects_is_tried_at_a_time(self, stage: Stage) -> None:
        await stage.stored(*[stage.put(f"m{i}") for i in range(5)])
        await _make_suspect(stage)
        first, second = await stage.claim(2)
        other = await stage.another_worker("second")
        assert await stage.claim(work=other) == []
        await stage.end(done(first))
        second, _ = await stage.renew(second)
        assert await stage.claim(work=other) == []
        second, _ = await stage.renew(second, ends_trial=True)
        third, fourth, fifth = await stage.claim(work=other)
        for claim in (second, third, fourth, fifth):
            await stage.end(done(claim))

    @staged
    async def test_l5_half_of_a_group_that_ended_its_process_is_tried_next(self, stage: Stage) -> None:
        await stage.stored(*[stage.put(f"m{i}") for i in range(7)])
        await _make_suspect(stage)
        groups = [await stage.die() for _ in range(5)]
        assert [ids_of(group) for group in groups] == [[f"m{i}" for i in range(n)] for n in (7, 4, 2, 1, 1)]
        assert {claim.record.lapses for group in groups for claim in group} == {SUSPECT_LAPSES}
        assert [claim.record.kills for group in groups for claim in group] == [0] * 14 + [1]
        for group in (["m0"], ["m1"], [f"m{i}" for i in range(2, 7)]):  # only m0 has a kill
            claims = await stage.claim()
            assert ids_of(claims) == group
            await stage.work.settle([done(claim) for claim in claims])

    @staged
    async def test_l5_the_other_half_of_a_group_holds_the_killer(self, stage: Stage) -> None:
        await stage.stored(*[stage.put(f"m{i}") for i in range(8)])
        await _make_suspect(stage)
        assert len(await stage.die()) == 8
        for group in (["m0", "m1", "m2", "m3"], ["m4", "m5"], ["m6"], ["m7"]):
            claims = await stage.claim()
            assert ids_of(claims) == group
            await stage.work.settle([done(claim) for claim in claims])

    @staged
    async def test_l5_a_suspect_in_doubt_keeps_no_others_waiting(self, stage: Stage) -> None:
        await stage.stored(stage.put("a"), stage.put("b"))
        await _make_suspect(stage)
        other = await stage.another_worker("second")
        assert ids_of(await stage.claim(1, work=other)) == ["a"]
        stage.move(LEASE_MS - 1)
        assert await stage.claim() == []
        stage.move(1)
        assert (await stage.claim_one()).record.id == "b"

    @staged
    async def test_l5_a_suspect_does_not_stop_other_workers(self, stage: Stage) -> None:
        await stage.stored(stage.put("suspect"))
        await _make_suspect(stage)
        await stage.stored(stage.put("fresh", After(0)))
        other = await stage.another_worker("second")
        taken: list[Claim] = [*await stage.claim(), *await stage.claim(work=other)]
        assert ids_of(taken) == ["suspect", "fresh"]


class KillRules(Bench):
    """The rules for the counts of lapses and kills."""

    @staged
    async def test_l5_a_lapse_after_a_trial_is_one_more_and_no_kill(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        await _make_suspect(stage)
        for lapses in range(SUSPECT_LAPSES, 10):
            claim = await stage.claim_one()
            assert (claim.record.lapses, claim.record.kills, claim.record.alone) == (lapses, 0, True)
            claim, _ = await stage.renew(claim)
            assert (await stage.record()).alone
            await stage.renew(claim, ends_trial=True)
            assert not (await stage.record()).alone
            await stage.lapse()

    @staged
    async def test_l5_a_message_given_back_without_a_run_keeps_its_lapses(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        await _make_suspect(stage)
        claim = await stage.claim_one()
        lapses = claim.record.lapses
        await stage.end(again(claim, claim.record.due_ms, attempt=claim.record.attempt))
        record = await stage.record()
        assert (record.lapses, record.kills, record.alone) == (lapses, 0, False)
        claim = await stage.claim_one()
        await stage.end(again(claim, stage.now, error="failed"))
        assert (await stage.record()).lapses == 0, "its run has ended, and the process lives"

    @staged
    async def test_l5_a_message_that_kills_three_times_alone_is_given_up(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        for lapses in range(SUSPECT_LAPSES + KILLS_TO_DEATH):
            (claim,) = await stage.die()
            assert claim.record.lapses == min(lapses, SUSPECT_LAPSES)
            assert claim.record.kills == max(lapses - SUSPECT_LAPSES, 0)
        (letter,) = await stage.dead()
        assert (letter.reason, letter.record.kills, letter.record.attempt) == ("killed_worker", KILLS_TO_DEATH, 0)
        assert await stage.get() is None

    @staged
    async def test_l5_kills_are_in_doubt_once_another_message_has_become_a_suspect(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        await _make_suspect(stage)
        for kills in (0, 1):
            (claim,) = await stage.die()
            assert claim.record.kills == kills
        await stage.stored(stage.put("beside"))
        assert ids_of(await stage.die(max_lapses=1)) == ["beside"]
        assert (await stage.record()).kills == 2
        assert ids_of(await stage.die(max_lapses=1)) == ["beside"]
        claim, *others = await stage.claim()
        assert (claim.record.id, claim.record.kills, claim.record.alone, others) == ("m", 0, True, [])

    @staged
    async def test_l5_its_499_neighbours_are_delivered(self, stage: Stage) -> None:
        ids = [f"m{i:03}" for i in range(499)]
        await stage.stored(*[stage.put(each) for each in ids[:250]], stage.put("poison"))
        await stage.stored(*[stage.put(each) for each in ids[250:]])
        delivered: list[str] = []
        for number in range(len(ids) + SUSPECT_LAPSES + KILLS_TO_DEATH + 1):
            async with stage.store.work(f"process {number}", LANES) as work:
                claims = await stage.claim(work=work)
                if "poison" not in ids_of(claims):
                    delivered += ids_of(claims)
                    await work.settle([done(claim) for claim in claims])
            if "poison" in ids_of(claims):
                stage.move(LEASE_MS)  # the process has ended before it settled anything
        assert sorted(delivered) == ids
        assert [letter.record.id for letter in await stage.dead()] == ["poison"]

    @pytest.mark.parametrize("end", ["again", "replaced", "redriven"])
    @staged
    async def test_l5_lapses_and_kills_start_again(self, stage: Stage, end: str) -> None:
        await stage.stored(stage.put())
        await _make_suspect(stage)
        await stage.die()
        claim = await stage.claim_one()
        assert claim.record.kills == 1
        if end == "again":
            await stage.end(again(claim, stage.now))
        elif end == "replaced":
            await stage.stored(stage.put())
        else:
            await stage.end(dead(claim))
            (outcome,) = await stage.store.redrive([letter.key for letter in await stage.dead()])
            assert isinstance(outcome, Stored)
        record = (await stage.claim_one()).record
        assert (record.lapses, record.kills, record.alone) == (0, 0, False)


class SilenceRules(Bench):
    """The rules for a worker that stays silent while it holds a suspect."""

    async def _suspect_of_another(self, stage: Stage) -> tuple[Claim, Work]:
        """Give a suspect to a worker that stays silent afterwards without having ended."""
        await stage.stored(stage.put())
        await _make_suspect(stage)
        other = await stage.another_worker("second")
        return await stage.claim_one(work=other), other

    @staged
    async def test_l5_a_suspect_is_left_to_a_process_that_beats(self, stage: Stage) -> None:
        claim, other = await self._suspect_of_another(stage)
        for _ in range(3 * SILENT_LEASES):
            stage.move(LEASE_MS)
            await asyncio.to_thread(other.beat, [claim.record.id])
            claimed = await stage.claimed()
            assert (list(claimed.claims), claimed.next_due_ms, (await stage.tidy()).lapsed) == ([], None, 0)
        claim, outcome = await stage.renew(claim)
        assert outcome is not RenewOutcome.LOST
        assert await stage.settle(done(claim), work=other) is SettleOutcome.SETTLED

    @staged
    async def test_l5_a_process_that_is_silent_for_four_leases_has_ended(self, stage: Stage) -> None:
        claim, other = await self._suspect_of_another(stage)
        stage.move(SILENT_LEASES * LEASE_MS - 1)
        await asyncio.to_thread(other.beat, [claim.record.id])
        stage.move(SILENT_LEASES * LEASE_MS - 1)
        assert ((await stage.tidy()).lapsed, await stage.claim()) == (0, [])
        stage.move(1)
        again_ = await stage.claim_one()
        assert again_.record.alone
        if self.wakes_other_processes:  # in other stores, all workers share one process, which is not silent
            assert again_.record.kills == 1

    @staged
    async def test_l5_a_process_that_lives_and_has_lost_a_suspect_is_charged_no_kill(self, stage: Stage) -> None:
        claim, other = await self._suspect_of_another(stage)
        for _ in range(SILENT_LEASES):
            stage.move(LEASE_MS)
            await asyncio.to_thread(other.beat, [])
        again_ = await stage.claim_one()
        assert (again_.token != claim.token, again_.record.kills) == (True, 0)
