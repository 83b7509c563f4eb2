"""`RecurringRules`: rules for recurring messages.

A series is one record. The step that ends the first attempt of an occurrence also schedules the next occurrence.
The module `recurring_retries` has the rules for the retries that go on beside their series.
"""

# ruff: noqa: D102 - the name of a test states its rule

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import pytest
from msgspec.structs import replace

from aiodelay.core.transitions import KILLS_TO_DEATH, SUSPECT_LAPSES, delivery_id, occurrence_id
from aiodelay.core.values import (
    LEASE_MS,
    After,
    At,
    Cancel,
    Conflict,
    Late,
    Refused,
    RenewOutcome,
    Reschedule,
    SettleOutcome,
    Stored,
)

from .recurring_retries import MINUTE_MS, OTHER_RULE, RULE, LiveListRules, OldRetryRules, SeriesEndRules
from .stage import HOUR_MS, Bench, Stage, again, dead, done, ending, staged

__all__ = ["DeadOccurrenceRules", "OccurrenceRules", "RearmingRules", "RecurringRules"]

End = Literal["done", "again", "dead"]


class RearmingRules(Bench):
    """The rules for what moves a series to its next occurrence, and what does not."""

    @pytest.mark.parametrize("end", ["done", "again", "dead"])
    @staged
    async def test_recurring_first_attempt_rearms_the_series_whatever_its_outcome(self, stage: Stage, end: End) -> None:
        put = stage.put("s", rule=RULE)
        first = await stage.stored(put)
        await stage.end(ending(end, await stage.claim_one(), due_ms=stage.now + 500, then=first.due_ms + MINUTE_MS))
        record = await stage.record("s")
        assert (record.due_ms, record.attempt, record.revision) == (first.due_ms + MINUTE_MS, 0, first.revision)
        assert (record.envelope, record.first_error, record.last_error) == (put.envelope, None, None)
        assert record.live == ((first.due_ms,) if end == "again" else ())
        stage.move(MINUTE_MS)
        assert "s" in await stage.ids()

    @pytest.mark.parametrize("end", ["done", "again", "dead"])
    @staged
    async def test_recurring_occurrence_that_came_due_during_a_run_is_claimed_at_once(
        self, stage: Stage, end: End
    ) -> None:
        first = await stage.stored(stage.put("s", rule=RULE))
        claim = await stage.claim_one()
        stage.move(LEASE_MS - 1)
        then_ms = first.due_ms + 1
        await stage.end(ending(end, claim, due_ms=stage.now + HOUR_MS, then=then_ms))
        assert [(each.record.id, each.record.due_ms) for each in await stage.claim()] == [("s", then_ms)]

    @staged
    async def test_recurring_given_back_stays_where_it_stands(self, stage: Stage) -> None:
        due_ms = (await stage.stored(stage.put("s", rule=RULE))).due_ms
        await stage.end(again(await stage.claim_one(), stage.now, attempt=0))
        claim = await stage.claim_one()
        assert (claim.record.id, claim.record.due_ms, claim.record.envelope.rule) == ("s", due_ms, RULE)
        assert claim.record.live == ()

    @pytest.mark.parametrize("end", ["done", "dead"])
    @staged
    async def test_recurring_ends_without_a_next_time(self, stage: Stage, end: End) -> None:
        await stage.stored(stage.put("s", rule=RULE))
        await stage.end(ending(end, await stage.claim_one(), due_ms=stage.now + 500, then=None))
        assert await stage.get("s") is None
        stage.move(HOUR_MS)
        assert await stage.claim() == []

    @staged
    async def test_recurring_lateness_limit_moves_along(self, stage: Stage) -> None:
        due_ms = (await stage.stored(stage.put("s", rule=RULE, late=Late.drop("5s")))).due_ms
        await stage.end(again(await stage.claim_one(), due_ms + 1, then=due_ms + MINUTE_MS))
        assert (await stage.record("s")).expires_ms == due_ms + MINUTE_MS + 5000
        assert (await stage.record(occurrence_id("s", due_ms))).expires_ms == due_ms + 5000

    @staged
    async def test_recurring_put_repeated_after_rearming_answers_as_before(self, stage: Stage) -> None:
        put = stage.put("s", rule=RULE)
        first = await stage.do(put)
        claim = await stage.claim_one()
        await stage.end(again(claim, stage.now + 1, then=claim.record.due_ms + MINUTE_MS))
        before = await stage.picture()
        assert await stage.do(put) == first
        assert await stage.picture() == before

    @staged
    async def test_recurring_settlement_sent_twice_rearms_once(self, stage: Stage) -> None:
        await stage.stored(stage.put("s", rule=RULE))
        claim = await stage.claim_one()
        settlement = again(claim, stage.now + 1, then=claim.record.due_ms + MINUTE_MS)
        await stage.end(settlement)
        before = await stage.picture()
        assert await stage.settle(settlement) is SettleOutcome.GONE
        assert (await stage.renew(claim))[1] is RenewOutcome.LOST
        assert await stage.picture() == before

    @staged
    async def test_recurring_lapse_does_not_rearm(self, stage: Stage) -> None:
        due_ms = (await stage.stored(stage.put("s", rule=RULE))).due_ms
        await stage.claim_one()
        await stage.lapse()
        record = (await stage.claim_one()).record
        assert (record.due_ms, record.lapses, record.envelope.rule) == (due_ms, 1, RULE)

    @pytest.mark.parametrize(
        ("old", "new", "answer"),
        [
            (RULE, RULE, "kept"),
            (RULE, OTHER_RULE, "replaced"),
            (None, RULE, "kept"),
            (RULE, None, "kept"),
            (None, None, "kept"),
        ],
    )
    @staged
    async def test_recurring_keep_replaces_only_a_rule_that_changed(
        self, stage: Stage, old: Mapping[str, str | int] | None, new: Mapping[str, str | int] | None, answer: str
    ) -> None:
        stage.needs_conflict("keep")
        await stage.stored(stage.put("s", rule=old))
        outcome = await stage.do(stage.put("s", rule=new, conflict=Conflict.keep()))
        assert isinstance(outcome, Stored)
        assert outcome.answer == answer
        assert (await stage.record("s")).envelope.rule == (new if answer == "replaced" else old)


class OccurrenceRules(Bench):
    """The rules for what an occurrence has of its own: its retries, due time, delivery id and trace."""

    @staged
    async def test_recurring_retry_goes_on_beside_its_series(self, stage: Stage) -> None:
        due_ms = (await stage.stored(stage.put("s", rule=RULE, payload=b"p"))).due_ms
        first = await stage.claim_one()
        await stage.end(again(first, due_ms + 500, 1, "e", due_ms + MINUTE_MS))
        stage.move(500)
        retry = await stage.claim_one()
        assert retry.record.id == occurrence_id("s", due_ms)
        assert delivery_id(retry.record) == delivery_id(first.record)
        envelope = retry.record.envelope
        assert (envelope.rule, envelope.payload, retry.record.live) == (None, b"p", ())
        assert (retry.record.due_ms, retry.record.attempt, retry.record.last_error) == (due_ms, 1, "e")
        await stage.end(again(retry, stage.now + 500, 2, "f"))
        assert (await stage.record("s")).live == (due_ms,)

    @staged
    async def test_recurring_occurrence_keeps_its_delivery_id_when_its_retry_is_moved(self, stage: Stage) -> None:
        due_ms = (await stage.stored(stage.put("s", rule=RULE))).due_ms
        first = await stage.claim_one()
        await stage.end(again(first, due_ms + 10, 1, "e", due_ms + MINUTE_MS))
        await stage.do(Reschedule(stage.op(), occurrence_id("s", due_ms), After(5)))
        stage.move(5)
        retry = await stage.claim_one()
        assert (retry.record.due_ms, delivery_id(retry.record)) == (stage.now, delivery_id(first.record))

    @staged
    async def test_recurring_occurrences_have_delivery_ids_of_their_own(self, stage: Stage) -> None:
        await stage.stored(stage.put("s", rule=RULE))
        seen = set()
        for _ in range(5):
            claim = await stage.claim_one()
            seen.add(delivery_id(claim.record))
            await stage.end(done(claim, then=claim.record.due_ms + MINUTE_MS))
            stage.move(MINUTE_MS)
        assert len(seen) == 5

    @staged
    async def test_recurring_retry_has_its_attempt_s_trace_and_the_series_what_it_had(self, stage: Stage) -> None:
        given, attempted = ({"traceparent": f"00-{n * 32}-{n * 16}-01"} for n in "12")
        due_ms = (await stage.stored(stage.put("s", rule=RULE, trace=given))).due_ms
        retry = again(await stage.claim_one(), stage.now, 1, then=due_ms + MINUTE_MS)
        await stage.end(replace(retry, trace=attempted))
        assert (await stage.claim_one()).record.envelope.trace == attempted
        assert (await stage.record("s")).envelope.trace == given

    @pytest.mark.parametrize("how", ["reschedule", "then"])
    @staged
    async def test_recurring_occurrences_never_share_a_due_time(self, stage: Stage, how: str) -> None:
        due_ms = (await stage.stored(stage.put("s", rule=RULE))).due_ms
        claim = await stage.claim_one()
        await stage.end(again(claim, stage.now + HOUR_MS, then=due_ms + MINUTE_MS))
        if how == "reschedule":
            await stage.do(Reschedule(stage.op(), "s", At(due_ms)))
            stage.move(1)
        else:
            stage.move(MINUTE_MS)
            await stage.end(done(await stage.claim_one(), then=due_ms))
        claim = await stage.claim_one()
        await stage.end(again(claim, stage.now + HOUR_MS, then=due_ms + 5 * MINUTE_MS))
        live = (await stage.record("s")).live
        assert len(set(live)) == 2
        for each in live:
            assert await stage.get(occurrence_id("s", each)) is not None


class DeadOccurrenceRules(Bench):
    """The rules for occurrences that become dead letters."""

    @staged
    async def test_recurring_dead_occurrence_keeps_its_errors_and_the_series_has_none(self, stage: Stage) -> None:
        due_ms = (await stage.stored(stage.put("s", rule=RULE))).due_ms
        await stage.end(again(await stage.claim_one(), due_ms, 1, "e1", due_ms + MINUTE_MS))
        await stage.end(again(await stage.claim_one(), due_ms, 2, "e2"))
        ended = dead(await stage.claim_one(), attempt=3, error="e3")
        await stage.end(replace(ended, traceback="Traceback"))
        (letter,) = await stage.dead()
        assert (letter.record.id, letter.errors) == (occurrence_id("s", due_ms), ("e1", "e2", "e3"))
        assert letter.traceback == "Traceback"
        series = await stage.record("s")
        assert (series.first_error, series.earlier_errors, series.last_error, series.traceback) == (
            None,
            (),
            None,
            None,
        )

    @staged
    async def test_recurring_dead_letter_never_ends_the_series(self, stage: Stage) -> None:
        due_ms = (await stage.stored(stage.put("s", rule=RULE))).due_ms
        for number in range(1, 4):
            await stage.end(dead(await stage.claim_one(), then=due_ms + number * MINUTE_MS))
            stage.move(MINUTE_MS)
        letters = [letter.record for letter in await stage.dead()]
        assert [each.id for each in letters] == [occurrence_id("s", due_ms + i * MINUTE_MS) for i in range(3)]
        assert {each.envelope.rule for each in letters} == {None}
        await stage.claim_one()

    @staged
    async def test_recurring_dead_occurrences_redriven_together_have_delivery_ids_of_their_own(
        self, stage: Stage
    ) -> None:
        due_ms = (await stage.stored(stage.put("s", rule=RULE))).due_ms
        for number in range(1, 4):
            await stage.end(dead(await stage.claim_one(), then=due_ms + number * HOUR_MS))
            stage.move(HOUR_MS if number < 3 else 0)
        await stage.store.redrive([letter.key for letter in await stage.dead()])
        claims = await stage.claim()
        assert len({delivery_id(claim.record) for claim in claims}) == len(claims) == 3

    @staged
    async def test_recurring_dead_occurrence_can_be_redriven_beside_its_series(self, stage: Stage) -> None:
        due_ms = await self._with_dead_occurrence(stage)
        (letter,) = await stage.dead()
        await stage.store.redrive([letter.key])
        claim = await stage.claim_one()
        assert claim.record.id == occurrence_id("s", due_ms)
        assert delivery_id(claim.record) != delivery_id(letter.record)
        await stage.end(done(claim))
        assert (await stage.record("s")).live == ()

    @staged
    async def test_recurring_dead_occurrence_is_found_by_its_own_id(self, stage: Stage) -> None:
        due_ms = await self._with_dead_occurrence(stage)
        letters = await stage.dead()
        assert list(await stage.store.dead_letters(message_id=occurrence_id("s", due_ms))) == letters
        assert list(await stage.store.dead_letters(message_id="s")) == []

    @staged
    async def test_s5_recurring_redriven_occurrence_is_live_and_ends_with_its_series(self, stage: Stage) -> None:
        stage.needs_verdict()
        due_ms = await self._with_dead_occurrence(stage)
        (letter,) = await stage.dead()
        await stage.store.redrive([letter.key])
        assert (await stage.record("s")).live == (due_ms,)
        await stage.do(Cancel(stage.op(), "s"))
        assert await stage.picture() == ([], [])

    @staged
    async def test_s2_recurring_occurrence_that_stands_again_is_not_redriven(self, stage: Stage) -> None:
        due_ms = await self._with_dead_occurrence(stage)
        (letter,) = await stage.dead()
        await stage.do(Reschedule(stage.op(), "s", At(due_ms)))
        assert await stage.store.redrive([letter.key]) == [Refused("exists")]
        await stage.end(again(await stage.claim_one(), stage.now + HOUR_MS, then=due_ms + MINUTE_MS))
        assert await stage.store.redrive([letter.key]) == [Refused("exists")]
        assert len(await stage.dead()) == 1

    @staticmethod
    async def _with_dead_occurrence(stage: Stage) -> int:
        """Make a series `s` whose first occurrence is a dead letter. Return the due time of that occurrence."""
        due_ms = (await stage.stored(stage.put("s", rule=RULE))).due_ms
        await stage.end(dead(await stage.claim_one(), then=due_ms + MINUTE_MS))
        return due_ms

    @staged
    async def test_l5_recurring_killer_is_given_out_for_its_taker_to_end_the_occurrence(self, stage: Stage) -> None:
        due_ms = (await stage.stored(stage.put("s", rule=RULE))).due_ms
        for _ in range(SUSPECT_LAPSES + KILLS_TO_DEATH):
            await stage.die()
        claim = await stage.claim_one()
        assert (claim.record.kills, await stage.dead()) == (KILLS_TO_DEATH, [])
        await stage.end(dead(claim, "killed_worker", 0, then=due_ms + MINUTE_MS))
        record = await stage.record("s")
        assert (record.due_ms, record.lapses, record.kills) == (due_ms + MINUTE_MS, 0, 0)
        assert [letter.reason for letter in await stage.dead()] == ["killed_worker"]


class RecurringRules(RearmingRules, OccurrenceRules, DeadOccurrenceRules, LiveListRules, SeriesEndRules, OldRetryRules):
    """The rules for a series and its occurrences."""
