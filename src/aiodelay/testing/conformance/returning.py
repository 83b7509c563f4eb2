"""`ReturningRules`: rules for `put_back`.

A message may leave the store for a sink. The source that reads this sink may then put the message back into the store,
as a retry or as a dead letter.
"""

# ruff: noqa: D102 - the name of a test states its rule

from __future__ import annotations

import pytest
from msgspec.structs import replace

from aiodelay.core.transitions import delivery_id, occurrence_id
from aiodelay.core.values import RETRY_WINDOW_MS, Cancel, Conflict, Late, Put, PutBack, Record, State, Stored

from .stage import HOUR_MS, LANE, Bench, Stage, done, ending, staged

__all__ = ["ReturningRules"]


class ReturningRules(Bench):
    """The rules for `Store.put_back`."""

    @staged
    async def test_s8_what_is_put_back_is_tried_again_as_it_was(self, stage: Stage) -> None:
        record = await self._left(stage)
        failed = replace(record, attempt=2, first_error="first", earlier_errors=("é", "then"), last_error="last")
        assert await _put_back(stage, PutBack(failed, stage.now + 1000)) == ["stored"]
        assert (await stage.record()).revision == record.revision
        stage.move(999)
        assert await stage.claim() == []
        stage.move(1)
        claim = await stage.claim_one()
        assert claim.record == failed
        assert delivery_id(claim.record) == delivery_id(record)
        await stage.end(done(claim))
        assert await stage.messages() == []

    @staged
    async def test_s1_what_is_put_back_is_not_early(self, stage: Stage) -> None:
        record = replace(await self._left(stage), due_ms=stage.now + HOUR_MS)
        await _put_back(stage, PutBack(record, stage.now))
        stage.move(HOUR_MS - 1)
        assert await stage.claim() == []
        stage.move(1)
        await stage.claim_one()

    @pytest.mark.parametrize("there", ["pending", "in flight", "put back"])
    @staged
    async def test_s4_what_is_put_back_takes_nobodys_place(self, stage: Stage, there: str) -> None:
        record = await self._left(stage)
        if there == "put back":
            assert await _put_back(stage, PutBack(record, stage.now)) == ["stored"]
        else:
            await stage.stored(stage.put("m", payload=b"newer"))
        claim = await stage.claim_one() if there == "in flight" else None
        before = await stage.picture()
        assert await _put_back(stage, PutBack(record, stage.now)) == ["kept"]
        assert await stage.picture() == before
        if claim is not None:
            await stage.end(done(claim))

    @pytest.mark.parametrize("end", ["done", "dead", "cancelled"])
    @staged
    async def test_s4_what_is_put_back_does_not_run_after_a_newer_version_that_has_ended(
        self, stage: Stage, end: str
    ) -> None:
        record = await self._left(stage)
        stage.move(1)
        await self._newer_ends(stage, stage.put("m", payload=b"newer"), end)
        stage.move(RETRY_WINDOW_MS - 1)
        assert await _put_back(stage, PutBack(record, stage.now)) == ["kept"]
        assert await stage.messages() == []

    @pytest.mark.parametrize("end", ["done", "dead", "cancelled"])
    @staged
    async def test_s4_what_is_put_back_does_not_run_after_a_newer_version_of_its_caller_that_has_ended(
        self, stage: Stage, end: str
    ) -> None:
        first, second = Conflict.newer(1 << 60), Conflict.newer((1 << 60) + 1)
        await stage.stored(stage.put("m", conflict=first))
        old = await stage.claim_one()
        await stage.end(done(old))
        assert await _put_back(stage, PutBack(old.record, stage.now)) == ["stored"]
        await stage.end(done(await stage.claim_one()))
        await self._newer_ends(stage, stage.put("m", conflict=second), end)
        stage.move(RETRY_WINDOW_MS + 1)
        assert await _put_back(stage, PutBack(old.record, stage.now)) == ["kept"]
        assert await stage.messages() == []

    async def _newer_ends(self, stage: Stage, put: Put, end: str) -> None:
        await stage.stored(put)
        if end == "cancelled":
            assert isinstance(await stage.do(Cancel(stage.op(), put.id)), Stored)
        else:
            await stage.end(ending(end, await stage.claim_one(), due_ms=stage.now))

    @staged
    async def test_s6_a_dead_letter_is_put_back_once(self, stage: Stage) -> None:
        record = replace(await self._left(stage), attempt=3, last_error="no answer", traceback="Traceback\n  é")
        message = PutBack(record, stage.now, "attempts_exhausted")
        assert await _put_back(stage, message, message) == ["stored", "kept"]
        (letter,) = await stage.dead()
        assert (letter.record, letter.reason, letter.at_ms) == (record, "attempts_exhausted", stage.now)
        assert await stage.claim() == []
        (outcome,) = await stage.store.redrive([letter.key])
        assert isinstance(outcome, Stored)
        assert (await stage.claim_one()).record.envelope == record.envelope

    @staged
    async def test_l2_what_is_put_back_ends_a_wait(self, stage: Stage) -> None:
        record = await self._left(stage)
        await stage.wakes(lambda: _put_back(stage, PutBack(record, stage.now)))

    @staged
    async def test_what_is_put_back_keeps_its_policy(self, stage: Stage) -> None:
        record = await self._left(stage, Late.dead_letter("1m"))
        await _put_back(stage, PutBack(record, stage.now + HOUR_MS))
        stage.move(HOUR_MS)
        assert (await stage.tidy()).expired == 1
        assert [letter.reason for letter in await stage.dead()] == ["late"]

    @staged
    async def test_an_occurrence_is_put_back_beside_its_series(self, stage: Stage) -> None:
        await self._occurrence_put_back(stage)
        await stage.end(done(await stage.claim_one()))
        assert [each.record.id for each in await stage.messages()] == ["s"]

    @pytest.mark.parametrize(("how", "left"), [("cancelled", []), ("replaced", ["s"])])
    @staged
    async def test_s5_an_occurrence_that_was_put_back_ends_with_its_series(
        self, stage: Stage, how: str, left: list[str]
    ) -> None:
        stage.needs_verdict()
        await self._occurrence_put_back(stage)
        outcome = await stage.do(Cancel(stage.op(), "s") if how == "cancelled" else stage.put("s"))
        assert isinstance(outcome, Stored)
        assert outcome.answer == how
        assert [each.record.id for each in await stage.messages()] == left

    async def _occurrence_put_back(self, stage: Stage) -> None:
        """Make a series `s`, and put back its first occurrence, which has left the store."""
        await stage.stored(stage.put("s", rule={"e": 60_000}))
        claim = await stage.claim_one()
        await stage.end(done(claim, then=stage.now + 60_000))
        name = occurrence_id("s", claim.record.due_ms)
        envelope = replace(claim.record.envelope, id=name, rule=None)
        await _put_back(stage, PutBack(replace(claim.record, envelope=envelope), stage.now))

    @staged
    async def test_what_is_put_back_is_held_like_any_other(self, stage: Stage) -> None:
        record = await self._left(stage)
        await stage.store.pause(LANE)
        await _put_back(stage, PutBack(record, stage.now))
        assert await stage.claim() == []
        assert [each.state for each in await stage.messages()] == [State.HELD]

    @staged
    async def test_s2_what_was_put_back_survives_reopening(self, stage: Stage) -> None:
        record = await self._left(stage)
        other = replace(record, envelope=replace(record.envelope, id="other"))
        await _put_back(stage, PutBack(record, stage.now), PutBack(other, stage.now, "rejected"))
        before = await stage.picture()
        await stage.reopen()
        assert await stage.picture() == before

    @staged
    async def test_journal_says_what_was_put_back(self, stage: Stage) -> None:
        with_journal = await stage.with_journal(10)
        record = await self._left(with_journal)
        failed = replace(record, attempt=1, first_error="e", last_error="e")
        await _put_back(with_journal, PutBack(failed, with_journal.now), PutBack(failed, 0, "rejected"))
        events = [(entry.event, entry.detail) for entry in await with_journal.store.journal()]
        assert events[-2:] == [("again", "e"), ("dead", "rejected")]

    async def _left(self, stage: Stage, late: Late = Late.deliver()) -> Record:  # noqa: B008 - frozen
        """Return the record of a message that has left the store: it is settled in the store and lives in a sink."""
        await stage.stored(stage.put("m", late=late, headers={"a": b"\xff"}, encoding="json", payload=b"{}"))
        claim = await stage.claim_one()
        await stage.end(done(claim))
        return claim.record


async def _put_back(stage: Stage, *messages: PutBack) -> list[str]:
    return [stored.answer for stored in await stage.store.put_back(messages)]
