"""`BlockedRules`: rules for the destinations of a transfer that are full or broken."""

# ruff: noqa: D102 - the name of a test states its rule

from __future__ import annotations

import pytest

from aiodelay.core.values import MAX_CLAIM_MESSAGES, After, Cancel, Demand, Late, Reschedule, State

from .stage import HOUR_MS, Stage, staged
from .transfer_bench import MOST_WAIT_MS, TransferBench

__all__ = ["BlockedRules"]


class BlockedRules(TransferBench):
    """A destination that takes nothing loses no message and holds up no other destination."""

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
