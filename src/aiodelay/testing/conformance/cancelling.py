"""`CancelRules` and `OldVersionRules`: rules for `Cancel`, and for replaced versions that are still in flight."""

# ruff: noqa: D102 - the name of a test states its rule

from __future__ import annotations

import pytest

from aiodelay.core.values import (
    LEASE_MS,
    After,
    Cancel,
    Refused,
    RenewOutcome,
    Reschedule,
    SettleOutcome,
    Stored,
)

from .stage import HOUR_MS, Bench, Stage, again, done, ending, staged

__all__ = ["CancelRules", "OldVersionRules"]


class CancelRules(Bench):
    """The rules for `Cancel`, for messages that wait and messages in flight."""

    @pytest.mark.parametrize("end", ["done", "again", "dead", "lapse"])
    @staged
    async def test_s5_cancelled_in_flight_ends_with_this_attempt(self, stage: Stage, end: str) -> None:
        stage.needs_verdict()
        await stage.stored(stage.put())
        claim = await stage.claim_one()
        await stage.do(Cancel(stage.op(), "m"))
        if end == "lapse":
            await stage.lapse()
        else:
            await stage.end(ending(end, claim, due_ms=stage.now))
        assert await stage.get() is None
        assert len(await stage.dead()) == (end == "dead")
        stage.move(HOUR_MS)
        assert await stage.claim() == []

    @staged
    async def test_s5_cancelled_in_flight_can_be_scheduled_anew(self, stage: Stage) -> None:
        stage.needs_verdict()
        await stage.stored(stage.put(payload=b"old"))
        old = await stage.claim_one()
        cancels = [await stage.do(Cancel(stage.op(), "m")) for _ in range(2)]
        assert [each.answer for each in cancels if isinstance(each, Stored)] == ["in_flight", "in_flight"]
        await stage.stored(stage.put(payload=b"new"))
        assert await stage.settle(again(old, stage.now)) is SettleOutcome.SUPERSEDED
        claim = await stage.claim_one()
        assert (claim.record.envelope.payload, claim.record.no_retry) == (b"new", False)

    @staged
    async def test_s5_cancelled_is_never_delivered(self, stage: Stage) -> None:
        stage.needs_verdict()
        await stage.stored(stage.put("m", After(1000)), stage.put("retry"))
        await stage.end(again(await stage.claim_one(), stage.now + 500))
        outcomes = [await stage.do(Cancel(stage.op(), each)) for each in ("m", "retry")]
        assert [each.answer for each in outcomes if isinstance(each, Stored)] == ["cancelled", "cancelled"]
        stage.move(HOUR_MS)
        assert await stage.claim() == []

    @pytest.mark.parametrize("change", ["nothing", "replaced", "rescheduled", "gone"])
    @staged
    async def test_a_cancel_that_says_what_it_means_ends_nothing_else(self, stage: Stage, change: str) -> None:
        stage.needs_verdict()
        meant = await stage.stored(stage.put("m", After(1000)))
        stage.move(1)
        if change == "replaced":
            await stage.stored(stage.put("m", After(999)))
        elif change == "rescheduled":
            await stage.do(Reschedule(stage.op(), "m", After(2000)))
        elif change == "gone":
            await stage.do(Cancel(stage.op(), "m"))
        outcome = await stage.do(Cancel(stage.op(), "m", (meant.revision, meant.due_ms)))
        stands = await stage.get()
        if change == "nothing":
            assert (stands, outcome) == (None, Stored("cancelled", meant.revision, meant.due_ms))
        else:
            assert isinstance(outcome, Refused)
            assert outcome.reason == ("not_found" if change == "gone" else "outdated")
            assert (stands is None) == (change == "gone")


class OldVersionRules(Bench):
    """The rules for a replaced version of a message that is still in flight."""

    @staged
    async def test_s5_a_cancel_tells_of_each_replaced_version_in_flight(self, stage: Stage) -> None:
        stage.needs_verdict()
        await stage.stored(stage.put())
        first = await stage.claim_one()
        await stage.stored(stage.put())
        second = await stage.claim_one()
        await stage.stored(stage.put(due=After(HOUR_MS)))
        for held in (first, second):
            assert await self._cancel(stage) == "in_flight"
            await stage.stored(stage.put(due=After(HOUR_MS)))
            assert await stage.settle(done(held)) is SettleOutcome.SUPERSEDED
        assert await self._cancel(stage) == "cancelled"
        assert await stage.get() is None

    @pytest.mark.parametrize("end", ["done", "dead", "cancelled"])
    @staged
    async def test_s5_a_replaced_version_in_flight_outlives_the_one_that_replaced_it(
        self, stage: Stage, end: str
    ) -> None:
        stage.needs_verdict()
        await stage.stored(stage.put())
        await stage.claim_one()
        await stage.stored(stage.put())
        if end == "cancelled":
            await self._cancel(stage)
        else:
            await stage.end(ending(end, await stage.claim_one(), due_ms=stage.now))
        await stage.stored(stage.put(due=After(HOUR_MS)))
        assert await self._cancel(stage) == "in_flight"

    @staged
    async def test_s5_a_replaced_version_is_in_flight_for_as_long_as_its_lease_is_renewed(self, stage: Stage) -> None:
        stage.needs_verdict()
        await stage.stored(stage.put())
        claim = await stage.claim_one()
        await stage.stored(stage.put(due=After(HOUR_MS)))
        stage.move(LEASE_MS - 1)
        renewed, outcome = await stage.renew(claim)
        assert outcome is RenewOutcome.SUPERSEDED
        renewed, outcome = await stage.renew(renewed)
        assert outcome is RenewOutcome.SUPERSEDED
        stage.move(LEASE_MS - 1)
        await stage.tidy()
        assert await self._cancel(stage) == "in_flight"
        for _ in range(2):  # the second cancel finds no version of the message
            renewed, outcome = await stage.renew(renewed)
            assert outcome is RenewOutcome.SUPERSEDED
            stage.move(LEASE_MS - 1)
        await stage.stored(stage.put(due=After(HOUR_MS)))
        assert await self._cancel(stage) == "in_flight"

    @pytest.mark.parametrize("is_tidied", [False, True])
    @staged
    async def test_s5_what_nobody_renews_of_a_replaced_version_lapses_and_counts_for_nobody(
        self,
        stage: Stage,
        is_tidied: bool,  # noqa: FBT001 - a parameter
    ) -> None:
        stage.needs_verdict()
        await stage.stored(stage.put())
        claim = await stage.claim_one()
        await stage.stored(stage.put(due=After(HOUR_MS)))
        stage.move(LEASE_MS)
        if is_tidied:
            await stage.tidy()
            assert (await stage.renew(claim))[1] is RenewOutcome.LOST
        assert (await stage.record()).lapses == 0
        assert await self._cancel(stage) == "cancelled"

    @staged
    async def test_s5_a_replaced_series_in_flight_is_told_too(self, stage: Stage) -> None:
        stage.needs_verdict()
        await stage.stored(stage.put(rule={"e": HOUR_MS}))
        claim = await stage.claim_one()
        replaced = await stage.stored(stage.put(due=After(HOUR_MS), rule={"e": HOUR_MS}))
        assert replaced.is_older_in_flight
        assert await self._cancel(stage) == "in_flight"
        assert await stage.settle(done(claim, stage.now)) is SettleOutcome.SUPERSEDED
        assert await stage.get() is None

    @staticmethod
    async def _cancel(stage: Stage) -> str:
        outcome = await stage.do(Cancel(stage.op(), "m"))
        assert isinstance(outcome, Stored)
        return outcome.answer
