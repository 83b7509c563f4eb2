"""`LeaseRules`: rules for claims, leases, retries and suspects.

The module `trials` has the rules for suspects.
"""

# ruff: noqa: D102 - the name of a test states its rule

from __future__ import annotations

import pytest
from msgspec.structs import replace

from aiodelay.core.transitions import (
    RIGHTING_MS,
    delivery_id,
    token_counter,
    token_deadline_ms,
    token_for,
)
from aiodelay.core.values import (
    LEASE_MS,
    After,
    At,
    Cancel,
    Demand,
    Fire,
    Renewal,
    RenewOutcome,
    Reschedule,
    SettleOutcome,
    State,
)

from .stage import HOUR_MS, LANE, OTHER, Bench, Stage, again, dead, done, ending, ids_of, staged
from .trials import KillRules, SilenceRules, TrialRules

__all__ = ["AttemptRules", "ClaimRules", "LeaseEndRules", "LeaseRules", "RenewalRules"]


class ClaimRules(Bench):
    """The rules for the answers to claims and settlements, above all to repeated ones."""

    @staged
    async def test_a_claim_says_when_its_lease_ends(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        claimed = await stage.claimed()
        (claim,) = claimed.claims
        assert token_deadline_ms(claim.token) == stage.now + LEASE_MS
        assert (claimed.now_ms, claimed.next_due_ms) == (stage.now, stage.now + LEASE_MS)
        snapshot = await stage.get()
        assert snapshot is not None
        assert snapshot.state is State.IN_FLIGHT

    @staged
    async def test_a_claim_repeated_with_its_request_gives_the_same_messages(self, stage: Stage) -> None:
        await stage.stored(*[stage.put(f"m{i}") for i in range(6)])
        demand = {LANE: Demand(3)}
        first = await stage.claimed(demand, request="r1")
        assert len(first.claims) == 3
        again_ = await stage.claimed(demand, request="r1")
        assert list(again_.claims) == list(first.claims)
        other = await stage.claimed(demand, request="r2")
        assert set(ids_of(other.claims)).isdisjoint(ids_of(first.claims))
        assert len(other.claims) == 3

    @staged
    async def test_a_repeated_claim_gives_what_is_still_leased(self, stage: Stage) -> None:
        await stage.stored(*[stage.put(each) for each in ("a", "b", "c")])
        first = await stage.claimed(request="r")
        kept, settled, cancelled = first.claims
        await stage.end(done(settled))
        stage.needs_verdict()
        await stage.do(Cancel(stage.op(), cancelled.record.id))
        repeated = (await stage.claimed(request="r")).claims
        assert [each.token for each in repeated] == [kept.token, cancelled.token]
        assert [each.record.no_retry for each in repeated] == [False, True]
        await stage.lapse()
        assert not (await stage.claimed(request="r")).claims

    @staged
    async def test_an_empty_claim_repeated_stays_empty(self, stage: Stage) -> None:
        assert not (await stage.claimed(request="r")).claims
        await stage.stored(stage.put())
        assert not (await stage.claimed(request="r")).claims
        assert len((await stage.claimed(request="s")).claims) == 1

    @pytest.mark.parametrize("kind", ["done", "again", "dead"])
    @staged
    async def test_a_settlement_sent_twice_has_one_effect(self, stage: Stage, kind: str) -> None:
        await stage.stored(stage.put())
        claim = await stage.claim_one()
        settlement = ending(kind, claim, due_ms=stage.now)
        assert list(await stage.work.settle([settlement, settlement])) == [SettleOutcome.SETTLED, SettleOutcome.GONE]
        before = await stage.picture()
        assert await stage.settle(settlement) is SettleOutcome.GONE
        assert await stage.picture() == before
        assert len(await stage.claim()) == (kind == "again")

    @staged
    async def test_settlements_are_answered_in_order(self, stage: Stage) -> None:
        await stage.stored(*[stage.put(each) for each in ("a", "b", "c")])
        claims = {claim.record.id: claim for claim in await stage.claim()}
        await stage.stored(stage.put("b"))
        await stage.end(done(claims["c"]))
        outcomes = await stage.work.settle([done(claims["c"]), done(claims["b"]), done(claims["a"])])
        assert list(outcomes) == [SettleOutcome.GONE, SettleOutcome.SUPERSEDED, SettleOutcome.SETTLED]


class AttemptRules(Bench):
    """The rules for what a message keeps from one attempt to the next: counts, errors, its trace, its delivery id."""

    @staged
    async def test_attempts_count_only_as_settlements_say(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        claim = await stage.claim_one()
        assert claim.record.attempt == 0
        await stage.lapse()
        claim = await stage.claim_one()
        assert claim.record.attempt == 0
        await stage.end(again(claim, stage.now, attempt=0))  # the worker gives it back without a run
        claim = await stage.claim_one()
        assert claim.record.attempt == 0
        await stage.end(again(claim, stage.now, attempt=1))
        assert (await stage.claim_one()).record.attempt == 1

    @staged
    async def test_a_retry_stands_at_its_time_and_keeps_its_due_time(self, stage: Stage) -> None:
        due_ms = (await stage.stored(stage.put())).due_ms
        await stage.end(again(await stage.claim_one(), due_ms + 700))
        snapshot = await stage.get()
        assert snapshot is not None
        assert (snapshot.record.due_ms, snapshot.next_attempt_ms) == (due_ms, due_ms + 700)
        assert (await stage.claimed()).next_due_ms == due_ms + 700

    @staged
    async def test_the_trace_that_an_attempt_ends_with_is_kept(self, stage: Stage) -> None:
        given, first, second = ({"traceparent": f"00-{n * 32}-{n * 16}-01"} for n in "123")
        first["aiodelay-attempt-traceparent"] = second["more"] = "x"
        await stage.stored(stage.put(trace=given))
        await stage.end(replace(again(await stage.claim_one(), stage.now, 1, "e"), trace=first))
        claim = await stage.claim_one()
        assert (claim.record.envelope.trace, claim.record.last_error) == (first, "e")
        await stage.end(again(claim, stage.now, 2))
        claim = await stage.claim_one()
        assert claim.record.envelope.trace == first
        await stage.end(replace(dead(claim, attempt=3), trace=second))
        (letter,) = await stage.dead()
        assert letter.record.envelope.trace == second

    @staged
    async def test_first_and_last_error_are_kept(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        for attempt, error in enumerate(["é first", "second", None], start=1):
            await stage.end(again(await stage.claim_one(), stage.now, attempt, error))
        record = await stage.record()
        assert (record.attempt, record.first_error, record.last_error) == (3, "é first", "second")
        await stage.end(dead(await stage.claim_one(), "rejected", 4, "last"))
        (letter,) = await stage.dead()
        errors = (letter.record.attempt, letter.record.first_error, letter.record.last_error)
        assert (letter.reason, errors) == ("rejected", (4, "é first", "last"))

    @staged
    async def test_a_dead_letter_keeps_the_last_errors_and_the_last_traceback(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        errors = ["e1", "e2", "é3", "é3", None, "e4 " + "long " * 60, "e5", "e6"]
        for attempt, error in enumerate(errors, start=1):
            await stage.end(again(await stage.claim_one(), stage.now, attempt, error))
        record = await stage.record()
        kept = ("e2", "é3", "e4 " + "long " * 60, "e5")
        assert (record.first_error, record.earlier_errors, record.last_error) == ("e1", kept, "e6")
        lines = f"Traceback:\n  File é\n{'x' * 8_100}"
        await stage.end(replace(dead(await stage.claim_one(), attempt=9, error="e7"), traceback=lines))
        (letter,) = await stage.dead()
        assert (letter.errors, letter.traceback) == ((*kept[1:], "e6", "e7"), lines)
        await stage.store.redrive([letter.key])
        record = (await stage.claim_one()).record
        assert (record.first_error, record.earlier_errors, record.last_error, record.traceback) == (
            None,
            (),
            None,
            None,
        )

    @staged
    async def test_delivery_id_is_kept_by_retries_and_lapses_and_new_with_every_life(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        claim = await stage.claim_one()
        seen = [delivery_id(claim.record)]
        await stage.lapse()
        claim = await stage.claim_one()
        assert delivery_id(claim.record) == seen[0]
        await stage.end(again(claim, stage.now + 5))
        stage.move(5)
        claim = await stage.claim_one()
        assert delivery_id(claim.record) == seen[0]
        due = At(claim.record.due_ms)
        await stage.stored(stage.put(due=due))  # replaces
        claim = await stage.claim_one()
        seen.append(delivery_id(claim.record))
        await stage.end(dead(claim))
        await stage.store.redrive([letter.key for letter in await stage.dead()])
        claim = await stage.claim_one()
        seen.append(delivery_id(claim.record))
        await stage.end(done(claim))
        await stage.stored(stage.put(due=due))
        seen.append(delivery_id((await stage.claim_one()).record))
        assert len(set(seen)) == 4

    @staged
    async def test_delivery_id_is_kept_when_a_message_is_moved_between_attempts(self, stage: Stage) -> None:
        stored = await stage.stored(stage.put(due=After(HOUR_MS)))
        wanted = f"m/{stored.revision}/{stored.due_ms}"
        for move in (Reschedule(stage.op(), "m", After(1000)), Reschedule(stage.op(), "m", After(5))):
            await stage.do(move)
        stage.move(5)
        claim = await stage.claim_one()
        assert (claim.record.due_ms, delivery_id(claim.record)) == (stage.now, wanted)
        await stage.end(again(claim, stage.now + HOUR_MS, error="e"))
        await stage.do(Reschedule(stage.op(), "m", After(2 * HOUR_MS)))
        await stage.do(Fire(stage.op(), "m"))
        claim = await stage.claim_one()
        assert (claim.record.attempt, delivery_id(claim.record)) == (1, wanted)
        await stage.end(dead(claim))
        (letter,) = await stage.dead()
        assert delivery_id(letter.record) == wanted
        await stage.store.redrive([letter.key])
        claim = await stage.claim_one()
        assert delivery_id(claim.record) == f"m/{claim.record.revision}/{claim.record.due_ms}"

    @pytest.mark.parametrize("end", ["again", "dead"])
    @staged
    async def test_l5_an_error_text_that_is_no_utf8_stops_nobody(self, stage: Stage, end: str) -> None:
        await stage.stored(stage.put("a"), stage.put("b"))
        first, second = await stage.claim()
        error = "FileNotFoundError: r\udce9sum\udce9"  # `os.fsdecode` decodes bytes of other encodings like this
        settlement = again(first, stage.now + 1, 1, error) if end == "again" else dead(first, error=error)
        assert list(await stage.work.settle([settlement, done(second)])) == [SettleOutcome.SETTLED] * 2
        record = (await stage.dead())[0].record if end == "dead" else await stage.record("a")
        assert (record.last_error or "").startswith("FileNotFoundError: r")


class LeaseEndRules(Bench):
    """The rules for the end of a lease."""

    @staged
    async def test_l1_a_lease_ends_with_its_worker(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        async with stage.store.work("short-lived", (LANE,)) as gone:
            await stage.claim_one(work=gone)
        stage.move(LEASE_MS)
        await stage.claim_one()

    @staged
    async def test_l1_tidy_returns_lapsed_leases(self, stage: Stage) -> None:
        await stage.stored(stage.put("a"), stage.put("b", lane="nobody's"))
        await stage.claimed({LANE: Demand(1), "nobody's": Demand(1)})
        stage.move(LEASE_MS - 1)
        assert (await stage.tidy()).lapsed == 0
        stage.move(1)
        assert (await stage.tidy()).lapsed == 2
        for message_id in ("a", "b"):
            snapshot = await stage.get(message_id)
            assert snapshot is not None
            assert (snapshot.state, snapshot.record.lapses) == (State.OVERDUE, 1)

    @staged
    async def test_l1_tidy_is_bounded(self, stage: Stage) -> None:
        await stage.stored(*[stage.put(f"m{i}") for i in range(7)])
        await stage.claim()
        stage.move(LEASE_MS)
        assert [(await stage.tidy(limit=3)).lapsed for _ in range(4)] == [3, 3, 1, 0]

    @staged
    async def test_l1_a_lease_that_nobody_sets_right_after_the_clock_stepped_back_is_returned(
        self, stage: Stage
    ) -> None:
        await stage.stored(stage.put("past", At(stage.now - 2 * HOUR_MS)), stage.put("now", lane=OTHER))
        old = await stage.claim_one()
        await stage.claim_one(OTHER)
        for _ in range(2):  # each step of the clock gives the owners of leases the full time again
            stage.step_back(HOUR_MS)
            assert await stage.claim() == []
            stage.move(RIGHTING_MS - 1)
            assert ((await stage.tidy()).lapsed, await stage.claim()) == (0, [])
        stage.move(1)
        new = await stage.claim_one()
        assert (new.record.id, new.token != old.token) == ("past", True)
        assert await stage.settle(done(old)) is SettleOutcome.GONE
        await stage.tidy()
        snapshot = await stage.get("now")
        assert snapshot is not None
        assert snapshot.state is State.SCHEDULED

    @staged
    async def test_l1_a_holder_sets_its_lease_right_after_the_clock_stepped_back(self, stage: Stage) -> None:
        await stage.stored(stage.put(due=At(stage.now - 2 * HOUR_MS)))
        claim = await stage.claim_one()
        stage.step_back(HOUR_MS)
        assert await stage.claim() == []
        for lease_ms in (HOUR_MS, LEASE_MS):  # at the first renewal, the owner has not noticed the step yet
            claim, outcome = await stage.renew(claim, lease_ms)
            assert outcome is RenewOutcome.RENEWED
        stage.move(LEASE_MS - 1)
        assert ((await stage.tidy()).lapsed, await stage.claim()) == (0, [])
        assert await stage.settle(done(claim)) is SettleOutcome.SETTLED

    @staged
    async def test_l1_a_lease_that_was_set_right_ends(self, stage: Stage) -> None:
        await stage.stored(stage.put(due=At(stage.now - 2 * HOUR_MS)))
        claim = await stage.claim_one()
        stage.step_back(HOUR_MS)
        await stage.renew(claim)
        stage.move(LEASE_MS)
        await stage.claim_one()


class RenewalRules(Bench):
    """The rules for the renewal of a lease."""

    @staged
    async def test_l1_a_renewed_lease_lasts_longer(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        old = await stage.claim_one()
        stage.move(LEASE_MS // 3)
        new, outcome = await stage.renew(old)
        assert outcome is RenewOutcome.RENEWED
        stage.move(LEASE_MS - 1)
        assert await stage.claim() == []
        assert await stage.settle(done(old)) is SettleOutcome.GONE
        await stage.end(done(new))

    @staged
    async def test_l1_a_renewed_lease_ends(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        await stage.renew(await stage.claim_one())
        stage.move(LEASE_MS)
        await stage.claim_one()

    @staged
    async def test_a_renewal_sent_twice_is_answered_renewed(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        claim = await stage.claim_one()
        stage.move(1000)
        to = token_for(stage.now + LEASE_MS, token_counter(claim.token))
        renewal = Renewal(claim.record.id, claim.record.revision, claim.token, to)
        assert list(await stage.work.renew([renewal, renewal])) == [RenewOutcome.RENEWED] * 2
        assert list(await stage.work.renew([renewal])) == [RenewOutcome.RENEWED]

    @pytest.mark.parametrize("end", ["done", "again", "dead"])
    @staged
    async def test_a_renewal_after_the_settlement_is_lost_and_writes_nothing(self, stage: Stage, end: str) -> None:
        await stage.stored(stage.put())
        claim = await stage.claim_one()
        await stage.end(ending(end, claim, due_ms=stage.now))
        before = await stage.picture()
        assert (await stage.renew(claim))[1] is RenewOutcome.LOST
        assert await stage.picture() == before

    @staged
    async def test_a_renewal_says_what_became_of_the_message(self, stage: Stage) -> None:
        stage.needs_verdict()
        await stage.stored(*[stage.put(each) for each in ("cancelled", "replaced", "taken")])
        claims = {claim.record.id: claim for claim in await stage.claim()}
        await stage.do(Cancel(stage.op(), "cancelled"))
        await stage.stored(stage.put("replaced"))
        outcomes = {each: (await stage.renew(claims[each]))[1] for each in ("cancelled", "replaced")}
        assert outcomes == {"cancelled": RenewOutcome.CANCELLED, "replaced": RenewOutcome.SUPERSEDED}
        await stage.lapse()
        await stage.claim()
        assert (await stage.renew(claims["taken"]))[1] is RenewOutcome.LOST


class LeaseRules(ClaimRules, AttemptRules, LeaseEndRules, RenewalRules, TrialRules, KillRules, SilenceRules):
    """The rules for the time between a claim and its settlement."""
