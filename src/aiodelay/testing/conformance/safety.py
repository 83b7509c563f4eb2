"""`SafetyRules`: the rules S1 to S9 of docs/guarantees.md, and rule R1 as far as a store alone keeps it."""

# ruff: noqa: D102 - the name of a test states its rule

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from aiodelay.core.values import LEASE_MS, After, At, Demand, SettleOutcome, SourcePosition, Stored

from .stage import ALL, HOUR_MS, LANE, LANES, OTHER, Bench, Stage, again, dead, done, ids_of, staged

__all__ = ["ContentRules", "DueTimeRules", "HolderRules", "LossRules", "OrderRules", "SafetyRules", "VersionRules"]

RULE: Mapping[str, str | int] = {"e": 60_000}


class DueTimeRules(Bench):
    """No message is early (S1)."""

    @pytest.mark.parametrize("kind", ["at", "after"])
    @staged
    async def test_s1_never_early(self, stage: Stage, kind: str) -> None:
        due_ms = stage.now + 1000
        await stage.stored(stage.put(due=At(due_ms) if kind == "at" else After(1000)))
        stage.move(999)
        claimed = await stage.claimed()
        assert (list(claimed.claims), claimed.next_due_ms, claimed.now_ms) == ([], due_ms, due_ms - 1)
        stage.move(1)
        assert (await stage.claim_one()).record.due_ms == due_ms

    @pytest.mark.parametrize("ago_ms", [0, 1, HOUR_MS])
    @staged
    async def test_s1_at_in_the_past_is_due_at_once(self, stage: Stage, ago_ms: int) -> None:
        due_ms = stage.now - ago_ms
        assert (await stage.stored(stage.put(due=At(due_ms)))).due_ms == due_ms
        assert (await stage.claim_one()).record.due_ms == due_ms

    @staged
    async def test_s1_at_before_1970_is_due_at_once(self, stage: Stage) -> None:
        await stage.stored(stage.put(due=At(-1)))
        assert (await stage.claim_one()).record.due_ms == 0

    @staged
    async def test_s1_after_is_on_the_stores_clock(self, stage: Stage) -> None:
        stage.step_back(HOUR_MS)
        assert stage.store.now_ms() == stage.now
        assert (await stage.stored(stage.put(due=After(1500)))).due_ms == stage.now + 1500

    @staged
    async def test_s1_retry_is_never_early(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        await stage.end(again(await stage.claim_one(), stage.now + 500))
        stage.move(499)
        assert await stage.claim() == []
        stage.move(1)
        await stage.claim_one()

    @staged
    async def test_s1_holds_when_the_clock_steps_back(self, stage: Stage) -> None:
        await stage.stored(stage.put(due=After(1000)))
        stage.move(1000)
        claim = await stage.claim_one()
        stage.step_back(HOUR_MS)
        await stage.end(again(claim, stage.now + 10))  # 10 ms after the new time is before the due time
        stage.move(HOUR_MS - 1)
        assert await stage.claim() == []
        stage.move(1)
        await stage.claim_one()


class LossRules(Bench):
    """No acknowledged message is lost (S2), and a store can be entered again (R1)."""

    @staged
    async def test_s2_nothing_acknowledged_is_lost(self, stage: Stage) -> None:
        ids = {f"m{i}" for i in range(200)}
        puts = [stage.put(each, After(i * 7919 % 5000), lane=LANES[i % 3]) for i, each in enumerate(sorted(ids))]
        await stage.stored(*puts)
        delivered: list[str] = []
        for step in range(60):
            claimed = await stage.claimed({lane: Demand(5) for lane in LANES})
            delivered += ids_of(claimed.claims[::2]) if step < 20 else ids_of(claimed.claims)
            settled = claimed.claims[::2] if step < 20 else claimed.claims  # the others lapse
            await stage.work.settle([done(claim) for claim in settled])
            stage.move(LEASE_MS)
        assert (sorted(delivered), await stage.picture()) == (sorted(ids), ([], []))

    @staged
    async def test_s2_what_was_acknowledged_survives_reopening(self, stage: Stage) -> None:
        puts = [stage.put("pending", After(HOUR_MS)), stage.put("due"), stage.put("dead", lane=OTHER)]
        await stage.stored(*puts, stage.put("series", After(HOUR_MS), rule=RULE, headers={"é": b"\xff"}, key=b""))
        await stage.end(dead(await stage.claim_one(OTHER)))
        before = await stage.picture()
        await stage.reopen()
        assert await stage.picture() == before

    @staged
    async def test_r1_a_store_that_was_left_is_entered_again(self, stage: Stage) -> None:
        for number in range(3):  # a scheduler that waits for a sink does the same
            await stage.enter_again()
            await stage.stored(stage.put(f"{number}"))
            await stage.end(done(await stage.claim_one()))
        assert await stage.picture() == ([], [])

    @staged
    async def test_s2_a_claim_survives_reopening_or_is_given_again(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        claim, before = await stage.claim_one(), await stage.picture()
        await stage.reopen()
        if self.leases_survive:
            assert await stage.picture() == before
            await stage.end(done(claim))
        else:
            stage.move(1)
            again = await stage.claim_one()
            assert list(await stage.work.settle([done(claim)])) == [SettleOutcome.GONE]
            await stage.end(done(again))

    @staged
    async def test_s2_holds_survive_reopening(self, stage: Stage) -> None:
        for address in (None, "", "é ✓"):
            await stage.store.pause("held", address)
        await stage.store.pause("released")
        await stage.store.resume("released")
        await stage.reopen()
        assert list(await stage.store.paused()) == [("held", None), ("held", ""), ("held", "é ✓")]

    @staged
    async def test_s2_positions_survive_reopening(self, stage: Stage) -> None:
        stage.needs_positions()
        await stage.store.apply([], source=SourcePosition("source", 0, 7))
        await stage.reopen()
        assert await stage.store.position("source") == 7

    @staged
    async def test_s2_ops_survive_reopening(self, stage: Stage) -> None:
        put, cancel = stage.put("m", After(1)), stage.put("other")
        answers = [await stage.do(put), await stage.do(cancel)]
        stage.move(1)
        await stage.work.settle([done(claim) for claim in await stage.claim()])
        await stage.reopen()
        assert [await stage.do(put), await stage.do(cancel)] == answers
        assert await stage.claim() == []


class HolderRules(Bench):
    """A message has one holder at a time (S7), and is claimed again once its lease has ended (S3)."""

    @staged
    async def test_s3_expired_lease_is_claimable_again(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        first = await stage.claim_one()
        stage.move(LEASE_MS - 1)
        claimed = await stage.claimed()
        assert (list(claimed.claims), claimed.next_due_ms) == ([], stage.now + 1)
        stage.move(1)
        second = await stage.claim_one()
        assert second.token != first.token
        assert second.record.revision == first.record.revision
        assert (second.record.due_ms, second.record.attempt) == (first.record.due_ms, 0)

    @staged
    async def test_s3_every_claim_of_a_message_has_another_token(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        tokens = []
        for _ in range(50):  # the clock does not move
            claim = await stage.claim_one()
            tokens.append(claim.token)
            await stage.end(again(claim, stage.now))
        assert len(set(tokens)) == 50

    @staged
    async def test_s3_an_old_token_settles_nothing(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        first = await stage.claim_one()
        stage.move(LEASE_MS)
        second = await stage.claim_one()
        before = await stage.picture()
        for settlement in (done(first), again(first, stage.now), dead(first)):
            assert await stage.settle(settlement) is SettleOutcome.GONE
        assert await stage.picture() == before
        await stage.end(done(second))

    @staged
    async def test_s3_a_late_settlement_counts_while_nobody_took_the_message(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        claim = await stage.claim_one()
        stage.move(LEASE_MS + 1)
        await stage.end(done(claim))
        assert await stage.claim() == []

    @staged
    async def test_s7_two_workers_never_hold_the_same_message(self, stage: Stage) -> None:
        await stage.stored(*[stage.put(f"m{i}") for i in range(60)])
        other = await stage.another_worker("second")
        held: list[str] = []
        for _ in range(10):
            pair = await asyncio.gather(stage.claim(4), stage.claim(4, work=other))
            held += ids_of([*pair[0], *pair[1]])
        assert sorted(held) == sorted(f"m{i}" for i in range(60))

    @staged
    async def test_s7_any_worker_may_settle_with_the_token(self, stage: Stage) -> None:
        await stage.stored(stage.put())
        claim = await stage.claim_one()
        other = await stage.another_worker("second")
        assert await stage.settle(done(claim), work=other) is SettleOutcome.SETTLED


class VersionRules(Bench):
    """The latest version of a message wins (S4), and nothing ended comes back (S6)."""

    @staged
    async def test_s4_the_latest_version_wins(self, stage: Stage) -> None:
        stage.needs_conflict("replace")
        first = await stage.stored(stage.put("m", After(1000), payload=b"old"))
        second = await stage.stored(stage.put("m", After(2000), payload=b"new", lane=OTHER))
        assert (second.answer, second.revision > first.revision) == ("replaced", True)
        stage.move(1999)
        assert not (await stage.claimed()).claims
        stage.move(1)
        (claim,) = (await stage.claimed()).claims
        assert (claim.record.envelope.payload, claim.record.revision) == (b"new", second.revision)
        await stage.end(done(claim))
        stage.move(HOUR_MS)
        assert not (await stage.claimed()).claims

    @staged
    async def test_s4_the_latest_version_wins_over_one_in_flight(self, stage: Stage) -> None:
        await stage.stored(stage.put("m", payload=b"old"))
        old = await stage.claim_one()
        await stage.stored(stage.put("m", payload=b"new"))
        new = await stage.claim_one()
        assert new.record.envelope.payload == b"new"
        before = await stage.picture()
        for settlement in (done(old), again(old, stage.now), dead(old)):
            assert await stage.settle(settlement) is SettleOutcome.SUPERSEDED
        assert await stage.picture() == before
        await stage.end(done(new))

    @staged
    async def test_s6_nothing_ended_comes_back(self, stage: Stage) -> None:
        await stage.stored(stage.put("done"), stage.put("dead"), stage.put("kept", After(10 * HOUR_MS)))
        claims = {claim.record.id: claim for claim in await stage.claim()}
        await stage.end(done(claims["done"]))
        await stage.end(dead(claims["dead"]))
        for _ in range(3):
            stage.move(HOUR_MS)
            await stage.tidy()
            assert await stage.claim() == []
        if stage.store.traits.durable:
            await stage.reopen()
            assert await stage.claim() == []


class ContentRules(Bench):
    """Messages arrive unchanged (S8)."""

    @pytest.mark.parametrize(
        "payload", [b"", bytes(range(256)), b"\xff" * 262_144], ids=["empty", "every byte", "256 KiB"]
    )
    @staged
    async def test_s8_payload_arrives_identical(self, stage: Stage, payload: bytes) -> None:
        await stage.stored(stage.put(payload=payload))
        assert (await stage.claim_one()).record.envelope.payload == payload

    @pytest.mark.parametrize("key", [None, b"", b"\x00\xff"], ids=["none", "empty", "bytes"])
    @staged
    async def test_s8_key_arrives_identical(self, stage: Stage, key: bytes | None) -> None:
        await stage.stored(stage.put(key=key))
        assert (await stage.claim_one()).record.envelope.key == key

    @staged
    async def test_s8_headers_arrive_identical(self, stage: Stage) -> None:
        headers = {"héader ✓": b"\x00\xff", "empty": b"", "large": b"x" * 32_768, "A": b"1", "a": b"2"}
        await stage.stored(stage.put(headers=headers))
        assert dict((await stage.claim_one()).record.envelope.headers) == headers

    @staged
    async def test_s8_the_whole_envelope_arrives_identical(self, stage: Stage) -> None:
        put = stage.put(
            "id ✓ é",
            address="tópic",
            type_="payment.check",
            encoding="msgpack",
            trace={"traceparent": "00-1", "tracestate": "é"},
            rule={"c": "0 9 * * MON", "z": "Europe/Paris"},
        )
        await stage.stored(put)
        assert (await stage.claim_one()).record.envelope == put.envelope

    @staged
    async def test_s8_bytes_are_identical_after_retry_lapse_and_redrive(self, stage: Stage) -> None:
        put = stage.put(payload=b"\x00\xff", key=b"", headers={"é": b""}, trace={"a": "b"})
        await stage.stored(put)
        await stage.end(again(await stage.claim_one(), stage.now))
        await stage.claim_one()
        await stage.lapse()
        await stage.end(dead(await stage.claim_one()))
        (letter,) = await stage.dead()
        assert isinstance((await stage.store.redrive([letter.key]))[0], Stored)
        assert (await stage.claim_one()).record.envelope == letter.record.envelope == put.envelope


class OrderRules(Bench):
    """Messages of a lane are claimed in order (S9)."""

    @staged
    async def test_s9_by_due_time_then_scheduling_order(self, stage: Stage) -> None:
        stage.needs_order()
        dues = [30, 10, 20, 10, 30, 10]
        for number, due in enumerate(dues):  # one command in each batch; below, three commands in one batch
            await stage.stored(stage.put(f"{due} {number}", After(due)))
        await stage.stored(*[stage.put(f"20 {number}", After(20)) for number in (6, 7, 8)])
        stage.move(30)
        first = await stage.claim(4)
        order = ["10 1", "10 3", "10 5", "20 2", "20 6", "20 7", "20 8", "30 0", "30 4"]
        assert ids_of(first) + await stage.ids() == order

    @staged
    async def test_s9_a_replaced_message_stands_where_its_last_schedule_puts_it(self, stage: Stage) -> None:
        stage.needs_order()
        due = At(stage.now + 10)
        await stage.stored(*[stage.put(each, due) for each in ("a", "b", "c", "d")])
        await stage.stored(stage.put("a", due))
        await stage.stored(stage.put("d", At(stage.now + 5)))
        stage.move(10)
        assert await stage.ids() == ["d", "b", "c", "a"]

    @staged
    async def test_s9_order_holds_with_lanes_side_by_side(self, stage: Stage) -> None:
        stage.needs_order()
        for number in range(30):
            await stage.stored(stage.put(f"{number:02}", lane=LANES[number % 3]))
        claims = (await stage.claimed({lane: Demand(ALL) for lane in (OTHER, LANE)})).claims
        for lane in (LANE, OTHER):
            ids = [claim.record.id for claim in claims if claim.record.envelope.lane == lane]
            assert (len(ids), ids) == (10, sorted(ids))


class SafetyRules(DueTimeRules, LossRules, HolderRules, VersionRules, ContentRules, OrderRules):
    """No message is early, lost, changed, or delivered again after its end."""
