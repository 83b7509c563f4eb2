"""`SeriesTransferRules`: rules for recurring messages that a store moves into a sink."""

# ruff: noqa: D102 - the name of a test states its rule

from __future__ import annotations

import pytest
from msgspec.structs import replace

from aiodelay.core.transitions import delivery_id, occurrence_id
from aiodelay.core.values import After, Again, At, Cancel, Dead, Reschedule, Settlement

from .stage import Stage, staged
from .transfer_bench import MOST_WAIT_MS, RULE, TransferBench, ended

__all__ = ["SeriesTransferRules"]


class SeriesTransferRules(TransferBench):
    """An occurrence arrives once, and its series goes on."""

    @staged
    async def test_series_an_occurrence_arrives_once_and_the_series_goes_on(self, stage: Stage) -> None:
        moves = self.moves(stage)
        await moves.stored(moves.put("s", rule=RULE, headers={"a": b"b"}), moves.put("m"))
        first = await moves.move()
        (series,) = first.series
        assert (first.moved, series.id, series.envelope.rule) == (1, "s", RULE)
        settlement = ended(series, stage.now + 60_000)
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
        settlement: Settlement = ended(series, then, how)
        if how == "dead":
            settlement = Dead("s", series.revision, series.due_ms, "late", 0, "why", then)
        await moves.move(settlements=[settlement])
        assert await moves.ids() == []
        assert (await stage.record("s")).due_ms == then
        letters = [(letter.reason, letter.record.last_error) for letter in await stage.dead()]
        assert letters == ([("late", "why")] if how == "dead" else [])

    @staged
    async def test_l5_series_that_a_process_cannot_read_waits_for_another(self, stage: Stage) -> None:
        moves = self.moves(stage)
        await moves.stored(moves.put("s", rule=RULE), moves.put("m"))
        (series,) = (await moves.move()).series
        waits = Again("s", series.revision, series.due_ms, stage.now + 5_000, 0, "no such zone")
        for _ in range(2):  # the repetition has no effect
            assert not (await moves.move(settlements=[waits])).series
        record = await stage.record("s")
        assert (record.due_ms, record.attempt, record.last_error) == (series.due_ms, 0, "no such zone")
        assert record.envelope == series.envelope
        assert await moves.ids() == ["m"]
        stage.move(4_999)
        assert not (await moves.move()).series
        stage.move(1)
        (again,) = (await moves.move()).series
        assert (await moves.move(settlements=[ended(again, stage.now + 60_000)])).moved == 1
        assert (await stage.record("s")).last_error is None

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
        assert (await moves.move(settlements=[ended(series, None)])).moved == 1
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
        assert (await moves.move(settlements=[ended(series, stage.now + 60_000)])).moved == 0
        assert (await stage.messages(), await moves.ids()) == (before, [])

    @staged
    async def test_series_for_a_full_destination_waits_for_room(self, stage: Stage) -> None:
        moves = self.moves(stage, limit=1)
        await moves.stored(moves.put("s", rule=RULE))
        (series,) = (await moves.move()).series
        await moves.stored(moves.put("m"))
        await moves.move()
        assert (await moves.move(settlements=[ended(series, stage.now + 60_000)])).moved == 0
        assert await moves.ids() == ["m"]
        await self.clear(stage.store, moves.sink, moves.here)
        stage.move(MOST_WAIT_MS)
        (series,) = (await moves.move()).series
        assert (await moves.move(settlements=[ended(series, stage.now + 60_000)])).moved == 1
        assert await moves.ids() == [occurrence_id("s", series.due_ms)]
