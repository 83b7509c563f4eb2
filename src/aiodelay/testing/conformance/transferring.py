"""`TransferConformance`: the suite for a store that moves messages into its own sinks, such as Redis lists."""

# ruff: noqa: D102 - the name of a test states its rule

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar
from uuid import uuid4

import pytest
from msgspec.structs import replace

from aiodelay.core.transitions import delivery_id, occurrence_id
from aiodelay.core.values import (
    LEASE_MS,
    MAX_CLAIM_BYTES,
    MAX_CLAIM_MESSAGES,
    After,
    At,
    Cancel,
    Dead,
    Demand,
    Done,
    Envelope,
    Fire,
    Late,
    Promise,
    Put,
    Record,
    Refused,
    Reschedule,
    Settlement,
    State,
    Stored,
    Transferred,
)
from aiodelay.ports import Endpoints, Sink, Store, Transfer, Transferring
from aiodelay.testing.sinks import RecordingSink

from .stage import HOUR_MS, Bench, Stage, again, done, staged

__all__ = ["TransferConformance"]

RULE: Mapping[str, str | int] = {"e": 60_000}
MOST_WAIT_MS = 2_000
"""The longest time until a store tries a blocked destination again, in milliseconds."""


class _Moves:
    """The store of a stage and one of its sinks, with short methods for the tests.

    `here` and `there` are two addresses of the sink. Puts go to `here` by default.
    """

    def __init__(self, suite: TransferConformance, stage: Stage, *, limit: int = 0) -> None:
        assert isinstance(stage.store, Transfer)
        self.stage: Stage = stage
        self.store: Transfer = stage.store
        self.suite: TransferConformance = suite
        self.sink: Sink = suite.make_sink(stage.store, limit=limit)
        own = uuid4().hex
        self.here: str = f"here-{own}"
        self.there: str = own[:8]

    def put(self, message_id: str, due_ms: int = 0, *, address: str = "", **fields: object) -> Put:
        place = address or self.here
        return self.stage.put(message_id, After(due_ms), lane=self.sink.name, address=place, **fields)  # type: ignore[arg-type]

    async def stored(self, *puts: Put) -> Stored:
        return await self.stage.stored(*puts)

    async def move(
        self,
        demand: Demand = Demand(500),  # noqa: B008 - frozen
        settlements: Sequence[Settlement] = (),
        *,
        traces: int = 0,
    ) -> Transferred:
        with self.store.transferring(self.sink) as moves:
            return await moves.transfer(demand, settlements, traces=traces)

    async def move_all(self) -> int:
        """Move messages until no more can be moved now. Return the number of moved messages."""
        moved = 0
        with self.store.transferring(self.sink) as moves:
            for _ in range(100):
                transferred = await moves.transfer(Demand(500))
                moved += transferred.moved
                if transferred.next_due_ms is None or transferred.next_due_ms > transferred.now_ms:
                    return moved
        raise AssertionError("after 100 transfers there are still due messages to move")

    async def arrived(self, address: str = "") -> list[Record]:
        return list(await self.suite.arrived(self.stage.store, self.sink, address or self.here))

    async def ids(self, address: str = "") -> list[str]:
        return [record.id for record in await self.arrived(address)]


def _ended(record: Record, then: int | None, outcome: str = "delivered") -> Done:
    return Done(record.id, record.revision, record.due_ms, then, outcome)  # type: ignore[arg-type]


class TransferConformance(Bench):
    """The suite for stores that promise to reach a sink exactly once: tests named after docs/guarantees.md.

    Subclass this suite in addition to `StoreConformance`, with the same `make_store`. The other methods read and change
    the destinations from outside the store, as a consumer does.
    """

    has_limit: ClassVar[bool] = True
    """Whether a destination can be full. False skips the tests of full destinations."""

    @abstractmethod
    def make_sink(self, store: Store, *, limit: int) -> Sink:
        """Return a sink that the store reaches exactly once.

        Args:
            store: The open store.
            limit: The most messages that a destination holds; 0 = any number.
        """

    @abstractmethod
    async def arrived(self, store: Store, sink: Sink, address: str) -> Sequence[Record]:
        """Return the records at a destination, in order."""

    @abstractmethod
    async def clear(self, store: Store, sink: Sink, address: str) -> None:
        """Remove everything from a destination, so that it has room."""

    @abstractmethod
    async def spoil(self, store: Store, sink: Sink, address: str) -> None:
        """Make an empty destination refuse every message until `clear`, for example by data of a wrong type."""

    def moves(self, stage: Stage, *, limit: int = 0) -> _Moves:
        """Open a transfer on the store of a stage."""
        if limit and not self.has_limit:
            pytest.skip(f"{stage.store.name} has no destinations that can be full")
        return _Moves(self, stage, limit=limit)

    # --- reach --------------------------------------------------------------------------------------------

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

    # --- S1 to S3 -----------------------------------------------------------------------------------------

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

    # --- S4 to S6 -----------------------------------------------------------------------------------------

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
        moved = await moves.move(settlements=[_ended(moved.series[0], None)], traces=1)
        assert (moved.moved, list(moved.traces)) == (1, [("s", plain)])

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

    # --- S8, S9 -------------------------------------------------------------------------------------------

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

    # --- demand -------------------------------------------------------------------------------------------

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

    # --- L2 -----------------------------------------------------------------------------------------------

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

    # --- Late, pauses -------------------------------------------------------------------------------------

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

    # --- destinations that take nothing -------------------------------------------------------------------

    @staged
    async def test_a_full_destination_takes_no_more_than_its_limit(self, stage: Stage) -> None:
        moves = self.moves(stage, limit=3)
        await moves.stored(*[moves.put(f"m{i}") for i in range(5)], moves.put("other", address=moves.there))
        assert await moves.move_all() == 4
        assert (await moves.ids(), await moves.ids(moves.there)) == (["m0", "m1", "m2"], ["other"])
        (blocked,) = await moves.store.blocked()
        assert (blocked.lane, blocked.address, blocked.messages) == (moves.sink.name, moves.here, 2)
        assert "3" in blocked.reason
        assert {each.state for each in await stage.messages()} == {State.HELD}

    @staged
    async def test_s9_what_waited_for_room_arrives_before_what_came_later(self, stage: Stage) -> None:
        moves = self.moves(stage, limit=3)
        await moves.stored(*[moves.put(f"m{i}") for i in range(5)])
        await moves.move_all()
        await moves.stored(moves.put("m5"), moves.put("m6"))
        seen: list[str] = []
        for _ in range(4):
            seen += await moves.ids()
            await self.clear(stage.store, moves.sink, moves.here)
            stage.move(MOST_WAIT_MS)
            await moves.move_all()
        assert seen == [f"m{i}" for i in range(7)]
        assert list(await moves.store.blocked()) == []
        assert await stage.messages() == []

    @staged
    async def test_s9_what_came_later_does_not_take_the_room_of_what_waits(self, stage: Stage) -> None:
        moves = self.moves(stage, limit=1)
        await moves.stored(moves.put("first"), moves.put("waits"))
        await moves.move_all()
        await self.clear(stage.store, moves.sink, moves.here)
        await moves.stored(moves.put("later"))
        await moves.move()
        assert await moves.ids() == []
        stage.move(MOST_WAIT_MS)
        await moves.move()
        assert await moves.ids() == ["waits"]

    @staged
    async def test_l3_a_flood_for_one_full_destination_holds_up_no_other(self, stage: Stage) -> None:
        moves = self.moves(stage, limit=1)
        for first in range(0, 3000, 500):
            await moves.stored(*[moves.put(f"flood {first + i}") for i in range(500)])
        stage.move(1)
        await moves.stored(moves.put("other", address=moves.there))
        calls = 0
        while not await moves.ids(moves.there):
            await moves.move()
            calls += 1
        assert calls <= 3000 / 500 + 2
        await moves.stored(moves.put("next", address=moves.there))
        await self.clear(stage.store, moves.sink, moves.there)
        await moves.move()
        assert await moves.ids(moves.there) == ["next"]

    @staged
    async def test_l3_a_flood_that_waits_for_room_leaves_half_of_each_call_to_the_others(self, stage: Stage) -> None:
        moves = self.moves(stage, limit=MAX_CLAIM_MESSAGES)
        for first in range(3):
            await moves.stored(*[moves.put(f"flood {first} {i}") for i in range(500)])
        await moves.move_all()
        await moves.stored(*[moves.put(f"other {i}", address=moves.there) for i in range(300)])
        await self.clear(stage.store, moves.sink, moves.here)
        stage.move(MOST_WAIT_MS)
        await moves.move()
        assert len(await moves.ids(moves.there)) >= MAX_CLAIM_MESSAGES // 2

    @staged
    async def test_l5_a_broken_destination_loses_nothing_and_holds_up_no_other(self, stage: Stage) -> None:
        moves = self.moves(stage)
        await self.spoil(stage.store, moves.sink, moves.here)
        await moves.stored(*[moves.put(f"m{i}") for i in range(3)], moves.put("other", address=moves.there))
        assert await moves.move_all() == 1
        assert await moves.ids(moves.there) == ["other"]
        assert len(await stage.messages()) == 3
        (blocked,) = await moves.store.blocked()
        assert (blocked.address, blocked.messages) == (moves.here, 3)
        assert blocked.reason
        await self.clear(stage.store, moves.sink, moves.here)
        stage.move(MOST_WAIT_MS)
        await moves.move_all()
        assert await moves.ids() == ["m0", "m1", "m2"]
        assert list(await moves.store.blocked()) == []

    @staged
    async def test_what_a_destination_takes_or_not_is_told_in_each_answer(self, stage: Stage) -> None:
        moves = self.moves(stage)
        await self.spoil(stage.store, moves.sink, moves.here)
        await moves.stored(moves.put("m"))
        transferred = await moves.move()
        assert transferred.changed[moves.here]
        assert transferred.next_due_ms is not None
        assert transferred.now_ms < transferred.next_due_ms <= transferred.now_ms + MOST_WAIT_MS
        assert (await moves.move()).changed == {}
        for _ in range(10):  # the store waits longer before each new try, up to a limit
            stage.move(transferred.next_due_ms - stage.now)
            transferred = await moves.move()
            assert transferred.changed[moves.here]
            assert transferred.next_due_ms is not None
        assert transferred.next_due_ms == stage.now + MOST_WAIT_MS
        await self.clear(stage.store, moves.sink, moves.here)
        stage.move(MOST_WAIT_MS)
        assert (await moves.move()).changed == {moves.here: ""}

    @pytest.mark.parametrize("kind", ["cancel", "replace", "reschedule", "late"])
    @staged
    async def test_what_waits_for_room_can_be_changed(self, stage: Stage, kind: str) -> None:
        moves = self.moves(stage, limit=1)
        await moves.stored(moves.put("first"), moves.put("m", late=Late.drop("1h")))
        await moves.move_all()
        if kind == "cancel":
            await stage.do(Cancel(stage.op(), "m"))
        elif kind == "replace":
            await moves.stored(moves.put("m", address=moves.there))
        elif kind == "reschedule":
            await stage.do(Reschedule(stage.op(), "m", After(HOUR_MS)))
        stage.move(HOUR_MS + 1)
        if kind == "late":
            assert (await stage.tidy()).expired == 1
        await self.clear(stage.store, moves.sink, moves.here)
        await moves.move_all()
        assert await moves.ids() == (["m"] if kind == "reschedule" else [])
        assert await moves.ids(moves.there) == (["m"] if kind == "replace" else [])
        assert await stage.messages() == []

    @staged
    async def test_l4_what_waits_for_room_is_overdue_and_comes_back_where_nobody_moves(self, stage: Stage) -> None:
        moves = self.moves(stage, limit=1)
        await moves.stored(moves.put("first"), moves.put("m"))
        await moves.move_all()
        due_ms = stage.now
        (state,) = [each for each in (await stage.tidy()).lanes if each.lane == moves.sink.name]
        assert state.oldest_due_ms == due_ms
        assert await stage.claim(lane=moves.sink.name) == []
        stage.move(HOUR_MS)
        claimed = await stage.claimed({moves.sink.name: Demand(9)})
        assert claimed.next_due_ms is None or claimed.next_due_ms > stage.now, "a worker would claim again without end"
        await stage.tidy()
        assert [claim.record.id for claim in await stage.claim(lane=moves.sink.name)] == ["m"]

    # --- series -------------------------------------------------------------------------------------------

    @staged
    async def test_series_an_occurrence_arrives_once_and_the_series_goes_on(self, stage: Stage) -> None:
        moves = self.moves(stage)
        await moves.stored(moves.put("s", rule=RULE, headers={"a": b"b"}), moves.put("m"))
        first = await moves.move()
        (series,) = first.series
        assert (first.moved, series.id, series.envelope.rule) == (1, "s", RULE)
        settlement = _ended(series, stage.now + 60_000)
        for moved in (1, 0):  # the repetition has no effect
            transferred = await moves.move(settlements=[settlement])
            assert (transferred.moved, list(transferred.series)) == (moved, [])
            assert transferred.next_due_ms == stage.now + 60_000
        record = next(each for each in await moves.arrived() if each.id != "m")
        assert record.id == occurrence_id("s", series.due_ms)
        assert (record.envelope.rule, dict(record.envelope.headers)) == (None, {"a": b"b"})
        assert delivery_id(record) == delivery_id(series)
        assert (await stage.record("s")).due_ms == stage.now + 60_000

    @pytest.mark.parametrize("how", ["skipped", "dropped", "dead"])
    @staged
    async def test_series_an_occurrence_that_is_not_to_arrive_does_not(self, stage: Stage, how: str) -> None:
        moves = self.moves(stage)
        await moves.stored(moves.put("s", rule=RULE))
        (series,) = (await moves.move()).series
        then = stage.now + 60_000
        settlement: Settlement = _ended(series, then, how)
        if how == "dead":
            settlement = Dead("s", series.revision, series.due_ms, "late", 0, "why", then)
        await moves.move(settlements=[settlement])
        assert await moves.ids() == []
        assert (await stage.record("s")).due_ms == then
        letters = [(letter.reason, letter.record.last_error) for letter in await stage.dead()]
        assert letters == ([("late", "why")] if how == "dead" else [])

    @staged
    async def test_series_lists_an_occurrence_no_more_that_was_redriven_and_moved(self, stage: Stage) -> None:
        moves = self.moves(stage)
        await moves.stored(moves.put("s", rule=RULE))
        (series,) = (await moves.move()).series
        late = Dead("s", series.revision, series.due_ms, "late", 0, "why", stage.now + 60_000)
        await moves.move(settlements=[late])
        (letter,) = await stage.dead()
        await stage.store.redrive([letter.key])
        assert (await stage.record("s")).live == (series.due_ms,)
        assert (await moves.move()).moved == 1
        assert (await stage.record("s")).live == ()

    @staged
    async def test_series_ends_where_there_is_no_next_time(self, stage: Stage) -> None:
        moves = self.moves(stage)
        await moves.stored(moves.put("s", rule=RULE))
        (series,) = (await moves.move()).series
        assert (await moves.move(settlements=[_ended(series, None)])).moved == 1
        assert await stage.messages() == []

    @pytest.mark.parametrize("change", ["cancel", "replace", "reschedule", "hold"])
    @staged
    async def test_series_that_was_changed_meanwhile_is_not_touched(self, stage: Stage, change: str) -> None:
        moves = self.moves(stage)
        await moves.stored(moves.put("s", rule=RULE))
        (series,) = (await moves.move()).series
        stage.move(1)
        if change == "cancel":
            await stage.do(Cancel(stage.op(), "s"))
        elif change == "replace":
            await moves.stored(replace(moves.put("s", rule=RULE), due=At(series.due_ms)))
        elif change == "reschedule":
            await stage.do(Reschedule(stage.op(), "s", After(0)))
        else:
            await stage.store.pause(moves.sink.name, moves.here)
        before = await stage.messages()
        assert (await moves.move(settlements=[_ended(series, stage.now + 60_000)])).moved == 0
        assert (await stage.messages(), await moves.ids()) == (before, [])

    @staged
    async def test_series_for_a_full_destination_waits_for_room(self, stage: Stage) -> None:
        moves = self.moves(stage, limit=1)
        await moves.stored(moves.put("s", rule=RULE))
        (series,) = (await moves.move()).series
        await moves.stored(moves.put("m"))
        await moves.move()
        assert (await moves.move(settlements=[_ended(series, stage.now + 60_000)])).moved == 0
        assert await moves.ids() == ["m"]
        await self.clear(stage.store, moves.sink, moves.here)
        stage.move(MOST_WAIT_MS)
        (series,) = (await moves.move()).series
        assert (await moves.move(settlements=[_ended(series, stage.now + 60_000)])).moved == 1
        assert await moves.ids() == [occurrence_id("s", series.due_ms)]

    # --- journal ------------------------------------------------------------------------------------------

    @staged
    async def test_journal_says_what_was_moved(self, stage: Stage) -> None:
        with_journal = await stage.with_journal(100)
        moves = self.moves(with_journal)
        await moves.stored(moves.put("m"), moves.put("s", rule=RULE))
        (series,) = (await moves.move()).series
        await moves.move(settlements=[_ended(series, stage.now + 60_000)])
        events = [(entry.event, entry.id) for entry in await with_journal.store.journal()]
        assert events == [("stored", "m"), ("stored", "s"), ("delivered", "m"), ("delivered", "s")]


async def _wake(transfer: Transferring) -> None:
    transfer.wake()


def _without_place(envelope: Envelope) -> object:
    """Return the parts of an envelope that travel to a destination: all but the lane and the address."""
    return (
        *(envelope.id, envelope.type, envelope.encoding, envelope.payload, envelope.key),
        *(dict(envelope.headers), dict(envelope.trace), envelope.version),
    )
