"""`GatheringRules`: rules for the conflict modes that depend on time: earlier, later, debounce and throttle."""

# ruff: noqa: D102 - the name of a test states its rule

from __future__ import annotations

import pytest

from aiodelay.core.values import LEASE_MS, After, At, Cancel, Conflict, Fire, Late, Put, Stored

from .stage import HOUR_MS, Bench, Stage, done, ending, staged

__all__ = ["GatheringRules"]

QUIET_MS, MOST_MS, WINDOW_MS = 1000, 2500, 60_000
DEBOUNCE, BOUNDED = Conflict.debounce("1s"), Conflict.debounce("1s", "2500ms")
THROTTLE, THROTTLE_LAST = Conflict.throttle("1m"), Conflict.throttle("1m", last=True)


class GatheringRules(Bench):
    """The rules for an id that is scheduled again and again."""

    # --- earlier, later -----------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("conflict", "by_ms", "answer"),
        [
            (Conflict.earlier(), -1, "replaced"),
            (Conflict.earlier(), 0, "kept"),
            (Conflict.earlier(), 1, "kept"),
            (Conflict.later(), -1, "kept"),
            (Conflict.later(), 0, "kept"),
            (Conflict.later(), 1, "replaced"),
        ],
    )
    @staged
    async def test_earlier_and_later_compare_due_times(
        self, stage: Stage, conflict: Conflict, by_ms: int, answer: str
    ) -> None:
        stage.needs_conflict(conflict.mode)
        first = await stage.stored(stage.put(due=At(stage.now + HOUR_MS), conflict=conflict, payload=b"old"))
        assert first.answer == "stored"
        second = await stage.stored(stage.put(due=At(stage.now + HOUR_MS + by_ms), conflict=conflict, payload=b"new"))
        record = await stage.record()
        assert second.answer == answer
        assert record.envelope.payload == (b"new" if answer == "replaced" else b"old")
        assert record.due_ms == second.due_ms == stage.now + HOUR_MS + (by_ms if answer == "replaced" else 0)

    @pytest.mark.parametrize("conflict", [Conflict.earlier(), Conflict.later()], ids=lambda each: each.mode)
    @pytest.mark.parametrize("by_ms", [-1, 1])
    @staged
    async def test_a_message_in_flight_gets_a_next_revision(self, stage: Stage, conflict: Conflict, by_ms: int) -> None:
        stage.needs_conflict(conflict.mode)
        await stage.stored(stage.put())
        claim = await stage.claim_one()
        outcome = await stage.stored(stage.put(due=At(claim.record.due_ms + by_ms), conflict=conflict))
        assert (outcome.answer, outcome.is_older_in_flight) == ("replaced", True)
        stage.move(1)
        assert (await stage.claim_one()).record.revision == outcome.revision

    # --- debounce -----------------------------------------------------------------------------------------

    @staged
    async def test_a_burst_ends_in_one_delivery_of_the_newest(self, stage: Stage) -> None:
        stage.needs_conflict("debounce")
        for n in range(5):
            await stage.stored(self._debounced(stage, payload=b"%d" % n))
            stage.move(QUIET_MS - 1)
            assert await stage.claim() == []
        stage.move(1)
        claim = await stage.claim_one()
        assert claim.record.envelope.payload == b"4"
        await stage.end(done(claim))
        stage.move(HOUR_MS)
        assert await stage.claim() == []

    @staged
    async def test_a_burst_ends_after_its_longest_wait(self, stage: Stage) -> None:
        stage.needs_conflict("debounce")
        begun = stage.now
        for n in range(4):
            outcome = await stage.stored(self._debounced(stage, BOUNDED, payload=b"%d" % n))
            assert outcome.due_ms == min(stage.now + QUIET_MS, begun + MOST_MS)
            stage.move(800)
        assert (await stage.claim_one()).record.envelope.payload == b"3"

    @staged
    async def test_a_step_back_of_the_clock_begins_the_longest_wait_again(self, stage: Stage) -> None:
        stage.needs_conflict("debounce")
        await stage.stored(self._debounced(stage, BOUNDED))
        stage.move(400)
        stage.step_back(HOUR_MS)
        begun = stage.now
        for n in range(4):
            outcome = await stage.stored(self._debounced(stage, BOUNDED, payload=b"%d" % n))
            assert outcome.due_ms == min(stage.now + QUIET_MS, begun + MOST_MS)
            assert (await stage.record()).debounced_ms == begun
            stage.move(800)
        assert (await stage.claim_one()).record.envelope.payload == b"3"

    @pytest.mark.parametrize("after", ["in flight", "again", "lapse", "done", "dead", "cancelled"])
    @staged
    async def test_another_burst_begins_once_the_delivery_has_begun(self, stage: Stage, after: str) -> None:
        stage.needs_conflict("debounce")
        await stage.stored(self._debounced(stage, BOUNDED))
        stage.move(QUIET_MS)
        if after == "cancelled":
            stage.needs_verdict()
            await stage.do(Cancel(stage.op(), "m"))
        else:
            claim = await stage.claim_one()
            if after == "lapse":
                stage.move(LEASE_MS)
                await stage.tidy()
            elif after != "in flight":
                await stage.end(ending(after, claim, due_ms=stage.now + HOUR_MS))
        stage.move(MOST_MS)
        outcome = await stage.stored(self._debounced(stage, BOUNDED, payload=b"next"))
        assert outcome.due_ms == stage.now + QUIET_MS
        assert outcome.is_older_in_flight == (after == "in flight")
        record = await stage.record()
        assert (record.debounced_ms, record.attempt, record.lapses) == (stage.now, 0, 0)

    @staged
    async def test_a_debounced_message_replaces_one_of_another_mode(self, stage: Stage) -> None:
        stage.needs_conflict("debounce")
        await stage.stored(stage.put(due=At(stage.now + HOUR_MS)))
        stage.move(100)
        assert (await stage.stored(self._debounced(stage, BOUNDED))).due_ms == stage.now + QUIET_MS
        assert (await stage.record()).debounced_ms == stage.now

    @staged
    async def test_a_plain_put_ends_a_burst(self, stage: Stage) -> None:
        stage.needs_conflict("debounce")
        await stage.stored(self._debounced(stage, BOUNDED))
        await stage.stored(stage.put(due=At(stage.now + HOUR_MS)))
        assert (await stage.record()).debounced_ms is None

    @staged
    async def test_lateness_counts_from_the_due_time_of_the_burst(self, stage: Stage) -> None:
        stage.needs_conflict("debounce")
        for _ in range(4):
            await stage.stored(self._debounced(stage, BOUNDED, late=Late.drop("5s")))
            stage.move(800)
        record = await stage.record()
        assert record.expires_ms == record.due_ms + 5000

    @staged
    async def test_a_repeated_debounced_put_changes_nothing(self, stage: Stage) -> None:
        stage.needs_conflict("debounce")
        await stage.stored(self._debounced(stage))
        put = self._debounced(stage)
        first = await stage.do(put)
        stage.move(100)
        assert await stage.do(put) == first

    @staticmethod
    def _debounced(
        stage: Stage,
        conflict: Conflict = DEBOUNCE,
        *,
        payload: bytes = b"payload",
        late: Late = Late.deliver(),  # noqa: B008 - frozen
    ) -> Put:
        return stage.put(due=After(conflict.quiet_ms or 0), conflict=conflict, payload=payload, late=late)

    # --- throttle -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("end", ["nothing", "done", "dead", "cancelled"])
    @staged
    async def test_the_first_of_a_window_stays(self, stage: Stage, end: str) -> None:
        stage.needs_conflict("throttle")
        first = await stage.stored(stage.put(conflict=THROTTLE, payload=b"first"))
        await self._ended(stage, end)
        stage.move(WINDOW_MS - 1)
        await stage.tidy()
        kept = await stage.do(stage.put(conflict=THROTTLE, payload=b"second"))
        if end == "nothing":
            assert kept == Stored("kept", first.revision, first.due_ms)
        else:
            assert kept == Stored("kept", 0, first.due_ms)
            assert await stage.get() is None
        stage.move(1)
        outcome = await stage.stored(stage.put(conflict=THROTTLE, payload=b"third"))
        assert outcome.answer == ("replaced" if end == "nothing" else "stored")
        assert (await stage.record()).envelope.payload == b"third"

    @staged
    async def test_the_first_of_a_window_stays_while_it_is_in_flight(self, stage: Stage) -> None:
        stage.needs_conflict("throttle")
        first = await stage.stored(stage.put(conflict=THROTTLE))
        await stage.claim_one()
        outcome = await stage.do(stage.put(conflict=THROTTLE))
        assert outcome == Stored("in_flight", first.revision, first.due_ms)

    @pytest.mark.parametrize("end", ["done", "dead", "cancelled", "in flight"])
    @staged
    async def test_the_last_of_a_window_is_delivered_at_its_end(self, stage: Stage, end: str) -> None:
        stage.needs_conflict("throttle_last")
        begun = stage.now
        await stage.stored(stage.put(conflict=THROTTLE_LAST))
        await self._ended(stage, end)
        for n in range(3):
            stage.move(1000)
            outcome = await stage.stored(stage.put(conflict=THROTTLE_LAST, payload=b"%d" % n))
            assert outcome.due_ms == begun + WINDOW_MS
        stage.move(begun + WINDOW_MS - stage.now)
        claim = await stage.claim_one()
        assert claim.record.envelope.payload == b"2"
        await stage.end(done(claim))
        # The last message is the first of the next window.
        stage.move(1000)
        outcome = await stage.stored(stage.put(conflict=THROTTLE_LAST))
        assert outcome.due_ms == begun + 2 * WINDOW_MS

    @pytest.mark.parametrize("end", ["cancelled", "done", "dead", "again", "in flight"])
    @staged
    async def test_the_end_of_a_window_stays_if_its_last_message_ends_early(self, stage: Stage, end: str) -> None:
        stage.needs_conflict("throttle_last")
        begun = stage.now
        await stage.stored(stage.put(conflict=THROTTLE_LAST))
        await self._ended(stage, "done")
        for n in range(3):
            stage.move(1000)
            outcome = await stage.stored(stage.put(conflict=THROTTLE_LAST, payload=b"%d" % n))
            assert outcome.due_ms == begun + WINDOW_MS
            if end != "cancelled":
                await stage.do(Fire(stage.op(), "m"))
            await self._ended(stage, end)
        stage.move(1000)
        await stage.stored(stage.put(conflict=THROTTLE_LAST, payload=b"last"))
        stage.move(begun + WINDOW_MS - stage.now - 1)
        assert await stage.claim() == []
        stage.move(1)
        claim = await stage.claim_one()
        assert claim.record.envelope.payload == b"last"
        await stage.end(done(claim))
        stage.move(1000)
        outcome = await stage.stored(stage.put(conflict=THROTTLE_LAST))
        assert outcome.due_ms == begun + 2 * WINDOW_MS

    @staged
    async def test_a_first_message_that_waits_for_a_retry_becomes_the_last(self, stage: Stage) -> None:
        stage.needs_conflict("throttle_last")
        begun = stage.now
        await stage.stored(stage.put(conflict=THROTTLE_LAST, payload=b"first"))
        await stage.end(ending("again", await stage.claim_one(), due_ms=begun + 2000))
        stage.move(1000)
        outcome = await stage.stored(stage.put(conflict=THROTTLE_LAST, payload=b"second"))
        assert (outcome.answer, outcome.due_ms) == ("replaced", begun + WINDOW_MS)
        record = await stage.record()
        assert (record.envelope.payload, record.attempt) == (b"second", 0)

    @staged
    async def test_a_pending_first_message_takes_newer_contents(self, stage: Stage) -> None:
        stage.needs_conflict("throttle_last")
        due = At(stage.now + 5000)
        await stage.stored(stage.put(due=due, conflict=THROTTLE_LAST, payload=b"first"))
        stage.move(1000)
        outcome = await stage.stored(stage.put(due=At(stage.now + 5000), conflict=THROTTLE_LAST, payload=b"second"))
        assert (outcome.answer, outcome.due_ms) == ("replaced", due.ms)
        assert (await stage.record()).envelope.payload == b"second"

    @pytest.mark.parametrize("conflict", [THROTTLE, THROTTLE_LAST], ids=lambda each: each.mode)
    @pytest.mark.parametrize("end", ["nothing", "done", "in flight"])
    @staged
    async def test_a_step_back_of_the_clock_begins_another_window(
        self, stage: Stage, conflict: Conflict, end: str
    ) -> None:
        stage.needs_conflict(conflict.mode)
        await stage.stored(stage.put(conflict=conflict))
        await self._ended(stage, end)
        stage.step_back(HOUR_MS)
        begun = stage.now
        assert (await stage.stored(stage.put(conflict=conflict))).due_ms == begun
        await stage.end(done(await stage.claim_one()))
        for _ in range(3):
            stage.move(1000)
            outcome = await stage.stored(stage.put(conflict=conflict))
            assert outcome.due_ms == (begun if conflict == THROTTLE else begun + WINDOW_MS)
        stage.move(begun + WINDOW_MS - stage.now - 1)
        assert await stage.claim() == []

    @pytest.mark.parametrize("version", [5, 1 << 62])
    @staged
    async def test_a_version_of_newer_is_no_window(self, stage: Stage, version: int) -> None:
        stage.needs_conflict("throttle")
        await stage.stored(stage.put(conflict=stage.versioned(version)))
        outcome = await stage.stored(stage.put(due=At(stage.now + 5), conflict=THROTTLE))
        assert outcome.due_ms == stage.now + 5

    @staticmethod
    async def _ended(stage: Stage, end: str) -> None:
        if end == "cancelled":
            stage.needs_verdict()
            await stage.do(Cancel(stage.op(), "m"))
        elif end != "nothing":
            claim = await stage.claim_one()
            if end != "in flight":
                await stage.end(ending(end, claim, due_ms=stage.now))

    # --- several in one batch -----------------------------------------------------------------------------

    @staged
    async def test_the_commands_of_a_batch_are_carried_out_in_order(self, stage: Stage) -> None:
        stage.needs_conflict("debounce")
        puts = [self._debounced(stage, payload=b"%d" % n) for n in range(3)]
        puts += [stage.put("n", conflict=THROTTLE, payload=b"%d" % n) for n in range(3)]
        outcomes = await stage.store.apply(puts)
        answers = [each.answer for each in outcomes if isinstance(each, Stored)]
        assert answers == ["stored", "replaced", "replaced", "stored", "kept", "kept"]
        assert (await stage.record()).envelope.payload == b"2"
        assert (await stage.record("n")).envelope.payload == b"0"
