"""`LiveListRules`, `SeriesEndRules` and `OldRetryRules`: rules for the retries that go on beside their series."""

# ruff: noqa: D102 - the name of a test states its rule

from __future__ import annotations

from collections.abc import Mapping

import pytest

from aiodelay.core.transitions import KILLS_TO_DEATH, SUSPECT_LAPSES, occurrence_id
from aiodelay.core.values import (
    LEASE_MS,
    After,
    At,
    Cancel,
    Claim,
    Fire,
    Late,
    RenewOutcome,
    Reschedule,
    SettleOutcome,
    State,
    Stored,
)

from .stage import HOUR_MS, Bench, Stage, again, dead, done, ending, staged

__all__ = ["MINUTE_MS", "OTHER_RULE", "RULE", "LiveListRules", "OldRetryRules", "SeriesEndRules"]

MINUTE_MS = 60_000
RULE: Mapping[str, str | int] = {"e": MINUTE_MS}
OTHER_RULE: Mapping[str, str | int] = {"e": 2 * MINUTE_MS}


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


class LiveListRules(Bench):
    """The rules for the list of live occurrences in the record of a series."""

    @pytest.mark.parametrize("end", ["done", "dead", "cancelled", "late", "cancelled in flight", "killed"])
    @staged
    async def test_recurring_live_list_shrinks_as_occurrences_end(self, stage: Stage, end: str) -> None:
        live = await _with_retries(stage, late=Late.drop("1h"))
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
    async def test_recurring_live_list_survives_reopening(self, stage: Stage) -> None:
        live = await _with_retries(stage)
        await self._end_retry(stage, occurrence_id("s", live[0]), "done")
        await stage.reopen()
        assert (await stage.record("s")).live == live[1:]

    @staged
    async def test_recurring_series_claimed_as_its_retries_end_late_lists_none(self, stage: Stage) -> None:
        live = await _with_retries(stage, late=Late.drop("1h"))
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


class SeriesEndRules(Bench):
    """The rules for the retries of a series that is cancelled or replaced."""

    @staged
    async def test_recurring_cancel_ends_the_series_and_its_waiting_retries(self, stage: Stage) -> None:
        stage.needs_verdict()
        await _with_retries(stage)
        outcome = await stage.do(Cancel(stage.op(), "s"))
        assert isinstance(outcome, Stored)
        assert outcome.answer == "cancelled"
        assert await stage.picture() == ([], [])
        stage.move(10 * HOUR_MS)
        assert await stage.claim() == []

    @staged
    async def test_recurring_cancel_in_flight_ends_the_waiting_retries_and_lists_none(self, stage: Stage) -> None:
        stage.needs_verdict()
        await _with_retries(stage)
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
        live = await _with_retries(stage)
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
            await stage.end(ending(end, claim, due_ms=stage.now + 500, then=stage.now + MINUTE_MS))
        assert await stage.messages() == []
        assert len(await stage.dead()) == (end == "dead")
        stage.move(10 * HOUR_MS)
        assert await stage.claim() == []

    @pytest.mark.parametrize("end", ["done", "again", "dead", "lapse"])
    @staged
    async def test_s4_recurring_replace_ends_retries_of_the_old_series(self, stage: Stage, end: str) -> None:
        live = await _with_retries(stage)
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


class OldRetryRules(Bench):
    """The rules for a retry in flight whose series has ended or was replaced: an older version of its id."""

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
        await _with_retries(stage)
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
        for due_ms in await _with_retries(stage):
            await stage.do(Fire(stage.op(), occurrence_id("s", due_ms)))
        claims = sorted(await stage.claim(), key=lambda claim: claim.record.due_ms)
        assert len(claims) == 2
        return tuple(claims)

    @staticmethod
    async def _end_series(stage: Stage, end: str) -> None:
        """End the series `s`, without a next occurrence."""
        await stage.do(Fire(stage.op(), "s"))
        await stage.end(ending(end, await stage.claim_one(), due_ms=stage.now))
