"""`RecurringRules`: rules for recurring messages.

A series is one record. The step that ends the first attempt of an occurrence also schedules the next occurrence.
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
    Claim,
    Conflict,
    Fire,
    Late,
    Refused,
    RenewOutcome,
    Reschedule,
    SettleOutcome,
    State,
    Stored,
)

from .stage import HOUR_MS, Bench, Stage, again, dead, done, ending, staged

__all__ = ["RecurringRules"]

MINUTE_MS = 60_000
RULE: Mapping[str, str | int] = {"e": MINUTE_MS}
OTHER_RULE: Mapping[str, str | int] = {"e": 2 * MINUTE_MS}

End = Literal["done", "again", "dead"]


class RecurringRules(Bench):
    """The rules for a series and its occurrences."""

    # --- re-arming ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("end", ["done", "again", "dead"])
    @staged
    async def test_recurring_first_attempt_rearms_the_series_whatever_its_outcome(self, stage: Stage, end: End) -> None:
        put = stage.put("s", rule=RULE)
        first = await stage.stored(put)
        await self._settle(stage, await stage.claim_one(), end, then=first.due_ms + MINUTE_MS)
        record = await stage.record("s")
        assert (record.due_ms, record.attempt, record.revision) == (first.due_ms + MINUTE_MS, 0, first.revision)
        assert (record.envelope, record.first_error, record.last_error) == (put.envelope, None, None)
        assert record.live == ((first.due_ms,) if end == "again" else ())
        stage.move(MINUTE_MS)
        assert "s" in await stage.ids()

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
        await self._settle(stage, await stage.claim_one(), end, then=None)
        assert await stage.get("s") is None
        stage.move(HOUR_MS)
        assert await stage.claim() == []

    @staged
    async def test_recurring_retry_has_its_attempt_s_trace_and_the_series_what_it_had(self, stage: Stage) -> None:
        given, attempted = ({"traceparent": f"00-{n * 32}-{n * 16}-01"} for n in "12")
        due_ms = (await stage.stored(stage.put("s", rule=RULE, trace=given))).due_ms
        retry = again(await stage.claim_one(), stage.now, 1, then=due_ms + MINUTE_MS)
        await stage.end(replace(retry, trace=attempted))
        assert (await stage.claim_one()).record.envelope.trace == attempted
        assert (await stage.record("s")).envelope.trace == given

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

    # --- the list of live occurrences ---------------------------------------------------------------------

    @pytest.mark.parametrize("end", ["done", "dead", "cancelled", "late", "cancelled in flight", "killed"])
    @staged
    async def test_recurring_live_list_shrinks_as_occurrences_end(self, stage: Stage, end: str) -> None:
        live = await self._with_retries(stage, late=Late.drop("1h"))
        assert (await stage.record("s")).live == live
        ending = occurrence_id("s", live[0])
        if end == "late":
            stage.move(HOUR_MS + 1 - 2 * MINUTE_MS)  # the first retry is late, the second not yet
            await stage.tidy()
        elif end == "cancelled":
            stage.needs_verdict()
            await stage.do(Cancel(stage.op(), ending))
        else:
            await self._end_retry(stage, ending, end)
        assert await stage.get(ending) is None
        assert (await stage.record("s")).live == live[1:]

    @staged
    async def test_recurring_series_claimed_as_its_retries_end_late_lists_none(self, stage: Stage) -> None:
        live = await self._with_retries(stage, late=Late.drop("1h"))
        await stage.do(Reschedule(stage.op(), "s", At(live[0] + HOUR_MS // 2 + 1)))  # between the two retries
        await stage.stored(stage.put("before them"))
        stage.move(HOUR_MS + MINUTE_MS)
        claims = await stage.claim()
        assert [(each.record.id, each.record.live) for each in claims] == [("before them", ()), ("s", ())]
        assert (await stage.record("s")).live == ()

    @pytest.mark.parametrize("how", ["a retry that lapses with it", "all, while it runs"])
    @staged
    async def test_recurring_series_in_flight_lists_no_retry_that_was_cancelled(self, stage: Stage, how: str) -> None:
        stage.needs_verdict()
        await stage.stored(stage.put("s", rule=RULE))
        claim = await stage.claim_one()
        await stage.end(again(claim, stage.now, then=claim.record.due_ms + MINUTE_MS))
        stage.move(1_000)
        await stage.do(Fire(stage.op(), "s"))
        retry = occurrence_id("s", claim.record.due_ms)
        claims = {each.record.id: each for each in await stage.claim()}
        assert claims.keys() == {"s", retry}
        if how == "all, while it runs":
            await stage.end(again(claims[retry], stage.now))
            await stage.do(Cancel(stage.op(), "s"))
        else:
            await stage.do(Cancel(stage.op(), retry))
            await stage.lapse()
        assert await stage.get(retry) is None
        assert (await stage.record("s")).live == ()

    @staticmethod
    async def _end_retry(stage: Stage, message_id: str, end: str) -> None:
        await stage.do(Fire(stage.op(), message_id))
        claim = await stage.claim_one()
        if end == "done":
            await stage.end(done(claim))
        elif end == "dead":
            await stage.end(dead(claim))
        elif end == "cancelled in flight":
            stage.needs_verdict()
            await stage.do(Cancel(stage.op(), message_id))
            await stage.lapse()
        else:
            await stage.lapse()
            for _ in range(SUSPECT_LAPSES + KILLS_TO_DEATH - 1):
                await stage.die()

    @staticmethod
    async def _with_retries(stage: Stage, late: Late = Late.deliver()) -> tuple[int, ...]:  # noqa: B008 - frozen
        """Make a series `s`, due in an hour, with two occurrences that wait for a retry. Return their due times."""
        live: tuple[int, ...] = ()
        await stage.stored(stage.put("s", rule=RULE, late=late))
        for _ in range(2):
            claim = await stage.claim_one()
            live = (*live, claim.record.due_ms)
            await stage.end(again(claim, stage.now + HOUR_MS // 2, then=claim.record.due_ms + MINUTE_MS))
            stage.move(MINUTE_MS)
        await stage.do(Reschedule(stage.op(), "s", After(5 * HOUR_MS)))
        return live

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

    # --- cancel and replace -------------------------------------------------------------------------------

    @staged
    async def test_recurring_cancel_ends_the_series_and_its_waiting_retries(self, stage: Stage) -> None:
        stage.needs_verdict()
        await self._with_retries(stage)
        outcome = await stage.do(Cancel(stage.op(), "s"))
        assert isinstance(outcome, Stored)
        assert outcome.answer == "cancelled"
        assert await stage.picture() == ([], [])
        stage.move(10 * HOUR_MS)
        assert await stage.claim() == []

    @staged
    async def test_recurring_cancel_in_flight_ends_the_waiting_retries_and_lists_none(self, stage: Stage) -> None:
        stage.needs_verdict()
        await self._with_retries(stage)
        await stage.do(Fire(stage.op(), "s"))
        await stage.claim_one()
        outcome = await stage.do(Cancel(stage.op(), "s"))
        assert isinstance(outcome, Stored)
        assert outcome.answer == "in_flight"
        (snapshot,) = await stage.messages()
        assert (snapshot.record.id, snapshot.record.no_retry, snapshot.record.live) == ("s", True, ())

    @pytest.mark.parametrize("end", ["done", "again", "dead", "lapse"])
    @staged
    async def test_recurring_cancel_lets_a_retry_in_flight_run_for_the_last_time(self, stage: Stage, end: str) -> None:
        stage.needs_verdict()
        live = await self._with_retries(stage)
        await stage.do(Fire(stage.op(), occurrence_id("s", live[0])))
        claim = await stage.claim_one()
        outcome = await stage.do(Cancel(stage.op(), "s"))
        assert isinstance(outcome, Stored)
        assert outcome.answer == "in_flight"
        claim, renewed = await stage.renew(claim)
        assert renewed is RenewOutcome.CANCELLED
        await self._end_cancelled(stage, claim, end)

    @pytest.mark.parametrize("end", ["done", "again", "dead", "lapse"])
    @staged
    async def test_recurring_cancelled_in_flight_does_not_recur(self, stage: Stage, end: str) -> None:
        stage.needs_verdict()
        await stage.stored(stage.put("s", rule=RULE))
        claim = await stage.claim_one()
        await stage.do(Cancel(stage.op(), "s"))
        await self._end_cancelled(stage, claim, end)

    async def _end_cancelled(self, stage: Stage, claim: Claim, end: str) -> None:
        """End the only message in flight, which was cancelled, and check that no message is left."""
        (snapshot,) = await stage.messages()
        assert (snapshot.state, snapshot.record.no_retry) == (State.IN_FLIGHT, True)
        if end == "lapse":
            await stage.lapse()
        else:
            await self._settle(stage, claim, end, then=stage.now + MINUTE_MS)
        assert await stage.messages() == []
        assert len(await stage.dead()) == (end == "dead")
        stage.move(10 * HOUR_MS)
        assert await stage.claim() == []

    @pytest.mark.parametrize("end", ["done", "again", "dead", "lapse"])
    @staged
    async def test_s4_recurring_replace_ends_retries_of_the_old_series(self, stage: Stage, end: str) -> None:
        live = await self._with_retries(stage)
        await stage.do(Fire(stage.op(), occurrence_id("s", live[0])))
        in_flight = await stage.claim_one()
        await stage.stored(stage.put("s", After(HOUR_MS), rule=OTHER_RULE))
        if end == "lapse":
            await stage.lapse()
        else:
            assert await stage.settle(ending(end, in_flight, due_ms=stage.now)) is SettleOutcome.SUPERSEDED
        (snapshot,) = await stage.messages()
        assert (snapshot.record.id, snapshot.record.envelope.rule, snapshot.record.live) == ("s", OTHER_RULE, ())
        assert (snapshot.record.lapses, await stage.dead()) == (0, [])

    # --- a retry in flight is an older version of its series' id ------------------------------------------

    @pytest.mark.parametrize("rule", [OTHER_RULE, None], ids=["by a series", "by a message"])
    @staged
    async def test_s5_recurring_retry_in_flight_of_a_replaced_series_is_told_until_it_ends(
        self, stage: Stage, rule: Mapping[str, str | int] | None
    ) -> None:
        stage.needs_verdict()
        retries = await self._with_retries_in_flight(stage)
        assert (await stage.stored(stage.put("s", After(HOUR_MS), rule=rule))).is_older_in_flight
        for retry in retries:
            assert await self._cancel_series(stage) == "in_flight"
            await stage.stored(stage.put("s", After(HOUR_MS), rule=rule))
            assert await stage.settle(done(retry)) is SettleOutcome.SUPERSEDED
        assert not (await stage.stored(stage.put("s", After(HOUR_MS), rule=rule))).is_older_in_flight
        assert await self._cancel_series(stage) == "cancelled"
        assert await stage.picture() == ([], [])

    @staged
    async def test_s5_recurring_redriven_occurrence_of_an_ended_series_ends_with_a_later_message_of_its_id(
        self, stage: Stage
    ) -> None:
        stage.needs_verdict()
        await stage.stored(stage.put("s", rule=RULE))
        await stage.end(dead(await stage.claim_one()))
        (letter,) = await stage.dead()
        await stage.store.redrive([letter.key])
        await stage.stored(stage.put("s", After(HOUR_MS)))
        assert await self._cancel_series(stage) == "cancelled"
        assert await stage.picture() == ([], [])

    @pytest.mark.parametrize("end", ["done", "dead", "cancelled", "replaced"])
    @staged
    async def test_s5_recurring_retry_in_flight_outlives_what_has_replaced_its_series(
        self, stage: Stage, end: str
    ) -> None:
        stage.needs_verdict()
        await self._with_retries_in_flight(stage)
        await stage.stored(stage.put("s"))
        if end == "cancelled":
            assert await self._cancel_series(stage) == "in_flight"
        elif end != "replaced":
            await stage.end(ending(end, await stage.claim_one(), due_ms=stage.now))
        await stage.stored(stage.put("s", After(HOUR_MS)))
        assert await self._cancel_series(stage) == "in_flight"

    @staged
    async def test_s5_recurring_retry_in_flight_of_a_replaced_series_is_renewed_and_lapses_for_nobody(
        self, stage: Stage
    ) -> None:
        stage.needs_verdict()
        retry, _ = await self._with_retries_in_flight(stage)
        await stage.stored(stage.put("s", After(HOUR_MS), rule=RULE))
        stage.move(LEASE_MS - 1)
        assert (await stage.renew(retry))[1] is RenewOutcome.SUPERSEDED
        stage.move(LEASE_MS - 1)
        await stage.tidy()
        assert await self._cancel_series(stage) == "in_flight"
        await stage.stored(stage.put("s", After(HOUR_MS), rule=RULE))
        await stage.lapse()
        assert (await stage.record("s")).lapses == 0
        assert await self._cancel_series(stage) == "cancelled"

    @pytest.mark.parametrize("end", ["cancelled", "done", "dead"])
    @staged
    async def test_s5_recurring_retry_is_told_also_when_its_series_had_ended_before_its_id_came_again(
        self, stage: Stage, end: str
    ) -> None:
        """The series ends while a retry runs: by a cancel, or because it has no next occurrence."""
        stage.needs_verdict()
        retry, _ = await self._with_retries_in_flight(stage)
        if end == "cancelled":
            assert await self._cancel_series(stage) == "in_flight"
        else:
            await self._end_series(stage, end)
        await stage.stored(stage.put("s", After(HOUR_MS)))
        assert await self._cancel_series(stage) == "in_flight"
        await stage.end(again(retry, stage.now))
        assert await stage.get(retry.record.id) is None
        await stage.stored(stage.put("s", After(HOUR_MS)))
        assert (await stage.stored(stage.put("s", After(HOUR_MS)))).is_older_in_flight
        await stage.lapse()
        assert await self._cancel_series(stage) == "cancelled"
        stage.move(10 * HOUR_MS)
        assert await stage.claim() == []

    @pytest.mark.parametrize("how", ["cancelled", "replaced"])
    @staged
    async def test_s5_recurring_waiting_retry_of_a_series_that_has_ended_ends_with_its_id(
        self, stage: Stage, how: str
    ) -> None:
        stage.needs_verdict()
        await self._with_retries(stage)
        await self._end_series(stage, "done")
        await stage.stored(stage.put("s", After(HOUR_MS)))
        assert len(await stage.messages()) == 3
        if how == "cancelled":
            assert await self._cancel_series(stage) == "cancelled"
        else:
            assert not (await stage.stored(stage.put("s", After(HOUR_MS)))).is_older_in_flight
        assert [each.record.id for each in await stage.messages()] == ["s"] * (how == "replaced")

    @pytest.mark.parametrize("before", ["replaced", "cancelled"])
    @staged
    async def test_s4_recurring_retry_of_the_same_time_fences_the_one_before(self, stage: Stage, before: str) -> None:
        if before == "cancelled":
            stage.needs_verdict()
        old, _ = await self._with_retries_in_flight(stage)
        due_ms = old.record.due_ms
        if before == "cancelled":
            await self._cancel_series(stage)
        await stage.stored(stage.put("s", At(due_ms), rule=RULE))
        await stage.end(again(await stage.claim_one(), stage.now, then=stage.now + HOUR_MS))
        new = await stage.claim_one()
        assert (new.record.id, new.record.revision > old.record.revision) == (old.record.id, True)
        assert await stage.settle(done(old)) is SettleOutcome.SUPERSEDED
        assert (await stage.record(new.record.id)).revision == new.record.revision
        await stage.end(done(new))

    @staticmethod
    async def _cancel_series(stage: Stage) -> str:
        outcome = await stage.do(Cancel(stage.op(), "s"))
        assert isinstance(outcome, Stored)
        return outcome.answer

    async def _with_retries_in_flight(self, stage: Stage) -> tuple[Claim, ...]:
        """Make a series `s`, due in an hour or more, and claim the retries of two of its occurrences."""
        for due_ms in await self._with_retries(stage):
            await stage.do(Fire(stage.op(), occurrence_id("s", due_ms)))
        claims = sorted(await stage.claim(), key=lambda claim: claim.record.due_ms)
        assert len(claims) == 2
        return tuple(claims)

    @staticmethod
    async def _end_series(stage: Stage, end: str) -> None:
        """End the series `s`, without a next occurrence."""
        await stage.do(Fire(stage.op(), "s"))
        await stage.end(ending(end, await stage.claim_one(), due_ms=stage.now))

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

    # --- poison -------------------------------------------------------------------------------------------

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

    @staticmethod
    async def _settle(stage: Stage, claim: Claim, end: str, *, then: int | None) -> None:
        await stage.end(ending(end, claim, due_ms=stage.now + 500, then=then))
