"""`TransferConformance`: the suite for a store that moves messages into its own sinks, such as Redis lists."""

# ruff: noqa: D102 - the name of a test states its rule

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aiodelay.core.transitions import delivery_id
from aiodelay.core.values import (
    LEASE_MS,
    MAX_CLAIM_BYTES,
    MAX_CLAIM_MESSAGES,
    After,
    Cancel,
    Demand,
    Envelope,
    Fire,
    Late,
    Promise,
    Refused,
    Reschedule,
)
from aiodelay.ports import Endpoints, Transferring
from aiodelay.testing.sinks import RecordingSink

from .stage import HOUR_MS, Stage, again, done, staged
from .transfer_bench import RULE, TransferBench, ended
from .transfer_blocked import BlockedRules
from .transfer_series import SeriesTransferRules

__all__ = ["ArrivalRules", "ArrivedContentRules", "ReachRules", "TransferConformance", "TransferDispatchRules"]


class ReachRules(TransferBench):
    """Which sinks a store reaches exactly once, and what it tells of moved messages."""

    @staged
    async def test_reach_says_what_is_promised_and_why(self, stage: Stage) -> None:
        moves = self.moves(stage)
        here, elsewhere = moves.store.reaches(moves.sink), moves.store.reaches(RecordingSink("elsewhere"))
        assert (here.promise, elsewhere.promise) == (Promise.EXACTLY_ONCE, Promise.AT_LEAST_ONCE)
        assert here.reason
        assert "elsewhere" in elsewhere.reason

    @staged
    async def test_the_sinks_that_a_store_brings_along_are_reached_exactly_once(self, stage: Stage) -> None:
        store, moves = stage.store, self.moves(stage)
        if not isinstance(store, Endpoints):
            pytest.skip(f"{store.name} brings no sinks along")
        assert store.sinks
        assert {moves.store.reaches(sink).promise for sink in store.sinks} == {Promise.EXACTLY_ONCE}

    @staged
    async def test_traces_of_what_was_moved_are_told_as_many_as_are_wanted(self, stage: Stage) -> None:
        moves, plain = self.moves(stage), {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
        traces = {"a": plain, "b": {**plain, "more": "x"}, "c": {}}
        await moves.stored(*(moves.put(name, trace=trace, headers={"h": b""}) for name, trace in traces.items()))
        await moves.stored(moves.put("d", trace=plain, key=b"k"))
        moved = await moves.move(traces=10)
        assert (moved.moved, dict(moved.traces)) == (4, {"a": plain, "b": traces["b"], "d": plain})
        await moves.stored(moves.put("e", trace=plain), moves.put("f", trace=plain))
        moved = await moves.move(traces=1)
        assert (moved.moved, list(moved.traces)) == (2, [("e", plain)])
        await moves.stored(moves.put("s", rule=RULE, trace=plain), moves.put("g", trace=plain))
        moved = await moves.move()
        assert (moved.moved, list(moved.traces)) == (1, [])
        moved = await moves.move(settlements=[ended(moved.series[0], None)], traces=1)
        assert (moved.moved, list(moved.traces)) == (1, [("s", plain)])

    @staged
    async def test_journal_says_what_was_moved(self, stage: Stage) -> None:
        with_journal = await stage.with_journal(100)
        moves = self.moves(with_journal)
        await moves.stored(moves.put("m"), moves.put("s", rule=RULE))
        (series,) = (await moves.move()).series
        await moves.move(settlements=[ended(series, stage.now + 60_000)])
        events = [(entry.event, entry.id) for entry in await with_journal.store.journal()]
        assert events == [("stored", "m"), ("stored", "s"), ("delivered", "m"), ("delivered", "s")]


class ArrivalRules(TransferBench):
    """Each message arrives once, at its time, in its latest version (S1 to S7)."""

    @staged
    async def test_s1_nothing_is_moved_early(self, stage: Stage) -> None:
        moves = self.moves(stage)
        await moves.stored(moves.put("m", 1000))
        stage.move(999)
        transferred = await moves.move()
        assert (transferred.moved, transferred.next_due_ms) == (0, stage.now + 1)
        assert await moves.ids() == []
        stage.move(1)
        transferred = await moves.move()
        assert (transferred.moved, transferred.next_due_ms, transferred.now_ms) == (1, None, stage.now)

    @staged
    async def test_s3_a_message_arrives_once_and_is_gone(self, stage: Stage) -> None:
        moves = self.moves(stage)
        await moves.stored(*[moves.put(f"m{i}", address=moves.here if i % 3 else moves.there) for i in range(30)])
        assert await moves.move_all() == 30
        assert await moves.move_all() == 0
        assert sorted(await moves.ids() + await moves.ids(moves.there)) == sorted(f"m{i}" for i in range(30))
        assert await stage.picture() == ([], [])

    @staged
    async def test_s3_several_processes_move_each_message_once(self, stage: Stage) -> None:
        moves = self.moves(stage)
        await moves.stored(*[moves.put(f"m{i}") for i in range(200)])
        moved = await asyncio.gather(*[moves.move(Demand(30)) for _ in range(9)])
        assert sum(each.moved for each in moved) == 200
        assert sorted(await moves.ids()) == sorted(f"m{i}" for i in range(200))

    @staged
    async def test_s2_what_was_not_moved_survives_reopening(self, stage: Stage) -> None:
        moves = self.moves(stage)
        await moves.stored(*[moves.put(f"m{i}", i) for i in range(4)])
        stage.move(1)
        await moves.move()
        await stage.reopen()
        stage.move(9)
        moves.store = self.moves(stage).store
        assert await moves.move_all() == 2
        assert await moves.ids() == ["m0", "m1", "m2", "m3"]

    @staged
    async def test_s7_what_is_leased_is_not_moved_until_the_lease_has_ended(self, stage: Stage) -> None:
        moves = self.moves(stage)
        await moves.stored(moves.put("m"))
        (claim,) = await stage.claim(lane=moves.sink.name)
        transferred = await moves.move()
        assert (transferred.moved, transferred.next_due_ms) == (0, stage.now + LEASE_MS)
        stage.move(LEASE_MS)
        assert (await moves.move()).moved == 1
        assert await stage.settle(done(claim)) == "gone"

    @staged
    async def test_s4_the_latest_version_arrives(self, stage: Stage) -> None:
        moves = self.moves(stage)
        await moves.stored(moves.put("m", payload=b"old"))
        await moves.stored(moves.put("m", payload=b"new"))
        await moves.move_all()
        assert [record.envelope.payload for record in await moves.arrived()] == [b"new"]

    @staged
    async def test_s5_what_was_cancelled_does_not_arrive(self, stage: Stage) -> None:
        moves = self.moves(stage)
        await moves.stored(moves.put("m"), moves.put("n"))
        await stage.do(Cancel(stage.op(), "m"))
        await moves.move_all()
        assert await moves.ids() == ["n"]
        assert await stage.do(Cancel(stage.op(), "n")) == Refused("not_found")

    @pytest.mark.parametrize("version", [False, True], ids=["plain", "with a version"])
    @staged
    async def test_s6_a_put_repeated_after_its_message_was_moved_stores_nothing(
        self,
        stage: Stage,
        version: bool,  # noqa: FBT001 - a parameter of the test
    ) -> None:
        moves = self.moves(stage)
        put = moves.put("m", address=moves.there, conflict=stage.versioned(7)) if version else moves.put("m")
        first = await stage.do(put)
        await moves.move_all()
        assert await stage.do(put) == first
        assert await moves.move_all() == 0
        if version:
            stage.move(HOUR_MS)
            refused = await stage.do(moves.put("m", conflict=stage.versioned(7)))
            assert isinstance(refused, Refused)
            assert refused.reason == "outdated"

    @staged
    async def test_s6_the_same_id_again_has_another_delivery_id(self, stage: Stage) -> None:
        moves = self.moves(stage)
        for _ in range(2):
            await moves.stored(moves.put("m"))
            await moves.move_all()
        assert len({delivery_id(record) for record in await moves.arrived()}) == 2


class ArrivedContentRules(TransferBench):
    """Messages arrive unchanged and in order (S8, S9)."""

    @pytest.mark.parametrize(
        "payload",
        [b"", bytes(range(256)), b"\xff" * 70_000, b"x" * 255, b"x" * 256],
        ids=["empty", "each byte", "70,000", "255", "256"],
    )
    @staged
    async def test_s8_the_payload_arrives_identical(self, stage: Stage, payload: bytes) -> None:
        moves = self.moves(stage)
        await moves.stored(moves.put("m", payload=payload))
        await moves.move_all()
        (record,) = await moves.arrived()
        assert record.envelope.payload == payload

    @pytest.mark.parametrize("message_id", ["m", "é ✓", "x" * 254, "x" * 255, "0198c0ffee007abc8def0123456789ab"])
    @staged
    async def test_s8_the_whole_message_arrives_identical(self, stage: Stage, message_id: str) -> None:
        moves = self.moves(stage)
        put = moves.put(
            message_id,
            key=b"\x00\xff",
            headers={"é": b"", "a": b"\xff" * 300},
            type_="payment.check",
            encoding="msgpack",
            trace={"traceparent": "00-1"},
            conflict=stage.versioned(1 << 62),
            late=Late.drop("1h"),
        )
        stored = await moves.stored(put)
        await moves.move_all()
        (record,) = await moves.arrived()
        assert _without_place(record.envelope) == _without_place(put.envelope)
        assert (record.revision, record.due_ms, record.op) == (stored.revision, stored.due_ms, put.op)
        assert (record.late, record.expires_ms, record.attempt) == (put.late.action, stored.due_ms + HOUR_MS, 0)

    @staged
    async def test_s8_attempts_and_errors_travel_along(self, stage: Stage) -> None:
        moves = self.moves(stage)
        await moves.stored(moves.put("m"))
        (claim,) = await stage.claim(lane=moves.sink.name)
        await stage.end(again(claim, stage.now, 3, "no answer"))
        await moves.move_all()
        (record,) = await moves.arrived()
        assert (record.attempt, record.first_error, record.last_error) == (3, "no answer", "no answer")

    @staged
    async def test_s9_messages_arrive_by_due_time_then_scheduling_order(self, stage: Stage) -> None:
        stage.needs_order()
        moves = self.moves(stage)
        for number, due in enumerate([30, 10, 20, 10, 30, 10]):
            await moves.stored(moves.put(f"{due} {number}", due))
        stage.move(30)
        with moves.store.transferring(moves.sink) as transfer:
            while (await transfer.transfer(Demand(2))).moved:
                pass
        assert await moves.ids() == ["10 1", "10 3", "10 5", "20 2", "30 0", "30 4"]


class TransferDispatchRules(TransferBench):
    """Which messages a call moves, and when `wait` ends."""

    @staged
    async def test_demand_no_more_messages_than_asked_for(self, stage: Stage) -> None:
        moves = self.moves(stage)
        await moves.stored(*[moves.put(f"m{i}") for i in range(5)])
        transferred = await moves.move(Demand(2))
        assert (transferred.moved, transferred.next_due_ms) == (2, stage.now)
        assert await moves.ids() == ["m0", "m1"]

    @staged
    async def test_demand_no_more_bytes_than_asked_for_and_one_larger_message_alone(self, stage: Stage) -> None:
        moves = self.moves(stage)
        parts: dict[str, Any] = {"payload": b"x" * 30, "key": b"y" * 5, "headers": {"abc": b"zz"}}  # 40 bytes
        await moves.stored(*[moves.put(f"m{i}", **parts) for i in range(4)], moves.put("large", payload=bytes(1000)))
        steps = [(await moves.move(Demand(9, max_bytes=size))).moved for size in (119, 80, 80, 80)]
        assert steps == [2, 2, 1, 0]

    @staged
    async def test_demand_a_call_is_bounded_whatever_is_asked_for(self, stage: Stage) -> None:
        moves = self.moves(stage)
        await moves.stored(*[moves.put(f"m{i}") for i in range(MAX_CLAIM_MESSAGES + 10)])
        assert (await moves.move(Demand(10_000))).moved == MAX_CLAIM_MESSAGES
        await moves.move()
        await moves.stored(*[moves.put(f"l{i}", payload=bytes(400 << 10)) for i in range(4)])
        assert (await moves.move(Demand(9, max_bytes=8 << 20))).moved * (400 << 10) <= MAX_CLAIM_BYTES

    @pytest.mark.parametrize("what", ["put", "fire", "reschedule", "release", "wake"])
    @staged
    async def test_l2_wait_ends_when_there_may_be_something_to_move(self, stage: Stage, what: str) -> None:
        moves = self.moves(stage)
        await moves.stored(moves.put("ahead", HOUR_MS))
        if what == "release":
            await stage.store.pause(moves.sink.name)
        with moves.store.transferring(moves.sink) as transfer:
            actions: dict[str, Callable[[], Awaitable[object]]] = {
                "put": lambda: stage.do(moves.put("new")),
                "fire": lambda: stage.do(Fire(stage.op(), "ahead")),
                "reschedule": lambda: stage.do(Reschedule(stage.op(), "ahead", After(1))),
                "release": lambda: stage.store.resume(moves.sink.name),
                "wake": lambda: _wake(transfer),
            }
            transfer.clear()
            await transfer.transfer(Demand(500))
            async with asyncio.timeout(stage.soon_s), asyncio.TaskGroup() as tasks:
                waiter = tasks.create_task(transfer.wait(until_ms=None))
                for _ in range(10):
                    await asyncio.sleep(0)
                assert not waiter.done()
                await actions[what]()

    @pytest.mark.parametrize("policy", [Late.drop("1s"), Late.dead_letter("1s")], ids=["drop", "dead letter"])
    @staged
    async def test_late_messages_are_not_moved(self, stage: Stage, policy: Late) -> None:
        moves = self.moves(stage)
        await moves.stored(moves.put("late", late=policy), moves.put("on time", 500, late=policy))
        stage.move(1001)
        assert await moves.move_all() == 1
        assert await moves.ids() == ["on time"]
        assert [letter.reason for letter in await stage.dead()] == (["late"] if policy.action == 2 else [])

    @pytest.mark.parametrize("holds", ["sink", "address"])
    @staged
    async def test_held_messages_are_not_moved_and_come_in_order(self, stage: Stage, holds: str) -> None:
        moves = self.moves(stage)
        lane, address = moves.sink.name, None if holds == "sink" else moves.here
        await moves.stored(moves.put("m0"), moves.put("m2", 2))
        await stage.store.pause(lane, address)
        await moves.stored(moves.put("m1"), moves.put("other", address=moves.there))
        stage.move(5)
        assert await moves.move_all() == (address is not None)
        assert await moves.ids() == []
        await stage.store.resume(lane, address)
        await moves.move_all()
        assert (await moves.ids(), await moves.ids(moves.there)) == (["m0", "m1", "m2"], ["other"])


class TransferConformance(
    ReachRules,
    ArrivalRules,
    ArrivedContentRules,
    TransferDispatchRules,
    BlockedRules,
    SeriesTransferRules,
):
    """The suite for stores that promise to reach a sink exactly once: tests named after docs/guarantees.md.

    Subclass this suite in addition to `StoreConformance`, with the same `make_store`. The other methods read and change
    the destinations from outside the store, as a consumer does.
    """


async def _wake(transfer: Transferring) -> None:
    transfer.wake()


def _without_place(envelope: Envelope) -> object:
    """Return the parts of an envelope that travel to a destination: all but the lane and the address."""
    return (
        *(envelope.id, envelope.type, envelope.encoding, envelope.payload, envelope.key),
        *(dict(envelope.headers), dict(envelope.trace), envelope.version),
    )
