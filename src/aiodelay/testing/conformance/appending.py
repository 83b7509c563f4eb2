"""`AppendRules`: rules for messages that gather items (`Conflict.append`)."""

# ruff: noqa: D102 - the name of a test states its rule

from __future__ import annotations

import random
from collections import Counter

import pytest

from aiodelay.core.transitions import delivery_id
from aiodelay.core.values import (
    LEASE_MS,
    After,
    At,
    Cancel,
    Claim,
    Conflict,
    Late,
    Put,
    Refused,
    RenewOutcome,
    SettleOutcome,
    Stored,
)
from aiodelay.ports import Upgradable

from .stage import HOUR_MS, LANE, OTHER, Bench, Stage, again, dead, done, staged

__all__ = ["AppendRules"]

APPEND, PAIRS = Conflict.append(), Conflict.append(2)
AT_MOST_7 = Conflict("append", max_bytes=7)


class AppendRules(Bench):
    """The rules for a message to which items are appended while it waits and while it is in flight."""

    # --- while the message waits --------------------------------------------------------------------------

    @staged
    async def test_items_join_a_message_that_waits(self, stage: Stage) -> None:
        stage.needs_conflict("append")
        first = await stage.stored(stage.put(due=At(stage.now + HOUR_MS), conflict=APPEND, payload=b"1"))
        assert first.answer == "stored"
        stage.move(10)
        second = await stage.stored(stage.put(due=At(stage.now), conflict=APPEND, payload=b"2"))
        assert (second.answer, second.due_ms, second.is_older_in_flight) == ("replaced", first.due_ms, False)
        assert second.revision > first.revision
        assert await stage.claim() == []
        stage.move(HOUR_MS)
        claim = await stage.claim_one()
        assert claim.record.envelope.payload == b"1\n2"
        await stage.end(done(claim))
        assert await stage.get() is None

    @staged
    async def test_a_full_message_is_due_at_once_and_takes_more_items(self, stage: Stage) -> None:
        stage.needs_conflict("append")
        late = Late.drop("5s")
        await stage.stored(stage.put(due=At(stage.now + HOUR_MS), conflict=PAIRS, payload=b"1", late=late))
        second = await stage.stored(stage.put(due=At(stage.now + HOUR_MS), conflict=PAIRS, payload=b"2"))
        third = await stage.stored(stage.put(due=At(stage.now + HOUR_MS), conflict=PAIRS, payload=b"3"))
        assert second.due_ms == third.due_ms == stage.now
        record = (await stage.claim_one()).record
        assert (record.envelope.payload, record.expires_ms) == (b"1\n2\n3", stage.now + 5000)

    @pytest.mark.parametrize("conflict", [APPEND, PAIRS], ids=["append", "full"])
    @staged
    async def test_a_retry_keeps_its_delay_and_its_attempts(self, stage: Stage, conflict: Conflict) -> None:
        stage.needs_conflict("append")
        await stage.stored(stage.put(conflict=APPEND, payload=b"1"))
        await stage.end(again(await stage.claim_one(), stage.now + 1000, error="failed"))
        stage.move(500)
        await stage.stored(stage.put(conflict=conflict, payload=b"2"))
        assert await stage.claim() == []
        stage.move(500)
        record = (await stage.claim_one()).record
        assert (record.envelope.payload, record.attempt, record.last_error) == (b"1\n2", 1, "failed")

    # --- while the message is in flight -------------------------------------------------------------------

    @staged
    async def test_items_in_flight_wait_for_the_next_delivery(self, stage: Stage) -> None:
        stage.needs_conflict("append")
        claim = await self._in_flight(stage)
        outcome = await stage.stored(stage.put(due=At(stage.now + 2000), conflict=APPEND, payload=b"2"))
        assert (outcome.answer, outcome.due_ms, outcome.is_older_in_flight) == ("replaced", stage.now + 2000, True)
        sooner = await stage.stored(stage.put(due=At(stage.now + 1000), conflict=APPEND, payload=b"3"))
        later = await stage.stored(stage.put(due=At(stage.now + HOUR_MS), conflict=APPEND, payload=b"4"))
        assert sooner.due_ms == later.due_ms == stage.now + 1000
        claim, renewed = await stage.renew(claim)
        assert renewed is RenewOutcome.RENEWED
        await stage.end(done(claim))
        assert await stage.claim() == []
        stage.move(1000)
        following = await stage.claim_one()
        record = following.record
        assert (record.envelope.payload, record.attempt, record.lapses) == (b"2\n3\n4", 0, 0)
        assert delivery_id(record) != delivery_id(claim.record)
        await stage.end(done(following))
        assert await stage.get() is None

    @staged
    async def test_a_full_next_message_is_due_at_once(self, stage: Stage) -> None:
        stage.needs_conflict("append")
        claim = await self._in_flight(stage)
        for payload in (b"2", b"3"):
            await stage.stored(stage.put(due=At(stage.now + HOUR_MS), conflict=PAIRS, payload=payload))
        await stage.end(done(claim))
        assert (await stage.claim_one()).record.envelope.payload == b"2\n3"

    @pytest.mark.parametrize("end", ["again", "release", "lapse"])
    @staged
    async def test_a_message_that_is_tried_again_takes_its_items(self, stage: Stage, end: str) -> None:
        stage.needs_conflict("append")
        claim = await self._in_flight(stage)
        await stage.stored(stage.put(due=At(stage.now + HOUR_MS), conflict=APPEND, payload=b"2"))
        if end == "lapse":
            await stage.lapse()
        elif end == "again":
            await stage.end(again(claim, stage.now + 1000, error="failed"))
        else:
            await stage.end(again(claim, stage.now, attempt=0))
        stage.move(1000)
        record = (await stage.claim_one()).record
        assert record.envelope.payload == b"1\n2"
        assert (record.attempt, record.lapses) == (int(end == "again"), int(end == "lapse"))
        assert delivery_id(record) != delivery_id(claim.record)
        assert await stage.settle(done(claim)) is SettleOutcome.SUPERSEDED

    @staged
    async def test_a_dead_letter_has_only_the_items_of_its_run(self, stage: Stage) -> None:
        stage.needs_conflict("append")
        claim = await self._in_flight(stage)
        await stage.stored(stage.put(conflict=APPEND, payload=b"2"))
        await stage.end(dead(claim, error="failed"))
        (letter,) = await stage.dead()
        assert (letter.record.envelope.payload, letter.record.appended) == (b"1", None)
        record = (await stage.claim_one()).record
        assert (record.envelope.payload, record.attempt, record.first_error) == (b"2", 0, None)

    @pytest.mark.parametrize("end", ["done", "again", "lapse"])
    @staged
    async def test_a_cancel_in_flight_ends_the_items_before_it(self, stage: Stage, end: str) -> None:
        stage.needs_conflict("append")
        stage.needs_verdict()
        claim = await self._in_flight(stage)
        await stage.stored(stage.put(conflict=APPEND, payload=b"2"))
        await stage.do(Cancel(stage.op(), "m"))
        await stage.stored(stage.put(conflict=APPEND, payload=b"3"))
        if end == "lapse":
            await stage.lapse()
        else:
            await stage.end(done(claim) if end == "done" else again(claim, stage.now))
        record = (await stage.claim_one()).record
        assert (record.envelope.payload, record.no_retry) == (b"3", False)

    @staged
    async def test_a_cancel_of_a_revision_does_not_end_items_that_came_in_flight(self, stage: Stage) -> None:
        stage.needs_conflict("append")
        stage.needs_verdict()
        claim = await self._in_flight(stage)
        await stage.stored(stage.put(conflict=APPEND, payload=b"2"))
        outcome = await stage.do(Cancel(stage.op(), "m", (claim.record.revision, claim.record.due_ms)))
        assert isinstance(outcome, Refused)
        assert outcome.reason == "outdated"
        await stage.end(done(claim))
        assert (await stage.claim_one()).record.envelope.payload == b"2"

    @staged
    async def test_a_replacement_in_flight_replaces_the_items_too(self, stage: Stage) -> None:
        stage.needs_conflict("append")
        claim = await self._in_flight(stage)
        await stage.stored(stage.put(conflict=APPEND, payload=b"2"))
        await stage.stored(stage.put(payload=b"new"))
        assert await stage.settle(done(claim)) is SettleOutcome.SUPERSEDED
        following = await stage.claim_one()
        assert following.record.envelope.payload == b"new"
        await stage.end(done(following))
        assert await stage.get() is None

    @staged
    async def test_settlements_in_one_call_keep_the_items_of_their_messages(self, stage: Stage) -> None:
        stage.needs_conflict("append")
        names = [f"m{n}" for n in range(6)]
        await stage.stored(*(stage.put(name, conflict=APPEND, payload=b"1") for name in names))
        claims = await stage.claim()
        await stage.stored(*(stage.put(name, conflict=APPEND, payload=b"2") for name in names[::2]))
        assert set(await stage.work.settle([done(claim) for claim in claims])) == {SettleOutcome.SETTLED}
        left = {claim.record.id: claim.record.envelope.payload for claim in await stage.claim()}
        assert left == dict.fromkeys(names[::2], b"2")

    # --- refusals and repetitions -------------------------------------------------------------------------

    @pytest.mark.parametrize("is_in_flight", [False, True], ids=["waits", "in flight"])
    @pytest.mark.parametrize("kind", ["lane", "address", "type", "encoding", "series", "too large"])
    @staged
    async def test_an_item_that_does_not_fit_changes_nothing(
        self, stage: Stage, kind: str, *, is_in_flight: bool
    ) -> None:
        stage.needs_conflict("append")
        put = stage.put(conflict=APPEND, payload=b"12345", rule={"e": HOUR_MS} if kind == "series" else None)
        await stage.stored(put)
        if is_in_flight:
            await stage.claim_one()
        before = await stage.record()
        given: dict[str, Put] = {
            "lane": stage.put(conflict=APPEND, lane=OTHER, payload=b"6"),
            "address": stage.put(conflict=APPEND, address="there", payload=b"6"),
            "type": stage.put(conflict=APPEND, type_="other", payload=b"6"),
            "encoding": stage.put(conflict=APPEND, encoding="json", payload=b"6"),
            "series": stage.put(conflict=APPEND, payload=b"6"),
            "too large": stage.put(conflict=AT_MOST_7, payload=b"67"),
        }
        outcome = await stage.do(given[kind])
        assert isinstance(outcome, Refused)
        assert outcome.reason == ("too_large" if kind == "too large" else "duplicate")
        assert await stage.record() == before
        if kind == "too large":
            await stage.stored(stage.put(conflict=AT_MOST_7, payload=b"6"))

    @pytest.mark.parametrize("is_in_flight", [False, True], ids=["waits", "in flight"])
    @staged
    async def test_a_repeated_append_adds_its_item_once(self, stage: Stage, *, is_in_flight: bool) -> None:
        stage.needs_conflict("append")
        first = stage.put(conflict=APPEND, payload=b"1")
        told = [await stage.do(first)]
        claim = await stage.claim_one() if is_in_flight else None
        puts = [stage.put(conflict=APPEND, payload=b"%d" % n) for n in (2, 3)]
        told += [await stage.do(put) for put in puts]
        assert [await stage.do(put) for put in (first, *puts)] == told
        if claim is not None:
            await stage.end(done(claim))
        assert [await stage.do(put) for put in (first, *puts)] == told
        record = (await stage.claim_one()).record
        assert record.envelope.payload == (b"2\n3" if is_in_flight else b"1\n2\n3")

    @staged
    async def test_v1_the_first_append_switches_the_feature_on(self, stage: Stage) -> None:
        stage.needs_conflict("append")
        if not isinstance(stage.store, Upgradable):
            pytest.skip(f"{stage.store.name} has no features")
        assert "append" not in await stage.store.features()
        await stage.stored(stage.put(conflict=APPEND))
        assert "append" in await stage.store.features()

    # --- no item is lost, and none is doubled without a failure -------------------------------------------

    @pytest.mark.parametrize("fails", [False, True], ids=["no run fails", "runs fail and lapse"])
    @staged
    async def test_every_item_is_delivered(self, stage: Stage, *, fails: bool) -> None:
        """Append to 3 ids while their messages wait, run, fail and lapse, in an order that the seed decides."""
        stage.needs_conflict("append")
        dice = random.Random(25)
        delivered: Counter[bytes] = Counter()
        claims: list[Claim] = []
        items = [b"%d" % n for n in range(300)]
        for item in items:
            conflict = dice.choice([APPEND, PAIRS])
            message_id = dice.choice("abc")
            put = stage.put(message_id, After(dice.choice([0, 50])), conflict=conflict, payload=item)
            assert isinstance(await stage.do(put), Stored)
            if dice.random() < 0.1:
                assert isinstance(await stage.do(put), Stored)
            stage.move(dice.choice([0, 1, 60]))
            claims += await stage.claim()
            dice.shuffle(claims)
            while claims and dice.random() < 0.5:
                await self._end(stage, claims.pop(), delivered, dice.choice("dddalx") if fails else "d")
        for claim in claims:
            await self._end(stage, claim, delivered, "d")
        await self._drain(stage, delivered)
        assert set(delivered) == set(items)
        if not fails:
            assert max(delivered.values()) == 1

    @staticmethod
    async def _end(stage: Stage, claim: Claim, delivered: Counter[bytes], how: str) -> None:
        if how == "a":
            await stage.settle(again(claim, stage.now + 20, claim.record.attempt + 1, "failed"))
        elif how == "l":
            await stage.lapse()
        elif await stage.settle(done(claim) if how == "d" else dead(claim)) is SettleOutcome.SETTLED:
            delivered.update(claim.record.envelope.payload.split(b"\n"))

    @staticmethod
    async def _drain(stage: Stage, delivered: Counter[bytes]) -> None:
        for _ in range(40):
            stage.move(LEASE_MS + 1000)
            await stage.tidy()
            for claim in await stage.claim():
                await stage.end(done(claim))
                delivered.update(claim.record.envelope.payload.split(b"\n"))
        assert await stage.messages() == []

    @staticmethod
    async def _in_flight(stage: Stage) -> Claim:
        await stage.stored(stage.put(conflict=APPEND, payload=b"1", lane=LANE))
        return await stage.claim_one()
